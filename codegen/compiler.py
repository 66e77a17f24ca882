"""The C++ compiler: found once, checked to work, with the flags for kernels."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

HEADERS = Path(__file__).parent / "cpp"

# Contraction to FMA is fine; nothing here lets the compiler drop NaN, infinities or signed zeros.
KERNEL_FLAGS = (
    "-O3",
    "-std=c++17",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-Wno-psabi",
)

_PROBE = '#include <omp.h>\nextern "C" int probe() { return omp_get_max_threads(); }\n'


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that was seen to work: its path, and the first line of `--version`."""

    path: str
    version: str

    def command(self, source: Path, output: Path) -> list[str]:
        """The command that builds a kernel; kernels call SLEEF functions that libtorch_cpu exports."""
        libraries = Path(torch.__file__).parent / "lib"
        return [
            self.path,
            *KERNEL_FLAGS,
            f"-I{HEADERS}",
            str(source),
            "-o",
            str(output),
            f"-L{libraries}",
            "-l:libtorch_cpu.so",
        ]


@functools.cache
def find() -> Compiler | None:
    """The first working compiler of $FUSER_CXX, $CXX, g++, clang++; None when there is none."""
    chosen = os.environ.get("FUSER_CXX")
    for name in [chosen] if chosen else [os.environ.get("CXX"), "g++", "clang++"]:
        path = shutil.which(name) if name else None
        version = _check(path) if path else None
        if version is not None:
            return Compiler(path, version)
    return None


def missing_reason() -> str:
    """What to do about it when `find` returns None."""
    chosen = os.environ.get("FUSER_CXX")
    if chosen:
        return f"the compiler named by FUSER_CXX ({chosen}) does not build a shared library with OpenMP"
    return "no working C++ compiler with OpenMP was found: install g++ (apt-get install g++) or set CXX"


def _check(path: str) -> str | None:
    """The version line of a compiler that builds a shared library with OpenMP, else None."""
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(_PROBE)
            flags = ["-fopenmp", "-fPIC", "-shared", "-march=native"]
            command = [path, *flags, str(source), "-o", str(Path(folder, "probe.so"))]
            subprocess.run(command, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return version.stdout.splitlines()[0].strip()


@functools.cache
def cpu_features() -> frozenset[str]:
    """The CPU's feature flags as Linux lists them."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def vector_bytes() -> int:
    """Bytes of the widest vectors that kernels for this CPU use."""
    features = cpu_features()
    if "avx512vl" in features and not splits_wide_vectors():
        return 64
    return 32 if "avx2" in features else 16


@functools.cache
def splits_wide_vectors() -> bool:
    """Whether the CPU does a 64-byte operation as two of 32 bytes, as AMD's Zen 4 (family 25) does.

    There wide vectors gain nothing, and lose wherever they are not full: measured, LeNet's training step is three times
    as fast without them.
    """
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return False
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    return fields.get("vendor_id") == "AuthenticAMD" and fields.get("cpu family") == "25"
