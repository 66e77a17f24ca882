"""A model and its inputs -> `Program`, by tracing on fake tensors. Nothing of the live model is touched."""

from __future__ import annotations

import copy
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from fuser.program import Input, Program, blanks, takes_gradients, trace
from fuser.state import IDENTITY, Captured, Observed, key, observe, restore
from fuser.torch_private import norm_decompositions, transform_level


class CaptureError(Exception):
    """The model can't be traced; the message says why, for the report."""


def capture(
    model: nn.Module | Callable, args: tuple, kwargs: dict, captured: Sequence[Captured], derivatives: bool = False
) -> Program:
    """Trace `model(*args, **kwargs)`.

    `captured` are the model's own tensors as `fuser.state.observe` found them; they become the first inputs, the
    tensors among the arguments (tuples, lists and dicts are walked in order) the others. The trace is specialised to
    their shapes, strides and dtypes, and to every other argument's value. With `derivatives` the program may be
    differentiated: what the model computes under `no_grad` is detached in the graph.

    Raises `CaptureError` when the model can't be traced: control flow that depends on data, an operation without a
    fake implementation, Python state that changes during the call, a write to an argument.
    """
    arguments = flat_tensors((args, kwargs))
    own = [c.tensor for c in captured]
    inputs = tuple(Input(c.name, True, c.weight, not c.buffer) for c in captured) + tuple(
        Input(f"arg{i}", False, isinstance(t, nn.Parameter)) for i, t in enumerate(arguments)
    )
    run, finish = _replayer(model, captured)
    grad_mode = derivatives or torch.is_grad_enabled()
    watched = any(t.requires_grad for t in (*own, *arguments))
    structure: list[Any] = []

    def flat_call(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(flat[len(own) :])
        new_args, new_kwargs = replace_tensors((args, kwargs), lambda _: next(given))
        results: list[torch.Tensor] = []
        outline = _outline((new_args, new_kwargs))
        with torch.set_grad_enabled(grad_mode), _Watch(derivatives, watched):
            result = run(flat[: len(own)], new_args, new_kwargs)
        if _outline((new_args, new_kwargs)) != outline:
            raise CaptureError("it changes a list or dictionary among its arguments")
        if not {id(c) for c in _containers(result)}.isdisjoint(id(c) for c in _containers((new_args, new_kwargs))):
            raise CaptureError("it returns a list or dictionary that it was given")
        structure.append(_flatten_result(result, results))
        return tuple(results)

    log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints what is raised as well
    quiet, log.disabled = log.disabled, True
    try:
        examples = blanks([*own, *arguments])
        module = trace(flat_call, examples)
        if takes_gradients(module):
            # The model differentiates something itself; then all of it must be differentiable without limit.
            structure.clear()
            module = trace(flat_call, examples, norm_decompositions())
    except Exception as error:
        raise CaptureError(_reason(error)) from error
    finally:
        log.disabled = quiet
    finish()
    _functional_metadata(module)
    program = Program(_constants_to_inputs(module, captured), inputs, structure[-1])
    _refuse_writes_to_arguments(program)
    _refuse_changed_results(program)
    _refuse_draws_in_memory_order(program)
    return program


def flat_tensors(nested: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in order, each mention counted."""
    found: list[torch.Tensor] = []
    replace_tensors(nested, lambda t: found.append(t) or t)
    return found


def replace_tensors(nested: Any, replacement: Callable[[torch.Tensor], Any]) -> Any:
    """`nested` with every tensor replaced, visited in the order of `flat_tensors`."""
    if isinstance(nested, torch.Tensor):
        return replacement(nested)
    if isinstance(nested, tuple):
        children = [replace_tensors(v, replacement) for v in nested]
        return type(nested)(*children) if hasattr(nested, "_fields") else tuple(children)
    if type(nested) is list:
        return [replace_tensors(v, replacement) for v in nested]
    if type(nested) in (dict, OrderedDict):
        return type(nested)((k, replace_tensors(v, replacement)) for k, v in nested.items())
    return nested


def _replayer(model: nn.Module | Callable, captured: Sequence[Captured]) -> tuple[Callable, Callable]:
    """A function (own tensors, args, kwargs) -> result that runs the model, and a check to make afterwards.

    A module is replayed on a copy that shares its tensors, so that tracing never changes the live one; a function
    reaches its tensors by itself, and the graph holds them by reference until `_constants_to_inputs`.
    """
    if not isinstance(model, nn.Module):
        before = observe(model)

        def call(own: Sequence[torch.Tensor], args: tuple, kwargs: dict) -> Any:
            try:
                return model(*args, **kwargs)
            finally:
                changed = restore(before)
                if changed:
                    raise CaptureError("calling the function changes Python state that it depends on")

        def unchanged() -> None:
            if key(observe(model)) != key(before):
                raise CaptureError("calling the function changes Python state that it depends on")

        return call, unchanged
    try:
        with _ShareTensors():
            twin = copy.deepcopy(model, {id(c.tensor): c.tensor for c in captured})
    except Exception as error:
        raise CaptureError(f"the module can't be copied for tracing: {error}") from error
    places = _places(twin, captured)
    seen = observe(twin)
    before = key(seen)
    originals = [(holder, name, holder[name]) for holder, name, _ in places]
    tensors, containers = _identities(seen)
    replaced: list[str] = []

    def run(own: Sequence[torch.Tensor], args: tuple, kwargs: dict) -> Any:
        for holder, name, index in places:
            holder[name] = own[index]
        try:
            return twin.forward(*args, **kwargs)
        finally:
            for holder, name, index in places:
                if holder.get(name) is not own[index]:
                    replaced.append(name)
            for holder, name, value in originals:
                holder[name] = value

    def same_state() -> None:
        now = observe(twin)
        same = _without_identity(key(now)) == _without_identity(before) and _identities(now) == (tensors, containers)
        if replaced or not same:
            raise CaptureError("calling the module changes Python attributes that it depends on")

    return run, same_state


def _identities(seen: Observed) -> tuple[list[int], list[int]]:
    """Which tensors and which containers a state is made of."""
    return [id(c.tensor) for c in seen.captured], [id(guard[1]) for guard in seen.guards]


def _without_identity(fingerprint: tuple) -> list:
    """What a call may not change: everything but the identity of objects that are compared by identity alone."""
    return [part for part in fingerprint if part[0] is not IDENTITY]


def _places(twin: nn.Module, captured: Sequence[Captured]) -> list[tuple[dict, str, int]]:
    """Every dictionary entry of the twin that holds a captured tensor: (dictionary, name, index of the tensor)."""
    index = {id(c.tensor): i for i, c in enumerate(captured)}
    found = []
    for module in twin.modules():
        for holder in (module._parameters, module._buffers, module.__dict__):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor) and id(value) in index:
                    found.append((holder, name, index[id(value)]))
    return found


class _ShareTensors(TorchFunctionMode):
    """Makes `deepcopy` keep tensors as they are."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return args[0]
        return func(*args, **(kwargs or {}))


class _Watch(TorchFunctionMode):
    """Makes visible in the graph what autograd would see and a trace does not; refuses what can't be."""

    def __init__(self, derivatives: bool, watched: bool) -> None:
        super().__init__()
        self.derivatives, self.grad_mode, self.level = derivatives, torch.is_grad_enabled(), transform_level()
        # Some tensor requires a gradient although none is wanted: the model may look, or want one after all.
        self.watched = watched and not derivatives

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        asker = sys._getframe(1).f_globals.get("__name__", "")
        if func in _AUTOGRAD_STATE and (self.derivatives or self.watched) and not asker.startswith("torch._functorch"):
            raise CaptureError(f"it asks for {_AUTOGRAD_STATE[func]} of a tensor")
        inside = transform_level() > self.level  # there grad mode is the transform's own
        if self.watched and not self.grad_mode and torch.is_grad_enabled() and not inside:
            raise CaptureError("it computes with gradients although they are switched off where it is called")
        if kwargs and kwargs.get("requires_grad"):
            raise CaptureError("it makes a tensor that requires a gradient")
        if func == torch.Tensor.data.__set__:
            raise CaptureError("it assigns to a tensor's data")
        result = func(*args, **(kwargs or {}))
        if func == torch.Tensor.data.__get__:
            return result.detach()
        if self.derivatives and not torch.is_grad_enabled():
            if getattr(func, "__name__", "").endswith("_") and not getattr(func, "__name__", "").endswith("__"):
                raise CaptureError("it writes in place under no_grad")
            return replace_tensors(result, lambda t: t.detach() if t.is_floating_point() else t)
        return result


_AUTOGRAD_STATE = {
    torch.Tensor.requires_grad.__get__: "requires_grad",
    torch.Tensor.requires_grad.__set__: "requires_grad",
    torch.Tensor.requires_grad_: "requires_grad",
    torch.Tensor.grad_fn.__get__: "grad_fn",
    torch.Tensor.is_leaf.__get__: "is_leaf",
    torch.Tensor.grad.__get__: "grad",
}


def _containers(nested: Any) -> list:
    """The lists and dictionaries in nested tuples, lists and dictionaries."""
    found = [nested] if isinstance(nested, (list, dict)) else []
    if isinstance(nested, (tuple, list, dict)):
        for child in nested.values() if isinstance(nested, dict) else nested:
            found += _containers(child)
    return found


def _outline(nested: Any) -> Any:
    """The structure of nested tuples, lists and dictionaries, and which objects it holds."""
    if isinstance(nested, dict):
        return [(k, _outline(v)) for k, v in nested.items()]
    return [_outline(v) for v in nested] if isinstance(nested, (tuple, list)) else id(nested)


def rebuild(structure: tuple, tensors: Sequence[torch.Tensor]) -> Any:
    """A result from its structure (see `Program.structure`) and its flat tensors."""
    kind, content = structure[:2]
    if kind == "tensor":
        return tensors[content]
    if kind == "const":
        return content
    if kind == "dict":
        return {k: rebuild(child, tensors) for k, child in content}
    children = [rebuild(child, tensors) for child in (structure[2] if kind == "call" else content)]
    return content(*children) if kind == "call" else tuple(children) if kind == "tuple" else children


def _flatten_result(result: Any, tensors: list[torch.Tensor]) -> tuple:
    """The structure of a result (see `Program.structure`); its tensors are appended in order."""
    if isinstance(result, torch.Tensor):
        tensors.append(result)
        return ("tensor", len(tensors) - 1)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return ("call", type(result), [_flatten_result(v, tensors) for v in result])
    if type(result) in (tuple, list):
        return (type(result).__name__, [_flatten_result(v, tensors) for v in result])
    if type(result) is dict:
        return ("dict", [(k, _flatten_result(v, tensors)) for k, v in result.items()])
    if isinstance(result, (OrderedDict, torch.Size)) or type(result).__module__ == "torch.return_types":
        children = [_flatten_result(v, tensors) for v in (result.values() if isinstance(result, dict) else result)]
        make = type(result)
        if isinstance(result, OrderedDict):
            keys = tuple(result)
            return ("call", lambda *values: OrderedDict(zip(keys, values)), children)
        return ("call", lambda *values: make(values), children)
    if result is None or isinstance(result, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return ("const", result)
    raise CaptureError(
        f"the result holds a {type(result).__name__}; tensors, numbers, strings, None and nested "
        "tuples, lists and dicts of them can be returned"
    )


def _constants_to_inputs(module: GraphModule, captured: Sequence[Captured]) -> GraphModule:
    """Turn `get_attr` nodes that hold a captured tensor into uses of its placeholder."""
    index = {id(c.tensor): i for i, c in enumerate(captured)}
    placeholders = module.graph.find_nodes(op="placeholder")
    for node in module.graph.find_nodes(op="get_attr"):
        tensor = getattr(module, node.target)
        if id(tensor) in index:
            node.replace_all_uses_with(placeholders[index[id(tensor)]])
            module.graph.erase_node(node)
        elif any(user.target is not torch.ops.aten.lift_fresh_copy.default for user in node.users):
            # Not made during the call (those are copied first), so it lives somewhere that no guard watches.
            raise CaptureError(f"it uses a tensor ({tuple(tensor.shape)}) held where fuser can't follow its changes")
    module.recompile()
    return module


def _functional_metadata(module: GraphModule) -> None:
    """`squeeze_` and its kind only change shapes; of an intermediate value that is the same as the plain view."""
    for node in module.graph.nodes:
        plain = _METADATA_WRITES.get(node.target)
        if plain is not None and node.args[0].op != "placeholder":
            node.target = plain
    module.recompile()


aten = torch.ops.aten
_METADATA_WRITES = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
}


def _refuse_writes_to_arguments(program: Program) -> None:
    names = {node: given for node, given in zip(program.placeholders, program.inputs)}
    for node in program.graph_module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for value, argument in zip(node.args, node.target._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(value, Node):
                continue
            given = names.get(value)
            if given is None and node.target is torch.ops.aten.rrelu_with_noise.default:
                continue  # its noise is a temporary that nothing else reads
            if given is None or not given.captured:
                what = f"argument {given.name}" if given else value.name
                raise CaptureError(f"the model writes to its {what} in place ({node.target})")
            if node.target is not torch.ops.aten.copy_.default:
                raise CaptureError(f"the function writes to {given.name} in place ({node.target})")


def _refuse_changed_results(program: Program) -> None:
    """State that is changed and returned must be the very tensor; state must keep its shape."""
    for node in program.graph_module.graph.nodes:
        if str(node.target).split(".")[:2] in (["aten", "resize"], ["aten", "resize_"], ["aten", "set_"]):
            raise CaptureError("it resizes a tensor")
    values = {value for _, value in program.writes}
    for target, value in program.writes:
        if target.meta["val"].shape != value.meta["val"].shape:
            raise CaptureError("it changes the shape of its state")
    for result in program.results:
        while isinstance(result, Node) and result.op == "call_function" and result not in values:
            alias = isinstance(result.target, torch._ops.OpOverload) and result.target._schema.arguments[:1]
            if not alias or alias[0].alias_info is None or not isinstance(result.args[0], Node):
                break
            result = result.args[0]
        if result in values:
            raise CaptureError("it returns state that it has changed")


def _refuse_draws_in_memory_order(program: Program) -> None:
    """Eager fills a random tensor in the order of its memory, of which a trace of dropout keeps no trace."""
    drawn: set[Node] = set()
    for node in program.graph_module.graph.nodes:
        if node.target is aten.bernoulli.p:
            drawn.add(node)
        elif node.op == "call_function" and any(n in drawn for n in node.all_input_nodes):
            values = [n.meta["val"] for n in node.all_input_nodes if n not in drawn]
            if any(isinstance(v, torch.Tensor) and not v.is_contiguous() for v in values):
                raise CaptureError("it draws random numbers for a tensor that is not contiguous")
            if node.target is not aten.mul.Tensor:
                drawn.add(node)  # scaled, not yet applied


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
