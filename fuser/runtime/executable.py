"""Plan + loaded kernels -> a native plan that one C++ call runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fuser.codegen.plan import AtenStep, KernelStep, PackStep, Plan, PythonStep, Step, Value
from fuser.runtime.memory import Layout, place

# Plans estimated to run longer than this many elements' work give up the GIL meanwhile.
_LONG_WORK = 20_000


@dataclass
class Executable:
    """A compiled program: the plan, where its buffers live, and the native object that runs it."""

    plan: Plan
    layout: Layout
    native: Any

    def __call__(self, *tensors: Any) -> list[Any]:
        """Run on the program's inputs, in order; returns its flat results."""
        return self.native.run(list(tensors))


def make_executable(native: Any, plan: Plan, addresses: dict[str, int], packs: Any, arenas: Any) -> Executable:
    """`addresses` maps each kernel's source to its function; `packs` and `arenas` belong to the optimised model."""
    layout = place(plan)
    spec = {
        "inputs": sum(v.kind == "input" for v in plan.values),
        "values": [_value(i, v, layout) for i, v in enumerate(plan.values)],
        "arena_bytes": layout.nbytes,
        "steps": [_step(s, addresses) for s in plan.steps],
        "outputs": list(plan.outputs),
        "release_gil": _is_long(plan),
    }
    return Executable(plan, layout, native.Plan(spec, packs=packs, arenas=arenas))


def _value(index: int, value: Value, layout: Layout) -> tuple:
    shape = (list(value.sizes), list(value.strides), value.dtype)
    if value.kind == "input":
        return ("input", value.index, *shape)
    if value.kind == "constant":
        return ("constant", value.tensor)
    if value.kind == "view":
        return ("view", value.base, value.offset, *shape[:2])
    if value.kind == "aten":
        return ("aten", *shape)
    if value.kind == "packed":
        return ("packed", value.key, value.nbytes)
    if index in layout.offsets:
        return ("arena", layout.offsets[index], *shape)
    return ("fresh", *shape)


def _step(step: Step, addresses: dict[str, int]) -> tuple:
    if isinstance(step, KernelStep):
        return ("kernel", step.name, addresses[step.source], step.values, step.arguments)
    if isinstance(step, PackStep):
        return ("pack", step.name, addresses[step.source], step.read, step.packed, step.arguments)
    if isinstance(step, PythonStep):
        return ("python", step.function, step.values, step.outs)
    assert isinstance(step, AtenStep)
    name, overload = step.op._schema.name, step.op._schema.overload_name
    return ("aten", name, overload, step.arguments, step.outs, step.pure)


def _is_long(plan: Plan) -> bool:
    """Whether the plan touches so much memory that other Python threads should run meanwhile."""
    elements = 0
    for value in plan.values:
        count = 1
        for n in value.sizes:
            count *= n
        elements += count
    return elements > _LONG_WORK
