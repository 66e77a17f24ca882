"""`fuser.ops`: layers with bias and activation as single calls."""

from __future__ import annotations

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import fuser
from fuser import ops
from fuser.patterns.activations import ACTIVATIONS

OPERATORS = torch.ops.fuser
NAMES = ["identity", *ACTIVATIONS]
NEEDED = {"threshold": {"bound": 0.1, "value": 0.2}}


def activation(name: str, x: torch.Tensor) -> torch.Tensor:
    return ops._eager_activation(name, ops._values(name, NEEDED.get(name, {})))(x)


def random(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


def test_every_activation_of_the_table_is_known_with_its_parameters():
    assert set(ops._ACTIVATIONS) == {"identity", *ACTIVATIONS}
    for name, expression in ACTIVATIONS.items():
        parameters = expression.__code__.co_varnames[1 : expression.__code__.co_argcount]
        assert tuple(ops._ACTIVATIONS[name][1]) == parameters
    assert set(ops._IN_PLACE) <= set(ops._ACTIVATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_are_those_of_eager(name, dtype):
    x, bias = random(6, 5, 4, dtype=dtype), random(5, dtype=dtype)
    expected = activation(name, x + bias[:, None])
    given = NEEDED.get(name, {})
    # A kernel rounds to bfloat16 once, eager after each operation.
    close = {"rtol": 0.02, "atol": 0.01} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(ops.bias_act(x, bias, name, **given), expected, **close)
    torch.testing.assert_close(OPERATORS.bias_act(x, bias, name, list(given.values())), expected, **close)
    assert ops.bias_act_(x, bias, name, **given) is x
    torch.testing.assert_close(x, expected, **close)


def test_linear_and_convolutions_are_those_of_eager():
    x, weight, bias = random(2, 3, 5), random(4, 5), random(4)
    torch.testing.assert_close(ops.linear_bias_act(x, weight, bias), F.relu(F.linear(x, weight, bias)))
    torch.testing.assert_close(ops.linear_bias_act(x[0, 0], weight, None, "silu"), F.silu(F.linear(x[0, 0], weight)))
    expected = F.leaky_relu(F.linear(x, weight, bias), 0.3)
    torch.testing.assert_close(ops.linear_bias_act(x, weight, bias, "leaky_relu", slope=0.3), expected)
    for rank, convolve in enumerate((F.conv1d, F.conv2d, F.conv3d), 1):
        x, weight = random(2, 6, *[7] * rank), random(4, 3, *[3] * rank)
        geometry = (2, 1, 1, 2)
        expected = F.gelu(convolve(x, weight, bias, *geometry))
        torch.testing.assert_close(ops.conv_bias_act(x, weight, bias, *geometry, activation="gelu"), expected)
        per_dimension = ([2] * rank, [1] * rank, [1] * rank, 2)
        torch.testing.assert_close(OPERATORS.conv_bias_act(x, weight, bias, *per_dimension, "gelu"), expected)
        torch.testing.assert_close(ops.conv_bias_act(x[0], weight, bias, *geometry, activation="gelu"), expected[0])
    same = ops.conv_bias_act(x, weight, padding="same", groups=2)
    torch.testing.assert_close(same, F.relu(F.conv3d(x, weight, padding="same", groups=2)))


def test_a_call_is_one_kernel():
    x, weight, bias = (random(*shape, dtype=torch.float32) for shape in ((8, 5), (4, 5), (4,)))
    served = fuser.optimize(lambda x, w, b: ops.linear_bias_act(x, w, b, "mish"))
    torch.testing.assert_close(served(x, weight, bias), ops.linear_bias_act(x, weight, bias, "mish"))
    (entry,) = served.report().data()["compiled"]
    assert [f["members"] for f in entry["fused"]] == [["addmm", "mish"]] and not entry["left_alone"]


def inputs(operator: str) -> tuple:
    rest = {
        "linear_bias_act": (random(3, 5, grad=True), random(4, 5, grad=True), random(4, grad=True)),
        "conv_bias_act": (random(2, 3, 5, 5, grad=True), random(4, 3, 3, 3, grad=True), random(4, grad=True), [2], [1]),
        "bias_act": (random(2, 4, 3, grad=True), random(4, grad=True)),
    }
    return rest[operator]


@pytest.mark.parametrize("operator", ["linear_bias_act", "conv_bias_act", "bias_act"])
@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_opcheck(operator, name):
    args = inputs(operator)
    geometry = ([1], 1) if operator == "conv_bias_act" else ()
    opcheck(getattr(OPERATORS, operator).default, (*args, *geometry, name))


@pytest.mark.parametrize("name", ["relu", "gelu", "softplus"])
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_in_place(name, grad):
    opcheck(OPERATORS.bias_act_.default, (random(2, 4, 3), random(4, grad=grad), name))


@pytest.mark.parametrize("through", ["function", "operator"])
@pytest.mark.parametrize("operator", ["linear_bias_act", "conv_bias_act", "bias_act"])
def test_gradients_of_first_and_second_order_in_both_modes(through, operator):
    tensors = [t for t in inputs(operator) if isinstance(t, torch.Tensor)]
    call = getattr(ops if through == "function" else OPERATORS, operator)
    function = lambda *t: call(*t, activation="mish")
    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, tensors, check_fwd_over_rev=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_activation_has_its_gradient(name):
    x, bias = random(3, 4, grad=True), random(4, grad=True)
    call = lambda x, b: ops.bias_act(x, b, name, **NEEDED.get(name, {}))
    assert torch.autograd.gradcheck(call, (x, bias), check_forward_ad=True)
    in_place = lambda x, b: ops.bias_act_(x.clone(), b, name, **NEEDED.get(name, {}))
    assert torch.autograd.gradcheck(in_place, (x, bias), check_forward_ad=True)
    if name != "hardsigmoid":  # in eager its gradient has none
        assert torch.autograd.gradgradcheck(in_place, (x, bias))


@pytest.mark.parametrize("through", [ops, OPERATORS], ids=["function", "operator"])
def test_transforms(through):
    x, weight, bias = random(6, 5), random(4, 5), random(4)
    call = lambda w, x: through.linear_bias_act(x, w, bias, "tanh").sum()
    eager = lambda w, x: torch.tanh(F.linear(x, w, bias)).sum()
    for transform in (torch.func.grad, torch.func.hessian, lambda f: torch.vmap(torch.func.grad(f), (None, 0))):
        torch.testing.assert_close(transform(call)(weight, x), transform(eager)(weight, x))
    both = torch.stack([weight, 2 * weight], -1)
    result = torch.vmap(lambda w: through.linear_bias_act(x, w, bias), in_dims=-1)(both)
    torch.testing.assert_close(result[1], F.relu(F.linear(x, 2 * weight, bias)))
    images, kernels = random(3, 2, 4, 6, 6), random(3, 5, 4, 3, 3)
    result = torch.vmap(lambda x, w: through.conv_bias_act(x, w, activation="silu"))(images, kernels)
    torch.testing.assert_close(result[2], F.silu(F.conv2d(images[2], kernels[2])))
    result = torch.vmap(through.bias_act, (0, None))(images, bias)
    torch.testing.assert_close(result, F.relu(images + bias[:, None, None]))
    result = torch.vmap(lambda x: through.bias_act_(x, bias, "gelu"))(images.clone())
    torch.testing.assert_close(result, F.gelu(images + bias[:, None, None]))


class Layers(nn.Module):
    def __init__(self, through) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(5, 4), nn.Parameter(torch.randn(4))
        self.linear_bias_act, self.bias_act_ = through.linear_bias_act, through.bias_act_

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear_bias_act(x, self.linear.weight, self.linear.bias, "gelu") * 2
        return self.bias_act_(y, self.bias, "mish") + 1

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return F.mish(F.gelu(self.linear(x)) * 2 + self.bias) + 1


@pytest.mark.parametrize("through", [ops, OPERATORS], ids=["function", "operator"])
@pytest.mark.parametrize("how", ["optimize", "fuser", "aot_eager", "export"])
def test_inside_a_trace_the_operations_fuse_with_their_neighbours(through, how):
    model, x = Layers(through), torch.randn(8, 5)
    if how == "optimize":
        traced = fuser.optimize(model)
        with torch.no_grad():
            traced(x)
        (entry,) = traced.report().data()["compiled"]
        assert len(entry["fused"]) == 1 and not entry["left_alone"]
    elif how == "export":
        traced = torch.export.export(model, (x,)).module()
    else:
        torch._dynamo.reset()
        traced = torch.compile(model, backend=how, fullgraph=True)
    torch.testing.assert_close(traced(x), model.eager(x))
    wanted = tuple(model.parameters())
    expected = torch.autograd.grad(model.eager(x).sum(), wanted)
    for one, other in zip(torch.autograd.grad(traced(x).sum(), wanted), expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("through", [ops, OPERATORS], ids=["function", "operator"])
def test_make_fx_records_aten(through):
    call = lambda x, w, b: through.linear_bias_act(x, w, b, "tanh")
    graph = make_fx(call)(random(3, 5), random(4, 5), random(4)).graph
    assert [str(n.target) for n in graph.nodes if n.op == "call_function"] == [
        "aten.t.default", "aten.addmm.default", "aten.tanh.default",
    ]  # fmt: skip


def test_registered_activations_are_known():
    x = sympy.Symbol("x")
    square = fuser.register_activation("test_ops_square", (x + sympy.Symbol("shift")) ** 2, {"shift": 1.0})
    given, bias = random(3, 4), random(4)
    torch.testing.assert_close(ops.bias_act(given, bias, "test_ops_square", shift=2), square(given + bias, shift=2))
    with pytest.raises(TypeError, match="shift"):
        ops.bias_act(given, bias, "test_ops_square")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "slice", "empty", "odd_bias"])
def test_in_place_layouts(layout):
    x, bias = random(2, 4, 6, 4, dtype=torch.float32), random(4, dtype=torch.float32)
    x = {
        "channels_last": lambda: x.to(memory_format=torch.channels_last),
        "transposed": lambda: x.transpose(1, 3),
        "slice": lambda: x[:, :, ::2],
        "empty": lambda: x[:0],
    }.get(layout, lambda: x)()
    if layout == "odd_bias":
        bias = random(8, dtype=torch.float32)[::2]
    expected = F.gelu(x + bias[:, None, None])
    version = x._version
    assert ops.bias_act_(x, bias, "gelu") is x and x._version > version
    torch.testing.assert_close(x, expected)


def test_in_place_runs_one_kernel_that_writes_where_it_reads():
    x, bias = random(64, 32, dtype=torch.float32), random(32, dtype=torch.float32)
    assert ops._in_place("gelu", (), x.shape, x.stride(), x.dtype, bias.shape, bias.stride(), bias.dtype) is not None
    address = x.data_ptr()
    ops.bias_act_(x, bias, "gelu")
    assert x.data_ptr() == address


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_in_place_refuses_what_eager_refuses(name):
    leaf, bias = random(4, 3, grad=True), random(3)
    for x in (leaf, leaf[:2], leaf.view(12).view(4, 3)):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            ops.bias_act_(x, bias, name)
    with pytest.raises(RuntimeError, match="single memory location"):
        ops.bias_act_(random(3).expand(4, 3), bias, name)
    x = random(4, 3)
    with pytest.raises(RuntimeError, match="memory location"):
        ops.bias_act_(x, x[0], name)
    with torch.inference_mode():
        x = random(4, 3)
        assert ops.bias_act_(x, bias, name) is x
    with pytest.raises(RuntimeError, match="[Ii]nference"):
        ops.bias_act_(x, bias, name)
    with torch.no_grad():
        assert ops.bias_act_(leaf, bias, name) is leaf and leaf._version == 1


@pytest.mark.parametrize("grad", [False, True])
def test_in_place_is_noticed_by_a_backward_pass_that_saved_x(grad):
    weight, bias = random(3, grad=True), random(3, grad=grad)
    x = random(4, 3)
    y = (x * weight).sum()  # saves x
    ops.bias_act_(x, bias, "gelu")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    x = weight.exp() * 1
    y = x.exp()
    with torch.no_grad():
        ops.bias_act_(y, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_in_place_where_only_the_bias_or_an_intermediate_wants_a_gradient(name):
    given = NEEDED.get(name, {})
    x, bias = random(4, 3), random(3, grad=True)
    (expected,) = torch.autograd.grad(activation(name, x + bias).square().sum(), bias)
    (found,) = torch.autograd.grad(ops.bias_act_(x.clone(), bias, name, **given).square().sum(), bias)
    torch.testing.assert_close(found, expected)
    weight = random(3, grad=True)
    (expected,) = torch.autograd.grad(activation(name, (x * weight)[1:] + bias).square().sum(), weight)
    base = x * weight
    ops.bias_act_(base[1:], bias, name, **given)  # a view of an intermediate
    (found,) = torch.autograd.grad(base[1:].square().sum(), weight)
    torch.testing.assert_close(found, expected)


def test_errors_say_what_would_be_right():
    x, weight, bias = random(3, 5), random(4, 5), random(4)
    for call in (ops.bias_act, ops.bias_act_, OPERATORS.bias_act, OPERATORS.bias_act_):
        with pytest.raises(ValueError, match=r"'rleu'; known are .*celu, .*identity, .*threshold"):
            call(x, random(5), "rleu")
        with pytest.raises(ValueError, match=r"bias must have shape \(5,\), got \(4,\)"):
            call(x, bias)
        with pytest.raises(TypeError, match="bias must have the dtype of x, torch.float64, got torch.float32"):
            call(x, random(5).float())
        with pytest.raises(TypeError, match="x must be a floating-point tensor, got torch.int64"):
            call(x.long(), random(5))
    with pytest.raises(ValueError, match=r"bias must have shape \(3,\)"):
        ops.bias_act(random(2, 3, 5), random(5))
    with pytest.raises(ValueError, match=r"last dimension of x must be 5.*\(3, 4\)"):
        ops.linear_bias_act(random(3, 4), weight, bias)
    with pytest.raises(ValueError, match=r"weight must have shape \(outputs, inputs\)"):
        ops.linear_bias_act(x, bias)
    with pytest.raises(ValueError, match="6 channels, weight's times groups"):
        ops.conv_bias_act(random(1, 3, 8, 8), random(4, 3, 3, 3), groups=2)
    with pytest.raises(ValueError, match="4 dimensions, or 3 without a batch"):
        ops.conv_bias_act(x, random(4, 3, 3, 3))
    with pytest.raises(ValueError, match="one to three dimensions"):
        ops.conv_bias_act(x, weight)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        ops.linear_bias_act([1.0], weight, bias)
    with pytest.raises(TypeError, match="relu has no parameter 'slope'; it takes none"):
        ops.linear_bias_act(x, weight, bias, slope=0.1)
    with pytest.raises(TypeError, match="threshold needs the parameter 'value'"):
        ops.linear_bias_act(x, weight, bias, "threshold", bound=0.1)
    with pytest.raises(TypeError, match="bound, value"):
        ops.linear_bias_act(x, weight, bias, "threshold")
