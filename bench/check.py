"""Whether a peer computes the right thing, before it is timed: eager in float64 is the judge."""

from __future__ import annotations

import functools

import numpy
import torch

from bench.cases import Case
from bench.peers import PEERS, Arrays

# A peer may be off by this share of a tensor's norm, or by this many times eager's own float32 error.
TOLERANCE, TIMES_EAGER = 1e-4, 10.0
# Where relu and max pooling have kinks, a rounding error that crosses one makes a gradient jump, by several per cent in
# a deep network with a small batch. So a peer may also be off by as much as the exact result moves, times a factor,
# when the input and the parameters move by this share of themselves, the largest of a few random moves.
NUDGE, NUDGES, TIMES_NUDGE = 1e-6, 3, 3.0


class Reference:
    """The float64 results of a case, and how far a correct float32 result may be from them."""

    def __init__(self, case: Case, direction: str) -> None:
        self.case, self.direction = case, direction
        self.values = self._eager(torch.float64)
        self.eager_errors = [_distance(a, b) for a, b in zip(self._eager(torch.float32), self.values)]

    @functools.cached_property
    def sensitivities(self) -> list[float]:
        """How far each result moves under a nudge of the input and the parameters."""
        moved = [self._eager(torch.float64, nudge=seed) for seed in range(NUDGES)]
        return [max(map(_distance, values, [exact] * NUDGES)) for exact, *values in zip(self.values, *moved)]

    def fault(self, arrays: Arrays) -> str | None:
        """What is wrong with a peer's results, or None."""
        if len(arrays) != len(self.values):
            return f"{len(arrays)} results instead of {len(self.values)}"
        for index, (got, value, eager_error) in enumerate(zip(arrays, self.values, self.eager_errors)):
            if got.shape != value.shape:
                return f"result {index} has shape {got.shape} instead of {value.shape}"
            error, norm = _distance(got, value), float(numpy.linalg.norm(value))
            # Both written so that a NaN counts as a fault. The second bound takes a while, and is seldom needed.
            if error <= max(TOLERANCE * norm, TIMES_EAGER * eager_error):
                continue
            if not error <= TIMES_NUDGE * self.sensitivities[index]:
                return f"result {index} is off by {error:.3g} in norm ({norm:.3g}); eager by {eager_error:.3g}"
        return None

    def _eager(self, dtype: torch.dtype, nudge: int | None = None) -> Arrays:
        """Eager's results, without dropout, whose random bits every peer draws in its own way."""
        model, x = self.case.build(self.direction, dropout=False)
        model, x = model.to(dtype), x.to(dtype)
        if nudge is not None:
            generator = torch.Generator().manual_seed(nudge)
            with torch.no_grad():
                for tensor in (x, *model.parameters()):
                    tensor *= 1 + NUDGE * torch.randn(tensor.shape, generator=generator, dtype=dtype)
        prepared = PEERS["eager"].prepare(model, x, self.direction)
        return [array.copy() for array in prepared.arrays(prepared.call())]


def _distance(got: numpy.ndarray, value: numpy.ndarray) -> float:
    return float(numpy.linalg.norm(got.astype(numpy.float64) - value))
