"""The native runtime: built once per torch version, cached, loaded as the module `_fuser_runtime`."""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import filelock
import torch

from fuser.codegen import cache, compiler

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-O2", "-std=c++20", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wno-psabi", "-DNDEBUG")
# The hash of the weights runs at memory speed only with the machine's own vectors.
NATIVE_FLAGS = {"memory.cpp": ("-O3", "-march=native")}
BUILD_TIMEOUT = 900  # seconds


class RuntimeUnavailable(Exception):
    """The runtime can't be built or loaded; the message says why and what would help."""


@functools.cache
def load() -> ModuleType:
    """Build the runtime if need be (a line on stderr says so) and load it. Raises `RuntimeUnavailable`."""
    path = binary_path()
    if not cache.verified(path):
        tool = compiler.find()
        if tool is None:
            raise RuntimeUnavailable(compiler.missing_reason())
        _build(tool, path)
    try:
        return _import(path)
    except ImportError as error:
        raise RuntimeUnavailable(f"the runtime does not load: {error}") from error


def binary_path() -> Path:
    """Where the runtime for this torch, Python, CPU and source code is cached, built or not."""
    parts = [
        torch.__version__,
        sysconfig.get_config_var("SOABI") or "",
        " ".join(FLAGS),
        str(NATIVE_FLAGS),
        " ".join(sorted(compiler.cpu_features())),
    ]
    parts += [f.name + f.read_text() for f in sorted(SOURCES.iterdir()) if f.suffix in (".cpp", ".h")]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return cache.folder() / "runtime" / f"_fuser_runtime-{key}.so"


def _build(tool: compiler.Compiler, path: Path) -> None:
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with filelock.FileLock(path.with_suffix(".lock"), timeout=BUILD_TIMEOUT):
            if cache.verified(path):
                return
            print(
                f"fuser: building its runtime for torch {torch.__version__}, once, about half a minute ...",
                file=sys.stderr,
                flush=True,
            )
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as scratch:
                cache.publish(_compile(tool, Path(scratch)), path)
    except (OSError, filelock.Timeout, subprocess.SubprocessError) as error:
        raise RuntimeUnavailable(f"the runtime can't be built: {error}") from error


def _compile(tool: compiler.Compiler, scratch: Path) -> Path:
    """The objects in parallel, then one shared library that leans on the libraries torch has loaded."""
    root = Path(torch.__file__).parent
    includes = [
        root / "include",
        root / "include" / "torch" / "csrc" / "api" / "include",
        sysconfig.get_path("include"),
    ]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    base = [tool.path, *FLAGS, abi, *(f"-isystem{i}" for i in includes), "-DTORCH_API_INCLUDE_EXTENSION_H"]

    def compile_one(source: Path) -> Path:
        target = scratch / (source.stem + ".o")
        _run([*base, *NATIVE_FLAGS.get(source.name, ()), "-c", str(source), "-o", str(target)])
        return target

    # The one that includes torch's Python binding takes twice as long as any other, so it goes first.
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: (source.stem != "torch_python", source.name))
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_one, sources))
    output = scratch / "_fuser_runtime.so"
    libraries = [f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    _run([tool.path, "-shared", "-fopenmp", *map(str, objects), *libraries, "-o", str(output)])
    return output


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line][:3]
        raise RuntimeUnavailable("the runtime does not compile: " + ("; ".join(errors) or done.stderr[-300:]))


def _import(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("_fuser_runtime", str(path))
    spec = importlib.util.spec_from_loader("_fuser_runtime", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
