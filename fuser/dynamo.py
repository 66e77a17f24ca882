"""`torch.compile(model, backend="fuser")`, found through the `torch_dynamo_backends` entry point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from fuser.optimized import optimize


def fuser_backend(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable:
    """Compile the graph that Dynamo captured; called by `torch.compile`.

    Where a gradient is wanted the graph runs through eager autograd, as with `fuser.optimize`.
    """
    return optimize(graph_module)
