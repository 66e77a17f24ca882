"""The timing loop: warm, interleaved by round, the garbage collector off."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

# Thread pools spin for a while after their last job; the next peer's sample starts when they have gone to sleep.
SETTLE_SECONDS = 0.01


def interleave(calls: Mapping[str, Callable[[], Any]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds per call of each of `calls`, one sample a round.

    A sample repeats the call for about `seconds` (once, if it takes longer). Each round takes the calls in turn, the
    starting one moving on by one, so that drift of the machine and a noisy predecessor fall on all alike.
    """
    names = list(calls)
    counts = {name: calibrate(call, seconds) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in names}
    enabled = gc.isenabled()
    try:
        for index in range(rounds):
            shift = index % len(names) if names else 0
            for name in names[shift:] + names[:shift]:
                gc.collect()
                gc.disable()
                time.sleep(SETTLE_SECONDS)
                _sample(calls[name], max(1, counts[name] // 20))
                samples[name].append(_sample(calls[name], counts[name]))
    finally:
        if enabled:
            gc.enable()
    return samples


def calibrate(call: Callable[[], Any], seconds: float) -> int:
    """How many calls take about `seconds`, at least 1."""
    count = 1
    while True:
        elapsed = _sample(call, count) * count
        if elapsed >= seconds / 4:
            return max(1, round(count * seconds / elapsed))
        count *= 4


def _sample(call: Callable[[], Any], count: int) -> float:
    times = repeat(None, count)
    start = time.perf_counter()
    for _ in times:
        call()
    return (time.perf_counter() - start) / count
