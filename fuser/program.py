"""A `Program` is an ATen-level FX graph with a calling signature; its derivatives are Programs too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.torch_private import FakeTensor, FakeTensorMode, temporarily_clear_interpreter_stack


@dataclass(frozen=True)
class Input:
    """One tensor that a Program is called with.

    `captured` tensors belong to the model (parameters, buffers, tensors a function closes over); the others are
    arguments of the call. `weight` tells that the content rarely changes, so a packed copy is worth keeping;
    `differentiable` that derivatives are taken with respect to it (buffers are state, not variables).
    """

    name: str
    captured: bool
    weight: bool
    differentiable: bool = True


@dataclass(frozen=True)
class Program:
    """An ATen graph, what its placeholders mean, and how its flat results nest.

    The graph returns a flat tuple of tensors. `structure` says how they nest: ("tensor", i), ("tuple", [..]),
    ("list", [..]), ("dict", [(key, ..)]), ("const", object) or ("call", callable, [..]).
    Writes to inputs (a running mean, an argument changed in place) are `aten.copy_` nodes at the end of the graph.
    """

    graph_module: GraphModule
    inputs: tuple[Input, ...]
    structure: Any

    @property
    def placeholders(self) -> list[Node]:
        return self.graph_module.graph.find_nodes(op="placeholder")

    @property
    def results(self) -> tuple[Any, ...]:
        """The arguments of the graph's output node, flat."""
        return tuple(self.graph_module.graph.output_node().args[0])

    def variables(self) -> list[int]:
        """Positions of the inputs that derivatives are taken with respect to: floating-point, and no buffers."""
        return [
            i
            for i, (given, node) in enumerate(zip(self.inputs, self.placeholders))
            if given.differentiable and _is_real(node.meta["val"])
        ]

    def example_inputs(self) -> list[torch.Tensor]:
        """Blank fake tensors with the inputs' shapes, strides and dtypes."""
        return blanks([node.meta["val"] for node in self.placeholders])

    def vjp(self) -> Program:
        """The program of the vector-Jacobian product.

        Takes this program's inputs, then one cotangent per floating-point result; returns one gradient per
        variable (see `variables`), in order. Writes to inputs are left out: they belong to the forward program.
        """
        pure = self._without_writes()
        wanted = self.variables()
        count = len(self.inputs)

        def pullback(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given, cotangents = list(flat[:count]), flat[count:]
            return torch.func.vjp(pure._real_results_of(wanted, given), *(given[i] for i in wanted))[1](cotangents)

        cotangents = [r.meta["val"] for r in self.results if _is_real_node(r)]
        return self._derived(pullback, cotangents, "cotangent")

    def jvp(self) -> Program:
        """The program of the Jacobian-vector product.

        Takes this program's inputs, then one tangent per variable (see `variables`); returns the tangents of
        the floating-point results, in order.
        """
        pure = self._without_writes()
        wanted = self.variables()
        count = len(self.inputs)

        def pushforward(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given, tangents = list(flat[:count]), flat[count:]
            primals = tuple(given[i] for i in wanted)
            return torch.func.jvp(pure._real_results_of(wanted, given), primals, tuple(tangents))[1]

        return self._derived(pushforward, [self.placeholders[i].meta["val"] for i in wanted], "tangent")

    def vmap(self, size: int, in_dims: Sequence[int | None]) -> Program:
        """The program over a new leading axis of `size` for the inputs whose `in_dims` entry is 0."""
        if len(in_dims) != len(self.inputs) or any(d not in (0, None) for d in in_dims):
            raise ValueError(f"in_dims must give 0 or None for each of the {len(self.inputs)} inputs, got {in_dims!r}")
        pure = self._without_writes()
        examples = []
        for value, dim in zip(self.example_inputs(), in_dims):
            examples.append(value if dim is None else value.unsqueeze(0).expand(size, *value.shape).contiguous())
        batched = torch.func.vmap(lambda *flat: tuple(pure.graph_module(*flat)), in_dims=tuple(in_dims))
        return replace(pure, graph_module=trace(batched, examples))

    def _without_writes(self) -> Program:
        """This program with its writes to inputs removed, so that it is a pure function."""
        pure = unchanged_copy(self)
        for node in reversed(pure.graph_module.graph.nodes):
            if node.target is torch.ops.aten.copy_.default:
                pure.graph_module.graph.erase_node(node)
        pure.graph_module.recompile()
        return pure

    def _real_results_of(self, wanted: list[int], given: list[torch.Tensor]) -> Callable:
        """The graph as a function of the inputs at `wanted`, the others held at `given`."""

        def function(*chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
            full = list(given)
            for i, value in zip(wanted, chosen):
                full[i] = value
            results = self.graph_module(*full)
            return tuple(r for r in results if isinstance(r, torch.Tensor) and _is_real(r))

        return function

    def _derived(self, function: Callable, directions: list[torch.Tensor], name: str) -> Program:
        examples = self.example_inputs() + blanks(directions)
        inputs = self.inputs + tuple(Input(f"{name}_{i}", False, False) for i in range(len(directions)))
        module = trace(lambda *flat: tuple(function(*flat)), examples)
        count = len(module.graph.output_node().args[0])
        return Program(module, inputs, ("tuple", [("tensor", i) for i in range(count)]))


def blanks(tensors: Sequence[torch.Tensor]) -> list[FakeTensor]:
    """Fake tensors of one new mode with the metadata of `tensors` and nothing else of theirs: no autograd, no storage.

    A derivative must be traced on such blanks, never on live tensors that a transform has wrapped.
    """
    with temporarily_clear_interpreter_stack(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]


def trace(function: Callable, examples: Sequence[FakeTensor]) -> GraphModule:
    """The ATen graph of `function(*examples)`, which must return a flat tuple.

    Every trace is functionalised: writes to intermediates disappear, writes to inputs become `copy_` at the end.
    Real tensors that `function` reaches by itself become `get_attr` nodes that hold the very tensor.
    """
    mode = next((e.fake_mode for e in examples), None) or FakeTensorMode(allow_non_fake_inputs=True)
    pure = torch.func.functionalize(function, remove="mutations")
    with temporarily_clear_interpreter_stack(), mode, torch.no_grad():
        module = make_fx(pure)(*examples)
        if any(_writes_to_intermediate(node) for node in module.graph.nodes):
            # A composite operation came apart below the functionalisation; now its parts are in the graph.
            module = make_fx(torch.func.functionalize(module, remove="mutations"))(*examples)
        return module


class LazyGraphModule(GraphModule):
    """A GraphModule that generates its code when it is first called or its `code` is asked for: most are only read."""

    def recompile(self) -> None:
        self.__dict__.pop("_code", None)
        type(self).forward = LazyGraphModule.forward

    def forward(self, *args: Any) -> Any:
        super().recompile()
        return self.forward(*args)

    @property
    def code(self) -> str:
        if "_code" not in self.__dict__:
            super().recompile()
        return self._code


def _writes_to_intermediate(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is torch.ops.aten.rrelu_with_noise.default:
        return False  # its noise is a temporary that nothing else reads
    written = [a.alias_info is not None and a.alias_info.is_write for a in node.target._schema.arguments]
    return any(w and isinstance(v, Node) and v.op == "call_function" for w, v in zip(written, node.args))


def unchanged_copy(program: Program) -> Program:
    """The same program with a graph of its own, for a pass to work on."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(program.graph_module.graph, {}))
    return replace(program, graph_module=LazyGraphModule(program.graph_module, graph))


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_real_node(result: Any) -> bool:
    return isinstance(result, Node) and _is_real(result.meta.get("val"))
