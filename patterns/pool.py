"""Max pooling whose indices nobody asks for (`canonicalise` rewrites it to the operation without them)."""

from __future__ import annotations

import torch
from torch.fx import Node

from fuser.fused import tensor_meta
from fuser.patterns.pattern import Pattern, register_pattern

aten = torch.ops.aten


def _batched(node: Node) -> str | None:
    value = tensor_meta(node)
    if value.dim() != 4:
        return "there is no batch axis"
    if not value.is_floating_point() or value.numel() == 0:
        return f"{value.dtype} of shape {tuple(value.shape)} is left to ATen"
    return None


register_pattern(Pattern("max_pool", frozenset({aten.max_pool2d.default}), guard=_batched, alone=True))
