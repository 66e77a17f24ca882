"""Convolutions of any number of axes, grouped, dilated or transposed: one ATen operation after tracing."""

from __future__ import annotations

import torch

from fuser.patterns.pattern import Pattern, floating_and_not_empty, register_pattern

aten = torch.ops.aten

register_pattern(
    Pattern("conv", frozenset({aten.convolution.default}), bias=2, guard=floating_and_not_empty, alone=True)
)
