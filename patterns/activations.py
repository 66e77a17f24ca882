"""Activations: each written once, as a sympy expression.

The branches are oriented as ATen's, so that NaN takes the same one. Derivatives come from these expressions.
"""

from __future__ import annotations

import functools
import inspect
import keyword
from collections.abc import Callable
from typing import Any

import sympy
import torch
from sympy import Piecewise, Rational, erf, exp, pi, sqrt, tanh

from fuser.fused import Function
from fuser.scalar import absolute, expm1, log1p, maximum, minimum, sigmoid, sign, truncate

# name -> the expression as a function of its symbols: the input first, then scalar parameters.
ACTIVATIONS: dict[str, Callable[..., sympy.Basic]] = {
    "relu": lambda x: Piecewise((0, x < 0), (x, True)),
    "leaky_relu": lambda x, slope: Piecewise((x, x > 0), (x * slope, True)),
    "prelu": lambda x, weight: Piecewise((x, x > 0), (weight * x, True)),
    "elu": lambda x, alpha, scale, input_scale: Piecewise(
        (x * scale, x > 0), (expm1(x * input_scale) * (alpha * scale), True)
    ),
    "celu": lambda x, alpha: Piecewise((x, x > 0), (alpha * expm1(x / alpha), True)),
    "gelu": lambda x: x * Rational(1, 2) * (1 + erf(x * sqrt(Rational(1, 2)))),
    "gelu_tanh": lambda x: Rational(1, 2) * x * (1 + tanh(sqrt(2 / pi) * (x + sympy.Float("0.044715", 20) * x**3))),
    "silu": lambda x: x / (1 + exp(-x)),
    "mish": lambda x: x * tanh(log1p(exp(x))),
    "softplus": lambda x, beta, threshold: Piecewise((x, x * beta > threshold), (log1p(exp(x * beta)) / beta, True)),
    "sigmoid": lambda x: sigmoid(x),
    "logsigmoid": lambda x: minimum(0, x) - log1p(exp(-absolute(x))),
    "hardsigmoid": lambda x: minimum(maximum(x + 3, 0), 6) / 6,
    "tanh": lambda x: tanh(x),
    "hardtanh": lambda x, low, high: minimum(maximum(x, low), high),
    "hardswish": lambda x: x * minimum(maximum(x + 3, 0), 6) / 6,
    "softshrink": lambda x, bound: x - minimum(maximum(x, -bound), bound),
    "hardshrink": lambda x, bound: Piecewise((0, (x >= -bound) & (x <= bound)), (x, True)),
    "threshold": lambda x, bound, value: Piecewise((value, x <= bound), (x, True)),
    "tanhshrink": lambda x: x - tanh(x),
    "softsign": lambda x: x / (1 + absolute(x)),
}

# The operator of an activation that `register_activation` made -> its function.
registered: dict[torch._ops.OpOverload, Function] = {}


@functools.cache
def activation(name: str) -> Function:
    """The activation of that name; KeyError when there is none."""
    return as_function(name, ACTIVATIONS[name])


def as_function(name: str, expression: Callable[..., sympy.Basic]) -> Function:
    """A `Function` from a Python function of sympy symbols; arguments named `mask...` are masks."""
    symbols = tuple(sympy.Symbol(p, real=True) for p in inspect.signature(expression).parameters)
    masks = frozenset(s for s in symbols if s.name.startswith("mask"))
    return Function(name, symbols, sympy.sympify(expression(*symbols)), masks)


def derivative(function: Function) -> sympy.Expr:
    """df/dx with respect to the first argument."""
    return sympy.diff(function.expression, function.arguments[0])


def derivative_from_output(function: Function) -> sympy.Expr | None:
    """f'(x) written in y = f(x) alone, as an expression in the symbol `y`, or None where that is impossible.

    Then the epilogue may write over the product's own buffer, and only the output is kept for the gradient.
    """
    y = sympy.Symbol("y", real=True)
    if function.name == "relu":
        return Piecewise((0, y <= 0), (1, True))
    if function.name == "leaky_relu":
        return Piecewise((1, y > 0), (function.arguments[1], True))
    slope = derivative(function).subs(function.expression, y)
    return None if function.arguments[0] in slope.free_symbols else slope


def register_activation(name: str, expression: sympy.Expr, parameters: dict[str, float] | None = None) -> Callable:
    """Add an activation from a sympy expression; returns a function of a tensor that models can call.

    `expression` is written in the symbol `x` and those named by `parameters`, whose values are the defaults of the
    returned function's further arguments. The function computes the same in eager, is differentiable to any order,
    and fuses like a built-in activation. It is registered as the operator `fuser::<name>`.

        x = sympy.Symbol("x")
        squareplus = fuser.register_activation("squareplus", (x + sympy.sqrt(x**2 + 4)) / 2)
        y = squareplus(model(data))

    Raises `ValueError` for a name that is no identifier or is taken, for symbols that are neither `x` nor parameters,
    and for functions or constants that torch's real tensors don't have; `TypeError` when `name` or a parameter's name
    is not a string, or `expression` not a sympy expression. The function raises `TypeError` for a tensor that is not
    floating-point.
    """
    defaults = {n: float(v) for n, v in (parameters or {}).items()}
    _check_name("an activation's name", name)
    for parameter in defaults:
        _check_name("a parameter's name", parameter)
    if "x" in defaults:
        raise ValueError("a parameter can't be called x, which is the input's symbol")
    if not isinstance(expression, sympy.Expr):
        raise TypeError(f"expression must be a sympy expression in the symbol x, got {type(expression).__name__}")
    if name in ACTIVATIONS or hasattr(torch.ops.fuser, name):
        raise ValueError(f"the name {name!r} is taken already")
    unknown = {s.name for s in expression.free_symbols} - {"x", *defaults}
    if unknown:
        raise ValueError(f"the expression uses {sorted(unknown)}, which are neither x nor in parameters")
    symbols = {"x": sympy.Symbol("x", real=True)}
    symbols |= {n: sympy.Symbol(f"parameter_{n}", real=True) for n in defaults}  # no word of C++
    written = _differentiable(expression.xreplace({s: symbols[s.name] for s in expression.free_symbols}))
    slope = _differentiable(sympy.diff(written, symbols["x"]))
    _check_functions("an activation", written)
    _check_functions("an activation's derivative", slope)
    _check_functions("an activation's second derivative", _differentiable(sympy.diff(slope, symbols["x"])))
    function = Function(name, tuple(symbols.values()), written)
    operator = _operator(function, slope)
    registered[operator] = function
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(
        [inspect.Parameter("x", either), *(inspect.Parameter(n, either, default=v) for n, v in defaults.items())]
    )

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        x, *values = given.args
        return operator(x, *map(float, values))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{expression}, element by element."
    call.__signature__ = signature
    return call


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a string, got {type(name).__name__}")
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise ValueError(f"{what} must be an identifier, got {name!r}")


class floor_of(truncate):  # noqa: N801
    """Downwards."""


class ceiling_of(truncate):  # noqa: N801
    """Upwards."""


# sympy's functions whose derivatives torch does not have -> the same with derivatives that it has.
_DIFFERENTIABLE: dict[type, Callable[..., sympy.Expr]] = {
    sympy.Max: lambda *values: functools.reduce(maximum, values),
    sympy.Min: lambda *values: functools.reduce(minimum, values),
    sympy.Abs: absolute, sympy.sign: sign, sympy.floor: floor_of, sympy.ceiling: ceiling_of,
}  # fmt: skip


def _differentiable(expression: sympy.Expr) -> sympy.Expr:
    for theirs, ours in _DIFFERENTIABLE.items():
        expression = expression.replace(theirs, ours)
    return expression


def _check_functions(what: str, expression: sympy.Basic) -> None:
    """Raise `ValueError` for a function that has no torch counterpart, and for a constant that is not real."""
    parts = sympy.preorder_traversal(expression)
    for part in parts:
        if isinstance(part, sympy.Expr) and part.is_number:
            parts.skip()
            try:
                float(part)
            except TypeError:
                raise ValueError(f"{what} can't use the constant {part}, which is not a real number") from None
        elif not isinstance(part, (sympy.Symbol, sympy.logic.boolalg.BooleanAtom, Piecewise, sympy.Tuple)):
            name = getattr(part.func, "__name__", str(part.func))
            if name not in _TORCH:
                raise ValueError(f"{what} can't use the function {name}; it may use {', '.join(sorted(_TORCH))}")


def _operator(function: Function, slope: sympy.Expr) -> torch._ops.OpOverload:
    """The operator `fuser::name`: the expression in eager operations; its gradient is `slope` in eager operations."""
    name, symbols = function.name, function.arguments
    value_of, slope_of = torch_function(symbols, function.expression), torch_function(symbols, slope)
    torch.library.define(f"fuser::{name}", f"(Tensor x{''.join(f', float {s.name}' for s in symbols[1:])}) -> Tensor")

    def blank(x: torch.Tensor, *values: float) -> torch.Tensor:
        if not x.is_floating_point():
            raise TypeError(f"{name} takes a floating-point tensor, got {x.dtype}")
        return torch.empty_like(x)

    def eager(x: torch.Tensor, *values: float) -> torch.Tensor:
        return blank(x).copy_(value_of(x, *values))

    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.values = inputs[1:]

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        return gradient * slope_of(x, *ctx.values), *(None for _ in ctx.values)

    torch.library.impl(f"fuser::{name}", "CompositeExplicitAutograd", eager)
    torch.library.register_fake(f"fuser::{name}", blank)
    torch.library.register_autograd(f"fuser::{name}", backward, setup_context=setup_context)
    return getattr(torch.ops.fuser, name).default


def torch_function(symbols: tuple[sympy.Symbol, ...], expression: sympy.Basic) -> Callable[..., torch.Tensor]:
    """An expression as a function of torch operations; the first symbol is a tensor, the others are numbers."""

    def compute(x: torch.Tensor, *values: float) -> torch.Tensor:
        given = {symbols[0]: x} | {s: torch.full((), v, dtype=x.dtype) for s, v in zip(symbols[1:], values)}
        return _evaluate(expression, given, x).expand(x.shape)

    return compute


def _evaluate(e: sympy.Basic, given: dict[sympy.Symbol, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The value of `e`, by torch operations on the symbols' values."""
    if e in given:
        return given[e]
    if isinstance(e, sympy.logic.boolalg.BooleanAtom):
        return torch.tensor(bool(e))
    if isinstance(e, sympy.Expr) and e.is_number:
        return torch.full((), float(e), dtype=like.dtype)
    if isinstance(e, Piecewise):
        result = torch.full((), float("nan"), dtype=like.dtype)
        for value, condition in reversed(e.args):
            result = torch.where(_evaluate(condition, given, like), _evaluate(value, given, like), result)
        return result
    arguments = [_evaluate(a, given, like) for a in e.args]
    if isinstance(e, sympy.Pow) and e.exp == Rational(1, 2):
        return torch.sqrt(arguments[0])
    if isinstance(e, sympy.Pow) and e.exp == -1:
        return torch.reciprocal(arguments[0])
    if isinstance(e, sympy.Pow) and e.exp.is_number:
        return torch.pow(arguments[0], float(e.exp))
    function = _TORCH.get(getattr(e.func, "__name__", ""))
    if function is None:
        raise ValueError(f"an activation can't use {e.func}")
    return functools.reduce(function, arguments) if len(arguments) > 1 else function(arguments[0])


_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "Add": torch.add, "Mul": torch.mul, "Pow": torch.pow, "StrictGreaterThan": torch.gt, "StrictLessThan": torch.lt,
    "GreaterThan": torch.ge, "LessThan": torch.le, "Equality": torch.eq, "Unequality": torch.ne,
    "And": torch.logical_and, "Or": torch.logical_or, "Not": torch.logical_not,
    "exp": torch.exp, "log": torch.log, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "asin": torch.asin,
    "acos": torch.acos, "atan": torch.atan, "sinh": torch.sinh, "cosh": torch.cosh, "tanh": torch.tanh,
    "asinh": torch.asinh, "acosh": torch.acosh, "atanh": torch.atanh, "erf": torch.erf, "erfc": torch.erfc,
    "absolute": torch.abs, "sign": torch.sgn, "sigmoid": torch.sigmoid, "expm1": torch.expm1, "log1p": torch.log1p,
    "maximum": torch.maximum, "minimum": torch.minimum, "truncate": torch.trunc, "floor_of": torch.floor,
    "ceiling_of": torch.ceil,
}  # fmt: skip
