"""Plans for the native runtime, written by hand, with kernels compiled from a few lines of C."""

from __future__ import annotations

import ctypes
import subprocess
from typing import Any

import pytest
import torch

from fuser.codegen import compiler
from fuser.runtime import build

KERNELS = """
#include <stdint.h>
// out[i] = in[i] + in[i] for floats, with args = (count,)
extern "C" void twice(void** p, const int64_t* a, int) {
  for (int64_t i = 0; i < a[0]; ++i) ((float*)p[1])[i] = 2 * ((float*)p[0])[i];
}
// out[i] = x[i] * y[i] + args[1]
extern "C" void multiply_add(void** p, const int64_t* a, int) {
  for (int64_t i = 0; i < a[0]; ++i) ((float*)p[2])[i] = ((float*)p[0])[i] * ((float*)p[1])[i] + a[1];
}
// A packed copy: the source backwards, and how often it was packed in args[1], which is an address.
extern "C" void reverse(void** p, const int64_t* a, int) {
  for (int64_t i = 0; i < a[0]; ++i) ((float*)p[1])[i] = ((float*)p[0])[a[0] - 1 - i];
  ++*(int64_t*)a[1];
}
// out[0] = threads
extern "C" void threads(void** p, const int64_t*, int n) { *(float*)p[0] = n; }
"""


@pytest.fixture(scope="module")
def native() -> Any:
    try:
        return build.load()
    except build.RuntimeUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The address of each function in `KERNELS`."""
    tool = compiler.find()
    if tool is None:
        pytest.skip(compiler.missing_reason())
    folder = tmp_path_factory.mktemp("kernels")
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(KERNELS)
    subprocess.run([str(tool.path), "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    names = ("twice", "multiply_add", "reverse", "threads")
    return {n: ctypes.cast(getattr(loaded, n), ctypes.c_void_p).value for n in names}


@pytest.fixture
def plan(native: Any) -> Any:
    """plan(inputs, values, steps, outputs): a native plan; the inputs' values, given as example tensors, come first."""
    packs, arenas = native.PackStore(), native.ArenaPool()

    def make(inputs: list, values: list, steps: list, outputs: list, **more: Any) -> Any:
        given = [("input", i, *shape(t)) for i, t in enumerate(inputs)]
        spec = {"inputs": len(inputs), "values": given + values, "steps": steps, "outputs": outputs}
        return native.Plan({"arena_bytes": 0, "release_gil": False, **spec, **more}, packs=packs, arenas=arenas)

    return make


def shape(t: torch.Tensor) -> tuple:
    return list(t.shape), list(t.stride()), t.dtype


def fresh(*sizes: int, dtype: torch.dtype = torch.float32) -> tuple:
    return ("fresh", *shape(torch.empty(sizes, dtype=dtype)))


def aten(*sizes: int, dtype: torch.dtype = torch.float32) -> tuple:
    return ("aten", *shape(torch.empty(sizes, dtype=dtype)))


def value(i: int) -> tuple:
    return ("value", i)


def const(content: Any) -> tuple:
    return ("const", content)
