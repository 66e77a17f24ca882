"""A pattern says what can be fused: an anchor, the epilogue it takes, and a guard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from fuser.fused import tensor_meta


@dataclass(frozen=True)
class Pattern:
    """An anchor operation and what may be fused onto its result.

    `name` starts the fused node's name (`conv` gives `conv_bias_relu`). `anchors` are ATen overloads that return one
    tensor, the value that the epilogue continues. `bias` is the position of the anchor's own bias argument, if it
    has one. `guard(node)` returns None to accept an anchor, or the reason to leave it alone, which the report shows.
    `through_views` lets the epilogue continue behind a reshape of the dense result. `alone` says whether an
    anchor with nothing to fuse is still worth a node of its own (a kernel may beat ATen's). `epilogue` lets pointwise
    work continue on the result, `prologue` takes in the work that makes the first argument and serves nothing else.
    """

    name: str
    anchors: frozenset[torch._ops.OpOverload]
    bias: int | None = None
    guard: Callable[[Node], str | None] = field(default=lambda node: None)
    through_views: bool = False
    alone: bool = False
    epilogue: bool = True
    prologue: bool = False


_patterns: list[Pattern] = []
_by_anchor: dict[torch._ops.OpOverload, Pattern] = {}


def register_pattern(pattern: Pattern) -> Pattern:
    """Add a pattern; from then on newly compiled signatures use it.

    Raises `ValueError` when the name is not an identifier, when there is no anchor, when an anchor belongs to another
    pattern already, returns a view or does not return one tensor, or when `bias` is beyond an anchor's arguments;
    `TypeError` when `anchors` is not a set of ATen overloads such as `torch.ops.aten.mm.default`, `bias` not an
    integer, or `guard` not a function.
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(f"register_pattern takes a fuser.Pattern, got {type(pattern).__name__}")
    if not isinstance(pattern.name, str) or not pattern.name.isidentifier():
        raise ValueError(f"a pattern's name must be an identifier such as 'conv', got {pattern.name!r}")
    if not isinstance(pattern.anchors, (set, frozenset)):
        raise TypeError(f"the anchors of pattern {pattern.name!r} must be a set of overloads, got {pattern.anchors!r}")
    if not pattern.anchors:
        raise ValueError(f"pattern {pattern.name!r} names no anchor")
    if pattern.bias is not None and type(pattern.bias) is not int:
        raise TypeError(f"the bias of pattern {pattern.name!r} must be an argument's position, got {pattern.bias!r}")
    if not callable(pattern.guard):
        raise TypeError(f"the guard of pattern {pattern.name!r} must be a function of a node, got {pattern.guard!r}")
    for anchor in pattern.anchors:
        if not isinstance(anchor, torch._ops.OpOverload):
            raise TypeError(
                f"anchor {anchor!r} of pattern {pattern.name!r} must be an operator overload such as "
                "torch.ops.aten.mm.default"
            )
        arguments, returns = anchor._schema.arguments, anchor._schema.returns
        if any(a.alias_info is not None for a in (*arguments, *returns)):
            raise ValueError(f"{anchor} returns a view or writes to its argument; an epilogue in place would too")
        if [str(r.type) for r in returns] != ["Tensor"]:
            raise ValueError(f"{anchor} does not return exactly one tensor")
        if pattern.bias is not None and not 0 <= pattern.bias < len(arguments):
            raise ValueError(f"{anchor} has {len(arguments)} arguments, so its bias can't be number {pattern.bias}")
        if anchor in _by_anchor:
            raise ValueError(f"{anchor} is the anchor of pattern {_by_anchor[anchor].name!r} already")
    _patterns.append(pattern)
    _by_anchor.update((anchor, pattern) for anchor in pattern.anchors)
    return pattern


def pattern_of(node: Node) -> Pattern | None:
    """The pattern that `node` anchors, whatever its guard says."""
    return _by_anchor.get(node.target) if node.op == "call_function" else None


def registered_patterns() -> tuple[Pattern, ...]:
    """All patterns, in the order of their registration."""
    return tuple(_patterns)


def floating_and_not_empty(node: Node) -> str | None:
    """The guard of anchors whose kernels compute with real numbers."""
    value = tensor_meta(node)
    if not value.is_floating_point():
        return f"{value.dtype} is left to ATen"
    if any(tensor_meta(n).dtype != value.dtype for n in node.all_input_nodes):
        return "its operands differ in dtype, which ATen refuses"
    return "the result is empty" if value.numel() == 0 else None
