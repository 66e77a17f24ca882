"""Random graphs of the operations that fuse, against eager: 100 in the normal run, 2,000 in the slow one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle import check
from torch.nn import functional as F

import fuser

UNARY = [
    torch.relu,
    torch.sigmoid,
    torch.tanh,
    F.gelu,
    F.silu,
    torch.abs,
    torch.neg,
    lambda x: x * 0.5 + 1.0,
    lambda x: F.leaky_relu(x, 0.1),
    lambda x: torch.clamp(x, -1.0, 1.5),
    lambda x: 1.0 - x,
    torch.square,
    lambda x: torch.where(x > 0, x, x * 0.1),
    F.softplus,
    lambda x: x.masked_fill(x < -1, 0.25),
    F.hardswish,
]
BINARY = [
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    torch.minimum,
    lambda a, b: torch.where(a > b, a, b * 0.5),
    lambda a, b: torch.add(a, b, alpha=0.3),
    lambda a, b: torch.lerp(a, b, 0.4),
    lambda a, b: a / (b.abs() + 1.0),
]
VIEWS = [
    lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    lambda x: x.reshape(-1).view(x.shape),
    lambda x: x + x.mean(dim=-1, keepdim=True),
    lambda x: torch.cat([x[:1], x[1:]]),
    lambda x: x.flip(0) * 0.5,
]
IN_PLACE = [lambda x: (x + 1).relu_(), lambda x: (x * 1.0).add_(0.5).mul_(0.5), lambda x: F.relu(x - 0.2, inplace=True)]
BROADCAST = [lambda s: s[-1:], lambda s: (*s[:-1], 1), lambda s: (1,) * len(s), lambda s: ()]


@st.composite
def programs(draw: st.DrawFn) -> tuple:
    """A list of instructions over a stack of values, and the shapes it starts from."""
    anchor = draw(st.sampled_from(["linear", "conv", "bmm", "none"]))
    shape = {
        "linear": draw(st.tuples(st.integers(1, 9), st.integers(1, 20))),
        "conv": draw(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(3, 9), st.integers(3, 9))),
        "bmm": draw(st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 9))),
        "none": draw(st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple)),
    }[anchor]
    channels_last = anchor == "conv" and draw(st.booleans())
    instruction = st.one_of(
        st.tuples(st.just("unary"), st.sampled_from(UNARY), st.integers(0, 99)),
        st.tuples(st.just("binary"), st.sampled_from(BINARY), st.integers(0, 99), st.integers(0, 99)),
        st.tuples(st.just("broadcast"), st.sampled_from(BINARY), st.integers(0, 99), st.sampled_from(BROADCAST)),
        st.tuples(st.just("view"), st.sampled_from(VIEWS), st.integers(0, 99)),
        st.tuples(st.just("unary"), st.sampled_from(IN_PLACE), st.integers(0, 99)),
        st.tuples(st.just("anchor"), st.just(anchor), st.integers(0, 99)),
    )
    body = draw(st.lists(instruction, min_size=1, max_size=9))
    return anchor, shape, channels_last, body, draw(st.integers(1, 3)), draw(st.integers(0, 2**16))


def build(program: tuple) -> tuple:
    """A function of tensors, and its arguments."""
    anchor, shape, channels_last, body, results, seed = program
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    x = random(*shape)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    weights = {
        "linear": lambda: [random(shape[-1], shape[-1]) / shape[-1] ** 0.5, random(shape[-1])],
        "conv": lambda: [random(shape[1], shape[1], 3, 3) / (3 * shape[1] ** 0.5), random(shape[1])],
        "bmm": lambda: [random(shape[0], shape[-1], shape[-1]) / shape[-1] ** 0.5],
        "none": lambda: [],
    }[anchor]()
    small = [random(*step[3](shape)) for step in body if step[0] == "broadcast"]

    def function(x: torch.Tensor, weights: list, small: list) -> tuple:
        values, remaining = [x], list(small)
        for kind, operation, *operands in body:
            a = values[operands[0] % len(values)]
            if kind == "binary":
                values.append(operation(a, values[operands[1] % len(values)]))
            elif kind == "broadcast":
                values.append(operation(a, remaining.pop(0)))
            elif kind == "anchor":
                values.append(anchored(operation, a, weights))
            else:
                values.append(operation(a))
        return tuple(values[-results:])

    return function, (x, weights, small)


def anchored(anchor: str, x: torch.Tensor, weights: list) -> torch.Tensor:
    if anchor == "linear":
        return F.linear(x, *weights)
    if anchor == "conv":
        return F.conv2d(x, *weights, padding=1)
    return torch.bmm(x, *weights) if anchor == "bmm" else x * 2.0


def agree(program: tuple) -> None:
    function, args = build(program)
    # Over the few elements of a small graph the largest errors scatter more than over a layer's.
    report = check(function, *args, factor=3.0, what=str(program))
    assert not report.eager, str(report)


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": (Phase.explicit, Phase.generate)}


@settings(max_examples=100, derandomize=True, **QUIET)
@given(programs())
def test_random_graphs(program: tuple) -> None:
    agree(program)


@pytest.mark.slow
@settings(max_examples=2000, **QUIET)
@given(programs())
def test_many_random_graphs(program: tuple) -> None:
    agree(program)


def test_the_generator_reaches_kernels() -> None:
    program = ("linear", (4, 5), False, [("anchor", "linear", 0), ("unary", torch.relu, 1)], 1, 7)
    function, args = build(program)
    optimized = fuser.optimize(function)
    optimized(*args)
    assert [e.name for e in optimized.report().fused] == ["linear_bias_relu_0"]
