"""Source -> loaded library, cached on disk by content: private to the user, safe with many processes.

An entry is NAME-KEY.so with its sha256 beside it. The checksum is verified before a library is loaded, so a damaged or
truncated file is rebuilt, never trusted; files are written under a temporary name and renamed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import filelock
import torch

from fuser.codegen import compiler

COMPILE_TIMEOUT = 300  # seconds for one file


@dataclass(frozen=True)
class Source:
    """A C++ translation unit; `name` only makes the file recognisable."""

    name: str
    code: str


class BuildError(Exception):
    """A source could not be built; the message holds the compiler's first errors."""


@dataclass(frozen=True)
class Library:
    """A loaded kernel library."""

    path: Path
    handle: ctypes.CDLL

    def address(self, symbol: str) -> int:
        """The address of an `extern "C"` function."""
        return ctypes.cast(getattr(self.handle, symbol), ctypes.c_void_p).value


_loaded: dict[str, Library] = {}
_lock = threading.Lock()
_statistics = {"hits": 0, "misses": 0, "seconds": 0.0}


def build(sources: Sequence[Source]) -> list[Library | BuildError]:
    """Build and load each source, those not in the cache in parallel; a failure is returned in its place."""
    distinct = list(dict.fromkeys(sources))
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        results = dict(zip(distinct, pool.map(_build_one, distinct)))
    return [results[s] for s in sources]


def statistics() -> dict[str, float]:
    """Kernels found in the cache, kernels compiled, and seconds spent compiling, in this process."""
    return dict(_statistics)


def folder() -> Path:
    """The cache folder, created private to the user; a private temporary one where that is impossible."""
    chosen = os.environ.get("FUSER_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return _usable(Path(chosen) if chosen else Path(base, "fuser"))


@functools.cache
def _usable(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = path.stat()
        if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o022:
            raise PermissionError("it belongs to somebody else, or others may write to it")
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"x" * 4096)
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="fuser-"))
        _forget_at_exit(temporary)
        warnings.warn(
            f"fuser can't use its cache folder {path} ({error}); kernels are built anew in each process", stacklevel=3
        )
        return temporary
    return path


def _forget_at_exit(path: Path) -> None:
    import atexit

    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(path, ignore_errors=True))


def info() -> dict[str, object]:
    """The folder, its number of entries and its size in bytes."""
    files = {}
    for place, _, names in os.walk(folder()):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another process's scratch files come and go
                files[Path(place, name)] = Path(place, name).stat().st_size
    return {
        "folder": str(folder()),
        "kernels": sum(f.suffix == ".so" and f.parent == folder() for f in files),
        "bytes": sum(files.values()),
    }


def clear() -> int:
    """Remove every entry, the runtime too; returns how many files went. Loaded libraries stay usable."""
    count = 0
    for file in folder().rglob("*"):
        if file.is_file() and not file.name.endswith(".lock"):
            file.unlink(missing_ok=True)
            count += 1
    for scratch in folder().rglob("building-*"):  # of a process that was killed
        shutil.rmtree(scratch, ignore_errors=True)
    return count


def verified(path: Path) -> bool:
    """Whether `path` is ours and its content has the checksum written beside it."""
    try:
        if path.stat().st_uid != os.getuid():
            return False
        return _checksum_file(path).read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return False


def publish(built: Path, path: Path) -> None:
    """Move a finished file into place, checksum first, so that no reader ever sees a half of it."""
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    note = built.with_suffix(".sum")
    note.write_text(digest)
    os.replace(note, _checksum_file(path))
    os.replace(built, path)


def _checksum_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _build_one(source: Source) -> Library | BuildError:
    tool = compiler.find()
    key = _key(source, tool)
    with _lock:
        if key in _loaded:
            _statistics["hits"] += 1
            return _loaded[key]
    path = folder() / f"{source.name[:80]}-{key[:32]}.so"
    if tool is None and not verified(path):
        return BuildError(compiler.missing_reason())
    try:
        with filelock.FileLock(path.with_suffix(".lock"), timeout=COMPILE_TIMEOUT * 2):
            hit = verified(path)
            if not hit:
                _compile(tool, source, path)
            library = Library(path, ctypes.CDLL(str(path)))
    except (OSError, BuildError, filelock.Timeout) as error:
        return error if isinstance(error, BuildError) else BuildError(f"{type(error).__name__}: {error}")
    with _lock:
        _statistics["hits" if hit else "misses"] += 1
        return _loaded.setdefault(key, library)


def _compile(tool: compiler.Compiler, source: Source, path: Path) -> None:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as scratch:
        code = Path(scratch, "kernel.cpp")
        code.write_text(source.code)
        built = Path(scratch, "kernel.so")
        try:
            done = subprocess.run(tool.command(code, built), capture_output=True, text=True, timeout=COMPILE_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"the compiler took longer than {COMPILE_TIMEOUT} s") from error
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line][:3]
            raise BuildError("; ".join(errors) or f"the compiler ended with status {done.returncode}")
        os.replace(code, path.with_suffix(".cpp"))
        publish(built, path)
    with _lock:
        _statistics["seconds"] += time.perf_counter() - start


def _key(source: Source, tool: compiler.Compiler | None) -> str:
    """Everything the binary depends on. Without a compiler the key is that of the one last used."""
    version = tool.version if tool else _last_compiler()
    parts = [
        source.code,
        _headers(),
        version,
        " ".join(compiler.KERNEL_FLAGS),
        torch.__version__,
        " ".join(sorted(compiler.cpu_features())),
    ]
    if tool:
        _remember_compiler(version)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def _headers() -> str:
    return "\0".join(f.read_text() for f in sorted(compiler.HEADERS.glob("*.h")))


@functools.cache
def _remember_compiler(version: str) -> None:
    if _last_compiler() == version:
        return
    note = folder() / "compiler.txt"
    temporary = note.with_suffix(f".{os.getpid()}-{threading.get_ident()}")  # builds run in several threads
    try:
        temporary.write_text(version)
        os.replace(temporary, note)
    except OSError:  # a full disk, say: the build reports it, and the note only serves machines without a compiler
        temporary.unlink(missing_ok=True)


def _last_compiler() -> str:
    try:
        return (folder() / "compiler.txt").read_text()
    except OSError:
        return ""
