"""What the numbers were measured on, and how many threads may be used."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from bench.errors import BenchError
from bench.timing import OtherWork

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("onnxruntime", "openvino", "jax", "numpy")


def limit_threads(count: int) -> None:
    """Pin this process and its children to `count` CPUs, of distinct cores where there are enough.

    To be called before torch is imported: pools size themselves by the CPUs they find, and JAX knows no other setting.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise BenchError("--threads needs Linux, where a process can be pinned to CPUs")
    available = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(available):
        raise BenchError(f"--threads must be between 1 and {len(available)} here, got {count}")
    first_of_core = [cpu for cpu in available if min(_siblings(cpu) & set(available)) == cpu]
    others = [cpu for cpu in available if cpu not in first_of_core]
    os.sched_setaffinity(0, (first_of_core + others)[:count])
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(count)


def facts() -> dict[str, object]:
    """CPU, threads, versions, date and commit, as JSON-able data."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "busy": _busy(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: _version(name) for name in PACKAGES},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def _busy() -> float:
    """The share of the machine's CPU time that others use, over half a second."""
    meter = OtherWork()
    time.sleep(0.5)
    return round(meter.share(), 2)


def _siblings(cpu: int) -> set[int]:
    """The CPUs that share a core with `cpu`, itself included."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return {cpu}
    result = {cpu}
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        result.update(range(int(first), int(last or first) + 1))
    return result


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit measured, with `+changes` when the working tree differs from it; None outside a repository."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return head + ("+changes" if _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
