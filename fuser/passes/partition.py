"""Split a program and its gradient into what runs forward, what is kept, and what runs backward.

What is kept is a minimum cut: the fewest bytes from which the backward program can compute the rest, where pointwise
work and views may be done again for free and everything else (products, convolutions, reductions, random draws) may
not. So Linear + GELU keeps one tensor, not two, and Linear + ReLU its output alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from fuser.fused import Operation, tensor_meta
from fuser.operators import MAX_POOL2D_GRADIENT
from fuser.passes.canonicalise import is_pure
from fuser.patterns import operation
from fuser.program import Input, LazyGraphModule, Program, remove_unused

aten = torch.ops.aten


@dataclass(frozen=True)
class Split:
    """A program split for the gradients of its inputs at the positions `variables`.

    `forward` returns the program's results and then what is kept. `backward` takes the tensors that `sources` names
    (("input", i) or ("result", i) of the forward program), then a cotangent for each of the `differentiable` results,
    and returns one gradient per variable.
    """

    program: Program
    forward: Program
    backward: Program
    results: int
    variables: tuple[int, ...]
    differentiable: tuple[int, ...]
    sources: tuple[tuple[str, int], ...]

    @property
    def kept(self) -> list[torch.Tensor]:
        """Metadata of what lives from forward to backward and is neither an input nor a result."""
        return [n.meta["val"] for n in self.forward.results[self.results :]]

    def keep_layouts(self, strides: Sequence[Sequence[int]]) -> None:
        """Note in the backward program the strides with which the compiled forward program gives its results."""
        for (kind, index), node in zip(self.sources, self.backward.placeholders):
            if kind == "result":
                node.meta["layout"] = tuple(strides[index])

    @property
    def unread(self) -> tuple[int, ...]:
        """Positions of the inputs that no result's value depends on (running statistics in training, say)."""
        pure = self.program.without_writes()
        remove_unused(pure.graph_module.graph)
        return tuple(i for i, n in enumerate(pure.placeholders) if not n.users)

    def pullback(self, defined: Sequence[bool], wanted: Sequence[bool]) -> tuple[Program, list[int], list[int]]:
        """The backward program where only some cotangents are given and only some gradients wanted.

        Returns the program, the positions among `backward`'s inputs that it takes, and per variable the position of
        its gradient among the results, or -1 where none reaches it.
        """
        graph, copies = Graph(), {}
        count = len(self.sources)
        absent = {n for n, given in zip(self.backward.placeholders[count:], defined) if not given}
        linear = _dependents(self.backward.graph_module.graph, set(self.backward.placeholders[count:]))
        for node in self.backward.graph_module.graph.nodes:
            if node.op == "output":
                continue
            directions = [n for n in node.all_input_nodes if n in linear]
            if node in linear and directions and all(n in absent for n in directions):
                absent.add(node)  # linear in what is not there
                continue
            for missing in directions:
                if missing in absent and missing not in copies:
                    value = tensor_meta(missing).new_empty(tensor_meta(missing).shape)
                    copies[missing] = graph.call_function(
                        aten.zeros.default, (list(value.shape),), {"dtype": value.dtype}
                    )
                    copies[missing].meta["val"] = value
            if node not in copies and not (node.op == "placeholder" and node in absent):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        results, gradients = [], []
        for node, wish in zip(self.backward.results, wanted):
            reached = wish and isinstance(node, Node) and node not in absent
            gradients.append(len(results) if reached else -1)
            if reached:
                results.append(copies[node])
        graph.output(tuple(results))
        remove_unused(graph)
        used = [
            i for i, n in enumerate(self.backward.placeholders) if n in copies and n not in absent and copies[n].users
        ]
        for node in self.backward.placeholders:
            if node in copies and node not in absent and not copies[node].users:
                graph.erase_node(copies[node])
        program = Program(
            LazyGraphModule(self.backward.graph_module, graph),
            tuple(self.backward.inputs[i] for i in used),
            ("tuple", [("tensor", i) for i in range(len(results))]),
        )
        return program, used, gradients


def partition(program: Program, variables: Sequence[int]) -> Split:
    """Split `program` for the gradients of its inputs at the positions `variables` (floating-point ones)."""
    joint = program.joint(variables)
    graph = joint.graph_module.graph
    for node in list(graph.nodes):
        if node.target is aten.native_batch_norm_backward.default and node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])  # in training they play no part
        if node.target is aten.max_pool2d_with_indices_backward.default:
            _pool_without_indices(node)
    results, writes = len(program.results), program.writes
    reached = differentiable_results(program, variables)
    inputs = joint.placeholders[: len(program.inputs)]
    real = [i for i, r in enumerate(program.results) if isinstance(r, Node) and tensor_meta(r).is_floating_point()]
    cotangents = dict(zip(real, joint.placeholders[len(program.inputs) :]))
    outputs = joint.results
    connected = reached_inputs(program, reached)
    gradients = [g if i in connected else None for i, g in zip(variables, outputs[results + len(writes) :])]
    backward = _dependents(graph, set(cotangents.values()))
    kept = _cut(graph, backward, outputs[:results], gradients, inputs, program)
    in_inputs = {n: i for i, n in enumerate(inputs)}
    in_results = {n: i for i, n in reversed(list(enumerate(outputs[:results])))}
    extra = [n for n in kept if n not in in_inputs and n not in in_results]
    sources = [
        ("input", in_inputs[n])
        if n in in_inputs
        else ("result", in_results[n] if n in in_results else results + extra.index(n))
        for n in kept
    ]
    forward = _forward(joint, program, outputs, results, writes, extra)
    back = _backward(joint, kept, [cotangents[i] for i in reached], set(cotangents.values()), gradients)
    return Split(program, forward, back, results, tuple(variables), tuple(reached), tuple(sources))


def _pool_without_indices(node: Node) -> None:
    """The indices of the maxima are found again rather than kept: they take twice the memory of what is pooled."""
    gradient, x, kernel, stride, padding, dilation, ceil, _ = node.args
    if tensor_meta(x).dim() != 4 or tensor_meta(x).dtype not in (torch.float32, torch.float64):
        return
    widen = lambda v: [*v] * (2 // len(v))  # noqa: E731
    node.target = MAX_POOL2D_GRADIENT
    node.args = (gradient, x, widen(kernel), widen(stride or kernel), widen(padding), widen(dilation), ceil)


def differentiable_results(program: Program, variables: Sequence[int]) -> list[int]:
    """Positions of the floating-point results that depend differentiably on the inputs at `variables`."""
    placeholders = program.placeholders
    depends = {placeholders[i] for i in variables}
    for node in program.graph_module.graph.nodes:
        if node.op in ("placeholder", "output") or node.target is aten.detach.default:
            continue
        if any(n in depends for n in node.all_input_nodes) and _may_be_real(node):
            depends.add(node)
    return [i for i, r in enumerate(program.results) if r in depends and tensor_meta(r).is_floating_point()]


def reached_inputs(program: Program, results: Sequence[int]) -> set[int]:
    """Positions of the inputs on which the results at these positions depend differentiably."""
    found: set[Node] = set()
    waiting = [program.results[i] for i in results]
    while waiting:
        node = waiting.pop()
        if node in found or node.target is aten.detach.default or not _may_be_real(node):
            continue
        found.add(node)
        waiting.extend(node.all_input_nodes)
    return {i for i, n in enumerate(program.placeholders) if n in found}


def not_one_node(program: Program) -> str | None:
    """Why autograd can't record the program as one node: results that alias inputs or one another, complex numbers."""
    owners: set[Node] = set()
    if any(not isinstance(n.meta["val"], torch.Tensor) or n.target._schema.is_mutable for n in program.draws):
        return "a random operation that is more than a draw"
    if any(n.target is aten.rrelu_with_noise.default for n in program.draws):
        return "a random slope"
    ends = [n for n in (*program.results, *program.placeholders) if isinstance(n, Node)]
    if any(tensor_meta(n).is_complex() for n in ends):
        return "a complex input or result, and a gradient is wanted"
    for result in program.results:
        if not isinstance(result, Node):
            continue
        owner = result
        while owner.op == "call_function" and _is_view(owner):
            owner = owner.args[0]
        if owner.op != "call_function":
            return "it returns an input or a view of one, and a gradient is wanted"
        if owner in owners:
            return "two of its results share memory, and a gradient is wanted"
        owners.add(owner)
    return None


def _may_be_real(node: Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()


def _dependents(graph: Graph, sources: set[Node]) -> set[Node]:
    """The sources and every node that depends on one of them."""
    found = set(sources)
    for node in graph.nodes:
        if node.op != "output" and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _is_free(node: Node) -> bool:
    """Whether doing `node` again costs next to nothing inside the kernels that need it."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or not is_pure(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return _is_view(node) or isinstance(operation(node), Operation)


def _is_view(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or not isinstance(node.args[0], Node):
        return False
    first = node.target._schema.arguments[0].alias_info
    return node.target is aten._unsafe_view.default or (first is not None and not first.is_write)


def _cut(
    graph: Graph, backward: set[Node], results: Sequence, gradients: Sequence, inputs: Sequence[Node], program: Program
) -> list[Node]:
    """The forward nodes to keep, in graph order."""
    import networkx  # only here: it takes a tenth of a second, which a model without gradients need not pay

    needed = _ancestors([*(n for n in gradients if isinstance(n, Node)), *backward])
    forward_needed = _ancestors([n for n in results if isinstance(n, Node)])
    targets = {target for target, _ in program.writes}
    written = {i for i, n in enumerate(program.placeholders) if n in targets}
    flow = networkx.DiGraph()
    position = {node: i for i, node in enumerate(graph.nodes)}
    given = {n: i for i, n in enumerate(inputs)}
    steps: dict[Node, int] = {}
    for node in reversed(graph.nodes):
        if node not in needed or node in backward or node.op == "output":
            continue
        users = [u for u in node.users if u in needed]
        direct = any(u in backward for u in users) or node in gradients
        steps[node] = 0 if direct else 1 + min((steps[u] for u in users if u in steps), default=0)
        flow.add_edge((node, 0), (node, 1), **_capacity(node, steps[node], given, program, written, results))
        if direct:
            flow.add_edge((node, 1), "sink")
        fresh = node in forward_needed or not is_pure(node)
        if node.op == "placeholder" or (fresh and not _is_free(node)):
            flow.add_edge("source", (node, 0))
        if node.op == "get_attr":
            continue
        for user in users:
            if user not in backward and user.op != "output":
                flow.add_edge((node, 1), (user, 0))
    if "source" not in flow or "sink" not in flow:
        return []
    _, (reachable, _) = networkx.minimum_cut(flow, "source", "sink")
    kept = [n for n in steps if (n, 0) in reachable and (n, 1) not in reachable]
    return sorted(kept, key=position.__getitem__)


def _capacity(
    node: Node, steps: int, given: dict[Node, int], program: Program, written: set[int], results: Sequence
) -> dict:
    """The cost of keeping a node, as keywords of a flow edge; none at all means that it can't be kept."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or (_is_view(node) and node.op == "call_function"):
        return {}
    if node in given:
        # Inputs are alive anyway, unless the program overwrites them.
        # An argument may be written to after the call, so a result of the same size is the better choice.
        if given[node] in written:
            return {}
        if program.inputs[given[node]].captured:
            return {"capacity": 1e-3}
        return {"capacity": max(1.0, 0.75 * value.numel() * value.element_size())}
    cost = max(1, value.numel() * value.element_size())
    cost *= 0.5 if node in results else 1.0
    return {"capacity": cost * (1 + 1e-3 * min(steps, 100))}


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _forward(
    joint: Program, program: Program, outputs: Sequence, results: int, writes: Sequence, extra: list[Node]
) -> Program:
    graph, copies = Graph(), {}
    inputs = joint.placeholders[: len(program.inputs)]
    wanted = _ancestors([n for n in (*outputs[: results + len(writes)], *extra) if isinstance(n, Node)])
    for node in joint.graph_module.graph.nodes:
        if node.op == "placeholder":
            if node in inputs:
                copies[node] = graph.node_copy(node)
        elif node in wanted and node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    index = {n: i for i, n in enumerate(program.placeholders)}
    for (target, _), value in zip(writes, outputs[results : results + len(writes)]):
        copy = graph.call_function(aten.copy_.default, (copies[inputs[index[target]]], copies[value]))
        copy.meta["val"] = tensor_meta(inputs[index[target]])
    graph.output(tuple(copies[n] if isinstance(n, Node) else n for n in (*outputs[:results], *extra)))
    return replace(program, graph_module=LazyGraphModule(joint.graph_module, graph), fixed_results=results)


def _backward(
    joint: Program, kept: list[Node], cotangents: list[Node], all_cotangents: set[Node], gradients: Sequence
) -> Program:
    graph, copies = Graph(), {}
    inputs = []
    given = {n: i for i, n in enumerate(joint.placeholders)}
    for node in (*kept, *cotangents):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = tensor_meta(node)
        source = joint.inputs[given[node]] if node in given else Input(node.name, False, False)
        inputs.append(replace(source, captured=False))
    wanted = _needed_after(gradients, set(copies))
    for node in joint.graph_module.graph.nodes:
        if node in copies or node not in wanted:
            continue
        if node in all_cotangents:  # of a result that no variable reaches
            value = tensor_meta(node).new_empty(tensor_meta(node).shape)
            copies[node] = graph.call_function(aten.zeros.default, (list(value.shape),), {"dtype": value.dtype})
            copies[node].meta["val"] = value
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] if isinstance(n, Node) else n for n in gradients))
    module = LazyGraphModule(joint.graph_module, graph)
    return Program(module, tuple(inputs), ("tuple", [("tensor", i) for i in range(len(gradients))]))


def _needed_after(gradients: Sequence, stops: set[Node]) -> set[Node]:
    """The nodes from which the gradients are computed, going back no further than `stops`."""
    found: set[Node] = set()
    waiting = [n for n in gradients if isinstance(n, Node)]
    while waiting:
        node = waiting.pop()
        if node not in found and node not in stops:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found
