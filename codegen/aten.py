"""Calls of ATen operators as a plan writes them: every argument of the schema, in order, as data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node


def encode_arguments(
    target: torch._ops.OpOverload, args: tuple, kwargs: dict, where: Callable[[Node], int]
) -> list[tuple[str, Any]]:
    """("value", id), ("const", object) or ("list", [..]) per argument of the schema; `where` places a node."""
    values = []
    for position, argument in enumerate(target._schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            values.append(args[position])
        else:
            values.append(kwargs.get(argument.name, argument.default_value))
    return [_encode(v, where) for v in values]


def _encode(argument: Any, where: Callable[[Node], int]) -> tuple[str, Any]:
    if isinstance(argument, Node):
        return ("value", where(argument))
    if isinstance(argument, (list, tuple)) and any(isinstance(a, Node) for a in argument):
        return ("list", [_encode(a, where) for a in argument])
    return ("const", list(argument) if isinstance(argument, tuple) else argument)
