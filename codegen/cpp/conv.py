"""Convolution with epilogue, as an implicit matrix product over dense channels-last memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fuser.codegen.cpp import loops
from fuser.codegen.cpp.anchor import Anchored
from fuser.codegen.cpp.anchored import render, vector_width
from fuser.codegen.cpp.matmul import FEW_ROWS, SMALL_WEIGHT, dot_source
from fuser.codegen.epilogue import outputs_of
from fuser.codegen.kernel import Body
from fuser.codegen.plan import AtenStep, KernelStep, Value, channels_last_strides, dense_strides, same_layout
from fuser.fused import FusedNode, tensor_meta

if TYPE_CHECKING:
    from fuser.codegen.lowering import Lowering

aten = torch.ops.aten


def source(name: str, body: Body, columns: int, spatial: int) -> str:
    """C++ for `name(ptrs, args, threads)`; `columns` are the output channels of one group.

    ptrs: input, packed weight (see `pack`), zeros (one per channel of a group), then the body's loads and stores,
    whose steps run over (group, position, channel).
    args: images, groups, columns, channels per group, then per spatial axis input size, output size, kernel, stride,
    padding, dilation; then three strides per load and store.
    """
    return render("conv.cpp.j2", name, body, columns, first_pointer=3, first_stride="strides", spatial=spatial)


class Convolution(Anchored):
    """A direct convolution over channels-last memory."""

    def __init__(self, lowering: Lowering, node: Node, fused: FusedNode) -> None:
        super().__init__(lowering, node, fused)
        self.x, self.weight, self.added, stride, pad, dilation, self.transposed, _, self.groups = fused.anchor.args
        self.spatial = self.meta.dim() - 2
        widen = lambda v: list(v) * (self.spatial if len(v) == 1 else 1)  # noqa: E731
        self.stride, self.pad, self.dilation = widen(stride), widen(pad), widen(dilation)
        self.columns = self.meta.shape[1] // self.groups
        self.channels = tensor_meta(self.x).shape[1] // self.groups

    def bias(self) -> Node | None:
        return self.added

    def refusal(self) -> str | None:
        """Why ATen's convolution is the better choice, if it is."""
        if self.meta.dtype not in (torch.float32, torch.float64):
            return f"{self.meta.dtype}: ATen's kernels use the hardware's own instructions"
        if self.transposed:
            return "transposed"
        if not 1 <= self.spatial <= 3:
            return f"{self.spatial} spatial axes"
        if self.groups > 1 and (self.columns < 8 or self.channels < 4):
            return "groups too narrow for a vector of channels"
        if self.columns < vector_width(self.columns, self.meta.dtype) / 2:
            return "too few output channels for a vector"
        if self.channels == 0:
            return "no channels"
        return None

    def streams(self) -> bool:
        """Whether the weight is best read once where it lies: few positions, a large weight that is dense."""
        weight = self.lowering.plan.values[self.place_of(self.weight)]
        positions = self.meta.shape[0] * math.prod(self.meta.shape[2:])
        large = math.prod(weight.sizes) * self.meta.element_size() > SMALL_WEIGHT
        dense = same_layout(weight.sizes, weight.strides, dense_strides(weight.sizes))
        return self.spatial == 2 and self.groups == 1 and positions < FEW_ROWS and large and dense

    def lower_streaming(self) -> None:
        """Unfold the few windows and take dot products with the weight's lines: it is neither packed nor hashed."""
        lowering, plan = self.lowering, self.lowering.plan
        kernel, shape = plan.values[self.place_of(self.weight)].sizes[2:], tuple(self.meta.shape)
        depth, positions = self.channels * math.prod(kernel), math.prod(shape[2:])
        unfolded = plan.add(
            Value("aten", (shape[0], depth, positions), dense_strides((shape[0], depth, positions)), self.meta.dtype)
        )
        windows = [list(kernel), self.dilation, self.pad, self.stride]
        x = lowering.in_layout(self.outer[self.x], dense_strides(tuple(tensor_meta(self.x).shape)))
        plan.steps.append(AtenStep(aten.im2col.default, [("value", x), *(("const", w) for w in windows)], [unfolded]))
        sizes = (shape[0], positions, depth)
        turned = plan.add(Value("view", sizes, (depth * positions, 1, positions), self.meta.dtype, base=unfolded))
        rows = lowering.buffer(None, sizes, dense_strides(sizes), self.meta.dtype)
        loops.copy(lowering, turned, rows)
        results = [
            lowering.buffer(None, shape, channels_last_strides(shape), tensor_meta(o).dtype)
            for o in outputs_of(self.fused)
        ]
        last, grid = (0, *range(2, len(shape)), 1), (1, shape[0] * positions, shape[1])
        body, places, strides = self.body_and_strides(grid, last, results)
        name = loops.symbol_of(self.fused)
        arguments = [shape[0] * positions, shape[1], depth, depth, depth, *strides]
        values = [rows, self.place_of(self.weight), *places, *results]
        plan.steps.append(KernelStep(name, dot_source(name, body), values, arguments, results, self.fused.name))
        loops.define_results(lowering, self.node, results)

    def lower(self) -> None:
        if self.streams():
            return self.lower_streaming()
        lowering, values = self.lowering, self.lowering.plan.values
        x_shape = tuple(tensor_meta(self.x).shape)
        x = lowering.in_layout(self.outer[self.x], channels_last_strides(x_shape))
        weight = self.place_of(self.weight)
        along, kernel = values[weight].strides, values[weight].sizes[2:]
        fill = 3 - self.spatial
        packed = self.packed(
            weight,
            self.groups,
            self.columns,
            self.channels,
            (1,) * fill + tuple(kernel),
            (along[0] * self.columns, along[0], along[1], *(0,) * fill, *along[2:]),
        )
        outputs = outputs_of(self.fused)
        shape = tuple(self.meta.shape)
        last = (0, *range(2, len(shape)), 1)
        results = [lowering.buffer(None, shape, channels_last_strides(shape), tensor_meta(o).dtype) for o in outputs]
        positions = shape[0] * math.prod(shape[2:])
        body, places, strides = self.grouped(shape, last, positions, results)
        name = loops.symbol_of(self.fused)
        geometry = []
        for d in range(self.spatial):
            geometry += [x_shape[2 + d], shape[2 + d], kernel[d], self.stride[d], self.pad[d], self.dilation[d]]
        arguments = [shape[0], self.groups, self.columns, self.channels, *geometry, *strides]
        code = source(name, body, self.columns, self.spatial)
        zeros = lowering.constant(torch.zeros(self.channels, dtype=self.meta.dtype))
        lowering.plan.steps.append(
            KernelStep(name, code, [x, packed, zeros, *places, *results], arguments, results, self.fused.name)
        )
        loops.define_results(lowering, self.node, results)

    def grouped(self, shape: tuple, last: tuple, positions: int, results: list[int]) -> tuple:
        """As `body_and_strides`, with the group as the batch: (group, position, channel of the group)."""
        body, places, flat = self.body_and_strides((1, positions, shape[1]), last, results)
        strides = list(flat)
        for i in range(0, len(strides), 3):
            strides[i] = strides[i + 2] * self.columns if self.groups > 1 else 0
        return body, places, strides
