"""Matrix product with epilogue: rows of x (unit stride along the depth) times packed panels of the other factor."""

from __future__ import annotations

from fuser.codegen.cpp.anchored import render
from fuser.codegen.kernel import Body


def source(name: str, body: Body, columns: int) -> str:
    """C++ for `name(ptrs, args, threads)`.

    ptrs: x, packed panels (see `pack`), then the body's loads and stores, whose steps run over (batch, row, column).
    args: batches, rows, columns, depth, x batch stride, x row stride, packed batch stride, then three strides each.
    """
    return render("matmul.cpp.j2", name, body, columns, first_pointer=2, first_stride="(args + 7)")
