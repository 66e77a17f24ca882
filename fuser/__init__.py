"""fuser: a graph-fusion compiler for PyTorch.

The names below are loaded when first used, so that `import fuser` costs next to nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "optimize": "fuser.optimized",
    "OptimizedModule": "fuser.optimized",
    "FuserWarning": "fuser.differentiable",
    "batched_jacobian": "fuser.autodiff",
    "hutchinson_trace": "fuser.autodiff",
    "jacobian_vector_product": "fuser.autodiff",
    "value_and_grad": "fuser.autodiff",
    "vector_jacobian_product": "fuser.autodiff",
    "flat_parameters": "fuser.flat",
    "Report": "fuser.report",
    "Pattern": "fuser.patterns.pattern",
    "register_pattern": "fuser.patterns.pattern",
    "register_activation": "fuser.patterns.activations",
}

_MODULES = frozenset({"ops"})

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"fuser.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'fuser' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_MODULES])
