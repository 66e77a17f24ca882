"""Regroup a factor into panels: for each group of columns, its lines along the depth one after another."""

from __future__ import annotations

import torch

from fuser.codegen import compiler
from fuser.codegen.cpp.anchored import C_TYPES, environment


def source(name: str, dtype: torch.dtype, panel: int) -> str:
    """C++ for `name(ptrs = [source, packed], args, threads)`; the template lists the arguments."""
    template = environment().get_template("pack.cpp.j2")
    return template.render(name=name, real=C_TYPES[dtype], vector_bytes=compiler.vector_bytes(), panel=panel)


def packed_elements(batches: int, columns: int, depth: int, panel: int) -> int:
    """Elements of the packed copy."""
    return batches * -(-columns // panel) * depth * panel
