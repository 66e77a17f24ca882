"""What the generated kernels with an anchor share: operands seen as (batch, row, column), packing, results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fuser.codegen.cpp import loops, pack
from fuser.codegen.cpp.anchored import vector_width, vectors_per_row
from fuser.codegen.epilogue import Operand, build_body, inputs_of_body, outputs_of, shape_where_read
from fuser.codegen.plan import KernelStep, PackStep, Value, broadcast_strides, view_strides
from fuser.fused import FusedNode, tensor_meta

if TYPE_CHECKING:
    from fuser.codegen.lowering import Lowering

aten = torch.ops.aten


class Anchored:
    """What the generated matmul and convolution share: operands seen as (batch, row, column), packing, the step."""

    def __init__(self, lowering: Lowering, node: Node, fused: FusedNode) -> None:
        self.lowering, self.node, self.fused = lowering, node, fused
        self.outer = loops.outer_nodes(node, fused)
        self.meta = tensor_meta(fused.anchor)

    def place_of(self, source: Node) -> int:
        return self.lowering.any_place(self.outer[source])

    def panel(self, columns: int) -> int:
        return vectors_per_row(columns, self.meta.dtype) * vector_width(columns, self.meta.dtype)

    def packed(
        self, factor: int, batches: int, columns: int, channels: int, taps: Sequence[int], strides: Sequence[int]
    ) -> int:
        """The value that holds `factor` in panels: kept between calls when it is a weight, else made anew."""
        lowering, panel = self.lowering, self.panel(columns)
        value = lowering.plan.values[factor]
        elements = pack.packed_elements(batches, columns, channels * math.prod(taps), panel)
        name = f"pack_{panel}"
        source = pack.source(name, value.dtype, panel)
        arguments = [batches, columns, channels, *taps, *strides]
        if lowering.is_weight(factor):
            root = lowering.plan.values[lowering.plan.root(factor)]
            key = f"{root.index}+{value.offset}:{value.dtype}:{panel}:{arguments}"
            target = lowering.plan.add(
                Value("packed", nbytes=elements * value.dtype.itemsize, key=key, dtype=value.dtype)
            )
            lowering.plan.steps.append(PackStep(name, source, factor, target, arguments))
        else:
            target = lowering.buffer(None, (elements,), (1,), value.dtype)
            lowering.plan.steps.append(KernelStep(name, source, [factor, target], arguments, [target], self.fused.name))
        return target

    def body_and_strides(self, grid: tuple, order: tuple | None, results: list[int]) -> tuple:
        """The body over (batch, row, column), its tensors and their strides flat.

        Each operand is read as if it had the shape of the operation that reads it, permuted by `order`, then seen with
        shape `grid`: reshapes inside the region leave the elements in order, so all of them agree on the grid.
        """
        values, bias = self.lowering.plan.values, self.bias()
        sources = inputs_of_body(self.fused, bias)
        places, operands = [], []

        def on_grid(place: int, shape: tuple, trailing: int = 0) -> tuple[int, ...] | None:
            sizes = (*values[place].sizes, *(1,) * trailing)
            strides = broadcast_strides(sizes, (*values[place].strides, *(0,) * trailing), shape)
            permuted = order or tuple(range(len(shape)))
            return view_strides(tuple(shape[i] for i in permuted), tuple(strides[i] for i in permuted), grid)

        for source in sources:
            place, shape = self.place_of(source), shape_where_read(self.fused, source, bias)
            # A bias runs along the columns, which are not the last axis of a convolution's result.
            trailing = len(shape) - 1 - order[-1] if source is bias and order else 0
            strides = on_grid(place, shape, trailing)
            if strides is None:
                place = loops.spread(self.lowering, place, shape, order)
                strides = on_grid(place, shape)
            places.append(place)
            operands.append(Operand(source, _no_unit_axes(grid, strides)))
        outputs = outputs_of(self.fused)
        stores = [Operand(o, on_grid(r, values[r].sizes)) for o, r in zip(outputs, results)]
        body = build_body(self.fused, operands, stores, self.meta.dtype, bias)
        flat = [s for o in [*operands, *stores] for s in o.strides]
        return body, places, flat

    def refusal(self) -> str | None:
        """Why ATen is the better choice, if it is."""
        return None

    def bias(self) -> Node | None:
        """The anchor's own bias argument, if it has one."""
        return None


def _no_unit_axes(grid: tuple, strides: tuple) -> tuple:
    """Strides along axes of size 1 don't matter; 0 lets more shapes share a kernel. The column keeps its own."""
    return tuple(0 if n == 1 and i < len(grid) - 1 else s for i, (n, s) in enumerate(zip(grid, strides)))
