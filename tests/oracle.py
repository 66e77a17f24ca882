"""Comparison with eager: the oracle is the same model in float64, the yardstick is eager's own error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fuser
from fuser.capture import flat_tensors, replace_tensors


def assert_as_good_as_eager(actual: Any, eager: Any, exact: Any, factor: float = 2.0, what: str = "") -> None:
    """`actual` has eager's structure, shapes, strides, NaNs and infinities, and at most `factor` times its error.

    `exact` is the same computation in float64. An error below one unit in the last place of the largest value counts
    as one unit, so that a lucky eager does not set an impossible bar.
    """
    actual, eager, exact = flat_tensors(actual), flat_tensors(eager), flat_tensors(exact)
    assert len(actual) == len(eager), f"{what}: {len(actual)} results where eager has {len(eager)}"
    for mine, theirs, truth in zip(actual, eager, exact):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, (what, mine.shape, theirs.shape)
        strides = [(a, b) for a, b, n in zip(mine.stride(), theirs.stride(), mine.shape) if n > 1]
        assert mine.numel() == 0 or all(a == b for a, b in strides), (what, mine.stride(), theirs.stride())
        if not theirs.is_floating_point():
            assert torch.equal(mine, theirs), what
            continue
        # Some of ATen's vector code gives NaN for gelu(inf); what is right in float64 is right.
        right = ~torch.isfinite(truth) & (mine.double().nan_to_num(12345.0) == truth.nan_to_num(12345.0))
        theirs = torch.where(right, mine, theirs)
        special = ~torch.isfinite(theirs)
        assert torch.equal(mine[special].nan_to_num(12345.0), theirs[special].nan_to_num(12345.0)), (
            f"{what}: NaN or infinity differs: {mine[special][:8]} where eager has {theirs[special][:8]}"
        )
        plain = ~special & torch.isfinite(truth)
        if not plain.any():
            continue
        wide, truth = mine[plain].double(), truth[plain].double()
        assert torch.isfinite(wide).all(), f"{what}: {mine[plain][~torch.isfinite(wide)][:4]} where eager is finite"
        unit = torch.finfo(theirs.dtype).eps * truth.abs().max().clamp_min(torch.finfo(theirs.dtype).tiny)
        if theirs.dtype is torch.float64:
            unit = 8 * unit  # the oracle is then eager itself, whose error does not show
        error, allowed = (wide - truth).abs().max(), (theirs[plain].double() - truth).abs().max().clamp_min(unit)
        assert error <= factor * allowed, f"{what}: error {error:.3g} where eager's is {allowed:.3g}"


def check(model: nn.Module | Callable, *args: Any, factor: float = 2.0, what: str = "", **kwargs: Any) -> fuser.Report:
    """Run `model` optimised, in eager, and in float64 on the same arguments; compare; return the report."""
    optimized = fuser.optimize(model)
    wide = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
    with torch.no_grad():
        eager = model(*args, **kwargs)
        exact = wide(*widened(args), **widened(kwargs))
        actual = optimized(*args, **kwargs)
        again = optimized(*args, **kwargs)
    assert_as_good_as_eager(actual, eager, exact, factor, what)
    assert_as_good_as_eager(again, eager, exact, factor, what + " (second call)")
    return optimized.report()


def widened(nested: Any) -> Any:
    """Every floating-point tensor as float64."""
    return replace_tensors(nested, lambda t: t.double() if t.is_floating_point() else t)


def compiled(report: fuser.Report) -> fuser.Report:
    """The same report, after making sure that something was compiled and nothing ran eagerly."""
    assert report.compiled and not report.eager, str(report)
    assert not any(entry.failures for entry in report.compiled), str(report)
    return report
