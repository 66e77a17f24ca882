// What the runtime needs of torch's Python binding. The binding's own headers take most of a minute of compile time
// wherever they are included, so torch_python.cpp alone includes them.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace fuser {

PyObject* tensor_class();
bool is_tensor(PyObject* object);                 // of `torch.Tensor` or a subclass
const at::Tensor& unpack(PyObject* tensor);       // valid as long as the object
PyObject* wrap(at::Tensor tensor);                // a new reference, to the same object as before if there is one

// A Python argument as the schema's type; throws what torch throws for one that does not fit.
c10::IValue convert(PyObject* object, const c10::TypePtr& type);

}  // namespace fuser
