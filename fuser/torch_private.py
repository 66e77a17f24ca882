"""The private parts of torch that fuser needs, in one place, each with its reason."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# The primitive operations behind gradient operators.
from torch._decomp import get_decompositions

# Where functorch counts the forward-mode levels that it has entered.
from torch._functorch import eager_transforms

# A derivative may be traced while a functorch transform is active; its levels must be set aside meanwhile.
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

# There is no public way to make fake tensors outside `torch.export`.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@functools.cache
def decompositions(again: bool) -> dict:
    """The gradient operators that are traced as the primitive operations they are made of, so that these fuse.

    With `again` also those whose own gradients ATen does not have to every order. Private: `torch.export` offers
    tables of everything or nothing.
    """
    names = (_ENDLESS_GRADIENTS if again else _KINKED_GRADIENTS) + _POINTWISE_GRADIENTS
    return get_decompositions([getattr(torch.ops.aten, name).default for name in names])


@functools.cache
def norm_decompositions() -> dict:
    """The normalisations as primitive operations.

    ATen's own return statistics that its gradients read, but through which no gradient of a gradient can go.
    """
    aten = torch.ops.aten
    norms = (
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.no_stats,
        aten.native_layer_norm.default,
    )
    return get_decompositions(norms) | {aten.native_group_norm.default: _group_norm} | decompositions(True)


def _group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    batch: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """torch's own copies in place, which has no derivative."""
    grouped = x.reshape(batch, groups, -1)
    variance, mean = torch.var_mean(grouped, dim=2, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    y = ((grouped - mean) * scale).reshape(x.shape)
    per_channel = [1, channels] + [1] * (x.dim() - 2)
    y = y if weight is None else y * weight.reshape(per_channel)
    y = y if bias is None else y + bias.reshape(per_channel)
    return y, mean.reshape(batch, groups), scale.reshape(batch, groups)


_POINTWISE_GRADIENTS = (
    "gelu_backward", "glu_backward", "hardsigmoid_backward", "hardswish_backward", "mish_backward", "silu_backward",
    "mse_loss_backward", "native_dropout_backward",
)  # fmt: skip
# ATen has rules of its own for what happens at a kink in higher derivatives, so there these stay whole.
_KINKED_GRADIENTS = (
    "elu_backward", "hardtanh_backward", "leaky_relu_backward", "log_sigmoid_backward", "softplus_backward",
    "_prelu_kernel_backward", "rrelu_with_noise_backward", "huber_loss_backward", "smooth_l1_loss_backward",
)  # fmt: skip
_ENDLESS_GRADIENTS = (
    "_softmax_backward_data", "_log_softmax_backward_data", "binary_cross_entropy_backward",
    "native_batch_norm_backward", "native_layer_norm_backward", "native_group_norm_backward",
)  # fmt: skip


def active_transform() -> str | None:
    """Which transform would see every operation of an eager call, or None.

    Private: torch offers no public question "is a transform or a dual level active?".
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "it is called inside a torch.func transform"
    if torch.autograd.forward_ad._current_level >= 0:
        return "it is called inside a forward-mode level"
    return None


@contextmanager
def apart_from_transforms() -> Iterator[None]:
    """Set aside whatever transform is active, so that a derivative can be traced on blank tensors.

    torch allows one forward-mode level at a time: where one is active already, functorch uses that one for the trace
    if it believes that it entered it itself. Hooks on saved tensors are set aside, too: functorch refuses them.
    """
    active = torch.autograd.forward_ad._current_level >= 0 and eager_transforms.JVP_NESTING == 0
    eager_transforms.JVP_NESTING += active
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        eager_transforms.JVP_NESTING -= active


def transform_level() -> int:
    """The number of functorch's innermost active level; 0 outside of every transform."""
    return torch._C._functorch.maybe_current_level() or 0


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a batch of the vmap behind `torch.autograd`'s own batched gradients."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def active_mode() -> str | None:
    """Which mode would see every operation of an eager call, or None. Private for the same reason."""
    if torch._C._len_torch_function_stack() > 0:
        return "a torch function mode is active"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a torch dispatch mode is active"
    return None


__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "active_mode",
    "active_transform",
    "decompositions",
    "norm_decompositions",
    "apart_from_transforms",
    "is_batched",
    "transform_level",
]
