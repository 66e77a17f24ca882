"""The native runtime's plans: every kind of value and step, packed weights, threads, and how the runtime is built."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from native_plans import aten, const, fresh, shape, value
from torch import nn

from fuser.codegen import compiler
from fuser.runtime import build

pytest_plugins = ["native_plans"]  # the fixtures native, kernels and plan


# Values and steps


def test_a_kernel_reads_inputs_and_constants_and_writes_a_fresh_result(plan: Any, kernels: dict) -> None:
    x, c = torch.randn(3, 5), torch.randn(3, 5)
    p = plan([x], [("constant", c), fresh(3, 5)], [("kernel", "f", kernels["multiply_add"], [0, 1, 2], [15, 7])], [2])
    for _ in range(3):
        x = torch.randn(3, 5)
        (y,) = p.run([x])
        torch.testing.assert_close(y, x * c + 7)
    assert p.run([x])[0].data_ptr() != y.data_ptr()


def test_intermediate_values_share_one_arena(plan: Any, kernels: dict) -> None:
    x = torch.randn(8)
    two = kernels["twice"]
    steps = [("kernel", "a", two, [0, 1], [8]), ("kernel", "b", two, [1, 2], [8]), ("kernel", "c", two, [2, 3], [8])]
    arena = [("arena", 0, *shape(x)), ("arena", 64, *shape(x)), fresh(8)]
    p = plan([x], arena, steps, [3], arena_bytes=128)
    torch.testing.assert_close(p.run([x])[0], 8 * x)
    huge = plan([x], [*arena[:2], fresh(8)], steps, [3], arena_bytes=9 << 20)  # the pool's block must grow
    torch.testing.assert_close(huge.run([x])[0], 8 * x)
    torch.testing.assert_close(p.run([x])[0], 8 * x)


@pytest.mark.parametrize("root", ["input", "constant", "arena", "fresh", "aten"])
def test_views_of_every_kind_of_value(plan: Any, kernels: dict, root: str) -> None:
    """Columns 1 and 2 of a (4, 3) matrix, transposed; read by a kernel that wants them dense through ATen's clone."""
    x = torch.randn(4, 3)
    base = {
        "input": ("constant", torch.zeros(1)),
        "constant": ("constant", x),
        "arena": ("arena", 0, *shape(x)),
        "fresh": fresh(4, 3),
        "aten": aten(4, 3),
    }[root]
    make = [("kernel", "f", kernels["twice"], [0, 1], [12])] if root in ("arena", "fresh") else []
    if root == "aten":
        make = [("aten", "aten::mul", "Tensor", [value(0), const(2)], [1], True)]
    factor = 2 if make else 1
    values = [base, ("view", 0 if root == "input" else 1, 1, [2, 4], [1, 3]), aten(2, 4), ("view", 2, 1, [4], [3])]
    clone = ("aten", "aten::clone", "", [value(2), const(torch.contiguous_format)], [3], True)
    p = plan([x], values, [*make, clone], [3], arena_bytes=64)
    torch.testing.assert_close(p.run([x])[0], factor * x[:, 1:].T)
    if root != "arena":  # a view of a view, as a result
        q = plan([x], values, [*make, clone], [4], arena_bytes=64)
        torch.testing.assert_close(q.run([x])[0], factor * x[:, 2])


def test_results_that_are_inputs_are_the_same_objects(plan: Any) -> None:
    x, y = torch.randn(2), nn.Parameter(torch.randn(3), requires_grad=False)
    out = plan([x, y], [], [], [1, 0, 1]).run([x, y])
    assert out[0] is y and out[1] is x and out[2] is y


def test_results_that_are_views_alias_and_share_the_version(plan: Any) -> None:
    x = torch.stack([torch.arange(4.0), torch.arange(4.0, 8), torch.arange(8.0, 12)])
    (v,) = plan([x], [("view", 0, 4, [2, 4], [4, 1])], [], [1]).run([x])
    assert v._base is x and v.data_ptr() == x[1:].data_ptr()
    before = x._version
    v.mul_(2)
    assert x._version == before + 1 and x[2, 3] == 22
    sliced = x[:, 1:]
    (w,) = plan([sliced], [("view", 0, 1, [3], [4])], [], [1]).run([sliced])
    torch.testing.assert_close(w, x[:, 2])
    assert w.storage_offset() == 2 and w._base is x


def test_empty_tensors(plan: Any, kernels: dict) -> None:
    x = torch.empty(0, 3)
    steps = [
        ("kernel", "f", kernels["twice"], [0, 1], [0]),
        ("aten", "aten::add", "Tensor", [value(1), value(0), const(1)], [2], True),
        ("aten", "aten::sum", "", [value(2), const(None)], [3], True),
    ]
    y, total = plan([x], [("arena", 0, *shape(x)), aten(0, 3), aten()], steps, [2, 3]).run([x])
    assert y.shape == (0, 3) and total.item() == 0


def test_aten_steps_of_several_results_lists_and_options(plan: Any) -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    steps = [
        ("aten", "aten::cat", "", [("list", [value(0), value(1)]), const(1)], [2], True),
        ("aten", "aten::topk", "", [value(2), const(2), const(-1), const(True), const(True)], [3, 4], True),
        ("aten", "aten::split", "Tensor", [value(2), const(2), const(0)], [-1, 5], True),
        (
            "aten",
            "aten::to",
            "dtype",
            [value(4), const(torch.float64), const(False), const(False), const(None)],
            [6],
            True,
        ),
        ("aten", "aten::index", "Tensor", [value(0), ("list", [const(None), value(7)])], [8], True),
    ]
    index = torch.tensor([2, 0])
    values = [aten(4, 5), aten(4, 2), aten(4, 2, dtype=torch.int64), ("aten", [2, 5], [5, 1], torch.float32)]
    values += [aten(4, 2, dtype=torch.float64), ("constant", index), aten(4, 2)]
    out = plan([x, y], values, steps, [2, 3, 4, 5, 6, 8]).run([x, y])
    both = torch.cat([x, y], 1)
    top, where = both.topk(2)
    for got, expected in zip(out, [both, top, where, both[2:], where.double(), x[:, [2, 0]]]):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_number_where_the_schema_has_a_tensor_yields_to_the_tensors_dtype(plan: Any) -> None:
    x = torch.randn(3, dtype=torch.bfloat16)
    add = ("aten", "aten::add", "Tensor", [value(0), const(0.5), const(1)], [1], True)
    (y,) = plan([x], [aten(3, dtype=torch.bfloat16)], [add], [1]).run([x])
    torch.testing.assert_close(y, x + 0.5, rtol=0, atol=0)


def test_results_in_other_strides_than_traced_are_copied_to_the_promised_ones(plan: Any, kernels: dict) -> None:
    x = torch.randn(3, 4)
    transpose = ("aten", "aten::t", "", [value(0)], [1], True)
    p = plan([x], [aten(4, 3), fresh(4, 3)], [transpose, ("kernel", "f", kernels["twice"], [1, 2], [12])], [2])
    torch.testing.assert_close(p.run([x])[0], 2 * x.T)


def test_writes_to_inputs_bump_their_version(plan: Any) -> None:
    x, y = torch.randn(3), torch.randn(3)
    copy = ("aten", "aten::copy_", "", [value(0), value(1), const(False)], [-1], False)
    before = x._version
    assert plan([x, y], [], [copy], []).run([x, y]) == []
    assert torch.equal(x, y) and x._version > before


def test_aten_results_are_released_after_their_last_use(plan: Any) -> None:
    """Seen from a Python step: once nothing is to read the first result, its memory is gone."""

    def keep(t: torch.Tensor) -> torch.Tensor:
        refs.append(t.untyped_storage()._weak_ref())
        return t + 1

    def later(t: torch.Tensor) -> torch.Tensor:
        expired.append(torch.UntypedStorage._expired(refs[0]))
        return t + 1

    refs, expired = [], []
    x = torch.randn(5)
    steps = [
        ("aten", "aten::neg", "", [value(0)], [1], True),
        ("python", keep, [2], [3]),  # reads a view of the first result
        ("python", later, [3], [4]),
    ]
    (y,) = plan([x], [aten(5), ("view", 1, 0, [5], [1]), aten(5), aten(5)], steps, [4]).run([x])
    torch.testing.assert_close(y, 2 - x)
    assert expired == [True]
    torch.UntypedStorage._free_weak_ref(refs[0])


@pytest.mark.parametrize("release", [False, True])
def test_python_steps(plan: Any, release: bool) -> None:
    x = torch.randn(3)
    steps = [("python", lambda t: (t + 1, None, [t][0] * 2), [0], [1, -1, 2]), ("python", torch.neg, [1], [3])]
    out = plan([x], [aten(3), aten(3), aten(3)], steps, [1, 2, 3], release_gil=release).run([x])
    for got, expected in zip(out, [x + 1, x * 2, -(x + 1)]):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize(
    "result, outs, error, message",
    [
        (None, [1], TypeError, "must return a tensor"),
        ([None], [1], TypeError, "NoneType instead of a tensor"),
        (torch.zeros(3), [], ValueError, "1 tensors where the trace had 0"),
        ((torch.zeros(3),) * 2, [1], ValueError, "2 tensors where the trace had 1"),
        (torch.zeros(4), [1], RuntimeError, "where the trace had shape"),
        (torch.zeros(3, dtype=torch.int64), [1], RuntimeError, "where the trace had shape"),
    ],
)
def test_python_steps_that_return_something_else(
    plan: Any, result: Any, outs: list, error: type, message: str, release: bool
) -> None:
    x = torch.randn(3)
    p = plan([x], [aten(3)], [("python", lambda t: result, [0], outs)], [0], release_gil=release)
    with pytest.raises(error, match=message):
        p.run([x])


@pytest.mark.parametrize("release", [False, True])
def test_errors_come_through_and_leave_everything_usable(plan: Any, kernels: dict, release: bool) -> None:
    class Odd(Exception):
        pass

    def fail(t: torch.Tensor) -> torch.Tensor:
        if t[0] > 0:
            raise Odd("as asked")
        return t

    x = torch.ones(3)
    work = ("kernel", "f", kernels["twice"], [0, 1], [3])
    p = plan(
        [x],
        [("arena", 0, *shape(x)), aten(3)],
        [work, ("python", fail, [0], [2])],
        [2],
        arena_bytes=64,
        release_gil=release,
    )
    for _ in range(50):
        with pytest.raises(Odd, match="as asked"):
            p.run([x])
    torch.testing.assert_close(p.run([-x])[0], -x)
    inverse = ("aten", "aten::linalg_cholesky", "", [value(0), const(False)], [1], True)
    q = plan([torch.eye(3)], [aten(3, 3)], [inverse], [1], release_gil=release)
    with pytest.raises(torch.linalg.LinAlgError):
        q.run([-torch.eye(3)])
    assert torch.equal(q.run([torch.eye(3)])[0], torch.eye(3))


def test_bad_specifications(plan: Any, native: Any, kernels: dict) -> None:
    x = torch.randn(4)
    kernel = ("kernel", "f", kernels["twice"], [0, 1], [4])
    for message, values, steps, outputs, more in [
        ("unknown kind hologram", [("hologram", 1)], [], [0], {}),
        ("no input 3", [("input", 3, *shape(x))], [], [0], {}),
        ("no value 9", [], [], [9], {}),
        ("no value -1", [], [], [-1], {}),
        ("no value 1", [("view", 1, 0, [4], [1])], [], [0], {}),
        ("2 sizes and 1 strides", [("fresh", [4, 1], [1], torch.float32)], [], [0], {}),
        ("negative size -4", [("fresh", [-4], [1], torch.float32)], [], [0], {}),
        ("does not fit the arena", [("arena", 64, *shape(x))], [], [0], {"arena_bytes": 64}),
        ("can't be negative, got -64", [], [], [0], {"arena_bytes": -64}),
        ("must be a torch.dtype", [("fresh", [4], [1], "float32")], [], [0], {}),
        ("a constant must be a tensor", [("constant", 3)], [], [0], {}),
        ("no views", [("packed", "k", 64), ("view", 1, 0, [4], [1])], [], [0], {}),
        ("can't be a result", [("packed", "k", 64)], [], [1], {}),
        ("read before any step makes it", [aten(4)], [("kernel", "f", kernels["twice"], [1, 0], [4])], [0], {}),
        ("read before any step makes it", [aten(4)], [("aten", "aten::neg", "", [value(1)], [1], True)], [0], {}),
        (
            "read before any step makes it",
            [("packed", "k", 16), fresh(4)],
            [("kernel", "f", kernels["twice"], [1, 2], [4])],
            [2],
            {},
        ),
        ("read before any step makes it", [aten(4)], [], [1], {}),
        ("address is 0", [fresh(4)], [("kernel", "f", 0, [0, 1], [4])], [1], {}),
        ("writes a packed weight", [fresh(4)], [("pack", "f", kernels["reverse"], 0, 1, [4])], [1], {}),
        ("no operator aten::nonsense", [], [("aten", "aten::nonsense", "", [], [], True)], [0], {}),
        ("takes 1 arguments", [aten(4)], [("aten", "aten::neg", "", [], [1], True)], [1], {}),
        ("aten::neg: argument self", [aten(4)], [("aten", "aten::neg", "", [const("text")], [1], True)], [1], {}),
        (
            "aten::sum: argument dim",
            [aten()],
            [("aten", "aten::sum", "dim_IntList", [value(0), const(["a"]), const(False), const(None)], [1], True)],
            [1],
            {},
        ),
        ("can't be the result", [fresh(4)], [("aten", "aten::neg", "", [value(0)], [1], True)], [1], {}),
        ("unknown kind leap", [], [("leap",)], [0], {}),
        ("too short", [("fresh",)], [], [0], {}),
        ("tuples or lists", [7], [], [0], {}),
    ]:
        with pytest.raises(ValueError, match=message):
            plan([x], values, steps, outputs, **more)
    with pytest.raises(ValueError, match="no steps"):
        native.Plan(
            {"inputs": 0, "values": [], "arena_bytes": 0, "release_gil": False},
            packs=native.PackStore(),
            arenas=native.ArenaPool(),
        )
    with pytest.raises(TypeError, match="PackStore"):
        native.Plan({}, packs=3, arenas=native.ArenaPool())
    p = plan([x], [fresh(4)], [kernel], [1])
    for wrong in ([], [x, x], [torch.randn(5)], [x.double()], [torch.randn(8)[::2]], [x.to_sparse()], [x.to("meta")]):
        with pytest.raises(ValueError):
            p.run(wrong)
    with pytest.raises(ValueError, match="list of tensors"):
        p.run([3])
    with pytest.raises(ValueError, match="list of tensors"):
        p.run((x,))


# Packed weights


def test_a_weight_is_packed_again_exactly_when_its_bytes_change(plan: Any, kernels: dict) -> None:
    weight = torch.randn(257)
    packings = ctypes.c_int64(0)
    steps = [
        ("pack", "f", kernels["reverse"], 0, 1, [257, ctypes.addressof(packings)]),
        ("kernel", "g", kernels["twice"], [1, 2], [257]),
    ]
    p = plan([weight], [("packed", "a key", 4 * 257), fresh(257)], steps, [2])

    def run() -> int:
        torch.testing.assert_close(p.run([weight])[0], 2 * weight.flip(0), rtol=0, atol=0)
        return packings.value

    assert run() == 1 and run() == 1
    p.run([weight.clone()])  # the same content elsewhere
    assert packings.value == 1

    def swap(i: int, j: int) -> None:
        weight.data[[i, j]] = weight.data[[j, i]]

    changes = [
        lambda: weight.data.neg_(),
        lambda: weight.data[0].mul_(1.0000002),
        lambda: weight.data[256].neg_(),
        lambda: swap(0, 1),
        lambda: swap(0, 2),  # between neighbouring lanes of the hash
        lambda: swap(3, 19),  # the same lane of neighbouring stripes
        lambda: swap(5, 16 * 16 + 0),  # across blocks
        lambda: weight.numpy().__setitem__(100, -0.0),
        lambda: weight.numpy().__setitem__(100, 0.0),
        lambda: weight.data.zero_(),
        lambda: weight.data.fill_(-0.0),
    ]
    for count, change in enumerate(changes, 2):
        change()
        assert run() == count and run() == count


def test_plans_share_packed_weights_by_key(plan: Any, kernels: dict) -> None:
    weight, packings = torch.randn(8), ctypes.c_int64(0)

    def make(key: str) -> Any:
        steps = [
            ("pack", "f", kernels["reverse"], 0, 1, [8, ctypes.addressof(packings)]),
            ("kernel", "g", kernels["twice"], [1, 2], [8]),
        ]
        return plan([weight], [("packed", key, 32), fresh(8)], steps, [2])

    for key, count in (("one", 1), ("one", 1), ("two", 2), ("one", 2)):
        torch.testing.assert_close(make(key).run([weight])[0], 2 * weight.flip(0))
        assert packings.value == count


def test_the_hash_sees_every_change(native: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    for size in (1, 4, 16, 63, 64, 65, 1000, 1024, 1025, 4096, 300_000, 1_500_000):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        seen = {native.content_hash(data.numpy())}
        positions = {0, size // 2, size - 1, *torch.randint(0, size, (20,), generator=generator).tolist()}
        for position in positions:
            for bit in range(8):
                data[position] ^= 1 << bit
                seen.add(native.content_hash(data.numpy()))
                data[position] ^= 1 << bit
        assert len(seen) == 1 + 8 * len(positions)
        first, second = zip(*seen)
        assert len(set(first)) == len(first) and len(set(second)) == len(second)  # either half alone would do
        assert native.content_hash(data.numpy()) in seen


def test_the_hash_tells_zeros_of_different_lengths_and_signs_apart(native: Any) -> None:
    zeros = [torch.zeros(n) for n in (0, 1, 2, 15, 16, 17, 255, 256, 257, 65536, 65537)]
    negative = [-z for z in zeros[1:]]
    assert len({native.content_hash(t.numpy()) for t in zeros + negative}) == len(zeros + negative)


def test_the_hash_does_not_depend_on_the_number_of_threads(native: Any) -> None:
    for size in (1 << 18, (1 << 20) - 4, (3 << 20) + 12):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy()
        assert len({native.content_hash(data, n) for n in (1, 2, 3, 7)}) == 1


def test_the_hash_of_permuted_rows_and_exchanged_chunks(native: Any) -> None:
    """Whole blocks and whole chunks that change places must count, which a plain sum would not notice."""
    blocks = torch.randn(1024, 256)  # rows of 1 KiB, the size of a block; a chunk is 256 of them
    seen = {native.content_hash(blocks.numpy())}
    for i, j in [(0, 1), (5, 900), (254, 255), (0, 256)]:
        other = blocks.clone()
        other[[i, j]] = other[[j, i]]
        seen.add(native.content_hash(other.numpy()))
    seen.add(native.content_hash(torch.cat([blocks[256:512], blocks[:256], blocks[512:]]).numpy()))
    seen.add(native.content_hash(blocks.roll(1).numpy()))
    assert len(seen) == 7


# Threads and processes


def test_other_threads_run_while_a_long_plan_does(plan: Any) -> None:
    """The step waits for another Python thread, which it would for ever if the plan held on to the GIL."""
    x, started, done = torch.randn(3), threading.Event(), threading.Event()

    def wait(t: torch.Tensor) -> torch.Tensor:
        started.set()
        assert done.wait(20)
        return t

    other = threading.Thread(target=lambda: (started.wait(20), done.set()))
    other.start()
    plan([x], [aten(3)], [("python", wait, [0], [1])], [1], release_gil=True).run([x])
    other.join()


def test_kernels_get_torchs_number_of_threads(plan: Any, kernels: dict) -> None:
    p = plan([], [fresh(1)], [("kernel", "t", kernels["threads"], [0], [])], [0])
    before = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            assert p.run([])[0].item() == n
    finally:
        torch.set_num_threads(before)


def test_a_forked_child_runs_on_one_thread(plan: Any, kernels: dict, native: Any) -> None:
    """Of a process that has used OpenMP, whose threads the child does not have."""
    big = torch.randn(1 << 20)
    packings = ctypes.c_int64(0)
    steps = [
        ("pack", "p", kernels["reverse"], 0, 1, [1 << 20, ctypes.addressof(packings)]),
        ("kernel", "t", kernels["threads"], [2], []),
    ]
    p = plan([big], [("packed", "w", 4 << 20), fresh(1)], steps, [2])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert p.run([big])[0].item() == 2
        child = os.fork()
        if child == 0:
            big.numpy()[5] += 1  # hashed and packed anew
            os._exit(0 if p.run([big])[0].item() == 1 and packings.value == 2 else 1)
        assert exit_code(child) == 0
    finally:
        torch.set_num_threads(before)


def exit_code(child: int, seconds: float = 30) -> int:
    """The child's exit code; one that hangs is killed."""
    for _ in range(int(seconds / 0.05)):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the forked child hangs")


# Building it


def test_a_damaged_runtime_is_not_trusted(native: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage makes `load` build again; here the compiler is a copy of the sound file, which is quicker."""
    sound = build.binary_path().read_bytes()
    monkeypatch.setenv("FUSER_CACHE_DIR", str(tmp_path))
    built: list[Path] = []

    def compile_(tool: Any, scratch: Path) -> Path:
        built.append(scratch)
        (scratch / "made.so").write_bytes(sound)
        return scratch / "made.so"

    monkeypatch.setattr(build, "_compile", compile_)
    load = build.load.__wrapped__
    assert load().Plan and len(built) == 1
    load()
    assert len(built) == 1
    path = build.binary_path()
    assert tmp_path in path.parents
    path.unlink()
    path.write_bytes(sound[:-100])
    assert load().Plan and len(built) == 2 and path.read_bytes() == sound


def test_a_runtime_that_does_not_compile_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = compiler.find()
    if tool is None:
        pytest.skip(compiler.missing_reason())
    (tmp_path / "broken.cpp").write_text("int f() { return undeclared; }\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(build.RuntimeUnavailable, match="undeclared"):
        build._compile(tool, tmp_path)
