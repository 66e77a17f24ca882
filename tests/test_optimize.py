"""An optimised model behaves like the original: state, modes, hooks, copies, structures, weights changed in any way."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import threading
import types
import warnings
from collections import OrderedDict, namedtuple

import pytest
import torch
from oracle import check, compiled
from torch import nn
from torch.nn import functional as F

import fuser


def small_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 12),
        nn.GELU(),
        nn.Linear(12, 5),
    )


IMAGES = (4, 3, 8, 8)


class SmallNet(nn.Module):
    """Importable, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_net()
        self.scale = 2.0

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        return self.body(x) * self.scale + shift


def same(optimized: nn.Module, original: nn.Module, *args: object, **kwargs: object) -> None:
    with torch.no_grad():
        torch.testing.assert_close(optimized(*args, **kwargs), original(*args, **kwargs), rtol=1e-5, atol=1e-5)


def test_shares_state_and_attributes() -> None:
    model = SmallNet()
    optimized = fuser.optimize(model)
    assert isinstance(optimized, SmallNet) and isinstance(optimized, fuser.OptimizedModule)
    assert list(optimized.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(optimized.parameters(), model.parameters()))
    optimized.scale = 3.0
    assert model.scale == 3.0
    optimized.eval()
    assert not model.training and not model.body[1].training
    same(optimized, model, torch.randn(IMAGES))
    compiled(optimized.report())


def test_optimising_twice_is_once() -> None:
    optimized = fuser.optimize(SmallNet())
    assert fuser.optimize(optimized) is optimized


def change_in_place(m: SmallNet) -> None:
    with torch.no_grad():
        m.body[0].weight.add_(1)
        m.body[5].weight.mul_(-1)


def change_data_in_place(m: SmallNet) -> None:
    m.body[0].weight.data.neg_()
    m.body[5].weight.data[0, 0] += 1


def change_numpy(m: SmallNet) -> None:
    m.body[7].weight.detach().numpy()[:, 1] = 7


def swap_rows(m: SmallNet) -> None:
    m.body[5].weight.data[[0, 1]] = m.body[5].weight.data[[1, 0]].clone()


def new_data(m: SmallNet) -> None:
    m.body[0].weight.data = torch.randn_like(m.body[0].weight)


def new_parameter(m: SmallNet) -> None:
    m.body[5].weight = nn.Parameter(torch.randn_like(m.body[5].weight))


def load_state(m: SmallNet) -> None:
    m.load_state_dict({k: torch.rand_like(v) if v.is_floating_point() else v for k, v in m.state_dict().items()})


def running_statistics(m: SmallNet) -> None:
    m.body[1].running_mean.normal_()
    m.body[1].running_var.uniform_(1, 2)


def python_attribute(m: SmallNet) -> None:
    m.scale = -0.5


def other_layer(m: SmallNet) -> None:
    m.body[2] = nn.Tanh()


def other_eps(m: SmallNet) -> None:
    m.body[1].eps = 0.5


def to_training(m: SmallNet) -> None:
    m.train()


def to_double_and_back(m: SmallNet) -> None:
    m.double()
    m.float()


def optimiser_step(m: SmallNet) -> None:
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    m(torch.randn(IMAGES)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "change",
    [
        change_in_place,
        change_data_in_place,
        change_numpy,
        swap_rows,
        new_data,
        new_parameter,
        load_state,
        running_statistics,
        python_attribute,
        other_layer,
        other_eps,
        to_training,
        to_double_and_back,
        optimiser_step,
    ],
    ids=lambda f: f.__name__,
)
def test_changes_are_seen_at_once(change: object) -> None:
    model = SmallNet().eval()
    optimized = fuser.optimize(model)
    x = torch.randn(IMAGES)
    same(optimized, model, x)
    change(optimized)
    expected = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), expected(x), rtol=1e-5, atol=1e-4)


def test_training_mode_updates_running_statistics_as_eager_does() -> None:
    model = SmallNet().train()
    twin = copy.deepcopy(model)
    optimized = fuser.optimize(model)
    for _ in range(3):
        same(optimized, twin, torch.randn(IMAGES))
    for a, b in zip(model.buffers(), twin.buffers()):
        torch.testing.assert_close(a, b)
    assert model.body[1].num_batches_tracked == 3


def test_dropout_draws_eagers_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Dropout(0.4), nn.ReLU(), nn.Dropout(0.1)).train()
    optimized = fuser.optimize(model)
    x = torch.randn(7, 20)
    with torch.no_grad():
        optimized(x)
        torch.manual_seed(5)
        expected = [model(x) for _ in range(3)]
        torch.manual_seed(5)
        for e in expected:
            torch.testing.assert_close(optimized(x), e)


def test_transforms_see_through() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).eval()
    optimized = fuser.optimize(model)
    x = torch.randn(5, 3)
    with torch.no_grad():
        optimized(x[0])
        torch.testing.assert_close(torch.func.vmap(optimized)(x), model(x))
    jacobian = torch.func.jacrev(optimized)(x[0])
    torch.testing.assert_close(jacobian, torch.func.jacrev(model)(x[0]))
    with torch.no_grad():
        _, tangent = torch.func.jvp(optimized, (x,), (torch.ones_like(x),))
        torch.testing.assert_close(tangent, torch.func.jvp(model, (x,), (torch.ones_like(x),))[1])
    parameters = {k: torch.randn_like(v) for k, v in model.state_dict().items()}
    with torch.no_grad():
        torch.testing.assert_close(
            torch.func.functional_call(optimized, parameters, (x,)), torch.func.functional_call(model, parameters, (x,))
        )


def test_dual_tensors_keep_their_tangents() -> None:
    model = nn.Linear(3, 2)
    optimized = fuser.optimize(model)
    x, v = torch.randn(4, 3), torch.randn(4, 3)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        optimized(x)
        dual = torch.autograd.forward_ad.make_dual(x, v)
        tangent = torch.autograd.forward_ad.unpack_dual(optimized(dual)).tangent
    torch.testing.assert_close(tangent, v @ model.weight.detach().T)


def test_outer_hooks_and_inner_hooks() -> None:
    model = SmallNet().eval()
    optimized = fuser.optimize(model)
    x = torch.randn(IMAGES)
    same(optimized, model, x)
    seen = []
    handle = optimized.register_forward_hook(lambda m, args, out: seen.append(out.shape) or out + 1)
    with torch.no_grad():
        hooked = optimized(x)
        assert seen == [(4, 5)]
        handle.remove()
        torch.testing.assert_close(hooked, optimized(x) + 1)
        assert len(seen) == 1
    inner = []
    handle = model.body[2].register_forward_hook(lambda m, args, out: inner.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(optimized, model, x)
    assert len(inner) == 2
    handle.remove()
    same(optimized, model, x)
    assert len(inner) == 2


def test_deepcopy_and_pickle_are_independent() -> None:
    model = SmallNet().eval()
    optimized = fuser.optimize(model)
    x = torch.randn(IMAGES)
    same(optimized, model, x)
    twin = copy.deepcopy(optimized)
    restored = pickle.loads(pickle.dumps(optimized))
    buffer = io.BytesIO()
    torch.save(optimized, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (twin, restored, loaded):
        assert isinstance(other, fuser.OptimizedModule)
        same(other, model, x)
        with torch.no_grad():
            other.body[7].bias.add_(1)
            assert not torch.equal(other(x), model(x))


def test_new_sizes_compile_no_kernel() -> None:
    model = small_net().eval()
    optimized = fuser.optimize(model)
    for batch in (4, 1, 7, 33, 64, 2):
        same(optimized, model, torch.randn(batch, *IMAGES[1:]))
    first, *others = optimized.report().compiled
    assert all(entry.cache_hits == entry.kernels for entry in others), str(optimized.report())


def test_many_signatures_neither_leak_nor_slow_down() -> None:
    optimized = fuser.optimize(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    with torch.no_grad():
        for batch in range(1, 560):
            optimized(torch.randn(batch, 3))
    ((table, _),) = optimized._fuser_engine.tables.values()
    assert len(table) == 512
    assert len(optimized.report().compiled) <= 64


Pair = namedtuple("Pair", "first second")


def test_nested_arguments_and_results() -> None:
    def function(pair: Pair, others: dict, *, factor: int = 3, flag: bool = True) -> dict:
        a, b = pair
        y = torch.relu(a @ b) * factor
        return {
            "list": [y, y.sum(0)],
            "tuple": (y - 1, 7, None),
            "pair": Pair(y + 1, others["x"][1]),
            "ordered": OrderedDict(z=y * 2),
            "text": "kept" if flag else "changed",
            "same": others["x"][0],
        }

    optimized = fuser.optimize(function)
    x, y = torch.randn(4), torch.randn(5)
    args = (Pair(torch.randn(4, 3), torch.randn(3, 5)), {"x": [x, y]})
    for kwargs in ({}, {"factor": 2}, {"factor": 2, "flag": False}):
        mine, theirs = optimized(*args, **kwargs), function(*args, **kwargs)
        torch.testing.assert_close(mine["list"], theirs["list"])
        torch.testing.assert_close(mine["tuple"][0], theirs["tuple"][0])
        assert mine["tuple"][1:] == (7, None) and mine["text"] == theirs["text"]
        assert isinstance(mine["pair"], Pair) and isinstance(mine["ordered"], OrderedDict)
        assert mine["same"] is x and mine["pair"].second is y
    compiled(optimized.report())


def test_functions_see_their_closure_and_globals_change() -> None:
    layer, power = nn.Linear(3, 3), 2.0

    def function(x: torch.Tensor) -> torch.Tensor:
        return layer(x) * power + OFFSET

    global OFFSET
    OFFSET = 1.0
    optimized = fuser.optimize(function)
    x = torch.randn(2, 3)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), function(x))
        OFFSET = 5.0
        torch.testing.assert_close(optimized(x), function(x))
        power = -1.0
        torch.testing.assert_close(optimized(x), function(x))
        layer.weight.data.neg_()
        torch.testing.assert_close(optimized(x), function(x))
        layer.weight = nn.Parameter(torch.randn(3, 3))
        torch.testing.assert_close(optimized(x), function(x))


OFFSET = 0.0


def test_views_alias_as_in_eager() -> None:
    optimized = fuser.optimize(lambda x: (x.t(), x[1:], x, torch.relu(x).t()))
    x = torch.randn(3, 4)
    transposed, rest, itself, fresh = optimized(x)
    assert itself is x and transposed.data_ptr() == x.data_ptr()
    x.zero_()
    assert not transposed.any() and not rest.any() and fresh.any()
    version = x._version
    transposed.add_(1)
    assert x._version > version and bool((x == 1).all())


def test_results_are_fresh_on_every_call() -> None:
    optimized = fuser.optimize(lambda x: torch.relu(x + 1))
    first = optimized(torch.ones(4))
    kept = first.clone()
    optimized(torch.zeros(4))
    assert torch.equal(first, kept)


def test_what_cannot_be_traced_runs_eagerly_and_warns_once() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else -x

    optimized = fuser.optimize(function)
    x = torch.ones(3)
    with pytest.warns(fuser.FuserWarning, match="eagerly"):
        assert torch.equal(optimized(x), 2 * x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(optimized(-x), x)
    assert optimized.report().eager


def test_a_counter_in_forward_still_counts() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    optimized = fuser.optimize(Counting())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [optimized(torch.ones(1)).item() for _ in range(3)] == [1, 2, 3]
    assert optimized.calls == 3


def test_writes_to_arguments_happen() -> None:
    optimized = fuser.optimize(lambda x: x.add_(1) * 2)
    x = torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = optimized(x)
    assert torch.equal(x, torch.ones(3)) and torch.equal(y, 2 * torch.ones(3))


def test_autocast_and_inference_mode() -> None:
    model = small_net().eval()
    optimized = fuser.optimize(model)
    x = torch.randn(IMAGES)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        mine, theirs = optimized(x), model(x)
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)
    same(optimized, model, x)
    with torch.inference_mode():
        y = optimized(x)
        assert y.is_inference()
        torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-5)


def test_errors_are_eagers_own() -> None:
    model = nn.Linear(3, 2)
    optimized = fuser.optimize(model)
    for bad in (torch.randn(2, 4), torch.randn(2, 3, dtype=torch.float64), "text"):
        with pytest.raises(Exception) as theirs:
            model(bad)
        with warnings.catch_warnings(), pytest.raises(theirs.type, match=re.escape(str(theirs.value)[:20])):
            warnings.simplefilter("ignore")
            optimized(bad)
    embedding = fuser.optimize(nn.Embedding(4, 2))
    with torch.no_grad():
        embedding(torch.tensor([1]))
        with pytest.raises(IndexError):
            embedding(torch.tensor([9]))


def test_bad_input_to_optimize() -> None:
    with pytest.raises(TypeError, match="nn.Module or a function"):
        fuser.optimize(3)
    with pytest.raises(ValueError, match="mode must be one of"):
        fuser.optimize(nn.ReLU(), mode="fastest")
    with pytest.raises(TypeError):
        fuser.optimize(nn.ReLU)


def test_threads_get_their_own_results() -> None:
    model = small_net().eval()
    optimized = fuser.optimize(model)
    wrong = []

    def work(seed: int) -> None:
        x = torch.randn(3 + seed % 2, *IMAGES[1:], generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = model(x)
            for _ in range(40):
                if not torch.allclose(optimized(x), expected, rtol=1e-4, atol=1e-5):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_engines_are_collected() -> None:
    def alive() -> int:
        gc.collect()
        return sum(type(o).__name__ == "_Engine" for o in gc.get_objects())

    before = alive()
    for _ in range(20):
        optimized = fuser.optimize(nn.Linear(2, 2))
        with torch.no_grad():
            optimized(torch.randn(3, 2))
        function = fuser.optimize(lambda x: x + 1)
        function(torch.ones(2))
    del optimized, function
    assert alive() <= before


def test_graph_module_and_torch_compile() -> None:
    model = small_net().eval()
    x = torch.randn(IMAGES)
    traced = torch.fx.symbolic_trace(model)
    optimized = fuser.optimize(traced)
    assert isinstance(optimized, torch.fx.GraphModule)
    same(optimized, model, x)
    compiled(optimized.report())
    dynamo = torch.compile(model, backend="fuser")
    same(dynamo, model, x)


def test_an_unknown_operation_costs_only_itself() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU()).eval()

    def with_unknown(x: torch.Tensor) -> torch.Tensor:
        y = model[1](model[0](x))
        y = torch.cumsum(y, dim=1)
        return model[3](model[2](y))

    report = compiled(check(with_unknown_module(with_unknown, model), torch.randn(IMAGES)))
    assert [e.name for e in report.fused] == ["conv_bias_relu_0", "conv_bias_relu_1"]
    assert [row[1] for row in report.left_alone] == ["aten.cumsum.default"]


def with_unknown_module(function: object, model: nn.Module) -> nn.Module:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cumsum(self.model[1](self.model[0](x)), dim=1)
            return self.model[3](self.model[2](y))

    return Wrapped()


@pytest.mark.parametrize(
    "write",
    [
        lambda x, w, b: F.relu(F.linear(x, w, b)),
        lambda x, w, b: F.relu(x @ w.T + b),
        lambda x, w, b: torch.relu_(x.matmul(w.t()).add_(b)),
        lambda x, w, b: torch.addmm(b, x, w.t()).clamp(min=0),
        lambda x, w, b: (b + torch.mm(x, w.t())).relu_(),
        lambda x, w, b: torch.nn.ReLU(inplace=True)(torch.einsum("ik,jk->ij", x, w) + b),
    ],
)
def test_every_way_of_writing_a_linear_layer_fuses(write: object) -> None:
    x, w, b = torch.randn(6, 5), torch.randn(7, 5), torch.randn(7)
    report = compiled(check(write, x, w, b))
    assert len(report.fused) == 1 and not report.left_alone, str(report)


def test_an_own_call_method_is_kept() -> None:
    class Doubling(nn.Linear):
        def __call__(self, *args: object) -> torch.Tensor:
            return 2 * super().__call__(*args)

    model = Doubling(3, 2)
    same(fuser.optimize(model), model, torch.randn(4, 3))


def test_ten_thousand_calls_keep_memory_flat() -> None:
    import resource

    model = nn.Sequential(nn.Linear(64, 256), nn.Softmax(1), nn.Linear(256, 8))
    optimized = fuser.optimize(model)
    x = torch.randn(200, 64)
    with torch.no_grad():
        for _ in range(200):
            optimized(x)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(10_000 // 5):
            optimized(x)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4_000  # KiB


def test_large_graphs_take_seconds() -> None:
    def deep(x: torch.Tensor) -> torch.Tensor:
        for _ in range(300):
            x = torch.relu(x * 1.01 + 0.1).sum(0, keepdim=True) * 0.1 + x
        return x

    report = compiled(check(deep, torch.randn(4, 3), factor=8.0))
    (entry,) = report.compiled
    assert entry.seconds["fuse"] + entry.seconds["lower"] + entry.seconds["canonicalise"] < 30


GLOBAL_FACTOR = 2.0


def global_helper(x: torch.Tensor) -> torch.Tensor:
    return x * GLOBAL_FACTOR


class ReadsState(nn.Module):
    """Reaches a global through a function, an attribute of its class, and one of an imported module."""

    factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return global_helper(x) * self.factor + settings.offset


settings = types.ModuleType("settings")
settings.offset = 1.0


def test_state_reached_through_globals_classes_and_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = ReadsState(), torch.randn(4)
    optimized = fuser.optimize(model)
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: monkeypatch.setitem(globals(), "GLOBAL_FACTOR", 3.0),
            lambda: monkeypatch.setattr(ReadsState, "factor", 5.0),
            lambda: monkeypatch.setattr(settings, "offset", 7.0),
            lambda: monkeypatch.setattr(ReadsState, "forward", lambda self, x: x - 1),
        ):
            change()
            torch.testing.assert_close(optimized(x), model(x))
            torch.testing.assert_close(optimized(x), model(x))


def test_a_global_that_hides_a_builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = {"pow": 2.0}
    exec("def scaled(x):\n    return x * pow\n", scope)
    optimized, x = fuser.optimize(scope["scaled"]), torch.randn(4)
    torch.testing.assert_close(optimized(x), x * 2.0)
    scope["pow"] = 3.0
    torch.testing.assert_close(optimized(x), x * 3.0)


@pytest.mark.filterwarnings("ignore::fuser.FuserWarning")
def test_large_counters_are_counted() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 2**40

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + float(self.calls - 2**40)

    model = Counts()
    optimized, x = fuser.optimize(model), torch.zeros(2)
    assert [optimized(x)[0].item() for _ in range(3)] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore::fuser.FuserWarning")
def test_global_forward_hooks_see_submodules() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimized, x, seen = fuser.optimize(model), torch.randn(2, 4), []
    with torch.no_grad():
        optimized(x)
        hook = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__))
        try:
            optimized(x)
        finally:
            hook.remove()
        assert seen[:2] == ["Linear", "ReLU"]


def test_a_wrong_call_is_no_failure_of_the_compiler(capfd: pytest.CaptureFixture) -> None:
    optimized = fuser.optimize(nn.Linear(4, 4))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            optimized(torch.randn(5, 3))
        with pytest.raises(TypeError):
            optimized()
    assert not optimized.report().eager and capfd.readouterr().err == ""


def test_recursion_is_no_defect() -> None:
    optimized = fuser.optimize(lambda n, x: x if n == 0 else x * optimized(n - 1, x))
    x = torch.randn(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(optimized(2, x), x**3)


def test_a_defect_of_the_compiler_leaves_the_model_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuser.pipeline.fuse", lambda program: 1 / 0)
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    optimized = fuser.optimize(model)
    with torch.no_grad(), pytest.warns(fuser.FuserWarning, match="a defect of fuser"):
        torch.testing.assert_close(optimized(x), model(x))
    monkeypatch.setenv("FUSER_DEBUG", "1")
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        fuser.optimize(nn.Linear(3, 3))(x)
