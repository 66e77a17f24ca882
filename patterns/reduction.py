"""Sums over axes, which take in the pointwise work that only they need."""

from __future__ import annotations

import torch
from torch.fx import Node

from fuser.fused import tensor_meta
from fuser.patterns.pattern import Pattern, register_pattern

aten = torch.ops.aten


def _of_reals(node: Node) -> str | None:
    value, summed = tensor_meta(node), tensor_meta(node.args[0])
    if value.dtype not in (torch.float32, torch.float64) or summed.dtype != value.dtype:
        return f"a sum of {summed.dtype} as {value.dtype}"
    if not value.is_contiguous() or summed.numel() == 0 or summed.dim() == 0:
        return "the result is not dense, or there is nothing to sum"
    return None


register_pattern(
    Pattern(
        "sum",
        frozenset({aten.sum.dim_IntList, aten.sum.default}),
        guard=_of_reals,
        alone=True,
        prologue=True,
        epilogue=False,
    )
)
