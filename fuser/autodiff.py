"""Derivatives as functions: each is one compiled program, not a chain of autograd calls, and differentiable itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from fuser.optimized import OptimizedModule, optimize


def vector_jacobian_product(f: Callable, x: Any, u: Any) -> Any:
    """The product of `u` with the Jacobian of `f` at `x`: like `x` in structure, shapes and dtypes.

    `f` takes `x` (a tensor, or nested tuples, lists and dicts of floating-point tensors) and returns such a structure;
    `u` has the structure and shapes of `f(x)`. Differentiable in `x`, in `u` and in what `f` depends on, to any order.
    Compiled once for each `f` (pass the same object again: the last 64 are remembered) and signature.

    Raises `ValueError` when the shapes of `u` are not those of `f(x)`.
    """
    return _compiled(_VectorJacobianProduct, _plain(f))(x, u)


def jacobian_vector_product(f: Callable, x: Any, v: Any) -> Any:
    """The product of the Jacobian of `f` at `x` with `v`: like `f(x)` in structure, shapes and dtypes.

    As `vector_jacobian_product`, but `v` has the structure and shapes of `x`: the derivative of `f` along `v`.

    Raises `ValueError` when the shapes of `v` are not those of `x`.
    """
    return _compiled(_JacobianVectorProduct, _plain(f))(x, v)


def value_and_grad(f: Callable, argnums: int = 0) -> Callable:
    """A function that returns `f`'s value, a tensor of one element, and its gradient, computed in one program.

    For a module the gradient is that of its parameters that require one, a dict by name; for a function that of the
    argument at position `argnums`, in the structure of that argument. It bypasses autograd's engine, which costs tens
    of microseconds per call: for small models this is the fastest way to a gradient. The results are differentiable
    in turn.

        loss_and_gradients = fuser.value_and_grad(model_with_loss)
        loss, gradients = loss_and_gradients(inputs, targets)
    """
    f = _plain(f)
    if isinstance(f, nn.Module):
        return _compiled(_ModuleValueAndGrad, f)
    return _compiled(_ValueAndGrad, f, argnums)


def batched_jacobian(f: Callable, x: torch.Tensor) -> torch.Tensor:
    """The Jacobian of `f` for every row of a batch: shape (batch, *outputs, *inputs).

    `f` maps (batch, *inputs) to (batch, *outputs) and treats the rows independently. Forward mode is used where there
    are no more inputs than outputs per row, else reverse mode.

    Raises `ValueError` when `f(x)` does not have the batch size of `x`.
    """
    return _compiled(_BatchedJacobian, _plain(f))(x)


def hutchinson_trace(
    f: Callable, x: torch.Tensor, samples: int = 1, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """An unbiased estimate of the trace of `f`'s Jacobian for every row of a batch: shape (batch,).

    `f` maps (batch, *inputs) to the same shape and treats the rows independently. The estimate is the mean of
    v J v over `samples` vectors v of random signs (Hutchinson 1989, the estimator of FFJORD), drawn from `generator`.
    Differentiable in `x` and in what `f` depends on.

    Raises `ValueError` when `samples` is not positive, or when `f(x)` does not have the shape of `x`.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    signs = torch.randint(0, 2, (samples, *x.shape), generator=generator, dtype=x.dtype, device=x.device) * 2 - 1
    return _compiled(_HutchinsonTrace, _plain(f))(x, signs)


def _plain(f: Callable) -> Callable:
    """The model behind an optimised one."""
    if isinstance(f, OptimizedModule):
        return f._fuser_original
    return f.__wrapped__ if hasattr(f, "_fuser_engine") else f


@functools.lru_cache(maxsize=64)
def _compiled(kind: type[nn.Module], *arguments: Any) -> nn.Module:
    return optimize(kind(*arguments))


class _Derived(nn.Module):
    """A derivative of `f` as a module whose parameters are those of `f`."""

    def __init__(self, f: Callable) -> None:
        super().__init__()
        self.f = f


class _VectorJacobianProduct(_Derived):
    def forward(self, x: Any, u: Any) -> Any:
        y, pullback = torch.func.vjp(self.f, x)
        _check_shapes("u", u, "f(x)", y)
        return pullback(u)[0]


class _JacobianVectorProduct(_Derived):
    def forward(self, x: Any, v: Any) -> Any:
        _check_shapes("v", v, "x", x)
        return _pushforward(self.f, x)(v)


class _ValueAndGrad(_Derived):
    def __init__(self, f: Callable, argnums: int) -> None:
        super().__init__(f)
        self.argnums = argnums

    def forward(self, *args: Any) -> tuple[torch.Tensor, Any]:
        gradient, value = torch.func.grad_and_value(self.f, self.argnums)(*args)
        return value, gradient


class _ModuleValueAndGrad(_Derived):
    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        def loss(parameters: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            state = {n: b.clone() for n, b in self.f.named_buffers()}
            # Each place in each module once: torch's own way with tied weights swaps a module that stands in two
            # places twice, and does not put its parameters back.
            given = {id(wanted[n]): t for n, t in parameters.items()}
            given |= {id(b): state[n] for n, b in self.f.named_buffers()}
            everywhere = {name: given[id(t)] for name, t in _tensors_of(self.f) if id(t) in given}
            value = torch.func.functional_call(self.f, everywhere, args, kwargs, tie_weights=False)
            return value, state

        wanted = {n: p for n, p in self.f.named_parameters() if n not in self.frozen}
        gradients, (value, state) = torch.func.grad_and_value(loss, has_aux=True)(wanted)
        for name, buffer in self.f.named_buffers():
            buffer.copy_(state[name].detach())
        return value, gradients

    def __init__(self, f: nn.Module) -> None:
        super().__init__(f)
        self.frozen = tuple(n for n, p in f.named_parameters() if not p.requires_grad)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer of every module, each module under its first name alone."""
    for prefix, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


class _BatchedJacobian(_Derived):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.f(x)
        if y.dim() == 0 or y.shape[0] != x.shape[0]:
            raise ValueError(f"f must keep the batch axis: x has shape {tuple(x.shape)}, f(x) {tuple(y.shape)}")
        inputs, outputs = x.shape[1:], y.shape[1:]
        if inputs.numel() <= outputs.numel():
            basis = torch.eye(inputs.numel(), dtype=x.dtype).reshape(-1, 1, *inputs)
            push = _pushforward(self.f, x)
            columns = torch.func.vmap(lambda v: push(v.expand_as(x)))(basis)
            return columns.movedim(0, -1).reshape(x.shape[0], *outputs, *inputs)
        basis = torch.eye(outputs.numel(), dtype=y.dtype).reshape(-1, 1, *outputs)
        pullback = torch.func.vjp(self.f, x)[1]
        rows = torch.func.vmap(lambda u: pullback(u.expand_as(y))[0])(basis)
        return rows.movedim(0, 1).reshape(x.shape[0], *outputs, *inputs)


class _HutchinsonTrace(_Derived):
    def forward(self, x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
        y, pullback = torch.func.vjp(self.f, x)
        if y.shape != x.shape:
            raise ValueError(f"f must map to the shape of x, {tuple(x.shape)}, got {tuple(y.shape)}")
        products = torch.func.vmap(lambda v: (v * pullback(v)[0]).flatten(1).sum(1))(signs)
        return products.mean(0)


def _pushforward(f: Callable, x: Any) -> Callable[[Any], Any]:
    """v -> J v, as the transpose of the transpose: the pullback is linear in its cotangent.

    ATen's own forward mode calls on other devices for some operations whose parameters don't move, which can't be
    traced; the graph left over here is the same.
    """
    y, pullback = torch.func.vjp(f, x)
    start = tree_map(torch.zeros_like, y)
    transposed = torch.func.vjp(lambda u: pullback(u)[0], start)[1]
    return lambda v: transposed(v)[0]


def _check_shapes(name: str, given: Any, like_name: str, like: Any) -> None:
    given_leaves, given_structure = tree_flatten(given)
    like_leaves, like_structure = tree_flatten(like)
    if given_structure != like_structure:
        raise ValueError(f"{name} must have the structure of {like_name}, {like_structure}, got {given_structure}")
    for one, other in zip(given_leaves, like_leaves):
        if one.shape != other.shape:
            raise ValueError(
                f"{name} must have the shapes of {like_name}: {tuple(other.shape)}, got {tuple(one.shape)}"
            )
