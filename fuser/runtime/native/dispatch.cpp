// Signatures, guards and the table. Everything here runs under the GIL.
#include "dispatch.h"

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Device.h>

#include <cstring>

// Declared here alone: its own header brings in all of ATen.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device);
}

namespace fuser {

namespace {

PyObject* parameter_class = nullptr;

enum Token : uint64_t { TupleOf = 1, ListOf, DictOf, OrderedDictOf, NamedTupleOf, None, Bool, Int, Float, Text, Object, TensorOf, Device };

PyObject* ordered_dict_class() {
  static PyObject* cls = [] {
    Ref module(PyImport_ImportModule("collections"));
    return module ? PyObject_GetAttrString(module.get(), "OrderedDict") : nullptr;
  }();
  return cls;
}

// Objects that never change, so that their address stands for their value.
bool counts_by_address(PyObject* object) {
  static PyObject* enum_class = [] {
    Ref module(PyImport_ImportModule("enum"));
    return module ? PyObject_GetAttrString(module.get(), "Enum") : nullptr;
  }();
  if (PyType_Check(object) || PyCFunction_Check(object) || object == Py_Ellipsis) return true;
  const char* name = Py_TYPE(object)->tp_name;
  for (const char* known : {"torch.dtype", "torch.layout", "torch.memory_format"})
    if (std::strcmp(name, known) == 0) return true;
  return enum_class != nullptr && PyObject_IsInstance(object, enum_class) == 1;
}

}  // namespace

void set_parameter_class(PyObject* cls) { parameter_class = Py_NewRef(cls); }

void Call::add_context() {
  const auto tls = c10::impl::tls_local_dispatch_key_set();
  words.push_back(tls.included_.raw_repr());
  words.push_back(tls.excluded_.raw_repr());
  const uint64_t flags = (c10::GradMode::is_enabled() ? 1 : 0) | (c10::InferenceMode::is_enabled() ? 2 : 0) |
                         (at::impl::PythonTorchFunctionTLS::stack_len() > 0 ? 4 : 0) |
                         (c10::impl::TorchDispatchModeTLS::stack_len() > 0 ? 8 : 0) |
                         (at::globalContext().deterministicAlgorithms() ? 16 : 0);
  words.push_back(flags | static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) << 8 |
                  static_cast<uint64_t>(at::autocast::get_autocast_dtype(at::kCPU)) << 16);
}

void Call::add_tensor(PyObject* object, bool captured) {
  const bool is_parameter = reinterpret_cast<PyObject*>(Py_TYPE(object)) == parameter_class;
  const bool plain = is_parameter || reinterpret_cast<PyObject*>(Py_TYPE(object)) == tensor_class();
  const at::Tensor& t = unpack(object);
  const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  const c10::DispatchKeySet keys = impl->key_set();
  const bool wrapped = !plain || impl->has_symbolic_sizes_strides() || keys.has(c10::DispatchKey::Python) ||
                       keys.has(c10::DispatchKey::FuncTorchBatched) || keys.has(c10::DispatchKey::Batched) || keys.has(c10::DispatchKey::FuncTorchGradWrapper) ||
                       impl->layout() != at::kStrided;
  // A subclass, a wrapper or an exotic layout: the slow path decides, and decides alike for all of its kind.
  words.push_back(TensorOf | (is_parameter && !captured ? 1u << 8 : 0) | (wrapped ? 1u << 9 : 0));
  words.push_back(keys.raw_repr());
  if (!plain) words.push_back(reinterpret_cast<uint64_t>(Py_TYPE(object)));
  if (wrapped) return;
  const bool wants_gradient = c10::GradMode::is_enabled() && t.requires_grad();
  const bool dual = impl->autograd_meta() != nullptr && t._fw_grad(0).defined();
  words.push_back(static_cast<uint64_t>(t.scalar_type()) | static_cast<uint64_t>(wants_gradient) << 8 |
                  static_cast<uint64_t>(dual) << 9 | static_cast<uint64_t>(t.dim()) << 16 |
                  static_cast<uint64_t>(static_cast<uint8_t>(t.device().type())) << 32 |
                  static_cast<uint64_t>(static_cast<uint8_t>(t.device().index())) << 40);
  for (const int64_t n : t.sizes()) words.push_back(n);
  for (const int64_t s : t.strides()) words.push_back(s);
}

// False (with `unsupported` set) for an object whose later changes nobody would notice.
bool Call::add(PyObject* object, int depth) {
  PyTypeObject* type = Py_TYPE(object);
  if (is_tensor(object)) {
    add_tensor(object, false);
    tensors.push_back(object);
  } else if (object == Py_None) {
    words.push_back(None);
  } else if (PyBool_Check(object)) {
    words.push_back(Bool | (object == Py_True ? 1u << 8 : 0));
  } else if (PyLong_CheckExact(object)) {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow) { unsupported = "an integer beyond 64 bits"; return false; }
    words.push_back(Int);
    words.push_back(value);
  } else if (PyFloat_CheckExact(object)) {
    const double value = PyFloat_AS_DOUBLE(object);
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    words.push_back(Float);
    words.push_back(bits);
  } else if (PyUnicode_CheckExact(object)) {
    Py_ssize_t size;
    const char* data = PyUnicode_AsUTF8AndSize(object, &size);
    if (data == nullptr) { PyErr_Clear(); unsupported = "a string that is not Unicode text"; return false; }
    words.push_back(Text | static_cast<uint64_t>(size) << 8);
    const size_t start = words.size();
    words.resize(start + (size + 7) / 8, 0);
    std::memcpy(words.data() + start, data, size);
  } else if (THPDevice_Check(object)) {
    const at::Device device = reinterpret_cast<THPDevice*>(object)->device;
    words.push_back(Device | static_cast<uint64_t>(static_cast<uint8_t>(device.type())) << 8 |
                    static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 16);
  } else if (depth > 32) {
    unsupported = "arguments nested more than 32 deep";
    return false;
  } else if (PyTuple_Check(object) || PyList_CheckExact(object)) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
    if (PyTuple_Check(object) && !PyTuple_CheckExact(object)) {
      if (!PyObject_HasAttrString(object, "_fields")) {
        unsupported = std::string("an argument of type ") + type->tp_name;
        return false;
      }
      words.push_back(NamedTupleOf | static_cast<uint64_t>(size) << 8);
      words.push_back(reinterpret_cast<uint64_t>(type));
      kept.push_back(reinterpret_cast<PyObject*>(type));
    } else {
      words.push_back((PyTuple_Check(object) ? TupleOf : ListOf) | static_cast<uint64_t>(size) << 8);
    }
    for (Py_ssize_t i = 0; i < size; ++i)
      if (!add(PySequence_Fast_GET_ITEM(object, i), depth + 1)) return false;
  } else if (PyDict_CheckExact(object) || reinterpret_cast<PyObject*>(type) == ordered_dict_class()) {
    words.push_back((PyDict_CheckExact(object) ? DictOf : OrderedDictOf) | static_cast<uint64_t>(PyDict_GET_SIZE(object)) << 8);
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, &key, &value))
      if (!add(key, depth + 1) || !add(value, depth + 1)) return false;
  } else if (counts_by_address(object)) {
    words.push_back(Object);
    words.push_back(reinterpret_cast<uint64_t>(object));
    kept.push_back(object);
  } else {
    unsupported = std::string("an argument of type ") + type->tp_name;
    return false;
  }
  return true;
}

bool Guard::holds() const {
  PyObject* c = container.get();
  switch (kind) {
    case Empty: return PyDict_Check(c) ? PyDict_GET_SIZE(c) == 0 : PyObject_Size(c) == 0;
    case Cell: return PyCell_GET(c) == values[0].get();
    case Item: return PyDict_GetItemWithError(c, keys[0].get()) == values[0].get();
    case Attribute: {
      PyObject* value = PyObject_GetAttr(c, keys[0].get());
      if (value == nullptr) PyErr_Clear();
      Py_XDECREF(value);
      return value == values[0].get();
    }
    case Items: break;
  }
  const Py_ssize_t count = static_cast<Py_ssize_t>(values.size());
  if (PyList_Check(c)) {
    if (PyList_GET_SIZE(c) != count) return false;
    for (Py_ssize_t i = 0; i < count; ++i)
      if (PyList_GET_ITEM(c, i) != values[i].get()) return false;
    return true;
  }
  if (PyDict_GET_SIZE(c) != count) return false;
  PyObject *key, *value;
  Py_ssize_t position = 0, i = 0;
  while (PyDict_Next(c, &position, &key, &value)) {
    if (i >= count || value != values[i].get() || key != keys[i].get()) return false;
    ++i;
  }
  return i == count;
}

std::shared_ptr<Entry> Table::find(std::string_view signature) {
  if (latest_ == nullptr || latest_->first != signature) {
    const auto found = entries_.find(signature);
    if (found == entries_.end()) return nullptr;
    latest_ = &*found;
  }
  latest_->second->last_used = ++clock_;
  return latest_->second;
}

void Table::add(std::string signature, std::shared_ptr<Entry> entry) {
  entry->last_used = ++clock_;
  latest_ = nullptr;
  if (entries_.size() >= capacity_ && entries_.find(signature) == entries_.end()) {
    auto oldest = entries_.begin();
    for (auto i = entries_.begin(); i != entries_.end(); ++i)
      if (i->second->last_used < oldest->second->last_used) oldest = i;
    if (oldest != entries_.end()) entries_.erase(oldest);
  }
  entries_[std::move(signature)] = std::move(entry);
}

Template read_template(PyObject* item, size_t results) {
  static const char* const kinds[] = {"tensor", "tuple", "list", "dict", "const", "call"};
  TORCH_CHECK_VALUE(PyTuple_Check(item) && PyTuple_GET_SIZE(item) >= 2, "a result's structure is a tuple (kind, content)");
  const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(item, 0));
  if (name == nullptr) throw PythonError();
  PyObject* content = PyTuple_GET_ITEM(item, 1);
  Template t;
  int kind = 0;
  while (kind < 6 && std::strcmp(name, kinds[kind]) != 0) ++kind;
  TORCH_CHECK_VALUE(kind < 6, "a result's structure has unknown kind ", name);
  t.kind = static_cast<Template::Kind>(kind);
  if (t.kind == Template::Tensor) {
    t.index = PyLong_AsSsize_t(content);
    if (PyErr_Occurred()) throw PythonError();
    TORCH_CHECK_VALUE(t.index >= 0 && static_cast<size_t>(t.index) < results, "the plan has no result ", t.index);
    return t;
  }
  if (t.kind == Template::Constant || t.kind == Template::Call) t.object = Ref::borrow(content);
  if (t.kind == Template::Constant) return t;
  if (t.kind == Template::Call) {
    TORCH_CHECK_VALUE(PyTuple_GET_SIZE(item) == 3, "(\"call\", callable, children) was expected");
    content = PyTuple_GET_ITEM(item, 2);
  }
  TORCH_CHECK_VALUE(PyList_Check(content), "a result's children must be a list");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(content); ++i) {
    PyObject* child = PyList_GET_ITEM(content, i);
    if (t.kind == Template::Dict) {
      TORCH_CHECK_VALUE(PyTuple_Check(child) && PyTuple_GET_SIZE(child) == 2, "a dict's children must be pairs");
      t.keys.push_back(Ref::borrow(PyTuple_GET_ITEM(child, 0)));
      child = PyTuple_GET_ITEM(child, 1);
    }
    t.children.push_back(read_template(child, results));
  }
  return t;
}

}  // namespace fuser
