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
from fuser.patterns import activations, registered_patterns
from fuser.state import observe
from fuser.torch_private import FakeTensorMode

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


def test_registered_names_are_apart_from_the_built_in_ones() -> None:
    next_one = fuser.register_activation("square", x + 1)
    tripled = fuser.register_activation("add", 3 * x)
    report = compiled(check(lambda t: next_one(t).square() + tripled(t), torch.randn(4, 5)))
    (entry,) = report.fused
    assert entry.how == "generated kernel" and len(entry.members) == 4
    data = torch.randn(3)
    assert torch.equal(next_one(data), data + 1) and torch.equal(data.square(), data * data)


@pytest.mark.parametrize(
    "name, expression",
    [
        ("three_way", sympy.Max(x, 0, -x / 2)),
        ("capped", sympy.Min(x, 1) * x),
        ("signed", sympy.sign(x) * x**2),
        ("stairs", sympy.floor(x) * x + sympy.ceiling(2 * x)),
        ("folded", sympy.Abs(x - 1) + sympy.sqrt(x**2)),
        ("nested", sympy.Max(sympy.Abs(x), sympy.floor(x) * x)),
    ],
)
def test_functions_with_kinks_are_differentiable(name: str, expression: sympy.Expr) -> None:
    function = fuser.register_activation(name, expression)
    data = torch.tensor([-2.3, -0.4, 0.7, 1.9], dtype=torch.float64, requires_grad=True)
    expected = [float(expression.subs(x, v)) for v in data.tolist()]
    torch.testing.assert_close(function(data).tolist(), expected)
    assert torch.autograd.gradcheck(function, data) and torch.autograd.gradgradcheck(function, data)
    compiled(check(function, data.detach()))


def test_results_are_laid_out_as_empty_like() -> None:
    data = torch.randn(3, 1).expand(3, 4)
    for function in (fuser.register_activation("same", x), fuser.register_activation("two", sympy.Integer(2) + 0 * x)):
        result = function(data)
        assert result.stride() == torch.empty_like(data).stride() and result.data_ptr() != data.data_ptr()
        compiled(check(function, torch.randn(4, 3).t()))


@pytest.mark.parametrize("data", [torch.arange(3), torch.tensor([True]), torch.zeros(2, dtype=torch.complex64)])
def test_registered_activations_take_floating_point_tensors(squareplus: object, data: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=f"squareplus takes a floating-point tensor, got {data.dtype}"):
        squareplus(data)
    with FakeTensorMode() as mode, pytest.raises(TypeError, match=str(data.dtype)):
        squareplus(mode.from_tensor(data))
    with pytest.raises(TypeError, match=str(data.dtype)):
        fuser.optimize(lambda t: squareplus(t))(data)


def test_parameters_may_have_any_name() -> None:
    names = ["double", "float", "mask", "mask_a", "self", "Tensor", "inf", "t0", "vec", "args"]
    weighted = x * sum((i + 1) * sympy.Symbol(n) for i, n in enumerate(names))
    function = fuser.register_activation("weighted", weighted, dict.fromkeys(names, 1.0))
    data = torch.randn(6)
    torch.testing.assert_close(function(data, 2.0, self=3), data * (55 + 1 + 10))
    compiled(check(lambda t: function(t, 2.0, mask=0.5), data))


def test_arguments_are_bound_as_python_does(squareplus: object) -> None:
    data = torch.randn(3)
    assert torch.equal(squareplus(x=data, b=3), squareplus(data, 3.0))
    for args, kwargs, message in [
        ((data,), {"c": 1.0}, "unexpected keyword argument 'c'"),
        ((data, 1.0, 2.0), {}, "too many positional arguments"),
        ((data, 1.0), {"b": 2.0}, "multiple values for argument 'b'"),
        ((), {"b": 2.0}, "missing a required argument: 'x'"),
    ]:
        with pytest.raises(TypeError, match=message):
            squareplus(*args, **kwargs)


@pytest.mark.parametrize(
    "name, expression, parameters, error, message",
    [
        ("not a name", x, None, ValueError, "identifier"),
        (3, x, None, TypeError, "must be a string, got int"),
        ("relu", x, None, ValueError, "taken already"),
        ("squareplus", x, None, ValueError, "taken already"),
        ("other", sympy.Symbol("y"), None, ValueError, "neither x nor"),
        ("other", "x + 1", None, TypeError, "sympy expression"),
        ("other", x * sympy.I, None, ValueError, "constant I, which is not a real number"),
        ("other", x + sympy.sqrt(-2), None, ValueError, "not a real number"),
        ("other", x**sympy.I, None, ValueError, "not a real number"),
        ("other", x + sympy.zoo, None, ValueError, "not a real number"),
        ("other", sympy.gamma(x), None, ValueError, "can't use the function gamma"),
        ("other", sympy.Heaviside(x), None, ValueError, "can't use the function Heaviside"),
        ("other", sympy.Integral(sympy.exp(-(x**2)), (x, 0, x)), None, ValueError, "can't use the function Integral"),
        ("other", x, {"x": 1.0}, ValueError, "can't be called x"),
        ("other", x, {"lambda": 1.0}, ValueError, "a parameter's name must be an identifier"),
        ("other", x, {"two words": 1.0}, ValueError, "a parameter's name must be an identifier"),
        ("other", x, {3: 1.0}, TypeError, "a parameter's name must be a string"),
    ],
)
def test_bad_activations_are_refused(
    squareplus: object, name: object, expression: object, parameters: object, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        fuser.register_activation(name, expression, parameters)
    assert not hasattr(torch.ops.fuser, "other")


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


aten = torch.ops.aten


@pytest.mark.parametrize(
    "anchors, more, error, message",
    [
        (aten.cumprod.default, {}, TypeError, "must be a set of overloads, got <OpOverload"),
        ([aten.cumprod.default], {}, TypeError, "must be a set of overloads"),
        (set(), {}, ValueError, "names no anchor"),
        ({aten.cumprod.default}, {"bias": "x"}, TypeError, "must be an argument's position, got 'x'"),
        ({aten.cumprod.default}, {"bias": True}, TypeError, "must be an argument's position"),
        ({aten.cumprod.default}, {"bias": 3}, ValueError, "has 3 arguments, so its bias can't be number 3"),
        ({aten.cumprod.default}, {"bias": -1}, ValueError, "can't be number -1"),
        ({aten.cumprod.default}, {"guard": None}, TypeError, "must be a function of a node, got None"),
        ({aten.std_mean.correction}, {}, ValueError, "does not return exactly one tensor"),
        ({aten.equal.default}, {}, ValueError, "does not return exactly one tensor"),
    ],
)
def test_bad_patterns_are_refused(anchors: object, more: dict, error: type, message: str) -> None:
    before = registered_patterns()
    with pytest.raises(error, match=message):
        fuser.register_pattern(fuser.Pattern("wrong", anchors, **more))
    assert registered_patterns() == before


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
