"""Kernels are right with vectors of every size, whichever this CPU's kernels would use."""

from __future__ import annotations

import pytest
import torch
from oracle import check
from torch import nn

import fuser
from fuser.codegen import compiler
from fuser.codegen.cpp.anchored import vector_bytes

SIZES = (16, 32, 64)
NEEDED = {16: "sse2", 32: "avx2", 64: "avx512vl"}

MODELS = {
    "few columns": (lambda: nn.Sequential(nn.Linear(7, 5), nn.ELU()), (9, 7)),
    "a vector and a half": (lambda: nn.Sequential(nn.Linear(20, 20), nn.Tanh()), (33, 20)),
    "many columns": (lambda: nn.Sequential(nn.Linear(70, 200), nn.GELU()), (40, 70)),
    "few channels": (lambda: nn.Sequential(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)), (3, 1, 14, 15)),
    "channels": (lambda: nn.Sequential(nn.Conv2d(5, 40, 3, stride=2), nn.SiLU(), nn.AvgPool2d(2)), (2, 5, 13, 12)),
    "pointwise": (lambda: nn.Sequential(nn.Mish(), nn.Softplus(), nn.Hardswish()), (37, 41)),
}


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    needed = NEEDED[request.param]
    if needed not in compiler.cpu_features():
        pytest.skip(f"this CPU has no {needed}")
    monkeypatch.setattr(compiler, "vector_bytes", lambda: request.param)
    return request.param


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models(size: int, case: str, dtype: torch.dtype) -> None:
    make, shape = MODELS[case]
    report = check(make().to(dtype), torch.randn(shape, dtype=dtype))
    assert any("generated" in f.how for entry in report.compiled for f in entry.fused)


@pytest.mark.parametrize("case", MODELS)
def test_gradients(size: int, case: str) -> None:
    make, shape = MODELS[case]
    model, x = make().double(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    wanted = [x, *model.parameters()]
    y, z = model(x), fuser.optimize(model)(x)
    u = torch.randn_like(y)
    for theirs, mine in zip(torch.autograd.grad(y, wanted, u), torch.autograd.grad(z, wanted, u)):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_half_empty_wide_vectors_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "vector_bytes", lambda: 64)
    found = [vector_bytes(columns, torch.float32) for columns in (3, 8, 10, 20, 32, 40, 200, 256)]
    assert found == [32, 32, 64, 32, 64, 32, 64, 64]
    monkeypatch.setattr(compiler, "vector_bytes", lambda: 16)
    assert vector_bytes(20, torch.float32) == 16
