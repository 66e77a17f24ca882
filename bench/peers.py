"""The ways of running a model that are compared: fuser, eager PyTorch, and each peer that is installed."""

from __future__ import annotations

import functools
import importlib
import io
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from bench.errors import BenchError, Unavailable

Arrays = list[numpy.ndarray]


@dataclass
class Prepared:
    """A model made ready by a peer.

    `call()` runs it once, with inputs already in the peer's own type; `arrays` turns what `call` returned into numpy
    arrays: the output, or the gradients in the order of `model.parameters()`. `note()` says what a reader of the
    figures must know, such as that a model ran eagerly after all; `kept_bytes()` is working memory that stays
    allocated between calls.
    """

    call: Callable[[], Any]
    arrays: Callable[[Any], Arrays]
    note: Callable[[], str] = lambda: ""
    kept_bytes: Callable[[], int] = lambda: 0


Prepare = Callable[[nn.Module, torch.Tensor, str], Prepared]


@dataclass(frozen=True)
class Peer:
    """A way of running a model.

    `prepare(model, x, direction)` raises `Unavailable` where the peer can't take part. `prepare_for_memory` is the
    same without buffers that are kept between calls (they would not be seen); None: its memory can't be measured.
    """

    name: str
    passes: tuple[str, ...]
    prepare: Prepare
    prepare_for_memory: Prepare | None


def selected(names: str | None, fuser: bool) -> list[Peer]:
    """The peers named in a comma-separated list (None: all), fuser first unless `fuser` is False.

    `inductor` stands for both of its variants, the default one and `inductor-freezing`.
    Raises `BenchError` for an unknown name.
    """
    wanted = set(PEERS) if names is None else set()
    for name in filter(None, (n.strip() for n in (names or "").split(","))):
        if name not in PEERS:
            raise BenchError(f"no peer is called {name!r}; there are {', '.join(PEERS)}")
        wanted |= {"inductor", "inductor-freezing"} if name == "inductor" else {name}
    own = {"fuser", "value-and-grad"}
    wanted = wanted | own if fuser else wanted - own
    if not wanted:
        raise BenchError("no peer is left to measure")
    return [peer for name, peer in PEERS.items() if name in wanted]


def _need(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Unavailable(f"not installed (no module named {error.name!r})") from error
    except ImportError as error:
        raise Unavailable(f"can't be imported: {error}") from error


# The ways of torch: a module is called, or its loss differentiated.


def _torch_call(unit: nn.Module, parameters: list[nn.Parameter], x: torch.Tensor, direction: str) -> Prepared:
    if direction == "forward":
        return Prepared(functools.partial(unit, x), lambda y: [y.detach().numpy()])

    def gradient() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(unit(x), parameters)

    return Prepared(gradient, lambda gradients: [g.numpy() for g in gradients])


def _eager(model: nn.Module, x: torch.Tensor, direction: str) -> Prepared:
    return _torch_call(model, list(model.parameters()), x, direction)


def _fuser(model: nn.Module, x: torch.Tensor, direction: str) -> Prepared:
    optimized = _need("fuser").optimize(model)
    prepared = _torch_call(optimized, list(model.parameters()), x, direction)

    def note() -> str:
        return "; ".join(f"ran eagerly: {e.reason}" for e in optimized.report().eager)

    prepared.note = note
    prepared.kept_bytes = lambda: sum(e.arena_bytes for e in optimized.report().compiled)
    return prepared


def _value_and_grad(model: nn.Module, x: torch.Tensor, direction: str) -> Prepared:
    compiled = _need("fuser").value_and_grad(model)
    return Prepared(functools.partial(compiled, x), lambda found: [g.detach().numpy() for g in found[1].values()])


def _inductor(model: nn.Module, x: torch.Tensor, direction: str) -> Prepared:
    return _torch_call(torch.compile(model), list(model.parameters()), x, direction)


def _inductor_freezing(model: nn.Module, x: torch.Tensor, direction: str) -> Prepared:
    # Dynamo reads the global setting while compiling, which the first calls do. Without the option it would take this
    # for the same compiler as inductor's, and serve the code that it compiled for that peer.
    inductor = _need("torch._inductor.config")
    compiled = torch.compile(model, options={"freezing": True})
    with inductor.patch(freezing=True):
        for _ in range(2):
            compiled(x)
    return _torch_call(compiled, [], x, direction)


# Other runtimes, fed with numpy arrays that share the torch input's memory.


def _onnxruntime(model: nn.Module, x: torch.Tensor, direction: str, keep_buffers: bool = True) -> Prepared:
    runtime = _need("onnxruntime")
    _need("onnx"), _need("onnxscript")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = options.enable_mem_pattern = keep_buffers
    session = runtime.InferenceSession(_onnx(model, x), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return Prepared(functools.partial(session.run, None, feed), list)


def _onnx(model: nn.Module, x: torch.Tensor) -> bytes:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    return program.model_proto.SerializeToString()


def _openvino(model: nn.Module, x: torch.Tensor, direction: str) -> Prepared:
    # Without this package openvino falls back on a stub; with it, each conversion forks a process that reports home.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    openvino = _need("openvino")
    config = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = openvino.convert_model(model, example_input=x, input=list(x.shape))
    request = openvino.Core().compile_model(converted, "CPU", config).create_infer_request()
    call = functools.partial(request.infer, [x.numpy()], share_inputs=True, share_outputs=True)
    return Prepared(call, lambda outputs: [numpy.array(value) for value in outputs.values()])


def _jax(model: nn.Module, x: torch.Tensor, direction: str) -> Prepared:
    _need("jax")
    from bench import jax_peer

    call = jax_peer.forward(model, x) if direction == "forward" else jax_peer.gradient(model.model, x)
    return Prepared(call, lambda result: [numpy.asarray(a) for a in (result if isinstance(result, list) else [result])])


_BOTH = ("forward", "reverse")
_TABLE = [
    Peer("fuser", _BOTH, _fuser, _fuser),
    Peer("value-and-grad", ("reverse",), _value_and_grad, None),
    Peer("eager", _BOTH, _eager, _eager),
    Peer("inductor", _BOTH, _inductor, _inductor),
    Peer("inductor-freezing", ("forward",), _inductor_freezing, _inductor_freezing),
    Peer("onnxruntime", ("forward",), _onnxruntime, functools.partial(_onnxruntime, keep_buffers=False)),
    Peer("openvino", ("forward",), _openvino, None),
    Peer("jax", _BOTH, _jax, _jax),
]
PEERS = {peer.name: peer for peer in _TABLE}
