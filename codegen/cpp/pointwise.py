"""Pointwise kernels: straight-line code over nested loops, the innermost in vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuser.codegen import compiler
from fuser.codegen.cpp import printer
from fuser.codegen.cpp.anchored import C_TYPES, environment
from fuser.codegen.kernel import Body, Load, Step, Store

# Rough costs per element, in units of an addition, that decide whether threads are worth waking.
_EXPENSIVE = 12


@dataclass(frozen=True)
class Tensor:
    """One tensor in a generated loop: its pointer, and how it moves along the innermost loop."""

    name: str
    pointer: str
    step: Step


def source(body: Body, rank: int, name: str) -> str:
    """C++ for `name(ptrs, args, threads)`.

    ptrs: the loads, then the stores. args: the sizes of the `rank` loops, then per load and store its strides over
    them in elements, the innermost last. A store may be the same memory as a load that moves alike.
    """
    tensors = [_tensor(load, load.name) for load in body.loads]
    tensors += [_tensor(store, f"out{i}") for i, store in enumerate(body.stores)]
    loads = list(zip(body.loads, tensors))
    return (
        environment()
        .get_template("pointwise.cpp.j2")
        .render(
            name=name,
            title=" -> ".join(s.function.name for s in body.statements) or "copy",
            real=C_TYPES[body.dtype],
            vector_bytes=compiler.vector_bytes(),
            rank=rank,
            functions=printer.functions(body),
            tensors=tensors,
            cost=cost(body),
            hoisted=[
                f"const {_kind(t)} {t.name}_value = broadcast(*{t.name});" for _, t in loads if t.step == "broadcast"
            ],
            full=_lines(body, tensors, partial=False),
            partial=_lines(body, tensors, partial=True),
        )
    )


def cost(body: Body) -> int:
    """Work per element, in units of about an addition."""
    total = len(body.loads) + len(body.stores)
    for statement in body.statements:
        total += 2 + _EXPENSIVE * printer.calls_library(statement.function)
    return total


def _tensor(access: Load | Store, name: str) -> Tensor:
    pointer = f"{'const ' if isinstance(access, Load) else ''}{C_TYPES[access.dtype]}*"
    return Tensor(f"{name}_at", pointer, access.steps[-1])


def _kind(tensor: Tensor) -> str:
    return "mask" if "bool" in tensor.pointer else "vec"


def _lines(body: Body, tensors: list[Tensor], partial: bool) -> list[str]:
    lines = []
    count = "n" if partial else "width"
    for load, t in zip(body.loads, tensors):
        kind = "mask" if load.dtype is torch.bool else "vec"
        value = {
            "broadcast": f"{t.name}_value",
            "strided": f"load_strided({t.name} + i * {t.name}_step, {t.name}_step, {count})",
            "unit": f"load_partial({t.name} + i, n)" if partial else f"load({t.name} + i)",
        }[t.step]
        lines.append(f"const {kind} {load.name} = {value};")
    lines += printer.statements(body)
    for store, t in zip(body.stores, tensors[len(body.loads) :]):
        if t.step == "unit":
            call = (
                f"store_partial({t.name} + i, {store.value}, n)" if partial else f"store({t.name} + i, {store.value})"
            )
        elif t.step == "strided":
            call = f"store_strided({t.name} + i * {t.name}_step, {t.name}_step, {store.value}, {count})"
        else:
            call = f"store_strided({t.name}, 0, {store.value}, 1)"
        lines.append(call + ";")
    return lines
