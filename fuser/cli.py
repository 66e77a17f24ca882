"""The command line: `fuser dump | explain | doctor | cache`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STAGES = ("captured", "canonical", "fused", "code", "plan")
DTYPES = ("float32", "float64", "bfloat16", "float16")
INPUT_DTYPES = (*DTYPES, "int64", "int32", "int16", "int8", "uint8", "bool")
WHERE = "(--debug shows where)"


class UsageError(Exception):
    """A mistake in what the user asked for; shown as one line, exit code 2."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except BrokenPipeError:
        return 1
    except Exception as error:
        if options.debug:
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        text = lines[0] if isinstance(error, UsageError) else f"{type(error).__name__}: {lines[0]} {WHERE}"
        print(f"fuser: {text}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fuser", description="A graph-fusion compiler for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="command")
    dump = commands.add_parser("dump", help="print a model as it looks after a stage of compilation")
    _model_arguments(dump)
    dump.add_argument("--stage", choices=STAGES, default="fused", help="after which stage (default: fused)")
    which = dump.add_mutually_exclusive_group()
    which.add_argument("--backward", action="store_true", help="the program of the backward pass")
    which.add_argument("--jvp", action="store_true", help="the program of the tangents (forward mode)")
    dump.add_argument("--order", type=int, default=1, help="with --backward or --jvp: how many times (default: 1)")
    dump.add_argument("--format", choices=("text", "json", "dot"), default="text")
    dump.add_argument("-o", "--output", type=Path, help="write to this file instead of standard output")
    dump.set_defaults(run=_dump)
    explain = commands.add_parser("explain", help="say for every operation that is left to ATen why")
    _model_arguments(explain)
    explain.set_defaults(run=_explain)
    doctor = commands.add_parser("doctor", help="show the compiler, the CPU, the libraries, and what is missing")
    doctor.set_defaults(run=_doctor)
    cache = commands.add_parser("cache", help="show or clear the cache of compiled kernels")
    cache.add_argument("action", choices=("info", "clear"))
    cache.set_defaults(run=_cache)
    for command in (dump, explain, doctor, cache):
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="MODULE:NAME or FILE.py:NAME, a model or a function that makes one")
    parser.add_argument(
        "--input",
        action="append",
        required=True,
        metavar="SHAPE[:DTYPE]",
        help="e.g. 128x3x32x32, 4x7:int64 or scalar; repeatable",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model, and of inputs without DTYPE")
    parser.add_argument("--train", action="store_true", help="in training mode (default: eval mode)")


def _dump(options: argparse.Namespace) -> int:
    from fuser import inspect

    if options.format == "dot" and options.stage in ("code", "plan"):
        raise UsageError(f"--format dot draws the stages captured, canonical and fused, not {options.stage}")
    if options.output is not None and options.output.is_dir():
        raise UsageError(f"can't write {options.output}: it is a folder")
    derivative = "backward" if options.backward else "jvp" if options.jvp else None
    if options.order < 1 or (options.order > 1 and derivative is None):
        raise UsageError("--order takes a positive number, and goes with --backward or --jvp")
    stages = _stages(options, derivative, options.order)
    if options.format == "dot":
        text = inspect.dot(stages, options.stage)
    elif options.format == "json":
        text = json.dumps(inspect.data(stages, options.stage), indent=2)
    else:
        text = inspect.text(stages, options.stage)
    if options.output is None:
        print(text)
        return 0
    temporary = options.output.with_name(f".{options.output.name}.{os.getpid()}")
    try:
        temporary.write_text(text + "\n")
        os.replace(temporary, options.output)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"can't write {options.output}: {error.strerror}") from error
    return 0


def _explain(options: argparse.Namespace) -> int:
    from fuser.report import table

    lowering = _stages(options).lowering
    rows = [tuple(row) for row in lowering.left_alone]
    if not rows:
        print("every operation is fused or a view")
        return 0
    print("\n".join(table(("node", "operator", "result", "why it is left to ATen"), rows, indent="")))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from fuser.doctor import examine

    findings = examine()
    for finding in findings:
        print(f"{'ok     ' if finding.fine else 'MISSING'}  {finding.subject}: {finding.text}")
    return 0 if all(finding.fine for finding in findings) else 1


def _cache(options: argparse.Namespace) -> int:
    from fuser.codegen import cache

    if options.action == "clear":
        print(f"removed {cache.clear()} files from {cache.folder()}")
        return 0
    for name, value in cache.info().items():
        print(f"{name}: {value}")
    return 0


def _stages(options: argparse.Namespace, derivative: str | None = None, order: int = 1) -> Any:
    """Load the model, make its inputs, and run the stages up to the plan."""
    import torch

    from fuser.capture import CaptureError
    from fuser.pipeline import stages_of

    inputs = tuple(_input(text, options.dtype) for text in options.input)
    model = _model(options.model)
    if isinstance(model, torch.nn.Module):
        model = model.train(options.train).to(getattr(torch, options.dtype))
    try:
        with torch.no_grad(), _quiet_tracing():
            return stages_of(model, inputs, {}, derivative, order)
    except CaptureError as error:
        raise UsageError(f"{options.model} can't be traced with these inputs: {error} {WHERE}") from error


@contextmanager
def _quiet_tracing() -> Iterator[None]:
    """Without torch's log of the traceback of an error that is raised as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _input(text: str, dtype: str) -> Any:
    """A random tensor as `--input` describes it: SHAPE or SHAPE:DTYPE; a SHAPE `scalar` has no axes."""
    import torch

    sizes, colon, own = text.partition(":")
    try:
        shape = () if sizes == "scalar" else tuple(int(n) for n in sizes.split("x"))
    except ValueError:
        shape = (-1,)
    if any(n < 0 for n in shape):
        raise UsageError(f"--input {text!r} is not a shape such as 128x3x32x32, 4x7:int64 or scalar")
    if colon and own not in INPUT_DTYPES:
        raise UsageError(f"--input {text!r} has none of the types {', '.join(INPUT_DTYPES)}")
    wanted = getattr(torch, own or dtype)
    return (torch.randn(shape) if wanted.is_floating_point else torch.randint(0, 2, shape)).to(wanted)


def _model(reference: str) -> Any:
    """The model that MODULE:NAME or FILE.py:NAME names; a class or function is called without arguments."""
    import torch

    where, colon, name = reference.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(f"{reference!r} must be MODULE:NAME or FILE.py:NAME")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{where} has no {name!r}")
        found = getattr(found, part)
    made = found if isinstance(found, torch.nn.Module) else _made(found, reference)
    if not callable(made):
        raise UsageError(f"{reference} gives {_NEITHER.format(type(made).__name__)}")
    return made


_NEITHER = "an object of type {}, which is neither a torch.nn.Module nor a function"


def _made(factory: Callable, reference: str) -> Any:
    """What a factory returns; a function that needs arguments is itself the model."""
    import inspect

    if not callable(factory):
        raise UsageError(f"{reference} is {_NEITHER.format(type(factory).__name__)}")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        if inspect.isclass(factory):
            raise UsageError(f"{reference} needs arguments ({error}): write a function that makes it") from None
        return factory
    except ValueError:
        pass
    return factory()


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise UsageError(f"there is no module {name!r} here or installed") from error
        raise
