"""Fused graph -> `Plan`: every node becomes a value or a step, in graph order.

Values may exist in several layouts: a convolution writes channels-last, and whoever needs the traced strides gets a
copy, made once. Reshapes of dense memory and all other views cost nothing: they are offsets and strides.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from fuser.codegen.aten import encode_arguments
from fuser.codegen.cpp import regions
from fuser.codegen.plan import AtenStep, Plan, PythonStep, Value, channels_last_strides, same_layout
from fuser.fused import FusedNode, tensor_meta
from fuser.passes.fuse import why_left_alone
from fuser.program import Program

aten = torch.ops.aten

# Operations that take channels-last inputs as they are and answer in the layout they were given.
_LAYOUT_AGNOSTIC = {
    aten.max_pool2d_with_indices.default,
    aten.avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten.mean.dim,
    aten.upsample_nearest2d.vec,
    aten.upsample_nearest2d.default,
    aten.cat.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.constant_pad_nd.default,
}


class LoweringError(Exception):
    """The program can't be turned into a plan; the message says why."""


class Lowering:
    """Builds the plan of one fused program. Kernels whose source is in `refused` could not be built: do without."""

    def __init__(self, program: Program, refused: frozenset[str] = frozenset()) -> None:
        self.refused = refused
        self.program = program
        self.module = program.graph_module
        self.plan = Plan()
        self.places: dict[Node, list[int]] = {}
        self.items: dict[Node, list[int | None]] = {}
        self.left_alone: list[tuple[str, str, str, str]] = []  # node, operator, shape, reason
        self.written = _written_inputs(program)

    def run(self) -> Plan:
        position = 0
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                value = tensor_meta(node)
                strides = node.meta.get("layout", value.stride())
                self.define(node, Value("input", tuple(value.shape), strides, value.dtype, index=position))
                position += 1
            elif node.op == "get_attr":
                tensor = getattr(self.module, node.target)
                node.meta["val"] = node.meta.get("val", tensor)
                self.define(node, Value("constant", tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor=tensor))
            elif node.op == "output":
                fixed = self.program.fixed_results
                self.plan.outputs = [
                    self.traced(n) if fixed is None or i < fixed else self.kept(n) for i, n in enumerate(node.args[0])
                ]
            elif "fused" in node.meta:
                self.fused(node, node.meta["fused"])
            else:
                self.unfused(node)
        return self.plan

    def unfused(self, node: Node) -> None:
        if node.target is operator.getitem:
            self.item(node)
        elif self.is_view(node):
            self.view(node)
        else:
            self.aten(node)

    def fused(self, node: Node, fused: FusedNode) -> None:
        """The region's kernels, or its members one by one where one of the kernels could not be built."""
        if not self.refused:
            return regions.lower(self, node, fused)
        before = (len(self.plan.values), len(self.plan.steps), {n: list(p) for n, p in self.places.items()})
        regions.lower(self, node, fused)
        if not any(getattr(s, "source", None) in self.refused for s in self.plan.steps[before[1] :]):
            return None
        del self.plan.values[before[0] :], self.plan.steps[before[1] :]
        self.places = before[2]
        fused.notes[:] = ["its members one by one: a kernel could not be built"]
        return self.members(node, fused)

    def members(self, node: Node, fused: FusedNode) -> None:
        for inner, outer in zip(fused.members.graph.find_nodes(op="placeholder"), node.args):
            self.places[inner] = self.places[outer]
        for inner in fused.members.graph.nodes:
            if inner.op == "call_function":
                self.unfused(inner)
        result = fused.members.graph.output_node().args[0]
        if isinstance(result, Node):
            self.places[node] = self.places[result]
        else:
            self.items[node] = [self.traced(n) for n in result]

    # Values and their layouts

    def define(self, node: Node, value: Value) -> int:
        """A new value that holds `node`."""
        value.node = node.name
        index = self.plan.add(value)
        self.places.setdefault(node, []).append(index)
        return index

    def buffer(self, node: Node | None, sizes: tuple, strides: tuple, dtype: torch.dtype) -> int:
        """Memory that a kernel will write, holding `node` (None: a temporary)."""
        value = Value("buffer", tuple(sizes), tuple(strides), dtype)
        return self.plan.add(value) if node is None else self.define(node, value)

    def any_place(self, node: Node) -> int:
        """The value that holds `node`, in whatever layout it was made."""
        return self.places[node][0]

    def in_layout(self, node: Node, strides: tuple[int, ...]) -> int:
        """A value that holds `node` with just these strides; copied, once, where none has them."""
        for place in self.places[node]:
            value = self.plan.values[place]
            if same_layout(value.sizes, value.strides, strides):
                return place
        source = self.any_place(node)
        value = self.plan.values[source]
        target = self.buffer(node, value.sizes, strides, value.dtype)
        regions.copy(self, source, target)
        return target

    def traced(self, node: Node) -> int:
        """A value that holds `node` with the strides that tracing recorded."""
        return self.in_layout(node, tensor_meta(node).stride())

    def kept(self, node: Node) -> int:
        """A value that holds `node` in dense memory of its own, in whatever layout it was made."""
        place = self.any_place(node)
        value = self.plan.values[place]
        own = value.kind in ("buffer", "aten") and len(value.sizes) >= 3
        dense = own and same_layout(value.sizes, value.strides, channels_last_strides(value.sizes))
        return place if dense else self.traced(node)

    def is_channels_last(self, node: Node) -> bool:
        """Whether `node` was made channels-last although the trace has it otherwise."""
        value = self.plan.values[self.any_place(node)]
        return (
            len(value.sizes) >= 3
            and same_layout(value.sizes, value.strides, channels_last_strides(value.sizes))
            and not same_layout(value.sizes, value.strides, tensor_meta(node).stride())
        )

    def constant(self, tensor: torch.Tensor) -> int:
        return self.plan.add(Value("constant", tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor=tensor))

    def is_weight(self, value: int) -> bool:
        """Whether a packed copy of this value is worth keeping between calls."""
        root = self.plan.values[self.plan.root(value)]
        return root.kind == "input" and self.program.inputs[root.index].weight and root.index not in self.written

    # Nodes that are not fused

    def is_view(self, node: Node) -> bool:
        """A result that shares its first argument's memory, which the static plan then addresses by itself."""
        values = node.meta.get("val")
        values = values if isinstance(values, (list, tuple)) else [values]
        if not _aliases(node) or not all(isinstance(v, torch.Tensor) for v in values):
            return False
        base = tensor_meta(node.args[0])
        return all(
            v.dtype == base.dtype and v.is_conj() == base.is_conj() and v.is_neg() == base.is_neg() for v in values
        )

    def owned(self, node: Node) -> int:
        """A value that holds `node` in memory of its own: what aliases it may outlive a buffer's place in the arena."""
        place = self.traced(node)
        value = self.plan.values[place]
        if self.plan.values[self.plan.root(place)].kind != "buffer":
            return place
        target = self.plan.add(Value("aten", value.sizes, value.strides, value.dtype))
        self.plan.steps.append(
            AtenStep(aten.clone.default, encode_arguments(aten.clone.default, (node,), {}, lambda _: place), [target])
        )
        return target

    def view(self, node: Node) -> None:
        base = self.traced(node.args[0])
        start = tensor_meta(node.args[0]).storage_offset()

        def value(v: torch.Tensor) -> Value:
            return Value("view", tuple(v.shape), v.stride(), v.dtype, base=base, offset=v.storage_offset() - start)

        if isinstance(node.meta["val"], torch.Tensor):
            self.define(node, value(node.meta["val"]))
        else:
            self.items[node] = [self.plan.add(value(v)) for v in node.meta["val"]]

    def item(self, node: Node) -> None:
        place = self.items[node.args[0]][node.args[1]]
        self.places[node] = [place]
        self.plan.values[place].node = node.name

    def aten(self, node: Node) -> None:
        """One step that calls the operator, boxed where every argument can be, else through Python."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return self.python(node)
        as_made = target in _LAYOUT_AGNOSTIC and any(
            self.is_channels_last(n) for n in node.all_input_nodes if tensor_meta(n).dim() >= 3
        )
        if as_made:
            _retrace(self, node)
        where = self.channels_last if as_made else self.owned if _aliases(node) else self.traced
        arguments = encode_arguments(target, node.args, node.kwargs, where)
        results = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]
        pure = not target._schema.is_mutable
        returned = [r.alias_info is not None and r.alias_info.is_write for r in target._schema.returns]
        if any(returned):
            outs = [-1] * len(returned)
            self.places[node] = self.places[node.args[0]]
        else:
            used = {u.args[1] for u in node.users} if isinstance(node.meta["val"], (list, tuple)) else {0}
            layouts = node.meta.get("as_made", results)
            outs = [self.result(layouts[i]) if i in used else -1 for i in range(len(results))]
            if isinstance(node.meta["val"], (list, tuple)):
                self.items[node] = outs
            else:
                self.places[node] = list(outs)
                self.plan.values[outs[0]].node = node.name
        self.plan.steps.append(AtenStep(target, arguments, outs, pure))
        self.leave_alone(node)

    def result(self, value: torch.Tensor) -> int:
        return self.plan.add(Value("aten", tuple(value.shape), value.stride(), value.dtype))

    def channels_last(self, node: Node) -> int:
        if len(tensor_meta(node).shape) >= 3 and self.is_channels_last(node):
            return self.any_place(node)
        return self.traced(node)

    def python(self, node: Node) -> None:
        if any(isinstance(v, (dict, Node)) for v in node.kwargs.values()) or not all(
            isinstance(a, Node) for a in node.args
        ):
            raise LoweringError(f"{node.target} takes arguments that a plan can't pass on")
        results = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]
        outs = [self.result(v) for v in results]
        target, kwargs = node.target, dict(node.kwargs)
        self.plan.steps.append(PythonStep(lambda *t: target(*t, **kwargs), [self.traced(a) for a in node.args], outs))
        if isinstance(node.meta["val"], (list, tuple)):
            self.items[node] = outs
        else:
            self.places[node] = list(outs)
        self.leave_alone(node)

    def leave_alone(self, node: Node, reason: str | None = None) -> None:
        value = node.meta["val"][0] if isinstance(node.meta["val"], (list, tuple)) else node.meta["val"]
        shape = "x".join(map(str, value.shape)) if isinstance(value, torch.Tensor) else ""
        self.left_alone.append((node.name, str(node.target), shape, reason or why_left_alone(node)))


def _retrace(lowering: Lowering, node: Node) -> None:
    """Which strides the operator answers with when its inputs come channels-last."""

    def as_made(n: Node) -> torch.Tensor:
        value = lowering.plan.values[lowering.channels_last(n)]
        return torch.empty_strided(value.sizes, value.strides, dtype=value.dtype)

    with next(tensor_meta(n).fake_mode for n in node.all_input_nodes), torch.no_grad():
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), as_made)
        result = node.target(*args, **kwargs)
    node.meta["as_made"] = list(result) if isinstance(result, (list, tuple)) else [result]


def _aliases(node: Node) -> bool:
    """Whether the operator's result may share the memory of its first argument (without writing to it)."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is aten._unsafe_view.default:
        return True
    first = node.target._schema.arguments[0].alias_info
    return first is not None and not first.is_write


def _written_inputs(program: Program) -> set[int]:
    """Positions of the inputs that the program itself changes."""
    positions = {node: i for i, node in enumerate(program.placeholders)}
    writes = [n for n in program.graph_module.graph.nodes if n.target is aten.copy_.default]
    return {positions[n.args[0]] for n in writes if n.args[0] in positions}
