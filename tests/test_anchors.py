"""Products, convolutions and pooling in the shapes that people use, against eager."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import assert_as_good_as_eager, check, compiled
from torch import nn
from torch.nn import functional as F

import fuser


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "rows, depth, columns",
    [(1, 700, 333), (3, 512, 1001), (7, 129, 800), (15, 700, 130), (1, 1, 1), (5, 3, 17), (128, 2, 2), (128, 20, 20),
     (33, 1, 40), (64, 256, 31), (200, 700, 24), (6, 4096, 8), (300, 300, 300)],
)  # fmt: skip
def test_linear_shapes(rows: int, depth: int, columns: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(depth, columns), nn.GELU(), nn.Linear(columns, 3, bias=False)).to(dtype)
    compiled(check(model, torch.randn(rows, depth, dtype=dtype)))


CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(5, 9, 3, padding=1), (3, 5, 17)),
    "3d": (lambda: nn.Conv3d(3, 10, (2, 3, 1), padding=(1, 0, 0)), (2, 3, 5, 6, 4)),
    "stride": (lambda: nn.Conv2d(4, 18, 3, stride=(2, 3), padding=1), (2, 4, 11, 13)),
    "dilation": (lambda: nn.Conv2d(4, 8, 3, dilation=(1, 2), padding=2), (2, 4, 9, 9)),
    "same": (lambda: nn.Conv2d(4, 8, (4, 3), padding="same"), (2, 4, 9, 7)),
    "reflect": (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), (2, 4, 6, 6)),
    "circular": (lambda: nn.Conv2d(4, 8, 3, padding=2, padding_mode="circular"), (2, 4, 6, 6)),
    "1x1": (lambda: nn.Conv2d(33, 40, 1), (2, 33, 5, 7)),
    "7x7 stride 2": (lambda: nn.Conv2d(3, 24, 7, stride=2, padding=3, bias=False), (1, 3, 20, 18)),
    "few positions": (lambda: nn.Conv2d(130, 96, 3, padding=1), (1, 130, 2, 3)),
    "few positions of several images": (lambda: nn.Conv2d(64, 120, 3, stride=2), (3, 64, 5, 5)),
    "groups": (lambda: nn.Conv2d(16, 32, 3, groups=4, padding=1), (2, 16, 6, 5)),
    "narrow groups": (lambda: nn.Conv2d(12, 12, 3, groups=4), (2, 12, 6, 6)),
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, groups=16, padding=1), (2, 16, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 9, 3, stride=2, output_padding=1), (2, 6, 5, 5)),
    "kernel as large as the image": (lambda: nn.Conv2d(3, 5, 6), (16, 3, 6, 6)),
    "padding wider than the kernel": (lambda: nn.Conv2d(3, 7, 2, padding=3), (2, 3, 4, 4)),
    "unbatched": (lambda: nn.Conv2d(3, 7, 3), (3, 30, 30)),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case: str) -> None:
    make, shape = CONVOLUTIONS[case]
    model = nn.Sequential(make(), nn.SiLU())
    report = compiled(check(model, torch.randn(shape)))
    assert any(e.pattern == "conv" and len(e.members) >= 2 for e in report.fused) or case == "unbatched", str(report)
    expected = "place" if case in ("narrow groups", "depthwise", "transposed") else "generated"
    assert expected in next(e.how for e in report.fused if e.pattern == "conv")


@pytest.mark.parametrize("form", ["contiguous", "channels_last"])
def test_convolution_and_weights_in_either_layout(form: str) -> None:
    model = nn.Sequential(nn.Conv2d(6, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 5, 3), nn.Tanh())
    x = torch.randn(2, 6, 9, 8)
    if form == "channels_last":
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    compiled(check(model, x))


POOLS = {
    "2x2": nn.MaxPool2d(2),
    "3x3 stride 2 padding 1": nn.MaxPool2d(3, 2, 1),
    "dilated": nn.MaxPool2d(2, 1, dilation=2),
    "ceil": nn.MaxPool2d(3, 2, ceil_mode=True),
    "uneven": nn.MaxPool2d((2, 3), (1, 2), (1, 1)),
    "average": nn.AvgPool2d(2),
    "adaptive": nn.AdaptiveAvgPool2d(2),
}


@pytest.mark.parametrize("case", POOLS)
def test_pooling_behind_a_convolution(case: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 20, 3), POOLS[case], nn.ReLU(), nn.Conv2d(20, 4, 1))
    report = compiled(check(model, torch.randn(2, 3, 11, 12)))
    if isinstance(POOLS[case], nn.MaxPool2d):
        assert "max_pool_relu_0" in [e.name for e in report.fused]


def test_pooling_keeps_nan_and_infinities() -> None:
    x = torch.randn(1, 3, 6, 6)
    x[0, 0, 1, 1], x[0, 1, 2, 2], x[0, 2] = float("nan"), float("inf"), -float("inf")
    identity = torch.eye(3).view(3, 3, 1, 1)

    def model(t: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.relu(t.contiguous(memory_format=torch.channels_last)) - 1.0, 2)

    check(model, x)
    check(lambda t: F.max_pool2d(F.conv2d(t, identity.to(t.dtype)), 2), torch.randn(1, 3, 6, 6))


def residual(channels: int) -> nn.Module:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(channels)
            self.two = nn.Conv2d(channels, channels, 3, padding=1)
            self.gate = nn.Linear(channels, channels)

        def forward(self, x: torch.Tensor) -> tuple:
            y = torch.relu(self.norm(self.one(x)))
            y = torch.relu(self.two(y) + x)
            gate = torch.sigmoid(self.gate(y.mean((2, 3))))
            z = y * gate[:, :, None, None]
            return z, y, z.permute(0, 2, 3, 1).flatten(1)

    return Residual()


def test_residuals_gates_and_values_used_twice() -> None:
    model = residual(12).eval()
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    report = compiled(check(model, torch.randn(3, 12, 6, 7)))
    names = [e.name for e in report.fused]
    assert "conv_mul_add_relu_0" in names and "conv_bias_add_relu_0" in names


def test_a_convolution_used_twice_and_normalised_once() -> None:
    convolution, norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4).eval()
    norm.running_mean.normal_()
    model = nn.ModuleList([convolution, norm]).eval()

    def function(x: torch.Tensor) -> torch.Tensor:
        weight, bias = convolution.weight.to(x.dtype), convolution.bias.to(x.dtype)
        y = F.conv2d(x, weight, bias, padding=1)
        mean, var = norm.running_mean.to(x.dtype), norm.running_var.to(x.dtype)
        normal = F.batch_norm(y, mean, var, eps=1e-5)
        return F.conv2d(torch.relu(normal), weight, bias, padding=1) + y

    compiled(check(function, torch.randn(2, 4, 5, 6)))
    assert len(list(model.parameters())) == 4


PRODUCTS = {
    "vector matrix": lambda a, b: torch.relu(a[0] @ b),
    "matrix vector": lambda a, b: torch.relu(a @ b[:, 0]),
    "dot": lambda a, b: torch.relu(torch.dot(a[0], b[:, 0])),
    "batched by a shared matrix": lambda a, b: torch.tanh(a.expand(3, 4, 5) @ b),
    "broadcast batches": lambda a, b: torch.tanh(a.view(2, 1, 2, 5) @ b.expand(3, 5, 6)),
    "transposed operands": lambda a, b: torch.relu(b.t() @ a.t()),
    "baddbmm": lambda a, b: torch.relu(torch.baddbmm(b[:1, None], a[None], b[None])),
    "addmm with factors": lambda a, b: torch.relu(torch.addmm(b[0], a, b, beta=0.5, alpha=2.0)),
    "row scale": lambda a, b: torch.relu((a @ b) * a[:, :1]),
    "column and full residual": lambda a, b: torch.relu((a @ b) * b[0] + a.sum() - (a @ b).flip(0)),
    "sliced": lambda a, b: torch.relu(a[::2, 1:4] @ b[1:4, ::2]),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_products(case: str) -> None:
    compiled(check(PRODUCTS[case], torch.randn(4, 5), torch.randn(5, 6), factor=3.0))


def test_every_element_is_written_and_nothing_else() -> None:
    """Results come from fresh memory; run next to poisoned blocks of the same sizes, nothing leaks in or out."""
    model = nn.Sequential(nn.Conv2d(3, 11, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(11 * 9, 13)).eval()
    optimized = fuser.optimize(model)
    with torch.no_grad():
        for batch in (1, 2, 5):
            x = torch.randn(batch, 3, 8, 8)
            poison = [torch.full((batch, 13), float("nan")) for _ in range(8)]
            del poison[::2]
            assert_as_good_as_eager(optimized(x), model(x), copy.deepcopy(model).double()(x.double()))
            assert all(torch.isnan(p).all() for p in poison)
