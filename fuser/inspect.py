"""A program after each stage, as text, as data and as a drawing: what `fuser dump` prints."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuser.codegen.plan import AtenStep, KernelStep, PackStep, Plan
from fuser.fused import FusedNode
from fuser.pipeline import Stages
from fuser.runtime.memory import place


def text(stages: Stages, stage: str) -> str:
    """The stage for people: a program as Python, the kernels as C++, the plan as a list of steps."""
    if stage == "code":
        return "\n".join(stages.plan.sources())
    if stage == "plan":
        return _plan_text(stages.plan)
    module = _module(stages, stage)
    lines = [_line(node) for node in module.graph.nodes]
    for node in module.graph.nodes:
        if "fused" in node.meta:
            lines += ["", *_fused_lines(node.meta["fused"])]
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
    return {"stage": stage, "nodes": [_node_data(node) for node in _module(stages, stage).graph.nodes]}


def dot(stages: Stages, stage: str) -> str:
    """The stage's graph in Graphviz's language."""
    module = _module(stages, "fused" if stage in ("code", "plan") else stage)
    lines = ["digraph fuser {", "  node [shape=box, fontname=monospace];"]
    for node in module.graph.nodes:
        style = ', style=filled, fillcolor="lightblue"' if "fused" in node.meta else ""
        lines.append(f'  "{node.name}" [label="{node.name}\\n{_shape(node)}"{style}];')
        lines += [f'  "{source.name}" -> "{node.name}";' for source in node.all_input_nodes]
    return "\n".join([*lines, "}"])


def _module(stages: Stages, stage: str) -> GraphModule:
    return {"captured": stages.captured, "canonical": stages.canonical, "fused": stages.fused}[stage].graph_module


def _line(node: Node) -> str:
    arguments = ", ".join([*map(_argument, node.args), *(f"{k}={_argument(v)}" for k, v in node.kwargs.items())])
    if node.op == "placeholder":
        return f"{node.name}: {_shape(node)}"
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


def _fused_lines(fused: FusedNode) -> list[str]:
    how = "; ".join(fused.notes)
    header = f"{fused.name} ({fused.pattern}{': ' + how if how else ''}):"
    return [
        header,
        *(
            "    " + _line(node) if node.op != "output" else f"    return {node.args[0]}"
            for node in fused.members.graph.nodes
        ),
    ]


def _node_data(node: Node) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": node.name,
        "op": node.op,
        "target": str(node.target),
        "inputs": [n.name for n in node.all_input_nodes],
    }
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
            "members": [_node_data(n) for n in fused.members.graph.nodes if n.op == "call_function"],
        }
    return entry


def _plan_text(plan: Plan) -> str:
    layout = place(plan)
    lines = [f"arena: {layout.nbytes} bytes", "values:"]
    for i, value in enumerate(plan.values):
        where = f" at {layout.offsets[i]}" if i in layout.offsets else " fresh" if i in layout.fresh else ""
        lines.append(f"  %{i}{' (' + value.node + ')' if value.node else ''}: {value.describe()}{where}")
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
