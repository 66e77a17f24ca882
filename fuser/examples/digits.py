"""Train a small convolutional network on handwritten digits in eager, then serve it optimised.

Needs scikit-learn (the extra `[demo]`), whose wheel holds the 1,797 images. Exits 1 if a prediction differs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import fuser


def network() -> nn.Module:
    """Two convolutions with batch norm, relu and pooling, then two linear layers: (batch, 1, 8, 8) -> (batch, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.GELU(),
        nn.Linear(64, 10),
    )


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The images as (1797, 1, 8, 8) float32 in [0, 1], and their labels as int64."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("this example needs scikit-learn: pip install 'torch-fuser[demo]'")
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(data.target, dtype=torch.int64)


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int = 25) -> None:
    """Adam on the cross-entropy, in eager."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()


def microseconds(calls: list[Callable[[], object]], rounds: int = 9, repeats: int = 20) -> list[float]:
    """Median time of each call, the calls taking turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, found in zip(calls, times):
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            found.append((time.perf_counter() - start) / repeats * 1e6)
    return [statistics.median(found) for found in times]


def main() -> int:
    """Train, optimise, compare; returns the exit code."""
    torch.manual_seed(0)
    images, labels = digits()
    model = network()
    train(model, images[:1400], labels[:1400])
    model.eval()
    served = fuser.optimize(model)
    test, truth = images[1400:], labels[1400:]
    with torch.no_grad():
        expected, actual = model(test), served(test)
        if not torch.equal(expected.argmax(1), actual.argmax(1)):
            print("the predictions differ", file=sys.stderr)
            return 1
        accuracy = (actual.argmax(1) == truth).float().mean().item()
        print(
            f"{len(test)} test images, accuracy {accuracy:.3f}, same predictions as eager, "
            f"largest difference {(expected - actual).abs().max().item():.1e}"
        )
        print(served.report())
        for size in (1, 32, 397):
            batch = test[:size].clone()
            eager, fused = microseconds([lambda b=batch: model(b), lambda b=batch: served(b)])
            print(f"batch {size:3d}: eager {eager:7.1f} us, fuser {fused:7.1f} us, {eager / fused:.2f} times as fast")
    return 0


if __name__ == "__main__":
    sys.exit(main())
