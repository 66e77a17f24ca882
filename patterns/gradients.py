"""Gradients of pooling and convolution as operations that a kernel can take whole.

Each is registered with torch, so that a graph that holds one still runs by itself: what it means is ATen's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from fuser.fused import tensor_meta
from fuser.patterns.pattern import Pattern, register_pattern

aten = torch.ops.aten

torch.library.define(
    "fuser::max_pool2d_gradient",
    "(Tensor gradient, Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil) -> Tensor",
)
torch.library.define(
    "fuser::conv2d_weight_gradient",
    "(Tensor gradient, Tensor x, int[] weight_sizes, int[] stride, int[] dilation) -> Tensor",
)


@torch.library.impl("fuser::max_pool2d_gradient", "CompositeExplicitAutograd")
def _max_pool2d_gradient(
    gradient: torch.Tensor,
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
) -> torch.Tensor:
    geometry = (kernel, stride, padding, dilation, ceil)
    indices = aten.max_pool2d_with_indices.default(x, *geometry)[1]
    return aten.max_pool2d_with_indices_backward.default(gradient, x, *geometry, indices)


@torch.library.impl("fuser::conv2d_weight_gradient", "CompositeExplicitAutograd")
def _conv2d_weight_gradient(
    gradient: torch.Tensor, x: torch.Tensor, weight_sizes: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    weight = x.new_empty(weight_sizes)
    geometry = (stride, [0, 0], dilation, False, [0, 0], 1)
    return aten.convolution_backward.default(gradient, x, weight, None, *geometry, [False, True, False])[1].contiguous()


torch.library.register_fake("fuser::max_pool2d_gradient", lambda gradient, x, *geometry: x.new_empty(x.shape))
torch.library.register_fake(
    "fuser::conv2d_weight_gradient", lambda gradient, x, weight_sizes, *geometry: x.new_empty(weight_sizes)
)
MAX_POOL2D_GRADIENT = torch.ops.fuser.max_pool2d_gradient.default
CONV2D_WEIGHT_GRADIENT = torch.ops.fuser.conv2d_weight_gradient.default


def _float_images(node: Node) -> str | None:
    value = tensor_meta(node)
    if value.dtype not in (torch.float32, torch.float64) or value.dim() != 4 or value.numel() == 0:
        return f"{value.dtype} of shape {tuple(value.shape)} is left to ATen"
    return None


for _name, _anchor in (("max_pool_gradient", MAX_POOL2D_GRADIENT), ("conv_weight_gradient", CONV2D_WEIGHT_GRADIENT)):
    register_pattern(Pattern(_name, frozenset({_anchor}), guard=_float_images, alone=True, epilogue=False))
