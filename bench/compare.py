"""`python -m bench compare OLD.json NEW.json`: what got slower, or larger."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import BenchError

SCHEMA = 1
# The figures of a result, with the unit that is printed and its size in the file's unit.
_FIGURES = (
    ("median_us", "", "us", 1.0),
    ("first_call_cold_s", " first call, cold", "s", 1.0),
    ("first_call_warm_s", " first call, warm", "s", 1.0),
    ("peak_memory_bytes", " memory", "MiB", 2.0**20),
)


@dataclass(frozen=True)
class Row:
    """One benchmark; None on a side that lacks it."""

    name: str
    unit: str
    current: float | None
    previous: float | None

    @property
    def ratio(self) -> float | None:
        """Current / previous: above 1 is worse. None where one is missing or the previous is 0."""
        if self.current is None or not self.previous:
            return None
        return self.current / self.previous


def load(path: str) -> dict[str, Any]:
    """A result file; raises `BenchError` saying what is wrong with it."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise BenchError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("results"), list):
        raise BenchError(f"{path} is not a result of `python -m bench run`")
    if data.get("schema") != SCHEMA:
        raise BenchError(f"{path} has schema {data.get('schema')!r}, this program reads {SCHEMA}")
    return data


def rows(old: dict[str, Any], new: dict[str, Any], peers: list[str]) -> list[Row]:
    """The benchmarks of `peers` in either file, named CASE PASS PEER, in the order of the new file."""
    before, now = _figures(old, peers), _figures(new, peers)
    names = list(dict.fromkeys([*now, *before]))
    return [Row(name, unit, now.get((name, unit)), before.get((name, unit))) for name, unit in names]


def _figures(data: dict[str, Any], peers: list[str]) -> dict[tuple[str, str], float]:
    figures: dict[tuple[str, str], float] = {}
    for result in data["results"]:
        try:
            name = f"{result['case']} {result['direction']} {result['peer']}"
            if result["peer"] not in peers:
                continue
            for key, suffix, unit, scale in _FIGURES:
                if result.get(key) is not None:
                    figures[name + suffix, unit] = float(result[key]) / scale
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BenchError(f"a result lacks or garbles {error}") from error
    return figures


def compare(old_path: str, new_path: str, threshold: float, peers: list[str]) -> int:
    """Print the table; 1 if any ratio is above `threshold`, else 0."""
    if not (math.isfinite(threshold) and threshold > 0):
        raise BenchError(f"--threshold must be a positive number, got {threshold}")
    table = rows(load(old_path), load(new_path), peers)
    if not any(row.ratio is not None for row in table):
        raise BenchError(f"{old_path} and {new_path} have no benchmark of {', '.join(peers)} in common")
    print(markdown(table, threshold))
    worse = [row for row in table if row.ratio is not None and row.ratio > threshold]
    if worse:
        print(f"\n{len(worse)} of {len(table)} past the threshold of {threshold:g}")
    return 1 if worse else 0


def markdown(table: list[Row], threshold: float) -> str:
    """Benchmark | Current | Previous | Ratio, a row past the threshold in bold."""
    lines = ["| Benchmark | Current | Previous | Ratio |", "|---|---:|---:|---:|"]
    for row in table:
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        if row.ratio is not None and row.ratio > threshold:
            ratio = f"**{ratio}**"
        lines.append(f"| {row.name} | {_cell(row.current, row.unit)} | {_cell(row.previous, row.unit)} | {ratio} |")
    return "\n".join(lines)


def _cell(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.4g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
