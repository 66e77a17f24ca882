"""Results as text: a row a case, a column a peer, and what fuser gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bench.timing import QUIET_SHARE

if TYPE_CHECKING:
    from bench.run import Record

_TITLES = {"inductor-freezing": "freezing", "onnxruntime": "onnxrt", "value-and-grad": "value_grad"}
_RATIOS = ("best peer", "best/fuser", "eager/fuser")


def machine_line(facts: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    busy = f", {facts['busy']:.0%} BUSY WITH OTHER WORK: expect noise" if facts["busy"] > QUIET_SHARE else ""
    return (
        f"{facts['cpu']} ({facts['capability']}, {facts['cpus']} CPUs{busy}), "
        f"{facts['threads']} threads; torch {facts['torch']}, {packages}; commit {facts['commit'] or 'none'}"
    )


def times_header(peers: Sequence[str]) -> str:
    return _line("case", [*(_TITLES.get(p, p) for p in peers), *_RATIOS])


def times_row(case: str, records: Sequence[Record], peers: Sequence[str]) -> str:
    """Medians in microseconds; "-" where a peer was not timed."""
    times = {r.peer: r.median_us for r in records if r.median_us is not None}
    cells = [_number(times[p]) if p in times else "-" for p in peers]
    others = {p: t for p, t in times.items() if p not in ("fuser", "value-and-grad")}
    best = min(others, key=others.__getitem__, default=None)
    fuser = times.get("fuser")
    cells.append(_TITLES.get(best, best) if best else "-")
    cells.append(f"{others[best] / fuser:.2f}" if best and fuser else "-")
    cells.append(f"{times['eager'] / fuser:.2f}" if "eager" in times and fuser else "-")
    return _line(case, cells)


def messages(records: Sequence[Record]) -> list[str]:
    """What to print below a row: why a peer was not timed, and what else to know."""
    lines = []
    for record in records:
        if record.message:
            lines.append(f"  {record.peer}{'' if record.status == 'timed' else ' ' + record.status}: {record.message}")
    disturbance = max((r.disturbance for r in records), default=0.0)
    if disturbance > QUIET_SHARE:
        lines.append(f"  other processes took up to {disturbance:.0%} of the CPU time meanwhile: expect noise")
    return lines


def first_calls(records: Sequence[Record]) -> str:
    """Seconds to the first result, "cold / warm"; empty when none was measured."""

    def cell(record: Record) -> str | None:
        if record.first_call_cold_s is None or record.first_call_warm_s is None:
            return None
        return f"{record.first_call_cold_s:.2f} / {record.first_call_warm_s:.2f}"

    return _grid("first call (seconds, cold / warm cache)", records, cell)


def memory(records: Sequence[Record]) -> str:
    """MiB that one call needs at its peak; empty when none was measured."""

    def cell(record: Record) -> str | None:
        return None if record.peak_memory_bytes is None else f"{record.peak_memory_bytes / 2**20:.2f}"

    return _grid("peak memory of one call (MiB over what was resident before)", records, cell)


def _grid(title: str, records: Sequence[Record], cell: Callable[[Record], str | None]) -> str:
    cells = {(f"{r.case} {r.direction}", r.peer): text for r in records if (text := cell(r)) is not None}
    if not cells:
        return ""
    peers = list(dict.fromkeys(peer for _, peer in cells))
    lines = [title, "", _line("case", [_TITLES.get(p, p) for p in peers])]
    for row in dict.fromkeys(row for row, _ in cells):
        lines.append(_line(row, [cells.get((row, p), "-") for p in peers]))
    return "\n".join(lines)


def _line(first: str, cells: Sequence[str]) -> str:
    return first.ljust(22) + "".join(cell.rjust(14) for cell in cells)


def _number(microseconds: float) -> str:
    digits = 2 if microseconds < 10 else 1 if microseconds < 1000 else 0
    return f"{microseconds:,.{digits}f}"
