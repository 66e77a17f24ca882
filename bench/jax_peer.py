"""JAX as a peer: a sequential torch model as a jitted function of the same parameters, in torch's layouts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import torch  # noqa: E402
from jax import lax  # noqa: E402
from torch import nn  # noqa: E402

from bench.errors import Unavailable  # noqa: E402

# A layer's function takes the layer's parameters and its input.
Layer = Callable[[list[jax.Array], jax.Array], jax.Array]


def forward(model: nn.Module, x: torch.Tensor) -> Callable[[], jax.Array]:
    """A call that computes the model's output and waits for it; `Unavailable` for a layer without a translation."""
    apply, parameters, x = _function(model), _parameters(model), _array(x)
    jitted = jax.jit(apply)
    return lambda: jitted(parameters, x).block_until_ready()


def gradient(model: nn.Module, x: torch.Tensor) -> Callable[[], list[jax.Array]]:
    """A call that computes the gradient of `sum(y * y)` for the parameters, in `model.parameters()`'s order."""
    apply, parameters, x = _function(model), _parameters(model), _array(x)

    def loss(parameters: list[jax.Array], x: jax.Array) -> jax.Array:
        y = apply(parameters, x)
        return (y * y).sum()

    jitted = jax.jit(jax.grad(loss))
    return lambda: jax.block_until_ready(jitted(parameters, x))


def _array(tensor: torch.Tensor) -> jax.Array:
    return jnp.asarray(tensor.detach().numpy())


def _parameters(model: nn.Module) -> list[jax.Array]:
    return [_array(p) for p in model.parameters()]


def _function(model: nn.Module) -> Layer:
    """The model as a function of all its parameters and the input."""
    modules = list(model) if isinstance(model, nn.Sequential) else [model]
    layers = [(_layer(m), len(list(m.parameters()))) for m in modules]

    def apply(parameters: list[jax.Array], x: jax.Array) -> jax.Array:
        start = 0
        for layer, count in layers:
            x = layer(parameters[start : start + count], x)
            start += count
        return x

    return apply


def _layer(module: nn.Module) -> Layer:
    if isinstance(module, nn.Linear):
        return lambda p, x: x @ p[0].T + p[1]
    if isinstance(module, nn.Conv2d):
        return _convolution(module)
    if isinstance(module, nn.MaxPool2d):
        window = (1, 1, module.kernel_size, module.kernel_size)
        return lambda p, x: lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")
    if isinstance(module, nn.Flatten):
        return lambda p, x: x.reshape(x.shape[0], -1)
    if type(module) in _POINTWISE:
        function = _POINTWISE[type(module)]
        return lambda p, x: function(x)
    raise Unavailable(f"no translation of {type(module).__name__}")


def _convolution(module: nn.Conv2d) -> Layer:
    options: dict[str, Any] = {
        "window_strides": module.stride,
        "padding": [(p, p) for p in module.padding],
        "rhs_dilation": module.dilation,
        "feature_group_count": module.groups,
        "dimension_numbers": ("NCHW", "OIHW", "NCHW"),
    }
    return lambda p, x: lax.conv_general_dilated(x, p[0], **options) + p[1][:, None, None]


_POINTWISE = {
    nn.ReLU: jax.nn.relu,
    nn.Tanh: jnp.tanh,
    nn.GELU: lambda x: jax.nn.gelu(x, approximate=False),
}
