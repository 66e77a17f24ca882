"""Program -> Program, a file each, in the order in which the pipeline applies them."""

from fuser.passes.canonicalise import canonicalise
from fuser.passes.fuse import fuse

__all__ = ["canonicalise", "fuse"]
