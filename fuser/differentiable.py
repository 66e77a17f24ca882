"""A program as a function that autograd, forward-mode AD and `torch.func` can see through, to any order.

Plain calls run compiled plans: forward with what the gradient needs kept, backward through one C++ node. Inside
`torch.func` transforms and forward-mode levels, and for gradients of gradients, an `autograd.Function` applies the
derivative programs, each of which is again such a function, traced and compiled when first needed.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser import pipeline, report
from fuser.passes.partition import Split, partition, reached_inputs
from fuser.program import Program
from fuser.torch_private import FakeTensor, active_transform, is_batched


class FuserWarning(UserWarning):
    """Something runs slower than it could, or eagerly; the message says why and what would help."""


class Compiler:
    """Compiles programs of one optimised model: its native runtime, packed weights and arenas, and its report."""

    def __init__(self, native: Any, target: report.Report) -> None:
        self.native, self.report = native, target
        self.warned: set[str] = set()
        self.packs, self.arenas = native.PackStore(), native.ArenaPool()
        self.lock = threading.RLock()

    def warn(self, message: str) -> None:
        """Say it once."""
        if message not in self.warned:
            self.warned.add(message)
            warnings.warn(message, FuserWarning, stacklevel=5)

    def plan(self, program: Program, what: str, seconds: dict[str, float] | None = None) -> Any:
        """`program` compiled, noted in the report as `what`."""
        with self.lock:
            stages = pipeline.Stages(program)
            stages.seconds.update(seconds or {})
            executable = pipeline.compile(program, self.packs, self.arenas, self.native, stages)
            for failure in stages.failures:
                self.warn(f"a kernel could not be built, its operations run through ATen: {failure}")
            self.report.add_compiled(pipeline.compiled_entry(what, stages, executable.layout.nbytes))
            return executable

    def function(self, program: Program, variables: Sequence[int], what: str, seconds: dict | None = None) -> Any:
        """The native function of `program` whose gradient with respect to the inputs at `variables` is compiled."""
        start = time.perf_counter()
        with self.lock:
            split = partition(program.returning_draws(), variables)
            seconds = {**(seconds or {}), "derive": time.perf_counter() - start}
            plan = self.plan(split.forward, what, seconds)
            split.keep_layouts([plan.plan.values[i].strides for i in plan.plan.outputs])
            gradients = _Gradients(self, program, split, what)
            return self.native.Function(
                plan.native,
                len(program.results),
                [i for kind, i in split.sources if kind == "result"],
                len(program.draws),
                split.differentiable,
                split.variables,
                split.unread,
                gradients.pullback,
                gradients.higher,
            )


class _Gradients:
    """What a native function calls for its gradient: the backward plans, and gradients that are differentiable."""

    def __init__(self, compiler: Compiler, program: Program, split: Split, what: str) -> None:
        self.compiler, self.program, self.split, self.what = compiler, program, split, what
        self.function: Differentiable | None = None

    def pullback(self, defined: tuple[bool, ...], wanted: tuple[bool, ...]) -> tuple:
        """(plan, the sources of its inputs, per variable the position of its gradient or -1)."""
        program, used, gradients = self.split.pullback(defined, wanted)
        if not program.results:
            return None, [], gradients
        kept = len(self.split.sources)
        sources = [self.split.sources[i] if i < kept else ("cotangent", i - kept) for i in used]
        return self.compiler.plan(program, f"gradient of {self.what}").native, sources, gradients

    def higher(self, inputs: tuple, cotangents: tuple, wanted: tuple[bool, ...]) -> tuple:
        """Gradients through which autograd can go once more."""
        if self.function is None:
            # The same random numbers as before: they come with the inputs.
            self.function = Differentiable(self.program.with_draws_given(), self.compiler, self.what)
        variables = self.split.variables
        full = dict(zip(self.split.differentiable, cotangents))
        chosen = [i for i, wish in zip(variables, wanted) if wish]
        given = [i for i in self.split.differentiable if full[i] is not None]
        gradients = self.function.gradients(chosen, given, inputs, [full[i] for i in given])
        return tuple(gradients.get(i) for i in variables)


class Differentiable:
    """A program as a function of flat tensors, differentiable in every way that an eager function is.

    Writes to inputs are not part of it. Call it with one tensor per input of the program, of the traced shapes and
    dtypes; it returns a tuple of tensors.
    """

    def __init__(self, program: Program, compiler: Compiler, what: str) -> None:
        self.program = program.primitive()
        self.compiler, self.what = compiler, what
        self.derived: dict[Any, Differentiable] = {}
        self.recorded: dict[tuple[int, ...], Any] = {}
        self.variables = self.program.variables()

    def __call__(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if any(isinstance(t, FakeTensor) for t in flat):
            return tuple(self.program.graph_module(*flat))
        if active_transform() is not None:
            return _Apply.apply(self, *flat)
        return self.run(*flat)

    def run(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outside of every transform: the compiled plan, recorded for autograd where a gradient is wanted."""
        if any(type(t) not in _PLAIN or is_batched(t) or not t.is_cpu or t.layout is not torch.strided for t in flat):
            return tuple(self.program.graph_module(*flat))
        flat = tuple(t.resolve_conj().resolve_neg() for t in flat)
        variables: tuple[int, ...] = ()
        if torch.is_grad_enabled():
            variables = tuple(i for i in self.variables if flat[i].requires_grad)
        with self.compiler.lock:
            function = self.recorded.get(variables)
            if function is None:
                function = self.compiler.function(self.program, variables, self.what)
                self.recorded[variables] = function
        return function(*flat)

    def gradients(
        self, wanted: Sequence[int], given: Sequence[int], inputs: Sequence[torch.Tensor], cotangents: Sequence
    ) -> dict[int, torch.Tensor]:
        """The gradients of the inputs at `wanted`, those that the results at `given` do not depend on left out."""
        reached = reached_inputs(self.program, given)
        wanted = [i for i in wanted if i in reached]
        return dict(zip(wanted, self.vjp(wanted, given)(*inputs, *cotangents))) if wanted else {}

    def vjp(self, wanted: Sequence[int], given: Sequence[int]) -> Differentiable:
        """The gradient of the inputs at `wanted` as a function of the inputs and cotangents of the results `given`."""
        return self._derive(("vjp", tuple(wanted), tuple(given)), lambda: self.program.vjp(wanted, given), "vjp")

    def jvp(self, moving: Sequence[int]) -> Differentiable:
        """The tangents of the floating-point results as a function of the inputs and tangents of those at `moving`."""
        return self._derive(("jvp", tuple(moving)), lambda: self.program.jvp(moving), "jvp")

    def vmap(self, size: int, in_dims: Sequence[int | None]) -> Differentiable:
        """The function over a leading axis."""
        return self._derive(("vmap", size, tuple(in_dims)), lambda: self.program.vmap(size, in_dims), "vmap")

    def _derive(self, key: tuple, make: Callable[[], Program], how: str) -> Differentiable:
        with self.compiler.lock:
            if key not in self.derived:
                self.derived[key] = Differentiable(make(), self.compiler, f"{how} of {self.what}")
            return self.derived[key]


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class _Apply(torch.autograd.Function):
    """The derivative rules of a `Differentiable`: each applies another `Differentiable`."""

    @staticmethod
    def forward(function: Differentiable, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return function.run(*flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.function = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)
        ctx.real = [i for i, t in enumerate(output) if t.is_floating_point()]
        ctx.mark_non_differentiable(*(t for t in output if not t.is_floating_point()))
        ctx.count = len(output)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple:
        function = ctx.function
        wanted = [i for i in function.variables if ctx.needs_input_grad[i + 1]]
        given = [i for i in ctx.real if cotangents[i] is not None]
        gradients: list[Any] = [None] * (1 + len(function.program.inputs))
        if wanted and given:
            found = function.gradients(wanted, given, ctx.saved_tensors, [cotangents[i] for i in given])
            for i, value in found.items():
                gradients[i + 1] = value
        return tuple(gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple:
        function = ctx.function
        moving = [i for i in function.variables if tangents[i] is not None]
        results: list[Any] = [None] * ctx.count
        if moving:
            values = function.jvp(moving)(*ctx.saved_tensors, *(tangents[i] for i in moving))
            for i, value in zip(ctx.real, values):
                results[i] = value
        return tuple(results)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, function: Differentiable, *flat: torch.Tensor) -> tuple:
        dims = in_dims[1:]
        moved = [t if d is None else t.movedim(d, 0) for t, d in zip(flat, dims)]
        batched = function.vmap(info.batch_size, [None if d is None else 0 for d in dims])
        results = batched(*moved)
        return results, tuple(0 for _ in results)
