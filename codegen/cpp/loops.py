"""What the lowering of every kind of region needs: loops, pointwise steps, copies, names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fuser.codegen.cpp import pointwise
from fuser.codegen.epilogue import steps
from fuser.codegen.kernel import Body, Load, Store
from fuser.codegen.plan import AtenStep, KernelStep, Value, broadcast_strides, dense_strides
from fuser.fused import FusedNode

if TYPE_CHECKING:
    from fuser.codegen.lowering import Lowering

aten = torch.ops.aten


def copy(lowering: Lowering, source: int, target: int) -> None:
    """A step that copies value `source` into the buffer `target` of the same shape, another layout."""
    a, b = lowering.plan.values[source], lowering.plan.values[target]
    dtype = torch.float64 if a.dtype is torch.float64 else torch.float32
    if a.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool):
        return _aten_copy(lowering, source, target)
    sizes, strides = collapse(b.sizes, [a.strides, b.strides])
    body = Body(dtype, (Load("p0", a.dtype, steps(strides[0])),), (), (Store("p0", b.dtype, steps(strides[1])),))
    pointwise_step(lowering, "copy_kernel", body, sizes, strides, [source, target], [target])
    if lowering.plan.steps[-1].source in lowering.refused:
        lowering.plan.steps.pop()
        _aten_copy(lowering, source, target)
    return None


def _aten_copy(lowering: Lowering, source: int, target: int) -> None:
    lowering.plan.steps.append(
        AtenStep(aten.copy_.default, [("value", target), ("value", source), ("const", False)], [-1], pure=False)
    )


def spread(lowering: Lowering, place: int, shape: tuple, order: tuple | None) -> int:
    """A dense copy of an operand, broadcast to `shape`, where a kernel's loops can't express the broadcast."""
    value = lowering.plan.values[place]
    strides = broadcast_strides(value.sizes, value.strides, shape)
    wide = lowering.plan.add(Value("view", shape, strides, value.dtype, base=place))
    target = lowering.buffer(None, shape, dense_strides(shape, order), value.dtype)
    copy(lowering, wide, target)
    return target


def collapse(sizes: Sequence[int], strides: list[tuple[int, ...]]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Order the loops so that the last tensor is walked through memory, and merge those that every tensor walks as one.

    Returns the sizes of the remaining loops (at least one), and per tensor its strides over them.
    """
    axes = [i for i, n in enumerate(sizes) if n != 1]
    axes.sort(key=lambda i: -strides[-1][i])
    merged: list[tuple[int, list[int]]] = []
    for axis in axes:
        here = [s[axis] for s in strides]
        if merged:
            size, above = merged[-1]
            if all(up == low * sizes[axis] for up, low in zip(above, here)):
                merged[-1] = (size * sizes[axis], here)
                continue
        merged.append((sizes[axis], here))
    merged = merged or [(1, [0] * len(strides))]
    return [n for n, _ in merged], [tuple(m[1][t] for m in merged) for t in range(len(strides))]


def pointwise_step(
    lowering: Lowering,
    name: str,
    body: Body,
    sizes: list[int],
    strides: list[tuple],
    values: list[int],
    writes: list[int],
    fused: str = "",
) -> None:
    arguments = [*sizes, *(s for tensor in strides for s in tensor)]
    source = pointwise.source(body, len(sizes), name)
    lowering.plan.steps.append(KernelStep(name, source, values, arguments, writes, fused))


def outer_nodes(node: Node, fused: FusedNode) -> dict[Node, Node]:
    """The subgraph's placeholders -> the nodes of the outer graph that the fused node is called with."""
    return dict(zip(fused.members.graph.find_nodes(op="placeholder"), node.args))


def define_results(lowering: Lowering, node: Node, values: list[int]) -> None:
    if len(values) > 1:
        lowering.items[node] = list(values)
    else:
        lowering.places[node] = list(values)
        lowering.plan.values[values[0]].node = node.name


def symbol_of(fused: FusedNode) -> str:
    """The C name of a fused node's kernel: its chain, without the running number, apart from C's own `tanh`."""
    return fused.name.rpartition("_")[0] + "_kernel"
