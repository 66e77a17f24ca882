"""A plan: the values of a program, and the steps that compute them, before anything is compiled or placed in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch


@dataclass
class Value:
    """A tensor of the plan.

    kind: "input" (position `index` among the program's inputs), "constant" (`tensor`), "buffer" (written by kernels;
    the memory planner decides between arena and fresh), "view" (same memory as value `base`, `offset` elements on),
    "aten" (made by an ATen step), "packed" (a weight's packed copy, under `key`), "scratch" (`nbytes`, unstructured).
    """

    kind: Literal["input", "constant", "buffer", "view", "aten", "packed", "scratch"]
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    index: int = 0
    base: int = 0
    offset: int = 0
    nbytes: int = 0
    key: str = ""
    tensor: torch.Tensor | None = None
    node: str = ""

    def describe(self) -> str:
        shape = "x".join(map(str, self.sizes)) or "scalar"
        dtype = str(self.dtype).removeprefix("torch.")
        more = {
            "view": f" of %{self.base}+{self.offset}",
            "input": f" #{self.index}",
            "packed": f" {self.nbytes} bytes",
            "scratch": f" {self.nbytes} bytes",
        }.get(self.kind, "")
        return f"{self.kind}{more} {dtype} {shape} strides {self.strides}"


@dataclass
class KernelStep:
    """Call a generated function with the values' data pointers and `arguments` (int64)."""

    name: str
    source: str
    values: list[int]
    arguments: list[int]
    writes: list[int]
    fused: str = ""

    @property
    def reads(self) -> list[int]:
        return self.values


@dataclass
class PackStep:
    """Bring a packed copy of the value `read` up to date; nothing to do while the content is the same."""

    name: str
    source: str
    read: int
    packed: int
    arguments: list[int]

    @property
    def reads(self) -> list[int]:
        return [self.read]

    @property
    def writes(self) -> list[int]:
        return [self.packed]


@dataclass
class AtenStep:
    """Call an ATen operator.

    Arguments are ("value", id), ("const", object) or ("list", [..]); outs are value ids, or -1 where nobody asks.
    """

    op: torch._ops.OpOverload
    arguments: list[Any]
    outs: list[int]
    pure: bool = True
    fused: str = ""

    @property
    def reads(self) -> list[int]:
        return list(_ids(self.arguments))

    @property
    def writes(self) -> list[int]:
        return [v for v in self.outs if v >= 0]


@dataclass
class PythonStep:
    """Call a Python function on tensors: for what can't be boxed."""

    function: Callable
    values: list[int]
    outs: list[int]

    @property
    def reads(self) -> list[int]:
        return self.values

    @property
    def writes(self) -> list[int]:
        return self.outs


Step = KernelStep | PackStep | AtenStep | PythonStep


@dataclass
class Plan:
    """Values, steps in order, and which values are the program's results."""

    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def add(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def root(self, value: int) -> int:
        """The value whose memory `value` is a view of."""
        while self.values[value].kind == "view":
            value = self.values[value].base
        return value

    def sources(self) -> dict[str, str]:
        """C++ source -> name of every kernel, each source once."""
        return {s.source: s.name for s in self.steps if isinstance(s, (KernelStep, PackStep))}


def dense_strides(sizes: tuple[int, ...], order: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Strides of a dense tensor; `order` lists the axes from the slowest to the fastest (default: row-major)."""
    order = order or tuple(range(len(sizes)))
    strides, step = [0] * len(sizes), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(sizes[axis], 1)
    return tuple(strides)


def channels_last_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of (batch, channels, *spatial) with the channel fastest."""
    return dense_strides(sizes, (0, *range(2, len(sizes)), 1))


def same_layout(sizes: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two stride tuples address the same elements (strides of axes of size 1 don't matter)."""
    return 0 in sizes or all(n == 1 or x == y for n, x, y in zip(sizes, a, b))


def view_strides(sizes: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of the same memory seen with shape `new`, or None when that takes a copy."""
    try:
        return torch.empty_strided(sizes, strides, device="meta").view(new).stride()
    except RuntimeError:
        return None


def broadcast_strides(sizes: tuple[int, ...], strides: tuple[int, ...], to: tuple[int, ...]) -> tuple[int, ...]:
    """Strides with which a tensor is read as if it had the larger shape `to`: 0 along broadcast axes."""
    missing = len(to) - len(sizes)
    return (0,) * missing + tuple(0 if n == 1 else s for n, s in zip(sizes, strides))


def _ids(arguments: Any) -> Any:
    for kind, content in arguments:
        if kind == "value":
            yield content
        elif kind == "list":
            yield from _ids(content)
