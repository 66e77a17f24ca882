// From a Python call to a plan: guards on the model's state, the call's signature, and the table of plans.
#pragma once
#include "plan.h"

#include <string_view>

namespace fuser {

// How a result nests, and the objects it is made of.
class Function;

struct Template {
  enum Kind { Tensor, Tuple, List, Dict, Constant, Call } kind = Constant;
  Py_ssize_t index = 0;
  std::vector<Template> children;
  std::vector<Ref> keys;
  Ref object;
};

// Raises ValueError for a structure of the wrong form, or one that mentions a result past the last.
Template read_template(PyObject* item, size_t results);

struct Entry {
  std::shared_ptr<Plan> plan;            // null: this signature runs eagerly
  std::shared_ptr<Function> function;    // where a gradient is wanted: it records what autograd needs
  Template result;
  std::vector<Ref> kept;                 // objects whose addresses are part of the signature
  uint64_t last_used = 0;
};

// Signature -> entry; beyond `capacity` the entry that was unused longest goes.
class Table {
 public:
  explicit Table(size_t capacity) : capacity_(capacity) {}
  std::shared_ptr<Entry> find(std::string_view signature);
  void add(std::string signature, std::shared_ptr<Entry> entry);
  size_t size() const { return entries_.size(); }

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
  };
  using Entries = std::unordered_map<std::string, std::shared_ptr<Entry>, Hash, std::equal_to<>>;
  size_t capacity_;
  uint64_t clock_ = 0;
  Entries entries_;
  Entries::value_type* latest_ = nullptr;  // what was found last, which is mostly what is asked for next
};

// One thing that must be as it was when the plans were bound.
struct Guard {
  enum Kind { Items, Empty, Cell, Item, Attribute } kind;
  Ref container;
  std::vector<Ref> keys, values;
  bool holds() const;
};

// The words of a signature, and the tensors among the arguments, in order.
struct Call {
  std::vector<uint64_t> words;
  std::vector<PyObject*> tensors;        // borrowed from the arguments
  std::vector<PyObject*> kept;           // borrowed: objects that count by address
  std::string unsupported;

  void clear() { words.clear(); tensors.clear(); kept.clear(); unsupported.clear(); }
  std::string_view bytes() const { return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(uint64_t)}; }
  void add_context();
  void add_tensor(PyObject* object, bool captured);
  bool add(PyObject* object, int depth);
};

void set_parameter_class(PyObject* cls);

}  // namespace fuser
