"""The models that are timed: dense and convolution layers, LeNet, deep MLPs, VGG16, ResNet and a PINN."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from bench.errors import BenchError

PASSES = ("forward", "reverse")
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


@dataclass(frozen=True)
class Case:
    """A model and the shape of its one float32 input."""

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def build(self, direction: str, dropout: bool = True) -> tuple[nn.Module, torch.Tensor]:
        """The model and a standard normal input, the same values each time.

        For "forward" the model itself in eval mode; for "reverse" the model in train mode inside a `SumOfSquares`.
        With `dropout=False` nothing is dropped, so that results can be compared between ways of drawing random bits.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.model()
            _spread_statistics(model)
            x = torch.randn(self.shape)
        if not dropout:
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        return (model.eval() if direction == "forward" else SumOfSquares(model).train()), x

    @property
    def has_dropout(self) -> bool:
        with torch.device("meta"):
            return any(isinstance(m, nn.Dropout) for m in self.model().modules())


class SumOfSquares(nn.Module):
    """The loss `sum(y * y)` of a model's output: what is compiled and differentiated in the reverse pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.model(x)
        return (y * y).sum()


def select(patterns: str | None) -> list[Case]:
    """The cases that match any of the comma-separated names or globs, in the order of the table; None: all.

    Raises `BenchError` for a pattern that matches none.
    """
    if patterns is None:
        return list(CASES.values())
    wanted: set[str] = set()
    for pattern in filter(None, (p.strip() for p in patterns.split(","))):
        matches = fnmatch.filter(CASES, pattern)
        if not matches:
            raise BenchError(f"no case matches {pattern!r}; there are {', '.join(CASES)}")
        wanted.update(matches)
    if not wanted:
        raise BenchError("--cases names no case")
    return [case for name, case in CASES.items() if name in wanted]


def _spread_statistics(model: nn.Module) -> None:
    """Give batch norm statistics and weights other than 0 and 1, so that a wrong folding shows."""
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)


def _activated(layer: Callable[[], nn.Module], activation: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(layer(), activation())


def _lenet() -> nn.Module:
    features = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*features, nn.Flatten(), *head)


def _mlp_batch_norm(activation: Callable[[], nn.Module]) -> nn.Module:
    """Six hidden layers of 256, each linear -> batch norm -> activation, and a linear head."""
    widths = [32] + [256] * 6
    layers: list[nn.Module] = []
    for i, o in zip(widths, widths[1:]):
        layers += [nn.Linear(i, o), nn.BatchNorm1d(o), activation()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def _pinn() -> nn.Module:
    hidden = [nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(64, 1))


def _vgg16() -> nn.Module:
    """VGG16 for 32x32 images, batch norm after each convolution's relu."""
    layers: list[nn.Module] = []
    i = 3
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers.append(nn.Sequential(nn.Conv2d(i, channels, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(channels)))
            i = channels
        layers.append(nn.MaxPool2d(2))
    head: list[nn.Module] = [nn.Flatten()]
    for width in (512, 4096):
        head += [nn.Linear(width, 4096), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, *head, nn.Linear(4096, 10))


class _Residual(nn.Module):
    """`relu(body(x) + shortcut(x))`; `sizes` are (in, out, kernel, stride) of the body's convolutions."""

    def __init__(self, sizes: list[tuple[int, int, int, int]]) -> None:
        super().__init__()
        body: list[nn.Module] = []
        for i, o, kernel, stride in sizes:
            body += [nn.Conv2d(i, o, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
        self.body = nn.Sequential(*body[:-1])
        i, o, stride = sizes[0][0], sizes[-1][1], max(s[3] for s in sizes)
        self.shortcut: nn.Module = nn.Identity()
        if i != o or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _resnet(counts: tuple[int, ...], bottleneck: bool) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    i = 64
    for stage, count in enumerate(counts):
        width = 64 << stage
        o = 4 * width if bottleneck else width
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            if bottleneck:
                sizes = [(i, width, 1, 1), (width, width, 3, stride), (width, o, 1, 1)]
            else:
                sizes = [(i, width, 3, stride), (width, o, 3, 1)]
            layers.append(_Residual(sizes))
            i = o
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 1000))


def _table() -> list[Case]:
    cases = [Case(f"dense{n}", lambda n=n: nn.Linear(n, n), (128, n)) for n in (2, 20, 200, 2000)]
    cases += [Case(f"conv{c}", lambda c=c: nn.Conv2d(c, c, 3), (128, c, 64, 64)) for c in (1, 3, 16, 64)]
    cases.append(Case("lenet_b128", _lenet, (128, 1, 28, 28)))
    cases.append(Case("mlp7_bn_tanh", lambda: _mlp_batch_norm(nn.Tanh), (256, 32)))
    cases.append(Case("mlp7_bn_gelu", lambda: _mlp_batch_norm(nn.GELU), (256, 32)))
    cases += [Case(f"vgg16_b{b}", _vgg16, (b, 3, 32, 32)) for b in (1, 16, 64)]
    cases.append(Case("resnet18_b1", lambda: _resnet((2, 2, 2, 2), bottleneck=False), (1, 3, 224, 224)))
    cases.append(Case("resnet50_b1", lambda: _resnet((3, 4, 6, 3), bottleneck=True), (1, 3, 224, 224)))
    for n in (32, 512):
        for name, activation in ACTIVATIONS.items():
            cases.append(Case(f"dense{n}_{name}", _activated(lambda n=n: nn.Linear(n, n), activation), (128, n)))
    for name, activation in ACTIVATIONS.items():
        cases.append(Case(f"conv32_{name}", _activated(lambda: nn.Conv2d(32, 32, 3), activation), (128, 32, 64, 64)))
    cases.append(Case("pinn", _pinn, (1024, 2)))
    return cases


CASES = {case.name: case for case in _table()}
