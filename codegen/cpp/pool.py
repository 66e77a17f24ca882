"""Max pooling with epilogue over dense channels-last memory, a vector of channels at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fuser.codegen.cpp import loops
from fuser.codegen.cpp.anchor import Anchored
from fuser.codegen.cpp.anchored import render
from fuser.codegen.epilogue import outputs_of
from fuser.codegen.kernel import Body
from fuser.codegen.plan import KernelStep, channels_last_strides, same_layout
from fuser.fused import FusedNode, tensor_meta

if TYPE_CHECKING:
    from fuser.codegen.lowering import Lowering

aten = torch.ops.aten


def source(name: str, body: Body, channels: int, spatial: int) -> str:
    """C++ for `name(ptrs, args, threads)`.

    ptrs: input, then the body's loads and stores, whose steps run over (1, position, channel).
    args: images, channels, then per spatial axis input size, output size, kernel, stride, padding, dilation; then
    three strides per load and store.
    """
    return render("pool.cpp.j2", name, body, channels, first_pointer=1, first_stride="strides", spatial=spatial)


class MaxPool(Anchored):
    """Max pooling over memory that is channels-last already."""

    def __init__(self, lowering: Lowering, node: Node, fused: FusedNode) -> None:
        super().__init__(lowering, node, fused)
        given = fused.anchor.args
        self.x, kernel, stride, pad, dilation = (*given, *(None, None, [], [0], [1])[len(given) :])[:5]
        self.spatial = self.meta.dim() - 2
        widen = lambda v: list(v) * (self.spatial if len(v) == 1 else 1)  # noqa: E731
        self.kernel, self.pad, self.dilation = widen(kernel), widen(pad), widen(dilation)
        self.stride = widen(stride) if stride else self.kernel

    def refusal(self) -> str | None:
        """Why ATen's pooling is the better choice, if it is."""
        if self.meta.dtype not in (torch.float32, torch.float64):
            return f"{self.meta.dtype}"
        value = self.lowering.plan.values[self.place_of(self.x)]
        if not same_layout(value.sizes, value.strides, channels_last_strides(value.sizes)):
            return "the input is not channels-last"
        return None

    def lower(self) -> None:
        lowering = self.lowering
        x = self.place_of(self.x)
        x_shape, shape = lowering.plan.values[x].sizes, tuple(self.meta.shape)
        outputs = outputs_of(self.fused)
        results = [lowering.buffer(None, shape, channels_last_strides(shape), tensor_meta(o).dtype) for o in outputs]
        positions = shape[0] * math.prod(shape[2:])
        last = (0, *range(2, len(shape)), 1)
        body, places, strides = self.body_and_strides((1, positions, shape[1]), last, results)
        geometry = []
        for d in range(self.spatial):
            geometry += [x_shape[2 + d], shape[2 + d], self.kernel[d], self.stride[d], self.pad[d], self.dilation[d]]
        name = loops.symbol_of(self.fused)
        code = source(name, body, shape[1], self.spatial)
        arguments = [shape[0], shape[1], *geometry, *strides]
        lowering.plan.steps.append(KernelStep(name, code, [x, *places, *results], arguments, results, self.fused.name))
        loops.define_results(lowering, self.node, results)
