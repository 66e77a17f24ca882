// Reading a plan's specification, which Python gives as nested tuples, lists and dicts.
#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>
#include <pthread.h>
#include <torch/csrc/Dtype.h>

#include "plan.h"

namespace fuser {

namespace {

PyObject* item_of(PyObject* sequence, Py_ssize_t i) {
  TORCH_CHECK_VALUE(PyTuple_Check(sequence) || PyList_Check(sequence), "a plan's parts are tuples or lists");
  TORCH_CHECK_VALUE(i < PySequence_Fast_GET_SIZE(sequence), "a part of the plan is too short");
  return PySequence_Fast_GET_ITEM(sequence, i);
}

Py_ssize_t length_of(PyObject* sequence) {
  TORCH_CHECK_VALUE(PyTuple_Check(sequence) || PyList_Check(sequence), "a plan's parts are tuples or lists");
  return PySequence_Fast_GET_SIZE(sequence);
}

int64_t integer(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw PythonError();
  return value;
}

void* address(PyObject* object) {
  void* value = PyLong_AsVoidPtr(object);
  if (PyErr_Occurred()) throw PythonError();
  TORCH_CHECK_VALUE(value != nullptr, "a kernel's address is 0");
  return value;
}

size_t size(PyObject* object, const char* what) {
  const int64_t value = integer(object);
  TORCH_CHECK_VALUE(value >= 0, what, " can't be negative, got ", value);
  return static_cast<size_t>(value);
}

std::string text(PyObject* object) {
  Py_ssize_t size;
  const char* data = PyUnicode_AsUTF8AndSize(object, &size);
  if (data == nullptr) throw PythonError();
  return std::string(data, size);
}

std::vector<int64_t> integers(PyObject* sequence) {
  std::vector<int64_t> values;
  for (Py_ssize_t i = 0; i < length_of(sequence); ++i) values.push_back(integer(item_of(sequence, i)));
  return values;
}

at::ScalarType dtype(PyObject* object) {
  TORCH_CHECK_VALUE(THPDtype_Check(object), "a value's dtype must be a torch.dtype");
  return reinterpret_cast<THPDtype*>(object)->scalar_type;
}

PyObject* field(PyObject* spec, const char* name) {
  PyObject* value = PyDict_Check(spec) ? PyDict_GetItemString(spec, name) : nullptr;
  TORCH_CHECK_VALUE(value != nullptr, "the plan has no ", name);
  return value;
}

size_t span_of(const Value& v) {
  int64_t last = 0;
  for (size_t i = 0; i < v.sizes.size(); ++i) {
    if (v.sizes[i] == 0) return 0;
    last += (v.sizes[i] - 1) * v.strides[i];
  }
  return (last + 1) * c10::elementSize(v.dtype);
}

std::atomic<bool> forked{false};

}  // namespace

int thread_count() {
  // libgomp's threads do not survive a fork, and waiting for them would hang.
  if (forked.load(std::memory_order_relaxed) || at::in_parallel_region()) return 1;
  return at::get_num_threads();
}

Plan::Plan(PyObject* spec, std::shared_ptr<PackStore> packs, std::shared_ptr<ArenaPool> arenas)
    : packs_(std::move(packs)), arenas_(std::move(arenas)) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });
  (void)registered;
  inputs = size(field(spec, "inputs"), "the number of inputs");
  arena_bytes_ = size(field(spec, "arena_bytes"), "an arena's size");
  release_gil_ = PyObject_IsTrue(field(spec, "release_gil")) == 1;
  PyObject* list = field(spec, "values");
  for (Py_ssize_t i = 0; i < length_of(list); ++i) read_value(item_of(list, i));
  list = field(spec, "steps");
  for (Py_ssize_t i = 0; i < length_of(list); ++i) read_step(item_of(list, i));
  list = field(spec, "outputs");
  for (Py_ssize_t i = 0; i < length_of(list); ++i) outputs.push_back(value_id(item_of(list, i)));
  check_order();
  find_releases();
}

int Plan::value_id(PyObject* item) const {
  const int64_t id = integer(item);
  TORCH_CHECK_VALUE(id >= 0 && id < static_cast<int64_t>(values.size()), "the plan has no value ", id);
  return static_cast<int>(id);
}

void Plan::read_value(PyObject* item) {
  const std::string kind = text(item_of(item, 0));
  Value v;
  v.root = static_cast<int>(values.size());
  auto shape = [&](Py_ssize_t from) {
    v.sizes = integers(item_of(item, from));
    v.strides = integers(item_of(item, from + 1));
    TORCH_CHECK_VALUE(v.sizes.size() == v.strides.size(), "a value has ", v.sizes.size(), " sizes and ", v.strides.size(), " strides");
    for (int64_t n : v.sizes) TORCH_CHECK_VALUE(n >= 0, "a value has the negative size ", n);
  };
  if (kind == "input") {
    v.kind = Value::Input;
    v.index = integer(item_of(item, 1));
    TORCH_CHECK_VALUE(v.index >= 0 && v.index < static_cast<int64_t>(inputs), "the plan has no input ", v.index);
    shape(2);
    v.dtype = dtype(item_of(item, 4));
  } else if (kind == "constant") {
    v.kind = Value::Constant;
    TORCH_CHECK_VALUE(is_tensor(item_of(item, 1)), "a constant must be a tensor");
    v.constant = unpack(item_of(item, 1));
    v.sizes = v.constant.sizes().vec();
    v.strides = v.constant.strides().vec();
    v.dtype = v.constant.scalar_type();
  } else if (kind == "arena") {
    v.kind = Value::Arena;
    v.offset = integer(item_of(item, 1));
    shape(2);
    v.dtype = dtype(item_of(item, 4));
    TORCH_CHECK_VALUE(v.offset >= 0 && v.offset + span_of(v) <= arena_bytes_, "a value does not fit the arena");
  } else if (kind == "fresh" || kind == "aten") {
    v.kind = kind == "fresh" ? Value::Fresh : Value::Aten;
    shape(1);
    v.dtype = dtype(item_of(item, 3));
  } else if (kind == "view") {
    v.kind = Value::View;
    const Value& base = values[value_id(item_of(item, 1))];
    TORCH_CHECK_VALUE(base.kind != Value::Packed_, "a packed weight has no views");
    v.root = base.root;
    v.dtype = base.dtype;
    v.elements = base.elements + integer(item_of(item, 2));
    v.offset = v.elements * static_cast<int64_t>(c10::elementSize(v.dtype));
    shape(3);
  } else if (kind == "packed") {
    v.kind = Value::Packed_;
    v.slot = packs_->slot(text(item_of(item, 1)));
    v.nbytes = size(item_of(item, 2), "a packed weight's size");
  } else {
    TORCH_CHECK_VALUE(false, "a value of unknown kind ", kind);
  }
  values.push_back(std::move(v));
}

void Plan::read_step(PyObject* item) {
  const std::string kind = text(item_of(item, 0));
  Step step;
  auto ids = [&](Py_ssize_t at) {
    std::vector<int> found;
    for (Py_ssize_t i = 0; i < length_of(item_of(item, at)); ++i) found.push_back(value_id(item_of(item_of(item, at), i)));
    return found;
  };
  auto outs = [&](Py_ssize_t at) {
    for (int64_t out : integers(item_of(item, at))) {
      TORCH_CHECK_VALUE(out == -1 || (out >= 0 && out < static_cast<int64_t>(values.size()) && values[out].kind == Value::Aten),
                        "value ", out, " can't be the result of an ATen step");
      step.outs.push_back(static_cast<int>(out));
    }
  };
  if (kind == "kernel") {
    step.kind = Step::Kernel_;
    step.name = text(item_of(item, 1));
    step.kernel = reinterpret_cast<Kernel>(address(item_of(item, 2)));
    step.values = ids(3);
    step.arguments = integers(item_of(item, 4));
  } else if (kind == "pack") {
    step.kind = Step::Pack;
    step.name = text(item_of(item, 1));
    step.kernel = reinterpret_cast<Kernel>(address(item_of(item, 2)));
    step.values = {value_id(item_of(item, 3)), value_id(item_of(item, 4))};
    TORCH_CHECK_VALUE(values[step.values[1]].kind == Value::Packed_, "a pack step writes a packed weight");
    step.arguments = integers(item_of(item, 5));
    step.span = span_of(values[step.values[0]]);
  } else if (kind == "aten") {
    step.kind = Step::Aten;
    step.name = text(item_of(item, 1));
    const std::string overload = text(item_of(item, 2));
    step.op = c10::Dispatcher::singleton().findSchema({step.name, overload});
    TORCH_CHECK_VALUE(step.op.has_value(), "there is no operator ", step.name, ".", overload);
    const auto& arguments = step.op->schema().arguments();
    PyObject* given = item_of(item, 3);
    TORCH_CHECK_VALUE(length_of(given) == static_cast<Py_ssize_t>(arguments.size()), step.name, " takes ", arguments.size(), " arguments");
    for (Py_ssize_t i = 0; i < length_of(given); ++i)
      step.call.push_back(read_argument(item_of(given, i), arguments[i].real_type(), step.name, arguments[i].name()));
    outs(4);
    step.below_autograd = PyObject_IsTrue(item_of(item, 5)) == 1;
    note_writes(step);
  } else if (kind == "python") {
    step.kind = Step::Python;
    step.callable = Ref::borrow(item_of(item, 1));
    step.values = ids(2);
    outs(3);
  } else {
    TORCH_CHECK_VALUE(false, "a step of unknown kind ", kind);
  }
  steps_.push_back(std::move(step));
}

Argument Plan::read_argument(PyObject* item, const c10::TypePtr& type, const std::string& op, const std::string& name) {
  const std::string kind = text(item_of(item, 0));
  PyObject* content = item_of(item, 1);
  Argument argument;
  if (kind == "value") {
    argument.kind = Argument::Value;
    argument.value = value_id(content);
  } else if (kind == "list") {
    argument.kind = Argument::List;
    c10::TypePtr list = type;
    if (list->kind() == c10::TypeKind::OptionalType) list = list->expectRef<c10::OptionalType>().getElementType();
    TORCH_CHECK_VALUE(list->kind() == c10::TypeKind::ListType, op, ": ", name, " is not a list");
    const c10::TypePtr element = list->expectRef<c10::ListType>().getElementType();
    argument.optional_elements = element->kind() == c10::TypeKind::OptionalType;
    for (Py_ssize_t i = 0; i < length_of(content); ++i)
      argument.list.push_back(read_argument(item_of(content, i), element, op, name));
  } else {
    argument.kind = Argument::Constant;
    if (type->kind() == c10::TypeKind::TensorType && (PyFloat_Check(content) || PyLong_Check(content))) {
      // A Python number where the schema has a tensor, as in `x + 1`: its dtype yields to the tensors'.
      at::Tensor number = PyBool_Check(content)   ? at::scalar_tensor(content == Py_True)
                          : PyLong_Check(content) ? at::scalar_tensor(integer(content), at::kLong)
                                                  : at::scalar_tensor(PyFloat_AsDouble(content), at::kDouble);
      number.unsafeGetTensorImpl()->set_wrapped_number(true);
      argument.constant = number;
      return argument;
    }
    try {
      argument.constant = convert(content, type);
    } catch (const std::exception& error) {
      TORCH_CHECK_VALUE(false, op, ": argument ", name, " can't be converted to ", type->str(), ": ", error.what());
    }
  }
  return argument;
}

void Plan::note_writes(const Step& step) {
  const auto& arguments = step.op->schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].alias_info() == nullptr || !arguments[i].alias_info()->isWrite()) continue;
    for_each_value(step.call[i], [&](int v) {
      const Value& root = values[values[v].root];
      if (root.kind != Value::Input) return;
      written_.resize(inputs);
      written_[root.index] = true;
    });
  }
}

// A kernel that reads a value before the step that makes it would follow a null pointer.
void Plan::check_order() const {
  std::vector<bool> made(values.size());
  for (size_t v = 0; v < values.size(); ++v) made[v] = values[v].kind != Value::Aten && values[v].kind != Value::Packed_;
  const auto check = [&](int v) { TORCH_CHECK_VALUE(made[values[v].root], "value ", v, " is read before any step makes it"); };
  for (const Step& step : steps_) {
    if (step.kind == Step::Pack) {
      check(step.values[0]);
      made[step.values[1]] = true;
      continue;
    }
    for (int v : step.values) check(v);
    for (const Argument& a : step.call) for_each_value(a, check);
    for (int v : step.outs)
      if (v >= 0) made[v] = true;
  }
  for (int v : outputs) {
    TORCH_CHECK_VALUE(values[v].kind != Value::Packed_, "a packed weight can't be a result");
    check(v);
  }
}

void Plan::find_releases() {
  std::vector<int> last_use(values.size(), -1);
  auto use = [&](int value, int position) {
    int& last = last_use[values[value].root];
    last = std::max(last, position);
  };
  for (int position = 0; position < static_cast<int>(steps_.size()); ++position) {
    for (int v : steps_[position].values) use(v, position);
    for (int v : steps_[position].outs)
      if (v >= 0) use(v, position);
    for (const Argument& a : steps_[position].call) for_each_value(a, [&](int v) { use(v, position); });
  }
  for (int v : outputs) use(v, static_cast<int>(steps_.size()));
  for (size_t v = 0; v < values.size(); ++v)
    if (values[v].kind == Value::Aten && last_use[v] >= 0 && last_use[v] < static_cast<int>(steps_.size()))
      steps_[last_use[v]].releases.push_back(static_cast<int>(v));
}

}  // namespace fuser
