// A compiled program: values, steps, and the memory they run in. See fuser/runtime/executable.py for the specification.
#pragma once
#include "torch_python.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace fuser {

// An owned reference to a Python object; the GIL must be held wherever one is copied or dropped.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  static Ref borrow(PyObject* object) { return Ref(Py_XNewRef(object)); }
  Ref(const Ref& other) : object_(Py_XNewRef(other.object_)) {}
  Ref(Ref&& other) noexcept : object_(other.object_) { other.object_ = nullptr; }
  Ref& operator=(Ref other) noexcept { std::swap(object_, other.object_); return *this; }
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { PyObject* o = object_; object_ = nullptr; return o; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Thrown when a Python exception is already set.
struct PythonError {};

// Memory for a plan's intermediate values. A run takes a block and gives it back; several threads each have their own.
class ArenaPool {
 public:
  ArenaPool() = default;
  ArenaPool(const ArenaPool&) = delete;
  ~ArenaPool();

  struct Block {
    char* data = nullptr;
    size_t size = 0;
  };

  class Lease {
   public:
    Lease(ArenaPool* pool, size_t size) : pool_(pool) { if (size) block_ = pool->take(size); }
    ~Lease() { if (block_.data) pool_->give_back(block_); }
    Lease(const Lease&) = delete;
    char* data() const { return block_.data; }

   private:
    ArenaPool* pool_;
    Block block_;
  };

 private:
  Block take(size_t size);
  void give_back(Block block);

  std::mutex mutex_;
  std::vector<Block> free_;
};

// Where the memory of results comes from.
c10::Allocator* result_allocator();

// Packed copies of weights, by key. An entry is replaced when the weight's content has changed.
struct Packed {
  uint64_t hash[2];
  char* data;
  explicit Packed(size_t size);
  ~Packed();
  Packed(const Packed&) = delete;
};

struct PackSlot {
  std::mutex mutex;
  std::shared_ptr<const Packed> current;
};

class PackStore {
 public:
  std::shared_ptr<PackSlot> slot(const std::string& key);

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<PackSlot>> slots_;
};

// 128 bits that change whenever any byte does, whatever version counters say.
void content_hash(const void* data, size_t size, int threads, uint64_t (&hash)[2]);

using Kernel = void (*)(void** pointers, const int64_t* arguments, int threads);

struct Value {
  enum Kind { Input, Constant, Arena, Fresh, View, Aten, Packed_ } kind;
  int64_t index = 0;                     // of the input
  int root = 0;                          // the value whose memory this is: itself unless a view
  int64_t offset = 0;                    // bytes: into the arena, or from the root's data
  int64_t elements = 0;                  // a view's offset from its root, in elements
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  at::Tensor constant;
  size_t nbytes = 0;
  std::shared_ptr<PackSlot> slot;
};

struct Argument {
  enum Kind { Constant, Value, List } kind;
  c10::IValue constant;
  int value = 0;
  std::vector<Argument> list;
  bool optional_elements = false;
};

struct Step {
  enum Kind { Kernel_, Pack, Aten, Python } kind;
  std::string name;
  Kernel kernel = nullptr;
  std::vector<int> values;               // a kernel's tensors; a pack's source and target; a Python call's arguments
  std::vector<int64_t> arguments;
  size_t span = 0;                       // bytes a pack's source covers
  std::optional<c10::OperatorHandle> op;
  std::vector<Argument> call;
  std::vector<int> outs;
  bool below_autograd = true;
  Ref callable;
  std::vector<int> releases;             // ATen's results that nothing reads after this step
};

struct Frame;

// Few enough in most calls that none of them needs the heap.
using Tensors = c10::SmallVector<at::Tensor, 8>;

// A plan's inputs, which the caller keeps alive by their Python objects: to copy a tensor that only Python owns costs
// more than all the rest, because torch then takes the GIL to count its own reference to the Python object.
using Inputs = at::ArrayRef<const at::Tensor*>;

class Plan {
 public:
  Plan(PyObject* spec, std::shared_ptr<PackStore> packs, std::shared_ptr<ArenaPool> arenas);

  // Results in order. Gives the GIL up meanwhile if the plan is long.
  // The layouts must be those of the trace, which a signature tells; `check_layouts` is for callers without one.
  // The caller has the GIL unless it says otherwise.
  // Results that are views of the plan's own memory are known to autograd as such if `views` is set.
  Tensors run(Inputs given, bool holds_gil = true, bool views = true) const;

  // The same for inputs of the right shapes and dtypes, whatever their strides: those of other strides are copied.
  Tensors run_as_traced(Inputs given, bool holds_gil) const;
  void check_layouts(Inputs given) const;

  // Whether memory that the plan writes in place may belong to another of the inputs too. The trace took every input
  // for memory of its own, so such a call must run eagerly.
  bool writes_shared_memory(Inputs given) const;

  size_t inputs = 0;
  std::vector<int> outputs;
  std::vector<Value> values;

 private:
  void read_value(PyObject* item);
  void read_step(PyObject* item);
  Argument read_argument(PyObject* item, const c10::TypePtr& type, const std::string& op, const std::string& name);
  int value_id(PyObject* item) const;
  void find_releases();
  void check_order() const;
  void note_writes(const Step& step);
  void check_inputs(Inputs given) const;
  void execute(Frame& frame) const;
  void run_aten(const Step& step, Frame& frame) const;
  void run_pack(const Step& step, Frame& frame) const;
  void run_python(const Step& step, Frame& frame) const;
  void set_result(int value, at::Tensor tensor, Frame& frame, const std::string& name) const;
  c10::IValue resolve(const Argument& argument, Frame& frame) const;
  at::Tensor tensor_of(int value, Frame& frame) const;
  void* pointer_of(int value, Frame& frame) const;

  std::vector<Step> steps_;
  std::vector<bool> written_;            // per input, whether a step writes it in place; empty if none is
  size_t arena_bytes_ = 0;
  bool release_gil_ = false;
  std::shared_ptr<PackStore> packs_;
  std::shared_ptr<ArenaPool> arenas_;
};

// Calls `visit(value)` for every value that an argument of an ATen step mentions.
template <class F>
void for_each_value(const Argument& argument, F&& visit) {
  if (argument.kind == Argument::Value) visit(argument.value);
  for (const Argument& child : argument.list) for_each_value(child, visit);
}

int thread_count();

}  // namespace fuser
