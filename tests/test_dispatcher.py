"""From a call to a plan: signatures, guards, the table of plans, results, and the fast `__call__` of modules."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
import weakref
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from native_plans import aten, const, fresh, shape, value
from torch import nn

pytest_plugins = ["native_plans"]  # the fixtures native, kernels and plan


@pytest.fixture
def dispatcher(native: Any) -> Any:
    """A dispatcher with nothing to guard, whose table is `.table` and whose other calls return what was asked for."""
    return Bound(native)


class Bound:
    def __init__(self, native: Any, guards: list = (), captured: list = (), capacity: int = 512) -> None:
        self.table = native.Table(capacity)
        self.call = native.Dispatcher(lambda args, kwargs: ("slow", args, kwargs), lambda *a, **k: ("eager", a, k))
        self.call.bind(list(guards), list(captured), self.table)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def signature(self, *args: Any, **kwargs: Any) -> bytes:
        return self.call.signature(args, kwargs)[0]

    def add(self, plan: Any, template: tuple, *args: Any, **kwargs: Any) -> None:
        signature, _, kept = self.call.signature(args, kwargs)
        self.table.add(signature, kept, plan, template)


# The dispatcher: signatures


class Shade(torch.Tensor):
    pass


Pair = namedtuple("Pair", "a b")
Other = namedtuple("Other", "a b")


def test_what_differs_has_another_signature(dispatcher: Any) -> None:
    t = torch.randn(2, 3)
    calls = [
        ((), {}),
        ((t,), {}),
        ((t, t), {}),
        (((t, t),), {}),
        (([t, t],), {}),
        (([t], t), {}),
        (([t], [t]), {}),
        ((Pair(t, t),), {}),
        ((Other(t, t),), {}),
        (({"a": t, "b": t},), {}),
        (({"b": t, "a": t},), {}),
        ((OrderedDict(a=t, b=t),), {}),
        (({0: t, 1: t},), {}),
        ((), {"x": t}),
        ((), {"y": t}),
        ((t,), {"x": t}),
        ((torch.randn(3, 2),), {}),
        ((torch.randn(3, 2).T,), {}),
        ((torch.randn(6),), {}),
        ((torch.randn(2, 3, 1),), {}),
        ((t.double(),), {}),
        ((t.int(),), {}),
        ((t.bool(),), {}),
        ((t.clone().requires_grad_(),), {}),
        ((nn.Parameter(t),), {}),
        ((nn.Parameter(t, requires_grad=False),), {}),
        ((t.to("meta"),), {}),
        ((t.to_sparse(),), {}),
        ((t.as_subclass(Shade),), {}),
        ((torch.randn(2, 3, dtype=torch.complex64),), {}),
        ((torch.randn(2, 3, dtype=torch.complex64).conj(),), {}),
        ((None,), {}),
        ((True,), {}),
        ((False,), {}),
        ((0,), {}),
        ((1,), {}),
        ((-1,), {}),
        ((2**62,), {}),
        ((0.0,), {}),
        ((-0.0,), {}),
        ((float("nan"),), {}),
        (("",), {}),
        (("sum",), {}),
        (("sum ",), {}),
        (("mean",), {}),
        ((torch.float32,), {}),
        ((torch.float64,), {}),
        ((torch.strided,), {}),
        ((torch.channels_last,), {}),
        ((torch.device("cpu"),), {}),
        ((torch.device("cpu", 0),), {}),
        ((torch.device("meta"),), {}),
        ((int,), {}),
        ((float,), {}),
        ((len,), {}),
        ((...,), {}),
    ]
    seen: dict[bytes, int] = {}
    for i, (args, kwargs) in enumerate(calls):
        signature = dispatcher.signature(*args, **kwargs)
        assert seen.setdefault(signature, i) == i, (calls[seen[signature]], args, kwargs)
        assert dispatcher.signature(*args, **kwargs) == signature


def test_what_is_alike_has_the_same_signature(dispatcher: Any) -> None:
    t = torch.randn(2, 3)
    same = dispatcher.signature(t, [1, "a"], k=torch.device("cpu"))
    assert dispatcher.signature(torch.randn(2, 3), [1, "a"], k=torch.device("cpu")) == same
    with torch.no_grad():
        needs = dispatcher.signature(t.clone().requires_grad_())
        assert dispatcher.signature(torch.randn(2, 3).requires_grad_()) == needs


def test_the_surroundings_are_part_of_the_signature(dispatcher: Any) -> None:
    t = torch.randn(2)
    contexts = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "autocast half": lambda: torch.autocast("cpu", torch.float16),
        "torch function mode": lambda: torch.device("cpu"),
        "excluded key": lambda: torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
        ),
    }
    seen = {"none": dispatcher.signature(t)}
    for name, context in contexts.items():
        with context():
            seen[name] = dispatcher.signature(t)
    torch.set_default_dtype(torch.float64)
    try:
        seen["default dtype"] = dispatcher.signature(t)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        seen["deterministic"] = dispatcher.signature(t)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(set(seen.values())) == len(seen), seen.keys()
    assert dispatcher.signature(t) == seen["none"]


def test_arguments_whose_changes_nobody_would_notice(dispatcher: Any, native: Any, plan: Any) -> None:
    class Thing:
        pass

    class Words(list):
        pass

    nested: list = []
    nested.append(nested)
    for odd in (Thing(), Words(), {1, 2}, 2**70, 1j, lambda: 0, b"x", nested, "\ud800", {"k": Thing()}):
        with pytest.raises(native.Unsupported):
            dispatcher.signature(odd)
        assert dispatcher(odd, k=1) == ("eager", (odd,), {"k": 1})


# The dispatcher: guards, tables, results


def test_misses_go_the_slow_way_and_entries_without_a_plan_run_eagerly(native: Any) -> None:
    x = torch.randn(3)
    unbound = native.Dispatcher(lambda a, k: ("slow", a, k), lambda *a, **k: ("eager", a, k))
    assert unbound(1, k=2) == ("slow", (1,), {"k": 2})
    with pytest.raises(ValueError, match="nothing is bound"):
        unbound.signature((), {})
    d = Bound(native)
    assert d(x, k="a") == ("slow", (x,), {"k": "a"})
    signature, tensors, kept = d.call.signature((x, int), {})
    assert tensors == [x] and kept == [int] and signature not in d.table and len(d.table) == 0
    d.table.add(signature, kept, None)
    assert signature in d.table and len(d.table) == 1
    assert d(x, int) == ("eager", (x, int), {})


def test_captured_tensors_come_first(native: Any, plan: Any, kernels: dict) -> None:
    w, x = torch.randn(4), torch.randn(4)
    d = Bound(native, captured=[w])
    p = plan([w, x], [fresh(4)], [("kernel", "f", kernels["multiply_add"], [0, 1, 2], [4, 3])], [2])
    d.add(p, ("tensor", 0), x)
    torch.testing.assert_close(d(x), w * x + 3)
    w.data.mul_(2)
    torch.testing.assert_close(d(x), w * x + 3)


def test_results_nest_as_told(dispatcher: Any, plan: Any, kernels: dict) -> None:
    x = torch.randn(4)
    p = plan([x], [fresh(4)], [("kernel", "f", kernels["twice"], [0, 1], [4])], [1, 0])
    leaf, given, note = ("tensor", 0), ("tensor", 1), ("const", "note")
    template = (
        "dict",
        [("a", ("tuple", [leaf, given])), (7, ("list", [note, leaf])), ("c", ("call", Pair, [given, note]))],
    )
    dispatcher.add(p, template, x)
    out = dispatcher(x)
    assert list(out) == ["a", 7, "c"] and out["a"][1] is x and out[7][0] == "note"
    assert type(out["a"]) is tuple and type(out[7]) is list and type(out["c"]) is Pair
    assert out["a"][0] is out[7][1] and out["c"] == Pair(x, "note")
    torch.testing.assert_close(out["a"][0], 2 * x)


def test_bad_templates_and_bindings(dispatcher: Any, native: Any, plan: Any) -> None:
    x = torch.randn(4)
    p = plan([x], [], [], [0])
    signature = dispatcher.signature(x)
    for template in [
        ("tensor", 1),
        ("tensor", -1),
        ("tuple", [("tensor", 3)]),
        ("heap", []),
        ("list", 3),
        ("dict", [1]),
        (),
        5,
    ]:
        with pytest.raises(ValueError):
            dispatcher.table.add(signature, [], p, template)
    with pytest.raises(ValueError, match="structure"):
        dispatcher.table.add(signature, [], p)
    with pytest.raises(TypeError, match="Plan"):
        dispatcher.table.add(signature, [], 3, ("tensor", 0))
    for guards, captured, error in [
        ([("items", 3, None, ())], [], ValueError),
        ([("items", {}, ("a",), ())], [], ValueError),
        ([("other", {})], [], ValueError),
        ([], [3], ValueError),
    ]:
        with pytest.raises(error):
            dispatcher.call.bind(guards, captured, dispatcher.table)
    with pytest.raises(TypeError, match="Table"):
        dispatcher.call.bind([], [], {})
    with pytest.raises(ValueError, match="at least one"):
        native.Table(0)
    with pytest.raises(ValueError, match="takes 1 tensors, got 2"):  # a plan that is not for this call
        dispatcher.add(p, ("tensor", 0), x, x)
        dispatcher(x, x)


def test_guards(native: Any, plan: Any) -> None:
    x, a, b = torch.randn(4), object(), object()
    items, elements, hooks, mutable = {"a": a, "b": b}, [a, b], OrderedDict(), {"k": a}

    def closure() -> Any:
        return variable

    variable = a
    guards = [
        ("items", items, ("a", "b"), (a, b)),
        ("items", elements, None, (a, b)),
        ("empty", hooks),
        ("cell", closure.__closure__[0], a),
        ("item", mutable, "k", a),
    ]
    d = Bound(native, guards)
    d.add(plan([x], [], [], [0]), ("tensor", 0), x)
    assert d(x) is x

    def differs(change: Any, undo: Any) -> None:
        change()
        assert d(x)[0] == "slow"
        undo()
        assert d(x) is x

    differs(lambda: items.update(a=b), lambda: items.update(a=a))
    differs(lambda: items.update(c=1), lambda: items.pop("c"))
    differs(lambda: elements.append(1), lambda: elements.pop())
    differs(lambda: elements.reverse(), lambda: elements.reverse())
    differs(lambda: hooks.update(h=1), lambda: hooks.clear())
    differs(lambda: mutable.update(k=b), lambda: mutable.update(k=a))
    mutable["unrelated"] = 1
    assert d(x) is x
    items["a"] = items.pop("a")  # another order
    assert d(x)[0] == "slow"
    items["b"] = items.pop("b")
    assert d(x) is x
    variable = b
    assert d(x)[0] == "slow" and closure() is b


def test_the_longest_unused_entry_goes_first(native: Any, plan: Any) -> None:
    d = Bound(native, capacity=3)
    p = plan([torch.randn(4)], [], [], [0])
    x = torch.randn(4)
    for i in range(3):
        d.add(p, ("tensor", 0), x, i)
    assert d(x, 0) is x and d(x, 0) is x and d(x, 2) is x  # entry 1 is now the oldest
    d.add(p, ("tensor", 0), x, 3)
    assert len(d.table) == 3
    assert d(x, 1)[0] == "slow"
    assert all(d(x, i) is x for i in (0, 2, 3))
    d.table.add(d.signature(x, 3), [], None)  # replaces in place
    assert len(d.table) == 3 and d(x, 3)[0] == "eager" and d(x, 0) is x


def test_an_entry_keeps_what_its_signature_names_by_address(native: Any, plan: Any) -> None:
    d = Bound(native, capacity=1)

    def local() -> tuple[type, weakref.ref]:
        cls = type("Local", (), {})
        return cls, weakref.ref(cls)

    cls, alive = local()
    x = torch.randn(2)
    d.add(plan([x], [], [], [0]), ("tensor", 0), x, cls)
    del cls
    gc.collect()
    assert alive() is not None
    d.add(plan([x], [], [], [0]), ("tensor", 0), x, 5)  # evicts it
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("what", ["same tensor", "view", "overlap", "list"])
def test_a_plan_that_writes_runs_only_where_nothing_else_shares_that_memory(
    dispatcher: Any, plan: Any, what: str
) -> None:
    """The trace took `x` and `y` for distinct: the plan may read `y` after it has written `x`."""
    data = torch.arange(9.0)
    x, y = data[:4], torch.arange(4.0)
    steps = [
        ("aten", "aten::add", "Tensor", [value(0), const(1), const(1)], [2], True),
        ("aten", "aten::copy_", "", [value(0), value(2), const(False)], [-1], False),
        ("aten", "aten::add", "Tensor", [value(2), value(1), const(1)], [3], True),
    ]
    if what == "list":  # a list of written tensors
        steps[1] = ("aten", "aten::_foreach_add_", "Scalar", [("list", [value(0)]), const(1)], [], False)
    p = plan([x, y], [aten(4), aten(4)], steps, [3])
    dispatcher.add(p, ("tensor", 0), x, y)
    if what != "list":
        torch.testing.assert_close(dispatcher(x, y), torch.arange(4.0) * 2 + 1)
    shared = {"same tensor": x, "view": x.view(4), "overlap": data[3:7], "list": x}[what]
    assert dispatcher(x, shared)[0] == "eager"
    assert dispatcher(shared, x)[0] == "eager"
    if what != "list":
        expected = data[:4] + 1 + data[4:8]  # neighbours do not overlap
        torch.testing.assert_close(dispatcher(data[:4], data[4:8]), expected)


def test_reading_the_same_memory_twice_is_no_matter(dispatcher: Any, plan: Any, kernels: dict) -> None:
    x = torch.randn(4)
    p = plan([x, x], [fresh(4)], [("kernel", "f", kernels["multiply_add"], [0, 1, 2], [4, 0])], [2])
    dispatcher.add(p, ("tensor", 0), x, x)
    torch.testing.assert_close(dispatcher(x, x), x * x)


# The fast __call__


class Mixin:
    __slots__ = ()


class Model(Mixin, nn.Linear):
    __slots__ = ("fast",)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return "forward", args, kwargs


def fast_model(native: Any, plan: Any, kernels: dict) -> tuple[nn.Module, torch.Tensor]:
    """A `Model` whose fast way doubles (128, 2) tensors, with every hook dictionary watched."""
    native.install_call(Mixin, "fast", nn.Module.__call__)
    model, x = Model(2, 2), torch.randn(128, 2)
    hooks = (model._forward_hooks, model._forward_pre_hooks)
    model.fast = native.Dispatcher(lambda a, k: ("slow", a, k), lambda *a, **k: ("eager", a, k), hooks)
    table = native.Table()
    state = model.__dict__
    guards = [("items", state, tuple(state), tuple(state.values()))]
    guards.append(("items", model._parameters, ("weight", "bias"), (model.weight, model.bias)))
    captured = [model.weight, model.bias]
    model.fast.bind(guards, captured, table)
    p = plan([*captured, x], [fresh(128, 2)], [("kernel", "f", kernels["twice"], [2, 3], [256])], [3])
    signature, _, kept = model.fast.signature((x,), {})
    table.add(signature, kept, p, ("tensor", 0))
    return model, x


@pytest.fixture
def restore_call(native: Any) -> Any:
    """`install_call` serves one class at a time: hand it back to fuser's own."""
    yield
    from fuser.optimized import OptimizedModule

    native.install_call(OptimizedModule, "_fuser_dispatcher", nn.Module.__call__)


@pytest.mark.usefixtures("restore_call")
def test_module_calls_take_the_fast_way_unless_hooked(native: Any, plan: Any, kernels: dict) -> None:
    model, x = fast_model(native, plan, kernels)
    torch.testing.assert_close(model(x), 2 * x)
    assert model(x, k=1) == ("slow", (x,), {"k": 1})
    handle = model.register_forward_hook(lambda module, args, result: (result, "hooked"))
    assert model(x, k=1) == (("forward", (x,), {"k": 1}), "hooked")
    handle.remove()
    torch.testing.assert_close(model(x), 2 * x)
    model.weight = nn.Parameter(torch.zeros(2, 2))
    assert model(x)[0] == "slow"
    del model.fast
    with pytest.raises(AttributeError):
        model(x)


@pytest.mark.usefixtures("restore_call")
def test_calls_keep_memory_and_reference_counts_flat(native: Any, plan: Any, kernels: dict) -> None:
    model, x = fast_model(native, plan, kernels)

    def calls(n: int) -> None:
        for _ in range(n):
            model(x)

    watched = [model, model.weight, model.bias, x, model.fast, model.__dict__, None]
    calls(2_000)
    before, pages = [sys.getrefcount(w) for w in watched], resident_pages()
    calls(20_000)
    assert all(abs(sys.getrefcount(w) - b) < 20 for w, b in zip(watched, before))
    assert resident_pages() - pages < 1000  # 4 MB


def test_errors_and_unsupported_calls_leak_nothing(dispatcher: Any, plan: Any) -> None:
    def fail(t: torch.Tensor) -> torch.Tensor:
        raise KeyError("as asked")

    x = torch.randn(4)
    dispatcher.add(plan([x], [aten(4)], [("python", fail, [0], [1])], [1]), ("tensor", 0), x)
    odd = object()
    watched = [x, odd, fail, dispatcher.call]

    def calls(n: int) -> None:
        for _ in range(n):
            with pytest.raises(KeyError):
                dispatcher(x)
            dispatcher(odd, k=x)
            dispatcher(x, 1, k=[x])

    calls(10)
    gc.collect()
    before = [sys.getrefcount(w) for w in watched]
    calls(200)
    gc.collect()
    assert [sys.getrefcount(w) for w in watched] == before


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_dispatchers_in_cycles_are_collected(native: Any) -> None:
    class Owner:
        pass

    owner = Owner()
    owner.call = native.Dispatcher(lambda a, k, o=owner: o, lambda *a, o=owner: o)
    owner.call.bind(
        [("items", owner.__dict__, tuple(owner.__dict__), tuple(owner.__dict__.values()))], [], native.Table()
    )
    alive = weakref.ref(owner)
    del owner
    gc.collect()
    assert alive() is None


# Threads and processes


@pytest.mark.parametrize("release", [False, True])
def test_threads_get_right_answers(native: Any, plan: Any, kernels: dict, release: bool) -> None:
    """Each with its own input, through an arena, a packed weight that they share, and ATen, while others bind anew."""
    weight, packings = torch.randn(1000), ctypes.c_int64(0)
    steps = [
        ("pack", "p", kernels["reverse"], 0, 2, [1000, ctypes.addressof(packings)]),
        ("kernel", "f", kernels["twice"], [1, 3], [1000]),
        ("kernel", "g", kernels["multiply_add"], [2, 3, 4], [1000, 5]),
        ("aten", "aten::neg", "", [value(4)], [5], True),
    ]
    x = torch.randn(1000)
    values = [("packed", "w", 4000), ("arena", 0, *shape(x)), ("arena", 4032, *shape(x)), aten(1000)]
    p = plan([weight, x], values, steps, [5], arena_bytes=8064, release_gil=release)
    d = Bound(native, captured=[weight])
    d.add(p, ("tensor", 0), x)
    wrong: list[Any] = []

    def work(i: int) -> None:
        mine = torch.randn(1000, generator=torch.Generator().manual_seed(i))
        expected = -(weight.flip(0) * 2 * mine + 5)
        for n in range(200):
            if not torch.allclose(d(mine), expected):
                wrong.append((i, n))
            if n % 10 == 0:
                d.call.bind([], [weight], d.table)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.usefixtures("restore_call")
def test_latency(native: Any, plan: Any, kernels: dict, capsys: pytest.CaptureFixture) -> None:
    """Printed, for people: machines differ too much to assert."""
    model, x = fast_model(native, plan, kernels)

    def microseconds(call: Any) -> float:
        best = float("inf")
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(3000):
                call()
            best = min(best, (time.perf_counter() - start) / 3000)
        return best * 1e6

    with torch.no_grad():
        figures = microseconds(lambda: model(x)), microseconds(lambda: torch.empty(128, 2))
    with capsys.disabled():
        print(f"\na call through a plan of one kernel: {figures[0]:.2f} us (torch.empty: {figures[1]:.2f} us)")
