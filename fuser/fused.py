"""What a fused node is made of: scalar functions and the operations that apply them.

`patterns` writes these, `codegen` reads them; neither imports the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
import torch
from torch.fx import GraphModule, Node


@dataclass(frozen=True)
class Function:
    """A scalar function that kernels apply element by element, written once as a sympy expression.

    `name` is a C identifier. `arguments` are the expression's symbols in calling order. An expression that is a
    sympy relation or boolean yields a mask, any other a real number. `masks` names the arguments that are masks.
    """

    name: str
    arguments: tuple[sympy.Symbol, ...]
    expression: sympy.Basic
    masks: frozenset[sympy.Symbol] = frozenset()

    @property
    def yields_mask(self) -> bool:
        if isinstance(self.expression, sympy.Symbol):
            return self.expression in self.masks
        return isinstance(self.expression, sympy.logic.boolalg.Boolean)


@dataclass(frozen=True)
class Operation:
    """One application of a `Function`; operands are graph nodes or Python numbers, in the order of its arguments."""

    function: Function
    operands: tuple[Node | float | bool, ...]


@dataclass
class FusedNode:
    """What the graph holds in place of a chain: the chain itself, and how it was recognised.

    `members` is the subgraph that was replaced, runnable on its own: the node's meaning, the fallback when no kernel
    can be made, and the oracle in tests. Its pointwise nodes carry their `Operation` in `node.meta["operation"]`.
    """

    name: str
    pattern: str
    members: GraphModule
    anchor: Node | None = None
    notes: list[str] = field(default_factory=list)


def tensor_meta(node: Node) -> torch.Tensor:
    """The fake tensor that tracing recorded for `node`: its shape, strides and dtype."""
    return node.meta["val"]
