"""What needs a process of its own: the first call with a cold and a warm cache, and the memory of one call.

Run as `python -m bench.fresh first-call|memory CASE PASS PEER` it measures and prints one JSON line.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.machine import ROOT

MEMORY_CALLS = 7
CHILD_TIMEOUT = 900  # seconds


class ChildError(Exception):
    """A measuring process that failed; the message is its last line."""


def first_calls(case: str, direction: str, peer: str) -> tuple[float, float]:
    """Seconds from `import torch` done and model built to the first result: empty caches, then the same ones again.

    The peer's own import and conversion count. fuser's C++ runtime, built once per torch version, is there already.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        caches = {"FUSER_CACHE_DIR": f"{folder}/fuser", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        if peer == "fuser":
            shutil.copytree(_fuser_runtime(), f"{folder}/fuser")
        cold, warm = (child("first-call", case, direction, peer, environment=caches) for _ in range(2))
    return cold, warm


def memory(case: str, direction: str, peer: str) -> int:
    """Bytes that one warm call needs at its peak beyond what was resident before; see `_memory_of_a_call`."""
    return round(child("memory", case, direction, peer))


def child(kind: str, case: str, direction: str, peer: str, environment: dict[str, str] | None = None) -> float:
    """Run this file in a fresh process; returns its figure, raises `ChildError`."""
    command = [sys.executable, "-m", "bench.fresh", kind, case, direction, peer]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=CHILD_TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"{kind} took longer than {CHILD_TIMEOUT} s") from error
    if done.returncode != 0:
        raise ChildError(f"{kind} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


@functools.cache
def _fuser_runtime() -> str:
    """A cache folder that holds fuser's C++ runtime and no kernels; removed at exit."""
    import atexit

    folder = tempfile.mkdtemp(prefix="bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    child("first-call", "dense2", "forward", "fuser", environment={"FUSER_CACHE_DIR": folder})
    for entry in Path(folder).iterdir():
        if entry.is_file():
            entry.unlink()
        elif entry.name != "runtime":
            shutil.rmtree(entry)
    return folder


def _first_call(case: str, direction: str, peer: str) -> float:
    import torch

    from bench.cases import CASES
    from bench.peers import PEERS

    model, x = CASES[case].build(direction)
    with torch.set_grad_enabled(direction == "reverse"):
        start = time.perf_counter()
        result = PEERS[peer].prepare(model, x, direction).call()
        elapsed = time.perf_counter() - start
    del result
    return elapsed


def _memory_of_a_call(case: str, direction: str, peer: str) -> float:
    """Peak resident bytes of a warm call over those before it, the median of a few.

    Before each call freed memory goes back to the system and the kernel's high-water mark is reset, so the difference
    is what the call touched anew: its results and all intermediates alive at once. Working memory that fuser keeps
    between calls was resident before, so it is added. The kernel counts in batches: good to about 0.3 MiB.
    """
    import torch

    from bench.cases import CASES
    from bench.peers import PEERS

    prepare = PEERS[peer].prepare_for_memory
    assert prepare is not None
    c = ctypes.CDLL(None)
    extra = []
    with torch.set_grad_enabled(direction == "reverse"):
        prepared = prepare(*CASES[case].build(direction), direction)
        for _ in range(MEMORY_CALLS + 2):
            c.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before = _status_bytes("VmRSS")
            result = prepared.call()
            extra.append(_status_bytes("VmHWM") - before)
            del result
        return statistics.median(extra[2:]) + prepared.kept_bytes()


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return 1024 * int(match[1])


if __name__ == "__main__":
    print(json.dumps({"first-call": _first_call, "memory": _memory_of_a_call}[sys.argv[1]](*sys.argv[2:5])))
