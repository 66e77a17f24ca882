"""Fused node -> steps of the plan on the CPU: which implementation, which layout, which arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from fuser.codegen.aten import encode_arguments
from fuser.codegen.cpp import conv, matmul, pack, pointwise, pool
from fuser.codegen.cpp.anchored import vector_width, vectors_per_row
from fuser.codegen.epilogue import Operand, build_body, inputs_of_body, outputs_of, steps
from fuser.codegen.kernel import Body, Load, Store
from fuser.codegen.plan import (
    AtenStep,
    KernelStep,
    PackStep,
    Value,
    broadcast_strides,
    channels_last_strides,
    dense_strides,
    same_layout,
    view_strides,
)
from torch.fx import Node

from fuser.fused import FusedNode, tensor_meta

if TYPE_CHECKING:
    from fuser.codegen.lowering import Lowering

aten = torch.ops.aten

# Weights up to this many bytes are packed for generated kernels; beyond it the library's blocking wins.
LARGEST_PACKED_WEIGHT = 2 << 20
# With fewer rows than this a product only streams its weight, which a packed copy would make it read twice.
FEW_ROWS = 16
SMALL_WEIGHT = 256 << 10


def lower(lowering: Lowering, node: Node, fused: FusedNode) -> None:
    """Append the steps that compute the fused node `node` and define its values."""
    if fused.anchor is None:
        return _lower_pointwise(lowering, node, fused)
    kind = _GENERATED.get(fused.anchor.target)
    shape = kind(lowering, node, fused) if kind else None
    reason = shape.refusal() if shape else f"there is no generated kernel for {fused.anchor.target}"
    if reason is None:
        shape.lower()
        fused.notes.append("generated kernel")
    else:
        _lower_aten_anchor(lowering, node, fused)
        fused.notes.append(f"ATen, epilogue in place: {reason}")
    return None


def copy(lowering: Lowering, source: int, target: int) -> None:
    """A step that copies value `source` into the buffer `target` of the same shape, another layout."""
    a, b = lowering.plan.values[source], lowering.plan.values[target]
    dtype = torch.float64 if a.dtype is torch.float64 else torch.float32
    if a.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool):
        return _aten_copy(lowering, source, target)
    sizes, strides = collapse(b.sizes, [a.strides, b.strides])
    body = Body(dtype, (Load("p0", a.dtype, steps(strides[0])),), (), (Store("p0", b.dtype, steps(strides[1])),))
    _pointwise_step(lowering, "copy_kernel", body, sizes, strides, [source, target], [target])
    if lowering.plan.steps[-1].source in lowering.refused:
        lowering.plan.steps.pop()
        _aten_copy(lowering, source, target)
    return None


def _aten_copy(lowering: Lowering, source: int, target: int) -> None:
    lowering.plan.steps.append(
        AtenStep(aten.copy_.default, [("value", target), ("value", source), ("const", False)], [-1], pure=False)
    )


def collapse(sizes: Sequence[int], strides: list[tuple[int, ...]]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Order the loops so that the last tensor is walked through memory, and merge those that every tensor walks as one.

    Returns the sizes of the remaining loops (at least one), and per tensor its strides over them.
    """
    axes = [i for i, n in enumerate(sizes) if n != 1]
    axes.sort(key=lambda i: -strides[-1][i])
    merged: list[tuple[int, list[int]]] = []
    for axis in axes:
        here = [s[axis] for s in strides]
        if merged:
            size, above = merged[-1]
            if all(up == low * sizes[axis] for up, low in zip(above, here)):
                merged[-1] = (size * sizes[axis], here)
                continue
        merged.append((sizes[axis], here))
    merged = merged or [(1, [0] * len(strides))]
    return [n for n, _ in merged], [tuple(m[1][t] for m in merged) for t in range(len(strides))]


def _pointwise_step(
    lowering: Lowering,
    name: str,
    body: Body,
    sizes: list[int],
    strides: list[tuple],
    values: list[int],
    writes: list[int],
    fused: str = "",
) -> None:
    arguments = [*sizes, *(s for tensor in strides for s in tensor)]
    source = pointwise.source(body, len(sizes), name)
    lowering.plan.steps.append(KernelStep(name, source, values, arguments, writes, fused))


def _outer(node: Node, fused: FusedNode) -> dict[Node, Node]:
    """The subgraph's placeholders -> the nodes of the outer graph that the fused node is called with."""
    return dict(zip(fused.members.graph.find_nodes(op="placeholder"), node.args))


def _define_results(lowering: Lowering, node: Node, values: list[int]) -> None:
    if len(values) > 1:
        lowering.items[node] = list(values)
    else:
        lowering.places[node] = list(values)
        lowering.plan.values[values[0]].node = node.name


def _lower_pointwise(lowering: Lowering, node: Node, fused: FusedNode) -> None:
    outer = _outer(node, fused)
    sources = inputs_of_body(fused, None)
    outputs = outputs_of(fused)
    shape = tuple(tensor_meta(outputs[0]).shape)
    places = [lowering.any_place(outer[s]) for s in sources]
    relaid = any(lowering.is_channels_last(outer[s]) and tensor_meta(s).shape == shape for s in sources)
    results = []
    for output in outputs:
        meta = tensor_meta(output)
        strides = channels_last_strides(shape) if relaid else meta.stride()
        results.append(lowering.buffer(None, shape, strides, meta.dtype))
    _emit_pointwise(lowering, fused, sources, places, outputs, results, shape)
    _define_results(lowering, node, results)


def _emit_pointwise(
    lowering: Lowering,
    fused: FusedNode,
    sources: list[Node],
    places: list[int],
    outputs: list[Node],
    results: list[int],
    shape: tuple[int, ...],
    views: dict[Node, tuple[int, ...]] | None = None,
) -> None:
    """One pointwise kernel over `shape`, reading `places` and writing `results`."""
    values = lowering.plan.values
    strides = [broadcast_strides(values[p].sizes, values[p].strides, shape) for p in places]
    strides += [values[r].strides for r in results]
    sizes, strides = collapse(shape, strides)
    loads = [Operand(s, st) for s, st in zip(sources, strides)]
    stores = [Operand(o, st) for o, st in zip(outputs, strides[len(loads) :])]
    dtype = torch.float64 if tensor_meta(outputs[0]).dtype is torch.float64 else _compute_dtype(fused)
    body = build_body(fused, loads, stores, dtype, None, anchor_is_loaded=True)
    _pointwise_step(lowering, _symbol(fused), body, sizes, strides, [*places, *results], results, fused.name)


def _compute_dtype(fused: FusedNode) -> torch.dtype:
    """float64 when any value of the region has it: a comparison of float64 yields only masks."""
    metas = [tensor_meta(n) for n in fused.members.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    wide = any(m.dtype is torch.float64 and m.dim() > 0 for m in metas)
    return torch.float64 if wide else torch.float32


def _symbol(fused: FusedNode) -> str:
    """The C name of a fused node's kernel: its chain, without the running number, apart from C's own `tanh`."""
    return fused.name.rpartition("_")[0] + "_kernel"


def _lower_aten_anchor(lowering: Lowering, node: Node, fused: FusedNode) -> None:
    """ATen computes the anchor; a pointwise kernel then works in place on its result."""
    outer, anchor = _outer(node, fused), fused.anchor
    meta = tensor_meta(anchor)
    product = lowering.plan.add(Value("aten", tuple(meta.shape), meta.stride(), meta.dtype))
    arguments = encode_arguments(anchor.target, anchor.args, anchor.kwargs, lambda n: lowering.traced(outer[n]))
    outs = [product] + [-1] * (len(anchor.target._schema.returns) - 1)
    lowering.plan.steps.append(AtenStep(anchor.target, arguments, outs, fused=fused.name))
    sources, outputs = inputs_of_body(fused, None), outputs_of(fused)
    if all(o is anchor for o in outputs):
        return _define_results(lowering, node, [product])
    shape = tuple(tensor_meta(outputs[0]).shape)
    dense = view_strides(tuple(meta.shape), meta.stride(), shape)
    seen = lowering.plan.add(Value("view", shape, dense, meta.dtype, base=product))
    results = []
    in_place = anchor not in outputs
    for output in outputs:
        out = tensor_meta(output)
        if output is anchor:
            results.append(product)
        elif in_place and out.dtype == meta.dtype and same_layout(shape, dense, out.stride()):
            results.append(seen)
            in_place = False
        else:
            results.append(lowering.buffer(None, tuple(out.shape), out.stride(), out.dtype))
    places = [lowering.any_place(outer[s]) for s in sources]
    written = [(o, r) for o, r in zip(outputs, results) if o is not anchor]
    _emit_pointwise(
        lowering, fused, [*sources, anchor], [*places, seen], [o for o, _ in written], [r for _, r in written], shape
    )
    return _define_results(lowering, node, results)


class _Anchored:
    """What the generated matmul and convolution share: operands seen as (batch, row, column), packing, the step."""

    def __init__(self, lowering: Lowering, node: Node, fused: FusedNode) -> None:
        self.lowering, self.node, self.fused = lowering, node, fused
        self.outer = _outer(node, fused)
        self.meta = tensor_meta(fused.anchor)

    def place_of(self, source: Node) -> int:
        return self.lowering.any_place(self.outer[source])

    def panel(self, columns: int) -> int:
        return vectors_per_row(columns, self.meta.dtype) * vector_width(self.meta.dtype)

    def packed(
        self, factor: int, batches: int, columns: int, channels: int, taps: Sequence[int], strides: Sequence[int]
    ) -> int:
        """The value that holds `factor` in panels: kept between calls when it is a weight, else made anew."""
        lowering, panel = self.lowering, self.panel(columns)
        value = lowering.plan.values[factor]
        elements = pack.packed_elements(batches, columns, channels * math.prod(taps), panel)
        name = f"pack_{panel}"
        source = pack.source(name, value.dtype, panel)
        arguments = [batches, columns, channels, *taps, *strides]
        if lowering.is_weight(factor):
            root = lowering.plan.values[lowering.plan.root(factor)]
            key = f"{root.index}+{value.offset}:{value.dtype}:{panel}:{arguments}"
            target = lowering.plan.add(
                Value("packed", nbytes=elements * value.dtype.itemsize, key=key, dtype=value.dtype)
            )
            lowering.plan.steps.append(PackStep(name, source, factor, target, arguments))
        else:
            target = lowering.buffer(None, (elements,), (1,), value.dtype)
            lowering.plan.steps.append(KernelStep(name, source, [factor, target], arguments, [target], self.fused.name))
        return target

    def body_and_strides(self, shape: tuple, grid: tuple, order: tuple | None, results: list[int]) -> tuple:
        """The body over (batch, row, column), its tensors and their strides flat.

        Operands are read as if they had `shape`, permuted by `order`, then seen with shape `grid`.
        """
        values, bias = self.lowering.plan.values, self.bias()
        sources = inputs_of_body(self.fused, bias)
        places, operands = [], []

        def on_grid(place: int, source: Node | None = None) -> tuple[int, ...] | None:
            # A bias runs along the columns, which are not the last axis of a convolution's result.
            trailing = len(shape) - 1 - (order or range(len(shape)))[-1] if source is not None and source is bias else 0
            sizes = (*values[place].sizes, *(1,) * trailing)
            strides = broadcast_strides(sizes, (*values[place].strides, *(0,) * trailing), shape)
            permuted = order or tuple(range(len(shape)))
            return view_strides(tuple(shape[i] for i in permuted), tuple(strides[i] for i in permuted), grid)

        for source in sources:
            place = self.place_of(source)
            strides = on_grid(place, source)
            if strides is None:
                place = self.spread(place, shape, order)
                strides = on_grid(place)
            places.append(place)
            operands.append(Operand(source, _no_unit_axes(grid, strides)))
        outputs = outputs_of(self.fused)
        stores = [Operand(o, on_grid(r)) for o, r in zip(outputs, results)]
        body = build_body(self.fused, operands, stores, self.meta.dtype, bias)
        flat = [s for o in [*operands, *stores] for s in o.strides]
        return body, places, flat

    def spread(self, place: int, shape: tuple, order: tuple | None) -> int:
        """A dense copy of an operand whose broadcast can't be expressed over (batch, row, column)."""
        lowering, value = self.lowering, self.lowering.plan.values[place]
        strides = broadcast_strides(value.sizes, value.strides, shape)
        wide = lowering.plan.add(Value("view", shape, strides, value.dtype, base=place))
        target = lowering.buffer(None, shape, dense_strides(shape, order), value.dtype)
        copy(lowering, wide, target)
        return target

    def bias(self) -> Node | None:
        raise NotImplementedError


def _no_unit_axes(grid: tuple, strides: tuple) -> tuple:
    """Strides along axes of size 1 don't matter; 0 lets more shapes share a kernel. The column keeps its own."""
    return tuple(0 if n == 1 and i < len(grid) - 1 else s for i, (n, s) in enumerate(zip(grid, strides)))


class _Product(_Anchored):
    """`mm`, `addmm`, `bmm`, `baddbmm`."""

    def __init__(self, lowering: Lowering, node: Node, fused: FusedNode) -> None:
        super().__init__(lowering, node, fused)
        has_bias = fused.anchor.target in (aten.addmm.default, aten.baddbmm.default)
        self.x, self.factor = fused.anchor.args[1:3] if has_bias else fused.anchor.args[:2]
        self.added = fused.anchor.args[0] if has_bias else None
        *batch, self.rows, self.columns = self.meta.shape
        self.batches = batch[0] if batch else 1
        self.depth = tensor_meta(self.x).shape[-1]

    def bias(self) -> Node | None:
        return self.added

    def refusal(self) -> str | None:
        """Why ATen's product is the better choice, if it is."""
        if self.meta.dtype not in (torch.float32, torch.float64):
            return f"{self.meta.dtype}: ATen's kernels use the hardware's own instructions"
        if self.depth == 0:
            return "the depth is 0"
        weight = self.columns * self.depth * self.meta.element_size()
        if weight > LARGEST_PACKED_WEIGHT:
            return "the weight is large: the library's blocking wins"
        if self.rows * self.batches < FEW_ROWS and weight > SMALL_WEIGHT:
            return "few rows: reading the weight once is what counts"
        return None

    def lower(self) -> None:
        lowering, values = self.lowering, self.lowering.plan.values
        outputs = outputs_of(self.fused)
        x = self.place_of(self.x)
        if values[x].strides[-1] != 1 and self.depth != 1:
            x = lowering.in_layout(self.outer[self.x], dense_strides(values[x].sizes))
        factor = self.place_of(self.factor)
        along = values[factor].strides
        batch_stride = along[0] if len(along) == 3 else 0
        shared = batch_stride == 0  # one factor for every batch
        packed = self.packed(
            factor,
            1 if shared else self.batches,
            self.columns,
            self.depth,
            (1, 1, 1),
            (batch_stride, along[-1], along[-2], 0, 0, 0),
        )
        x_row, x_batch = values[x].strides[-2], values[x].strides[0] if len(values[x].strides) == 3 else 0
        if shared and x_batch == self.rows * x_row:
            self.rows, self.batches, x_batch = self.rows * self.batches, 1, 0
        results = []
        for output in outputs:
            meta = tensor_meta(output)
            results.append(lowering.buffer(None, tuple(meta.shape), dense_strides(tuple(meta.shape)), meta.dtype))
        shape, grid = tuple(tensor_meta(outputs[-1]).shape), (self.batches, self.rows, self.columns)
        body, places, strides = self.body_and_strides(shape, grid, None, results)
        name = _symbol(self.fused)
        per_batch = pack.packed_elements(1, self.columns, self.depth, self.panel(self.columns))
        arguments = [
            self.batches,
            self.rows,
            self.columns,
            self.depth,
            x_batch,
            x_row,
            0 if shared else per_batch,
            *strides,
        ]
        source = matmul.source(name, body, self.columns)
        lowering.plan.steps.append(
            KernelStep(name, source, [x, packed, *places, *results], arguments, results, self.fused.name)
        )
        _define_results(lowering, self.node, results)


class _Convolution(_Anchored):
    """A direct convolution over channels-last memory."""

    def __init__(self, lowering: Lowering, node: Node, fused: FusedNode) -> None:
        super().__init__(lowering, node, fused)
        self.x, self.weight, self.added, stride, pad, dilation, self.transposed, _, self.groups = fused.anchor.args
        self.spatial = self.meta.dim() - 2
        widen = lambda v: list(v) * (self.spatial if len(v) == 1 else 1)  # noqa: E731
        self.stride, self.pad, self.dilation = widen(stride), widen(pad), widen(dilation)
        self.columns = self.meta.shape[1] // self.groups
        self.channels = tensor_meta(self.x).shape[1] // self.groups

    def bias(self) -> Node | None:
        return self.added

    def refusal(self) -> str | None:
        """Why ATen's convolution is the better choice, if it is."""
        if self.meta.dtype not in (torch.float32, torch.float64):
            return f"{self.meta.dtype}: ATen's kernels use the hardware's own instructions"
        if self.transposed:
            return "transposed"
        if not 1 <= self.spatial <= 3:
            return f"{self.spatial} spatial axes"
        if self.groups > 1 and (self.columns < 8 or self.channels < 4):
            return "groups too narrow for a vector of channels"
        if self.channels == 0:
            return "no channels"
        return None

    def lower(self) -> None:
        lowering, values = self.lowering, self.lowering.plan.values
        x_shape = tuple(tensor_meta(self.x).shape)
        x = lowering.in_layout(self.outer[self.x], channels_last_strides(x_shape))
        weight = self.place_of(self.weight)
        along, kernel = values[weight].strides, values[weight].sizes[2:]
        fill = 3 - self.spatial
        packed = self.packed(
            weight,
            self.groups,
            self.columns,
            self.channels,
            (1,) * fill + tuple(kernel),
            (along[0] * self.columns, along[0], along[1], *(0,) * fill, *along[2:]),
        )
        outputs = outputs_of(self.fused)
        shape = tuple(self.meta.shape)
        last = (0, *range(2, len(shape)), 1)
        results = [lowering.buffer(None, shape, channels_last_strides(shape), tensor_meta(o).dtype) for o in outputs]
        positions = shape[0] * math.prod(shape[2:])
        body, places, strides = self.grouped(shape, last, positions, results)
        name = _symbol(self.fused)
        geometry = []
        for d in range(self.spatial):
            geometry += [x_shape[2 + d], shape[2 + d], kernel[d], self.stride[d], self.pad[d], self.dilation[d]]
        arguments = [shape[0], self.groups, self.columns, self.channels, *geometry, *strides]
        source = conv.source(name, body, self.columns, self.spatial)
        zeros = lowering.constant(torch.zeros(self.channels, dtype=self.meta.dtype))
        lowering.plan.steps.append(
            KernelStep(name, source, [x, packed, zeros, *places, *results], arguments, results, self.fused.name)
        )
        _define_results(lowering, self.node, results)

    def grouped(self, shape: tuple, last: tuple, positions: int, results: list[int]) -> tuple:
        """As `body_and_strides`, with the group as the batch: (group, position, channel of the group)."""
        body, places, flat = self.body_and_strides(shape, (1, positions, shape[1]), last, results)
        strides = list(flat)
        for i in range(0, len(strides), 3):
            strides[i] = strides[i + 2] * self.columns if self.groups > 1 else 0
        return body, places, strides


class _MaxPool(_Anchored):
    """Max pooling over memory that is channels-last already."""

    def __init__(self, lowering: Lowering, node: Node, fused: FusedNode) -> None:
        super().__init__(lowering, node, fused)
        given = fused.anchor.args
        self.x, kernel, stride, pad, dilation = (*given, *(None, None, [], [0], [1])[len(given) :])[:5]
        self.spatial = self.meta.dim() - 2
        widen = lambda v: list(v) * (self.spatial if len(v) == 1 else 1)  # noqa: E731
        self.kernel, self.pad, self.dilation = widen(kernel), widen(pad), widen(dilation)
        self.stride = widen(stride) if stride else self.kernel

    def bias(self) -> Node | None:
        return None

    def refusal(self) -> str | None:
        """Why ATen's pooling is the better choice, if it is."""
        if self.meta.dtype not in (torch.float32, torch.float64):
            return f"{self.meta.dtype}"
        value = self.lowering.plan.values[self.place_of(self.x)]
        if not same_layout(value.sizes, value.strides, channels_last_strides(value.sizes)):
            return "the input is not channels-last"
        return None

    def lower(self) -> None:
        lowering = self.lowering
        x = self.place_of(self.x)
        x_shape, shape = lowering.plan.values[x].sizes, tuple(self.meta.shape)
        outputs = outputs_of(self.fused)
        results = [lowering.buffer(None, shape, channels_last_strides(shape), tensor_meta(o).dtype) for o in outputs]
        positions = shape[0] * math.prod(shape[2:])
        last = (0, *range(2, len(shape)), 1)
        body, places, strides = self.body_and_strides(shape, (1, positions, shape[1]), last, results)
        geometry = []
        for d in range(self.spatial):
            geometry += [x_shape[2 + d], shape[2 + d], self.kernel[d], self.stride[d], self.pad[d], self.dilation[d]]
        name = _symbol(self.fused)
        source = pool.source(name, body, shape[1], self.spatial)
        arguments = [shape[0], shape[1], *geometry, *strides]
        lowering.plan.steps.append(
            KernelStep(name, source, [x, *places, *results], arguments, results, self.fused.name)
        )
        _define_results(lowering, self.node, results)


# The anchors for which kernels can be generated; all others run through ATen, with their epilogue in place.
_GENERATED: dict[torch._ops.OpOverload, type[_Anchored]] = {
    aten.mm.default: _Product,
    aten.addmm.default: _Product,
    aten.bmm.default: _Product,
    aten.baddbmm.default: _Product,
    aten.convolution.default: _Convolution,
    aten.max_pool2d.default: _MaxPool,
}
