"""The examples of derivatives train, do in fused programs what eager does, and converge."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fuser
from fuser.examples import flow, pinn

needs_torchdiffeq = pytest.mark.skipif(
    importlib.util.find_spec("torchdiffeq") is None, reason="torchdiffeq is not installed: pip install torchdiffeq"
)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max().clamp_min(1e-3)


def falls(losses: list[float]) -> None:
    assert all(map(math.isfinite, losses))
    assert sum(losses[-5:]) < sum(losses[:5])


def test_the_poisson_loss_and_its_gradients_are_those_of_eager() -> None:
    u, points = pinn.network(), pinn.sample(32, 16)
    loss_and_gradients = fuser.value_and_grad(pinn.Loss(u))
    loss, gradients = loss_and_gradients(*points)
    expected = pinn.eager_loss(u, *points)
    close(loss, expected)
    for name, gradient in zip(dict(u.named_parameters()), torch.autograd.grad(expected, list(u.parameters()))):
        close(gradients[f"u.{name}"], gradient)
    assert loss_and_gradients.report().eager == []


def test_the_poisson_network_trains() -> None:
    torch.manual_seed(0)
    u = pinn.network()
    falls(pinn.train(u, fuser.value_and_grad(pinn.Loss(u)), steps=60))
    assert all(map(math.isfinite, pinn.errors(u, 8)))


def test_the_field_is_that_of_eager_with_and_without_gradients() -> None:
    velocity = flow.Velocity()
    field, eager = fuser.optimize(flow.Field(velocity)), flow.EagerField(velocity)
    field.draw(16)
    eager.noise = field.noise
    t = torch.tensor(0.3)
    with torch.no_grad():
        state = (torch.randn(16, 2), torch.zeros(16))
        for actual, expected in zip(field(t, state), eager(t, state)):
            close(actual, expected)
    state[0].requires_grad_()
    variables = [state[0], *velocity.parameters()]
    results = [torch.autograd.grad(sum(r.sin().sum() for r in f(t, state)), variables) for f in (field, eager)]
    for actual, expected in zip(*results):
        close(actual, expected)


def test_the_field_is_compiled_with_and_without_gradients() -> None:
    field = fuser.optimize(flow.Field(flow.Velocity()))
    field.draw(16)
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            field(torch.tensor(0.3), (torch.randn(16, 2), torch.zeros(16)))
    assert field.report().eager == []


@needs_torchdiffeq
def test_the_flow_trains() -> None:
    torch.manual_seed(0)
    falls(flow.train(fuser.optimize(flow.Field(flow.Velocity())), steps=15, batch=64))


def test_the_excerpts_in_the_documentation_run() -> None:
    torch.manual_seed(0)
    text = (Path(__file__).parent.parent / "docs" / "derivatives.md").read_text()
    names: dict[str, object] = {"__name__": "excerpts"}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, names)


@pytest.mark.slow
def test_the_poisson_example_converges(capsys: pytest.CaptureFixture) -> None:
    example_succeeds(pinn, capsys)


@pytest.mark.slow
@needs_torchdiffeq
def test_the_flow_example_converges(capsys: pytest.CaptureFixture) -> None:
    example_succeeds(flow, capsys)


def example_succeeds(example: ModuleType, capsys: pytest.CaptureFixture) -> None:
    code, printed = example.main(), capsys.readouterr().out
    assert code == 0, printed
    assert "times as fast" in printed and "fuser report" in printed and "runs eagerly" not in printed
