// The autograd node of a compiled function.
#include "gradient.h"
#include "objects.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace fuser {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

using NodePointer = decltype(Edge::function);

template <class T, class... Arguments>
NodePointer make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePointer, std::shared_ptr<Node>>)
    return NodePointer(new T(std::forward<Arguments>(arguments)...), [](Node* node) { delete node; });
  else
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
}

struct WithGil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~WithGil() { PyGILState_Release(state); }
};

// A Python exception, carried through the engine as what a Python function's would be.
[[noreturn]] void throw_python_error(const char* doing) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Ref kind(type), error(value), traceback(trace);
  Ref text(error ? PyObject_Str(error.get()) : nullptr);
  const char* message = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  const std::string told = std::string(doing) + ": " + (kind ? reinterpret_cast<PyTypeObject*>(kind.get())->tp_name : "error") +
                           ": " + (message ? message : "");
  PyErr_Clear();
  TORCH_CHECK(false, told);
}

// Whether a transform (vmap, say, or a forward-mode level) would see what is done with `t`.
bool is_transformed(const at::Tensor& t) {
  if (!t.defined()) return false;
  const c10::DispatchKeySet keys = t.key_set();
  for (const c10::DispatchKey key : {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                     c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Batched})
    if (keys.has(key)) return true;
  return t._fw_grad(/*level=*/0).defined();
}

class Backward : public Node {
 public:
  Backward(std::shared_ptr<const Function> function, torch::autograd::edge_list edges)
      : Node(std::move(edges)), function_(std::move(function)) {}

  void save(Inputs inputs, const Tensors& results) {
    inputs_.reserve(inputs.size());
    unread_.resize(inputs.size());
    for (int i : function_->unread) unread_[i] = *inputs[i];
    for (size_t i = 0; i < inputs.size(); ++i) inputs_.emplace_back(unread_[i].defined() ? at::Tensor() : *inputs[i], false);
    results_.reserve(results.size());
    for (size_t i = 0; i < results.size(); ++i) {
      const bool is_output = i < function_->results, is_draw = !is_output && i < function_->results + function_->draws;
      const bool wanted = is_draw || std::find(function_->saved.begin(), function_->saved.end(), static_cast<int>(i)) != function_->saved.end();
      results_.emplace_back(wanted ? results[i] : at::Tensor(), is_output && wanted && results[i].requires_grad());
    }
  }

  std::string name() const override { return "FuserBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    released_ = true;
    inputs_.clear();
    unread_.clear();
    results_.clear();
  }

  variable_list apply(variable_list&& cotangents) override {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    const size_t count = function_->variables.size();
    std::vector<bool> defined, wanted(count);
    for (const at::Tensor& t : cotangents) defined.push_back(t.defined());
    for (size_t i = 0; i < count; ++i) wanted[i] = task_should_compute_output(i);
    variable_list gradients(count);
    if (std::find(defined.begin(), defined.end(), true) == defined.end()) return gradients;
    if (c10::GradMode::is_enabled() || std::any_of(cotangents.begin(), cotangents.end(), is_transformed))
      return higher(cotangents, wanted);
    for (at::Tensor& t : cotangents)
      if (t.defined() && (t.layout() != at::kStrided || t.is_conj() || t.is_neg())) t = t.to_dense().resolve_conj().resolve_neg();
    const auto pullback = function_->pullback(defined, wanted);
    if (!pullback->plan) return gradients;
    Tensors owned(pullback->sources.size());
    c10::SmallVector<const at::Tensor*, 16> given;
    for (size_t i = 0; i < pullback->sources.size(); ++i) {
      const Source& source = pullback->sources[i];
      if (source.kind == Source::Cotangent) owned[i] = cotangents[source.index];
      else if (source.kind == Source::Input) owned[i] = inputs_[source.index].unpack();
      else owned[i] = results_[source.index].unpack(getptr_of_this());
      given.push_back(&owned[i]);
    }
    Tensors results = pullback->plan->run_as_traced(given, /*holds_gil=*/false);
    for (size_t i = 0; i < count; ++i)
      if (pullback->gradients[i] >= 0) gradients[i] = results[pullback->gradients[i]];
    return gradients;
  }

 private:
  NodePointer getptr_of_this() { return this->getptr(); }

  variable_list higher(const variable_list& cotangents, const std::vector<bool>& wanted) {
    variable_list inputs;
    for (size_t i = 0; i < inputs_.size(); ++i) inputs.push_back(unread_[i].defined() ? unread_[i] : inputs_[i].unpack());
    for (size_t i = 0; i < function_->draws; ++i) inputs.push_back(results_[function_->results + i].unpack());
    WithGil gil;
    const auto list = [](const variable_list& tensors) {
      Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
      for (size_t i = 0; tuple && i < tensors.size(); ++i)
        PyTuple_SET_ITEM(tuple.get(), i, tensors[i].defined() ? wrap(tensors[i]) : Py_NewRef(Py_None));
      return tuple;
    };
    Ref flags(PyTuple_New(static_cast<Py_ssize_t>(wanted.size())));
    for (size_t i = 0; i < wanted.size(); ++i) PyTuple_SET_ITEM(flags.get(), i, PyBool_FromLong(wanted[i]));
    Ref given = list(inputs), directions = list(cotangents);
    Ref result(PyObject_CallFunctionObjArgs(function_->higher.get(), given.get(), directions.get(), flags.get(), nullptr));
    if (!result) throw_python_error("computing a gradient that can be differentiated again");
    variable_list gradients(wanted.size());
    TORCH_CHECK(PyTuple_Check(result.get()) && PyTuple_GET_SIZE(result.get()) == static_cast<Py_ssize_t>(wanted.size()),
                "a gradient function must return one value per variable");
    for (size_t i = 0; i < wanted.size(); ++i) {
      PyObject* item = PyTuple_GET_ITEM(result.get(), i);
      if (item != Py_None) gradients[i] = unpack(item);
    }
    return gradients;
  }

  std::shared_ptr<const Function> function_;
  std::vector<SavedVariable> inputs_, results_;
  std::vector<at::Tensor> unread_;
  bool released_ = false;
  std::mutex mutex_;
};

std::vector<int> indices(PyObject* sequence) {
  std::vector<int> found;
  for (const Ref& item : refs(sequence)) {
    found.push_back(static_cast<int>(PyLong_AsLong(item.get())));
    if (PyErr_Occurred()) throw PythonError();
  }
  return found;
}

Ref booleans(const std::vector<bool>& values) {
  Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
  for (size_t i = 0; tuple && i < values.size(); ++i) PyTuple_SET_ITEM(tuple.get(), i, PyBool_FromLong(values[i]));
  return tuple;
}

}  // namespace

Function::~Function() {
  if (!Py_IsInitialized()) {
    derive.release();
    higher.release();
    return;
  }
  WithGil gil;
  derive = Ref();
  higher = Ref();
  pullbacks_.clear();
}

Tensors Function::call(Inputs inputs) const {
  const auto wants = [&](int i) { return inputs[i]->requires_grad(); };
  const bool record = c10::GradMode::is_enabled() && std::any_of(variables.begin(), variables.end(), wants);
  Tensors results_and_kept;
  {
    at::AutoGradMode no_grad(false);
    results_and_kept = plan->run_as_traced(inputs, /*holds_gil=*/true);
  }
  if (record) {
    torch::autograd::edge_list edges;
    for (int i : variables) edges.push_back(inputs[i]->requires_grad() ? torch::autograd::impl::gradient_edge(*inputs[i]) : Edge());
    NodePointer node = make_node<Backward>(shared_from_this(), std::move(edges));
    for (int i : differentiable) torch::autograd::set_history(results_and_kept[i], node);
    static_cast<Backward&>(*node).save(inputs, results_and_kept);
  }
  results_and_kept.resize(results);
  return results_and_kept;
}

std::shared_ptr<const Pullback> Function::pullback(const std::vector<bool>& defined, const std::vector<bool>& wanted) const {
  std::string key;
  for (bool b : defined) key += b ? '1' : '0';
  key += '|';
  for (bool b : wanted) key += b ? '1' : '0';
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pullbacks_.find(key);
    if (found != pullbacks_.end()) return found->second;
  }
  WithGil gil;
  Ref flags = booleans(defined), wishes = booleans(wanted);
  Ref made(PyObject_CallFunctionObjArgs(derive.get(), flags.get(), wishes.get(), nullptr));
  if (!made) throw_python_error("compiling a gradient");
  PyObject *plan_object, *sources, *gradients;
  auto pullback = std::make_shared<Pullback>();
  try {
    if (!PyArg_ParseTuple(made.get(), "OOO", &plan_object, &sources, &gradients)) throw PythonError();
    if (plan_object != Py_None) pullback->plan = content_of<Plan>(plan_object, plan_type);
    for (const Ref& item : refs(sources)) {
      const char* kind;
      int index;
      if (!PyArg_ParseTuple(item.get(), "si", &kind, &index)) throw PythonError();
      const std::string name(kind);
      TORCH_CHECK_VALUE(name == "input" || name == "result" || name == "cotangent", "a source of unknown kind ", name);
      pullback->sources.push_back({name == "input" ? Source::Input : name == "result" ? Source::Result : Source::Cotangent, index});
    }
    pullback->gradients = indices(gradients);
  } catch (const PythonError&) {
    throw_python_error("compiling a gradient");
  }
  TORCH_CHECK_VALUE(pullback->gradients.size() == wanted.size(), "a pullback must name one result per variable");
  std::lock_guard<std::mutex> lock(mutex_);
  return pullbacks_.emplace(key, std::move(pullback)).first->second;
}

namespace {

// Function(plan, results, saved, draws, differentiable, variables, unread, derive, higher)
PyObject* new_function(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *plan, *differentiable, *variables, *unread, *saved, *derive, *higher;
  int results, draws;
  if (!PyArg_ParseTuple(args, "OiOiOOOOO", &plan, &results, &saved, &draws, &differentiable, &variables, &unread, &derive, &higher)) return nullptr;
  return guarded([&] {
    auto function = std::make_shared<Function>();
    function->plan = content_of<Plan>(plan, plan_type);
    function->results = results;
    function->draws = draws;
    function->saved = indices(saved);
    function->differentiable = indices(differentiable);
    function->variables = indices(variables);
    function->unread = indices(unread);
    function->derive = Ref::borrow(derive);
    function->higher = Ref::borrow(higher);
    TORCH_CHECK_VALUE(results >= 0 && function->results <= function->plan->outputs.size(), "the plan has fewer results");
    for (int i : function->differentiable) TORCH_CHECK_VALUE(i >= 0 && i < results, "there is no result ", i);
    for (int i : function->unread)
      TORCH_CHECK_VALUE(i >= 0 && static_cast<size_t>(i) < function->plan->inputs, "there is no input ", i);
    for (int i : function->variables)
      TORCH_CHECK_VALUE(i >= 0 && static_cast<size_t>(i) < function->plan->inputs, "there is no input ", i);
    return hold<Function>(type, std::move(function));
  });
}

// function(*tensors) -> tuple of results
PyObject* call_function(PyObject* self, PyObject* args, PyObject* kwargs) {
  return guarded([&]() -> PyObject* {
    TORCH_CHECK_TYPE(kwargs == nullptr || PyDict_GET_SIZE(kwargs) == 0, "a function takes tensors by position");
    const std::shared_ptr<Function> function = content_of<Function>(self, function_type);
    Given given;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
      TORCH_CHECK_TYPE(is_tensor(PyTuple_GET_ITEM(args, i)), "a function takes tensors");
      given.add(PyTuple_GET_ITEM(args, i));
    }
    Tensors results = function->call(given.tensors());
    Ref out(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
    if (!out) return nullptr;
    for (size_t i = 0; i < results.size(); ++i) {
      PyObject* tensor = wrap(std::move(results[i]));
      if (tensor == nullptr) return nullptr;
      PyTuple_SET_ITEM(out.get(), i, tensor);
    }
    return out.release();
  });
}

}  // namespace

PyTypeObject* make_function_type() {
  PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_function)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(drop<Function>)},
                         {Py_tp_call, reinterpret_cast<void*>(call_function)}, {0, nullptr}};
  PyType_Spec spec{"_fuser_runtime.Function", sizeof(Holder<Function>), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace fuser
