"""`python -m bench import`: what `import fuser` adds to `import torch`."""

from __future__ import annotations

import statistics
import subprocess
import sys

from bench.errors import BenchError
from bench.machine import ROOT

STATEMENTS = {
    "torch": "import torch",
    "torch, fuser": "import torch, fuser",
    "torch, fuser.optimize": "import torch, fuser; fuser.optimize",
}
_PROGRAM = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"


def run(rounds: int) -> dict[str, float | None]:
    """Print the table; returns the median seconds of each import, None for one that fails."""
    samples: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    failures: dict[str, str] = {}
    # The first round fills the page cache and the .pyc files, and is not counted.
    for index in range(rounds + 1):
        for name, statement in STATEMENTS.items():
            if name in failures:
                continue
            command = [sys.executable, "-c", _PROGRAM.format(statement)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode != 0:
                failures[name] = (done.stderr.strip().splitlines() or ["no message"])[-1]
            elif index > 0:
                samples[name].append(float(done.stdout))
    if "torch" in failures:
        raise BenchError(f"torch can't be imported: {failures['torch']}")
    medians = {name: statistics.median(s) if name not in failures else None for name, s in samples.items()}
    print(f"{'import':<24}{'seconds':>10}{'over torch':>12}")
    for name, median in medians.items():
        figures = failures[name] if median is None else f"{median:>10.3f}{median - medians['torch']:>12.3f}"
        print(f"{name:<24}{figures}")
    return medians
