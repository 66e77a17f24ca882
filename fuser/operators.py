"""Gradients of pooling and convolution as operators of their own, which a kernel can take whole.

Each is registered with torch, so that a graph that holds one still runs by itself: what it means is ATen's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
