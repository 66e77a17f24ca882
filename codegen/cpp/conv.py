"""Convolution with epilogue, as an implicit matrix product over dense channels-last memory."""

from __future__ import annotations

from fuser.codegen.cpp.anchored import render
from fuser.codegen.kernel import Body


def source(name: str, body: Body, columns: int, spatial: int) -> str:
    """C++ for `name(ptrs, args, threads)`; `columns` are the output channels of one group.

    ptrs: input, packed weight (see `pack`), zeros (one per channel of a group), then the body's loads and stores,
    whose steps run over (group, position, channel).
    args: images, groups, columns, channels per group, then per spatial axis input size, output size, kernel, stride,
    padding, dilation; then three strides per load and store.
    """
    return render("conv.cpp.j2", name, body, columns, first_pointer=3, first_stride="strides", spatial=spatial)
