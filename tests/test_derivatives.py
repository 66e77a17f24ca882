"""Derivatives of an optimised model are eager's: of every order, in every mode, under everything that training does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from oracle import compiled
from torch import nn
from torch.nn import functional as F

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
    """Every derivative up to `order` with respect to parameters and arguments, on two calls."""
    optimized, twin = fuser.optimize(copy.deepcopy(model)), model

    def found(call: nn.Module) -> list:
        given = [a.clone().requires_grad_(a.requires_grad) for a in args]
        variables = [*call.parameters(), *(g for g in given if g.requires_grad)]
        if seed is not None:
            torch.manual_seed(seed)
        return derivatives(lambda: call(*given), variables, order)

    for again in ("", " (again)"):
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


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.Softplus()], ids=str)
def test_orders_one_to_four_of_smooth_networks(activation: nn.Module) -> None:
    compiled(same_derivatives(mlp(activation, 5, 4, 3), leaf(6, 5), order=4))


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


@pytest.mark.parametrize("activation", KINKED, ids=lambda a: type(a).__name__)
def test_orders_one_to_three_of_kinked_activations(activation: nn.Module) -> None:
    compiled(same_derivatives(mlp(activation), leaf(4, 5), order=3))


def test_hardsigmoid() -> None:
    """Eager's own slope is in single precision, and it has no second derivative."""
    compiled(same_derivatives(mlp(nn.Hardsigmoid()), leaf(4, 5), order=1, rtol=1e-7))


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
@pytest.mark.parametrize("order", [1, 2])
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


@pytest.mark.parametrize("order", [1, 2])
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


# -- Checks of autograd itself, forward mode, torch.func -----------------------------------------------------------------


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
            return [torch.autograd.forward_ad.unpack_dual(g)[:] for g in gradients]

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
    widths = (2, 3, 2) if transform == "hessian of hessian" else (3, 4, 2)
    model = mlp(nn.SiLU(), *widths)
    optimized = fuser.optimize(model)
    x, v = wide(3, 3), wide(3, 3)
    for _ in range(2):
        close(TRANSFORMS[transform](optimized, x, v), TRANSFORMS[transform](model, x, v), transform)
    compiled(optimized.report())


# -- Training ------------------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("order", [1, 2])
def test_an_unused_branch_does_not_poison_gradients(function: Callable, order: int) -> None:
    optimized = fuser.optimize(function)
    x = leaf(6)
    for which in range(2):
        close(
            derivatives(lambda: optimized(x)[which], [x], order), derivatives(lambda: function(x)[which], [x], order)
        )
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
        with torch.no_grad():
            with torch.enable_grad():
                y = y + torch.tanh(self.c(x))
            y = y * torch.ones(5, dtype=y.dtype) if False else y
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
