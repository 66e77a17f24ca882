"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuser import cli, doctor, inspect
from fuser.codegen import cache, compiler

MODEL = """
import torch
from torch import nn

def network():
    body = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Softmax(1), nn.Linear(144, 5))

def function(x, y):
    return torch.relu(x @ y)

class Sized(nn.Module):
    def __init__(self, width):
        super().__init__()

class Scaled(nn.Embedding):
    def __init__(self):
        super().__init__(3, 5)

    def forward(self, indices, scale):
        return super().forward(indices) * scale

def broken():
    raise KeyError("a reason")

def without_result():
    pass

instance = nn.Linear(3, 2)
number = 3
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "some_model.py").write_text(MODEL)
    return str(tmp_path / "some_model.py")


@pytest.mark.parametrize("stage", cli.STAGES)
def test_dump_stages(model: str, stage: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["dump", f"{model}:network", "--input", "2x3x8x8", "--stage", stage]) == 0
    out = capsys.readouterr().out
    expected = {
        "captured": ["native_batch_norm", "arg0_1 (0.weight): float32[4x3x3x3]", "(arg0): float32[2x3x8x8]"],
        "canonical": ["aten.rsqrt", "float32[2x4x6x6]"],
        "fused": ["conv_bias_mul_add_relu_0 (conv: generated kernel)", "aten.convolution.default"],
        "code": ['extern "C" void conv_bias_mul_add_relu_kernel'],
        "plan": ["arena:", "%0 (arg0_1 (0.weight))", "kernel conv_bias", "returns:"],
    }[stage]
    for text in expected:
        assert text in out, out


def test_dump_formats(model: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target = tmp_path / "out.json"
    arguments = ["dump", f"{model}:network", "--input", "2x3x8x8", "--format"]
    assert cli.main([*arguments, "json", "-o", str(target)]) == 0
    nodes = json.loads(target.read_text())["nodes"]
    (fused,) = [n for n in nodes if n.get("pattern") == "conv"]
    assert fused["shape"] == [2, 4, 6, 6] and len(fused["members"]) == 4
    assert nodes[0]["name"] == "arg0_1" and nodes[0]["input"] == "0.weight"
    convolution = fused["members"][0]["arguments"]
    assert convolution["stride"] == [1, 1] and convolution["groups"] == 1 and "weight" not in convolution
    (softmax,) = [n for n in nodes if "_softmax" in n["target"]]
    assert softmax["arguments"] == {"dim": 1, "half_to_float": False}
    capsys.readouterr()
    assert cli.main([*arguments, "json", "--stage", "captured"]) == 0
    captured = json.loads(capsys.readouterr().out)["nodes"]
    assert next(n for n in captured if "batch_norm" in n["target"])["arguments"]["eps"] == 1e-5
    assert cli.main([*arguments, "dot"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("digraph") and '"arg0_1" [label="arg0_1 (0.weight)\\nfloat32' in out


def test_arguments_in_json_are_json() -> None:
    assert inspect._plain([1, True, None, 0.5, "a"]) == [1, True, None, 0.5, "a"]
    assert inspect._plain((float("inf"), torch.float32)) == ["inf", "torch.float32"]


def test_inputs_of_other_types_and_without_axes(model: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["dump", f"{model}:Scaled", "--input", "4x7:int64", "--input", "scalar"]) == 0
    out = capsys.readouterr().out
    assert "(arg0): int64[4x7]" in out and "(arg1): float32[]" in out
    drawn = cli._input("100:int64", "float32")
    assert drawn.dtype is torch.int64 and 0 <= drawn.min() and drawn.max() < 3
    assert cli._input("scalar:bool", "float32").dtype is torch.bool
    assert cli._input("2x3", "bfloat16").dtype is torch.bfloat16


def test_functions_instances_and_dtypes(model: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["dump", f"{model}:function", "--input", "2x3", "--input", "3x4", "--dtype", "float64"]) == 0
    assert "mm_relu_0: float64[2x4]" in capsys.readouterr().out
    assert cli.main(["dump", f"{model}:instance", "--input", "7x3"]) == 0
    assert "linear_bias_0" in capsys.readouterr().out


def test_train_mode(model: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["dump", f"{model}:network", "--input", "2x3x8x8", "--train"]) == 0
    out = capsys.readouterr().out
    assert "aten.copy_" in out and "_native_batch_norm_legit_functional" in out


def test_explain(model: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["explain", f"{model}:network", "--input", "2x3x8x8"]) == 0
    out = capsys.readouterr().out
    assert "aten._softmax.default" in out and "not a pointwise operation" in out
    assert cli.main(["explain", f"{model}:instance", "--input", "2x3"]) == 0
    assert "every operation is fused" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["dump", "{}:network", "--input", "2x3x8xy"], "is not a shape such as"),
        (["dump", "{}:nothing", "--input", "2"], "has no 'nothing'"),
        (["dump", "{}:number", "--input", "2"], "of type int, which is neither a torch.nn.Module nor a function"),
        (["dump", "{}:torch", "--input", "2"], "of type module, which is neither a torch.nn.Module nor a function"),
        (["dump", "{}:without_result", "--input", "2"], "gives an object of type NoneType"),
        (["dump", "{}:Sized", "--input", "2"], "needs arguments (missing a required argument: 'width'): write a"),
        (["dump", "{}:broken", "--input", "2"], "KeyError: 'a reason' (--debug shows where)"),
        (["dump", "{}:instance", "--input", "2x3:int7"], "has none of the types float32"),
        (["dump", "{}:instance", "--input", "2x3", "-o", "."], "can't write .: it is a folder"),
        (["dump", "{}:instance", "--input", "2x3", "--format", "dot", "--stage", "plan"], "fused, not plan"),
        (["dump", "{}:instance", "--input", "2x3", "--format", "dot", "--stage", "code"], "fused, not code"),
        (["dump", "{}", "--input", "2"], "must be MODULE:NAME or FILE.py:NAME"),
        (["dump", "missing.py:f", "--input", "2"], "there is no file missing.py"),
        (["dump", "no_such_module:f", "--input", "2"], "there is no module 'no_such_module'"),
        (["explain", "{}:network", "--input", "2x3"], "can't be traced with these inputs"),
        (["dump", "{}:instance", "--input", "2x3", "-o", "/nonexistent/x"], "can't write /nonexistent/x"),
    ],
)
def test_errors_are_one_line(model: str, arguments: list, message: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main([a.format(model) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_tracing_errors_are_one_line_in_a_process_too(model: str) -> None:
    command = [sys.executable, "-m", "fuser", "explain", f"{model}:instance", "--input", "2x4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "(--debug shows where)" in done.stderr


def test_debug_shows_the_traceback(model: str) -> None:
    with pytest.raises(cli.UsageError):
        cli.main(["dump", f"{model}:nothing", "--input", "2", "--debug"])


def test_doctor_and_cache(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["doctor"]) in (0, 1)
    out = capsys.readouterr().out
    for subject in ("compiler", "CPU", "OpenMP", "BLAS", "CUDA", "cache", "runtime"):
        assert f"{subject}:" in out
    assert cli.main(["cache", "info"]) == 0
    assert "kernels" in capsys.readouterr().out


@pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")
def test_doctor_tells_whether_kernels_follow_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    assert doctor.kernels_follow_torch() is True and torch.get_num_threads() == threads
    other = cache.Source("deaf_probe", 'extern "C" int threads() { return -1; }')
    monkeypatch.setattr(doctor, "_OPENMP_PROBE", other)
    (finding,) = [f for f in doctor.examine() if f.subject == "OpenMP"]
    assert not finding.fine and "do not use torch's runtime" in finding.text


@pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")
def test_doctor_counts_kernels_but_not_its_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_CACHE_DIR", str(tmp_path))
    for number, expected in ((0, "0 kernels"), (1, "1 kernel, ")):
        cache.build([cache.Source(f"kernel_{i}", f"int f() {{ return {i}; }}") for i in range(number)])
        monkeypatch.setattr(doctor, "_OPENMP_PROBE", cache.Source(doctor._OPENMP_PROBE.name, _probe(number)))
        (finding,) = [f for f in doctor.examine() if f.subject == "cache"]
        assert expected in finding.text and cache.info()["kernels"] == number


def _probe(number: int) -> str:
    """The doctor's probe as a source that this process has not loaded yet."""
    return f"{doctor._OPENMP_PROBE.code}// {number}\n"


def test_sizes_are_readable() -> None:
    sizes = [0, 999, 1000, 15_729, 3_000_000, 2_500_000_000]
    assert [doctor._size(n) for n in sizes] == ["0 bytes", "999 bytes", "1 kB", "15.7 kB", "3 MB", "2.5 GB"]


def test_doctor_says_what_to_install() -> None:
    code = "import sys; from fuser.cli import main; sys.exit(main(['doctor']))"
    import os

    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "FUSER_CXX": "/nonexistent"}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "MISSING" in done.stdout and "/nonexistent" in done.stdout


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "fuser", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "dump" in done.stdout


def test_importing_fuser_is_light() -> None:
    code = "import sys, torch; before = set(sys.modules); import fuser; print(len(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 2
