"""The derivative functions against `torch.func` and autograd, in float64."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fuser

Tensor = torch.Tensor


def network(inputs: int = 3, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.SiLU(), nn.Linear(8, outputs), nn.Tanh()).double()


def wide(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def gradients(value: Tensor, *variables: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(value.square().sum(), variables, allow_unused=True)
    return [torch.zeros_like(v) if g is None else g for g, v in zip(found, variables)]


@pytest.mark.parametrize("grad_mode", [True, False])
def test_products_with_the_jacobian(grad_mode: bool) -> None:
    f, x, u, v = network(3, 2), wide(5, 3), wide(5, 2), wide(5, 3)
    with torch.set_grad_enabled(grad_mode):
        close(fuser.vector_jacobian_product(f, x, u), torch.func.vjp(f, x)[1](u)[0])
        close(fuser.jacobian_vector_product(f, x, v), torch.func.jvp(f, (x,), (v,))[1])
        close(fuser.jacobian_vector_product(fuser.optimize(f), x, v), torch.func.jvp(f, (x,), (v,))[1])


def test_nested_arguments_and_results() -> None:
    def f(x: dict) -> tuple:
        return x["a"] * x["b"][0], [x["b"][0].sin()]

    x, v = {"a": wide(4), "b": [wide(4)]}, {"a": wide(4), "b": [wide(4)]}
    u = (wide(4), [wide(4)])
    mine, theirs = fuser.vector_jacobian_product(f, x, u), torch.func.vjp(f, x)[1](u)[0]
    close(mine["a"], theirs["a"]), close(mine["b"][0], theirs["b"][0])
    mine, theirs = fuser.jacobian_vector_product(f, x, v), torch.func.jvp(f, (x,), (v,))[1]
    close(mine[0], theirs[0]), close(mine[1][0], theirs[1][0])


def test_products_are_differentiable() -> None:
    f = network()
    x, u = wide(5, 3).requires_grad_(), wide(5, 3).requires_grad_()
    variables = (x, u, *f.parameters())
    theirs = torch.func.vjp(f, x)[1](u)[0]
    for a, b in zip(gradients(fuser.vector_jacobian_product(f, x, u), *variables), gradients(theirs, *variables)):
        close(a, b)
    theirs = torch.func.jvp(f, (x,), (u,))[1]
    for a, b in zip(gradients(fuser.jacobian_vector_product(f, x, u), *variables), gradients(theirs, *variables)):
        close(a, b)


def test_shapes_are_checked() -> None:
    f = network(3, 2)
    with pytest.raises(ValueError, match="u must have the shapes of f"):
        fuser.vector_jacobian_product(f, wide(5, 3), wide(4, 2))
    with pytest.raises(ValueError, match="v must have the shapes of x"):
        fuser.jacobian_vector_product(f, wide(5, 3), wide(5, 2))
    with pytest.raises(ValueError, match="structure"):
        fuser.jacobian_vector_product(f, wide(5, 3), (wide(5, 3),))
    with pytest.raises(ValueError, match="samples must be at least 1"):
        fuser.hutchinson_trace(network(), wide(5, 3), 0)


class Loss(nn.Module):
    """The mean square of a network's output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def tied_modules() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer).double()


def tied_weights() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[2].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = network()
    model[0].weight.requires_grad_(False)
    return model


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).double()


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("make", [network, tied_modules, tied_weights, frozen, normalised])
def test_value_and_grad_of_a_module(make: Callable, grad_mode: bool) -> None:
    torch.manual_seed(1)
    model = Loss(make())
    torch.manual_seed(1)
    twin = Loss(make())
    compiled = fuser.value_and_grad(model)
    for _ in range(2):
        x = wide(6, 3)
        with torch.set_grad_enabled(grad_mode):
            value, found = compiled(x)
        wanted = {n: p for n, p in twin.named_parameters() if p.requires_grad}
        expected = twin(x)
        close(value.detach(), expected.detach())
        assert list(found) == list(wanted)
        for mine, theirs in zip(found.values(), torch.autograd.grad(expected, list(wanted.values()))):
            close(mine.detach(), theirs)
    for mine, theirs in zip(model.buffers(), twin.buffers()):
        close(mine.double(), theirs.double())
    assert not compiled.report().eager


def test_value_and_grad_of_a_function() -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        return (w @ x).tanh().sum()

    w, x = wide(3, 4), wide(4, 2)
    for argument in (0, 1):
        value, gradient = fuser.value_and_grad(f, argument)(w, x)
        close(value, f(w, x))
        close(gradient, torch.func.grad(f, argument)(w, x))


@pytest.mark.parametrize("inputs, outputs", [(2, 5), (5, 2), (3, 3)])
def test_batched_jacobian(inputs: int, outputs: int) -> None:
    f, x = network(inputs, outputs), wide(7, inputs)
    close(fuser.batched_jacobian(f, x), torch.func.vmap(torch.func.jacrev(f))(x))


def test_hutchinson_trace() -> None:
    f, x = network(), wide(6, 3)
    exact = torch.func.vmap(torch.func.jacrev(f))(x).diagonal(dim1=1, dim2=2).sum(1)
    draw = lambda seed: fuser.hutchinson_trace(f, x, 4000, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    assert torch.equal(draw(3), draw(3)) and not torch.equal(draw(3), draw(4))
    assert (draw(3) - exact).abs().max() < 0.1 * exact.abs().max()
    close(fuser.hutchinson_trace(lambda t: 2 * t, x), torch.full((6,), 6.0, dtype=torch.float64))


def test_it_works_without_numpy() -> None:
    """torch does not need it, so fuser must not."""
    script = """
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")
import torch, fuser
model = torch.nn.Linear(3, 3)
served = fuser.optimize(model)
x = torch.randn(2, 3)
assert torch.allclose(served(x), model(x)) and not served.report().eager, served.report()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
