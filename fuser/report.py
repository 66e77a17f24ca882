"""What was fused, what was not and why, how long each stage took: as a table and as data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

# A report keeps its latest entries, so that a server that sees ever new signatures does not grow.
MOST_ENTRIES = 64


@dataclass
class FusedEntry:
    """One fused node: its name, the pattern, its chain of operations, its result's shape, and how it is computed."""

    name: str
    pattern: str
    members: list[str]
    shape: str
    how: str


@dataclass
class LeftAloneEntry:
    """One operation that runs through ATen, and why nothing fused it."""

    node: str
    op: str
    shape: str
    reason: str


@dataclass
class CompiledEntry:
    """One compiled signature."""

    signature: str
    fused: list[FusedEntry] = field(default_factory=list)
    left_alone: list[LeftAloneEntry] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    kernels: int = 0
    cache_hits: int = 0
    arena_bytes: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass
class EagerEntry:
    """A signature (or a whole model) that runs eagerly, and why."""

    signature: str
    reason: str


@dataclass
class Report:
    """`str(report)` is a table; `report.data()` the same as plain dicts and lists."""

    model: str
    compiled: list[CompiledEntry] = field(default_factory=list)
    eager: list[EagerEntry] = field(default_factory=list)

    @property
    def left_alone(self) -> list[tuple[str, str, str, str]]:
        """(node, op, shape, reason) of every operation left to ATen, over all compiled signatures."""
        return [(e.node, e.op, e.shape, e.reason) for c in self.compiled for e in c.left_alone]

    @property
    def fused(self) -> list[FusedEntry]:
        """Every fused node over all compiled signatures."""
        return [e for c in self.compiled for e in c.fused]

    def add_compiled(self, entry: CompiledEntry) -> None:
        self.compiled.append(entry)
        del self.compiled[:-MOST_ENTRIES]

    def add_eager(self, entry: EagerEntry) -> None:
        if entry not in self.eager:
            self.eager.append(entry)
            del self.eager[:-MOST_ENTRIES]

    def data(self) -> dict[str, Any]:
        return asdict(self)

    def json(self) -> str:
        return json.dumps(self.data(), indent=2)

    def __str__(self) -> str:
        lines = [f"fuser report: {self.model}"]
        if not self.compiled and not self.eager:
            lines.append("  nothing has been called yet")
        for entry in self.compiled:
            lines += _compiled_lines(entry)
        for entry in self.eager:
            lines.append(f"  runs eagerly: {entry.signature}: {entry.reason}")
        return "\n".join(lines)


def table(header: tuple[str, ...], rows: list[tuple[str, ...]], indent: str = "    ") -> list[str]:
    """Aligned columns, header first."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return [indent + "  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in [header, *rows]]


def _compiled_lines(entry: CompiledEntry) -> list[str]:
    times = ", ".join(f"{stage} {1000 * seconds:.1f} ms" for stage, seconds in entry.seconds.items())
    lines = [f"  signature {entry.signature}", f"    stages: {times}"]
    lines.append(f"    kernels: {entry.kernels}, {entry.cache_hits} from the cache; arena {entry.arena_bytes} bytes")
    if entry.fused:
        rows = [(e.name, " -> ".join(e.members), e.shape, e.how) for e in entry.fused]
        lines += table(("fused node", "chain", "result", "how"), rows)
    if entry.left_alone:
        rows = [(e.node, e.op, e.shape, e.reason) for e in entry.left_alone]
        lines += table(("through ATen", "op", "result", "why"), rows)
    lines += [f"    kernel failed: {failure}" for failure in entry.failures]
    return lines
