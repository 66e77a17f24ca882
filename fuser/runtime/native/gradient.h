// A plan whose gradient is another plan: called under autograd, it records one node, whose backward runs compiled.
#pragma once
#include "plan.h"

namespace fuser {

// Where a tensor that the backward plan reads comes from.
struct Source {
  enum Kind { Input, Result, Cotangent } kind;
  int index;
};

// The backward plan for one choice of defined cotangents and wanted gradients.
struct Pullback {
  std::shared_ptr<Plan> plan;
  std::vector<Source> sources;           // of the plan's inputs, in order
  std::vector<int> gradients;            // per variable, the plan's result, or -1: no gradient
};

class Function : public std::enable_shared_from_this<Function> {
 public:
  // `plan` gives the results, `results` of them, then `draws` random draws and what else is kept for the gradient;
  // the results at `saved` are what the backward plans read. `higher` is given the draws behind the inputs. `differentiable` are the results
  // that cotangents belong to, `variables` the inputs that gradients belong to; `unread` inputs may change meanwhile. `derive(defined, wanted)` makes a
  // Pullback; `higher(inputs, cotangents, wanted)` computes gradients that can be differentiated again.
  std::shared_ptr<Plan> plan;
  size_t results = 0, draws = 0;
  std::vector<int> saved;
  std::vector<int> differentiable, variables, unread;
  Ref derive, higher;

  // Runs the plan and records the node. The GIL must be held.
  Tensors call(Inputs inputs) const;

  // The pullback for these cotangents and gradients, made when first wanted. Takes the GIL if it must make one.
  std::shared_ptr<const Pullback> pullback(const std::vector<bool>& defined, const std::vector<bool>& wanted) const;

  ~Function();

 private:
  mutable std::mutex mutex_;
  mutable std::unordered_map<std::string, std::shared_ptr<const Pullback>> pullbacks_;
};

PyTypeObject* make_function_type();

}  // namespace fuser
