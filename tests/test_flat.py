"""`flat_parameters`: one vector for all parameters, one for all gradients."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fuser

X, Y = torch.linspace(-1, 1, 160).reshape(32, 5), torch.linspace(-1, 1, 96).reshape(32, 3).sin()


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def backward(model: nn.Module) -> None:
    F.mse_loss(model(X), Y).backward()


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_linked(model: nn.Module, flat: torch.Tensor) -> None:
    for tensor, other in ((flat, None), (flat.grad, "grad")):
        storage = tensor.untyped_storage().data_ptr()
        assert all((getattr(p, other) if other else p).untyped_storage().data_ptr() == storage for p in parts(model))
    assert torch.equal(torch.cat([p.detach().flatten() for p in parts(model)]), flat.detach())
    assert torch.equal(torch.cat([p.grad.flatten() for p in parts(model)]), flat.grad)


def parts(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("optimised", ["no", "before", "after"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("side", ["vector", "model"])
@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.Adam(p, 0.01)],
    ids=["SGD", "Adam"],
)
def test_training_equals_that_of_separate_parameters(optimised, set_to_none, side, optimizer):
    plain, model = net(), net()
    if optimised == "before":
        model = fuser.optimize(model)
    flat = fuser.flat_parameters(model)
    if optimised == "after":
        model = fuser.optimize(model)
    one, other = optimizer(plain.parameters()), optimizer([flat])
    for step in range(20):
        one.zero_grad()
        backward(plain)
        one.step()
        (other if side == "vector" else model).zero_grad(set_to_none=set_to_none)
        backward(model)
        assert_linked(model, flat)
        other.step()
        if optimised != "no" and step == 1:
            compiled = len(model.report().data()["compiled"])
    for p, q in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    if optimised != "no":
        assert len(model.report().data()["compiled"]) == compiled and not model.report().data()["eager"]


def test_lbfgs_works_on_the_vector():
    model = net()
    flat = fuser.flat_parameters(model)
    optimizer = torch.optim.LBFGS([flat], max_iter=30, line_search_fn="strong_wolfe")
    before = F.mse_loss(model(X), Y).item()

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(X), Y)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert F.mse_loss(model(X), Y).item() < before / 10


def test_the_vector_is_a_leaf_and_the_parameters_stay_who_they_are():
    model = net()
    before = dict(model.named_parameters())
    values = {n: p.detach().clone() for n, p in before.items()}
    flat = fuser.flat_parameters(model)
    assert flat.is_leaf and flat.requires_grad and flat.shape == (sum(p.numel() for p in before.values()),)
    for name, p in model.named_parameters():
        assert p is before[name] and type(p) is nn.Parameter and p.is_leaf and torch.equal(p, values[name])
    with torch.no_grad():
        flat.zero_()
    assert not any(p.any() for p in model.parameters())
    assert fuser.flat_parameters(model) is flat


def test_gradients_share_memory_and_the_buffer_stays():
    model = net()
    flat = fuser.flat_parameters(model)
    assert flat.grad is None and all(p.grad is None for p in model.parameters())
    buffers = set()
    for clear in (model.zero_grad, lambda: None, lambda: model.zero_grad(False), lambda: setattr(flat, "grad", None)):
        clear()
        backward(model)
        assert_linked(model, flat)
        buffers.add(flat.grad.data_ptr())
    assert len(buffers) == 1
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert flat.grad.norm() <= 1.001e-3


def test_gradients_accumulate_and_are_cleared_like_those_of_separate_parameters():
    plain, model = net(), net()
    flat = fuser.flat_parameters(model)
    for clear in (None, None, "vector", None, "model", None):
        if clear:
            plain.zero_grad()
            setattr(flat, "grad", None) if clear == "vector" else model.zero_grad()
        backward(plain)
        backward(model)
        torch.testing.assert_close(flat.grad, gradients(plain))
        assert_linked(model, flat)


def test_gradients_from_before_are_kept_and_foreign_ones_taken_over():
    plain, model = net(), net()
    for m in (plain, model):
        backward(m)
    flat = fuser.flat_parameters(model)
    assert_linked(model, flat)
    flat.grad = torch.ones_like(flat)
    backward(model)
    assert_linked(model, flat)
    torch.testing.assert_close(flat.grad, 1 + gradients(plain))
    model[0].weight.grad = torch.zeros(16, 5)
    backward(model)
    assert_linked(model, flat)
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
    torch.testing.assert_close(model[2].weight.grad, 1 + 2 * plain[2].weight.grad)


def test_a_parameter_that_the_loss_does_not_reach_has_gradient_zero():
    model = net()
    flat = fuser.flat_parameters(model)
    backward(model)
    model.zero_grad()
    model[0](X).sum().backward()
    assert model[0].weight.grad.any() and not model[2].weight.grad.any()
    assert_linked(model, flat)


def test_create_graph_keeps_the_graph_and_the_values():
    model = net()
    flat = fuser.flat_parameters(model)
    F.mse_loss(model(X), Y).backward(create_graph=True)
    torch.testing.assert_close(gradients(model).detach(), flat.grad)
    assert model[0].weight.grad.requires_grad and not flat.grad.requires_grad
    model.zero_grad()
    backward(model)
    assert_linked(model, flat)


def test_autograd_grad_leaves_the_vector_alone():
    model = net()
    flat = fuser.flat_parameters(model)
    torch.autograd.grad(F.mse_loss(model(X), Y), tuple(model.parameters()))
    assert flat.grad is None and model[0].weight.grad is None


def test_state_dict_round_trip_writes_through():
    plain, model = net(), net()
    flat = fuser.flat_parameters(model)
    state = model.state_dict()
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in plain.state_dict().items()}
    other = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(flat.detach(), nn.utils.parameters_to_vector(other.parameters()).detach())
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(X), model(X))


def test_tied_parameters_count_once_and_frozen_ones_are_left_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    frozen = model[2].weight.data_ptr()
    flat = fuser.flat_parameters(model)
    assert flat.numel() == 16 + 4 + 4 and model[2].weight.data_ptr() == frozen
    model(torch.ones(2, 4)).sum().backward()
    assert_linked(model, flat)
    assert model[2].weight.grad is None


def test_channels_last_weights_keep_their_strides():
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    strides, weight = conv.weight.stride(), conv.weight.detach().clone()
    flat = fuser.flat_parameters(conv)
    assert conv.weight.stride() == strides and torch.equal(conv.weight, weight)
    conv(torch.ones(1, 3, 8, 8)).sum().backward()
    assert conv.weight.grad.untyped_storage().data_ptr() == flat.grad.untyped_storage().data_ptr()


@pytest.mark.parametrize("optimised", [False, True])
def test_a_deep_copy_is_an_ordinary_model(optimised):
    model = fuser.optimize(net()) if optimised else net()
    flat = fuser.flat_parameters(model)
    backward(model)
    twin = copy.deepcopy(model)
    backward(twin)
    with torch.no_grad():
        flat.zero_()
    assert twin[0].weight.any()
    theirs = fuser.flat_parameters(twin)
    assert theirs is not flat
    assert_linked(twin, theirs)
    assert copy.deepcopy(flat).is_leaf


def test_nothing_outlives_the_model_and_its_vector():
    model = net()
    flat = fuser.flat_parameters(model)
    backward(model)
    parameter = weakref.ref(model[0].weight)
    del model, flat
    gc.collect()
    assert parameter() is None


@pytest.mark.parametrize("trained", [False, True])
def test_a_parameter_that_left_the_vector_is_noticed(trained):
    model = net()
    flat = fuser.flat_parameters(model)
    if trained:
        backward(model)
    model.double()
    with pytest.raises(RuntimeError, match="0.weight|0.bias|2.weight|2.bias"):
        model(X.double()).sum().backward()
    again = fuser.flat_parameters(model)
    assert again is not flat and again.dtype is torch.float64
    model(X.double()).sum().backward()
    assert_linked(model, again)


def test_the_vector_may_move_to_shared_memory():
    model = net()
    flat = fuser.flat_parameters(model)
    backward(model)
    model.share_memory()
    model.zero_grad()
    backward(model)
    assert_linked(model, flat)


def test_it_works_with_torch_compile():
    plain, model = net(), net()
    flat = fuser.flat_parameters(model)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        plain.zero_grad()
        flat.grad = None
        backward(plain)
        backward(compiled)
        torch.testing.assert_close(flat.grad, gradients(plain))
        assert_linked(model, flat)


def test_a_part_of_the_model_that_gets_a_vector_of_its_own_leaves_this_one():
    model = net()
    whole = fuser.flat_parameters(model)
    part = fuser.flat_parameters(model[0])
    with pytest.raises(RuntimeError, match="no longer part"):
        backward(model)
    del whole
    model.zero_grad()
    backward(model)
    assert_linked(model[0], part)


def test_errors_name_the_parameter():
    with pytest.raises(ValueError, match="no parameter"):
        fuser.flat_parameters(nn.ReLU())
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mixed[1].bias.data = mixed[1].bias.data.double()
    with pytest.raises(ValueError, match="1.bias is torch.float64"):
        fuser.flat_parameters(mixed)
    elsewhere = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="1.weight is torch.float32 on meta"):
        fuser.flat_parameters(elsewhere)
    with pytest.raises(ValueError, match="0.weight is a UninitializedParameter"):
        fuser.flat_parameters(nn.Sequential(nn.LazyLinear(2)))
