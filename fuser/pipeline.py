"""compile(program) -> Executable: the stages in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fuser import report
from fuser.capture import capture
from fuser.codegen import cache
from fuser.codegen.lowering import Lowering
from fuser.codegen.plan import Plan
from fuser.fused import FusedNode, tensor_meta
from fuser.passes import canonicalise, fuse
from fuser.passes.partition import partition
from fuser.program import Program
from fuser.runtime.executable import Executable, make_executable
from fuser.state import observe


@dataclass
class Stages:
    """The program after each stage, and the seconds each took."""

    captured: Program
    canonical: Program | None = None
    fused: Program | None = None
    lowering: Lowering | None = None
    plan: Plan | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    hits: int = 0
    failures: list[str] = field(default_factory=list)
    kept: list[tuple[str, torch.Tensor]] | None = None  # of a backward program: what the forward keeps for it

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def compile(program: Program, packs: Any, arenas: Any, native: Any, stages: Stages | None = None) -> Executable:
    """Canonicalise, fuse, lower, generate, build and load; `packs` and `arenas` are the optimised model's own."""
    stages = stages or Stages(program)
    rewrite(stages)
    addresses = build(stages)
    with stages.timed("plan"):
        return make_executable(native, stages.plan, addresses, packs, arenas)


def rewrite(stages: Stages) -> None:
    """The stages from the captured program to the plan; nothing is compiled."""
    with stages.timed("canonicalise"):
        stages.canonical = canonicalise(stages.captured)
    with stages.timed("fuse"):
        stages.fused = fuse(stages.canonical)
    with stages.timed("lower"):
        stages.lowering = Lowering(stages.fused)
        stages.plan = stages.lowering.run()


def build(stages: Stages) -> dict[str, int]:
    """The address of every kernel of the plan, by source.

    A kernel that can't be built is left out: the plan is lowered again with the members of its fused node as steps.
    """
    addresses: dict[str, int] = {}
    refused: set[str] = set()
    while True:
        wanted = {source: name for source, name in stages.plan.sources().items() if source not in addresses}
        with stages.timed("build"):
            before = cache.statistics()["hits"]
            results = cache.build([cache.Source(name, source) for source, name in wanted.items()])
            stages.hits += cache.statistics()["hits"] - before
        failed = False
        for (source, name), result in zip(wanted.items(), results):
            if isinstance(result, cache.BuildError):
                refused.add(source)
                stages.failures.append(f"{name}: {result}")
                failed = True
            else:
                addresses[source] = result.address(name)
        if not failed:
            return addresses
        with stages.timed("lower"):
            stages.fused = fuse(stages.canonical)
            stages.lowering = Lowering(stages.fused, frozenset(refused))
            stages.plan = stages.lowering.run()


def compiled_entry(signature: str, stages: Stages, arena_bytes: int) -> report.CompiledEntry:
    """What the report says of one compiled signature."""
    entry = report.CompiledEntry(
        signature,
        seconds=dict(stages.seconds),
        kernels=len(stages.plan.sources()),
        cache_hits=stages.hits,
        arena_bytes=arena_bytes,
        failures=list(stages.failures),
    )
    for node in stages.fused.graph_module.graph.nodes:
        fused = node.meta.get("fused")
        if fused is not None:
            entry.fused.append(_fused_entry(fused))
    entry.left_alone = [report.LeftAloneEntry(*a) for a in stages.lowering.left_alone]
    return entry


def _fused_entry(fused: FusedNode) -> report.FusedEntry:
    members = [n for n in fused.members.graph.nodes if n.op == "call_function"]
    names = [str(n.target).removeprefix("aten.").split(".")[0] for n in members]
    shape = "x".join(map(str, tensor_meta(members[-1]).shape))
    return report.FusedEntry(fused.name, fused.pattern, names, shape, "; ".join(fused.notes))


def stages_of(
    model: nn.Module | Callable, args: tuple, kwargs: dict, derivative: str | None = None, order: int = 1
) -> Stages:
    """Capture and rewrite a model for its arguments, compiling nothing: what `fuser dump` shows.

    With `derivative` "backward" the program that runs in the backward pass, for the parameters (for a function, for
    its arguments); with "jvp" the program of the tangents. `order` takes the derivative so many times.
    """
    start = time.perf_counter()
    captured = observe(model).captured
    program = capture(model, args, kwargs, captured, derivatives=derivative is not None)
    stages = Stages(program)
    if derivative is not None:
        wanted = [i for i, c in enumerate(captured) if c.tensor.requires_grad] or program.variables()
        for _ in range(order - (derivative == "backward")):
            program = program.primitive()
            arguments = [i for i in program.variables() if not program.inputs[i].captured]
            program = program.vjp() if derivative == "backward" else program.jvp(arguments)
        if derivative == "backward":
            split = partition(program, wanted)
            stages.kept = [(n.name, tensor_meta(n)) for n in split.forward.results[split.results :]]
            program = split.backward
        stages.captured = program
    stages.seconds["capture"] = time.perf_counter() - start
    with torch.no_grad():
        rewrite(stages)
    return stages
