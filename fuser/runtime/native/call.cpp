// The dispatcher, from a call's arguments to its result, and the fast `__call__` of optimised modules.
#include "gradient.h"
#include "objects.h"

#include <structmember.h>

namespace fuser {
namespace {

PyObject* slow_module_call = nullptr;
PyObject* dispatcher_attribute = nullptr;

// The dispatcher's state; replaced as a whole by bind, so that a running call keeps the one it began with.
struct Bound {
  std::vector<Guard> guards;
  std::vector<Ref> captured;
  std::shared_ptr<Table> table;
};

struct Dispatcher {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *slow, *eager, *hooks;        // hooks: a tuple of dicts
  std::shared_ptr<Bound> bound;
};

PyObject* build(const Template& t, const Tensors& results, const Plan& plan, const Given& given) {
  switch (t.kind) {
    case Template::Tensor: {
      const Value& value = plan.values[plan.outputs[t.index]];
      if (value.kind == Value::Input) return Py_NewRef(given.object(value.index));
      return wrap(results[t.index]);
    }
    case Template::Constant: return Py_NewRef(t.object.get());
    case Template::Dict: {
      Ref dict(PyDict_New());
      for (size_t i = 0; dict && i < t.children.size(); ++i) {
        Ref child(build(t.children[i], results, plan, given));
        if (!child || PyDict_SetItem(dict.get(), t.keys[i].get(), child.get()) < 0) return nullptr;
      }
      return dict.release();
    }
    default: break;
  }
  const Py_ssize_t count = static_cast<Py_ssize_t>(t.children.size());
  Ref sequence(t.kind == Template::List ? PyList_New(count) : PyTuple_New(count));
  for (Py_ssize_t i = 0; sequence && i < count; ++i) {
    PyObject* child = build(t.children[i], results, plan, given);
    if (child == nullptr) return nullptr;
    if (t.kind == Template::List) PyList_SET_ITEM(sequence.get(), i, child);
    else PyTuple_SET_ITEM(sequence.get(), i, child);
  }
  if (t.kind != Template::Call || !sequence) return sequence.release();
  return PyObject_CallObject(t.object.get(), sequence.get());
}

PyObject* call_slow(Dispatcher* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Ref positional(PyTuple_New(count)), named(PyDict_New());
  if (!positional || !named) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(positional.get(), i, Py_NewRef(args[i]));
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i)
    if (PyDict_SetItem(named.get(), PyTuple_GET_ITEM(names, i), args[count + i]) < 0) return nullptr;
  return PyObject_CallFunctionObjArgs(self->slow, positional.get(), named.get(), nullptr);
}

// The same words as for `signature`: positional arguments as a tuple, then keywords as a dict.
bool describe(Call& call, const Bound& bound, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  call.clear();
  call.add_context();
  for (const Ref& tensor : bound.captured) call.add_tensor(tensor.get(), true);
  call.words.push_back(count);
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!call.add(args[i], 0)) return false;
  const Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
  call.words.push_back(named);
  for (Py_ssize_t i = 0; i < named; ++i)
    if (!call.add(PyTuple_GET_ITEM(names, i), 0) || !call.add(args[count + i], 0)) return false;
  return true;
}

// A thread's buffers for a call's signature, kept from call to call; calls that nest inside another have their own.
class Scratch {
 public:
  Scratch() : kept_(of_thread()), nested_(kept_.taken) { kept_.taken = true; }
  ~Scratch() { kept_.taken = nested_; }
  Scratch(const Scratch&) = delete;
  Call& call() { return nested_ ? own_ : kept_.call; }

 private:
  struct Kept {
    Call call;
    bool taken = false;
  };
  static Kept& of_thread() {
    thread_local Kept kept;
    return kept;
  }
  Kept& kept_;
  bool nested_;
  Call own_;
};

PyObject* run(Dispatcher* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return guarded([&]() -> PyObject* {
    const std::shared_ptr<Bound> bound = self->bound;
    if (!bound) return call_slow(self, args, count, names);
    for (const Guard& guard : bound->guards)
      if (!guard.holds()) return call_slow(self, args, count, names);
    Scratch scratch;
    Call& call = scratch.call();
    if (!describe(call, *bound, args, count, names)) return PyObject_Vectorcall(self->eager, args, count, names);
    const std::shared_ptr<Entry> entry = bound->table->find(call.bytes());
    if (!entry) return call_slow(self, args, count, names);
    if (!entry->plan) return PyObject_Vectorcall(self->eager, args, count, names);
    Given given;
    for (const Ref& tensor : bound->captured) given.add(tensor.get());
    for (PyObject* tensor : call.tensors) given.add(tensor);
    if (entry->plan->writes_shared_memory(given.tensors())) return PyObject_Vectorcall(self->eager, args, count, names);
    Tensors results = entry->function ? entry->function->call(given.tensors()) : entry->plan->run(given.tensors());
    if (entry->result.kind == Template::Tensor && entry->plan->values[entry->plan->outputs[entry->result.index]].kind != Value::Input)
      return wrap(std::move(results[entry->result.index]));
    return build(entry->result, results, *entry->plan, given);
  });
}

PyObject* dispatcher_vectorcall(PyObject* self, PyObject* const* args, size_t count, PyObject* names) {
  return run(reinterpret_cast<Dispatcher*>(self), args, PyVectorcall_NARGS(count), names);
}

PyObject* new_dispatcher(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *slow, *eager, *hooks = nullptr;
  if (!PyArg_ParseTuple(args, "OO|O!", &slow, &eager, &PyTuple_Type, &hooks)) return nullptr;
  auto* self = reinterpret_cast<Dispatcher*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  new (&self->bound) std::shared_ptr<Bound>();
  self->vectorcall = dispatcher_vectorcall;
  self->slow = Py_NewRef(slow);
  self->eager = Py_NewRef(eager);
  self->hooks = hooks ? Py_NewRef(hooks) : PyTuple_New(0);
  return reinterpret_cast<PyObject*>(self);
}

int dispatcher_traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  Py_VISIT(self->slow);
  Py_VISIT(self->eager);
  Py_VISIT(self->hooks);
  Py_VISIT(Py_TYPE(object));
  // A running call shares `bound`; its references are then not only ours to count.
  if (self->bound && self->bound.use_count() == 1) {
    for (const Guard& guard : self->bound->guards) {
      Py_VISIT(guard.container.get());
      for (const Ref& key : guard.keys) Py_VISIT(key.get());
      for (const Ref& value : guard.values) Py_VISIT(value.get());
    }
    for (const Ref& tensor : self->bound->captured) Py_VISIT(tensor.get());
  }
  return 0;
}

int dispatcher_clear(PyObject* object) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  Py_CLEAR(self->slow);
  Py_CLEAR(self->eager);
  Py_CLEAR(self->hooks);
  self->bound.reset();
  return 0;
}

void dispatcher_drop(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  dispatcher_clear(object);
  reinterpret_cast<Dispatcher*>(object)->bound.~shared_ptr();
  type->tp_free(object);
  Py_DECREF(type);
}

Guard read_guard(PyObject* item) {
  const char* kind;
  PyObject *container, *keys = Py_None, *values = Py_None;
  if (!PyArg_ParseTuple(item, "sO|OO", &kind, &container, &keys, &values)) throw PythonError();
  Guard guard{Guard::Empty, Ref::borrow(container), {}, {}};
  const std::string name(kind);
  if (name == "items") {
    guard.kind = Guard::Items;
    TORCH_CHECK_VALUE(PyDict_Check(container) || PyList_Check(container), "an items guard is on a dict or a list");
    guard.keys = refs(keys);
    guard.values = refs(values);
    TORCH_CHECK_VALUE(!PyDict_Check(container) || guard.keys.size() == guard.values.size(), "a guard's keys and values differ in number");
  } else if (name == "cell") {
    guard.kind = Guard::Cell;
    TORCH_CHECK_VALUE(PyCell_Check(container), "a cell guard is on a closure's cell");
    guard.values.push_back(Ref::borrow(keys));
  } else if (name == "attribute") {
    guard.kind = Guard::Attribute;
    guard.keys.push_back(Ref::borrow(keys));
    guard.values.push_back(Ref::borrow(values));
  } else if (name == "item") {
    guard.kind = Guard::Item;
    TORCH_CHECK_VALUE(PyDict_Check(container), "an item guard is on a dict");
    guard.keys.push_back(Ref::borrow(keys));
    guard.values.push_back(Ref::borrow(values));
  } else {
    TORCH_CHECK_VALUE(name == "empty", "a guard of unknown kind ", name);
  }
  return guard;
}

PyObject* dispatcher_bind(PyObject* object, PyObject* args) {
  PyObject *guards, *captured, *table;
  if (!PyArg_ParseTuple(args, "OOO", &guards, &captured, &table)) return nullptr;
  return guarded([&] {
    auto bound = std::make_shared<Bound>();
    for (const Ref& item : refs(guards)) bound->guards.push_back(read_guard(item.get()));
    bound->captured = refs(captured);
    for (const Ref& tensor : bound->captured) TORCH_CHECK_VALUE(is_tensor(tensor.get()), "captured values must be tensors");
    bound->table = content_of<Table>(table, table_type);
    reinterpret_cast<Dispatcher*>(object)->bound.swap(bound);
    return Py_NewRef(Py_None);
  });
}

// signature(args, kwargs) -> (bytes, argument tensors, objects that count by address)
PyObject* dispatcher_signature(PyObject* object, PyObject* parameters) {
  PyObject *args, *kwargs;
  if (!PyArg_ParseTuple(parameters, "O!O!", &PyTuple_Type, &args, &PyDict_Type, &kwargs)) return nullptr;
  return guarded([&]() -> PyObject* {
    const std::shared_ptr<Bound> bound = reinterpret_cast<Dispatcher*>(object)->bound;
    TORCH_CHECK_VALUE(bound != nullptr, "nothing is bound yet");
    std::vector<PyObject*> flat;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) flat.push_back(PyTuple_GET_ITEM(args, i));
    Ref names(PyTuple_New(PyDict_GET_SIZE(kwargs)));
    PyObject *key, *value;
    Py_ssize_t position = 0;
    for (Py_ssize_t i = 0; PyDict_Next(kwargs, &position, &key, &value); ++i) {
      PyTuple_SET_ITEM(names.get(), i, Py_NewRef(key));
      flat.push_back(value);
    }
    Call call;
    if (!describe(call, *bound, flat.data(), PyTuple_GET_SIZE(args), names.get())) {
      PyErr_SetString(unsupported_error, call.unsupported.c_str());
      return nullptr;
    }
    Ref tensors(PyList_New(0)), kept(PyList_New(0));
    for (PyObject* tensor : call.tensors)
      if (PyList_Append(tensors.get(), tensor) < 0) return nullptr;
    for (PyObject* item : call.kept)
      if (PyList_Append(kept.get(), item) < 0) return nullptr;
    return Py_BuildValue("y#OO", call.bytes().data(), static_cast<Py_ssize_t>(call.bytes().size()), tensors.get(), kept.get());
  });
}

// `__call__` of optimised modules: straight to the dispatcher unless a hook wants nn.Module's own way.
PyObject* module_call(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  // Past nn.Module's `__getattr__`: the attribute is a slot of the class.
  Ref dispatcher(PyObject_GenericGetAttr(self, dispatcher_attribute));
  if (!dispatcher) return nullptr;
  if (Py_TYPE(dispatcher.get()) == dispatcher_type) {
    auto* d = reinterpret_cast<Dispatcher*>(dispatcher.get());
    bool hooked = false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(d->hooks); ++i) hooked |= PyDict_GET_SIZE(PyTuple_GET_ITEM(d->hooks, i)) != 0;
    if (!hooked) return run(d, args, count, names);
  }
  std::vector<PyObject*> with_self{self};
  with_self.insert(with_self.end(), args, args + count + (names ? PyTuple_GET_SIZE(names) : 0));
  return PyObject_Vectorcall(slow_module_call, with_self.data(), count + 1, names);
}

PyMethodDef module_call_method = {"__call__", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(module_call)),
                                  METH_FASTCALL | METH_KEYWORDS, "Call the module."};

PyMethodDef dispatcher_methods[] = {
    {"bind", dispatcher_bind, METH_VARARGS, "Bind guards, captured tensors and a table."},
    {"signature", dispatcher_signature, METH_VARARGS, "The signature of a call in the bound state."}, {}};
PyMemberDef dispatcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Dispatcher, vectorcall), READONLY, nullptr}, {}};

}  // namespace

PyObject* install_call(PyObject*, PyObject* args) {
  PyObject *cls, *attribute, *slow;
  if (!PyArg_ParseTuple(args, "O!UO", &PyType_Type, &cls, &attribute, &slow)) return nullptr;
  Ref method(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(cls), &module_call_method));
  if (!method || PyObject_SetAttrString(cls, "__call__", method.get()) < 0) return nullptr;
  Py_XSETREF(dispatcher_attribute, Py_NewRef(attribute));
  Py_XSETREF(slow_module_call, Py_NewRef(slow));
  return Py_NewRef(Py_None);
}

PyTypeObject* make_dispatcher_type() {
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(new_dispatcher)}, {Py_tp_dealloc, reinterpret_cast<void*>(dispatcher_drop)},
      {Py_tp_traverse, reinterpret_cast<void*>(dispatcher_traverse)}, {Py_tp_clear, reinterpret_cast<void*>(dispatcher_clear)},
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)}, {Py_tp_methods, dispatcher_methods},
      {Py_tp_members, dispatcher_members}, {0, nullptr}};
  PyType_Spec spec{"_fuser_runtime.Dispatcher", sizeof(Dispatcher), 0,
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace fuser
