"""What fuser finds on this machine, and what is missing."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from fuser.codegen import cache, compiler
from fuser.runtime import build


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report; `fine` is False where something needed is missing."""

    subject: str
    text: str
    fine: bool = True


def examine() -> list[Finding]:
    """Everything that decides how fast fuser is here."""
    tool = compiler.find()
    findings = [
        Finding("torch", torch.__version__),
        Finding("compiler", f"{tool.path} ({tool.version})" if tool else compiler.missing_reason(), tool is not None),
        Finding("flags", " ".join(compiler.KERNEL_FLAGS)),
        Finding("CPU", _cpu()),
        _openmp(tool is not None),
        Finding("BLAS", _config("BLAS_INFO")),
        Finding("oneDNN", "available" if torch.backends.mkldnn.is_available() else "not in this torch"),
        Finding("CUDA", _cuda()),
        _cache(),
        _runtime(tool is not None),
    ]
    return findings


def _cpu() -> str:
    known = [f for f in ("avx512f", "avx2", "fma", "f16c", "asimd") if f in compiler.cpu_features()]
    counts = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, vectors of {compiler.vector_bytes()} bytes"
    return f"{counts}, {' '.join(known)}"


# What a kernel sees of the number of threads that torch was told to use. In a folder of its own: it is no kernel.
_OPENMP_PROBE = cache.Source(
    "doctor/openmp_probe", '#include <omp.h>\nextern "C" int threads() { return omp_get_max_threads(); }\n'
)


def _openmp(can_build: bool) -> Finding:
    """Kernels and torch must share one OpenMP runtime, or they fight for the cores."""
    shared = kernels_follow_torch() if can_build else None
    found = ", ".join(openmp_libraries()) or "no runtime is loaded"
    if shared is False:
        return Finding(
            "OpenMP", f"kernels do not use torch's runtime ({found}): install a torch wheel that bundles libgomp", False
        )
    return Finding("OpenMP", found + (", shared by torch and kernels" if shared else ""))


def kernels_follow_torch() -> bool | None:
    """Whether a kernel sees what `torch.set_num_threads` says; None if no kernel can be built."""
    (cache.folder() / "doctor").mkdir(mode=0o700, exist_ok=True)
    (library,) = cache.build([_OPENMP_PROBE])
    if isinstance(library, cache.BuildError):
        return None
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        return library.handle.threads() == before + 1
    finally:
        torch.set_num_threads(before)


def openmp_libraries() -> list[str]:
    """Paths of the OpenMP runtimes in this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split()[-1] for line in lines if "/" in line}
    return sorted(p for p in paths if any(Path(p).name.startswith(n) for n in ("libgomp", "libomp", "libiomp")))


def _config(name: str) -> str:
    text = torch.__config__.show()
    start = text.find(name + "=")
    return text[start + len(name) + 1 :].split(",")[0].split()[0] if start >= 0 else "unknown"


def _cuda() -> str:
    nvcc = shutil.which("nvcc")
    version = torch.version.cuda
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no device"
    return f"{device}; torch built for {version or 'the CPU alone'}; nvcc {nvcc or 'not found'} (not used so far)"


def _cache() -> Finding:
    info = cache.info()
    chosen = os.environ.get("FUSER_CACHE_DIR")
    fine = chosen is None or Path(chosen).resolve() == Path(info["folder"]).resolve()
    note = "" if fine else f" instead of {chosen}, which can't be used: make it writable for you alone"
    kernels = f"{info['kernels']} kernel{'' if info['kernels'] == 1 else 's'}"
    return Finding("cache", f"{info['folder']}{note}, {kernels}, {_size(info['bytes'])}", fine)


def _size(count: int) -> str:
    size, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB"):
        if size >= 1000:
            size, unit = size / 1000, larger
    return f"{size:.1f} {unit}".replace(".0 ", " ")


def _runtime(can_build: bool) -> Finding:
    path = build.binary_path()
    if cache.verified(path):
        return Finding("runtime", str(path))
    if can_build:
        return Finding("runtime", "not built yet: the first optimised call builds it, about half a minute")
    return Finding("runtime", "not built, and there is no compiler to build it", False)
