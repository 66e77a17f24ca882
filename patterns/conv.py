"""Convolutions of any number of axes, grouped, dilated or transposed: one ATen operation after tracing."""

from __future__ import annotations

import torch
from torch.fx import Node

from fuser.fused import tensor_meta
from fuser.patterns.pattern import Pattern, register_pattern

aten = torch.ops.aten


def _floating_and_batched(node: Node) -> str | None:
    value = tensor_meta(node)
    if not value.is_floating_point():
        return f"{value.dtype} is left to ATen"
    if value.numel() == 0:
        return "the result is empty"
    return None


register_pattern(
    Pattern("conv", frozenset({aten.convolution.default}), bias=2, guard=_floating_and_batched, alone=True)
)
