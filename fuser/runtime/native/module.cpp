// The Python module: its types (the dispatcher is in call.cpp) and functions.
#include "gradient.h"
#include "objects.h"

namespace fuser {

PyTypeObject *plan_type, *packs_type, *arenas_type, *table_type, *dispatcher_type, *function_type;
PyObject* unsupported_error = nullptr;

std::vector<Ref> refs(PyObject* sequence) {
  std::vector<Ref> found;
  if (sequence == Py_None) return found;
  Ref fast(PySequence_Fast(sequence, "a sequence was expected"));
  if (!fast) throw PythonError();
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast.get()); ++i)
    found.push_back(Ref::borrow(PySequence_Fast_GET_ITEM(fast.get(), i)));
  return found;
}

namespace {

template <class T>
PyObject* new_default(PyTypeObject* type, PyObject*, PyObject*) {
  return guarded([&] { return hold<T>(type, std::make_shared<T>()); });
}

PyObject* new_plan(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"spec", "packs", "arenas", nullptr};
  PyObject *spec, *packs, *arenas;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO", const_cast<char**>(names), &spec, &packs, &arenas)) return nullptr;
  return guarded([&] {
    return hold<Plan>(type, std::make_shared<Plan>(spec, content_of<PackStore>(packs, packs_type),
                                                   content_of<ArenaPool>(arenas, arenas_type)));
  });
}

PyObject* plan_run(PyObject* self, PyObject* list) {
  return guarded([&]() -> PyObject* {
    const std::shared_ptr<Plan> plan = content_of<Plan>(self, plan_type);
    TORCH_CHECK_VALUE(PyList_Check(list), "run takes a list of tensors");
    Given given;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
      TORCH_CHECK_VALUE(is_tensor(PyList_GET_ITEM(list, i)), "run takes a list of tensors");
      given.add(PyList_GET_ITEM(list, i));
    }
    plan->check_layouts(given.tensors());
    Tensors results = plan->run(given.tensors());
    Ref out(PyList_New(static_cast<Py_ssize_t>(results.size())));
    if (!out) return nullptr;
    for (size_t i = 0; i < results.size(); ++i) {
      PyObject* tensor = wrap(std::move(results[i]));
      if (tensor == nullptr) return nullptr;
      PyList_SET_ITEM(out.get(), i, tensor);
    }
    return out.release();
  });
}

PyObject* new_table(PyTypeObject* type, PyObject* args, PyObject*) {
  Py_ssize_t capacity = 512;
  if (!PyArg_ParseTuple(args, "|n", &capacity)) return nullptr;
  if (capacity < 1) return PyErr_Format(PyExc_ValueError, "a table holds at least one entry, not %zd", capacity);
  return hold<Table>(type, std::make_shared<Table>(capacity));
}

// add(signature, kept, plan, template), or add(signature, kept, None) for a signature that runs eagerly.
PyObject* table_add(PyObject* self, PyObject* args) {
  const char* data;
  Py_ssize_t size;
  PyObject *kept, *plan, *structure = nullptr;
  if (!PyArg_ParseTuple(args, "y#OO|O", &data, &size, &kept, &plan, &structure)) return nullptr;
  return guarded([&] {
    auto entry = std::make_shared<Entry>();
    entry->kept = refs(kept);
    if (plan != Py_None && Py_TYPE(plan) == function_type) {
      entry->function = content_of<Function>(plan, function_type);
      entry->plan = entry->function->plan;
    } else if (plan != Py_None) {
      entry->plan = content_of<Plan>(plan, plan_type);
    }
    if (entry->plan) {
      TORCH_CHECK_VALUE(structure != nullptr, "a plan needs the structure of its result");
      entry->result = read_template(structure, entry->plan->outputs.size());
    }
    content_of<Table>(self, table_type)->add(std::string(data, size), std::move(entry));
    return Py_NewRef(Py_None);
  });
}

Py_ssize_t table_length(PyObject* self) { return reinterpret_cast<Holder<Table>*>(self)->content->size(); }

int table_contains(PyObject* self, PyObject* signature) {
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(signature, &data, &size) < 0) return -1;
  return reinterpret_cast<Holder<Table>*>(self)->content->find({data, static_cast<size_t>(size)}) != nullptr;
}

PyObject* py_content_hash(PyObject*, PyObject* args) {
  Py_buffer view;
  int threads = 1;
  if (!PyArg_ParseTuple(args, "y*|i", &view, &threads)) return nullptr;
  uint64_t hash[2];
  content_hash(view.buf, view.len, threads, hash);
  PyBuffer_Release(&view);
  return Py_BuildValue("KK", hash[0], hash[1]);
}

PyMethodDef plan_methods[] = {{"run", plan_run, METH_O, "Run on a list of tensors; returns a list."}, {}};
PyMethodDef table_methods[] = {{"add", table_add, METH_VARARGS, "Add an entry."}, {}};

template <class T>
PyTypeObject* holder_type(const char* name, newfunc make, std::vector<PyType_Slot> more = {}) {
  std::vector<PyType_Slot> slots{{Py_tp_new, reinterpret_cast<void*>(make)}, {Py_tp_dealloc, reinterpret_cast<void*>(drop<T>)}};
  slots.insert(slots.end(), more.begin(), more.end());
  slots.push_back({0, nullptr});
  PyType_Spec spec{name, sizeof(Holder<T>), 0, Py_TPFLAGS_DEFAULT, slots.data()};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

PyMethodDef functions[] = {{"install_call", install_call, METH_VARARGS, "Give a class the fast __call__."},
                           {"content_hash", py_content_hash, METH_VARARGS, "The hash of a buffer's bytes."}, {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_fuser_runtime", "fuser's call path and plan runner.", -1, functions};

bool add_type(PyObject* module, const char* name, PyTypeObject* type) {
  return type != nullptr && PyModule_AddObjectRef(module, name, reinterpret_cast<PyObject*>(type)) == 0;
}

}  // namespace
}  // namespace fuser

PyMODINIT_FUNC PyInit__fuser_runtime() {
  using namespace fuser;
  Ref module(PyModule_Create(&definition));
  if (!module) return nullptr;
  Ref nn(PyImport_ImportModule("torch.nn"));
  Ref parameter(nn ? PyObject_GetAttrString(nn.get(), "Parameter") : nullptr);
  if (!parameter) return nullptr;
  set_parameter_class(parameter.get());
  plan_type = holder_type<Plan>("_fuser_runtime.Plan", new_plan, {{Py_tp_methods, plan_methods}});
  packs_type = holder_type<PackStore>("_fuser_runtime.PackStore", new_default<PackStore>);
  arenas_type = holder_type<ArenaPool>("_fuser_runtime.ArenaPool", new_default<ArenaPool>);
  table_type = holder_type<Table>("_fuser_runtime.Table", new_table,
                                  {{Py_tp_methods, table_methods}, {Py_sq_length, reinterpret_cast<void*>(table_length)},
                                   {Py_sq_contains, reinterpret_cast<void*>(table_contains)}});
  dispatcher_type = make_dispatcher_type();
  function_type = make_function_type();
  unsupported_error = PyErr_NewException("_fuser_runtime.Unsupported", PyExc_TypeError, nullptr);
  if (!add_type(module.get(), "Plan", plan_type) || !add_type(module.get(), "PackStore", packs_type) ||
      !add_type(module.get(), "ArenaPool", arenas_type) || !add_type(module.get(), "Table", table_type) ||
      !add_type(module.get(), "Dispatcher", dispatcher_type) ||
      !add_type(module.get(), "Function", function_type) ||
      PyModule_AddObjectRef(module.get(), "Unsupported", unsupported_error) < 0)
    return nullptr;
  return module.release();
}
