"""Fused node -> steps of the plan on the CPU: the generated kernel, or ATen with the epilogue in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fuser.codegen.aten import encode_arguments
from fuser.codegen.cpp.anchor import Anchored
from fuser.codegen.cpp.conv import Convolution
from fuser.codegen.cpp.gradients import ConvWeightGradient, MaxPoolGradient
from fuser.codegen.cpp.loops import collapse, copy, define_results, outer_nodes, pointwise_step, spread, symbol_of
from fuser.codegen.cpp.matmul import Product
from fuser.codegen.cpp.pool import MaxPool
from fuser.codegen.cpp.reduce import Sum
from fuser.codegen.epilogue import Operand, build_body, inputs_of_body, outputs_of, shape_where_read
from fuser.codegen.plan import (
    AtenStep,
    Value,
    broadcast_strides,
    channels_last_strides,
    dense_strides,
    same_layout,
    view_strides,
)
from fuser.fused import FusedNode, tensor_meta
from fuser.operators import CONV2D_WEIGHT_GRADIENT, MAX_POOL2D_GRADIENT

if TYPE_CHECKING:
    from fuser.codegen.lowering import Lowering

aten = torch.ops.aten


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


def _lower_pointwise(lowering: Lowering, node: Node, fused: FusedNode) -> None:
    outer = outer_nodes(node, fused)
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
    define_results(lowering, node, results)
    fused.notes.append("generated kernel")


def _emit_pointwise(
    lowering: Lowering,
    fused: FusedNode,
    sources: list[Node],
    places: list[int],
    outputs: list[Node],
    results: list[int],
    shape: tuple[int, ...],
) -> None:
    """One pointwise kernel over `shape`, reading `places` and writing `results`."""
    values = lowering.plan.values
    strides = []
    for i, (source, place) in enumerate(zip(sources, places)):
        own = shape if source is fused.anchor else shape_where_read(fused, source)
        wide = broadcast_strides(values[place].sizes, values[place].strides, own)
        seen = view_strides(own, wide, shape)
        if seen is None:
            places[i] = spread(lowering, place, own, None)
            seen = view_strides(own, dense_strides(own), shape)
        strides.append(seen)
    strides += [view_strides(values[r].sizes, values[r].strides, shape) for r in results]
    sizes, strides = collapse(shape, strides)
    loads = [Operand(s, st) for s, st in zip(sources, strides)]
    stores = [Operand(o, st) for o, st in zip(outputs, strides[len(loads) :])]
    dtype = torch.float64 if tensor_meta(outputs[0]).dtype is torch.float64 else _compute_dtype(fused)
    body = build_body(fused, loads, stores, dtype, None, anchor_is_loaded=True)
    pointwise_step(lowering, symbol_of(fused), body, sizes, strides, [*places, *results], results, fused.name)


def _compute_dtype(fused: FusedNode) -> torch.dtype:
    """float64 when any value of the region has it: a comparison of float64 yields only masks."""
    metas = [tensor_meta(n) for n in fused.members.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    wide = any(m.dtype is torch.float64 and m.dim() > 0 for m in metas)
    return torch.float64 if wide else torch.float32


def _lower_aten_anchor(lowering: Lowering, node: Node, fused: FusedNode) -> None:
    """ATen computes the anchor; a pointwise kernel then works in place on its result."""
    outer, anchor = outer_nodes(node, fused), fused.anchor
    meta = tensor_meta(anchor)
    product = lowering.plan.add(Value("aten", tuple(meta.shape), meta.stride(), meta.dtype))
    arguments = encode_arguments(anchor.target, anchor.args, anchor.kwargs, lambda n: lowering.traced(outer[n]))
    outs = [product] + [-1] * (len(anchor.target._schema.returns) - 1)
    lowering.plan.steps.append(AtenStep(anchor.target, arguments, outs, fused=fused.name))
    sources, outputs = inputs_of_body(fused, None), outputs_of(fused)
    if all(o is anchor for o in outputs):
        return define_results(lowering, node, [product])
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
    return define_results(lowering, node, results)


# The anchors for which kernels can be generated; all others run through ATen, with their epilogue in place.
_GENERATED: dict[torch._ops.OpOverload, type[Anchored]] = {
    aten.mm.default: Product,
    aten.addmm.default: Product,
    aten.bmm.default: Product,
    aten.baddbmm.default: Product,
    aten.convolution.default: Convolution,
    aten.max_pool2d.default: MaxPool,
    aten.sum.default: Sum,
    MAX_POOL2D_GRADIENT: MaxPoolGradient,
    CONV2D_WEIGHT_GRADIENT: ConvWeightGradient,
    aten.sum.dim_IntList: Sum,
}

__all__ = ["copy", "lower"]
