"""The cache of compiled kernels: private, atomic, verified, and never in the way of a correct answer."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fuser.codegen import cache, compiler

needs_compiler = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

MODEL = """
    import torch, fuser, warnings
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).eval()
    x = torch.randn(4, 5)
    with torch.no_grad():
        expected = model(x)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimized = fuser.optimize(model)
            torch.testing.assert_close(optimized(x), expected)
            torch.testing.assert_close(optimized(x), expected)
    print("WARNED" if any(w.category is fuser.FuserWarning for w in caught) else "QUIET")
    print(sum(c.kernels - c.cache_hits for c in optimized.report().compiled), "COMPILED")
    print(len(optimized.report().compiled), "PLANS")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty cache that already has the runtime, so that a test need not wait for it."""
    new = tmp_path / "cache"
    new.mkdir(mode=0o700)
    (new / "runtime").symlink_to(cache.folder() / "runtime")
    return new


def run(folder: Path, code: str = MODEL, **environment: str) -> str:
    variables = {**os.environ, "FUSER_CACHE_DIR": str(folder), **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=variables, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def runtime() -> None:
    from fuser.runtime import build

    build.load()


@needs_compiler
def test_a_second_process_compiles_nothing(folder: Path) -> None:
    assert "3 COMPILED" in run(folder)
    assert "0 COMPILED" in run(folder)
    kernels = [f for f in folder.iterdir() if f.suffix == ".so"]
    assert len(kernels) == 3
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"\x7fELF nonsense"], ids=["truncated", "overwritten"])
def test_damaged_entries_are_rebuilt(folder: Path, damage: bytes) -> None:
    run(folder)
    for kernel in folder.glob("*.so"):
        kernel.write_bytes(damage)
    assert "3 COMPILED" in run(folder)
    assert "0 COMPILED" in run(folder)


@needs_compiler
def test_exchanged_entries_are_not_trusted(folder: Path) -> None:
    run(folder)
    one, two, *_ = sorted(folder.glob("*.so"))
    one.write_bytes(two.read_bytes())
    assert "1 COMPILED" in run(folder)


@needs_compiler
def test_many_processes_at_once(folder: Path) -> None:
    variables = {**os.environ, "FUSER_CACHE_DIR": str(folder)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(MODEL)], env=variables, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = [p.communicate(timeout=300)[0] for p in processes]
    assert all(p.returncode == 0 for p in processes)
    assert sum(int(o.split(" COMPILED")[0].split()[-1]) for o in outputs) == 3
    assert not list(folder.glob("building-*"))


def test_without_a_compiler_everything_still_works(folder: Path) -> None:
    output = run(folder, FUSER_CXX="/nonexistent/g++")
    assert "WARNED" in output and "1 PLANS" in output  # through ATen, with the runtime that is there
    (folder / "runtime").unlink()
    output = run(folder, FUSER_CXX="/nonexistent/g++")
    assert "WARNED" in output and "0 PLANS" in output  # the original model


def test_a_compiler_that_fails_poisons_nothing(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken++"
    broken.write_text('#!/bin/sh\ncase "$*" in *kernel.cpp*) kill -9 $$;; esac\nexec g++ "$@"\n')
    broken.chmod(0o755)
    if compiler.find() is None:
        pytest.skip("no C++ compiler")
    output = run(folder, FUSER_CXX=str(broken))
    assert "WARNED" in output and "1 PLANS" in output
    assert not list(folder.glob("*.so")) and not list(folder.glob("building-*"))
    assert "3 COMPILED" in run(folder)


@pytest.mark.parametrize("trouble", ["missing parent is a file", "others may write"])
def test_unusable_folders_are_replaced_by_a_private_one(tmp_path: Path, trouble: str) -> None:
    if trouble == "others may write":
        bad = tmp_path / "open"
        bad.mkdir()
        bad.chmod(0o777)
    else:
        (tmp_path / "file").write_text("")
        bad = tmp_path / "file" / "cache"
    code = """
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            from fuser.codegen import cache
            folder = cache.folder()
        print(folder, len(caught), oct(folder.stat().st_mode & 0o777))
    """
    output = run(bad, code).split()
    assert str(bad) not in output[0] and output[1] == "1" and output[2] == "0o700"
    assert not Path(output[0]).exists()


@needs_compiler
def test_compile_errors_are_returned_not_raised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_CACHE_DIR", str(folder))
    good = cache.Source("good", 'extern "C" int answer() { return 42; }')
    bad = cache.Source("bad", "int main( {")
    library, error, again = cache.build([good, bad, good])
    assert isinstance(error, cache.BuildError) and "error" in str(error)
    assert library is again and library.address("answer") != 0
    assert not list(folder.glob("bad-*.so"))


def test_clear_and_info(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "runtime").unlink()
    monkeypatch.setenv("FUSER_CACHE_DIR", str(folder))
    (folder / "kernel-0.so").write_bytes(b"12345")
    (folder / "building-0").mkdir()  # of a process that was killed
    assert cache.info() == {"folder": str(folder), "kernels": 1, "bytes": 5}
    assert cache.clear() == 1 and cache.info()["kernels"] == 0
    assert not (folder / "building-0").exists()


def test_a_note_that_can_not_be_written_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_CACHE_DIR", str(folder))
    (folder / "compiler.txt").mkdir()
    cache._remember_compiler("some compiler 1.0")
    assert sorted(f.name for f in folder.iterdir()) == ["compiler.txt", "runtime"]


def test_a_forked_child_works() -> None:
    code = """
        import os, torch, fuser
        optimized = fuser.optimize(torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU()))
        x = torch.randn(400, 300)
        with torch.no_grad():
            expected = optimized(x)
            pid = os.fork()
            if pid == 0:
                y, few = optimized(x), optimized(x[:100])
                torch.set_num_threads(1)  # torch's own parallel loops hang in a forked child
                ok = torch.allclose(y, expected, atol=1e-5) and few.shape == (100, 300)
                os._exit(0 if ok else 1)
            assert os.waitpid(pid, 0)[1] == 0
    """
    run(cache.folder(), code)
