"""Matrix products: `linear`, `matmul`, `einsum` and the like arrive as one of these after tracing."""

from __future__ import annotations

import torch
from torch.fx import Node

from fuser.patterns.pattern import Pattern, floating_and_not_empty, register_pattern

aten = torch.ops.aten


def _plain_sum(node: Node) -> str | None:
    """`addmm` and `baddbmm` take factors; only the plain sum is a bias."""
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
        return "beta or alpha is not 1"
    return floating_and_not_empty(node)


for _name, _anchor, _bias, _guard in (
    ("linear", aten.addmm.default, 0, _plain_sum),
    ("mm", aten.mm.default, None, floating_and_not_empty),
    ("bmm", aten.bmm.default, None, floating_and_not_empty),
    ("baddbmm", aten.baddbmm.default, 0, _plain_sum),
):
    register_pattern(Pattern(_name, frozenset({_anchor}), bias=_bias, guard=_guard, through_views=True, alone=True))
