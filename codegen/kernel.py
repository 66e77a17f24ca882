"""The device-neutral description of a kernel: loads, statements, stores, and what drives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fuser.fused import Function

# How an operand moves along one loop: by one element, not at all, or by a stride that is a kernel argument.
Step = Literal["unit", "broadcast", "strided"]


@dataclass(frozen=True)
class Load:
    """A tensor that the body reads: `name` is the value it defines, `steps` one `Step` per loop (last is innermost)."""

    name: str
    dtype: torch.dtype
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Statement:
    """`name = function(arguments)`; an argument is the name of an earlier value or a Python number."""

    name: str
    function: Function
    arguments: tuple[str | float | bool, ...]


@dataclass(frozen=True)
class Store:
    """A tensor that the body writes: the value of that name, converted to `dtype`."""

    value: str
    dtype: torch.dtype
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Body:
    """Straight-line code for one element, evaluated in `dtype` (float32 or float64).

    `accumulator` names the value that the anchor (matmul, convolution) provides; None for a pointwise kernel.
    """

    dtype: torch.dtype
    loads: tuple[Load, ...]
    statements: tuple[Statement, ...]
    stores: tuple[Store, ...]
    accumulator: str | None = None
