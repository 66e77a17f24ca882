"""Rewrites to the small set of operations that the patterns speak; then dead code and common subexpressions go."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from fuser.fused import tensor_meta
from fuser.operators import CONV2D_WEIGHT_GRADIENT
from fuser.program import Program, unchanged_copy

aten = torch.ops.aten


def canonicalise(program: Program) -> Program:
    """`program` with every rewrite below applied once, in graph order, and nothing left that no result needs."""
    program = unchanged_copy(program)
    graph = program.graph_module.graph
    _thread_running_statistics(graph)
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
        if rewrite is not None:
            rewrite(node)
    remove_dead_code(graph)
    owners = [_owner(n) for n in graph.output_node().args[0]]
    _merge_common_subexpressions(graph)
    _part_results(graph, owners)
    program.graph_module.recompile()
    return program


def is_pure(node: Node) -> bool:
    """False for placeholders, outputs, writes and random draws: what may neither be dropped nor merged."""
    if node.op in ("placeholder", "output"):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return not (node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags)


def remove_dead_code(graph: Graph) -> None:
    """Erase pure nodes that nothing uses."""
    for node in reversed(graph.nodes):
        if not node.users and is_pure(node):
            graph.erase_node(node)


def insert(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Add a call at the graph's insertion point, with the metadata that tracing would have recorded."""
    node = graph.call_function(target, args, kwargs)
    values = torch.fx.node.map_arg((args, kwargs), tensor_meta)
    fakes = [v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    with fakes[0].fake_mode, torch.no_grad():
        node.meta["val"] = target(*values[0], **values[1])
    return node


def _merge_common_subexpressions(graph: Graph) -> None:
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr") or not is_pure(node):
            continue
        try:
            key = (node.target, _frozen(node.args), _frozen(node.kwargs))
            earlier = seen.setdefault(key, node)
        except TypeError:
            continue
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)


def _owner(node: Any) -> Any:
    """The node whose memory a result is."""
    while isinstance(node, Node) and node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        first = node.target._schema.arguments[:1]
        if not first or first[0].alias_info is None or first[0].alias_info.is_write:
            break
        node = node.args[0]
    return node


def _part_results(graph: Graph, owners: list[Any]) -> None:
    """Two results that were merged stay two tensors: one may be written to."""
    output = graph.output_node()
    seen: dict[Any, Any] = {}
    results = []
    for node, before in zip(output.args[0], owners):
        after = _owner(node)
        if isinstance(node, Node) and seen.setdefault(after, before) is not before:
            with graph.inserting_before(output):
                node = insert(graph, aten.clone.default, node)
        results.append(node)
    output.args = (tuple(results),)


def _frozen(argument: Any) -> Any:
    """A hashable stand-in that tells 1, 1.0 and True, and 0.0 and -0.0, apart."""
    if isinstance(argument, (tuple, list)):
        return tuple(_frozen(a) for a in argument)
    if isinstance(argument, dict):
        return tuple((k, _frozen(v)) for k, v in argument.items())
    return argument if isinstance(argument, Node) else (type(argument), repr(argument), argument)


def _replace(node: Node, replacement: Node) -> None:
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def _first_item(node: Node) -> Node | None:
    """The `getitem` of result 0, when no other result is used."""
    items = {user.args[1]: user for user in node.users}
    return items[0] if all(not user.users for index, user in items.items() if index != 0) and 0 in items else None


def _thread_running_statistics(graph: Graph) -> None:
    """Batch norm in training mode updates its running statistics as a side effect that its schema hides.

    Give the new values a name, so that the operation is pure, and write them back at the end of the graph.
    """
    current: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.op == "output":
            break
        if current:
            node.args = torch.fx.node.map_arg(node.args, lambda n: current.get(n, n))
        training = node.target is aten.native_batch_norm.default and node.args[5]
        if not training or node.args[3] is None:
            continue
        mean, variance = _original(current, node.args[3]), _original(current, node.args[4])
        node.target = aten._native_batch_norm_legit_functional.default
        with graph.inserting_after(node):
            values = []
            for position, old in ((4, variance), (3, mean)):
                item = graph.call_function(operator.getitem, (node, position))
                item.meta["val"] = tensor_meta(old)
                values.append(item)
        current[mean], current[variance] = values[1], values[0]
        node.meta["val"] = (*node.meta["val"], tensor_meta(mean), tensor_meta(variance))
    with graph.inserting_before(graph.output_node()):
        for buffer, value in current.items():
            write = graph.call_function(aten.copy_.default, (buffer, value))
            write.meta["val"] = tensor_meta(buffer)


def _original(current: dict[Node, Node], node: Node) -> Node:
    return next((old for old, new in current.items() if new is node), node)


def _batch_norm_in_eval(node: Node) -> None:
    """(x - mean) / sqrt(var + eps) * weight + bias as one scale and one shift per channel, computed anew each call."""
    x, weight, bias, mean, variance, training, _, eps = node.args
    result = _first_item(node)
    if training or result is None or mean is None:
        return
    graph, x_meta = node.graph, tensor_meta(x)
    dtype, shape = x_meta.dtype, [-1] + [1] * (x_meta.dim() - 2)
    with graph.inserting_before(node):
        scale = insert(graph, aten.rsqrt.default, insert(graph, aten.add.Scalar, variance, eps))
        if weight is not None:
            scale = insert(graph, aten.mul.Tensor, scale, weight)
        shift = insert(graph, aten.mul.Tensor, mean, scale)
        shift = (
            insert(graph, aten.rsub.Scalar, shift, 0) if bias is None else insert(graph, aten.sub.Tensor, bias, shift)
        )
        scaled = insert(graph, aten.mul.Tensor, x, insert(graph, aten.view.default, scale, shape))
        y = insert(graph, aten.add.Tensor, scaled, insert(graph, aten.view.default, shift, shape))
        if tensor_meta(y).dtype != dtype:
            y = insert(graph, aten._to_copy.default, y, dtype=dtype)
        # ATen's own result is dense, in the order of the axes or channels-last.
        last = x_meta.dim() == 4 and x_meta.is_contiguous(memory_format=torch.channels_last)
        form = torch.channels_last if last and not x_meta.is_contiguous() else torch.contiguous_format
        with tensor_meta(y).fake_mode:
            y.meta["val"] = torch.empty_like(tensor_meta(y), memory_format=form)
    _replace(result, y)


def _log_sigmoid(node: Node) -> None:
    """The second result is a buffer for the backward pass."""
    result = _first_item(node)
    if result is not None:
        with node.graph.inserting_before(node):
            y = insert(node.graph, aten.log_sigmoid.default, node.args[0])
            y.meta["val"] = tensor_meta(y).contiguous()  # as ATen's CPU kernel allocates it
            _replace(result, y)


def _rrelu_in_eval(node: Node) -> None:
    """Outside training the random slope is the mean of its bounds."""
    lower, upper, training = (*node.args[2:], *(0.125, 1 / 3, False)[len(node.args) - 2 :])[:3]
    if not training:
        with node.graph.inserting_before(node):
            y = insert(node.graph, aten.leaky_relu.default, node.args[0], (lower + upper) / 2)
            y.meta["val"] = tensor_meta(y).contiguous()
            _replace(node, y)


def _pool_without_indices(node: Node) -> None:
    """The indices serve the backward pass alone."""
    result = _first_item(node)
    if result is not None:
        with node.graph.inserting_before(node):
            _replace(result, insert(node.graph, aten.max_pool2d.default, *node.args))


# Convolutions up to this many weights have gradients of our own; beyond, the library's blocking wins.
_MOST_WEIGHTS = 40_000


def _convolution_gradients(node: Node) -> None:
    """Each gradient by itself: the bias's is a sum, the input's another convolution where the stride is 1."""
    gradient, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = node.args
    items = {user.args[1]: user for user in node.users}
    dy, w = tensor_meta(gradient), tensor_meta(weight)
    graph = node.graph
    real = dy.dtype in (torch.float32, torch.float64) and dy.numel() > 0
    own = real and dy.dim() == 4 and groups == 1 and not transposed and w.numel() <= _MOST_WEIGHTS
    with graph.inserting_before(node):
        if real and 2 in items:
            axes = [i for i in range(dy.dim()) if i != 1]
            _replace(items.pop(2), insert(graph, aten.sum.dim_IntList, gradient, axes))
        if own:
            stride, padding, dilation = ([*v] * (2 // len(v)) for v in (stride, padding, dilation))
            reach = [d * (k - 1) - p for d, k, p in zip(dilation, w.shape[2:], padding)]
            if 1 in items and w.shape[0] >= 4:
                edges = [padding[1], padding[1], padding[0], padding[0]]
                read = insert(graph, aten.constant_pad_nd.default, x, edges) if any(padding) else x
                own_weight = insert(graph, CONV2D_WEIGHT_GRADIENT, gradient, read, list(w.shape), stride, dilation)
                _replace(items.pop(1), own_weight)
            if 0 in items and w.shape[1] >= 4 and stride == [1, 1] and min(reach) >= 0:
                turned = insert(graph, aten.flip.default, insert(graph, aten.transpose.int, weight, 0, 1), [2, 3])
                geometry = ([1, 1], reach, dilation, False, [0, 0], 1)
                _replace(items.pop(0), insert(graph, aten.convolution.default, gradient, turned, None, *geometry))
    if items:
        node.args = (*node.args[:10], [i in items for i in range(3)])
    else:
        graph.erase_node(node)


def _batch_norm_gradients(node: Node) -> None:
    """Only those that are used."""
    used = {user.args[1] for user in node.users}
    node.args = (*node.args[:9], [i in used for i in range(3)])


def _alias(node: Node) -> None:
    """Another name for an intermediate value; of an input it must stay, since `detach` may be returned."""
    if node.args[0].op != "placeholder":
        _replace(node, node.args[0])


_REWRITES: dict[Any, Callable[[Node], None]] = {
    aten.native_batch_norm.default: _batch_norm_in_eval,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.rrelu_with_noise.default: _rrelu_in_eval,
    aten.max_pool2d_with_indices.default: _pool_without_indices,
    aten.convolution_backward.default: _convolution_gradients,
    aten.native_batch_norm_backward.default: _batch_norm_gradients,
    aten.alias.default: _alias,
    aten.detach.default: _alias,
}
