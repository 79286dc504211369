"""Regions: never a wrong result, whatever the module does; one graph where it can be proved."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fp4pass
from fp4pass.graph.guards import traced_class
from fp4pass.graph.regions import RegionOwner, install_regions, region_graph
from fp4pass.graph.trace import NotProvable, trace
from fp4pass.linear import QuantizedLinear
from fp4pass.quantization.observer import OBSERVERS, Observer, collect

K = 64
LIMIT = 1.0


def linear() -> nn.Linear:
    return nn.Linear(K, K)


class Mlp(nn.Module):
    """What every hard case below is a variation of: two linears read x, a third one the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.up, self.down = linear(), linear(), linear()
        self.act = nn.SiLU()
        self.factor = 2.0
        self.register_buffer("offset", torch.full((K,), 0.25))

    def forward(self, x: Tensor) -> Any:
        return self.down(self.act(self.left(x)) * self.up(x))


class Training(Mlp):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.left(x)) if self.training else self.up(x)


class NotNone(Mlp):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = self.left(x)
        if mask is not None:
            y = y * mask
        return self.down(y)


class IsTensor(Mlp):
    def forward(self, x: Any) -> Any:
        return self.left(x) if isinstance(x, Tensor) else self.down(x[0])


class HasAttribute(Mlp):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.left(x)) if hasattr(self, "extra") else self.up(x)


class Autocast(Mlp):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.left(x)
        return self.down(y.float())


class Factor(Mlp):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.left(x) * self.factor)


class Random(Mlp):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.left(x) + torch.randn(K))


class Dropped(Mlp):
    def forward(self, x: Tensor) -> Any:
        return self.down(F.dropout(self.left(x), 0.5, self.training))


class TriesShape(Mlp):
    def forward(self, x: Tensor) -> Any:
        try:
            rows = int(x.shape[-2])
        except (IndexError, TypeError):
            rows = 0
        return self.down(self.left(x) * rows)


class Reassigned(Mlp):
    def forward(self, x: Tensor) -> Any:
        self.offset = self.offset + 1
        return self.down(self.left(x) + self.offset)


class Cached(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.cache.append(x)
        return self.down(self.left(torch.cat(self.cache, -2)))


class InPlaceMethod(Mlp):
    def forward(self, x: Tensor) -> Any:
        y = self.left(x)
        x.relu_()
        return self.down(y + self.up(x))


class InPlaceView(Mlp):
    """A module writes through a view of what two linears read."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        x = x * 1.0
        y = self.left(x)
        z = self.clip(x.view(-1, K))
        return self.down(y + self.up(x)) + z.view_as(y)


class InPlaceAlias(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.clip = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        y = self.left(x)
        self.ignored = None
        self.clip(x)
        return self.down(y + self.up(x))


class InPlaceModule(Mlp):
    """Provable: nothing but the order of the nodes keeps the second quantization apart."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        h = x.flatten(0, -2)
        y = self.left(x)
        z = self.clip(h)
        return self.down(y + self.up(x)), z


class InPlaceArgument(Mlp):
    def forward(self, x: Tensor) -> Any:
        y = self.left(x)
        z = F.relu(x, inplace=True)
        return self.down(y + self.up(x) + z)


def doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, x: Tensor) -> Any:
        return forward(self, 2 * x)

    return wrapper


class Decorated(Mlp):
    @doubled
    def forward(self, x: Tensor) -> Any:
        return self.down(self.left(x))


def closure() -> nn.Module:
    scale = 3.0

    class Closure(Mlp):
        def forward(self, x: Tensor) -> Any:
            return self.down(self.left(x) * scale)

    return Closure()


class Global(Mlp):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.left(x) * LIMIT)


class Spy(nn.Module):
    """A child that changes what its parent reads."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parents = [parent]
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        parent = self.parents[0]
        parent.factor = parent.factor + 1.0
        parent.up, parent.down = parent.down, parent.up
        return x


class MutatedByChild(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.spy = Spy(self)

    def forward(self, x: Tensor) -> Any:
        y = self.spy(self.left(x)) * self.factor
        return self.down(y + self.up(x))


class TooManyParts(Mlp):
    def forward(self, x: Tensor) -> Any:
        a, b = x.split(32, -1)
        return self.down(torch.cat((b, a), -1))


class Property(Mlp):
    @property
    def scale(self) -> float:
        return float(torch.get_rng_state()[0])

    def forward(self, x: Tensor) -> Any:
        return self.down(self.left(x) * self.scale)


class OwnLookup(Mlp):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("up" if name == "left" else name)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.left(x))


class OwnCall(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)


class ChildWithOwnCall(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(linear())
        self.left.__class__ = type("Twice", (nn.Sequential,), {"__call__": OwnCall.__call__})
        self.left.__class__.__call__ = lambda self, x: 2 * nn.Module.__call__(self, x)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.left(x))


class Reversed(nn.Sequential):
    def __iter__(self) -> Any:
        return reversed(list(self._modules.values()))


class LastLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear(), linear()])

    def forward(self, x: Tensor) -> Any:
        return self.layers[-1](x)


class SameInputTwice(Mlp):
    """One linear, called twice on one tensor, has seen it twice."""

    def forward(self, x: Tensor) -> Any:
        return self.down(self.left(x) + self.up(x) * self.left(x))


HARD = [
    Mlp,
    Training,
    NotNone,
    IsTensor,
    HasAttribute,
    Autocast,
    Factor,
    Random,
    Dropped,
    TriesShape,
    Reassigned,
    Cached,
    InPlaceMethod,
    InPlaceView,
    InPlaceAlias,
    InPlaceModule,
    InPlaceArgument,
    Decorated,
    closure,
    Global,
    MutatedByChild,
    TooManyParts,
    Property,
    OwnLookup,
    ChildWithOwnCall,
    lambda: Reversed(linear(), nn.ReLU(), nn.Linear(K, K, bias=False)),
    LastLayer,
    SameInputTwice,
]


class Model(nn.Module):
    """Not provable, so that its body is a region of its own."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return self.head(y[0] if isinstance(y, tuple) else y)


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Model(make()).eval()


def unregioned(model: nn.Module) -> nn.Module:
    """A copy in which every module runs the forward that its author wrote."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, RegionOwner):
            module.__class__ = traced_class(module)
    return model


def batch(i: int = 0, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(*(shape or (2, 5, K)), generator=generator)


Change = Callable[[nn.Module], object]


def nothing(model: nn.Module) -> None:
    pass


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda m, args, output: output + 1.0)


class Wrapper(nn.Module):
    """As LoRA puts around a linear."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.5 * x


def wrap(model: nn.Module) -> None:
    model.body.up = Wrapper(model.body.up)


def patch_instance(model: nn.Module) -> None:
    """As accelerate does."""
    body = model.body
    body._old_forward = body.forward
    body.forward = types.MethodType(lambda self, x: self._old_forward(x) + 1.0, body)


def patch_child(model: nn.Module) -> None:
    old = model.body.left.forward
    model.body.left.forward = lambda x: old(x) + 1.0


def bias(model: nn.Module) -> None:
    model.body.down.bias = nn.Parameter(torch.ones(K))


def no_bias(model: nn.Module) -> None:
    model.body.down.bias = None


def mutate_bias(model: nn.Module) -> None:
    with torch.no_grad():
        model.body.left.bias.add_(1.0)


def set_attribute(name: str, value: object) -> Change:
    return lambda model: setattr(model.body, name, value)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Change]] = {
    "float attribute": (Factor, set_attribute("factor", 0.5)),
    "int for float": (Factor, set_attribute("factor", 2)),
    "new attribute": (HasAttribute, set_attribute("extra", 1)),
    "training": (Training, lambda m: m.train()),
    "hook on owner": (Mlp, lambda m: hooked(m.body)),
    "hook on linear": (Mlp, lambda m: hooked(m.body.left)),
    "hook on last linear": (Mlp, lambda m: hooked(m.body.down)),
    "hook on activation": (Mlp, lambda m: hooked(m.body.act)),
    "hook on inlined child": (lambda: nn.Sequential(Mlp()), lambda m: hooked(m.body[0])),
    "hook on inlined linear": (lambda: nn.Sequential(Mlp()), lambda m: hooked(m.body[0].up)),
    "wrapped child": (Mlp, wrap),
    "activation": (Mlp, set_attribute("act", nn.Tanh())),
    "activation without a module": (Mlp, lambda m: m.body.__dict__.update(act=torch.tanh)),
    "instance forward": (Mlp, patch_instance),
    "forward of a child": (Mlp, patch_child),
    "new bias": (Mlp, bias),
    "no bias": (Mlp, no_bias),
    "bias in place": (Mlp, mutate_bias),
    "appended layer": (LastLayer, lambda m: m.body.layers.append(nn.Tanh())),
    "appended child": (lambda: nn.Sequential(linear()), lambda m: m.body.append(nn.Tanh())),
    "dtype": (Mlp, lambda m: m.to(torch.bfloat16)),
    "half": (Mlp, lambda m: m.half()),
    "double": (Mlp, lambda m: m.double()),
    "child class": (
        lambda: nn.Sequential(Mlp()),
        lambda m: setattr(m.body[0], "__class__", Factor),
    ),
}


def ran(model: nn.Module, i: int) -> list[Tensor]:
    dtype = next(p.dtype for p in model.parameters())
    torch.manual_seed(i)
    model, x = copy.deepcopy(model), batch(i).to(dtype)
    # Twice, for what the first call leaves behind.
    runs = [model.body(x.clone()) for _ in range(2)]
    outputs = [part for run in runs for part in (run if isinstance(run, tuple) else (run,))]
    return [*outputs, model(x), x]


def assert_equal_runs(model: nn.Module, reference: nn.Module) -> None:
    for i in range(2):
        with torch.no_grad():
            expected, got = ran(reference, i), ran(model, i)
        assert len(expected) == len(got)
        for a, b in zip(expected, got, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def observed(model: nn.Module) -> list[tuple[int, Tensor]]:
    linears = [m for m in model.modules() if OBSERVERS in m.__dict__]
    stats = [collect(m.__dict__[OBSERVERS], "") for m in linears]
    return [(s.tokens, s.block_hessian) for s in stats]


def reference_observed(model: nn.Module, run: Callable[[nn.Module], object]) -> list[Any]:
    """What forward hooks see of every linear that is called."""
    seen: dict[nn.Module, list[Tensor]] = {}

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.setdefault(module, []).append(args[0].detach().clone().reshape(-1, K))

    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    handles = [m.register_forward_pre_hook(hook) for m in linears]
    run(model)
    for handle in handles:
        handle.remove()
    return [torch.cat(seen[m]).double() if m in seen else torch.zeros(0, K) for m in linears]


@pytest.mark.parametrize("make", HARD, ids=lambda make: make.__name__)
def test_prepared_and_converted_modules_do_what_their_authors_wrote(
    make: Callable[[], nn.Module],
) -> None:
    original = built(make)
    prepared = fp4pass.prepare(copy.deepcopy(original))
    assert_equal_runs(prepared, original)
    prepared.train(), original.train()
    assert_equal_runs(prepared, original)
    for weight_only in (True, False):
        converted = fp4pass.convert(built(make), method="naive", weight_only=weight_only)
        assert_equal_runs(converted, unregioned(converted))
        assert not any(isinstance(m, nn.Linear) for m in converted.modules())


@pytest.mark.parametrize("make", HARD, ids=lambda make: make.__name__)
def test_observers_see_what_hooks_see(make: Callable[[], nn.Module]) -> None:
    def run(model: nn.Module) -> None:
        with torch.no_grad():
            torch.manual_seed(0)
            for i in range(2):
                model.body(batch(i))

    reference = reference_observed(built(make), run)
    prepared = fp4pass.prepare(built(make))
    run(prepared)
    for (tokens, hessian), inputs in zip(observed(prepared), reference, strict=True):
        assert tokens == len(inputs)
        if tokens:
            blocks = inputs.unflatten(1, (-1, 32))
            expected = torch.einsum("tji,tjk->jik", blocks, blocks)
            torch.testing.assert_close(hessian.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["prepared", "weight only", "quantized inputs"])
def test_changes_after_tracing_take_effect(change: str, when: str) -> None:
    make, apply = CHANGES[change]
    model = built(make)
    if when == "prepared":
        reference = copy.deepcopy(model)
        fp4pass.prepare(model)
    else:
        fp4pass.convert(model, method="naive", weight_only=when == "weight only")
        reference = unregioned(model)
    assert_equal_runs(model, reference)
    apply(model)
    apply(reference)
    assert_equal_runs(model, reference)


def test_a_class_whose_forward_is_replaced_runs_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = fp4pass.convert(built(Mlp), method="naive")
    assert region_graph(model.body) is not None
    before = model(batch())
    monkeypatch.setattr(Mlp, "forward", lambda self, x: self.up(x))
    assert torch.equal(model(batch()), model.head(model.body.up(batch())))
    monkeypatch.undo()
    assert torch.equal(model(batch()), before)


def test_a_replaced_global_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Uses(Mlp):
        def forward(self, x: Tensor) -> Any:
            return self.down(F.silu(self.left(x)))

    model = fp4pass.convert(built(Uses), method="naive")
    assert region_graph(model.body) is not None
    model(batch())
    monkeypatch.setattr(F, "silu", torch.tanh)
    assert_equal_runs(model, unregioned(model))
    monkeypatch.setitem(globals(), "LIMIT", 5.0)
    model = fp4pass.convert(built(Global), method="naive")
    assert_equal_runs(model, unregioned(model))


def test_static_scales_that_change_in_place_are_seen() -> None:
    model = fp4pass.prepare(built(Mlp))
    model(batch())
    fp4pass.convert(model, method="naive")
    assert_equal_runs(model, unregioned(model))
    assert len(quantizations(region_graph(model.body))) == 2
    up, before = model.body.up, model(batch())
    # One tensor for all that read the input.
    up.input_global_scale.mul_(4)
    assert_equal_runs(model, unregioned(model))
    assert not torch.equal(model(batch()), before)
    assert len(quantizations(region_graph(model.body))) == 2
    up.input_global_scale = up.input_global_scale * 4
    assert_equal_runs(model, unregioned(model))
    assert len(quantizations(region_graph(model.body))) == 3


def test_an_outer_autocast_holds_in_regions() -> None:
    for make in (Mlp, Factor):
        for model in (fp4pass.prepare(built(make)), fp4pass.convert(built(make), method="naive")):
            with torch.autocast("cpu", torch.bfloat16):
                assert_equal_runs(model, unregioned(model))
                assert model(batch()).dtype == torch.bfloat16


def test_keyword_and_strange_arguments_reach_the_forward() -> None:
    model = fp4pass.convert(built(Mlp), method="naive")
    assert torch.equal(model.body(x=batch()), model.body(batch()))
    with pytest.raises(TypeError):
        model.body()
    with pytest.raises(TypeError):
        model.body(batch(), batch())
    parameter = nn.Parameter(batch())
    assert torch.equal(model.body(parameter), model.body(batch()))
    other = fp4pass.convert(built(IsTensor), method="naive")
    assert torch.equal(other.body([batch()]), other.body.down(batch()))
    mask = fp4pass.convert(built(NotNone), method="naive")
    assert torch.equal(mask.body(batch(), torch.zeros(K)), mask.body.down(torch.zeros(2, 5, K)))
    with pytest.raises(ValueError):
        fp4pass.convert(built(TooManyParts), method="naive").body(batch(0, 2, 3 * 32))


def test_global_hooks_see_every_module() -> None:
    model = fp4pass.convert(built(Mlp), method="naive")
    model(batch())
    seen = []
    handle = nn.modules.module.register_module_forward_pre_hook(lambda m, a: seen.append(m))
    try:
        model(batch())
    finally:
        handle.remove()
    assert [type(m).__name__ for m in seen].count("QuantizedLinear") == 4


@pytest.mark.parametrize("through", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_keep_statistics_and_trace_again(through: Callable[[nn.Module], nn.Module]) -> None:
    prepared = fp4pass.prepare(built(Mlp))
    prepared(batch(0))
    other = through(prepared)
    assert region_graph(other.body) is not None
    assert type(other.body) is type(prepared.body) and isinstance(other.body, Mlp)
    for model in (prepared, other):
        model(batch(1))
    for (tokens, hessian), (t, h) in zip(observed(prepared), observed(other), strict=True):
        assert tokens == t == 20 and torch.equal(hessian, h)
    fp4pass.prepare(other)
    other(batch(2))
    assert {tokens for tokens, _ in observed(other)} == {30}
    assert {tokens for tokens, _ in observed(prepared)} == {20}

    converted = fp4pass.convert(other, method="hessian")
    again = through(converted)
    assert region_graph(again.body) is not None
    assert_equal_runs(again, converted)
    assert str(fp4pass.report(again)) == str(fp4pass.report(converted))


def test_models_are_saved_whole_by_torch() -> None:
    converted = fp4pass.convert(built(Mlp), method="naive")
    file = io.BytesIO()
    torch.save(converted, file)
    file.seek(0)
    assert_equal_runs(torch.load(file, weights_only=False), converted)


class Locked(Mlp):
    """Keeps something that cannot be copied, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = (i for i in range(3))

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = (i for i in range(5))


def test_a_state_of_the_users_own_is_kept() -> None:
    model = fp4pass.convert(built(Locked), method="naive")
    assert len(list(copy.deepcopy(model).body.lock)) == 5


# Positive cases: these do become regions, and share what they can.


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), nn.ReLU(), Mlp()])

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Mlp(), nn.Sequential(Mlp(), nn.GELU()))
        self.scale = nn.Parameter(torch.ones(K))

    def forward(self, x: Tensor) -> Any:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.inner(normed)


class Fused(nn.Module):
    """As Phi3's: one linear, split in two."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(K, 2 * K, bias=False), linear()
        self.act = functools.partial(F.gelu, approximate="tanh")

    def forward(self, x: Tensor) -> Any:
        """With a docstring."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


def quantizations(graph_module: fx.GraphModule | None) -> list[fx.Node]:
    assert graph_module is not None
    nodes = graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.fp4pass.quantize.default
    )
    return list(nodes)


@pytest.mark.parametrize(
    "make, linears, inputs",
    [
        (Mlp, 3, 2),
        (Loop, 6, 4),
        (Nested, 6, 4),
        (Fused, 2, 2),
        (SameInputTwice, 4, 2),
        (lambda: nn.Sequential(linear(), nn.GELU(), linear()), 2, 2),
        (lambda: nn.Sequential(linear(), linear(), nn.Linear(K, K, bias=False)), 3, 3),
    ],
    ids=["Mlp", "Loop", "Nested", "Fused", "SameInputTwice", "Sequential", "Chain"],
)
def test_provable_modules_become_one_graph(
    make: Callable[[], nn.Module], linears: int, inputs: int
) -> None:
    prepared = fp4pass.prepare(built(make))
    graph_module = region_graph(prepared.body)
    assert graph_module is not None
    called = [n for n in graph_module.graph.nodes if n.op == "call_module"]
    watching = [n for n in called if isinstance(graph_module.get_submodule(n.target), Observer)]
    again = 1 if make is SameInputTwice else 0
    assert len(watching) == inputs + again
    assert len(graph_module.graph.find_nodes(op="call_function", target=F.linear)) == linears
    prepared(batch())
    fp4pass.convert(prepared, method="naive")
    graph_module = region_graph(prepared.body)
    assert len(quantizations(graph_module)) == inputs
    products = graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.fp4pass.linear_quantized.default
    )
    assert len(products) == linears
    assert_equal_runs(prepared, unregioned(prepared))
    assert install_regions(prepared) == 0


def test_in_place_writes_keep_quantizations_apart() -> None:
    model = built(InPlaceModule).body
    fp4pass.convert(model, method="naive")
    assert len(quantizations(region_graph(model))) == 3
    x = batch()
    expected = unregioned(model)(x.clone())
    got = model(x.clone())
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("hidden_act", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_mlps_of_transformers_are_regions(hidden_act: str) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, Phi3Config
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    sizes = {"hidden_size": K, "intermediate_size": 96, "hidden_act": hidden_act}
    for model, inputs in ((LlamaMLP(LlamaConfig(**sizes)), 2), (Phi3MLP(Phi3Config(**sizes)), 2)):
        original = copy.deepcopy(model)
        fp4pass.prepare(model)
        assert region_graph(model) is not None
        assert torch.equal(model(batch()), original(batch()))
        fp4pass.convert(model, method="naive")
        assert len(quantizations(region_graph(model))) == inputs
        assert torch.equal(model(batch()), unregioned(model)(batch()))
        assert any(isinstance(m, QuantizedLinear) for m in model.modules())


# What must not be traced, and why.


class KeywordNames(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("in", linear())
        self.add_module("graph", linear())


@pytest.mark.parametrize(
    "make, reason",
    [
        (Training, "IfExp"),
        (Decorated, "not what runs"),
        (Random, "randn"),
        (Reassigned, "Attribute"),
        (InPlaceMethod, "Expr"),
        (InPlaceArgument, "in place"),
        (MutatedByChild, "might change"),
        (OwnLookup, "looks up its attributes"),
        (Property, "neither a module nor a constant"),
        (Global, "global name"),
        (closure, "closure|not what runs"),
        (lambda: Reversed(linear()), "iterates"),
        (KeywordNames, "graph"),
        (lambda: nn.Sequential(OrderedDict({"in": linear()})), "Python"),
        (lambda: nn.Sequential(), "empty"),
    ],
)
def test_what_cannot_be_proved_is_refused_with_a_reason(
    make: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(NotProvable, match=reason):
        trace(make())


def test_names_that_a_graph_cannot_have_are_no_hindrance() -> None:
    for make in (KeywordNames, lambda: nn.Sequential(OrderedDict({"in": linear()}))):
        model = fp4pass.convert(built(make), method="naive")
        assert_equal_runs(model, unregioned(model))


def test_inference_mode_at_any_step() -> None:
    """Calibrated and converted within inference mode, used outside of it, and the reverse."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    x = torch.randn(10, 64)
    fp4pass.prepare(model)
    with torch.inference_mode():
        model(x)
    model(x)
    with torch.inference_mode():
        fp4pass.convert(model)
        inside = model(x)
    assert {row.tokens for row in fp4pass.report(model).converted} == {20}
    x.requires_grad_()
    outside = model(x)
    outside.sum().backward()
    assert torch.equal(inside, outside)
    assert x.grad is not None


def test_a_replica_runs_its_own_layers() -> None:
    """nn.DataParallel copies the attributes of a module, our cache of its graph among them."""
    model, x = fp4pass.convert(Mlp(), method="naive"), batch()
    before = model(x)
    assert region_graph(model) is not None
    replica = model._replicate_for_data_parallel()
    for name, child in model.named_children():
        setattr(replica, name, copy.deepcopy(child))
    linears = [m for m in replica.modules() if isinstance(m, QuantizedLinear)]
    linears[-1].bias.data += 1.0
    assert not torch.equal(replica(x), before)
    assert torch.equal(model(x), before)


ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_statistics_are_float32_and_may_be_added_to_anywhere(device: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = fp4pass.prepare(built(Mlp))
    finally:
        torch.set_default_dtype(torch.float32)
    model, x = model.float().to(device), batch().to(device)
    with torch.inference_mode():
        model(x)
    model(x)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            stats = collect(module.__dict__[OBSERVERS], "")
            assert stats.tokens == 20
            assert stats.block_hessian is not None and stats.block_hessian.dtype is torch.float32
