"""Matrix products: `linear`, `matmul`, `einsum` and the like arrive as one of these after tracing."""

from __future__ import annotations

import torch
from torch.fx import Node

from fuser.fused import tensor_meta
from fuser.patterns.pattern import Pattern, register_pattern

aten = torch.ops.aten


def _scaled(node: Node) -> str | None:
    """`addmm` and `baddbmm` take factors; only the plain sum is a bias."""
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
        return "beta or alpha is not 1"
    return _not_floating(node)


def _not_floating(node: Node) -> str | None:
    value = tensor_meta(node)
    if not value.is_floating_point():
        return f"{value.dtype} is left to ATen"
    if value.numel() == 0:
        return "the result is empty"
    return None


register_pattern(
    Pattern("linear", frozenset({aten.addmm.default}), bias=0, guard=_scaled, through_views=True, alone=True)
)
register_pattern(Pattern("mm", frozenset({aten.mm.default}), guard=_not_floating, through_views=True, alone=True))
register_pattern(Pattern("bmm", frozenset({aten.bmm.default}), guard=_not_floating, through_views=True, alone=True))
register_pattern(
    Pattern("baddbmm", frozenset({aten.baddbmm.default}), bias=0, guard=_scaled, through_views=True, alone=True)
)
