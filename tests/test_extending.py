"""Registering activations and patterns; derivatives of activations; a program's derivatives are programs."""

from __future__ import annotations

import pytest
import sympy
import torch
from oracle import assert_as_good_as_eager, check, compiled
from torch import nn

import fuser
from fuser import pipeline
from fuser.capture import capture
from fuser.patterns import activations
from fuser.state import observe

x = sympy.Symbol("x")


@pytest.fixture(scope="module")
def squareplus() -> object:
    return fuser.register_activation("squareplus", (x + sympy.sqrt(x**2 + sympy.Symbol("b"))) / 2, {"b": 4.0})


def test_a_registered_activation_fuses_and_differentiates(squareplus: object) -> None:
    layer = nn.Linear(5, 6)

    def model(t: torch.Tensor) -> torch.Tensor:
        return squareplus(nn.functional.linear(t, layer.weight.to(t.dtype), layer.bias.to(t.dtype)), b=3.0)

    report = compiled(check(model, torch.randn(7, 5)))
    assert report.fused[-1].name == "linear_bias_squareplus_0"
    data = torch.randn(5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(squareplus(data), (data + (data**2 + 4).sqrt()) / 2)
    assert torch.autograd.gradcheck(squareplus, data) and torch.autograd.gradgradcheck(squareplus, data)


def test_piecewise_activations_work_in_eager_too() -> None:
    ramp = fuser.register_activation("ramp", sympy.Piecewise((0, x < 0), (x, x < 1), (1, True)))
    data = torch.tensor([-1.0, 0.5, 2.0, float("nan")])
    expected = torch.tensor([0.0, 0.5, 1.0, 1.0])
    torch.testing.assert_close(ramp(data), expected)
    torch.testing.assert_close(fuser.optimize(lambda t: ramp(t))(data), expected)


@pytest.mark.parametrize(
    "name, expression, error, message",
    [
        ("not a name", x, ValueError, "identifier"),
        ("relu", x, ValueError, "already"),
        ("other", sympy.Symbol("y"), ValueError, "neither x nor"),
        ("text", "x + 1", TypeError, "sympy expression"),
    ],
)
def test_bad_activations_are_refused(name: str, expression: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        fuser.register_activation(name, expression)


def test_a_registered_pattern_fuses_in_place() -> None:
    pattern = fuser.Pattern("cumsum", frozenset({torch.ops.aten.cumsum.default}))
    fuser.register_pattern(pattern)
    report = compiled(check(lambda t: torch.relu(t.cumsum(0) * 2 + 1), torch.randn(4, 5)))
    (entry,) = report.fused
    assert entry.name == "cumsum_mul_add_relu_0" and "in place" in entry.how
    with pytest.raises(ValueError, match="already"):
        fuser.register_pattern(pattern)
    with pytest.raises(ValueError, match="returns a view"):
        fuser.register_pattern(fuser.Pattern("view", frozenset({torch.ops.aten.view.default})))
    with pytest.raises(TypeError, match="operator overload"):
        fuser.register_pattern(fuser.Pattern("wrong", frozenset({torch.cumsum})))
    with pytest.raises(TypeError, match="takes a fuser.Pattern"):
        fuser.register_pattern("cumsum")


def evaluate(expression: sympy.Expr, **values: float) -> float:
    symbols = {s: values[s.name] for s in expression.free_symbols}
    return float(expression.subs(symbols).doit())


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "relu", "gelu", "silu", "mish", "logsigmoid"])
def test_derivatives_of_activations(name: str) -> None:
    function = activations.activation(name)
    slope = activations.torch_function(function.arguments, activations.derivative(function))
    value = activations.torch_function(function.arguments, function.expression)
    points = torch.tensor([-2.3, -0.4, 0.7, 1.9], dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(value(points).sum(), points)
    torch.testing.assert_close(slope(points), expected)
    in_output = activations.derivative_from_output(function)
    assert (in_output is not None) == (name in ("tanh", "sigmoid", "relu"))
    if in_output is not None:
        from_output = activations.torch_function((sympy.Symbol("y", real=True),), in_output)
        torch.testing.assert_close(from_output(value(points)), expected)


def executable(program: object) -> object:
    from fuser.runtime import build

    native = build.load()
    return pipeline.compile(program, native.PackStore(), native.ArenaPool(), native)


def test_a_programs_derivatives_are_programs() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    data, direction = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    seen = observe(model).captured
    program = capture(model, (data,), {}, seen)
    inputs = [c.tensor.detach() for c in seen] + [data]

    def function(*given: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {c.name: t for c, t in zip(seen, given)}, (given[-1],))

    pulled = torch.func.vjp(function, *inputs)[1](direction)
    assert_as_good_as_eager(executable(program.vjp())(*inputs, direction), list(pulled), list(pulled))
    tangents = [torch.randn_like(t) for t in inputs]
    pushed = torch.func.jvp(function, tuple(inputs), tuple(tangents))[1]
    assert_as_good_as_eager(executable(program.jvp())(*inputs, *tangents), [pushed], [pushed])
    second = program.vjp().jvp()
    assert [i.name for i in second.inputs][-1].startswith("tangent")
    batch = torch.randn(3, 5, 4, dtype=torch.float64)
    mapped = program.vmap(3, [None] * len(seen) + [0])
    together = executable(mapped)(*inputs[:-1], batch)[0]
    torch.testing.assert_close(together, model(batch).detach())
    with pytest.raises(ValueError, match="in_dims"):
        program.vmap(3, [0])


def test_derivatives_leave_writes_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    program = capture(model, (torch.randn(5, 4),), {}, observe(model).captured)
    assert any(n.target is torch.ops.aten.copy_.default for n in program.graph_module.graph.nodes)
    derivative = program.vjp()
    assert not any(n.target is torch.ops.aten.copy_.default for n in derivative.graph_module.graph.nodes)
