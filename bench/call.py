"""`python -m bench call`: what a call costs before any arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.cases import CASES
from bench.timing import interleave

OPTIMISED = ("dense2", "dense20")


class _Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def calls() -> tuple[dict[str, Callable[[], Any]], str]:
    """The calls by name, and why fuser's are missing (empty: they are not)."""
    x = CASES["dense2"].build("forward")[1]
    table: dict[str, Callable[[], Any]] = {
        "torch.empty": functools.partial(torch.empty, tuple(x.shape)),
        "nn.Module, no-op": functools.partial(_Nothing().eval(), x),
    }
    for name in OPTIMISED:
        table[f"eager {name}"] = functools.partial(*CASES[name].build("forward"))
    try:
        import fuser

        for name in OPTIMISED:
            model, x = CASES[name].build("forward")
            table[f"fuser {name}"] = functools.partial(fuser.optimize(model), x)
    except (ImportError, AttributeError) as error:
        return table, f"fuser missing: {error}"
    return table, ""


@torch.no_grad()
def run(rounds: int, seconds: float) -> dict[str, float]:
    """Print the table; returns the medians in microseconds."""
    table, message = calls()
    medians = interleave(table, rounds, seconds).medians_us()
    print(f"{'call (batch 128)':<20}{'us':>10}{'/ torch.empty':>16}{'eager / this':>16}")
    for name, median in medians.items():
        against = medians.get("eager " + name.removeprefix("fuser ")) if name.startswith("fuser ") else None
        gain = f"{against / median:.2f}" if against else "-"
        print(f"{name:<20}{median:>10.2f}{median / medians['torch.empty']:>16.2f}{gain:>16}")
    if message:
        print(message)
    return medians
