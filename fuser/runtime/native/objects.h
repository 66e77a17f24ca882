// Between Python objects and C++: exceptions, objects that hold C++ ones, sequences.
#pragma once
#include "dispatch.h"

// Declared here: its own header brings in pybind11.
namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);
}

namespace fuser {

// Runs `body`; a C++ exception becomes the Python one that eager would raise.
template <class F>
PyObject* guarded(F&& body) {
  try {
    return body();
  } catch (const PythonError&) {
  } catch (const c10::ValueError& error) {
    PyErr_SetString(PyExc_ValueError, error.what_without_backtrace());
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

// Python objects that hold one C++ object by shared_ptr.
template <class T>
struct Holder {
  PyObject_HEAD
  std::shared_ptr<T> content;
};

template <class T>
void drop(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<Holder<T>*>(self)->content.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

template <class T>
PyObject* hold(PyTypeObject* type, std::shared_ptr<T> content) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self) new (&reinterpret_cast<Holder<T>*>(self)->content) std::shared_ptr<T>(std::move(content));
  return self;
}

// The module's types.
extern PyTypeObject *plan_type, *packs_type, *arenas_type, *table_type, *dispatcher_type, *function_type;
extern PyObject* unsupported_error;

template <class T>
std::shared_ptr<T>& content_of(PyObject* object, PyTypeObject* type) {
  TORCH_CHECK_TYPE(object != nullptr && PyObject_TypeCheck(object, type), "a ", type->tp_name, " was expected");
  return reinterpret_cast<Holder<T>*>(object)->content;
}

// A call's tensors in a plan's order, kept alive by their Python objects. The GIL must be held at both ends.
class Given {
 public:
  void add(PyObject* tensor) {
    objects_.push_back(Ref::borrow(tensor));
    tensors_.push_back(&unpack(tensor));
  }
  Inputs tensors() const { return tensors_; }
  PyObject* object(int64_t i) const { return objects_[i].get(); }

 private:
  c10::SmallVector<Ref, 8> objects_;
  c10::SmallVector<const at::Tensor*, 8> tensors_;
};

// The items of a sequence; none of None's.
std::vector<Ref> refs(PyObject* sequence);

PyTypeObject* make_dispatcher_type();

// install_call(cls, attribute, slow_call): give a class the fast `__call__`.
PyObject* install_call(PyObject* module, PyObject* args);

}  // namespace fuser
