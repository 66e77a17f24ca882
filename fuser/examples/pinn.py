"""Solve the Poisson equation on the unit square with a physics-informed network.

-Laplace u = f with u = 0 on the boundary, for an f whose solution is known: sin(pi x) sin(2 pi y). The loss holds the
Laplacian of the network; its gradient in the parameters, a derivative of third order, is one compiled program.
Exits 1 if the relative L2 error is 3% or more.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import fuser
from fuser.examples.digits import microseconds

PENALTY = 200.0  # the weight of the boundary values in the loss


def network() -> nn.Module:
    """Three hidden layers of 64 with tanh: (points, 2) -> (points, 1)."""
    hidden = [nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(64, 1))


def solution(points: torch.Tensor) -> torch.Tensor:
    """The exact u."""
    return (torch.sin(math.pi * points[:, :1]) * torch.sin(2 * math.pi * points[:, 1:])).contiguous()


def source(points: torch.Tensor) -> torch.Tensor:
    """f = -Laplace u."""
    return 5 * math.pi**2 * solution(points)


class Loss(nn.Module):
    """Mean squares of the residual inside and, weighted, of u on the boundary."""

    def __init__(self, u: nn.Module) -> None:
        super().__init__()
        self.u = u

    def forward(self, inside: torch.Tensor, f: torch.Tensor, boundary: torch.Tensor) -> torch.Tensor:
        """(n, 2), (n, 1), (m, 2) -> a number."""
        hessian = fuser.batched_jacobian(self.gradient, inside)
        laplacian = hessian.diagonal(dim1=1, dim2=2).sum(1)
        return (laplacian + f[:, 0]).square().mean() + PENALTY * self.u(boundary).square().mean()

    def gradient(self, points: torch.Tensor) -> torch.Tensor:
        """du/dx and du/dy at every point, (n, 2): the product with ones, as no point depends on another."""
        return fuser.vector_jacobian_product(self.u, points, torch.ones_like(points[:, :1]))


def eager_loss(u: nn.Module, inside: torch.Tensor, f: torch.Tensor, boundary: torch.Tensor) -> torch.Tensor:
    """The same number by autograd, as it is usually written."""
    inside = inside.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(u(inside).sum(), inside, create_graph=True)
    second = [torch.autograd.grad(gradient[:, i].sum(), inside, create_graph=True)[0][:, i] for i in range(2)]
    return (second[0] + second[1] + f[:, 0]).square().mean() + PENALTY * u(boundary).square().mean()


def sample(inside: int = 256, boundary: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random points inside, f there, and random points on the boundary."""
    points = torch.rand(inside, 2)
    edge = torch.rand(boundary, 2)
    side = torch.randint(0, 2, (boundary,))
    edge[torch.arange(boundary), side] = edge[torch.arange(boundary), side].round()
    return points, source(points), edge


def train(u: nn.Module, loss_and_gradients: Callable, steps: int = 3000) -> list[float]:
    """Adam on fresh points in every step; returns the losses."""
    parameters = dict(u.named_parameters(prefix="u"))
    optimizer = torch.optim.Adam(u.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    losses = []
    for _ in range(steps):
        loss, gradients = loss_and_gradients(*sample())
        for name, gradient in gradients.items():
            parameters[name].grad = gradient.detach()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def errors(u: nn.Module, size: int = 64) -> tuple[float, float]:
    """Relative L2 errors of u and of its gradient on a grid."""
    axis = (torch.arange(size) + 0.5) / size
    points = torch.cartesian_prod(axis, axis)
    exact, ones = solution(points), torch.ones(len(points), 1)
    exact_gradient = torch.func.vjp(solution, points)[1](ones)[0]
    with torch.no_grad():
        value, gradient = fuser.optimize(u)(points), fuser.vector_jacobian_product(u, points, ones)
    return relative(value, exact), relative(gradient, exact_gradient)


def relative(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference by the norm of what is exact."""
    return ((actual - exact).norm() / exact.norm()).item()


def main(steps: int = 3000) -> int:
    """Train, measure, compare; returns the exit code."""
    torch.manual_seed(0)
    u = network()
    loss_and_gradients = fuser.value_and_grad(Loss(u))
    start = time.perf_counter()
    losses = train(u, loss_and_gradients, steps)
    seconds = time.perf_counter() - start
    print(f"{steps} steps in {seconds:.1f} s with compilation, loss {losses[0]:.3g} -> {losses[-1]:.3g}")
    of_value, of_gradient = errors(u)
    print(f"relative L2 error of u {of_value:.2%}, of its gradient {of_gradient:.2%}")

    points = sample()
    parameters = list(u.parameters())
    fused, eager = microseconds(
        [
            lambda: loss_and_gradients(*points),
            lambda: torch.autograd.grad(eager_loss(u, *points), parameters),
        ]
    )
    print(f"loss and gradients: eager {eager:.0f} us, fuser {fused:.0f} us, {eager / fused:.2f} times as fast")
    print(loss_and_gradients.report())
    return 0 if of_value < 0.03 else 1


if __name__ == "__main__":
    sys.exit(main())
