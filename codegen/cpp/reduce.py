"""Sums over axes, with the pointwise work that makes the summands done in the same sweep."""

from __future__ import annotations

from dataclasses import replace

import torch

from fuser.codegen import compiler
from fuser.codegen.cpp import loops, pointwise, printer
from fuser.codegen.cpp.anchor import Anchored
from fuser.codegen.cpp.anchored import C_TYPES, environment
from fuser.codegen.epilogue import Operand, build_body, inputs_of_body, outputs_of, shape_where_read
from fuser.codegen.kernel import Body
from fuser.codegen.plan import KernelStep, broadcast_strides, view_strides
from fuser.fused import tensor_meta


def source(body: Body, kept: int, reduced: int, inner_is_summed: bool, name: str) -> str:
    """C++ for `name(ptrs, args, threads)`; the body's one store names what is summed.

    ptrs: the loads, then the result. args: sizes of the kept axes and of the summed ones, then per load its strides
    over them in elements. The innermost loop, which runs in vectors, is the last of the summed axes or of the kept.
    """
    step = (kept + reduced if inner_is_summed else kept) - 1
    tensors = [
        pointwise.Tensor(f"{load.name}_at", f"const {C_TYPES[load.dtype]}*", load.steps[step]) for load in body.loads
    ]
    return (
        environment()
        .get_template("reduce.cpp.j2")
        .render(
            name=name,
            title=" -> ".join([*(s.function.name for s in body.statements), "sum"]),
            real=C_TYPES[body.dtype],
            vector_bytes=compiler.vector_bytes(),
            out_type=C_TYPES[body.stores[0].dtype],
            kept=kept,
            reduced=reduced,
            inner_is_summed=inner_is_summed,
            functions=printer.functions(body),
            tensors=tensors,
            value=body.stores[0].value,
            cost=pointwise.cost(body),
            full=_lines(body, tensors, "width"),
            partial=_lines(body, tensors, "n"),
        )
    )


def _lines(body: Body, tensors: list[pointwise.Tensor], count: str) -> list[str]:
    lines = []
    for load, t in zip(body.loads, tensors):
        kind = "mask" if load.dtype is torch.bool else "vec"
        value = {
            "broadcast": f"broadcast(*p.{t.name})",
            "strided": f"load_strided(p.{t.name} + i * p.{t.name}_step, p.{t.name}_step, {count})",
            "unit": f"load(p.{t.name} + i)" if count == "width" else f"load_partial(p.{t.name} + i, n)",
        }[t.step]
        lines.append(f"const {kind} {load.name} = {value};")
    return lines + printer.statements(body)


class Sum(Anchored):
    """`sum` over some axes of a floating-point value."""

    def refusal(self) -> str | None:
        """Why ATen's sum is the better choice, if it is."""
        if any(tensor_meta(n).numel() == 0 for n in self.fused.anchor.all_input_nodes):
            return "an empty sum"
        return None

    def lower(self) -> None:
        lowering, values = self.lowering, self.lowering.plan.values
        summed = self.fused.anchor.args[0]
        shape = tuple(tensor_meta(summed).shape)
        axes = self.axes(len(shape))
        sources = inputs_of_body(self.fused, None) or [summed]
        places, strides = [], []
        for source_node in sources:
            place = self.place_of(source_node)
            own = shape if source_node is summed else shape_where_read(self.fused, source_node)
            seen = view_strides(own, broadcast_strides(values[place].sizes, values[place].strides, own), shape)
            if seen is None:
                place = loops.spread(lowering, place, own, None)
                seen = view_strides(own, values[place].strides, shape)
            places.append(place)
            strides.append(seen)
        # Ordered by how the widest operand lies in memory.
        main = max(range(len(places)), key=lambda i: sum(s != 0 for s in strides[i]))
        inner = min((s, i) for i, s in enumerate(strides[main]) if shape[i] > 1 or len(shape) == 1 or max(shape) == 1)[
            1
        ]
        kept_axes = [i for i in range(len(shape)) if i not in axes]
        kept_sizes, kept = self.loops_over(shape, kept_axes, strides, None)
        reduced_sizes, reduced = self.loops_over(shape, axes, strides, main)
        operands = [Operand(s, (*k, *r)) for s, k, r in zip(sources, kept, reduced)]
        inner_is_summed = inner in axes
        body = build_body(
            self.fused,
            [Operand(o.node, o.strides) for o in operands],
            [Operand(summed, (0,) * (len(kept_sizes) + len(reduced_sizes)))],
            self.compute_dtype(),
            None,
            anchor_is_loaded=True,
        )
        step = (len(kept_sizes) + len(reduced_sizes) if inner_is_summed else len(kept_sizes)) - 1
        body = _with_inner_steps(body, [o.strides for o in operands], step)
        output = outputs_of(self.fused)[0]
        meta = tensor_meta(output)
        result = lowering.buffer(None, tuple(meta.shape), meta.stride(), meta.dtype)
        name = loops.symbol_of(self.fused)
        code = source(body, len(kept_sizes), len(reduced_sizes), inner_is_summed, name)
        arguments = [*kept_sizes, *reduced_sizes, *(s for o in operands for s in o.strides)]
        lowering.plan.steps.append(KernelStep(name, code, [*places, result], arguments, [result], self.fused.name))
        loops.define_results(lowering, self.node, [result])

    def axes(self, rank: int) -> list[int]:
        given = self.fused.anchor.args[1] if len(self.fused.anchor.args) > 1 else None
        return sorted({d % rank for d in given}) if given else list(range(rank))

    def loops_over(
        self, shape: tuple[int, ...], axes: list[int], strides: list[tuple[int, ...]], main: int | None
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """Loops over some axes, merged where all operands allow; in memory's order of `main`, else in the axes'."""
        sizes = [shape[i] for i in axes]
        own = [tuple(s[i] for i in axes) for s in strides]
        order = own[main] if main is not None else tuple(_dense(sizes))
        merged, seen = loops.collapse(sizes, [*own, order])
        return merged, seen[:-1]

    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if tensor_meta(self.fused.anchor.args[0]).dtype is torch.float64 else torch.float32


def _dense(sizes: list[int]) -> list[int]:
    strides, step = [], 1
    for n in reversed(sizes):
        strides.insert(0, step)
        step *= n
    return strides


def _with_inner_steps(body: Body, strides: list[tuple[int, ...]], inner: int) -> Body:
    """The loads with the step that each makes along the innermost loop, which need not be the last of its strides."""
    loads = []
    for load, own in zip(body.loads, strides):
        steps = ["broadcast" if s == 0 else "strided" for s in own]
        steps[inner] = "broadcast" if own[inner] == 0 else "unit" if own[inner] == 1 else "strided"
        loads.append(replace(load, steps=tuple(steps)))
    return replace(body, loads=tuple(loads))
