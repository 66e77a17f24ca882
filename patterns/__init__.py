"""What can be fused: pointwise operations and activations, and the anchors that they follow, a file a family."""

from fuser.patterns import conv, gradients, matmul, pool, reduction
from fuser.patterns.pattern import Pattern, pattern_of, register_pattern, registered_patterns
from fuser.patterns.pointwise import compute_dtype, operation

__all__ = [
    "Pattern",
    "compute_dtype",
    "conv",
    "gradients",
    "matmul",
    "operation",
    "pattern_of",
    "pool",
    "reduction",
    "register_pattern",
    "registered_patterns",
]
