"""Fit a continuous normalising flow to two moons, integrated and differentiated by torchdiffeq, which stays as it is.

The flow moves points x(t) along a network, dx/dt = v(t, x), and their log-density changes by -trace(dv/dx) on the way.
The trace is estimated without bias by e J e for a vector e of random signs that is drawn once per solve (Hutchinson
1989; FFJORD, Grathwohl et al. 2019). `odeint_adjoint` calls the field without gradients on the way forward, and with
gradients on the way back. Needs torchdiffeq (the extra `[demo]`). Exits 1 if the likelihood does not get better.
"""

from __future__ import annotations

import math
import sys
import time

import torch
from torch import nn

import fuser
from fuser.examples.digits import microseconds

STEPS = 8  # of the classic Runge-Kutta method in each direction: a field is called four times in each


class Velocity(nn.Module):
    """v(t, x) with three hidden layers of 64 and tanh: a number and (batch, 2) -> (batch, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 64), nn.Linear(64, 2)
        self.middle = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.time = nn.Parameter(torch.randn(64))

    def forward(self, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The velocity at time t of the points x."""
        h = torch.tanh(self.first(x) + t * self.time)
        for layer in self.middle:
            h = torch.tanh(layer(h))
        return self.last(h)


class Field(nn.Module):
    """What the solver integrates: the velocity, and the rate at which the log-density changes."""

    def __init__(self, velocity: nn.Module) -> None:
        super().__init__()
        self.velocity = velocity
        self.register_buffer("noise", torch.empty(0, 2), persistent=False)

    def draw(self, batch: int) -> None:
        """New random signs for the solves that follow."""
        self.noise = torch.randint(0, 2, (batch, 2)) * 2.0 - 1

    def forward(self, t: torch.Tensor, state: tuple) -> tuple:
        """(x, log-density) -> (dx/dt, dlog-density/dt); optimised as a whole, all of it is one program."""
        x, _ = state
        _, product = fuser.vector_jacobian_product(self.apply_velocity, (t, x), self.noise)
        return self.velocity(t, x), -(product * self.noise).sum(1)

    def apply_velocity(self, given: tuple) -> torch.Tensor:
        """The velocity as a function of one structure."""
        return self.velocity(*given)
