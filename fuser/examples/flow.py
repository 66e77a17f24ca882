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

SOLVER_STEPS = 8  # of the classic Runge-Kutta method, each way; each step calls the field four times


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


class EagerField(Field):
    """The same as it is usually written, with autograd inside."""

    def forward(self, t: torch.Tensor, state: tuple) -> tuple:
        """As in `Field`."""
        x, _ = state
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            velocity = self.velocity(t, x)
            (product,) = torch.autograd.grad(velocity, x, self.noise, create_graph=True)
        return velocity, -(product * self.noise).sum(1)


def two_moons(count: int) -> torch.Tensor:
    """Points around two half circles, (count, 2), with mean 0 and deviation 1 or so."""
    angle = math.pi * torch.rand(count)
    upper = torch.rand(count) < 0.5
    x = torch.where(upper, torch.cos(angle), 1 - torch.cos(angle)) - 0.5
    y = torch.where(upper, torch.sin(angle), 0.5 - torch.sin(angle)) - 0.25
    return torch.stack([x / 0.87, y / 0.5], 1) + 0.1 * torch.randn(count, 2)


def negative_log_likelihood(field: nn.Module, points: torch.Tensor) -> torch.Tensor:
    """The mean over points, each carried back from time 1 to 0, where the density is the standard normal one."""
    from torchdiffeq import odeint_adjoint

    field.draw(len(points))
    options = {"method": "rk4", "options": {"step_size": 1 / SOLVER_STEPS}}
    start = (points, torch.zeros(len(points)))
    x, change = (end[-1] for end in odeint_adjoint(field, start, torch.tensor([1.0, 0.0]), **options))
    normal = -(x.square().sum(1) / 2 + math.log(2 * math.pi))
    return (change - normal).mean()


def train(field: nn.Module, steps: int = 300, batch: int = 256) -> list[float]:
    """Adam on fresh points in every step; returns the negative log-likelihoods."""
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = negative_log_likelihood(field, two_moons(batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(steps: int = 300) -> int:
    """Train, compare; returns the exit code."""
    try:
        import torchdiffeq  # noqa: F401
    except ImportError:
        sys.exit("this example needs torchdiffeq: pip install 'torch-fuser[demo]'")
    torch.manual_seed(0)
    velocity = Velocity()
    field = fuser.optimize(Field(velocity))
    start = time.perf_counter()
    losses = train(field, steps)
    seconds = time.perf_counter() - start
    few = min(20, len(losses))
    first, last = losses[0], sum(losses[-few:]) / few
    print(f"{steps} steps in {seconds:.1f} s with compilation")
    print(f"negative log-likelihood {first:.3f} -> {last:.3f} (mean of the last {few})")

    points, eager_field = two_moons(256), EagerField(velocity)
    parameters = list(velocity.parameters())
    step = lambda f: torch.autograd.grad(negative_log_likelihood(f, points), parameters)
    fused, eager = microseconds([lambda: step(field), lambda: step(eager_field)], rounds=5, repeats=2)
    print(f"solve and adjoint: eager {eager:.0f} us, fuser {fused:.0f} us, {eager / fused:.2f} times as fast")
    print(field.report())
    return 0 if last < first - 0.3 else 1


if __name__ == "__main__":
    sys.exit(main())
