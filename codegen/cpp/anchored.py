"""What kernels with an anchor have in common: the epilogue on a finished tile, and how its operands are addressed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import torch

from fuser.codegen import compiler
from fuser.codegen.cpp import printer
from fuser.codegen.kernel import Body, Load, Store

C_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bfloat16",
    torch.float16: "half",
    torch.bool: "bool",
}


@dataclass(frozen=True)
class _Field:
    """One tensor of the epilogue in the generated `Operands` struct."""

    name: str
    pointer: str
    row: bool
    column: str


@functools.cache
def environment() -> jinja2.Environment:
    """The templates beside this file."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(
        loader=loader,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )


def render(
    template: str, name: str, body: Body, columns: int, first_pointer: int, first_stride: str, **more: object
) -> str:
    """The source of an anchored kernel.

    The body's loads and stores have steps over (batch, row, column). Their pointers follow `first_pointer`, their
    strides, three each, the C expression `first_stride`. `columns` decides how many vectors a tile row holds.
    """
    tensors: Sequence[Load | Store] = (*body.loads, *body.stores)
    fields = [
        _Field(_field_name(t, i), _pointer(t), t.steps[1] != "broadcast", t.steps[2]) for i, t in enumerate(tensors)
    ]
    return (
        environment()
        .get_template(template)
        .render(
            title=f"{name}: {' -> '.join(s.function.name for s in body.statements) or 'no epilogue'}",
            origin=[f"{s.name} = {s.function.name}({', '.join(map(str, s.arguments))})" for s in body.statements],
            real=C_TYPES[body.dtype],
            vector_bytes=vector_bytes(columns, body.dtype),
            vectors=vectors_per_row(columns, body.dtype),
            functions=printer.functions(body),
            name=name,
            operands=fields,
            cost=8 * len(body.statements),
            unroll=16 if _is_light(body) else 1,
            full=_lines(body, fields, partial=False),
            partial=_lines(body, fields, partial=True),
            operand_setup=_setup(fields, tensors, first_pointer, first_stride),
            **more,
        )
    )


def vectors_per_row(columns: int, dtype: torch.dtype) -> int:
    """Vectors in a tile's row: just enough for few columns, else two, which keeps the most products per load."""
    needed = -(-columns // vector_width(columns, dtype))
    return needed if needed <= 3 else 2


def vector_width(columns: int, dtype: torch.dtype) -> int:
    """Elements of the vectors in which a kernel with an anchor holds a row of that many columns."""
    return vector_bytes(columns, dtype) // dtype.itemsize


def vector_bytes(columns: int, dtype: torch.dtype) -> int:
    """The widest vectors of the CPU, unless vectors of 32 bytes would leave far fewer lanes empty."""
    widest = compiler.vector_bytes()
    needed = -(-columns * dtype.itemsize // 32)
    return 32 if widest == 64 and needed % 2 and needed < 8 else widest


def _is_light(body: Body) -> bool:
    """Whether the epilogue is short enough to be repeated for every register of a tile."""
    return len(body.statements) <= 8 and not any(printer.calls_library(s.function) for s in body.statements)


def _field_name(tensor: Load | Store, position: int) -> str:
    return tensor.name if isinstance(tensor, Load) else f"out{position}"


def _pointer(tensor: Load | Store) -> str:
    return f"{'const ' if isinstance(tensor, Load) else ''}{C_TYPES[tensor.dtype]}*"


def _lines(body: Body, fields: list[_Field], partial: bool) -> dict[str, list[str]]:
    """The C++ lines for one vector of columns: those that all rows share, and those of row `r`."""
    fixed, varying = [], []
    if body.accumulator:
        varying.append(f"const vec {body.accumulator} = tile[r][v];")
    for load, field in zip(body.loads, fields):
        kind = "mask" if load.dtype is torch.bool else "vec"
        line = f"const {kind} {load.name} = {_load(field, partial)};"
        (varying if field.row else fixed).append(line)
    varying += printer.statements(body)
    for store, field in zip(body.stores, fields[len(body.loads) :]):
        varying.append(_store(store.value, field, partial))
    return {"fixed": fixed, "varying": varying}


def _address(field: _Field) -> str:
    parts = [f"o.{field.name}"]
    if field.row:
        parts.append(f"(row + r) * o.{field.name}_row")
    if field.column == "unit":
        parts.append("at")
    if field.column == "strided":
        parts.append(f"at * o.{field.name}_column")
    return " + ".join(parts)


def _load(field: _Field, partial: bool) -> str:
    address = _address(field)
    if field.column == "broadcast":
        return f"broadcast(*({address}))"
    if field.column == "strided":
        return f"load_strided({address}, o.{field.name}_column, {'n' if partial else 'width'})"
    return f"load_partial({address}, n)" if partial else f"load({address})"


def _store(value: str, field: _Field, partial: bool) -> str:
    address = _address(field)
    if field.column == "strided":
        return f"store_strided({address}, o.{field.name}_column, {value}, {'n' if partial else 'width'});"
    return f"store_partial({address}, {value}, n);" if partial else f"store({address}, {value});"


def _setup(fields: list[_Field], tensors: Sequence[Load | Store], first_pointer: int, first_stride: str) -> list[str]:
    """Initialisers of the `Operands` struct: pointer (at this batch), then the strides it keeps."""
    lines = []
    for i, (field, tensor) in enumerate(zip(fields, tensors)):
        at = f"{first_stride}[{3 * i}]"
        lines.append(f"static_cast<{_pointer(tensor)}>(ptrs[{first_pointer + i}]) + batch * {at},")
        if field.row:
            lines.append(f"{first_stride}[{3 * i + 1}],")
        if field.column == "strided":
            lines.append(f"{first_stride}[{3 * i + 2}],")
    return lines
