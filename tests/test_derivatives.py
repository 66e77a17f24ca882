"""Derivatives of an optimised model are eager's: of every order, in every mode, under everything that training does."""

from __future__ import annotations

import copy
import gc
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from oracle import compiled
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fuser

Tensor = torch.Tensor


def wide(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def leaf(*shape: int) -> Tensor:
    return wide(*shape).requires_grad_()


def close(actual: Any, expected: Any, what: str = "", rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """The same tensors to a relative error (of the largest value), and None in the same places."""
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected), what
        for i, (a, e) in enumerate(zip(actual, expected)):
            close(a, e, f"{what}[{i}]", rtol, atol)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), what
        for k in expected:
            close(actual[k], expected[k], f"{what}[{k}]", rtol, atol)
    elif expected is None:
        assert actual is None, f"{what}: a tensor where eager has None"
    else:
        assert actual is not None, f"{what}: None where eager has {expected}"
        assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
        actual, expected = actual.detach(), expected.detach()
        if not expected.is_floating_point():
            assert torch.equal(actual, expected), what
            return
        special = ~torch.isfinite(expected)
        assert torch.equal(actual[special].nan_to_num(123.0), expected[special].nan_to_num(123.0)), what
        if (~special).any():
            error = (actual - expected)[~special].abs().max()
            scale = expected[~special].abs().max()
            assert error <= atol + rtol * scale, f"{what}: error {error:.3g} where values are up to {scale:.3g}"


def weigh(t: Tensor) -> Tensor:
    """A scalar to which every element of `t` contributes differently."""
    return (t * torch.linspace(0.4, 1.7, t.numel(), dtype=t.dtype).reshape(t.shape)).sum()


def derivatives(run: Callable[[], Tensor], variables: Sequence[Tensor], order: int) -> list:
    """The result and the gradients of order 1, 2, ..., each of a scalar made of all gradients before it.

    A gradient that is absent at an order above one counts as zero.
    """
    result = run()
    found: list[Any] = [result]
    scalar = weigh(result)
    for depth in range(order):
        if not scalar.requires_grad:
            break
        gradients = torch.autograd.grad(scalar, variables, create_graph=depth + 1 < order, allow_unused=True)
        found.append([torch.zeros_like(v) if g is None and depth else g for g, v in zip(gradients, variables)])
        scalar = sum(weigh(g) for g in gradients if g is not None)
    while len(found) <= order:
        found.append([torch.zeros_like(v) for v in variables])
    return found


def same_derivatives(
    model: nn.Module, *args: Tensor, order: int, seed: int | None = None, rtol: float = 1e-9
) -> fuser.Report:
    """Every derivative up to `order` with respect to parameters and arguments, up to the second on two calls."""
    optimized, twin = fuser.optimize(copy.deepcopy(model)), model

    def found(call: nn.Module) -> list:
        given = [a.clone().requires_grad_(a.requires_grad) for a in args]
        variables = [*call.parameters(), *(g for g in given if g.requires_grad)]
        if seed is not None:
            torch.manual_seed(seed)
        return derivatives(lambda: call(*given), variables, order)

    for again in ("", " (again)")[: 1 if order > 2 else 2]:
        actual, expected = found(optimized), found(twin)
        for depth, (a, e) in enumerate(zip(actual, expected)):
            close(a, e, f"order {depth}{again}", rtol)
        close(list(optimized.buffers()), list(twin.buffers()), f"buffers{again}")
    return optimized.report()


def mlp(activation: nn.Module, *widths: int) -> nn.Sequential:
    """Linear layers with an activation in between, in double precision."""
    widths = widths or (5, 6, 3)
    layers: list[nn.Module] = []
    for a, b in zip(widths, widths[1:]):
        layers += [nn.Linear(a, b), activation]
    return nn.Sequential(*layers[:-1]).double()


# -- Orders ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation",
    [nn.Tanh(), nn.GELU(), *(pytest.param(a, marks=pytest.mark.slow) for a in (nn.SiLU(), nn.Softplus()))],
    ids=str,
)
def test_orders_one_to_four_of_smooth_networks(activation: nn.Module) -> None:
    compiled(same_derivatives(mlp(activation), leaf(4, 5), order=4))


KINKED = [
    nn.ReLU(),
    nn.ReLU6(),
    nn.LeakyReLU(0.1),
    nn.ELU(0.7),
    nn.CELU(0.7),
    nn.SELU(),
    nn.Hardtanh(),
    nn.Hardswish(),
    nn.Mish(),
    nn.LogSigmoid(),
    nn.Softsign(),
    nn.Tanhshrink(),
    nn.Softshrink(0.5),
    nn.Hardshrink(0.5),
    nn.Threshold(0.25, 2.0),
    nn.PReLU(init=0.2),
    nn.Softplus(2.0, 3.0),
    nn.Sigmoid(),
]


@pytest.mark.slow
@pytest.mark.parametrize("activation", KINKED, ids=lambda a: type(a).__name__)
def test_orders_one_to_three_of_kinked_activations(activation: nn.Module) -> None:
    compiled(same_derivatives(mlp(activation), leaf(4, 5), order=3))


def test_hardsigmoid() -> None:
    """Eager's own slope is in single precision, and it has no second derivative."""
    compiled(same_derivatives(mlp(nn.Hardsigmoid()), leaf(4, 5), order=1, rtol=1e-7))


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("activation", KINKED, ids=lambda a: type(a).__name__)
def test_at_the_kinks_the_subgradient_is_eagers(activation: nn.Module, order: int) -> None:
    class Sandwich(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.activation = activation.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.activation(x * 1.0) * x

    kinks = [-6.0, -3.0, -1.0, -0.5, -0.25, -0.0, 0.0, 0.25, 0.5, 1.0, 1.5, 3.0, 6.0, 20.0, -20.0]
    x = torch.tensor(kinks, dtype=torch.float64).requires_grad_()
    compiled(same_derivatives(Sandwich(), x, order=order))


@pytest.mark.parametrize("activation", KINKED, ids=lambda a: type(a).__name__)
def test_a_second_derivative_that_vanishes_is_zero_and_no_error(activation: nn.Module) -> None:
    activation = activation.double()
    optimized = fuser.optimize(lambda x: activation(x * 1.0))
    x = leaf(9)

    def second(function: Callable) -> Tensor | None:
        (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.sum(), x)[0] if gradient.requires_grad else None

    close(second(optimized), second(lambda x: activation(x * 1.0)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.clamp(x, -1, 1),
        lambda x: torch.clamp_min(x, 0),
        lambda x: x.abs(),
        lambda x: torch.maximum(x, x.detach() * 1.0),
        lambda x: torch.minimum(x, -x),
        lambda x: torch.where(x > 0, x.exp(), x * x),
        lambda x: x.sign() * x,
        lambda x: F.relu(x) - F.relu(-x),
        lambda x: x.floor() * x,
        lambda x: torch.clamp(x, torch.zeros_like(x), x.detach()),
        lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
        lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
        lambda x: F.l1_loss(x, torch.zeros_like(x), reduction="none"),
        lambda x: x.amax() * x,
        lambda x: x.norm() * x,
    ],
    ids="clamp clamp_min abs maximum minimum where sign relus floor clamps huber smooth_l1 l1 amax norm".split(),
)
@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kinked_functions_at_their_kinks(function: Callable, order: int) -> None:
    values = torch.tensor([-3.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 1.0], dtype=torch.float64)
    optimized = fuser.optimize(function)
    x, y = values.clone().requires_grad_(), values.clone().requires_grad_()
    mine, theirs = derivatives(lambda: optimized(x), [x], order), derivatives(lambda: function(y), [y], order)
    close(mine, theirs)
    compiled(optimized.report())


# -- Networks ----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two residual branches, one with a layer norm and one with a group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.group = nn.LayerNorm(6), nn.GroupNorm(3, 6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.gelu(self.first(self.layer(x)))
        return x + torch.tanh(self.second(self.group(x)))


def max_pooled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def average_pooled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def dropped_out() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh())


IMAGES = (3, 2, 4, 4)


@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "make, shape, train",
    [
        (max_pooled, IMAGES, True),
        (average_pooled, IMAGES, True),
        (batch_normed, IMAGES, True),
        (batch_normed, IMAGES, False),
        (Residual, (4, 6), True),
        (dropped_out, (5, 6), True),
    ],
    ids=["max_pool", "avg_pool", "batch_norm_train", "batch_norm_eval", "residual", "dropout"],
)
def test_networks(make: Callable, shape: tuple[int, ...], train: bool, order: int) -> None:
    compiled(same_derivatives(make().double().train(train), leaf(*shape), order=order, seed=11))


class WithLoss(nn.Module):
    """A network and its loss, the target held as a buffer."""

    def __init__(self, loss: Callable, target: Tensor) -> None:
        super().__init__()
        self.net = mlp(nn.SiLU())
        self.loss = loss
        self.register_buffer("target", target)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.net(x), self.target)


CLASSES = torch.tensor([0, 2, 1, 2])


@pytest.mark.parametrize(
    "loss, target",
    [
        (F.cross_entropy, CLASSES),
        (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.2, ignore_index=1), CLASSES),
        (lambda x, t: F.nll_loss(torch.log(torch.softmax(x, -1)), t), CLASSES),
        (F.mse_loss, torch.ones(4, 3).double()),
        (lambda x, t: F.binary_cross_entropy_with_logits(x, t), torch.full((4, 3), 0.3).double()),
        (lambda x, t: F.kl_div(F.log_softmax(x, 1), t, reduction="batchmean"), torch.full((4, 3), 0.3).double()),
        (F.smooth_l1_loss, torch.full((4, 3), 0.7).double()),
    ],
    ids=["cross_entropy", "smoothed", "softmax_nll", "mse", "bce", "kl", "smooth_l1"],
)
def test_losses_inside(loss: Callable, target: Tensor) -> None:
    compiled(same_derivatives(WithLoss(loss, target), leaf(4, 5), order=2))


def test_running_statistics_change_once_per_forward_also_with_double_backward() -> None:
    model = batch_normed().double().train()
    optimized = fuser.optimize(copy.deepcopy(model))
    x = leaf(*IMAGES)
    for _ in range(3):
        for net in (model, optimized):
            (gradient,) = torch.autograd.grad(weigh(net(x)), x, create_graph=True)
            weigh(gradient).backward()
            weigh(net(x)).backward()
    assert optimized[1].num_batches_tracked == 6
    close(optimized[1].running_mean, model[1].running_mean)
    close(optimized[1].running_var, model[1].running_var)
    compiled(optimized.report())


# -- Checks of autograd itself, forward mode, torch.func ---------------------------------------------------------------


def test_gradcheck_and_gradgradcheck() -> None:
    net = mlp(nn.Tanh(), 3, 4, 2)
    optimized = fuser.optimize(net)
    x, weight = leaf(2, 3), net[0].weight

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(optimized, {"0.weight": weight}, (x,))

    assert torch.autograd.gradcheck(optimized, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradcheck(function, (x, weight), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(optimized, x, check_fwd_over_rev=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, (x, weight), check_fwd_over_rev=True)
    compiled(optimized.report())


def test_dual_inputs_and_parameters() -> None:
    model = mlp(nn.GELU())
    optimized = fuser.optimize(model)
    x, v, direction = wide(4, 5), wide(4, 5), wide(6, 5)

    def tangents(net: nn.Module) -> list:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, v)
            weight = torch.autograd.forward_ad.make_dual(model[0].weight.detach(), direction)
            of_input = net(dual)
            of_weight = torch.func.functional_call(net, {"0.weight": weight}, (x,))
            of_both = torch.func.functional_call(net, {"0.weight": weight}, (dual,))
            return [torch.autograd.forward_ad.unpack_dual(t)[:] for t in (of_input, of_weight, of_both)]

    close(tangents(optimized), tangents(model))
    close(tangents(optimized), tangents(model))


def test_forward_over_reverse() -> None:
    model = mlp(nn.Tanh())
    optimized = fuser.optimize(model)
    x, v = wide(4, 5), wide(4, 5)

    def product(net: nn.Module) -> list:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(), v)
            gradients = torch.autograd.grad(weigh(net(dual)), [dual, *net.parameters()])
            duals = [torch.autograd.forward_ad.unpack_dual(g) for g in gradients]
            return [(d.primal, torch.zeros_like(d.primal) if d.tangent is None else d.tangent) for d in duals]

    close(product(optimized), product(model))
    close(product(optimized), product(model))


def scalar(net: Callable) -> Callable:
    return lambda x: weigh(net(x))


def per_sample(net: nn.Module, x: Tensor) -> dict:
    parameters = {k: p.detach() for k, p in net.named_parameters()}

    def loss(parameters: dict, sample: Tensor) -> Tensor:
        return weigh(torch.func.functional_call(net, parameters, (sample[None],)))

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)


def over_models(net: nn.Module, x: Tensor) -> Tensor:
    stacked = {k: torch.stack([p.detach(), p.detach() * 0.5]) for k, p in net.named_parameters()}
    return torch.func.vmap(lambda p: torch.func.functional_call(net, p, (x,)))(stacked)


func = torch.func
TRANSFORMS = {
    "grad": lambda net, x, v: func.grad(scalar(net))(x),
    "grad_and_value": lambda net, x, v: func.grad_and_value(scalar(net))(x),
    "grad of grad": lambda net, x, v: func.grad(lambda y: weigh(func.grad(scalar(net))(y)))(x),
    "vjp": lambda net, x, v: func.vjp(net, x)[1](net(v).detach()),
    "jvp": lambda net, x, v: func.jvp(net, (x,), (v,)),
    "jacrev": lambda net, x, v: func.jacrev(net)(x),
    "jacfwd": lambda net, x, v: func.jacfwd(net)(x),
    "jacrev of jacfwd": lambda net, x, v: func.jacrev(func.jacfwd(net))(x),
    "jacfwd of jacfwd": lambda net, x, v: func.jacfwd(func.jacfwd(net))(x),
    "jacrev of jacrev": lambda net, x, v: func.jacrev(func.jacrev(net))(x),
    "hessian": lambda net, x, v: func.hessian(scalar(net))(x),
    "hessian of hessian": lambda net, x, v: func.hessian(func.hessian(scalar(net)))(x[0, :2]),
    "vmap": lambda net, x, v: func.vmap(net)(x),
    "vmap out_dims": lambda net, x, v: func.vmap(net, in_dims=1, out_dims=1)(x.T.contiguous()),
    "vmap of vmap": lambda net, x, v: func.vmap(func.vmap(net))(torch.stack([x, v])),
    "vmap chunks": lambda net, x, v: func.vmap(net, chunk_size=2)(x),
    "vmap of jacrev": lambda net, x, v: func.vmap(func.jacrev(net))(x),
    "vmap of hessian": lambda net, x, v: func.vmap(func.hessian(scalar(net)))(x),
    "jvp of grad": lambda net, x, v: func.jvp(func.grad(scalar(net)), (x,), (v,)),
    "linearize": lambda net, x, v: func.linearize(net, x)[1](v),
    "per-sample gradients": lambda net, x, v: per_sample(net, x),
    "vmap over models": lambda net, x, v: over_models(net, x),
    "autograd jacobian": lambda net, x, v: torch.autograd.functional.jacobian(net, x, vectorize=True),
    "autograd hessian": lambda net, x, v: torch.autograd.functional.hessian(scalar(net), x),
    "autograd hvp": lambda net, x, v: torch.autograd.functional.hvp(scalar(net), x, v),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform: str) -> None:
    widths = (2, 2, 1) if transform == "hessian of hessian" else (3, 4, 2)
    model = mlp(nn.SiLU(), *widths)
    optimized = fuser.optimize(model)
    x, v = wide(3, 3), wide(3, 3)
    for _ in range(2):
        close(TRANSFORMS[transform](optimized, x, v), TRANSFORMS[transform](model, x, v), transform)
    if transform != "linearize":  # which traces what it is given
        compiled(optimized.report())


# -- Training ----------------------------------------------------------------------------------------------------------


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """An optimised model in double precision and an independent copy that is not."""
    model = make().double()
    return fuser.optimize(copy.deepcopy(model)), model


def grads(model: nn.Module) -> dict:
    return {k: p.grad for k, p in model.named_parameters()}


def gelus() -> nn.Module:
    return mlp(nn.GELU())


@pytest.mark.parametrize("make, shape", [(gelus, (4, 5)), (batch_normed, IMAGES), (dropped_out, (4, 6))])
def test_five_optimiser_steps(make: Callable, shape: tuple[int, ...]) -> None:
    optimized, model = twins(make)
    data = [wide(*shape) for _ in range(5)]
    for net in (optimized, model):
        torch.manual_seed(3)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for x in data:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    close(dict(optimized.state_dict()), dict(model.state_dict()), rtol=1e-8)
    compiled(optimized.report())


def test_accumulation_and_retained_graphs() -> None:
    optimized, model = twins(gelus)
    x = wide(4, 5)
    for net in (optimized, model):
        y = net(x)
        weigh(y).backward(retain_graph=True)
        weigh(y * y).backward()
        weigh(net(x + 1)).backward()
        with pytest.raises(RuntimeError, match="second time"):
            weigh(y).backward()
    close(grads(optimized), grads(model))


def test_frozen_parameters_and_toggled_requires_grad() -> None:
    optimized, model = twins(gelus)
    x = leaf(4, 5)
    for frozen in ((), ("0.weight",), ("0.weight", "2.bias"), ("2.bias",), tuple(dict(model.named_parameters())), ()):
        found = []
        for net in (optimized, model):
            net.zero_grad()
            x.grad = None
            for k, p in net.named_parameters():
                p.requires_grad_(k not in frozen)
            weigh(net(x)).backward()
            found.append((grads(net), x.grad))
        close(*found, f"frozen {frozen}")
        assert all(p.grad is None for k, p in optimized.named_parameters() if k in frozen)
    for p in (*optimized.parameters(), *model.parameters()):
        p.requires_grad_(False)
    assert not optimized(x.detach()).requires_grad and optimized(x).requires_grad
    compiled(optimized.report())


class Branches(nn.Module):
    """Several results, parameters of which only some reach each of them, and one that reaches none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, y: Tensor) -> dict:
        left, right = torch.tanh(self.a(x)), F.gelu(self.b(y))
        return {
            "left": left,
            "nested": {"right": [right, right.argmax(1)], "both": (left * right, left.detach() + 1)},
            "index": y > 0,
            "count": 3,
        }


@pytest.mark.parametrize("chosen", ["left", "right", "both", "left right"])
def test_unused_results_and_parameters(chosen: str) -> None:
    optimized, model = twins(Branches)
    x, y = leaf(4, 5), leaf(4, 5)
    found = []
    for net in (optimized, model):
        out = net(x, y)
        assert out["count"] == 3 and [k for k in out] == ["left", "nested", "index", "count"]
        assert not out["index"].requires_grad and not out["nested"]["both"][1].requires_grad
        results = {"left": out["left"], "right": out["nested"]["right"][0], "both": out["nested"]["both"][0]}
        loss = sum(weigh(results[k]) for k in chosen.split())
        asked = torch.autograd.grad(loss, [x, y, *net.parameters()], retain_graph=True, allow_unused=True)
        loss.backward()
        out.pop("count")
        found.append((out, asked, grads(net)))
    close(*found)
    assert optimized.unused.grad is None
    compiled(optimized.report())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.sum(), torch.log(x * 0)),
        lambda x: (torch.sqrt(x * 0), torch.tanh(x)),
        lambda x: (torch.tanh(x), torch.tanh(x).sum() / (x * 0)),
        lambda x: (torch.sigmoid(x), torch.where(x > 100, x, x / (x * 0)).detach() * x),
    ],
    ids=range(4),
)
@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_unused_branch_does_not_poison_gradients(function: Callable, order: int) -> None:
    optimized = fuser.optimize(function)
    x = leaf(6)
    for which in range(2):
        mine = derivatives(lambda which=which: optimized(x)[which], [x], order)
        close(mine, derivatives(lambda which=which: function(x)[which], [x], order))
    compiled(optimized.report())


def test_hooks_on_results_parameters_and_the_module() -> None:
    optimized, model = twins(gelus)
    x = leaf(4, 5)
    found = []
    for net in (optimized, model):
        seen: list[Any] = []
        x.grad = None
        net[0].weight.register_hook(lambda g, seen=seen: seen.append(g.clone()) or g * 2)
        net[2].bias.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
        net.register_full_backward_hook(lambda m, gi, go, seen=seen: seen.extend([*gi, *go]) or (gi[0] * 3,))
        net.register_full_backward_pre_hook(lambda m, go: (go[0] * 0.5,))
        y = net(x)
        y.register_hook(lambda g, seen=seen: seen.append(g.clone()) or g + 1)
        y.retain_grad()
        weigh(y).backward()
        found.append((sorted((t.clone() for t in seen), key=lambda t: float(t.sum())), grads(net), x.grad, y.grad))
    close(*found)


def test_a_hook_that_makes_the_gradient_of_the_module_itself_works_inside() -> None:
    optimized, model = twins(lambda: nn.Sequential(gelus(), nn.Tanh()))
    x = leaf(4, 5)
    found = []
    for net in (optimized, model):
        seen: list[Tensor] = []
        net[0].register_full_backward_hook(lambda m, gi, go, seen=seen: seen.extend([gi[0], go[0]]))
        weigh(net(x)).backward()
        found.append((seen, grads(net)))
    close(*found)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Islands(nn.Module):
    """Parts that no gradient goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.sigmoid(self.b(x))
        y = self.a(x) * scale
        with torch.no_grad(), torch.enable_grad():
            y = y + torch.tanh(self.c(x))
        return y * y.detach().exp() - F.gelu(x).detach()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x * 7.0  # not the derivative of the forward, on purpose


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Square.apply(self.a(x)))


class HookedInside(nn.Module):
    """Changes a gradient on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.requires_grad:
            y.register_hook(lambda g: g * 5.0)
        return torch.tanh(y)


class HookedUnasked(nn.Module):
    """Changes a gradient on its way, without asking whether there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.register_hook(lambda g: g * 5.0)
        return torch.tanh(y)


class SetData(nn.Module):
    """Uses `.data`, which is a detached view."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return torch.tanh(y) * y.data.sigmoid() + torch.sin(self.a.weight.data).sum()


class GradMode(nn.Module):
    """Switches recording by hand, also with a decorator and with inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    @torch.no_grad()
    def scale(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.a(x))

    def forward(self, x: Tensor) -> Tensor:
        previous = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        shift = self.a(x).relu()
        torch.set_grad_enabled(previous)
        return self.a(x) * self.scale(x) + shift


@pytest.mark.filterwarnings("ignore::fuser.FuserWarning")
@pytest.mark.parametrize(
    "make", [Tied, Islands, Custom, HookedInside, HookedUnasked, SetData, GradMode], ids=lambda c: c.__name__
)
def test_models_with_something_special_inside(make: Callable) -> None:
    same_derivatives(make().double(), leaf(4, 5), order=2)
    optimized, model = twins(make)
    x = wide(4, 5)
    for net in (optimized, model):
        weigh(net(x)).backward()
    close(grads(optimized), grads(model))


# -- What else a training loop does ------------------------------------------------------------------------------------


def outcome(run: Callable[[], Any]) -> Any:
    """The result, or that it is an error."""
    try:
        return run()
    except RuntimeError as error:
        return "modified in place" if "modified by an inplace operation" in str(error) else f"{error}"


IN_PLACE = {
    "relu": torch.relu,
    "linear": lambda x: F.linear(x, torch.eye(4, dtype=x.dtype) * 2),
    "mul": lambda x: x * x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "exp": torch.exp,
    "add": lambda x: x + 1,
    "sigmoid of mul": lambda x: torch.sigmoid(x * 2),
    "relu of add": lambda x: torch.relu(x + 1),
    "log": lambda x: torch.log(x * x),
    "sum": lambda x: x.sum(0),
    "softmax": lambda x: torch.softmax(x * 3, -1),
}


@pytest.mark.parametrize("which", ["input", "result"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_changes_in_place_after_the_forward(name: str, which: str) -> None:
    """Where eager refuses the gradient so does fuser, and where eager computes it so does fuser."""
    function = IN_PLACE[name]
    optimized = fuser.optimize(function)
    start = wide(4, 4)
    leaf = start.clone().requires_grad_()

    def run(call: Callable) -> Any:
        x = leaf * 1
        y = call(x)
        scalar = weigh(y * 1)
        with torch.no_grad():
            (x if which == "input" else y).mul_(2)
        return outcome(lambda: torch.autograd.grad(scalar, leaf)[0])

    mine, theirs = run(optimized), run(function)
    assert isinstance(mine, str) == isinstance(theirs, str), f"{mine} where eager has {theirs}"
    assert mine == theirs if isinstance(theirs, str) else close(mine, theirs) is None


def test_a_parameter_changed_in_place_after_the_forward() -> None:
    optimized, model = twins(gelus)
    x = leaf(4, 5)
    for net in (optimized, model):
        y = net(x)
        with torch.no_grad():
            net[2].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            weigh(y).backward()


def test_the_result_may_be_changed_in_place_and_differentiated() -> None:
    optimized = fuser.optimize(lambda x: x * 3 + 1)
    x = leaf(4)
    y = optimized(x)
    y.mul_(2)
    close(torch.autograd.grad(weigh(y * y), x)[0], torch.autograd.grad(weigh((2 * (x * 3 + 1)) ** 2), x)[0])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make, shape", [(gelus, (4, 5)), (dropped_out, (4, 6))])
def test_checkpoints_around(make: Callable, shape: tuple[int, ...], reentrant: bool) -> None:
    optimized, model = twins(make)
    x = leaf(*shape)
    found = []
    for net in (optimized, model):
        x.grad = None
        torch.manual_seed(2)
        y = checkpoint(net, x * 1, use_reentrant=reentrant)
        torch.manual_seed(3)
        weigh(checkpoint(net, y[:, :1].expand(shape) * 1, use_reentrant=reentrant)).backward()
        found.append((y, x.grad, grads(net)))
    close(*found)


@pytest.mark.parametrize("inside", [gelus, lambda: mlp(nn.ReLU()), lambda: batch_normed()])
def test_saved_tensor_hooks_see_what_is_kept_and_replace_it(inside: Callable) -> None:
    optimized, model = twins(inside)
    x = leaf(*(IMAGES if isinstance(model[0], nn.Conv2d) else (4, 5)))
    packed, unpacked = [], []

    def pack(t: Tensor) -> Any:
        packed.append(t)
        return t.detach().numpy().copy()

    def unpack(held: Any) -> Tensor:
        unpacked.append(held)
        return torch.from_numpy(held)

    weigh(model(x)).backward()
    expected, x.grad = x.grad, None
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = optimized(x)
    assert packed and not unpacked
    weigh(y).backward()
    assert unpacked
    close((x.grad, grads(optimized)), (expected, grads(model)))


def test_saved_tensors_on_disk_and_on_the_cpu() -> None:
    optimized, model = twins(gelus)
    x = wide(4, 5)
    with torch.autograd.graph.save_on_cpu():
        y = optimized(x)
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        y = optimized(x) + y
    weigh(y).backward()
    weigh(2 * model(x)).backward()
    close(grads(optimized), grads(model))


def test_autocast() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    optimized = fuser.optimize(copy.deepcopy(model))
    x = torch.randn(6, 16)
    exact = copy.deepcopy(model).double()
    weigh(exact(x.double()).square()).backward()
    for net in (optimized, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = net(x)
        assert y.dtype is torch.bfloat16
        weigh(y.float().square()).backward()
    for mine, theirs, truth in zip(optimized.parameters(), model.parameters(), exact.parameters()):
        assert mine.grad.dtype is torch.float32
        error, allowed = (mine.grad - truth.grad).abs().max(), (theirs.grad - truth.grad).abs().max()
        assert error <= 2 * allowed + 1e-2 * truth.grad.abs().max()


def test_deepcopy_then_train() -> None:
    optimized, model = twins(gelus)
    x = wide(4, 5)
    weigh(optimized(x)).backward()
    weigh(model(x)).backward()
    copied = copy.deepcopy(optimized)
    assert isinstance(copied, fuser.OptimizedModule)
    weigh(copied(x + 1)).backward()
    close(grads(optimized), grads(model))
    model.zero_grad()
    weigh(model(x + 1)).backward()
    close(grads(copied), grads(model))


def test_several_threads_call_backward() -> None:
    model = gelus()
    optimized = fuser.optimize(model)
    data = [leaf(3 + i % 2, 5) for i in range(6)]
    expected = [torch.autograd.grad(weigh(model(x)), [x, *model.parameters()]) for x in data]
    shared = optimized(data[0])
    scalar = weigh(shared)
    wrong: list[Any] = []

    def work(i: int) -> None:
        try:
            for _ in range(10):
                variables = [data[i], *optimized.parameters()]
                close(torch.autograd.grad(weigh(optimized(data[i])), variables), expected[i])
                again = torch.autograd.grad(scalar, data[0], retain_graph=True)
                close(again, expected[0][:1])
                create = torch.autograd.grad(weigh(optimized(data[i])), variables, create_graph=True)
                close(create, expected[i])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(data))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_backward_in_a_forked_child() -> None:
    optimized, model = twins(gelus)
    x = wide(4, 5)
    weigh(optimized(x)).backward()
    before = optimized(x)
    weigh(model(x)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            optimized.zero_grad()
            weigh(before).backward()
            close(grads(optimized), grads(model))
            optimized.zero_grad()
            weigh(optimized(x)).backward()
            close(grads(optimized), grads(model))
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


COTANGENTS = {
    "contiguous": lambda: wide(4, 3),
    "transposed": lambda: wide(3, 4).T,
    "expanded": lambda: wide(3).expand(4, 3),
    "one number": lambda: wide(1, 1).expand(4, 3),
    "every other": lambda: wide(8, 6)[::2, ::2],
    "flipped offset": lambda: wide(40)[5:17].view(4, 3),
    "negative bit": lambda: torch._neg_view(wide(4, 3)),
}
INPUTS = {
    "contiguous": lambda: wide(4, 5),
    "transposed": lambda: wide(5, 4).T,
    "expanded": lambda: wide(5).expand(4, 5),
    "every other": lambda: wide(8, 10)[::2, ::2],
}


@pytest.mark.parametrize("layout", INPUTS)
def test_layouts_of_inputs_and_cotangents(layout: str) -> None:
    optimized, model = twins(gelus)
    x = INPUTS[layout]().detach().requires_grad_()
    for name, make in COTANGENTS.items():
        cotangent = make()
        for create in (False, True):
            mine = torch.autograd.grad(optimized(x), [x, *optimized.parameters()], cotangent, create_graph=create)
            theirs = torch.autograd.grad(model(x), [x, *model.parameters()], cotangent, create_graph=create)
            close(mine, theirs, f"{name}, create_graph={create}")
    compiled(optimized.report())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(),
        lambda x: x.mean(0),
        lambda x: x.sum(1, keepdim=True) * 2,
        lambda x: x.expand(2, 4, 5) * 1.0,
        lambda x: x.t() * 2.0,
        lambda x: torch.cat([x, x.flip(0)]),
        lambda x: torch.stack([x, x * x]).unbind(0)[1] + x[0],
        lambda x: x[:, [0, 0, 1]] * x[1:2, :3],
        lambda x: F.pad(x, (1, 2)).as_strided((3, 3), (1, 2)) + 0,
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: x.cumsum(0).max(1).values,
        lambda x: x.sort(1).values * x,
        lambda x: torch.linalg.vector_norm(x, dim=1),
        lambda x: x.var(0) + x.std(1).sum(),
        lambda x: x.prod(1),
        lambda x: x.logsumexp(1),
        lambda x: F.embedding(torch.tensor([0, 1, 1]), x),
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        lambda x: torch.complex(x, x * 2).abs(),
        lambda x: x.to(torch.float32).double() * 2,
        lambda x: x.bmm(x) if x.dim() == 3 else x @ x.T @ x,
        lambda x: F.instance_norm(x[None]) * x,
        lambda x: F.layer_norm(x, (5,)) * x,
        lambda x: F.group_norm(x, 1) * x,
        lambda x: F.interpolate(x[None], scale_factor=2.0, mode="linear"),
        lambda x: x.masked_fill(x > 0, 2.0) * x,
        lambda x: torch.outer(x[0], x[:, 0]).tril(),
        lambda x: x.gather(1, torch.tensor([[0], [1], [1], [0]])) * 3,
    ],
    ids=(
        "sum mean sum_keepdim expand t cat stack index as_strided einsum cumsum sort norm var prod logsumexp embedding "
        "attention complex cast matmul instance_norm layer_norm group_norm interpolate masked_fill tril gather"
    ).split(),
)
@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::fuser.FuserWarning")
def test_functions(function: Callable, order: int) -> None:
    optimized = fuser.optimize(function)
    x = leaf(4, 5)
    try:
        expected = derivatives(lambda: function(x), [x], order)
    except RuntimeError as error:  # eager has no second derivative of its fused attention
        with pytest.raises(RuntimeError, match=str(error)):
            derivatives(lambda: optimized(x), [x], order)
        return
    close(derivatives(lambda: optimized(x), [x], order), expected)


@pytest.mark.filterwarnings("ignore::fuser.FuserWarning")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x, torch.tanh(x)),
        lambda x: (x.t(), torch.tanh(x)),
        lambda x: (x[1:], x[:2]),
        lambda x: (lambda y: (y, y.t()))(torch.tanh(x)),
        lambda x: (lambda y: (y, y))(torch.tanh(x)),
        lambda x: (x.detach(), torch.tanh(x)),
        lambda x: (torch.relu(x).t(), torch.tanh(x)[1:]),
        lambda x: torch.tanh(x).split(2),
    ],
    ids="itself transposed slices view twice detached own_views split".split(),
)
def test_results_that_share_memory(function: Callable) -> None:
    optimized = fuser.optimize(function)
    found = []
    for call in (optimized, function):
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3).requires_grad_()
        a, b = call(x)
        gradient = torch.autograd.grad(weigh(a) + weigh(b * b), x)
        shared = [a is x, a.data_ptr() == x.data_ptr(), a.data_ptr() == b.data_ptr()]
        found.append((a, b, gradient))
        if call is optimized:
            mine = shared
    close(*found)
    assert mine == shared


@pytest.mark.parametrize("make, shape", [(gelus, (0, 5)), (average_pooled, (0, 2, 4, 4)), (Residual, (0, 6))])
def test_empty_batches(make: Callable, shape: tuple[int, ...]) -> None:
    optimized, model = twins(make)
    x = leaf(*shape)
    found = []
    for net in (optimized, model):
        found.append((torch.autograd.grad(net(x).sum(), [x, *net.parameters()]), net(x)))
    close(*found)


def test_integer_and_boolean_arguments_and_results() -> None:
    def function(x: Tensor, index: Tensor, mask: Tensor, table: Tensor) -> tuple:
        y = torch.where(mask, x, table[index])
        return torch.tanh(y), y.argmax(1), mask & (x > 0), index + 1, y.topk(2)

    optimized = fuser.optimize(function)
    index, mask = torch.tensor([0, 2, 2, 1]), torch.rand(4, 5) > 0.4
    x, table = leaf(4, 5), leaf(3, 5)
    found = []
    for call in (optimized, function):
        out = call(x, index, mask, table)
        assert [t.requires_grad for t in out[:4]] == [True, False, False, False]
        assert out[4].values.requires_grad and not out[4].indices.requires_grad
        found.append((tuple(out), torch.autograd.grad(weigh(out[0]) + weigh(out[4].values), [x, table])))
    close(*found)
    compiled(optimized.report())


def test_grad_modes_around_and_unneeded_gradients() -> None:
    optimized, model = twins(gelus)
    x = leaf(4, 5)
    with torch.no_grad():
        assert not optimized(x).requires_grad
    with torch.inference_mode():
        assert optimized(x).is_inference()
    y = optimized(x)
    assert y.requires_grad and not y.is_leaf and y.grad_fn is not None
    inputs_only = torch.autograd.grad(weigh(y), x, retain_graph=True)
    close(inputs_only, torch.autograd.grad(weigh(model(x)), x))
    weigh(y).backward(inputs=[optimized[0].weight])
    assert x.grad is None and optimized[2].weight.grad is None
    weigh(model(x)).backward(inputs=[model[0].weight])
    close(grads(optimized), grads(model))


def test_anomaly_mode_and_double_backward_through_a_penalty() -> None:
    optimized, model = twins(gelus)
    x = leaf(4, 5)
    for net in (optimized, model):
        with torch.autograd.detect_anomaly(check_nan=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            ((g.norm(dim=1) - 1).square().mean() + net(x).mean()).backward()
    close(grads(optimized), grads(model))


def test_undefined_and_zero_cotangents() -> None:
    optimized = fuser.optimize(lambda x, y: (torch.tanh(x * y), torch.exp(x), y * 2))
    x, y = leaf(4), leaf(4)
    a, b, c = optimized(x, y)
    found = torch.autograd.grad([a, c], [x, y], [torch.zeros(4).double(), wide(4)], retain_graph=True)
    assert not found[0].any() and found[1].any()
    (none,) = torch.autograd.grad(weigh(b), y, allow_unused=True, retain_graph=True)
    assert none is None
    (none,) = torch.autograd.grad(weigh(c), x, allow_unused=True)
    assert none is None


# -- Memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.GELU(), nn.ReLU(), nn.SiLU(), nn.Tanh()], ids=lambda a: type(a).__name__)
def test_at_most_one_tensor_per_layer_is_kept(activation: nn.Module) -> None:
    layers = 4
    model = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(32, 32), activation)]).double()
    optimized = fuser.optimize(model)
    x = leaf(16, 32)
    optimized(x).sum().backward()
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = optimized(x)
    for t in (x, *model.parameters()):
        kept.pop(t.untyped_storage().data_ptr(), None)
    assert len(kept) <= layers and sum(kept.values()) <= layers * 16 * 32 * 8 and y.requires_grad


def alive() -> tuple[int, int]:
    """Living tensors, and objects of the native runtime and the compiler's own functions."""
    for _ in range(3):  # a cycle through native objects takes more than one
        gc.collect()
    objects = gc.get_objects()
    modules = ("_fuser_runtime", "fuser.differentiable", "fuser.optimized")
    native = sum(str(type(o).__module__) in modules for o in objects)
    return sum(issubclass(type(o), Tensor) for o in objects), native


def train(steps: int) -> None:
    """Steps of a model that stays, with a double backward and an abandoned graph in each."""
    optimized = fuser.optimize(gelus())
    optimizer = torch.optim.SGD(optimized.parameters(), lr=1e-4)
    counts = []
    for step in range(steps):
        x = leaf(4, 5)
        optimizer.zero_grad()
        (g,) = torch.autograd.grad(weigh(optimized(x)), x, create_graph=True)
        (weigh(g) + weigh(optimized(x))).backward()
        optimized(x)
        optimizer.step()
        if step in (9, steps - 1):
            del x, g
            counts.append(alive())
    assert counts[0] == counts[-1]


def remake(models: int) -> None:
    """Models that are optimised, trained once, and dropped."""
    for i in range(models):
        optimized = fuser.optimize(nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)))
        x = torch.randn(3, 3, requires_grad=True)
        y = optimized(x)
        if i % 10 == 0:
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            y = y + g.sum()
        y.sum().backward()


def test_training_keeps_the_number_of_objects_flat() -> None:
    train(300)


def test_models_are_freed() -> None:
    remake(1)
    before = alive()
    remake(40)
    assert alive() == before


def resident() -> int:
    """Bytes of memory in use now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("work, count, warm", [(train, 10_000, 1_000), (remake, 1_000, 200)])
def test_resident_memory_stays_flat(work: Callable, count: int, warm: int) -> None:
    work(warm)
    gc.collect()
    before = resident()
    work(count)
    gc.collect()
    assert resident() - before < 24 * 2**20
