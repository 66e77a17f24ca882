"""`optimize`: a model that looks and behaves like the original, and runs compiled plans where it can."""

from __future__ import annotations

import copy
import functools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fuser import report
from fuser.capture import CaptureError, capture, flat_tensors, rebuild, replace_tensors
from fuser.codegen.lowering import LoweringError
from fuser.differentiable import Compiler, Differentiable, FuserWarning
from fuser.passes.partition import not_one_node
from fuser.program import updates_statistics
from fuser.runtime import build as runtime_build
from fuser.state import Observed, key, observe
from fuser.torch_private import active_mode, active_transform, is_batched

MODES = ("default",)
_CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Signatures kept per state of the model, and states (training or not, Python attributes) kept per model.
MOST_SIGNATURES, MOST_STATES = 512, 32


def optimize(model: Any, *, mode: str = "default") -> Any:
    """Return `model` compiled: the same kind of thing, with the same results.

    `model` is an `nn.Module` (a `GraphModule` too) or a function of tensors; arguments and results may nest tuples,
    lists and dicts. An optimised module shares the original's parameters, buffers, attributes and hooks: it is
    another view of the very same state. The first call with a new signature (shapes, dtypes, strides, grad mode,
    training flags, ...) compiles; what can't be compiled runs eagerly, with the reason in `.report()`.

    Gradients of any order are compiled as well: through `backward` and `torch.autograd.grad`, in forward mode, and
    inside the transforms of `torch.func`. A derivative is traced and compiled when it is first needed.

    Raises `TypeError` for anything that is not a module or a function, `ValueError` for an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
    if isinstance(model, (OptimizedModule, torch.jit.ScriptModule)) or hasattr(model, "_fuser_engine"):
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError("a ScriptModule has no Python to trace; optimise the module that it was scripted from")
        return model
    if isinstance(model, nn.Module):
        return _optimized_module(model, mode)
    if isinstance(model, type) or not callable(model):
        raise TypeError(f"optimize takes an nn.Module or a function of tensors, got {_kind(model)}")
    return _optimized_function(model, mode)


class OptimizedModule:
    """Mixed into the class of every optimised module, ahead of the original's own class."""

    __slots__ = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fuser_engine.call(*args, **kwargs)

    def report(self) -> report.Report:
        """What was fused, what was not and why, so far."""
        return self._fuser_engine.report

    def __deepcopy__(self, memo: dict) -> Any:
        return optimize(copy.deepcopy(self._fuser_original, memo), mode=self._fuser_engine.mode)

    def __copy__(self) -> Any:
        return optimize(copy.copy(self._fuser_original), mode=self._fuser_engine.mode)

    def __reduce_ex__(self, protocol: int) -> tuple:
        return _restore, (self._fuser_original, self._fuser_engine.mode)


def _restore(model: nn.Module, mode: str) -> Any:
    return optimize(model, mode=mode)


def _optimized_module(model: nn.Module, mode: str) -> nn.Module:
    """An object of a subclass of the model's class that shares its `__dict__`, so nothing can come apart."""
    cls = _subclass(type(model))
    optimized = cls.__new__(cls) if cls.__new__ is object.__new__ else object.__new__(cls)
    object.__setattr__(optimized, "__dict__", model.__dict__)
    engine = _Engine(model, mode)
    object.__setattr__(optimized, "_fuser_original", model)
    object.__setattr__(optimized, "_fuser_engine", engine)
    object.__setattr__(optimized, "_fuser_dispatcher", engine.dispatcher)
    return optimized


def _subclass(cls: type) -> type:
    # Every GraphModule has a class of its own, which must not outlive it here.
    return _make_subclass(cls) if issubclass(cls, torch.fx.GraphModule) else _cached_subclass(cls)


def _make_subclass(cls: type) -> type:
    slots = ("_fuser_original", "_fuser_engine", "_fuser_dispatcher")
    members = {"__slots__": slots, "__module__": cls.__module__, "__doc__": cls.__doc__}
    if cls.__call__ is not nn.Module.__call__ and not issubclass(cls, torch.fx.GraphModule):
        members["__call__"] = cls.__call__  # the author's own way to call; it comes to `forward` in the end
    return type(f"Optimized{cls.__name__}", (OptimizedModule, cls), members)


_cached_subclass = functools.cache(_make_subclass)


def _optimized_function(function: Callable, mode: str) -> Callable:
    engine = _Engine(function, mode)
    call = engine.dispatcher or engine.call

    @functools.wraps(function)
    def optimized(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    optimized.report = lambda: engine.report
    optimized._fuser_engine = engine
    return optimized


_engines: weakref.WeakSet[_Engine] = weakref.WeakSet()


def _after_fork() -> None:
    """Another thread may have held these locks when the process forked; it does not exist in the child."""
    for engine in list(_engines):
        engine.lock, engine.busy = threading.RLock(), threading.local()
        if engine.native is not None:
            engine.compiler.lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


class _Engine:
    """Compiles and remembers: state of the model -> signature -> plan. One per optimised model."""

    def __init__(self, model: nn.Module | Callable, mode: str) -> None:
        _engines.add(self)
        self.model, self.mode = model, mode
        self.report = report.Report(_kind(model))
        self.lock = threading.RLock()
        self.busy = threading.local()
        self.tables: dict[tuple, Any] = {}
        self.native = _native()
        self.dispatcher = None
        if self.native is not None:
            self.compiler = Compiler(self.native, self.report)
            self.transformed: dict[Any, tuple[Differentiable, Any]] = {}
            self.dispatcher = self.native.Dispatcher(self.slow, self.uncompiled, _hooks_of(model))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self.dispatcher is None:
            self.note_eager("every call", "the native runtime is not available (see `fuser doctor`)", warn=False)
            return self.eager(*args, **kwargs)
        return self.dispatcher(*args, **kwargs)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs) if isinstance(self.model, nn.Module) else self.model(*args, **kwargs)

    def uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        """A call that no plan serves: through `torch.func` and forward mode piece by piece, anything else eagerly."""
        if active_transform() is None or active_mode() is not None or getattr(self.busy, "active", False):
            return self.eager(*args, **kwargs)
        self.busy.active = True
        try:
            with self.compiler.lock:
                found = self.differentiable(args, kwargs)
        finally:
            self.busy.active = False
        if found is None:
            return self.eager(*args, **kwargs)
        function, structure, flat = found
        return rebuild(structure, function(*flat))

    def differentiable(self, args: tuple, kwargs: dict) -> tuple[Differentiable, Any, list[torch.Tensor]] | None:
        """The model as a `Differentiable` for arguments like these, its result's structure, and its flat inputs."""
        seen = observe(self.model)
        own = [c.tensor for c in seen.captured]
        flat = [*own, *flat_tensors((args, kwargs))]
        what = f"{_describe(args, kwargs)} inside a transform"
        reason = seen.unsupported or next((r for r in map(_unfit, flat) if r), None)
        if reason is None:
            outline = replace_tensors((args, kwargs), lambda t: _Outline((t.shape, t.stride(), t.dtype)))
            shapes = tuple((t.shape, t.stride(), t.dtype) for t in own)
            modes = (torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
            signature = (key(seen), shapes, repr(outline), self.training_flags(), modes)
            try:
                if signature not in self.transformed:
                    program = capture(self.model, args, kwargs, seen.captured, derivatives=True)
                    if program.writes or any(map(updates_statistics, program.graph_module.graph.nodes)):
                        raise CaptureError("it writes to its state, which a transform must see")
                    if program.draws:
                        raise CaptureError("it draws random numbers, which a transform may treat in several ways")
                    reason = not_one_node(program)
                    if reason:
                        raise CaptureError(reason)
                    self.transformed[signature] = Differentiable(program, self.compiler, what), program.structure
                    while len(self.transformed) > MOST_SIGNATURES:
                        self.transformed.pop(next(iter(self.transformed)))
                function, structure = self.transformed[signature]
                return function, structure, flat
            except (CaptureError, LoweringError) as error:
                reason = str(error)
        self.note_eager(what, reason)
        return None

    def training_flags(self) -> tuple[bool, ...]:
        if not isinstance(self.model, nn.Module):
            return ()
        return tuple(m.training for m in self.model.modules())

    def slow(self, args: tuple, kwargs: dict) -> Any:
        """A call that the fast path can't serve: look at the model anew, compile if need be, and call again."""
        if getattr(self.busy, "active", False):
            if not getattr(self.busy, "tracing", False):
                self.note_eager("every call", "its Python state differs each time it is looked at")
            return self.eager(*args, **kwargs)
        self.busy.active = self.busy.tracing = True
        try:
            with self.lock:
                refusal = self.prepare(args, kwargs)
        finally:
            self.busy.active = self.busy.tracing = False
        if refusal is None:
            self.busy.active = True
            try:
                return self.dispatcher(*args, **kwargs)
            finally:
                self.busy.active = False
        result = self.uncompiled(*args, **kwargs)
        # Where eager raises, nothing was wrong with the compilation.
        if refusal.table is not None:
            refusal.table.add(refusal.signature, refusal.kept, None)
        if refusal.reason:
            self.note_eager(refusal.what, refusal.reason, refusal.warn)
        return result

    def prepare(self, args: tuple, kwargs: dict) -> _Refusal | None:
        """Bind the model's present state and make sure that the signature has an entry, or say why it has none."""
        seen = observe(self.model)
        if seen.unsupported:
            return _Refusal("every call", seen.unsupported)
        table = self.table_for(seen)
        self.dispatcher.bind(seen.guards, [c.tensor for c in seen.captured], table)
        what = _describe(args, kwargs)
        try:
            signature, tensors, kept = self.dispatcher.signature(args, kwargs)
        except self.native.Unsupported as error:
            return _Refusal(what, str(error))
        if signature in table:
            return None
        if active_transform() is not None and active_mode() is None:
            return _Refusal(what, "")  # `uncompiled` takes it from here
        reason = refusal([c.tensor for c in seen.captured], tensors)
        if reason is not None:
            return _Refusal(what, reason, False, table, signature, kept)
        try:
            self.compile(table, signature, kept, what, args, kwargs, seen)
        except (CaptureError, LoweringError) as error:
            return _Refusal(what, str(error), True, table, signature, kept)
        except Exception as error:
            if os.environ.get("FUSER_DEBUG"):
                raise
            reason = f"compiling it failed, which is a defect of fuser ({type(error).__name__}: {error})"
            return _Refusal(what, reason, True, table, signature, kept)
        return None

    def table_for(self, seen: Observed) -> Any:
        """The plans of the model in this state; states beyond `MOST_STATES` are forgotten, oldest first."""
        fingerprint = key(seen)
        entry = self.tables.pop(fingerprint, None)
        if entry is None:
            entry = (self.native.Table(MOST_SIGNATURES), seen.keep_alive)
            while len(self.tables) >= MOST_STATES:
                self.tables.pop(next(iter(self.tables)))
        self.tables[fingerprint] = entry
        return entry[0]

    def compile(
        self, table: Any, signature: bytes, kept: list, what: str, args: tuple, kwargs: dict, seen: Observed
    ) -> None:
        start = time.perf_counter()
        flat = [*(c.tensor for c in seen.captured), *flat_tensors((args, kwargs))]
        derivatives = torch.is_grad_enabled() and any(t.requires_grad for t in flat)
        program = capture(self.model, args, kwargs, seen.captured, derivatives=derivatives)
        seconds = {"capture": time.perf_counter() - start}
        if derivatives:
            reason = not_one_node(program)
            if reason:
                raise CaptureError(reason)
            variables = [i for i in program.variables() if flat[i].requires_grad]
            plan = self.compiler.function(program, variables, what, seconds)
        else:
            plan = self.compiler.plan(program, what, seconds).native
        table.add(signature, kept, plan, program.structure)

    def note_eager(self, signature: str, reason: str, warn: bool = True) -> None:
        self.report.add_eager(report.EagerEntry(signature, reason))
        if warn:
            self.compiler.warn(f"{self.report.model} runs eagerly: {reason}")


@dataclass
class _Refusal:
    """Why a call runs eagerly; with `table`, so do all others of that signature."""

    what: str
    reason: str
    warn: bool = True
    table: Any = None
    signature: bytes = b""
    kept: Any = None


def refusal(captured: list[torch.Tensor], arguments: list[torch.Tensor]) -> str | None:
    """Why a call with these tensors must run eagerly, or None."""
    return next((r for r in map(_unfit, [*captured, *arguments]) if r), None) or active_transform() or active_mode()


def _unfit(tensor: torch.Tensor) -> str | None:
    """Why no plan takes this tensor, or None."""
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return f"a tensor of type {type(tensor).__name__}"
    if is_batched(tensor):
        return "a batched tensor of torch.autograd's own vmap"
    if tensor.device.type != "cpu":
        return f"a tensor on {tensor.device}; only the CPU is supported so far"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return "a quantised, conjugated or negated tensor"
    return None


class _Outline(tuple):
    """What a tensor among the arguments looks like, in place of the tensor."""


def _hooks_of(model: Any) -> tuple[dict, ...]:
    """The dictionaries that must be empty for a module's call to go straight to the dispatcher."""
    if not isinstance(model, nn.Module):
        return ()
    own = [v for k, v in model.__dict__.items() if k in _CALL_HOOKS]
    return (*own, *(getattr(nn.modules.module, f"_global{k}") for k in _CALL_HOOKS))


@functools.cache
def _native() -> Any:
    """The native runtime, or None with one warning that says what is lost and how to get it."""
    try:
        native = runtime_build.load()
    except runtime_build.RuntimeUnavailable as error:
        warnings.warn(f"everything runs eagerly: {error}", FuserWarning, stacklevel=5)
        return None
    native.install_call(OptimizedModule, "_fuser_dispatcher", nn.Module.__call__)
    return native


def _describe(args: tuple, kwargs: dict) -> str:
    """A signature for people: dtypes and shapes of the tensors."""
    tensors = flat_tensors((args, kwargs))
    names = [f"{str(t.dtype).removeprefix('torch.')}[{'x'.join(map(str, t.shape))}]" for t in tensors]
    return ", ".join(names) or "no tensors"


def _kind(model: Any) -> str:
    if isinstance(model, nn.Module):
        return type(model).__name__
    return getattr(model, "__qualname__", type(model).__name__)
