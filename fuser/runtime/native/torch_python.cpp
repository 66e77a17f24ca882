#include "torch_python.h"

#include <torch/csrc/autograd/python_variable.h>

#include <optional>

// Declared here alone: its own header takes another half a minute.
namespace torch::jit {
c10::IValue toIValue(pybind11::handle object, const c10::TypePtr& type, std::optional<int32_t> length);
}

namespace fuser {

PyObject* tensor_class() { return THPVariableClass; }

bool is_tensor(PyObject* object) { return THPVariable_Check(object); }

const at::Tensor& unpack(PyObject* tensor) { return THPVariable_Unpack(tensor); }

PyObject* wrap(at::Tensor tensor) { return THPVariable_Wrap(std::move(tensor)); }

c10::IValue convert(PyObject* object, const c10::TypePtr& type) {
  return torch::jit::toIValue(pybind11::handle(object), type, std::nullopt);
}

}  // namespace fuser
