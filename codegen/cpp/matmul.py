"""Matrix product with epilogue: rows of x (unit stride along the depth) times packed panels of the other factor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fuser.codegen.cpp import loops, pack
from fuser.codegen.cpp.anchor import Anchored
from fuser.codegen.cpp.anchored import render, vector_width
from fuser.codegen.epilogue import outputs_of
from fuser.codegen.kernel import Body
from fuser.codegen.plan import KernelStep, dense_strides
from fuser.fused import FusedNode, tensor_meta

if TYPE_CHECKING:
    from fuser.codegen.lowering import Lowering

aten = torch.ops.aten

# Weights up to this many bytes are packed for generated kernels; beyond it the library's blocking wins.
LARGEST_PACKED_WEIGHT = 768 << 10
# With fewer rows than this a product only streams its weight, which a packed copy would make it read twice.
FEW_ROWS = 16
# Beyond this many multiplications the library is faster than a product without packing.
MOST_OUTER_PRODUCTS = 1 << 22
SMALL_WEIGHT = 256 << 10


# A product whose columns fit one panel and whose depth is at most this gets a kernel with both as constants.
TINY_DEPTH = 64


def source(name: str, body: Body, columns: int, depth: int) -> str:
    """C++ for `name(ptrs, args, threads)`.

    ptrs: x, packed panels (see `pack`), then the body's loads and stores, whose steps run over (batch, row, column).
    args: batches, rows, columns, depth, x batch stride, x row stride, packed batch stride, then three strides each.
    """
    tiny = columns <= 3 * vector_width(columns, body.dtype) and depth <= TINY_DEPTH
    return render(
        "matmul.cpp.j2",
        name,
        body,
        columns,
        first_pointer=2,
        first_stride="(args + 7)",
        sizes=(columns, depth) if tiny else None,
        paired=tiny and _paired(columns, depth, body.dtype),
    )


def _paired(columns: int, depth: int, dtype: torch.dtype) -> bool:
    """Whether two rows share the register of their last, at most half used vector (AVX2's 32-byte ones)."""
    width = vector_width(columns, dtype)
    one_sum = columns > width or depth <= 24  # as `depth_per_sum` in tile.h
    return width * dtype.itemsize == 32 and 0 < columns % width <= width // 2 and one_sum


def outer_source(name: str, body: Body, columns: int) -> str:
    """C++ for a product whose left factor is a line of memory along the rows: the gradient of a weight.

    ptrs: left, right, then the body's loads and stores, whose steps run over (batch, row, column).
    args: batches, rows, columns, depth, left batch and depth strides, right batch and depth strides, then three
    strides each.
    """
    return render("outer.cpp.j2", name, body, columns, first_pointer=2, first_stride="(args + 8)")


def dot_source(name: str, body: Body) -> str:
    """C++ for the product of few rows with a large weight whose columns are lines of memory, which it reads once.

    ptrs: x, weight, then the body's loads and stores, whose steps run over (1, row, column).
    args: rows, columns, depth, x row stride, weight stride between columns, then three strides each.
    """
    return render("dot.cpp.j2", name, body, 1, first_pointer=2, first_stride="(args + 5)")


class Product(Anchored):
    """`mm`, `addmm`, `bmm`, `baddbmm`."""

    def __init__(self, lowering: Lowering, node: Node, fused: FusedNode) -> None:
        super().__init__(lowering, node, fused)
        has_bias = fused.anchor.target in (aten.addmm.default, aten.baddbmm.default)
        self.x, self.factor = fused.anchor.args[1:3] if has_bias else fused.anchor.args[:2]
        self.added = fused.anchor.args[0] if has_bias else None
        *batch, self.rows, self.columns = self.meta.shape
        self.batches = batch[0] if batch else 1
        self.depth = tensor_meta(self.x).shape[-1]

    def bias(self) -> Node | None:
        return self.added

    def refusal(self) -> str | None:
        """Why ATen's product is the better choice, if it is."""
        if self.meta.dtype not in (torch.float32, torch.float64):
            return f"{self.meta.dtype}: ATen's kernels use the hardware's own instructions"
        if self.depth == 0:
            return "the depth is 0"
        weight = self.columns * self.depth * self.meta.element_size()
        if self.streams():
            return None
        if self.is_outer():
            large = self.rows * self.columns * self.depth > MOST_OUTER_PRODUCTS
            return "the product is large: the library's blocking wins" if large else None
        if weight > LARGEST_PACKED_WEIGHT:
            return "the weight is large: the library's blocking wins"
        if self.rows * self.batches < FEW_ROWS and weight > SMALL_WEIGHT:
            return "few rows: reading the weight once is what counts"
        return None

    def streams(self) -> bool:
        """Whether the weight is best read once where it lies: few rows, a large weight, columns that are lines."""
        weight = self.columns * self.depth * self.meta.element_size()
        along = self.lowering.plan.values[self.place_of(self.factor)].strides
        return self.batches == 1 and self.rows < FEW_ROWS and weight > SMALL_WEIGHT and along[-2] == 1

    def lower(self) -> None:
        lowering, values = self.lowering, self.lowering.plan.values
        x = self.place_of(self.x)
        if self.is_outer():
            return self.lower_outer(x)
        if values[x].strides[-1] != 1 and self.depth != 1:
            x = lowering.in_layout(self.outer[self.x], dense_strides(values[x].sizes))
        if self.streams():
            return self.lower_streaming(x)
        factor = self.place_of(self.factor)
        along = values[factor].strides
        batch_stride = along[0] if len(along) == 3 else 0
        shared = batch_stride == 0  # one factor for every batch
        packed = self.packed(
            factor,
            1 if shared else self.batches,
            self.columns,
            self.depth,
            (1, 1, 1),
            (batch_stride, along[-1], along[-2], 0, 0, 0),
        )
        x_row, x_batch = values[x].strides[-2], values[x].strides[0] if len(values[x].strides) == 3 else 0
        if shared and x_batch == self.rows * x_row:
            self.rows, self.batches, x_batch = self.rows * self.batches, 1, 0
        body, places, strides, results = self.epilogue()
        name = loops.symbol_of(self.fused)
        per_batch = pack.packed_elements(1, self.columns, self.depth, self.panel(self.columns))
        arguments = [
            self.batches,
            self.rows,
            self.columns,
            self.depth,
            x_batch,
            x_row,
            0 if shared else per_batch,
            *strides,
        ]
        code = source(name, body, self.columns, self.depth)
        lowering.plan.steps.append(
            KernelStep(name, code, [x, packed, *places, *results], arguments, results, self.fused.name)
        )
        loops.define_results(lowering, self.node, results)

    def is_outer(self) -> bool:
        """Whether both factors are lines of memory along the result's axes, so that neither needs packing."""
        values = self.lowering.plan.values
        left, right = values[self.place_of(self.x)].strides, values[self.place_of(self.factor)].strides
        return left[-2] == 1 and left[-1] != 1 and right[-1] == 1 and self.depth > 1

    def lower_outer(self, left: int) -> None:
        """The product of two factors that are read as they lie."""
        values, right = self.lowering.plan.values, self.place_of(self.factor)
        body, places, strides, results = self.epilogue()
        name = loops.symbol_of(self.fused)
        steps = []
        for along, step in ((values[left].strides, -1), (values[right].strides, -2)):
            steps += [along[0] if len(along) == 3 else 0, along[step]]
        self.lowering.plan.steps.append(
            KernelStep(
                name,
                outer_source(name, body, self.columns),
                [left, right, *places, *results],
                [self.batches, self.rows, self.columns, self.depth, *steps, *strides],
                results,
                self.fused.name,
            )
        )
        loops.define_results(self.lowering, self.node, results)

    def lower_streaming(self, x: int) -> None:
        """The product that leaves the weight where it is."""
        values, weight = self.lowering.plan.values, self.place_of(self.factor)
        body, places, strides, results = self.epilogue()
        name = loops.symbol_of(self.fused)
        sizes = [self.rows, self.columns, self.depth, values[x].strides[-2], values[weight].strides[-1]]
        self.lowering.plan.steps.append(
            KernelStep(
                name,
                dot_source(name, body),
                [x, weight, *places, *results],
                [*sizes, *strides],
                results,
                self.fused.name,
            )
        )
        loops.define_results(self.lowering, self.node, results)

    def epilogue(self) -> tuple:
        """Dense results, and the body over (batch, row, column) that writes them: body, tensors, strides, results."""
        results = []
        for output in outputs_of(self.fused):
            meta = tensor_meta(output)
            results.append(self.lowering.buffer(None, tuple(meta.shape), dense_strides(tuple(meta.shape)), meta.dtype))
        return *self.body_and_strides((self.batches, self.rows, self.columns), None, results), results
