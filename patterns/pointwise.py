"""ATen's pointwise operators -> `Operation`: which scalar function, on which operands; or the reason why not.

Every operator's expression has symbols of its own, so sympy never simplifies across operators: `x - x` must stay NaN
for an infinite x.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy
import torch
from sympy import Eq, Ge, Gt, Le, Lt, Ne, Piecewise, Rational
from torch.fx import Node

from fuser.fused import Function, Operation, tensor_meta
from fuser.patterns import activations
from fuser.scalar import (
    absolute,
    copysign,
    expm1,
    fmod,
    hypot,
    is_finite,
    is_infinite,
    is_nan,
    log1p,
    maximum,
    minimum,
    round_to_bfloat16,
    round_to_even,
    round_to_half,
    sign,
    truncate,
)

aten = torch.ops.aten

_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
_FLOATS = (*_SINGLE, torch.float64)

# name -> expression in its own symbols; a symbol called mask... is a mask.
EXPRESSIONS: dict[str, Callable[..., sympy.Basic]] = {
    "copy": lambda a: a, "copy_mask": lambda mask_a: mask_a, "real": lambda mask_a: Piecewise((1, mask_a), (0, True)),
    "add": lambda a, b: a + b, "add_scaled": lambda a, b, alpha: a + alpha * b,
    "sub": lambda a, b: a - b, "sub_scaled": lambda a, b, alpha: a - alpha * b,
    "mul": lambda a, b: a * b, "div": lambda a, b: a / b, "trunc_div": lambda a, b: truncate(a / b),
    "neg": lambda a: -a, "abs": lambda a: absolute(a), "sign": lambda a: sign(a),
    "square": lambda a: a * a, "cube": lambda a: a * a * a, "sqrt": lambda a: sympy.sqrt(a),
    "rsqrt": lambda a: 1 / sympy.sqrt(a), "reciprocal": lambda a: 1 / a, "inverse_square": lambda a: 1 / (a * a),
    "pow": lambda a, b: a**b, "exp": lambda a: sympy.exp(a), "exp2": lambda a: sympy.Function("exp2")(a),
    "log": lambda a: sympy.log(a), "log2": lambda a: sympy.Function("log2")(a),
    "log10": lambda a: sympy.Function("log10")(a), "log1p": lambda a: log1p(a), "expm1": lambda a: expm1(a),
    "sin": lambda a: sympy.sin(a), "cos": lambda a: sympy.cos(a), "tan": lambda a: sympy.tan(a),
    "asin": lambda a: sympy.asin(a), "acos": lambda a: sympy.acos(a), "atan": lambda a: sympy.atan(a),
    "atan2": lambda a, b: sympy.Function("atan2")(a, b), "sinh": lambda a: sympy.sinh(a),
    "cosh": lambda a: sympy.cosh(a), "asinh": lambda a: sympy.asinh(a), "acosh": lambda a: sympy.acosh(a),
    "atanh": lambda a: sympy.atanh(a), "erf": lambda a: sympy.erf(a), "erfc": lambda a: sympy.erfc(a),
    "floor": lambda a: sympy.Function("floor_of")(a), "ceil": lambda a: sympy.Function("ceiling_of")(a),
    "trunc": lambda a: truncate(a), "round": lambda a: round_to_even(a), "frac": lambda a: a - truncate(a),
    "maximum": lambda a, b: maximum(a, b), "minimum": lambda a, b: minimum(a, b),
    "clamp": lambda a, low, high: minimum(maximum(a, low), high), "fmod": lambda a, b: fmod(a, b),
    "hypot": lambda a, b: hypot(a, b), "copysign": lambda a, b: copysign(a, b),
    "lerp": lambda a, b, w: Piecewise((a + w * (b - a), absolute(w) < Rational(1, 2)), (b - (b - a) * (1 - w), True)),
    "addcmul": lambda a, b, c, v: a + v * b * c, "addcdiv": lambda a, b, c, v: a + v * (b / c),
    "where": lambda mask_c, a, b: Piecewise((a, mask_c), (b, True)),
    "eq": Eq, "ne": Ne, "lt": Lt, "le": Le, "gt": Gt, "ge": Ge,
    "isnan": lambda a: is_nan(a), "isinf": lambda a: is_infinite(a), "isfinite": lambda a: is_finite(a),
    "nonzero": lambda a: Ne(a, 0),
    "logical_and": lambda mask_a, mask_b: mask_a & mask_b, "logical_or": lambda mask_a, mask_b: mask_a | mask_b,
    "logical_xor": lambda mask_a, mask_b: mask_a ^ mask_b, "logical_not": lambda mask_a: ~mask_a,
    "to_bfloat16": lambda a: round_to_bfloat16(a), "to_float16": lambda a: round_to_half(a),
    "tanh_backward": lambda g, y: g * (1 - y * y), "sigmoid_backward": lambda g, y: g * (1 - y) * y,
    "threshold_backward": lambda g, a, t: Piecewise((0, a <= t), (g, True)),
}

# The relations take two symbols, under these names.
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    EXPRESSIONS[_name] = (lambda relation: lambda a, b: relation(a, b))(EXPRESSIONS[_name])

_SAME_NAME = (
    "neg abs sign square sqrt rsqrt reciprocal exp exp2 log log2 log10 log1p expm1 sin cos tan asin acos atan sinh "
    "cosh asinh acosh atanh erf erfc floor ceil trunc round frac isnan isinf isfinite atan2 maximum minimum hypot"
).split()

# operator -> function name; its operands are the operator's arguments in order, defaults filled in.
_PLAIN: dict[Any, str] = {getattr(aten, name).default: name for name in _SAME_NAME}
_PLAIN |= {
    aten.mul.Tensor: "mul", aten.mul.Scalar: "mul", aten.div.Tensor: "div", aten.div.Scalar: "div",
    aten.sgn.default: "sign", aten.clone.default: "copy", aten.lift_fresh_copy.default: "copy",
    aten.copysign.Tensor: "copysign", aten.copysign.Scalar: "copysign", aten.fmod.Tensor: "fmod",
    aten.clamp_min.default: "maximum", aten.clamp_min.Tensor: "maximum",
    aten.clamp_max.default: "minimum", aten.clamp_max.Tensor: "minimum",
    aten.fmod.Scalar: "fmod", aten.lerp.Scalar: "lerp", aten.lerp.Tensor: "lerp", aten.addcmul.default: "addcmul",
    aten.addcdiv.default: "addcdiv", aten.where.self: "where", aten.where.ScalarSelf: "where",
    aten.where.ScalarOther: "where", aten.where.Scalar: "where",
    aten.logical_and.default: "logical_and", aten.logical_or.default: "logical_or",
    aten.logical_xor.default: "logical_xor", aten.logical_not.default: "logical_not",
    aten.bitwise_and.Tensor: "logical_and", aten.bitwise_or.Tensor: "logical_or",
    aten.bitwise_xor.Tensor: "logical_xor", aten.bitwise_not.default: "logical_not",
    aten.tanh_backward.default: "tanh_backward", aten.sigmoid_backward.default: "sigmoid_backward",
    aten.threshold_backward.default: "threshold_backward",
    aten.relu.default: "relu", aten.leaky_relu.default: "leaky_relu", aten._prelu_kernel.default: "prelu",
    aten.elu.default: "elu", aten.celu.default: "celu", aten.silu.default: "silu", aten.mish.default: "mish",
    aten.softplus.default: "softplus", aten.sigmoid.default: "sigmoid", aten.log_sigmoid.default: "logsigmoid",
    aten.hardsigmoid.default: "hardsigmoid", aten.tanh.default: "tanh", aten.hardtanh.default: "hardtanh",
    aten.hardswish.default: "hardswish", aten.softshrink.default: "softshrink", aten.hardshrink.default: "hardshrink",
    aten.threshold.default: "threshold",
}
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _PLAIN |= {getattr(aten, _name).Tensor: _name, getattr(aten, _name).Scalar: _name}


def operation(node: Node) -> Operation | str:
    """The node as an `Operation`, or the reason why no kernel takes it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return "not a pointwise operation"
    function = activations.registered.get(target)
    if function is not None:
        function, operands = _renamed(function), _arguments(node)
    else:
        found = _named(node, target)
        if found is None:
            return "not a pointwise operation that fuser knows"
        if isinstance(found, str):
            return found
        name, operands = found
        function = _function(name)
    reason = _unsupported(node)
    if reason:
        return reason
    if (tensor_meta(node).dtype is torch.bool) != function.yields_mask:
        return f"{function.name} of booleans"
    if any(not isinstance(o, (Node, float, int, bool)) for o in operands):
        return "an argument that is neither a tensor nor a real number"
    return Operation(function, tuple(float(o) if type(o) is int else o for o in operands))


def compute_dtype(node: Node) -> torch.dtype | None:
    """The type in which a kernel evaluates this node: float32 or float64; None where it can't."""
    reason = _unsupported(node)
    if reason:
        return None
    values = _values(node)
    decisive = [v for v in values if v.dim() > 0] or values
    return torch.float64 if any(v.dtype is torch.float64 for v in decisive) else torch.float32


def _values(node: Node) -> list[torch.Tensor]:
    return [tensor_meta(node), *(tensor_meta(n) for n in node.all_input_nodes)]


def _unsupported(node: Node) -> str | None:
    """What about the dtypes no kernel supports, if anything."""
    values = _values(node)
    for value in values:
        if value.dtype not in _FLOATS and value.dtype is not torch.bool:
            return f"a {str(value.dtype).removeprefix('torch.')} operand or result"
        if value.device.type != "cpu" or value.is_conj() or value.is_neg():
            return "not a plain CPU tensor"
    shaped = {v.dtype for v in values if v.dim() > 0 or tensor_meta(node).dim() == 0} - {torch.bool}
    if torch.float64 in shaped and len(shaped) > 1:
        return "float64 mixed with a narrower type"
    return None


@functools.cache
def _function(name: str) -> Function:
    if name in activations.ACTIVATIONS:
        return activations.activation(name)
    return activations.as_function(name, EXPRESSIONS[name])


def _renamed(function: Function) -> Function:
    """A registered activation under a name that no built-in function of the same kernel has."""
    return replace(function, name=f"registered_{function.name}") if function.name in EXPRESSIONS else function


def _named(node: Node, target: torch._ops.OpOverload) -> tuple[str, list[Any]] | str | None:
    """Function name and operands, a reason, or None for an operator that is not in the tables."""
    special = _SPECIAL.get(target)
    if special is not None:
        return special(node)
    name = _PLAIN.get(target)
    if name is None:
        return None
    if name == "copy" and tensor_meta(node).dtype is torch.bool:
        name = "copy_mask"
    return name, _arguments(node)[: len(_function(name).arguments)]


def _arguments(node: Node) -> list[Any]:
    """All arguments in the schema's order, defaults filled in."""
    given = []
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args):
            given.append(node.args[position])
        else:
            given.append(node.kwargs.get(argument.name, argument.default_value))
    return given


def _scaled(plain: str, scaled: str) -> Callable[[Node], tuple[str, list[Any]]]:
    def rule(node: Node) -> tuple[str, list[Any]]:
        a, b, alpha = _arguments(node)[:3]
        return (plain, [a, b]) if alpha == 1 else (scaled, [a, b, alpha])

    return rule


def _reversed_sub(node: Node) -> tuple[str, list[Any]]:
    a, b, alpha = _arguments(node)[:3]
    return ("sub", [b, a]) if alpha == 1 else ("sub_scaled", [b, a, alpha])


def _power(node: Node) -> tuple[str, list[Any]] | str:
    """ATen computes these exponents by multiplication, division and roots."""
    base, exponent = _arguments(node)[:2]
    names = {0.5: "sqrt", 2: "square", 3: "cube", -0.5: "rsqrt", -1: "reciprocal", -2: "inverse_square", 1: "copy"}
    if not isinstance(exponent, Node) and exponent in names:
        return names[exponent], [base]
    return "pow", [base, exponent]


def _clamp(node: Node) -> tuple[str, list[Any]] | str:
    a, low, high = _arguments(node)[:3]
    if low is None and high is None:
        return "clamp without bounds"
    if any(isinstance(b, float) and math.isnan(b) for b in (low, high)):
        return "a bound that is NaN"
    if low is None:
        return "minimum", [a, high]
    return ("maximum", [a, low]) if high is None else ("clamp", [a, low, high])


def _rounded_division(node: Node) -> tuple[str, list[Any]] | str:
    a, b, mode = _arguments(node)[:3]
    if mode is None:
        return "div", [a, b]
    return ("trunc_div", [a, b]) if mode == "trunc" else f"division with rounding mode {mode!r}"


def _cast(node: Node) -> tuple[str, list[Any]] | str:
    plain = {"device": torch.device("cpu"), "layout": torch.strided}
    if any(node.kwargs.get(name) not in (None, value) for name, value in plain.items()):
        return "a conversion to another device or layout"
    before, after = tensor_meta(node.args[0]).dtype, tensor_meta(node).dtype
    if before is torch.bool:
        return ("copy_mask" if after is torch.bool else "real"), [node.args[0]]
    if after is torch.bool:
        return "nonzero", [node.args[0]]
    if after in (torch.bfloat16, torch.float16) and after is not before:
        return ("to_bfloat16" if after is torch.bfloat16 else "to_float16"), [node.args[0]]
    return "copy", [node.args[0]]


def _gelu(node: Node) -> tuple[str, list[Any]]:
    return ("gelu_tanh" if _arguments(node)[1] == "tanh" else "gelu"), [node.args[0]]


def _masked_fill(node: Node) -> tuple[str, list[Any]]:
    a, mask, value = _arguments(node)[:3]
    return "where", [mask, value, a]


def _filled(position: int | None, value: float = 0.0) -> Callable[[Node], tuple[str, list[Any]] | str]:
    """A tensor of one value: that of the argument at `position`, if there is one."""

    def rule(node: Node) -> tuple[str, list[Any]] | str:
        filler = value if position is None else _arguments(node)[position]
        if not isinstance(filler, (int, float)) or not tensor_meta(node).is_contiguous():
            return "not a dense tensor of one real number"
        return "copy", [float(filler)]

    return rule


_SPECIAL: dict[Any, Callable[[Node], Any]] = {
    aten.add.Tensor: _scaled("add", "add_scaled"), aten.add.Scalar: _scaled("add", "add_scaled"),
    aten.sub.Tensor: _scaled("sub", "sub_scaled"), aten.sub.Scalar: _scaled("sub", "sub_scaled"),
    aten.rsub.Tensor: _reversed_sub, aten.rsub.Scalar: _reversed_sub,
    aten.pow.Tensor_Scalar: _power, aten.pow.Tensor_Tensor: _power, aten.pow.Scalar: _power,
    aten.clamp.default: _clamp, aten.clamp.Tensor: _clamp,
    aten.div.Tensor_mode: _rounded_division, aten.div.Scalar_mode: _rounded_division,
    aten._to_copy.default: _cast, aten.gelu.default: _gelu,
    aten.zeros_like.default: _filled(None), aten.zeros.default: _filled(None), aten.new_zeros.default: _filled(None),
    aten.ones_like.default: _filled(None, 1.0), aten.ones.default: _filled(None, 1.0),
    aten.new_ones.default: _filled(None, 1.0), aten.full_like.default: _filled(1), aten.full.default: _filled(1),
    aten.scalar_tensor.default: _filled(0),
    aten.masked_fill.Scalar: _masked_fill, aten.masked_fill.Tensor: _masked_fill,
}
