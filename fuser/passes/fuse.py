"""Grow regions from anchors, and from what pointwise work is left, and put one fused node in place of each.

A region stays convex: no path leaves it and comes back. While one grows, `tainted` holds the later nodes that depend
on it but are not in it; a node with a tainted input can't join. Impure nodes keep their order, so behind a tainted
impure node all impure nodes are tainted. The graph is contracted after every region, so the next one sees it as one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import Graph, GraphModule, Node

from fuser.fused import FusedNode, Operation, tensor_meta
from fuser.passes.canonicalise import is_pure
from fuser.patterns import Pattern, compute_dtype, operation, pattern_of
from fuser.program import LazyGraphModule, Program, unchanged_copy

aten = torch.ops.aten
# Where such an operation maps dense memory to dense memory, it only renames rows and columns.
_VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip
# A kernel's tile or loop keeps this many tensors in flight before registers and pointers run out.
MOST_LOADS, MOST_STORES, MOST_MEMBERS = 12, 4, 64


def fuse(program: Program) -> Program:
    """`program` with every chain that a pattern describes replaced by one `call_module` node (`meta["fused"]`)."""
    program = unchanged_copy(program)
    _Fusion(program.graph_module).run()
    program.graph_module.recompile()
    return program


class _Fusion:
    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.graph: Graph = module.graph
        self.operations: dict[Node, Operation | str] = {}
        self.names: dict[str, int] = {}
        self.gone: set[Node] = set()

    def run(self) -> None:
        for node in list(self.graph.nodes):
            pattern = pattern_of(node)
            if pattern is None:
                continue
            reason = pattern.guard(node)
            if reason is None:
                region = _Region(self, node, pattern)
                if pattern.prologue:
                    region.take_prologue()
                if pattern.epilogue:
                    region.grow()
                if len(region.members) > 1 or pattern.alone:
                    self.contract(region)
                    continue
                reason = "nothing to fuse onto it"
            node.meta["left_alone"] = reason
        for node in list(self.graph.nodes):
            if node not in self.gone and self.is_pointwise(node):
                region = _Region(self, node, None)
                region.grow()
                self.contract(region)

    def operation(self, node: Node) -> Operation | str:
        if node not in self.operations:
            self.operations[node] = operation(node)
        return self.operations[node]

    def is_pointwise(self, node: Node) -> bool:
        return (
            node.op == "call_function"
            and isinstance(node.meta.get("val"), torch.Tensor)
            and isinstance(self.operation(node), Operation)
            and tensor_meta(node).numel() > 0
        )

    def contract(self, region: _Region) -> None:
        """Replace the region by a node that calls the subgraph of its members."""
        members = [n for n in self.graph.nodes if n in region.members]
        outputs = [n for n in members if any(user not in region.members for user in n.users)]
        inputs = _inputs_of(members, region.members)
        fused = self.describe(region, members, inputs, outputs)
        for node in [n for n in self.graph.nodes if n in region.tainted and n < members[-1]][::-1]:
            members[-1].append(node)
        self.module.add_submodule(fused.name, fused.members)
        with self.graph.inserting_after(members[-1]):
            call = self.graph.call_module(fused.name, tuple(inputs))
        call.meta["fused"] = fused
        replacements = [call]
        call.meta["val"] = tensor_meta(outputs[0])
        if len(outputs) > 1:
            call.meta["val"] = tuple(tensor_meta(n) for n in outputs)
            replacements = []
            for position in reversed(range(len(outputs))):
                with self.graph.inserting_after(call):
                    item = self.graph.call_function(operator.getitem, (call, position))
                item.meta["val"] = tensor_meta(outputs[position])
                replacements.insert(0, item)
        for old, new in zip(outputs, replacements):
            for user in old.users:
                self.operations.pop(user, None)  # its operands change
            old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in region.members)
        for node in reversed(members):
            self.graph.erase_node(node)
        self.gone.update(members)

    def describe(self, region: _Region, members: list[Node], inputs: list[Node], outputs: list[Node]) -> FusedNode:
        graph, copies = Graph(), {}
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta["val"] = tensor_meta(node)
        for node in members:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            step = self.operations.get(node)
            if isinstance(step, Operation):
                operands = tuple(copies[o] if isinstance(o, Node) else o for o in step.operands)
                copies[node].meta["operation"] = Operation(step.function, operands)
            elif node.target in _VIEWS and node is not region.seed:
                copies[node].meta["is_view"] = True
        results = tuple(copies[n] for n in outputs)
        graph.output(results[0] if len(results) == 1 else results)
        name = self.unique(region.chain(members))
        subgraph = LazyGraphModule(torch.nn.Module(), graph, class_name=name)
        kind = region.pattern.name if region.pattern else "pointwise"
        return FusedNode(name, kind, subgraph, copies[region.seed] if region.pattern else None)

    def unique(self, chain: str) -> str:
        """`conv_bias_relu_0`, `conv_bias_relu_1`, ..."""
        count = self.names.get(chain, 0)
        self.names[chain] = count + 1
        return f"{chain}_{count}"


def why_left_alone(node: Node) -> str:
    """The reason why nothing fused `node`, for the report."""
    reason = node.meta.get("left_alone")
    if reason is None:
        step = operation(node) if isinstance(node.meta.get("val"), torch.Tensor) else "it has several results"
        reason = step if isinstance(step, str) else "the result is empty"
    return reason


class _Region:
    """Nodes that become one kernel: a seed, and what joins it."""

    def __init__(self, fusion: _Fusion, seed: Node, pattern: Pattern | None) -> None:
        self.fusion, self.seed, self.pattern = fusion, seed, pattern
        self.members: set[Node] = {seed}
        self.tainted: set[Node] = set()
        self.shape = tensor_meta(seed).shape
        self.dtype = _arithmetic(tensor_meta(seed).dtype) if pattern else compute_dtype(seed)

    def grow(self) -> None:
        waiting = set(self.seed.users)
        impure_tainted = False
        node = self.seed
        while waiting:
            node = node.next
            touched = node in waiting or any(n in self.tainted for n in node.all_input_nodes)
            if impure_tainted and not is_pure(node):
                touched = True
            if not touched:
                continue
            waiting.discard(node)
            if self.accepts(node):
                self.members.add(node)
                self.shape = tensor_meta(node).shape
                self.pull(node)
                waiting.update(node.users)
            else:
                self.tainted.add(node)
                impure_tainted |= node.op != "output" and not is_pure(node)
            waiting = {n for n in waiting if n not in self.members and n not in self.tainted}

    def take_prologue(self) -> None:
        """Take in what makes the anchor's first argument and serves nothing else."""
        self.shape = tensor_meta(self.seed.args[0]).shape
        self.pull(self.seed)
        self.shape = tensor_meta(self.seed).shape

    def accepts(self, node: Node) -> bool:
        if len(self.members) >= MOST_MEMBERS or any(n in self.tainted for n in node.all_input_nodes):
            return False
        if node.target in _VIEWS:
            return self.accepts_view(node)
        if not self.fusion.is_pointwise(node) or tensor_meta(node).shape != self.shape:
            return False
        return compute_dtype(node) == self.dtype and self.reads_alike(node) and self.small_enough(node)

    def reads_alike(self, node: Node) -> bool:
        """Whether what `node` reads from outside is broadcast against the same shape by all members that read it."""
        shape = tensor_meta(node).shape
        return all(
            tensor_meta(user).shape == shape
            for source in node.all_input_nodes
            if source not in self.members
            for user in source.users
            if user in self.members
        )

    def accepts_view(self, node: Node) -> bool:
        """A reshape of the anchor's dense result that leaves its elements in order."""
        if self.pattern is None or not self.pattern.through_views or len(node.args[0].users) != 1:
            return False
        before, after = tensor_meta(node.args[0]), tensor_meta(node)
        dense = before.is_contiguous() and after.is_contiguous()
        return node.args[0] in self.members and dense and self.continues_pointwise(node)

    def continues_pointwise(self, node: Node) -> bool:
        """Joining a view only pays when pointwise work follows it."""
        return any(self.fusion.is_pointwise(user) or user.target in _VIEWS for user in node.users)

    def small_enough(self, node: Node) -> bool:
        members = self.members | {node}
        outputs = sum(1 for n in members if any(user not in members for user in n.users))
        return len(_inputs_of(members, members)) <= MOST_LOADS and outputs <= MOST_STORES + len(node.users)

    def pull(self, node: Node) -> None:
        """Take in pointwise producers of the same shape that only the region uses, but not what the anchor reads."""
        for producer in node.all_input_nodes:
            if producer in self.members or producer in self.tainted or not self.fusion.is_pointwise(producer):
                continue
            if self.pattern is not None and self.seed in producer.users and not self.pattern.prologue:
                continue
            fits = tensor_meta(producer).shape == self.shape and compute_dtype(producer) == self.dtype
            only_here = all(user in self.members for user in producer.users)
            if fits and only_here and self.reads_alike(producer) and self.small_enough(producer):
                self.members.add(producer)
                self.pull(producer)

    def chain(self, members: list[Node]) -> str:
        """The name that says what is in the region, e.g. `conv_bias_relu`."""
        words = [self.pattern.name] if self.pattern else []
        if self.pattern and self.pattern.bias is not None and self.seed.args[self.pattern.bias] is not None:
            words.append("bias")
        steps = [
            self.fusion.operations[n].function.name
            for n in members
            if n in self.fusion.operations and isinstance(self.fusion.operations[n], Operation)
        ]
        steps = steps if len(steps) <= 6 else [*steps[:5], f"and_{len(steps) - 5}_more"]
        words = [*steps, *words] if self.pattern and self.pattern.prologue else [*words, *steps]
        return "_".join(words) or "view"


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _inputs_of(members: Iterable[Node], inside: set[Node]) -> list[Node]:
    """The nodes outside that members read, each once, in order of first use."""
    found: dict[Node, None] = {}
    for node in members:
        for source in node.all_input_nodes:
            if source not in inside:
                found[source] = None
    return list(found)
