"""Fused node -> `Body`: the straight-line code that a kernel runs for each element."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from fuser.codegen.kernel import Body, Load, Statement, Step, Store
from fuser.fused import Function, FusedNode, Operation, tensor_meta

_a, _b = sympy.symbols("a b", real=True)
ADD = Function("add", (_a, _b), _a + _b)


@dataclass
class Operand:
    """A tensor the body touches: the subgraph's node, and the strides it is addressed with, one per loop."""

    node: Node
    strides: tuple[int, ...]


def inputs_of_body(fused: FusedNode, bias: Node | None) -> list[Node]:
    """The subgraph's placeholders that the pointwise part reads, in order of first use (the anchor's bias first)."""
    found: dict[Node, None] = {} if bias is None else {bias: None}
    for node in fused.members.graph.nodes:
        for operand in _operands(node):
            source = _behind_views(operand)
            if source.op == "placeholder":
                found[source] = None
    return list(found)


def shape_where_read(fused: FusedNode, source: Node, bias: Node | None = None) -> tuple[int, ...]:
    """The shape of the operation that reads `source`, against which it is broadcast."""
    if source is bias and source is not None:
        return tuple(tensor_meta(fused.anchor).shape)
    for node in fused.members.graph.nodes:
        if any(_behind_views(o) is source for o in _operands(node)):
            return tuple(tensor_meta(node).shape)
    return tuple(tensor_meta(source).shape)


def outputs_of(fused: FusedNode) -> list[Node]:
    """The subgraph's results."""
    result = fused.members.graph.output_node().args[0]
    return [result] if isinstance(result, Node) else list(result)


def build_body(
    fused: FusedNode,
    loads: list[Operand],
    stores: list[Operand],
    dtype: torch.dtype,
    bias: Node | None,
    anchor_is_loaded: bool = False,
) -> Body:
    """The body of `fused`, its loads and stores addressed as given.

    With an anchor its value is the accumulator `acc`, or a load like any other when `anchor_is_loaded` (an ATen
    operation made it). `bias` is the anchor's own bias, which the body then adds first.
    """
    names: dict[Node, str] = {}
    load_list = []
    for position, operand in enumerate(loads):
        names[operand.node] = f"p{position}"
        load_list.append(Load(f"p{position}", tensor_meta(operand.node).dtype, steps(operand.strides)))
    statements: list[Statement] = []
    accumulator = None
    if fused.anchor is not None and not anchor_is_loaded:
        accumulator = names[fused.anchor] = "acc"
    if bias is not None:
        statements.append(Statement("v0", ADD, (names[fused.anchor], names[bias])))
        names[fused.anchor] = "v0"
    for node in fused.members.graph.nodes:
        step = node.meta.get("operation")
        if isinstance(step, Operation):
            arguments = tuple(names[_behind_views(o)] if isinstance(o, Node) else o for o in step.operands)
            names[node] = f"v{len(statements)}"
            statements.append(Statement(names[node], step.function, arguments))
    store_list = [Store(names[_behind_views(o.node)], tensor_meta(o.node).dtype, steps(o.strides)) for o in stores]
    return Body(dtype, tuple(load_list), tuple(statements), tuple(store_list), accumulator)


def steps(strides: tuple[int, ...]) -> tuple[Step, ...]:
    """How strides move along each loop; a stride of one only counts as "unit" along the innermost."""
    last = len(strides) - 1
    return tuple(
        "broadcast" if s == 0 else "unit" if s == 1 and i == last else "strided" for i, s in enumerate(strides)
    )


def _operands(node: Node) -> list[Node]:
    step = node.meta.get("operation")
    return [o for o in step.operands if isinstance(o, Node)] if isinstance(step, Operation) else []


def _behind_views(node: Node) -> Node:
    """The value that a reshape inside the region renames."""
    while node.op == "call_function" and "operation" not in node.meta and "is_view" in node.meta:
        node = node.args[0]
    return node
