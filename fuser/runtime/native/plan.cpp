// Running a plan.
#include "plan.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

namespace fuser {

// What one run of a plan needs besides the plan.
struct Frame {
  Inputs inputs;
  char* arena;
  int threads;
  PyThreadState* released = nullptr;     // set while the GIL is given up
  c10::SmallVector<void*, 32> data;      // per value: where its root's memory begins
  c10::SmallVector<at::Tensor, 8> tensors;
  c10::SmallVector<std::shared_ptr<const Packed>, 4> packed;
};

namespace {

at::TensorOptions options_of(at::ScalarType dtype) { return at::TensorOptions().dtype(dtype).device(at::kCPU); }

// ATen's own dispatch without autograd: a plan only runs where no gradient is wanted.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView guard;
};

// Autocast made its decisions while the program was traced.
struct WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

bool same_layout(const at::Tensor& tensor, const Value& value) {
  if (!tensor.sizes().equals(value.sizes)) return false;
  for (size_t i = 0; i < value.sizes.size(); ++i)
    if (value.sizes[i] > 1 && tensor.strides()[i] != value.strides[i]) return false;
  return true;
}

class GilReleased {
 public:
  GilReleased(Frame& frame, bool wanted) : frame_(frame) { if (wanted) frame_.released = PyEval_SaveThread(); }
  ~GilReleased() { restore(); }
  void restore() {
    if (frame_.released) PyEval_RestoreThread(frame_.released);
    frame_.released = nullptr;
  }

 private:
  Frame& frame_;
};

}  // namespace

Tensors Plan::run(Inputs given, bool holds_gil, bool views) const {
  check_inputs(given);
  ArenaPool::Lease lease(arenas_.get(), arena_bytes_);
  Frame frame{given, lease.data(), thread_count()};
  frame.data.resize(values.size());
  frame.tensors.resize(values.size());
  Tensors results(outputs.size());
  WithoutAutocast without_autocast;
  GilReleased released(frame, release_gil_ && holds_gil);
  for (size_t i = 0; i < values.size(); ++i) {
    const Value& v = values[i];
    switch (v.kind) {
      case Value::Input: {
        const at::Tensor& t = *given[v.index];  // asking for writable memory would copy what is shared until written
        const bool written = !written_.empty() && written_[v.index];
        frame.data[i] = written ? t.mutable_data_ptr() : const_cast<void*>(t.const_data_ptr());
        break;
      }
      case Value::Constant: frame.data[i] = v.constant.mutable_data_ptr(); break;
      case Value::Arena: frame.data[i] = frame.arena + v.offset; break;
      case Value::Fresh:
        frame.tensors[i] = at::detail::empty_strided_generic(v.sizes, v.strides, result_allocator(),
                                                             c10::DispatchKeySet(c10::DispatchKey::CPU), v.dtype);
        frame.data[i] = frame.tensors[i].mutable_data_ptr();
        break;
      default: break;
    }
  }
  execute(frame);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Value& v = values[outputs[i]];
    if (v.kind == Value::View && (views || values[v.root].kind == Value::Input)) {
      // Under normal dispatch, so that autograd knows a view of an input as such.
      const at::Tensor base = tensor_of(v.root, frame);
      results[i] = base.as_strided(v.sizes, v.strides, base.storage_offset() + v.elements);
    } else {
      BelowAutograd below;
      results[i] = tensor_of(outputs[i], frame);
    }
  }
  return results;
}

Tensors Plan::run_as_traced(Inputs given, bool holds_gil) const {
  check_inputs(given);
  Tensors copies;
  c10::SmallVector<const at::Tensor*, 16> ready(given.begin(), given.end());
  copies.reserve(given.size());
  for (const Value& v : values) {
    if (v.kind != Value::Input || same_layout(*given[v.index], v)) continue;
    const at::Tensor& t = *given[v.index];
    TORCH_CHECK_VALUE(t.scalar_type() == v.dtype && t.sizes().equals(v.sizes), "input ", v.index, " must be ", v.dtype,
                      " of shape ", at::IntArrayRef(v.sizes), ", got ", t.scalar_type(), " of shape ", t.sizes());
    BelowAutograd below;
    copies.push_back(at::empty_strided(v.sizes, v.strides, t.options()));
    copies.back().copy_(t);
    ready[v.index] = &copies.back();
  }
  for (const Value& v : values)
    if (v.kind == Value::Input)
      TORCH_CHECK_VALUE(given[v.index]->scalar_type() == v.dtype, "input ", v.index, " must be ", v.dtype, ", got ", given[v.index]->scalar_type());
  return run(ready, holds_gil, /*views=*/false);
}

void Plan::check_inputs(Inputs given) const {
  TORCH_CHECK_VALUE(given.size() == inputs, "the plan takes ", inputs, " tensors, got ", given.size());
  for (const at::Tensor* t : given)
    TORCH_CHECK_VALUE(t->defined() && t->device().is_cpu() && t->layout() == at::kStrided, "plans take dense CPU tensors");
}

void Plan::check_layouts(Inputs given) const {
  check_inputs(given);
  for (const Value& v : values) {
    if (v.kind != Value::Input) continue;
    const at::Tensor& t = *given[v.index];
    TORCH_CHECK_VALUE(t.scalar_type() == v.dtype && same_layout(t, v), "input ", v.index, " of the plan is ", v.dtype,
                      " of shape ", at::IntArrayRef(v.sizes), " with strides ", at::IntArrayRef(v.strides), ", got ", t.scalar_type(), " of shape ",
                      t.sizes(), " with strides ", t.strides());
  }
}

bool Plan::writes_shared_memory(Inputs given) const {
  if (written_.empty() || given.size() != inputs) return false;
  struct Span { uintptr_t begin, end; bool written; };
  c10::SmallVector<Span, 16> spans;
  for (size_t i = 0; i < given.size(); ++i) {
    const at::Tensor& t = *given[i];
    if (t.numel() == 0) continue;
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
    spans.push_back({begin, begin + (last + 1) * t.element_size(), written_[i]});
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  uintptr_t any_end = 0, written_end = 0;
  for (const Span& s : spans) {
    if (s.begin < (s.written ? any_end : written_end)) return true;
    any_end = std::max(any_end, s.end);
    if (s.written) written_end = std::max(written_end, s.end);
  }
  return false;
}

void Plan::execute(Frame& frame) const {
  c10::SmallVector<void*, 24> pointers;
  for (size_t position = 0; position < steps_.size(); ++position) {
    const Step& step = steps_[position];
    switch (step.kind) {
      case Step::Kernel_:
        pointers.clear();
        for (int v : step.values) pointers.push_back(pointer_of(v, frame));
        step.kernel(pointers.data(), step.arguments.data(), frame.threads);
        break;
      case Step::Pack: run_pack(step, frame); break;
      case Step::Aten: run_aten(step, frame); break;
      case Step::Python: run_python(step, frame); break;
    }
    for (int v : step.releases) frame.tensors[v].reset();
  }
}

void* Plan::pointer_of(int value, Frame& frame) const {
  const Value& v = values[value];
  if (v.kind != Value::View) return frame.data[value];
  return static_cast<char*>(frame.data[v.root]) + v.offset;
}

at::Tensor Plan::tensor_of(int value, Frame& frame) const {
  const Value& v = values[value];
  switch (v.kind) {
    case Value::Input: return *frame.inputs[v.index];
    case Value::Constant: return v.constant;
    case Value::Fresh:
    case Value::Aten: return frame.tensors[value];
    case Value::Arena: return at::from_blob(frame.data[value], v.sizes, v.strides, options_of(v.dtype));
    case Value::View: {
      if (values[v.root].kind == Value::Arena)
        return at::from_blob(pointer_of(value, frame), v.sizes, v.strides, options_of(v.dtype));
      const at::Tensor base = tensor_of(v.root, frame);
      return base.as_strided(v.sizes, v.strides, base.storage_offset() + v.elements);
    }
    default: TORCH_CHECK(false, "a packed weight is not a tensor");
  }
}

void Plan::set_result(int value, at::Tensor tensor, Frame& frame, const std::string& name) const {
  const Value& v = values[value];
  TORCH_CHECK(tensor.defined() && tensor.scalar_type() == v.dtype && tensor.sizes().equals(v.sizes), name, " gave ",
              tensor.defined() ? tensor.toString() : "nothing", " of shape ", tensor.defined() ? tensor.sizes() : at::IntArrayRef{},
              " where the trace had shape ", at::IntArrayRef(v.sizes));
  // The kernels were made for the strides that the trace promised.
  if (!same_layout(tensor, v)) {
    at::Tensor expected = at::empty_strided(v.sizes, v.strides, tensor.options());
    expected.copy_(tensor);
    tensor = std::move(expected);
  }
  frame.data[value] = tensor.numel() ? tensor.mutable_data_ptr() : nullptr;
  frame.tensors[value] = std::move(tensor);
}

c10::IValue Plan::resolve(const Argument& argument, Frame& frame) const {
  if (argument.kind == Argument::Constant) return argument.constant;
  if (argument.kind == Argument::Value) return tensor_of(argument.value, frame);
  if (argument.optional_elements) {
    c10::List<std::optional<at::Tensor>> list;
    for (const Argument& a : argument.list) {
      const c10::IValue element = resolve(a, frame);
      list.push_back(element.isNone() ? std::nullopt : std::optional<at::Tensor>(element.toTensor()));
    }
    return list;
  }
  c10::List<at::Tensor> list;
  for (const Argument& a : argument.list) list.push_back(resolve(a, frame).toTensor());
  return list;
}

void Plan::run_aten(const Step& step, Frame& frame) const {
  torch::jit::Stack stack;
  stack.reserve(step.call.size());
  if (step.below_autograd) {
    BelowAutograd below;
    for (const Argument& a : step.call) stack.push_back(resolve(a, frame));
    step.op->callBoxed(&stack);
  } else {
    for (const Argument& a : step.call) stack.push_back(resolve(a, frame));
    step.op->callBoxed(&stack);
  }
  Tensors results;
  for (c10::IValue& result : stack) {
    if (result.isTensorList())
      for (const at::Tensor& t : result.toTensorVector()) results.push_back(t);
    else
      results.push_back(result.isTensor() ? result.toTensor() : at::Tensor());
  }
  for (size_t i = 0; i < step.outs.size(); ++i)
    if (step.outs[i] >= 0) set_result(step.outs[i], i < results.size() ? results[i] : at::Tensor(), frame, step.name);
}

void Plan::run_pack(const Step& step, Frame& frame) const {
  const int source = step.values[0], target = step.values[1];
  const Value& packed = values[target];
  void* from = pointer_of(source, frame);
  uint64_t hash[2];
  content_hash(from, step.span, frame.threads, hash);
  std::shared_ptr<const Packed> current;
  {
    std::lock_guard<std::mutex> lock(packed.slot->mutex);
    current = packed.slot->current;
  }
  if (!current || current->hash[0] != hash[0] || current->hash[1] != hash[1]) {
    auto made = std::make_shared<Packed>(packed.nbytes);
    made->hash[0] = hash[0], made->hash[1] = hash[1];
    void* pointers[2] = {from, made->data};
    step.kernel(pointers, step.arguments.data(), frame.threads);
    current = made;
    std::lock_guard<std::mutex> lock(packed.slot->mutex);
    packed.slot->current = current;
  }
  frame.data[target] = current->data;
  frame.packed.push_back(std::move(current));
}

void Plan::run_python(const Step& step, Frame& frame) const {
  PyGILState_STATE state = PyGILState_Ensure();
  struct Release { PyGILState_STATE s; ~Release() { PyGILState_Release(s); } } release{state};
  Ref arguments(PyTuple_New(static_cast<Py_ssize_t>(step.values.size())));
  if (!arguments) throw PythonError();
  for (size_t i = 0; i < step.values.size(); ++i)
    PyTuple_SET_ITEM(arguments.get(), i, wrap(tensor_of(step.values[i], frame)));
  Ref result(PyObject_CallObject(step.callable.get(), arguments.get()));
  if (!result) throw PythonError();
  PyObject* const* items = nullptr;
  PyObject* single = result.get();
  size_t count = 1;
  if (is_tensor(single)) {
    items = &single;
  } else if (PyTuple_Check(single) || PyList_Check(single)) {
    items = PySequence_Fast_ITEMS(single);
    count = PySequence_Fast_GET_SIZE(single);
  }
  TORCH_CHECK_TYPE(items != nullptr, "a Python step must return a tensor, or a tuple or list of tensors, not ",
                   Py_TYPE(single)->tp_name);
  TORCH_CHECK_VALUE(count == step.outs.size(), "a Python step returned ", count, " tensors where the trace had ",
                    step.outs.size());
  for (size_t i = 0; i < count; ++i) {
    if (step.outs[i] < 0) continue;
    TORCH_CHECK_TYPE(is_tensor(items[i]), "a Python step returned ", Py_TYPE(items[i])->tp_name, " instead of a tensor");
    set_result(step.outs[i], unpack(items[i]), frame, "a Python step");
  }
}

}  // namespace fuser
