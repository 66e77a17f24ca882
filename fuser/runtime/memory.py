"""Places for the buffers of a plan: results get fresh memory, all others share one arena by their lifetimes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fuser.codegen.plan import Plan

ALIGNMENT = 64


@dataclass(frozen=True)
class Lifetime:
    """A buffer's bytes, and the steps between which it must keep them."""

    value: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Layout:
    """Byte offsets of the arena's buffers, the values that are allocated fresh, and the arena's size."""

    offsets: dict[int, int]
    fresh: frozenset[int]
    nbytes: int


def place(plan: Plan) -> Layout:
    """First fit by decreasing size: a buffer goes to the lowest offset that no buffer alive at the same time holds."""
    fresh = frozenset(v for v in map(plan.root, plan.outputs) if plan.values[v].kind == "buffer")
    placed: list[tuple[Lifetime, int]] = []
    offsets: dict[int, int] = {}
    for life in sorted(lifetimes(plan), key=lambda l: -l.nbytes):  # noqa: E741
        if life.value in fresh:
            continue
        offset = 0
        neighbours = [(o, other) for other, o in placed if life.first <= other.last and other.first <= life.last]
        for start, other in sorted(neighbours, key=lambda n: n[0]):
            if offset + life.nbytes <= start:
                break
            offset = max(offset, _aligned(start + other.nbytes))
        offsets[life.value] = offset
        placed.append((life, offset))
    size = max((o + life.nbytes for life, o in placed), default=0)
    return Layout(offsets, fresh, _aligned(size))


def lifetimes(plan: Plan) -> list[Lifetime]:
    """Of every buffer, in order of its first write; reading a view counts as reading its base."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, step in enumerate(plan.steps):
        for value in [*step.reads, *step.writes]:
            root = plan.root(value)
            if plan.values[root].kind == "buffer":
                first.setdefault(root, position)
                last[root] = position
    return [
        Lifetime(v, math.prod(plan.values[v].sizes) * plan.values[v].dtype.itemsize, first[v], last[v]) for v in first
    ]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
