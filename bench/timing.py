"""The timing loop: warm, interleaved by round, the garbage collector off, rounds that other work disturbed redone."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

# Thread pools spin for a while after their last job; the next peer's sample starts when they have gone to sleep.
SETTLE_SECONDS = 0.01
# A round counts as quiet when other processes took at most this share of the machine's CPU time meanwhile. With more,
# threads wait for each other at barriers and times grow a thousandfold.
QUIET_SHARE = 0.05
# For a given number of quiet rounds, at most this many times as many are tried.
MOST_TRIES = 3


@dataclass(frozen=True)
class Timings:
    """Seconds per call, a sample a round, and the largest share of the CPU time that others took in any of them."""

    samples: dict[str, list[float]]
    disturbance: float

    def medians_us(self) -> dict[str, float]:
        return {name: 1e6 * statistics.median(samples) for name, samples in self.samples.items()}


def interleave(calls: Mapping[str, Callable[[], Any]], rounds: int, seconds: float) -> Timings:
    """Time each of `calls`, one sample of each a round; the quietest `rounds` rounds are kept.

    A sample repeats the call for about `seconds` (once, if it takes longer). Each round takes the calls in turn, the
    starting one moving on by one, so that drift of the machine and a noisy predecessor fall on all alike.
    """
    if not calls:
        return Timings({}, 0.0)
    names = list(calls)
    counts = {name: calibrate(call, seconds) for name, call in calls.items()}
    found: list[tuple[float, dict[str, float]]] = []
    enabled = gc.isenabled()
    try:
        for index in range(MOST_TRIES * rounds):
            shift = index % len(names)
            meter = OtherWork()
            samples = {name: _settled_sample(calls[name], counts[name]) for name in names[shift:] + names[:shift]}
            found.append((meter.share(), samples))
            if sum(share <= QUIET_SHARE for share, _ in found) >= rounds:
                break
    finally:
        if enabled:
            gc.enable()
    kept = sorted(found, key=lambda entry: entry[0])[:rounds]
    return Timings({name: [samples[name] for _, samples in kept] for name in names}, kept[-1][0])


def calibrate(call: Callable[[], Any], seconds: float) -> int:
    """How many calls take about `seconds`, at least 1."""
    count = 1
    while True:
        elapsed = _sample(call, count) * count
        if elapsed >= seconds / 4:
            return max(1, round(count * seconds / elapsed))
        count *= 4


class OtherWork:
    """Since it was made, what share of the machine's CPU time went to other processes (or other virtual machines)."""

    def __init__(self) -> None:
        self._start = _processor_seconds()

    def share(self) -> float:
        """0 to 1, good to about 10 ms of CPU time; 0 where it can't be told."""
        total, busy, own = (now - start for now, start in zip(_processor_seconds(), self._start))
        # The kernel counts busy time in ticks and ours exactly: up to a tick a CPU is not a difference.
        slack = (os.cpu_count() or 1) / os.sysconf("SC_CLK_TCK")
        return max(0.0, busy - own - slack) / total if total > 0 else 0.0


def _processor_seconds() -> tuple[float, float, float]:
    """Since the start: of all CPUs, of those the busy ones, and of this process."""
    try:
        fields = [int(v) for v in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return 0.0, 0.0, 0.0
    ticks = os.sysconf("SC_CLK_TCK")
    idle = fields[3] + fields[4]  # idle, and waiting for a disk
    return sum(fields) / ticks, (sum(fields) - idle) / ticks, time.process_time()


def _settled_sample(call: Callable[[], Any], count: int) -> float:
    gc.collect()
    gc.disable()
    time.sleep(SETTLE_SECONDS)
    _sample(call, max(1, count // 20))
    return _sample(call, count)


def _sample(call: Callable[[], Any], count: int) -> float:
    times = repeat(None, count)
    start = time.perf_counter()
    for _ in times:
        call()
    return (time.perf_counter() - start) / count
