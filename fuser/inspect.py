"""A program after each stage, as text, as data and as a drawing: what `fuser dump` prints."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from fuser.codegen.plan import AtenStep, KernelStep, PackStep, Plan
from fuser.fused import FusedNode
from fuser.pipeline import Stages
from fuser.program import Program
from fuser.runtime.memory import place


def text(stages: Stages, stage: str) -> str:
    """The stage for people: a program as Python, the kernels as C++, the plan as a list of steps."""
    if stage == "code":
        return "\n".join(stages.plan.sources())
    if stage == "plan":
        return _plan_text(stages.plan, _input_names(stages.fused))
    program = _program(stages, stage)
    nodes, names = program.graph_module.graph.nodes, _input_names(program)
    lines = _kept_lines(stages) + [_line(node, names) for node in nodes]
    for node in nodes:
        if "fused" in node.meta:
            lines += ["", *_fused_lines(node.meta["fused"], names)]
    return "\n".join(lines)


def data(stages: Stages, stage: str) -> dict[str, Any]:
    """The stage as plain dicts and lists."""
    if stage == "code":
        return {"stage": stage, "kernels": [{"name": n, "source": s} for s, n in stages.plan.sources().items()]}
    if stage == "plan":
        layout = place(stages.plan)
        return {
            "stage": stage,
            "arena_bytes": layout.nbytes,
            "outputs": stages.plan.outputs,
            "values": [v.describe() for v in stages.plan.values],
            "steps": [_step_text(stages.plan, step) for step in stages.plan.steps],
        }
    program = _program(stages, stage)
    names = _input_names(program)
    found: dict[str, Any] = {"stage": stage}
    if stages.kept is not None:
        found["kept"] = [{"name": n, "shape": list(v.shape), "bytes": _bytes(v)} for n, v in stages.kept]
    return {**found, "nodes": [_node_data(node, names) for node in program.graph_module.graph.nodes]}


def dot(stages: Stages, stage: str) -> str:
    """The graph after `stage` (captured, canonical or fused) in Graphviz's language."""
    program = _program(stages, stage)
    names = _input_names(program)
    lines = ["digraph fuser {", "  node [shape=box, fontname=monospace];"]
    for node in program.graph_module.graph.nodes:
        style = ', style=filled, fillcolor="lightblue"' if "fused" in node.meta else ""
        lines.append(f'  "{node.name}" [label="{_label(node.name, names)}\\n{_shape(node)}"{style}];')
        lines += [f'  "{source.name}" -> "{node.name}";' for source in node.all_input_nodes]
    return "\n".join([*lines, "}"])


def _kept_lines(stages: Stages) -> list[str]:
    """What lives from the forward to the backward pass besides inputs and results."""
    if stages.kept is None:
        return []
    total = sum(_bytes(value) for _, value in stages.kept)
    parts = [f"{name} {'x'.join(map(str, value.shape))} ({_bytes(value)} bytes)" for name, value in stages.kept]
    return [f"# kept from the forward pass: {total} bytes" + (": " + ", ".join(parts) if parts else "")]


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def _program(stages: Stages, stage: str) -> Program:
    return {"captured": stages.captured, "canonical": stages.canonical, "fused": stages.fused}[stage]


def _input_names(program: Program) -> dict[str, str]:
    """The placeholders' names -> what the model calls them."""
    return {node.name: given.name for node, given in zip(program.placeholders, program.inputs)}


def _label(name: str, names: dict[str, str]) -> str:
    """A node's name, with what the model calls it if it is an input."""
    return f"{name} ({names[name]})" if name in names else name


def _line(node: Node, names: dict[str, str]) -> str:
    arguments = ", ".join([*map(_argument, node.args), *(f"{k}={_argument(v)}" for k, v in node.kwargs.items())])
    if node.op == "placeholder":
        return f"{_label(node.name, names)}: {_shape(node)}"
    if node.op == "output":
        return f"return {', '.join(map(str, node.args[0]))}"
    return f"{node.name}: {_shape(node)} = {_target(node)}({arguments})"


def _argument(argument: Any) -> str:
    return str(argument)


def _target(node: Node) -> str:
    return (
        getattr(node.target, "__name__", None)
        if callable(node.target) and not isinstance(node.target, torch._ops.OpOverload)
        else str(node.target)
    )


def _shape(node: Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{'x'.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"{len(value)} results"
    return ""


def _fused_lines(fused: FusedNode, names: dict[str, str]) -> list[str]:
    how = "; ".join(fused.notes)
    header = f"{fused.name} ({fused.pattern}{': ' + how if how else ''}):"
    return [
        header,
        *(
            "    " + _line(node, names) if node.op != "output" else f"    return {node.args[0]}"
            for node in fused.members.graph.nodes
        ),
    ]


def _node_data(node: Node, names: dict[str, str]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": node.name,
        "op": node.op,
        "target": str(node.target),
        "inputs": [n.name for n in node.all_input_nodes],
        "arguments": _plain_arguments(node),
    }
    if node.op == "placeholder":
        entry["input"] = names.get(node.name)
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        entry |= {
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "strides": list(value.stride()),
        }
    fused = node.meta.get("fused")
    if fused is not None:
        entry |= {
            "pattern": fused.pattern,
            "how": list(fused.notes),
            "members": [_node_data(n, names) for n in fused.members.graph.nodes if n.op == "call_function"],
        }
    return entry


def _plain_arguments(node: Node) -> dict[str, Any]:
    """The arguments without tensors, by the operator's names for them, else by position."""
    names = range(len(node.args))
    if isinstance(node.target, torch._ops.OpOverload):
        names = [a.name for a in node.target._schema.arguments]
    given = {str(name): value for name, value in zip(names, node.args)} | node.kwargs
    return {name: _plain(value) for name, value in given.items() if not _holds_node(value)}


def _holds_node(value: Any) -> bool:
    return isinstance(value, Node) or isinstance(value, (list, tuple)) and any(map(_holds_node, value))


def _plain(value: Any) -> Any:
    """`value` as JSON has it: numbers that JSON lacks, dtypes and the like as strings."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, str)) or isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)


def _plan_text(plan: Plan, names: dict[str, str]) -> str:
    layout = place(plan)
    lines = [f"arena: {layout.nbytes} bytes", "values:"]
    for i, value in enumerate(plan.values):
        where = f" at {layout.offsets[i]}" if i in layout.offsets else " fresh" if i in layout.fresh else ""
        lines.append(f"  %{i}{f' ({_label(value.node, names)})' if value.node else ''}: {value.describe()}{where}")
    lines.append("steps:")
    lines += [f"  {i}: {_step_text(plan, step)}" for i, step in enumerate(plan.steps)]
    return "\n".join([*lines, "returns: " + ", ".join(f"%{v}" for v in plan.outputs)])


def _step_text(plan: Plan, step: Any) -> str:
    values = lambda ids: ", ".join(f"%{v}" for v in ids)  # noqa: E731
    if isinstance(step, KernelStep):
        reads = [v for v in step.values if v not in step.writes]
        return f"{values(step.writes)} = kernel {step.name}({values(reads)})"
    if isinstance(step, PackStep):
        return f"%{step.packed} = pack {step.name}(%{step.read}), kept while its content is the same"
    if isinstance(step, AtenStep):
        return f"{values(step.writes) or 'nothing'} = {step.op}({values(step.reads)})"
    return f"{values(step.outs)} = python {step.function}({values(step.values)})"
