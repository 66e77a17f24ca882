"""A `Program` is an ATen-level FX graph with a calling signature; its derivatives are Programs too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.torch_private import (
    FakeTensor,
    FakeTensorMode,
    apart_from_transforms,
    decompositions,
    norm_decompositions,
)


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
    Results behind the first `fixed_results` (None: all) may come in another layout than the traced one.
    """

    graph_module: GraphModule
    inputs: tuple[Input, ...]
    structure: Any
    fixed_results: int | None = None

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

    def vjp(self, wanted: Sequence[int] | None = None, given: Sequence[int] | None = None) -> Program:
        """The program of the vector-Jacobian product.

        Takes this program's inputs, then one cotangent for each of the results at the positions `given` (all the
        floating-point ones); returns one gradient for each of the inputs at the positions `wanted` (all variables,
        see `variables`), in order. Writes to inputs are left out: they belong to the forward program.
        """
        wanted = self.variables() if wanted is None else wanted
        part = self.without_writes()
        if given is not None:
            part = part.returning([part.results[i] for i in given])
        joint = part.joint(wanted, again=True)
        return joint.returning(joint.results[len(joint.results) - len(wanted) :])

    def joint(self, wanted: Sequence[int], again: bool = False) -> Program:
        """This program and its vector-Jacobian product in one graph.

        Takes this program's inputs, then one cotangent per floating-point result. Returns this program's results, the
        values that it writes to inputs (see `writes`), and one gradient for each input at the positions `wanted`. With
        `again` the gradients are made of operations that have derivatives of every order.
        """
        pure = unchanged_copy(self)
        count = len(self.inputs)
        written = [value for _, value in _writes(pure.graph_module.graph)]
        _erase_writes(pure.graph_module.graph)
        output = pure.graph_module.graph.output_node()
        output.args = ((*output.args[0], *written),)
        pure.graph_module.recompile()

        def both(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given, cotangents = list(flat[:count]), flat[count:]
            function = pure._real_results_of(wanted, given, len(self.results))
            primals = (given[i] for i in wanted)
            _, pullback, everything = torch.func.vjp(function, *primals, has_aux=True)
            return *everything, *pullback(cotangents)

        cotangents = [r.meta["val"] for r in self.results if _is_real_node(r)]
        return self._derived(both, cotangents, "cotangent", again)

    @property
    def writes(self) -> list[tuple[Node, Node]]:
        """(input, value) of every write to an input."""
        return _writes(self.graph_module.graph)

    @property
    def draws(self) -> list[Node]:
        """The nodes that draw random numbers."""
        return [n for n in self.graph_module.graph.nodes if _is_draw(n)]

    def returning_draws(self) -> Program:
        """This program with its random draws as further results."""
        program = unchanged_copy(self)
        output = program.graph_module.graph.output_node()
        output.args = ((*output.args[0], *program.draws),)
        program.graph_module.recompile()
        return program

    def with_draws_given(self) -> Program:
        """This program with its random draws as further inputs."""
        program = unchanged_copy(self)
        graph = program.graph_module.graph
        given = []
        for node in program.draws:
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                placeholder = graph.placeholder(f"{node.name}_given")
            placeholder.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(placeholder)
            graph.erase_node(node)
            given.append(Input(placeholder.name, False, False, differentiable=False))
        program.graph_module.recompile()
        return replace(program, inputs=(*program.inputs, *given))

    def returning(self, results: Sequence[Any]) -> Program:
        """The program that returns just these nodes of this one's graph (which it takes over), as a flat tuple."""
        graph = self.graph_module.graph
        graph.output_node().args = (tuple(results),)
        remove_unused(graph)
        self.graph_module.recompile()
        return replace(self, structure=("tuple", [("tensor", i) for i in range(len(results))]))

    def jvp(self, moving: Sequence[int] | None = None) -> Program:
        """The program of the Jacobian-vector product.

        Takes this program's inputs, then one tangent for each of the inputs at the positions `moving` (all variables,
        see `variables`); returns the tangents of the floating-point results, in order.
        """
        pure = self.without_writes()
        wanted = self.variables() if moving is None else moving
        count = len(self.inputs)

        def pushforward(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given, tangents = list(flat[:count]), flat[count:]
            primals = tuple(given[i] for i in wanted)
            function = pure._real_results_of(wanted, given, len(self.results))
            return torch.func.jvp(function, primals, tuple(tangents), has_aux=True)[1]

        tangents = [self.placeholders[i].meta["val"] for i in wanted]
        return self._derived(pushforward, tangents, "tangent", again=True)

    def vmap(self, size: int, in_dims: Sequence[int | None]) -> Program:
        """The program over a new leading axis of `size` for the inputs whose `in_dims` entry is 0."""
        if len(in_dims) != len(self.inputs) or any(d not in (0, None) for d in in_dims):
            raise ValueError(f"in_dims must give 0 or None for each of the {len(self.inputs)} inputs, got {in_dims!r}")
        pure = self.without_writes()
        examples = []
        with apart_from_transforms():
            for value, dim in zip(self.example_inputs(), in_dims):
                examples.append(value if dim is None else value.new_empty(size, *value.shape))
        batched = torch.func.vmap(lambda *flat: tuple(pure.graph_module(*flat)), in_dims=tuple(in_dims))
        return replace(pure, graph_module=trace(batched, examples))

    def primitive(self) -> Program:
        """This program without its writes, and with its normalisations taken apart: differentiable without limit."""
        pure = self.without_writes()
        taken_apart = norm_decompositions()
        if takes_gradients(pure.graph_module) or any(n.target in taken_apart for n in pure.graph_module.graph.nodes):
            pure = replace(pure, graph_module=trace(pure.graph_module, pure.example_inputs(), taken_apart))
        return pure

    def without_writes(self) -> Program:
        """This program with its writes to inputs removed, so that it is a pure function."""
        pure = unchanged_copy(self)
        graph = pure.graph_module.graph
        _erase_writes(graph)
        for node in graph.nodes:
            if updates_statistics(node):
                x, weight, bias, _, _, training, momentum, eps = node.args
                node.target = torch.ops.aten._native_batch_norm_legit.no_stats
                node.args = (x, weight, bias, training, momentum, eps)
        pure.graph_module.recompile()
        return pure

    def _real_results_of(self, wanted: Sequence[int], given: list[torch.Tensor], count: int) -> Callable:
        """The graph as a function of the inputs at `wanted`, the others held at `given`.

        It returns the floating-point ones among its first `count` results, and everything.
        """

        def function(*chosen: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple]:
            full = list(given)
            for i, value in zip(wanted, chosen):
                full[i] = value
            results = tuple(self.graph_module(*full))
            return tuple(r for r in results[:count] if isinstance(r, torch.Tensor) and _is_real(r)), results

        return function

    def _derived(self, function: Callable, directions: list[torch.Tensor], name: str, again: bool) -> Program:
        examples = self.example_inputs() + blanks(directions)
        inputs = self.inputs + tuple(Input(f"{name}_{i}", False, False) for i in range(len(directions)))
        module = trace(lambda *flat: tuple(function(*flat)), examples, decompositions(again))
        count = len(module.graph.output_node().args[0])
        return Program(module, inputs, ("tuple", [("tensor", i) for i in range(count)]))


def _writes(graph: torch.fx.Graph) -> list[tuple[Node, Node]]:
    return [(n.args[0], n.args[1]) for n in graph.nodes if n.target is torch.ops.aten.copy_.default]


def _erase_writes(graph: torch.fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.target is torch.ops.aten.copy_.default:
            graph.erase_node(node)


def _is_draw(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def takes_gradients(module: GraphModule) -> bool:
    """Whether the graph has a gradient operator that derivatives of higher order need taken apart."""
    return any(node.target in decompositions(True) for node in module.graph.nodes)


def updates_statistics(node: Node) -> bool:
    """Whether `node` is a batch norm that changes its running statistics, which its schema does not tell."""
    return node.target is torch.ops.aten.native_batch_norm.default and bool(node.args[5]) and node.args[3] is not None


def remove_unused(graph: torch.fx.Graph) -> None:
    """Erase every node that no result needs, random draws included: they belong to whoever needs their value."""
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


def blanks(tensors: Sequence[torch.Tensor]) -> list[FakeTensor]:
    """Fake tensors of one new mode with the metadata of `tensors` and nothing else of theirs: no autograd, no storage.

    A derivative must be traced on such blanks, never on live tensors that a transform has wrapped.
    """
    with apart_from_transforms(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]


def trace(function: Callable, examples: Sequence[FakeTensor], decomposed: dict | None = None) -> GraphModule:
    """The ATen graph of `function(*examples)`, which must return a flat tuple.

    Every trace is functionalised: writes to intermediates disappear, writes to inputs become `copy_` at the end.
    Real tensors that `function` reaches by itself become `get_attr` nodes that hold the very tensor.
    """
    mode = next((e.fake_mode for e in examples), None) or FakeTensorMode(allow_non_fake_inputs=True)
    pure = torch.func.functionalize(function, remove="mutations")
    with apart_from_transforms(), mode, torch.no_grad():
        module = make_fx(pure, decomposed)(*examples)
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
