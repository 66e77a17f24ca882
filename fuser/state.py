"""What a model's behaviour depends on besides its arguments: its tensors, and the Python state that tracing bakes in.

`observe(model)` walks it once and returns three views of it: the tensors (inputs of the program), a fingerprint by
value (the key under which a program is kept), and guards by identity (what the fast path compares on every call).
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_SCALARS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout)
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
# Hooks of these kinds change what a call computes; those on the optimised module itself run outside of it.
_HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = tuple(getattr(nn.modules.module, f"_global{name}") for name in _HOOK_DICTS)
_MAX_DEPTH = 5
# Code that does not change while a program runs.
_LIBRARIES = frozenset({"torch", "numpy", "fuser"} | sys.stdlib_module_names) - {"__main__"}
# What a part of the fingerprint starts with if it only tells which object something is.
IDENTITY = object()
_ABSENT = object()


@dataclass
class Captured:
    """A tensor of the model: where it is found first, whether its content rarely changes, whether it is a buffer."""

    name: str
    tensor: torch.Tensor
    weight: bool
    buffer: bool = False


@dataclass
class Observed:
    """The state of a model at one moment. `unsupported` says why it can't be guarded, if so."""

    captured: list[Captured] = field(default_factory=list)
    fingerprint: list[Any] = field(default_factory=list)
    guards: list[tuple] = field(default_factory=list)
    unsupported: str | None = None
    keep_alive: list[Any] = field(default_factory=list)


def observe(model: nn.Module | Callable) -> Observed:
    """Walk `model` (a module, a function, a bound method or a `functools.partial`)."""
    walk = _Walk()
    if isinstance(model, nn.Module):
        for hooks in _GLOBAL_HOOKS:
            walk.seen.guards.append(("empty", hooks))
            if hooks and any(model.children()):
                walk.unsupported("a global forward hook")
        walk.module("", model, is_root=True)
    else:
        walk.function("", model)
    return walk.seen


class _Walk:
    def __init__(self) -> None:
        self.seen = Observed()
        self.visited: dict[int, int] = {}
        self.tensors: dict[int, int] = {}
        self.variables: set[tuple[int, str]] = set()

    def first_visit(self, thing: Any) -> bool:
        """True the first time; later the fingerprint notes which earlier thing this is."""
        if id(thing) in self.visited:
            self.seen.fingerprint.append(("seen", self.visited[id(thing)]))
            return False
        self.visited[id(thing)] = len(self.visited)
        self.seen.keep_alive.append(thing)
        return True

    def guard_items(self, container: dict | list) -> None:
        keys = tuple(container) if isinstance(container, dict) else None
        values = tuple(container.values()) if isinstance(container, dict) else tuple(container)
        self.seen.guards.append(("items", container, keys, values))

    def module(self, path: str, module: nn.Module, is_root: bool = False) -> None:
        self.seen.fingerprint.append((path, type(module)))
        if not self.first_visit(module):
            return
        state = module.__dict__
        if isinstance(module, torch.fx.GraphModule):
            # Its behaviour is its code (asking for it finishes a recompilation that FX put off).
            self.seen.fingerprint.append(("code", module.code, module.training))
        self.guard_items(state)
        for name in _MODULE_DICTS:
            self.guard_items(state[name])
        self.class_of(path, type(module))
        for name in _HOOK_DICTS:
            if is_root:
                continue
            self.seen.guards.append(("empty", state[name]))
            if state[name]:
                self.unsupported(f"a forward hook on submodule {path!r}")
        for name, tensor in state["_parameters"].items():
            self.tensor(_join(path, name), tensor, weight=True)
        for name, tensor in state["_buffers"].items():
            self.tensor(_join(path, name), tensor, weight=True, buffer=True)
        for name, value in () if isinstance(module, torch.fx.GraphModule) else state.items():
            if name not in _MODULE_DICTS and not name.endswith("_hooks") and "_hooks_" not in name:
                self.value(_join(path, name), value, 0)
        for name, child in state["_modules"].items():
            if child is not None:
                self.module(_join(path, name), child)

    def class_of(self, path: str, cls: type) -> None:
        """The methods of a module's class, with what they reach, and the plain attributes of the class."""
        for base in cls.__mro__:
            if _is_library(base.__module__) or not self.first_visit(base):
                continue
            for name, value in list(vars(base).items()):
                if name == "forward":
                    self.seen.guards.append(("attribute", base, name, value))
                if isinstance(value, (staticmethod, classmethod)):
                    value = value.__func__
                if isinstance(value, types.FunctionType):
                    self.function(_join(path, name), value, 1)
                elif not name.startswith("__") and isinstance(value, (*_SCALARS, torch.Tensor, list, dict, tuple)):
                    self.seen.guards.append(("attribute", base, name, value))
                    self.value(_join(path, name), value, 1)

    def tensor(self, name: str, tensor: torch.Tensor | None, weight: bool, buffer: bool = False) -> None:
        if tensor is None:
            self.seen.fingerprint.append((name, None))
            return
        index = self.tensors.setdefault(id(tensor), len(self.tensors))
        self.seen.fingerprint.append((name, "tensor", index))
        if index == len(self.seen.captured):
            self.seen.captured.append(Captured(name, tensor, weight, buffer))

    def value(self, name: str, value: Any, depth: int) -> None:
        """A Python attribute, element, global or closed-over value."""
        note = self.seen.fingerprint.append
        if isinstance(value, _SCALARS):
            note((name, type(value), repr(value) if isinstance(value, float) else value))
        elif isinstance(value, torch.Tensor):
            self.tensor(name, value, weight=isinstance(value, nn.Parameter))
        elif isinstance(value, nn.Module):
            self.module(name, value)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            note((name, "function"))
            self.function(name, value, depth + 1)
        elif isinstance(value, (type, types.BuiltinFunctionType, types.ModuleType)) or depth >= _MAX_DEPTH:
            self.identity(name, value)
        elif isinstance(value, deque) or type(value).__module__.split(".")[0] == "numpy" and hasattr(value, "ctypes"):
            self.unsupported(f"{name or 'it'} is a {type(value).__name__}, whose changes can't be watched")
        elif isinstance(value, (list, tuple, dict, OrderedDict)):
            self.container(name, value, depth)
        elif type(value).__module__.split(".")[0] in ("torch", "builtins") or not hasattr(value, "__dict__"):
            self.identity(name, value)
        else:
            note((name, type(value)))
            if self.first_visit(value):
                self.container(name, vars(value), depth)

    def identity(self, name: str, value: Any) -> None:
        """A value that counts by which object it is."""
        self.seen.fingerprint.append((IDENTITY, name, id(value)))
        self.seen.keep_alive.append(value)

    def container(self, name: str, value: Any, depth: int) -> None:
        self.seen.fingerprint.append((name, type(value), len(value)))
        if not self.first_visit(value):
            return
        if not isinstance(value, tuple):
            self.guard_items(value)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            self.value(f"{name}.{key}", item, depth + 1)

    def function(self, name: str, function: Any, depth: int = 0) -> None:
        """A function: its code, and what it reaches through defaults, closure, `self` and globals."""
        if isinstance(function, functools.partial):
            self.container(_join(name, "args"), function.args, depth)
            self.container(_join(name, "keywords"), function.keywords, depth)
            return self.function(name, function.func, depth)
        if isinstance(function, types.MethodType):
            self.value(_join(name, "__self__"), function.__self__, depth)
            return self.function(name, function.__func__, depth)
        if not isinstance(function, types.FunctionType):
            if callable(function) and not isinstance(function, types.BuiltinFunctionType) and depth == 0:
                self.value(_join(name, "__self__"), function, depth)
            return None
        if not self.first_visit(function) or _is_library(getattr(function, "__module__", None)) or depth >= _MAX_DEPTH:
            return None
        self.seen.fingerprint.append((name, function.__code__))
        for key, value in [*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]:
            self.value(_join(name, str(key)), value, depth + 1)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            self.seen.guards.append(("cell", cell, content))
            self.value(_join(name, variable), content, depth + 1)
        names = _names(function.__code__)
        for variable in _globals_of(function.__code__):
            if variable in function.__globals__:
                self.variable(name, function.__globals__, variable, names, depth)
        return None

    def variable(self, name: str, scope: dict, variable: str, names: set[str], depth: int) -> None:
        """A global variable; of an imported module that is no library, also the attributes that are mentioned."""
        if (id(scope), variable) in self.variables:
            return
        self.variables.add((id(scope), variable))
        value = scope[variable]
        self.seen.guards.append(("item", scope, variable, value))
        if isinstance(value, types.ModuleType):
            if not _is_library(value.__name__):
                for attribute in sorted(names):
                    if attribute in vars(value):
                        self.variable(_join(name, variable), vars(value), attribute, names, depth)
        elif value is not getattr(builtins, variable, _ABSENT):
            self.value(_join(name, variable), value, depth + 1)

    def unsupported(self, reason: str) -> None:
        self.seen.unsupported = self.seen.unsupported or reason


def restore(observed: Observed) -> bool:
    """Put back what variables, closures, lists and dictionaries held; returns whether anything had changed."""
    changed = False
    for kind, holder, *rest in observed.guards:
        if kind == "items":
            keys, values = rest
            now = list(holder.values()) if isinstance(holder, dict) else list(holder)
            same_keys = keys is None or list(holder) == list(keys)
            if same_keys and len(now) == len(values) and all(a is b for a, b in zip(now, values)):
                continue
            changed = True
            if isinstance(holder, dict):
                holder.clear()
                holder.update(zip(keys, values))
            else:
                holder[:] = values
        elif kind == "cell" and (holder.cell_contents is not rest[0]):
            holder.cell_contents, changed = rest[0], True
        elif kind == "item" and holder.get(rest[0], _ABSENT) is not rest[1]:
            holder[rest[0]], changed = rest[1], True
    return changed


def key(observed: Observed) -> tuple:
    """The fingerprint as a hashable key."""
    return tuple(_hashable(part) for part in observed.fingerprint)


def _hashable(part: Any) -> Any:
    try:
        hash(part)
    except TypeError:
        return repr(part)
    return part


@functools.lru_cache(maxsize=4096)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The global variables that the code reads, also in functions and comprehensions inside it."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(_globals_of(constant))
    return tuple(sorted(found))


def _names(code: types.CodeType) -> set[str]:
    """Every name that the code mentions, attributes too."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def _is_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in _LIBRARIES


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
