"""Max pooling with epilogue over dense channels-last memory, a vector of channels at a time."""

from __future__ import annotations

from fuser.codegen.cpp.anchored import render
from fuser.codegen.kernel import Body


def source(name: str, body: Body, channels: int, spatial: int) -> str:
    """C++ for `name(ptrs, args, threads)`.

    ptrs: input, then the body's loads and stores, whose steps run over (1, position, channel).
    args: images, channels, then per spatial axis input size, output size, kernel, stride, padding, dilation; then
    three strides per load and store.
    """
    return render("pool.cpp.j2", name, body, channels, first_pointer=1, first_stride="strides", spatial=spatial)
