"""sympy expressions and bodies -> C++ over the vector types of `vector.h`."""

from __future__ import annotations

import functools
import math

import sympy
from sympy.logic.boolalg import Boolean, BooleanFalse, BooleanTrue

from fuser.codegen.kernel import Body
from fuser.fused import Function

# sympy's (and `fuser.scalar`'s) functions -> the names in vector.h.
_NAMES = {
    "exp": "exponential",
    "exp2": "exponential2",
    "expm1": "expm1_of",
    "log": "logarithm",
    "log2": "logarithm2",
    "log10": "logarithm10",
    "log1p": "log1p_of",
    "sin": "sine",
    "cos": "cosine",
    "tan": "tangent",
    "asin": "arcsine",
    "acos": "arccosine",
    "atan": "arctangent",
    "atan2": "arctangent2",
    "sinh": "hyperbolic_sine",
    "cosh": "hyperbolic_cosine",
    "tanh": "hyperbolic_tangent",
    "asinh": "area_sine",
    "acosh": "area_cosine",
    "atanh": "area_tangent",
    "erf": "error_function",
    "erfc": "complementary_error_function",
    "Abs": "absolute",
    "absolute": "absolute",
    "sign": "sign_of",
    "maximum": "maximum",
    "minimum": "minimum",
    "truncate": "truncate",
    "round_to_even": "round_to_even",
    "floor_of": "floor",
    "ceiling_of": "ceiling",
    "floor": "floor",
    "ceiling": "ceiling",
    "fmod": "remainder_of_division",
    "hypot": "hypotenuse",
    "copysign": "copy_sign",
    "round_to_bfloat16": "round_to_bfloat16",
    "round_to_half": "round_to_half",
    "is_nan": "is_nan",
    "is_infinite": "is_infinite",
    "is_finite": "is_finite",
    "sigmoid": "sigmoid_of",
    "Max": "maximum",
    "Min": "minimum",
}
_RELATIONS = {
    "StrictGreaterThan": ">",
    "StrictLessThan": "<",
    "GreaterThan": ">=",
    "LessThan": "<=",
    "Equality": "==",
    "Unequality": "!=",
}


class UnprintableError(ValueError):
    """An expression holds a function that kernels don't have."""


def functions(body: Body) -> str:
    """Definitions of the functions that the body's statements call, each once."""
    distinct = dict.fromkeys(s.function for s in body.statements)
    return "\n".join(definition(f) for f in distinct)


def statements(body: Body) -> list[str]:
    """One C++ line per statement, e.g. `const vec v1 = gelu(v0);`."""
    import torch

    is_mask = {load.name: load.dtype is torch.bool for load in body.loads}
    if body.accumulator:
        is_mask[body.accumulator] = False
    lines = []
    for s in body.statements:
        arguments = []
        for symbol, argument in zip(s.function.arguments, s.arguments):
            wants_mask = symbol in s.function.masks
            if isinstance(argument, str):
                arguments.append(_converted(argument, is_mask[argument], wants_mask))
            else:
                arguments.append(f"broadcast({'true' if argument else 'false'})" if wants_mask else _splat(argument))
        is_mask[s.name] = s.function.yields_mask
        kind = "mask" if s.function.yields_mask else "vec"
        lines.append(f"const {kind} {s.name} = f_{s.function.name}({', '.join(arguments)});")
    return lines


# Functions that vector.h takes from a library, a call for each vector.
_LIBRARY = ("exponential", "expm1_of", "logarithm", "log1p_of", "sine", "cosine", "tangent", "error_function", "power",
            "hypotenuse", "sigmoid_of", "remainder_of_division", "area_")  # fmt: skip


def calls_library(function: Function) -> int:
    """How many library calls an evaluation of the function makes."""
    text = definition(function)
    return sum(text.count(name) for name in _LIBRARY)


def _converted(name: str, is_mask: bool, wants_mask: bool) -> str:
    if is_mask == wants_mask:
        return name
    return f"real_of_mask({name})" if is_mask else f"({name} != real(0))"


@functools.cache
def definition(function: Function) -> str:
    """`static inline` C++ for one function; subexpressions that recur get names."""
    parameters = ", ".join(f"{'mask' if a in function.masks else 'vec'} {a.name}" for a in function.arguments)
    common, (result,) = sympy.cse([function.expression], symbols=sympy.numbered_symbols("t"), order="none")
    lines = [f"FUSER_INLINE {'mask' if function.yields_mask else 'vec'} f_{function.name}({parameters}) {{"]
    masks = set(function.masks)
    for symbol, expression in common:
        is_mask = isinstance(expression, Boolean) and not isinstance(expression, sympy.Symbol)
        masks |= {symbol} if is_mask else set()
        lines.append(f"  const {'mask' if is_mask else 'vec'} {symbol.name} = {_full(expression)};")
    lines += [f"  return {_full(result)};", "}", ""]
    return "\n".join(lines)


def _full(expression: sympy.Basic) -> str:
    """A vector (or mask) of the expression's value, also where it is a number."""
    if isinstance(expression, sympy.Expr) and expression.is_number:
        return _splat(expression)
    return _print(expression)


def _splat(number: sympy.Expr | float) -> str:
    return f"broadcast({_number(number)})"


def _number(number: sympy.Expr | float) -> str:
    value = float(number)
    if math.isnan(value):
        return "std::numeric_limits<real>::quiet_NaN()"
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}std::numeric_limits<real>::infinity()"
    return f"real({value!r})"


def _print(e: sympy.Basic) -> str:
    if isinstance(e, sympy.Symbol):
        return e.name
    if isinstance(e, (BooleanTrue, BooleanFalse)):
        return f"broadcast({'true' if e else 'false'})"
    if isinstance(e, sympy.Expr) and e.is_number:
        return _number(e)
    if isinstance(e, sympy.Piecewise):
        return _print_piecewise(e)
    if isinstance(e, sympy.core.relational.Relational):
        return f"({_full(e.lhs)} {_RELATIONS[type(e).__name__]} {_full(e.rhs)})"
    if isinstance(e, (sympy.And, sympy.Or, sympy.Xor)):
        sign = {"And": " & ", "Or": " | ", "Xor": " ^ "}[type(e).__name__]
        return "(" + sign.join(_print(a) for a in sorted(e.args, key=sympy.default_sort_key)) + ")"
    if isinstance(e, sympy.Not):
        return f"(~{_print(e.args[0])})"
    if isinstance(e, sympy.Add):
        return _print_sum(e)
    if isinstance(e, sympy.Mul):
        return _print_product(e)
    if isinstance(e, sympy.Pow):
        return _print_power(e)
    name = _NAMES.get(getattr(e.func, "__name__", str(e.func)))
    if name is None:
        raise UnprintableError(f"kernels have no function {e.func}")
    return f"{name}({', '.join(_full(a) for a in e.args)})"


def _print_piecewise(e: sympy.Piecewise) -> str:
    *cases, (last, condition) = e.args
    text = _full(last)
    if condition is not sympy.true:
        text = f"select({_print(condition)}, {text}, {_splat(math.nan)})"
    for value, condition in reversed(cases):
        text = f"select({_print(condition)}, {_full(value)}, {text})"
    return text


def _print_sum(e: sympy.Add) -> str:
    """Terms in order, those with a minus sign subtracted; a positive term first where there is one."""
    terms = sorted(e.args, key=lambda t: (t.could_extract_minus_sign(), t.is_number))
    text = ""
    for term in terms:
        if text and term.could_extract_minus_sign():
            text += f" - {_print(-term)}"
        else:
            text += f" + {_print(term)}" if text else _print(term)
    return f"({text})"


def _print_product(e: sympy.Mul) -> str:
    if e.args[0] == -1:
        return f"(-{_print(-e)})"
    number = sympy.Mul(*(a for a in e.args if a.is_number))
    factors = [a for a in e.args if not a.is_number]
    above = [a for a in factors if not _is_inverse(a)]
    below = [1 / a for a in factors if _is_inverse(a)]
    if number.is_Rational and abs(number.p) == 1 and number.q != 1 and not _is_power_of_two(number.q):
        below.append(sympy.Integer(number.q))  # x / 6 is not x * (1 / 6)
        number = sympy.Integer(number.p)
    tops = [_print(a) for a in above]
    if number != 1 or not tops:
        tops.insert(0, _number(number))
    top = " * ".join(tops)
    if not below:
        return f"({top})"
    bottom = " * ".join(_print(a) for a in below)
    return f"({top} / {bottom})" if len(below) == 1 else f"({top} / ({bottom}))"


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _is_inverse(e: sympy.Expr) -> bool:
    return isinstance(e, sympy.Pow) and e.exp.is_number and bool(e.exp < 0)


def _print_power(e: sympy.Pow) -> str:
    base, exponent = e.args
    if exponent.is_number and exponent < 0:
        return f"(real(1) / {_print(1 / e)})"
    if exponent == sympy.Rational(1, 2):
        return f"square_root({_full(base)})"
    if exponent.is_Integer and exponent <= 4:
        return "(" + " * ".join([_print(base)] * int(exponent)) + ")"
    return f"power({_full(base)}, {_full(exponent)})"
