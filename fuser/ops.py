"""Layers with bias and activation as single calls, each one compiled kernel: `linear_bias_act` and its kind.

Differentiable to any order, in forward mode and inside the transforms of `torch.func`. While something traces (a
model that is itself optimised, `torch.compile`, `make_fx`) the ATen operations that a call is made of are recorded, so
they fuse with their neighbours. Whatever no kernel can be made for runs through ATen.

The same as `torch.ops.fuser.linear_bias_act(x, weight, bias, activation, values)` and so on, where `values` are the
activation's parameters in order, all or none of them. Those go through torch's dispatcher, which takes longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fuser import pipeline
from fuser.capture import capture
from fuser.codegen.plan import KernelStep, Plan
from fuser.optimized import optimize
from fuser.patterns.activations import registered
from fuser.program import Input, Program
from fuser.runtime.executable import make_executable
from fuser.state import observe
from fuser.torch_private import active_mode, active_transform

aten = torch.ops.aten

# name -> (the activation in eager operations, its parameters and their defaults; None where one must be given)
_ACTIVATIONS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, float | None]]] = {
    "identity": (lambda x: x, {}),
    "relu": (torch.relu, {}),
    "leaky_relu": (F.leaky_relu, {"slope": 0.01}),
    "prelu": (F.leaky_relu, {"weight": 0.25}),
    "elu": (aten.elu.default, {"alpha": 1.0, "scale": 1.0, "input_scale": 1.0}),
    "celu": (F.celu, {"alpha": 1.0}),
    "gelu": (F.gelu, {}),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), {}),
    "silu": (F.silu, {}),
    "mish": (F.mish, {}),
    "softplus": (F.softplus, {"beta": 1.0, "threshold": 20.0}),
    "sigmoid": (torch.sigmoid, {}),
    "logsigmoid": (F.logsigmoid, {}),
    "hardsigmoid": (F.hardsigmoid, {}),
    "tanh": (torch.tanh, {}),
    "hardtanh": (F.hardtanh, {"low": -1.0, "high": 1.0}),
    "hardswish": (F.hardswish, {}),
    "softshrink": (F.softshrink, {"bound": 0.5}),
    "hardshrink": (F.hardshrink, {"bound": 0.5}),
    "threshold": (F.threshold, {"bound": None, "value": None}),
    "tanhshrink": (F.tanhshrink, {}),
    "softsign": (F.softsign, {}),
}
# In place, where ATen has it: what the gradient needs of the input it copies first.
_IN_PLACE: dict[str, Callable[..., torch.Tensor]] = {
    "identity": lambda x: x,
    "relu": aten.relu_.default,
    "gelu": aten.gelu_.default,
    "gelu_tanh": lambda x: aten.gelu_.default(x, approximate="tanh"),
    "silu": aten.silu_.default,
    "mish": aten.mish_.default,
    "sigmoid": aten.sigmoid_.default,
    "hardsigmoid": aten.hardsigmoid_.default,
    "tanh": aten.tanh_.default,
    "hardtanh": aten.hardtanh_.default,
    "hardswish": aten.hardswish_.default,
    "threshold": aten.threshold_.default,
}
# In-place kernels are kept for so many signatures.
_MOST_PLANS = 512


def linear_bias_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "relu",
    **parameters: float,
) -> torch.Tensor:
    """`activation(x @ weight.T + bias)`: (*, inputs), (outputs, inputs), (outputs,) -> (*, outputs).

    `activation` is "identity", one of the names in `patterns/activations.py`, or one that `register_activation` made;
    `parameters` are its parameters by name (`slope=0.2`), torch's defaults where they are left out.

    Raises `ValueError` for an unknown activation and for shapes that don't fit, `TypeError` for arguments that are not
    floating-point tensors of one dtype and for parameters that the activation doesn't have.
    """
    return _call(_linear, (x, weight, bias), activation, parameters)


def conv_bias_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str = "relu",
    **parameters: float,
) -> torch.Tensor:
    """`activation(convolution(x, weight) + bias)` over one, two or three dimensions, as `weight` has.

    (batch, inputs, *sizes) or (inputs, *sizes), (outputs, inputs // groups, *kernel), (outputs,) -> (batch, outputs,
    *sizes) or (outputs, *sizes). The geometry is that of `torch.nn.functional.conv2d`; the rest as in
    `linear_bias_act`.
    """
    return _call(_conv, (x, weight, bias, stride, padding, dilation, groups), activation, parameters)


def bias_act(x: torch.Tensor, bias: torch.Tensor, activation: str = "relu", **parameters: float) -> torch.Tensor:
    """`activation(x + bias)`, with `bias` along dimension 1 of an `x` of three or more dimensions, else along its last.

    `bias` has one dimension, of the size of that one. Activations, parameters and errors as in `linear_bias_act`.
    """
    return _call(_bias, (x, bias), activation, parameters)


def bias_act_(x: torch.Tensor, bias: torch.Tensor, activation: str = "relu", **parameters: float) -> torch.Tensor:
    """`bias_act` written over `x`, which is returned.

    Where a gradient is wanted this is what eager's own in-place operations make of it: a gradient that the output alone
    does not give (that of gelu, silu, mish and most others) keeps a copy of `x + bias`. Without gradients one kernel
    reads and writes `x`, if `x` is contiguous or channels-last.

    Raises, besides what `bias_act` raises, `RuntimeError` for a leaf that requires grad, a view of one, and memory that
    overlaps itself or `bias`. A backward pass that needs the `x` of before raises, too.
    """
    return _overwrite(x, bias, activation, _values(activation, parameters) if parameters else ())


def _call(composite: Callable, args: tuple, activation: str, parameters: dict[str, float]) -> torch.Tensor:
    values = _values(activation, parameters) if parameters else ()
    if _is_traced():
        return composite(*args, activation, values)
    return _compiled(composite, activation, values)(*args)


def _is_traced() -> bool:
    """Whether the ATen operations should be seen one by one."""
    return torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing() or active_mode() is not None


@functools.lru_cache(maxsize=256)
def _compiled(composite: Callable, activation: str, values: tuple[float, ...]) -> Callable:
    """`composite` with this activation, optimised."""
    _eager_activation(activation, values)  # raises before anything is made

    def call(*args: Any) -> torch.Tensor:
        return composite(*args, activation, values)

    call.__qualname__ = f"{composite.__name__.strip('_')}_{activation}"
    engine = optimize(call)._fuser_engine
    return engine.dispatcher or engine.call


# What is computed, in eager operations, with every check. It runs only where something is traced or compiled, or eager.


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, values: Sequence[float]
) -> torch.Tensor:
    act = _eager_activation(activation, values)
    _check_tensors(x=x, weight=weight, bias=bias)
    if weight.dim() != 2:
        raise ValueError(f"weight must have shape (outputs, inputs), got {tuple(weight.shape)}")
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"the last dimension of x must be {weight.shape[1]}, as weight's, got {tuple(x.shape)}")
    _check_bias(bias, weight.shape[0])
    return act(F.linear(x, weight, bias))


def _conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    activation: str,
    values: Sequence[float],
) -> torch.Tensor:
    act = _eager_activation(activation, values)
    _check_tensors(x=x, weight=weight, bias=bias)
    rank = weight.dim() - 2
    if rank not in (1, 2, 3):
        raise ValueError(
            "weight must have shape (outputs, inputs / groups, *kernel) with a kernel of one to three dimensions, "
            f"got {tuple(weight.shape)}"
        )
    if x.dim() not in (rank + 1, rank + 2):
        raise ValueError(f"x must have {rank + 2} dimensions, or {rank + 1} without a batch, got {tuple(x.shape)}")
    channels = weight.shape[1] * groups
    if x.shape[-rank - 1] != channels:
        raise ValueError(f"x must have {channels} channels, weight's times groups, got {tuple(x.shape)}")
    _check_bias(bias, weight.shape[0])
    convolve = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    return act(convolve(x, weight, bias, stride, padding, dilation, groups))


def _bias(x: torch.Tensor, bias: torch.Tensor, activation: str, values: Sequence[float]) -> torch.Tensor:
    return _eager_activation(activation, values)(x + _broadcast(x, bias))


def _bias_(x: torch.Tensor, bias: torch.Tensor, activation: str, values: Sequence[float]) -> torch.Tensor:
    act = _eager_activation(activation, values)
    aligned = _broadcast(x, bias)
    if activation in _IN_PLACE:
        return _eager_activation(activation, values, in_place=True)(x.add_(aligned))
    return x.copy_(act(x + aligned))


def _broadcast(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`bias` in the shape in which it is added to `x`."""
    _check_tensors(x=x, bias=bias)
    if bias is None:
        raise TypeError("bias must be a tensor, got None")
    if x.dim() < 1:
        raise ValueError("x must have at least one dimension, got a scalar")
    if x.dim() < 3:
        _check_bias(bias, x.shape[-1])
        return bias
    _check_bias(bias, x.shape[1])
    return bias.reshape(-1, *[1] * (x.dim() - 2))


def _check_tensors(**tensors: torch.Tensor | None) -> None:
    first = tensors["x"]
    for name, tensor in tensors.items():
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
        if tensor.dtype != first.dtype and not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise TypeError(f"{name} must have the dtype of x, {first.dtype}, got {tensor.dtype}")


def _check_bias(bias: torch.Tensor | None, size: int) -> None:
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != size):
        raise ValueError(f"bias must have shape ({size},), got {tuple(bias.shape)}")


def _eager_activation(
    name: str, values: Sequence[float], in_place: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation with its parameters' values (none: the defaults) in eager operations."""
    function, defaults = _entry(name)
    if not values:
        values = tuple(defaults.values())
        if None in values:
            raise TypeError(f"{name} takes the parameters {', '.join(defaults)}: give them by name")
    if len(values) != len(defaults):
        raise TypeError(f"{name} takes {len(defaults)} parameters ({', '.join(defaults)}), got {len(values)}")
    if in_place:
        function = _IN_PLACE[name]
    return lambda x: function(x, *values)


def _values(name: str, parameters: dict[str, float]) -> tuple[float, ...]:
    """All parameters of the activation in order, from those given by name."""
    _, defaults = _entry(name)
    unknown = sorted(set(parameters) - set(defaults))
    if unknown:
        takes = f"takes {', '.join(defaults)}" if defaults else "takes none"
        raise TypeError(f"{name} has no parameter {unknown[0]!r}; it {takes}")
    given = {**defaults, **parameters}
    missing = [n for n, v in given.items() if v is None]
    if missing:
        raise TypeError(f"{name} needs the parameter {missing[0]!r}")
    return tuple(float(v) for v in given.values())


def _entry(name: str) -> tuple[Callable[..., torch.Tensor], dict[str, float | None]]:
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    for operator, function in registered.items():
        if function.name == name:
            return operator, {s.name.removeprefix("parameter_"): None for s in function.arguments[1:]}
    known = sorted([*_ACTIVATIONS, *(f.name for f in registered.values())])
    raise ValueError(f"unknown activation {name!r}; known are {', '.join(known)}")


# In place: the kernel of `bias_act`, told to write where it reads.


def _overwrite(x: torch.Tensor, bias: torch.Tensor, activation: str, values: tuple[float, ...]) -> torch.Tensor:
    kernel = None
    if not _is_traced() and _may_overwrite(x, bias):
        kernel = _in_place(activation, values, x.shape, x.stride(), x.dtype, bias.shape, bias.stride(), bias.dtype)
    if kernel is None:
        return _bias_(x, bias, activation, values)
    kernel.run([x, bias])
    torch.autograd.graph.increment_version(x)
    return x


def _may_overwrite(x: Any, bias: Any) -> bool:
    """Whether nothing but the numbers in `x` has to change: no gradient, no transform, and memory all of its own."""
    kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if type(x) not in kinds or type(bias) not in kinds or active_transform() is not None:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or bias.requires_grad):
        return False
    return (
        x.is_cpu
        and bias.is_cpu
        and x.layout is bias.layout is torch.strided
        and not (x.is_inference() or bias.is_inference() or x.is_neg() or bias.is_neg())
        and x.untyped_storage().data_ptr() != bias.untyped_storage().data_ptr()
    )


@functools.lru_cache(maxsize=_MOST_PLANS)
def _in_place(
    activation: str,
    values: tuple[float, ...],
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    bias_shape: torch.Size,
    bias_strides: tuple[int, ...],
    bias_dtype: torch.dtype,
) -> Any:
    """The native plan that turns its first input into the result, or None where no single kernel does."""
    x = torch.empty_strided(shape, strides, dtype=dtype)
    bias = torch.empty_strided(bias_shape, bias_strides, dtype=bias_dtype)
    dense = x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    if not dense or x.numel() == 0 or dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return None

    def call(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return _bias(x, bias, activation, values)

    call(x.to("meta"), bias.to("meta"))  # raises what is wrong with the arguments
    engine = optimize(call)._fuser_engine
    if engine.native is None:
        return None
    with torch.no_grad():
        program = capture(call, (x, bias), {}, observe(call).captured)
        stages = pipeline.Stages(Program(program.graph_module, (Input("x", False, False),) * 2, program.structure))
        pipeline.rewrite(stages)
        addresses = pipeline.build(stages)
    if not _write_over_input(stages.plan):
        return None
    return make_executable(engine.native, stages.plan, addresses, engine.compiler.packs, engine.compiler.arenas).native


def _write_over_input(plan: Plan) -> bool:
    """Make the plan's one kernel write its result over input 0, element by element as it reads; whether it could."""
    if len(plan.steps) != 1 or not isinstance(plan.steps[0], KernelStep) or len(plan.outputs) != 1:
        return False
    step, output = plan.steps[0], plan.outputs[0]
    result, target = plan.values[output], plan.values[0]
    if result.kind != "buffer" or (result.sizes, result.strides) != (target.sizes, target.strides):
        return False
    step.values[:] = [0 if v == output else v for v in step.values]
    step.writes[:] = [0]
    plan.outputs[:] = []
    return True


# The operators of `torch.ops.fuser`. Where autograd or vmap listens they are the functions above, so whatever works
# with those works with these, and a trace records what they are made of. `register_vmap` would want batching rules of
# our own; ATen has them for every part.


def _register(schema: str, composite: Callable) -> None:
    name = f"fuser::{schema.partition('(')[0]}"
    torch.library.define(name, schema.removeprefix(name.removeprefix("fuser::")))
    arguments = getattr(torch.ops.fuser, name.removeprefix("fuser::")).default._schema.arguments

    def complete(args: tuple, kwargs: dict) -> list[Any]:
        """All arguments in order, defaults filled in."""
        return [args[i] if i < len(args) else kwargs.get(a.name, a.default_value) for i, a in enumerate(arguments)]

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        *args, activation, values = complete(args, kwargs)
        if _is_traced() or active_transform() is not None:
            return composite(*args, activation, values)
        return _compiled(composite, activation, tuple(values))(*args)

    def fake(*args: Any, **kwargs: Any) -> torch.Tensor:
        return composite(*complete(args, kwargs))

    for key in ("Autograd", "FuncTorchBatched", "CompositeExplicitAutograd"):
        torch.library.impl(name, key, call)
    torch.library.register_fake(name, fake)


_REST = "str activation='relu', float[] values=[]"
_register(f"linear_bias_act(Tensor x, Tensor weight, Tensor? bias=None, {_REST}) -> Tensor", _linear)
_register(
    "conv_bias_act(Tensor x, Tensor weight, Tensor? bias=None, int[] stride=[1], int[] padding=[0], "
    f"int[] dilation=[1], int groups=1, {_REST}) -> Tensor",
    _conv,
)
_register(f"bias_act(Tensor x, Tensor bias, {_REST}) -> Tensor", _bias)
torch.library.define("fuser::bias_act_", f"(Tensor(a!) x, Tensor bias, {_REST}) -> Tensor(a!)")


def _bias_act_operator(
    x: torch.Tensor, bias: torch.Tensor, activation: str = "relu", values: Sequence[float] = ()
) -> torch.Tensor:
    return _overwrite(x, bias, activation, tuple(values))


for _key in ("CompositeImplicitAutograd", "Functionalize"):
    torch.library.impl("fuser::bias_act_", _key, _bias_act_operator)
