"""Whether a peer computes the right thing, before it is timed: eager in float64 is the judge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from bench.cases import Case
from bench.peers import PEERS, Arrays

# A peer may be off by this share of a tensor's norm, or by this many times eager's own float32 error.
TOLERANCE, TIMES_EAGER = 1e-4, 10.0


@dataclass(frozen=True)
class Reference:
    """The float64 results, and how far eager's float32 ones are from them (norm of the difference, per tensor)."""

    values: Arrays
    eager_errors: list[float]

    @classmethod
    def of(cls, case: Case, direction: str) -> Reference:
        """Without dropout, whose random bits every peer draws in its own way."""
        model, x = case.build(direction, dropout=False)
        exact = PEERS["eager"].prepare(model.double(), x.double(), direction)
        values = [v.copy() for v in exact.arrays(exact.call())]
        model, x = case.build(direction, dropout=False)
        eager = PEERS["eager"].prepare(model, x, direction)
        return cls(values, [_distance(a, b) for a, b in zip(eager.arrays(eager.call()), values)])

    def fault(self, arrays: Arrays) -> str | None:
        """What is wrong with a peer's results, or None."""
        if len(arrays) != len(self.values):
            return f"{len(arrays)} results instead of {len(self.values)}"
        for index, (got, value, eager_error) in enumerate(zip(arrays, self.values, self.eager_errors)):
            if got.shape != value.shape:
                return f"result {index} has shape {got.shape} instead of {value.shape}"
            error, norm = _distance(got, value), float(numpy.linalg.norm(value))
            # Written so that a NaN counts as a fault.
            if not error <= max(TOLERANCE * norm, TIMES_EAGER * eager_error):
                return f"result {index} is off by {error:.3g} in norm ({norm:.3g}); eager by {eager_error:.3g}"
        return None


def _distance(got: numpy.ndarray, value: numpy.ndarray) -> float:
    return float(numpy.linalg.norm(got.astype(numpy.float64) - value))
