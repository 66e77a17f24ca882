"""The command line: run, compare, call, import. Bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from bench.errors import BenchError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BenchError(message)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for a regression found by `compare`, 2 for bad input."""
    try:
        options = _parser().parse_args(arguments)
        return options.command(options)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m bench", description="Benchmarks of fuser against eager PyTorch and its peers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    run = commands.add_parser("run", help="time the cases, the peers in turn")
    run.set_defaults(command=_run)
    run.add_argument("--cases", metavar="A,B", help="names or globs, comma-separated; all if not given")
    run.add_argument("--passes", metavar="A,B", default="forward,reverse", help="forward, reverse or both")
    run.add_argument("--peers", metavar="A,B", help="eager, inductor, onnxruntime, openvino, jax; all if not given")
    run.add_argument("--no-fuser", action="store_true", help="only the peers")
    run.add_argument("--first-call", action="store_true", help="also the first call, cold and warm cache (slow)")
    run.add_argument("--memory", action="store_true", help="also the peak memory of one call (slow)")
    run.add_argument("-o", "--output", metavar="FILE.json", help="write the results there, after each case")
    _add_timing(run)

    compare = commands.add_parser("compare", help="two results of `run -o`; exit code 1 past the threshold")
    compare.set_defaults(command=_compare)
    compare.add_argument("old", metavar="OLD.json")
    compare.add_argument("new", metavar="NEW.json")
    compare.add_argument("--threshold", type=float, default=1.1, help="the ratio that is too much (default 1.1)")
    compare.add_argument("--peers", metavar="A,B", default="fuser", help="whose rows to compare (default fuser)")

    call = commands.add_parser("call", help="the call path alone")
    call.set_defaults(command=_call)
    _add_timing(call)

    imports = commands.add_parser("import", help="what `import fuser` adds to `import torch`")
    imports.set_defaults(command=_import)
    imports.add_argument("--rounds", type=int, default=7, help="processes for each (default 7)")
    return parser


def _add_timing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9, help="samples of each peer (default 9)")
    parser.add_argument("--seconds", type=float, default=0.02, help="length of a sample (default 0.02)")
    parser.add_argument("--threads", type=int, help="threads of every peer; the process is pinned to as many CPUs")


def _run(options: argparse.Namespace) -> int:
    output = _output(options.output)
    _prepare(options)
    from bench import cases, peers, run

    passes = [p for p in (p.strip() for p in options.passes.split(",")) if p]
    unknown = [p for p in passes if p not in cases.PASSES]
    if unknown or not passes:
        raise BenchError(f"--passes takes {' and '.join(cases.PASSES)}, got {options.passes!r}")
    chosen, wanted = cases.select(options.cases), peers.selected(options.peers, fuser=not options.no_fuser)
    settings = run.Settings(options.rounds, options.seconds, options.first_call, options.memory)
    run.run(chosen, list(dict.fromkeys(passes)), wanted, settings, lambda data: _save(data, output))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from bench import compare

    names = [n for n in (n.strip() for n in options.peers.split(",")) if n]
    return compare.compare(options.old, options.new, options.threshold, names)


def _call(options: argparse.Namespace) -> int:
    _prepare(options)
    from bench import call

    call.run(options.rounds, options.seconds)
    return 0


def _import(options: argparse.Namespace) -> int:
    if options.rounds < 1:
        raise BenchError(f"--rounds must be at least 1, got {options.rounds}")
    from bench import import_time

    import_time.run(options.rounds)
    return 0


def _prepare(options: argparse.Namespace) -> None:
    """Check the timing options and set the number of threads, before torch is imported."""
    if options.rounds < 1:
        raise BenchError(f"--rounds must be at least 1, got {options.rounds}")
    if not (math.isfinite(options.seconds) and options.seconds > 0):
        raise BenchError(f"--seconds must be a positive number, got {options.seconds}")
    if options.threads is not None:
        from bench import machine

        machine.limit_threads(options.threads)


def _output(name: str | None) -> Path | None:
    """Where to write, known to be writable before hours of measuring."""
    if name is None:
        return None
    path = Path(name)
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise BenchError(f"can't write {name}")
    return path


def _save(data: dict[str, Any], path: Path | None) -> None:
    """Written beside and renamed, so that an interrupted run leaves a whole file."""
    if path is None:
        return
    with tempfile.NamedTemporaryFile("w", dir=path.absolute().parent, delete=False) as file:
        json.dump(data, file, indent=1)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
