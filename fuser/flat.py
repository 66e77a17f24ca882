"""All parameters of a model as one flat vector, and their gradients as another: `flat_parameters`."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


def flat_parameters(model: nn.Module) -> torch.Tensor:
    """One leaf vector that holds all parameters of `model` that require grad, in the order of `model.parameters()`.

    The parameters stay the same objects under the same names, and become views of the vector: whatever changes the one
    changes the other, optimisers, `load_state_dict` and fuser's compiled plans included. Tied parameters are in it
    once; frozen ones (`requires_grad=False`) are not, and stay as they are. It works on optimised models, before and
    after `fuser.optimize`; a second call returns the same vector.

    After `backward()` the vector's `grad` holds all gradients, and each parameter's `grad` is a view of it. That buffer
    is made by the first backward pass and used ever after: `zero_grad` on either side, with `set_to_none` or without,
    clears the gradients for the next backward pass. There a parameter that the loss doesn't depend on has gradient 0,
    not None. `torch.autograd.grad` knows the parameters, not the vector.

    A deep copy of the model is an ordinary model with tensors of its own: call `flat_parameters` on it as well. So do
    after `model.to(...)` with another dtype or device, after `load_state_dict(assign=True)`, and after freezing or
    unfreezing parameters; a backward pass that meets a parameter that has left its vector raises `RuntimeError`. That
    the vector was written between forward and backward pass is not noticed, as with writes through `.data`.

    Raises `ValueError` when no parameter requires grad, and names the parameter whose dtype or device differs from the
    others', or which is uninitialised, sparse or of another tensor type.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    _check(named)
    parameters = list(named.values())
    for vector, flat in list(_FLAT.items()):
        if flat.holds(parameters):
            return vector
        flat.release(parameters)
    sizes = [p.numel() for p in parameters]
    first = parameters[0]
    vector = torch.empty(sum(sizes), dtype=first.dtype, device=first.device, requires_grad=True)
    _FLAT[vector] = _Flat(vector, named)
    return vector


class _Flat:
    """The link between a vector and its parameters."""

    def __init__(self, vector: torch.Tensor, named: dict[str, nn.Parameter]) -> None:
        self.vector = weakref.ref(vector)
        self.names, self.parameters = list(named), list(named.values())
        self.gradient: torch.Tensor | None = None
        self.views: list[Any] = [object()] * len(named)  # nothing's gradient yet
        self.lost: str | None = None
        self.layouts = []
        start = 0
        with torch.no_grad():
            data = vector.detach()
            for p in self.parameters:
                # Dense strides such as channels-last ones stay as they are.
                self.layouts.append((p.shape, torch.empty_like(p).stride(), start))
                view = data.as_strided(*self.layouts[-1])
                view.copy_(p)
                p.data = view
                start += p.numel()
        self.addresses = [p.data_ptr() for p in self.parameters]
        # Gradients arrive at these nodes; nobody else keeps them, and their hooks, alive.
        self.nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self.parameters]
        self.handles = [self._hooks(i) for i in range(len(self.parameters))]
        if any(p.grad is not None for p in self.parameters):
            self.link()

    def _hooks(self, i: int) -> list[Any]:
        """What runs before and after each accumulation of a gradient of parameter `i`: next to nothing as a rule."""
        # Parameters own their hooks, and the link owns the parameters.
        link, vector, parameter = weakref.ref(self), self.vector, weakref.ref(self.parameters[i])

        def before(_: Any) -> None:
            flat, whole, p = link(), vector(), parameter()
            if flat is None or whole is None:
                return
            if flat.lost or p.data_ptr() != flat.addresses[i]:
                flat.check(i)
            if p.grad is not flat.views[i] or whole.grad is not flat.gradient:
                flat.link()

        def after(p: torch.Tensor) -> None:
            flat = link()
            if flat is None or vector() is None:
                return
            if p.data_ptr() != flat.addresses[i]:  # a new dtype has a new node, without the other hook
                flat.check(i)
            if p.grad is not flat.views[i]:
                flat.views[i].copy_(p.grad.detach())  # `create_graph` made a new tensor, which stays

        return [self.nodes[i].register_prehook(before), self.parameters[i].register_post_accumulate_grad_hook(after)]

    def check(self, i: int) -> None:
        """Raise `RuntimeError` unless parameter `i` still lives in the vector."""
        p = self.parameters[i]
        if p.untyped_storage().data_ptr() != self.vector().untyped_storage().data_ptr():
            self.lost = self.names[i]
        if self.lost:
            raise RuntimeError(
                f"{self.lost} is no longer part of the vector that flat_parameters made: model.to() or another call "
                "of flat_parameters has moved it; call flat_parameters again"
            )
        self.addresses[i] = p.data_ptr()  # all of the vector moved, as into shared memory

    def link(self) -> None:
        """Make every `grad` a view of the vector's; what was set to None becomes 0, other values are taken over."""
        vector = self.vector()
        with torch.no_grad():
            if self.gradient is None:
                self.gradient = torch.zeros_like(vector, requires_grad=False)
                self.views = [self.gradient.as_strided(*layout) for layout in self.layouts]
            elif vector.grad is None:
                for p in self.parameters:
                    p.grad = None
            if vector.grad is not None and vector.grad is not self.gradient:
                self.gradient.copy_(vector.grad)
            vector.grad = self.gradient
            for p, view in zip(self.parameters, self.views):
                if p.grad is None:
                    view.zero_()
                elif p.grad is not view:
                    view.copy_(p.grad)
                p.grad = view

    def holds(self, parameters: list[nn.Parameter]) -> bool:
        """Whether these are its parameters, all of them in place."""
        return (
            len(parameters) == len(self.parameters)
            and all(p is q for p, q in zip(parameters, self.parameters))
            and all(p.data_ptr() == a for p, a in zip(self.parameters, self.addresses))
        )

    def release(self, parameters: list[nn.Parameter]) -> None:
        """Let go of these parameters, which another vector takes; with some of them gone this one is of no use."""
        leaving = {id(p) for p in parameters}
        for name, p, handles in zip(self.names, self.parameters, self.handles):
            if id(p) in leaving:
                self.lost = name
                for handle in handles:
                    handle.remove()


# vector -> its link, as long as the vector lives
_FLAT: Any = WeakIdKeyDictionary()


def _check(named: dict[str, nn.Parameter]) -> None:
    if not named:
        raise ValueError("the model has no parameter that requires grad")
    for name, p in named.items():
        if type(p) is not nn.Parameter or p.layout is not torch.strided:
            raise ValueError(f"parameters must be initialised and dense, {name} is a {type(p).__name__}, {p.layout}")
    kinds = Counter((p.dtype, p.device) for p in named.values())
    (dtype, device), _ = kinds.most_common(1)[0]
    for name, p in named.items():
        if (p.dtype, p.device) != (dtype, device):
            raise ValueError(
                f"all parameters must have one dtype and device: {name} is {p.dtype} on {p.device}, "
                f"the others {dtype} on {device}"
            )
