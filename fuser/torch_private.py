"""The private parts of torch that fuser needs, in one place, each with its reason."""

from __future__ import annotations

import torch

# A derivative may be traced while a functorch transform is active; its levels must be set aside meanwhile.
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

# There is no public way to make fake tensors outside `torch.export`.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def active_transform() -> str | None:
    """What would see every operation of an eager call and so must not be bypassed, or None.

    Private: torch offers no public question "is a transform, a mode or a dual level active?".
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "it is called inside a torch.func transform"
    if torch.autograd.forward_ad._current_level >= 0:
        return "it is called inside a forward-mode level"
    if torch._C._len_torch_function_stack() > 0:
        return "a torch function mode is active"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a torch dispatch mode is active"
    return None


__all__ = ["FakeTensor", "FakeTensorMode", "active_transform", "temporarily_clear_interpreter_stack"]
