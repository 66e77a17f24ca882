"""The gradients of max pooling and of a convolution's weight."""

from __future__ import annotations

import torch
from torch.fx import Node

from fuser.fused import tensor_meta
from fuser.operators import CONV2D_WEIGHT_GRADIENT, MAX_POOL2D_GRADIENT
from fuser.patterns.pattern import Pattern, register_pattern


def _float_images(node: Node) -> str | None:
    value = tensor_meta(node)
    if value.dtype not in (torch.float32, torch.float64) or value.dim() != 4 or value.numel() == 0:
        return f"{value.dtype} of shape {tuple(value.shape)} is left to ATen"
    return None


for _name, _anchor in (("max_pool_gradient", MAX_POOL2D_GRADIENT), ("conv_weight_gradient", CONV2D_WEIGHT_GRADIENT)):
    register_pattern(Pattern(_name, frozenset({_anchor}), guard=_float_images, alone=True, epilogue=False))
