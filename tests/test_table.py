"""Every activation, behind every anchor, in every floating-point type, over every layout, against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import check, compiled
from torch import nn
from torch.nn import functional as F

import fuser

ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.02),
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.3, dtype=x.dtype)),
    "elu": lambda x: F.elu(x, 1.3),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 1.7),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": lambda x: F.softplus(x, 2.0, 5.0),
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
    "hardsigmoid": F.hardsigmoid,
    "tanh": torch.tanh,
    "hardtanh": lambda x: F.hardtanh(x, -0.6, 0.8),
    "hardswish": F.hardswish,
    "tanhshrink": F.tanhshrink,
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "softsign": F.softsign,
    "threshold": lambda x: F.threshold(x, 0.1, -0.7),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.3, training=False),
    "by_hand": lambda x: x * torch.sigmoid(1.5 * x) + torch.where(x > 0, torch.log1p(x.abs()), -x * torch.exp(-x * x)),
}
SINGLE_AND_DOUBLE = [torch.float32, torch.float64]
HALVES = [torch.bfloat16, torch.float16]


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Images of 12 channels in every layout that the bar names."""
    base = torch.randn(3, 12, 7, 5, dtype=torch.float64).to(dtype)
    return {
        "contiguous": base.clone(),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 12, 5, 7, dtype=torch.float64).to(dtype).transpose(2, 3),
        "sliced": torch.randn(3, 12, 9, 11, dtype=torch.float64).to(dtype)[:, :, 1:8, 2:11:2],
        "expanded": torch.randn(3, 12, 1, 5, dtype=torch.float64).to(dtype).expand(3, 12, 7, 5),
        "empty_batch": base[:0],
        "size_one": base[:1, :, :3, :3].contiguous(),
        "odd_sizes": torch.randn(1, 12, 13, 3, dtype=torch.float64).to(dtype),
    }


def with_special_values(x: torch.Tensor) -> torch.Tensor:
    """NaN, infinities, signed zeros, denormals, and large and tiny numbers among the others."""
    if x.numel() == 0:
        return x
    info = torch.finfo(x.dtype)
    values = [
        float("nan"),
        float("inf"),
        -float("inf"),
        0.0,
        -0.0,
        info.tiny / 4,
        -info.tiny / 4,
        1.0,
        -1.0,
        88.0,
        -88.0,
        20.0,
        -20.0,
        3.0,
        -3.0,
        6.0,
    ]
    flat = torch.randn(x.numel(), dtype=torch.float64)
    flat[: len(values)] = torch.tensor(values, dtype=torch.float64)
    strided = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    if x.stride()[2] == 0:  # expanded: one value for a whole axis
        strided = strided[:, :, :1].contiguous()
        strided.copy_(flat[: strided.numel()].view(strided.shape))
        return strided.expand(x.shape)
    strided.copy_(flat.view(x.shape))
    return strided


class Anchored(nn.Module):
    """One anchor with an activation, applied to images in several layouts at once."""

    def __init__(self, anchor: str, activation: str) -> None:
        super().__init__()
        self.anchor, self.activation = anchor, ACTIVATIONS[activation]
        self.conv = nn.Conv2d(12, 18, 3, padding=1)
        self.linear = nn.Linear(5, 19)
        self.factor = nn.Parameter(torch.randn(3, 35, 17) / 6)

    def forward(self, images: dict) -> dict:
        return {name: self.activation(self.anchored(x)) for name, x in images.items()}

    def anchored(self, x: torch.Tensor) -> torch.Tensor:
        if self.anchor == "alone":
            return x
        if self.anchor == "conv2d":
            return self.conv(x)
        if self.anchor == "linear":
            return self.linear(x[..., :3] if x.shape[-1] < 5 else x[..., :5]) if x.shape[-1] >= 5 else x
        batch = x.flatten(2)[..., :35]
        return torch.bmm(batch, self.factor[: x.shape[0], : batch.shape[-1]]) if x.shape[0] else batch


def run(anchor: str, activation: str, dtype: torch.dtype) -> None:
    model = Anchored(anchor, activation).to(dtype).eval()
    report = check(model, layouts(dtype), what=f"{activation} behind {anchor} in {dtype}")
    compiled(report)
    if anchor == "alone":
        special = {name: with_special_values(x) for name, x in layouts(dtype).items()}
        check(model, special, what=f"{activation} of special values in {dtype}")


FEW = ("gelu", "relu", "by_hand")
COMBINATIONS = [
    (anchor, activation, dtype)
    for anchor in ("alone", "linear", "conv2d", "bmm")
    for dtype in (*SINGLE_AND_DOUBLE, *HALVES)
    for activation in ACTIVATIONS
]


def in_the_normal_run(anchor: str, activation: str, dtype: torch.dtype) -> bool:
    """In float32 every activation alone and behind a linear layer; a few behind the others and in the other types."""
    return activation in FEW or (dtype is torch.float32 and anchor in ("alone", "linear"))


@pytest.mark.parametrize("anchor, activation, dtype", [c for c in COMBINATIONS if in_the_normal_run(*c)])
def test_activation(anchor: str, activation: str, dtype: torch.dtype) -> None:
    run(anchor, activation, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("anchor, activation, dtype", [c for c in COMBINATIONS if not in_the_normal_run(*c)])
def test_activation_in_the_slow_run(anchor: str, activation: str, dtype: torch.dtype) -> None:
    run(anchor, activation, dtype)


@pytest.mark.parametrize("anchor", ["linear", "conv2d", "bmm"])
def test_special_values_go_through_anchors(anchor: str) -> None:
    model = Anchored(anchor, "relu").eval()
    images = {name: with_special_values(x) for name, x in layouts(torch.float32).items()}
    images = {name: x.clamp(-1e3, 1e3) for name, x in images.items()}  # infinities meet: eager's order decides NaN
    compiled(check(model, images, what=anchor))


@pytest.mark.parametrize("dtype", SINGLE_AND_DOUBLE)
@pytest.mark.parametrize("function", [torch.asinh, torch.acosh])
def test_area_functions_over_the_whole_range(function: Callable, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    low, high = (-30, 38.5) if dtype is torch.float32 else (-300, 308.2)
    sizes = torch.logspace(low, high, 2000, dtype=torch.float64)
    special = torch.tensor([0, 1, info.tiny / 4, info.max, 1e18, float("inf"), float("nan")], dtype=torch.float64)
    x = torch.cat([sizes, special, 1 + sizes]).to(dtype)
    x = torch.cat([x, -x])
    optimized = fuser.optimize(lambda t: function(t))
    with torch.no_grad():
        actual, expected = optimized(x), function(x)
    compiled(optimized.report())
    torch.testing.assert_close(actual, expected, rtol=2 * info.eps, atol=0, equal_nan=True)
    signed = ~expected.isnan()
    assert torch.equal(actual.signbit()[signed], expected.signbit()[signed])
