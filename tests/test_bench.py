"""The benchmarks themselves: cases, checks, timing, the JSON file, and the comparison of two."""

import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import cases, check, cli, compare, peers, timing  # noqa: E402
from bench import run as bench_run  # noqa: E402
from bench.errors import BenchError, Unavailable  # noqa: E402

SMALL = [name for name in cases.CASES if not name.startswith(("vgg", "resnet", "conv16", "conv32", "conv64"))]


@pytest.mark.parametrize("name", cases.CASES)
def test_case_has_the_shapes_it_names(name):
    case = cases.CASES[name]
    with torch.device("meta"):
        y = case.model().eval()(torch.empty(case.shape))
    assert y.shape[0] == case.shape[0]
    if name.startswith("dense"):
        assert y.shape == case.shape
    if name.startswith("conv"):
        assert y.shape == (*case.shape[:2], 62, 62)
    outputs = {"lenet": 10, "mlp7": 10, "vgg16": 10, "resnet": 1000, "pinn": 1}
    for prefix, count in outputs.items():
        if name.startswith(prefix):
            assert y.shape[1:] == (count,)


@pytest.mark.parametrize("name", SMALL)
def test_case_runs_forward_the_same_each_time(name):
    (model, x), (again, x_again) = cases.CASES[name].build("forward"), cases.CASES[name].build("forward")
    assert not model.training and x.shape == cases.CASES[name].shape
    with torch.no_grad():
        y = model(x)
        assert torch.equal(y, again(x_again))
        torch.testing.assert_close(y.double(), model.double()(x.double()), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name, millions", [("vgg16_b1", 33.6), ("resnet18_b1", 11.7), ("resnet50_b1", 25.6)])
def test_known_networks_have_their_number_of_parameters(name, millions):
    with torch.device("meta"):
        count = sum(p.numel() for p in cases.CASES[name].model().parameters())
    assert round(count / 1e6, 1) == millions


def test_building_a_case_leaves_the_random_stream_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    cases.CASES["lenet_b128"].build("reverse")
    assert torch.equal(torch.rand(4), expected)


def test_reverse_is_the_gradient_of_the_sum_of_squares():
    unit, x = cases.CASES["dense2"].build("reverse")
    assert unit.training
    prepared = peers.PEERS["eager"].prepare(unit, x, "reverse")
    weight, bias = prepared.arrays(prepared.call())
    y = (x.double() @ unit.model.weight.double().T + unit.model.bias.double()).detach()
    numpy.testing.assert_allclose(weight, (2 * y.T @ x.double()).numpy(), rtol=1e-4)
    numpy.testing.assert_allclose(bias, (2 * y.sum(0)).numpy(), rtol=1e-4)


def test_dropout_can_be_left_out():
    case = cases.CASES["vgg16_b1"]
    assert case.has_dropout and not cases.CASES["lenet_b128"].has_dropout
    drops = [m.p for m in case.build("reverse", dropout=False)[0].modules() if isinstance(m, nn.Dropout)]
    assert drops == [0.0, 0.0]


@pytest.mark.parametrize(
    "patterns, expected",
    [
        ("dense2", ["dense2"]),
        ("pinn, dense2", ["dense2", "pinn"]),
        ("vgg16_*", ["vgg16_b1", "vgg16_b16", "vgg16_b64"]),
        (None, list(cases.CASES)),
    ],
)
def test_select(patterns, expected):
    assert [c.name for c in cases.select(patterns)] == expected


@pytest.mark.parametrize(
    "names, fuser, expected",
    [
        ("eager", False, ["eager"]),
        ("jax,eager", True, ["fuser", "value-and-grad", "eager", "jax"]),
        ("inductor", False, ["inductor", "inductor-freezing"]),
        ("inductor-freezing", False, ["inductor-freezing"]),
        (None, True, list(peers.PEERS)),
    ],
)
def test_selected_peers(names, fuser, expected):
    assert [p.name for p in peers.selected(names, fuser)] == expected


def wrong_values(direction, change):
    """What the check says of eager's results on dense2 after `change`."""
    case = cases.CASES["dense2"]
    reference = check.Reference(case, direction)
    prepared = peers.PEERS["eager"].prepare(*case.build(direction), direction)
    arrays = [a.copy() for a in prepared.arrays(prepared.call())]
    return reference.fault(change(arrays))


@pytest.mark.parametrize("direction", cases.PASSES)
def test_check_accepts_eager_and_finds_each_fault(direction):
    with torch.set_grad_enabled(direction == "reverse"):

        def spoilt(arrays):
            arrays[0][1] = numpy.nan
            return arrays

        assert wrong_values(direction, lambda arrays: arrays) is None
        assert "off by" in wrong_values(direction, lambda arrays: [a * 1.01 for a in arrays])
        assert "off by nan" in wrong_values(direction, spoilt)
        assert "results instead of" in wrong_values(direction, lambda arrays: [])
        assert "shape" in wrong_values(direction, lambda arrays: [a[..., None] for a in arrays])


def fake_peer(prepare):
    return peers.Peer("fake", cases.PASSES, prepare, None)


def missing(model, x, direction):
    raise Unavailable("not installed (no module named 'fake')")


def failing(model, x, direction):
    raise RuntimeError("first line\nsecond line")


def wrong(model, x, direction):
    return peers.PEERS["eager"].prepare(model, x + 1, direction)


@pytest.mark.parametrize(
    "prepare, status, message",
    [
        (missing, "missing", "not installed (no module named 'fake')"),
        (failing, "failed", "RuntimeError: first line"),
        (wrong, "wrong", "result 0 is off by"),
    ],
)
def test_a_peer_that_cannot_take_part_is_named_and_not_timed(prepare, status, message):
    settings = bench_run.Settings(rounds=1, seconds=1e-4)
    both = [peers.PEERS["eager"], fake_peer(prepare)]
    eager, fake = bench_run.measure(cases.CASES["dense2"], "forward", both, settings)
    assert eager.status == "timed" and eager.median_us > 0
    assert (fake.status, fake.median_us, fake.samples_us) == (status, None, [])
    assert fake.message.startswith(message) and "\n" not in fake.message


def test_interleave_takes_turns_and_starts_each_round_with_another(monkeypatch):
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    monkeypatch.setattr(timing.OtherWork, "share", lambda self: 0.0)
    samples = timing.interleave(calls, rounds=3, seconds=1e-9).samples
    assert {name: len(s) for name, s in samples.items()} == {"a": 3, "b": 3, "c": 3}
    assert all(s > 0 for values in samples.values() for s in values)
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    # Calibration, then the rounds abc, bca, cab (a turn that follows the same name's joins it).
    assert "".join(turns) == "abc" + "abc" + "bca" + "cab"


def test_disturbed_rounds_are_done_again_and_the_quietest_kept(monkeypatch):
    shares = iter([0.0, 0.5, 0.01, 0.9, 0.02, 0.3])
    monkeypatch.setattr(timing.OtherWork, "share", lambda self: next(shares))
    timings = timing.interleave({"a": lambda: None}, rounds=3, seconds=1e-9)
    assert len(timings.samples["a"]) == 3 and timings.disturbance == 0.02
    assert next(shares) == 0.3
    shares = iter([0.5, 0.4, 0.6, 0.0, 0.7, 0.8])
    timings = timing.interleave({"a": lambda: None}, rounds=2, seconds=1e-9)
    assert len(timings.samples["a"]) == 2 and timings.disturbance == 0.4
    assert next(shares, None) is None


def test_other_work_is_seen_and_our_own_is_not():
    program = "import time\nend = time.time() + 30\nwhile time.time() < end: pass"

    def share():
        meter, end = timing.OtherWork(), time.perf_counter() + 0.5
        while time.perf_counter() < end:
            pass
        return meter.share()

    alone = min(share() for _ in range(3))
    with subprocess.Popen([sys.executable, "-c", program]) as other:
        time.sleep(0.3)
        busy = share()
        other.kill()
    assert 0 <= alone < 0.9 and busy <= 1
    assert busy > 0.3 / len(os.sched_getaffinity(0))


def test_calibrate_fills_the_time():
    assert timing.calibrate(lambda: sum(range(100_000)), 1e-6) == 1
    assert timing.calibrate(lambda: None, 1e-3) > 1000


def test_jax_agrees_with_eager():
    pytest.importorskip("jax")
    for name in ("dense32_gelu", "lenet_b128"):
        for direction in cases.PASSES:
            with torch.set_grad_enabled(direction == "reverse"):
                prepared = peers.PEERS["jax"].prepare(*cases.CASES[name].build(direction), direction)
                reference = check.Reference(cases.CASES[name], direction)
                assert reference.fault(prepared.arrays(prepared.call())) is None


def test_jax_refuses_what_it_has_no_translation_for():
    pytest.importorskip("jax")
    with pytest.raises(Unavailable, match="BatchNorm1d"):
        peers.PEERS["jax"].prepare(*cases.CASES["mlp7_bn_tanh"].build("forward"), "forward")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The file that a tiny run of dense2 in eager writes, and what it prints."""
    path = tmp_path_factory.mktemp("bench") / "result.json"
    command = [sys.executable, "-m", "bench", "run", "--cases", "dense2", "--peers", "eager", "--no-fuser"]
    command += ["--rounds", "3", "--seconds", "0.001", "--threads", "1", "-o", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path, done.stdout


def test_run_prints_a_row_for_each_pass(result):
    rows = [line.split() for line in result[1].splitlines() if line.startswith("dense2")]
    assert len(rows) == 2
    assert all(float(row[1]) > 0 and row[2:] == ["eager", "-", "-"] for row in rows)


def test_run_writes_facts_and_samples(result):
    data = json.loads(result[0].read_text())
    assert data["schema"] == compare.SCHEMA == bench_run.SCHEMA
    assert data["machine"]["torch"] == torch.__version__
    assert data["machine"]["threads"] == data["machine"]["cpus"] == 1
    assert {"cpu", "date", "commit", "busy", "packages"} <= set(data["machine"])
    assert data["settings"] == {"rounds": 3, "seconds": 0.001, "first_call": False, "memory": False}
    for record, direction in zip(data["results"], cases.PASSES):
        assert (record["case"], record["direction"], record["peer"]) == ("dense2", direction, "eager")
        assert record["status"] == "timed" and record["message"] == ""
        assert len(record["samples_us"]) == 3
        assert record["min_us"] == min(record["samples_us"]) <= record["median_us"] == sorted(record["samples_us"])[1]
        assert record["first_call_cold_s"] is record["peak_memory_bytes"] is None


def changed(path, tmp_path, factor):
    data = json.loads(path.read_text())
    for record in data["results"]:
        record["median_us"] *= factor[record["direction"]]
    new = tmp_path / "new.json"
    new.write_text(json.dumps(data))
    return str(new)


def test_compare_finds_what_got_slower(result, tmp_path, capsys):
    new = changed(result[0], tmp_path, {"forward": 1.5, "reverse": 0.5})
    arguments = ["compare", str(result[0]), new, "--peers", "eager"]
    assert cli.main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| Benchmark | Current | Previous | Ratio |"
    assert lines[2].startswith("| dense2 forward eager |") and lines[2].endswith("| **1.50** |")
    assert lines[3].startswith("| dense2 reverse eager |") and lines[3].endswith("| 0.50 |")
    assert cli.main([*arguments, "--threshold", "1.6"]) == 0


def test_compare_rows_present_on_one_side_do_not_fail():
    record = {"case": "a", "direction": "forward", "peer": "fuser", "median_us": 3.0, "peak_memory_bytes": 2**20}
    old = {"results": [record, {**record, "case": "gone"}]}
    new = {"results": [{**record, "median_us": 6.0, "first_call_cold_s": 2.0}]}
    rows = {r.name: (r.current, r.previous, r.ratio) for r in compare.rows(old, new, ["fuser"])}
    assert rows == {
        "a forward fuser": (6.0, 3.0, 2.0),
        "a forward fuser first call, cold": (2.0, None, None),
        "a forward fuser memory": (1.0, 1.0, 1.0),
        "gone forward fuser": (None, 3.0, None),
        "gone forward fuser memory": (None, 1.0, None),
    }
    assert compare.rows(old, new, ["eager"]) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "--cases", "nothing"], "no case matches 'nothing'"),
        (["run", "--cases", ","], "names no case"),
        (["run", "--passes", "sideways"], "--passes takes forward and reverse"),
        (["run", "--peers", "caffe"], "no peer is called 'caffe'"),
        (["run", "--peers", ",", "--no-fuser"], "no peer is left"),
        (["run", "--rounds", "0"], "--rounds must be at least 1"),
        (["run", "--seconds", "nan"], "--seconds must be a positive number"),
        (["run", "--threads", "0"], "--threads must be between 1 and"),
        (["run", "-o", "/nowhere/at/all.json"], "can't write"),
        (["run", "--wrong"], "unrecognized arguments"),
        (["compare", "absent.json", "absent.json"], "can't read absent.json"),
        (["import", "--rounds", "0"], "--rounds must be at least 1"),
        ([], "required"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda data: "{", "is not JSON"),
        (lambda data: "[]", "is not a result"),
        (lambda data: json.dumps({**data, "schema": 99}), "has schema 99"),
        (lambda data: json.dumps({**data, "results": [{"case": "dense2"}]}), "lacks or garbles 'direction'"),
        (lambda data: json.dumps({**data, "results": [3]}), "lacks or garbles"),
    ],
)
def test_compare_refuses_a_file_that_is_no_result(result, tmp_path, capsys, spoil, message):
    path = tmp_path / "bad.json"
    path.write_text(spoil(copy.deepcopy(json.loads(result[0].read_text()))))
    assert cli.main(["compare", str(path), str(result[0]), "--peers", "eager"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_compare_needs_something_in_common(result, capsys):
    assert cli.main(["compare", str(result[0]), str(result[0])]) == 2
    assert "no benchmark of fuser in common" in capsys.readouterr().err
    assert cli.main(["compare", str(result[0]), str(result[0]), "--threshold", "-1"]) == 2


def test_unknown_names_raise_bench_error():
    for wrong_name in (lambda: cases.select("x"), lambda: peers.selected("x", True)):
        with pytest.raises(BenchError):
            wrong_name()


@pytest.mark.slow
def test_the_two_inductor_peers_do_not_share_their_code():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    case = cases.CASES["dense2"]
    reference = check.Reference(case, "forward")
    with torch.no_grad():
        for peer in peers.selected("inductor", fuser=False):
            prepared = peer.prepare(*case.build("forward"), "forward")
            assert reference.fault(prepared.arrays(prepared.call())) is None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
