"""The scalar functions that expressions may use besides sympy's own, with eager's behaviour on NaN and ties.

sympy's `Max`, `Min` and relations between equal symbols would simplify NaN away; these never evaluate by themselves.
"""

from __future__ import annotations

from typing import Any

import sympy
from sympy import Piecewise, Rational


class maximum(sympy.Function):  # noqa: N801
    """The larger argument; NaN where either is NaN."""

    nargs = 2

    def fdiff(self, argindex: int = 1) -> Any:
        a, b = self.args if argindex == 1 else self.args[::-1]
        return Piecewise((1, a > b), (Rational(1, 2), sympy.Eq(a, b)), (0, True))


class minimum(sympy.Function):  # noqa: N801
    """The smaller argument; NaN where either is NaN."""

    nargs = 2

    def fdiff(self, argindex: int = 1) -> Any:
        a, b = self.args if argindex == 1 else self.args[::-1]
        return Piecewise((1, a < b), (Rational(1, 2), sympy.Eq(a, b)), (0, True))


class log1p(sympy.Function):  # noqa: N801
    """log(1 + x), accurate near 0."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return 1 / (1 + self.args[0])


class expm1(sympy.Function):  # noqa: N801
    """exp(x) - 1, accurate near 0."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return sympy.exp(self.args[0])


class sigmoid(sympy.Function):  # noqa: N801
    """1 / (1 + exp(-x)); its derivative is written in its own value."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return self * (1 - self)


class _Flat(sympy.Function):
    """A function whose derivative is 0 almost everywhere."""

    def fdiff(self, argindex: int = 1) -> Any:
        return sympy.Integer(0)


class truncate(_Flat):  # noqa: N801
    """Towards zero."""

    nargs = 1


class round_to_even(_Flat):  # noqa: N801
    """To the nearest integer, ties to even."""

    nargs = 1


class round_to_bfloat16(sympy.Function):  # noqa: N801
    """To the nearest bfloat16."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return sympy.Integer(1)


class round_to_half(round_to_bfloat16):  # noqa: N801
    """To the nearest float16."""


class absolute(sympy.Function):  # noqa: N801
    """|x|, with sign(x) as derivative."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return sign(self.args[0])


class sign(_Flat):  # noqa: N801
    """-1, 0 or 1; 0 for NaN."""

    nargs = 1


class fmod(sympy.Function):  # noqa: N801
    """The remainder of a truncated division, with the sign of the dividend."""

    nargs = 2


class hypot(sympy.Function):  # noqa: N801
    """sqrt(a^2 + b^2) without overflow."""

    nargs = 2


class copysign(sympy.Function):  # noqa: N801
    """The first argument's magnitude with the second's sign."""

    nargs = 2


class _Predicate(sympy.Function, sympy.logic.boolalg.Boolean):
    """A function that yields a mask."""


class is_nan(_Predicate):  # noqa: N801
    """Whether x is NaN."""

    nargs = 1


class is_infinite(_Predicate):  # noqa: N801
    """Whether x is infinite."""

    nargs = 1


class is_finite(_Predicate):  # noqa: N801
    """Whether x is neither infinite nor NaN."""

    nargs = 1
