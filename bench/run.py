"""`python -m bench run`: every case, each peer checked, then all timed in turn."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bench import fresh, machine, table
from bench.cases import Case
from bench.check import Reference
from bench.errors import Unavailable
from bench.peers import Peer, Prepared
from bench.timing import interleave

SCHEMA = 1


@dataclass(frozen=True)
class Settings:
    """How a run measures: rounds, seconds a sample, and the slow measurements that each take fresh processes."""

    rounds: int = 9
    seconds: float = 0.02
    first_call: bool = False
    memory: bool = False


@dataclass
class Record:
    """One peer on one case and pass; times in microseconds per call.

    `status` is "timed", "missing" (not installed, or no support for the case), "wrong" (its results differ from
    eager's in float64) or "failed" (an error); all but the first have the reason in `message`. `disturbance` is the
    share of the machine's CPU time that other processes took while it was timed, in the worst of its rounds.
    """

    case: str
    direction: str
    peer: str
    status: str
    message: str = ""
    median_us: float | None = None
    min_us: float | None = None
    samples_us: list[float] = field(default_factory=list)
    disturbance: float = 0.0
    first_call_cold_s: float | None = None
    first_call_warm_s: float | None = None
    peak_memory_bytes: int | None = None


def run(
    cases: list[Case],
    passes: list[str],
    peers: list[Peer],
    settings: Settings,
    save: Callable[[dict[str, Any]], None] = lambda data: None,
) -> dict[str, Any]:
    """Measure and print; returns everything as JSON-able data, which also goes to `save` after each case."""
    data: dict[str, Any] = {"schema": SCHEMA, "machine": machine.facts(), "settings": asdict(settings), "results": []}
    print(table.machine_line(data["machine"]))
    records: list[Record] = []
    for direction in passes:
        columns = [peer.name for peer in peers if direction in peer.passes]
        if not columns:
            print(f"\n{direction}: none of the chosen peers computes it")
            continue
        print(f"\n{direction} (microseconds, medians of {settings.rounds})\n")
        print(table.times_header(columns), flush=True)
        for case in cases:
            found = measure(case, direction, peers, settings)
            print(table.times_row(case.name, found, columns), flush=True)
            for line in table.messages(found):
                print(line, flush=True)
            records += found
            data["results"] = [asdict(r) for r in records]
            save(data)
    for text in (table.first_calls(records), table.memory(records)):
        if text:
            print(f"\n{text}")
    return data


def measure(case: Case, direction: str, peers: list[Peer], settings: Settings) -> list[Record]:
    """One record for each peer that knows the pass."""
    # Compiled code of earlier cases would be searched at each call of torch.compile's, up to its limit.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    ready: dict[str, Prepared] = {}
    records: dict[str, Record] = {}
    with torch.set_grad_enabled(direction == "reverse"):
        reference = Reference(case, direction)
        for peer in peers:
            if direction not in peer.passes:
                continue
            status, message = "timed", ""
            try:
                prepared, fault = _checked(peer, case, direction, reference)
                if fault:
                    status, message = "wrong", fault
                else:
                    ready[peer.name], message = prepared, prepared.note()
            except Unavailable as error:
                status, message = "missing", str(error)
            except Exception as error:  # a peer's own failure, of whatever kind, must not end the run
                lines = str(error).strip().splitlines()
                status, message = "failed", f"{type(error).__name__}: {lines[0] if lines else ''}"
            records[peer.name] = Record(case.name, direction, peer.name, status, message)
        calls = {name: prepared.call for name, prepared in ready.items()}
        timings = interleave(calls, settings.rounds, settings.seconds)
        for name, samples in timings.samples.items():
            record = records[name]
            record.disturbance = round(timings.disturbance, 3)
            record.samples_us = [1e6 * s for s in samples]
            record.median_us, record.min_us = statistics.median(record.samples_us), min(record.samples_us)
    ready.clear()
    for peer in peers:
        if peer.name in calls:
            _measure_in_fresh_processes(records[peer.name], peer, settings)
    return list(records.values())


def _checked(peer: Peer, case: Case, direction: str, reference: Reference) -> tuple[Prepared, str | None]:
    """The peer ready to be timed, and what is wrong with its results, if anything."""
    prepared = peer.prepare(*case.build(direction, dropout=False), direction)
    fault = reference.fault(prepared.arrays(prepared.call()))
    if fault or direction == "forward" or not case.has_dropout:
        return prepared, fault
    prepared = peer.prepare(*case.build(direction), direction)
    prepared.call()
    return prepared, None


def _measure_in_fresh_processes(record: Record, peer: Peer, settings: Settings) -> None:
    arguments = (record.case, record.direction, record.peer)
    try:
        if settings.first_call:
            record.first_call_cold_s, record.first_call_warm_s = fresh.first_calls(*arguments)
        if settings.memory and peer.prepare_for_memory:
            record.peak_memory_bytes = fresh.memory(*arguments)
    except fresh.ChildError as error:
        record.message = "; ".join(filter(None, (record.message, str(error))))
