"""The kernels that gradients need: sums, products of transposed factors, gradients of pooling and convolution."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracle import assert_as_good_as_eager, check, compiled

import fuser

DTYPES = (torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow))
SHAPES = ((5,), (33,), (1, 7), (7, 1), (1000, 3), (3, 1000), (2, 3, 4, 5), (2, 17, 1, 5))


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    """The same values, differently in memory."""
    found = [x, x.transpose(0, -1).contiguous().transpose(0, -1)]
    if x.dim() == 4:
        found.append(x.contiguous(memory_format=torch.channels_last))
    wide = torch.randn(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    return [*found, wide[..., ::2], x.flip(0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(128, 20), (4, 6, 24, 24), *(pytest.param(s, marks=pytest.mark.slow) for s in SHAPES)]
)
def test_sums(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Over every set of axes, with and without the pointwise work that makes the summands."""
    for axes in [None, *itertools.chain(*(itertools.combinations(range(len(shape)), n) for n in (1, 2, 3)))]:
        if axes is not None and max(axes) >= len(shape):
            continue
        keep = len(shape) % 2 == 0 and axes is not None
        for x in layouts(torch.randn(shape, dtype=dtype)):
            row = torch.randn(shape[-1], dtype=dtype)

            def plain(t: torch.Tensor, axes: tuple | None = axes, keep: bool = keep) -> torch.Tensor:
                return t.sum() if axes is None else t.sum(axes, keepdim=keep)

            def made(t: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
                return plain(torch.tanh(t) * r + 1)  # noqa: B023

            factor = 4.0 if plain(x).numel() < 32 else 2.0  # the largest of a few errors scatters
            compiled(check(plain, x, factor=factor, what=f"{axes} {x.stride()}"))
            if dtype is torch.float64 and x.dim() > 2:
                continue  # as many kernels again, which differ in the type's name alone
            report = compiled(check(made, x, row, factor=factor, what=f"made {axes} {x.stride()}"))
            assert [e.pattern for e in report.fused] == ["sum"], str(report)


def test_a_long_sum_is_exact_enough() -> None:
    compiled(check(lambda t: t.sum(), torch.rand(1_000_003)))
    compiled(check(lambda t: t.sum(0), torch.rand(100_003, 5)))


def test_sums_keep_nan_and_infinity() -> None:
    x = torch.randn(40, 9)
    x[3, 2], x[5, 4], x[6, 4], x[7, 8] = float("nan"), float("inf"), float("-inf"), float("inf")
    for axes in (0, 1, (0, 1)):
        compiled(check(lambda t, axes=axes: t.sum(axes), x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 2, 3), (5, 128, 7), (20, 128, 20), (64, 1024, 64), (3, 200, 33), (17, 500, 1)])
def test_products_of_columns(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """What the gradient of a weight is: the left factor lies transposed."""
    rows, depth, columns = sizes
    left, right = torch.randn(depth, rows, dtype=dtype), torch.randn(depth, columns, dtype=dtype)
    compiled(check(lambda a, b: a.t() @ b, left, right))
    compiled(check(lambda a, b: torch.relu(a.t() @ b + b[0]), left, right))
    batched = torch.randn(3, depth, rows, dtype=dtype), torch.randn(3, depth, columns, dtype=dtype)
    compiled(check(lambda a, b: a.transpose(1, 2) @ b, *batched))
    wide = torch.randn(depth, 2 * rows + 3, dtype=dtype)[:, 1 : rows + 1]
    compiled(check(lambda a, b: a.t() @ b, wide, right))


POOLS = [  # kernel, stride, padding, dilation, ceil
    (2, 2, 0, 1, False), (3, 2, 1, 1, False), (3, 1, 1, 1, False), (2, 3, 0, 1, True), (3, 2, 1, 2, True),
    ((2, 3), (1, 2), (1, 0), (1, 1), False),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("channels", [1, 6, 19])
def test_max_pooling(pool: tuple, channels: int, dtype: torch.dtype) -> None:
    """Ties (a quarter of the values are equal), infinities and NaN included."""
    kernel, stride, padding, dilation, ceil = pool
    x = torch.randn(3, channels, 11, 13, dtype=dtype)
    x[torch.rand_like(x) < 0.25] = 0.5
    x[0, 0, 3, 4], x[1, 0, :6] = float("nan"), float("-inf")
    optimized = fuser.optimize(lambda t: torch.max_pool2d(t, kernel, stride, padding, dilation, ceil))
    results = []
    for run in (optimized, lambda t: torch.max_pool2d(t, kernel, stride, padding, dilation, ceil)):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        cotangent = torch.linspace(1, 2, y.numel(), dtype=dtype).reshape(y.shape)
        results.append(torch.autograd.grad(y, leaf, cotangent))
    assert_as_good_as_eager(results[0], results[1], [t.double() for t in results[1]])
    assert not optimized.report().eager and "max_pool_gradient" in str(optimized.report())


CONVOLUTIONS = [  # in, out, kernel, stride, padding, dilation
    (1, 6, 5, 1, 0, 1), (6, 16, 5, 1, 2, 1), (3, 4, 3, 2, 1, 1), (4, 3, 3, 1, 1, 2), (8, 24, 1, 1, 0, 1),
    (5, 33, (3, 1), (1, 2), (1, 0), 1), (16, 16, 3, 1, 1, 1), (4, 4, 3, 1, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("convolution", CONVOLUTIONS)
def test_convolutions(convolution: tuple, dtype: torch.dtype) -> None:
    channels, out, kernel, *geometry = convolution
    model = torch.nn.Conv2d(channels, out, kernel, *geometry).to(dtype)
    optimized = fuser.optimize(model)
    x = torch.randn(3, channels, 12, 11, dtype=dtype)
    wide = torch.nn.Conv2d(channels, out, kernel, *geometry).double()
    wide.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    results = []
    for run, dt in ((optimized, dtype), (model, dtype), (wide, torch.float64)):
        leaf = x.to(dt).clone().requires_grad_()
        y = run(leaf)
        cotangent = torch.linspace(-1, 2, y.numel(), dtype=dt).cos().reshape(y.shape)
        results.append(torch.autograd.grad(y, [leaf, run.weight, run.bias], cotangent))
    assert_as_good_as_eager(*results)
    assert not optimized.report().eager


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_left_unwritten(dtype: torch.dtype) -> None:
    """The arena still holds what the call before left there, here NaN."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2), torch.nn.Flatten(), torch.nn.Linear(96, 5)
    ).to(dtype)
    optimized = fuser.optimize(model)
    x = torch.randn(4, 3, 12, 12, dtype=dtype)
    poison = torch.full_like(x, float("nan"))
    for given in (poison, x):
        mine = torch.autograd.grad(optimized(given).sum(), list(model.parameters()))
    theirs = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b)
