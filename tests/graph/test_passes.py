"""The passes: what they find and leave in a graph, and that a second run changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from swap import swapped
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fp4pass
from fp4pass.graph.rewrite import find_linears, insert_observers, rewrite_linears, share_quantize
from fp4pass.quantization.observers.observer import Observer, collect
from fp4pass.quantization.replace import attach_observers, rewrite_graph
from fp4pass.quantization.scan import scan_layers
from fp4pass.record.config import LinearConfig

K = 64
ops = torch.ops.fp4pass


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.up = nn.Linear(K, 96), nn.Linear(K, 96, bias=False)
        self.down = nn.Linear(96, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.left(x)) * self.up(x))


class Functional(nn.Module):
    """Parameters without modules: as F.linear, as a product, and under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.randn(K, K))
        self.loose = nn.Parameter(torch.randn(K, K))
        self.experts = nn.Parameter(torch.randn(2, K, K))
        self.table = nn.Embedding(7, K)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.inner.weight) @ self.loose
        y = y + F.linear(x, self.loose) + self.table(x.argmax(-1) % 7)
        return F.linear(y @ self.experts[0], self.table.weight)


class Sum(nn.Module):
    """A linear layer as one operator, but for a factor."""

    def __init__(self, **factors: float) -> None:
        super().__init__()
        self.inner, self.factors = nn.Linear(K, K), factors

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.inner.bias, x, self.inner.weight.t(), **self.factors)


@pytest.mark.core
@pytest.mark.parametrize("factors", [{}, {"alpha": 2}, {"beta": 0.5}], ids=str)
def test_a_sum_with_a_factor_is_no_linear_layer(factors: dict[str, float]) -> None:
    graph = torch.export.export(Sum(**factors), (torch.ones(3, K),)).module().graph
    assert len(find_linears(graph)) == (not factors)


class BothWays(nn.Module):
    """As a tied autoencoder: one weight, read as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(K, K))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(F.linear(x, self.weight), self.weight)


class Biased(nn.Module):
    """A weight that is read by something else, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(K, K))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.weight.sum()


def built(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return cls().eval()


def batch(i: int = 0) -> Tensor:
    return torch.randn(6, K, generator=torch.Generator().manual_seed(i))


def exported(model: nn.Module, decompose: bool = False) -> fx.GraphModule:
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(model, (batch(),), dynamic_shapes=shapes, strict=False)
    return (program.run_decompositions() if decompose else program).module()


DOORS = {
    "symbolic": lambda model: fx.symbolic_trace(model),
    "exported": exported,
    "decomposed": lambda model: exported(model, decompose=True),
}


def targets(graph: fx.Graph, target: object) -> int:
    return len(graph.find_nodes(op="call_function", target=target))


def reasons(model: nn.Module) -> dict[str, str]:
    return {row.name: row.skip_reason for row in fp4pass.report(model).rows}


@pytest.mark.quick(2)
@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("weight_only", [True, False])
def test_every_door_gives_what_a_module_swap_gives(door: str, weight_only: bool) -> None:
    model = DOORS[door](built(Mlp))
    assert len(find_linears(model.graph)) == 3
    fp4pass.convert(model, method="naive", weight_only=weight_only)
    with torch.no_grad():
        expected = swapped(built(Mlp), weight_only=weight_only)(batch(1)[:3])
        got = model(batch(1)[:3])
    if door == "decomposed" and weight_only:
        torch.testing.assert_close(got, expected)
    else:
        assert torch.equal(got, expected)
    assert set(reasons(model)) == {"left", "up", "down"} and not any(reasons(model).values())
    state = model.state_dict()
    assert "left.weight_packed" in state and "left.weight" not in state
    dense = model.get_submodule("left").weight
    assert dense.shape == (96, K)


@pytest.mark.quick(1)
@pytest.mark.parametrize("door", DOORS)
def test_graphs_are_observed_once_for_what_shares_an_input(door: str) -> None:
    model = DOORS[door](built(Mlp))
    fp4pass.prepare(model)
    observers = [m for m in model.modules() if isinstance(m, Observer)]
    # Modules that are called are observed by hooks, each its own.
    assert len(observers) == (0 if door == "symbolic" else 2)
    graph = str(model.graph)
    fp4pass.prepare(model)
    assert str(model.graph) == graph
    other = copy.deepcopy(model)
    for i in range(2):
        assert torch.equal(model(batch(i)), DOORS[door](built(Mlp))(batch(i)))
    live = fp4pass.prepare(built(Mlp))
    live(batch(0)), live(batch(1))
    for name in ("left", "up", "down"):
        a, b = (collect([m.get_submodule(name)], "").matrix(0) for m in (live, model))
        assert a.tokens == b.tokens == 12
        torch.testing.assert_close(a.block_hessian, b.block_hessian)
    fp4pass.convert(model, "nvfp4")
    assert not [m for m in model.modules() if isinstance(m, Observer)]
    # The copy has observers of its own, and is prepared.
    other(batch(0))
    fp4pass.prepare(other)
    assert str(other.graph) == graph
    fp4pass.convert(other, "nvfp4")


@pytest.mark.core
def test_observers_outlive_dead_code_elimination() -> None:
    model = exported(built(Mlp))
    fp4pass.prepare(model)
    model.graph.eliminate_dead_code()
    model.recompile()
    model(batch())
    fp4pass.convert(model, "nvfp4")


@pytest.mark.core
def test_a_second_run_of_every_pass_changes_nothing() -> None:
    model = exported(built(Mlp))
    layers = scan_layers(model)
    attach_observers(model, layers, ("block_hessian",))
    observed = str(model.graph)
    attach_observers(model, layers, ("block_hessian",))
    assert str(model.graph) == observed
    made: list[Any] = []
    assert insert_observers(model.graph, lambda linear: True, made.append) == 0 and not made
    model = exported(built(Mlp))
    fp4pass.convert(model, "nvfp4", method="naive")
    graph = str(model.graph)
    assert targets(model.graph, ops.quantize.default) == 2
    how = LinearConfig("nvfp4", "naive")
    assert rewrite_linears(model.graph, lambda linear: how) == 0
    assert share_quantize(model.graph) == 0
    assert rewrite_graph(model, {}) == 0
    assert str(model.graph) == graph
    assert unfinished(model) == 0


def unfinished(model: fx.GraphModule) -> int:
    """Nodes that nothing uses and that dead code elimination would take away."""
    before = len(model.graph.nodes)
    other = copy.deepcopy(model)
    other.graph.eliminate_dead_code()
    return before - len(other.graph.nodes)


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("door", ["symbolic", "exported"])
def test_parameters_without_a_linear_are_rows(door: str) -> None:
    model = DOORS[door](built(Functional))
    expected = built(Functional)
    fp4pass.convert(model, method="naive", weight_only=True)
    why = reasons(model)
    assert why["inner"] == ""
    assert "uses it without a linear" in why["loose"]
    assert "experts" in why["experts"]
    assert "embedding" in why["table"]
    rounded = swapped_parameter(expected)
    torch.testing.assert_close(model(batch()), rounded(batch()))


def swapped_parameter(model: nn.Module) -> nn.Module:
    linear = nn.Linear(K, K, bias=False)
    linear.weight = model.inner.weight
    fp4pass.convert(linear, method="naive", weight_only=True)
    model.inner.weight = nn.Parameter(linear.weight)
    return model


@pytest.mark.parametrize("door", ["symbolic", "exported"])
@pytest.mark.parametrize(
    "cls, word", [(BothWays, "transpose|mm reads it"), (Biased, "sum reads it")]
)
def test_weights_with_other_readers_stay_whole(door: str, cls: type[nn.Module], word: str) -> None:
    model = DOORS[door](built(cls))
    with pytest.raises(fp4pass.errors.StateError, match=word):
        fp4pass.convert(model, "nvfp4", method="naive")
    torch.testing.assert_close(model(batch()), built(cls)(batch()))


@pytest.mark.core
def test_the_root_may_be_a_linear() -> None:
    for door in DOORS.values():
        model = door(built(lambda: nn.Linear(K, 96)))
        reference = fp4pass.convert(built(lambda: nn.Linear(K, 96)), "nvfp4", method="naive")
        fp4pass.convert(model, "nvfp4", method="naive")
        assert torch.equal(model(batch()), reference(batch()))


class Twice(Mlp):
    """A layer that is called twice on one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.left(x)) * self.up(x) + self.left(x))


@pytest.mark.core
def test_a_layer_that_reads_a_tensor_twice_has_seen_it_twice() -> None:
    model, live = exported(built(Twice)), built(Twice)
    for each in (model, live):
        fp4pass.prepare(each)
        each(batch())
    assert len([m for m in model.modules() if isinstance(m, Observer)]) == 3
    for name in ("left", "up", "down"):
        a, b = (collect([m.get_submodule(name)], "").matrix(0) for m in (live, model))
        assert a.tokens == b.tokens == (12 if name == "left" else 6)
        torch.testing.assert_close(a.block_hessian, b.block_hessian)


class WritesBetween(nn.Module):
    """torch.export keeps the write, and the second linear reads another value of the same node."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.up = nn.Linear(K, K), nn.Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        view = x.view(-1)
        y = self.left(x)
        view.mul_(3)
        return y + self.up(x)


def test_a_write_through_a_view_keeps_exported_readers_apart() -> None:
    model, live = exported(built(WritesBetween)), built(WritesBetween)
    for each in (model, live):
        fp4pass.prepare(each)
        each(batch())
    assert len([m for m in model.modules() if isinstance(m, Observer)]) == 2
    for name in ("left", "up"):
        a, b = (collect([m.get_submodule(name)], "").matrix(0) for m in (live, model))
        assert torch.equal(a.block_hessian, b.block_hessian) and a.input_amax == b.input_amax
    for each in (model, live):
        fp4pass.convert(each, "mxfp4", method="naive")
    assert targets(model.graph, ops.quantize.default) == 2
    assert torch.equal(model(batch()), live(batch()))


@pytest.mark.core
def test_exported_graphs_share_a_scale_and_not_only_its_value() -> None:
    """Else a graph could quantize with the scale of one layer and multiply with that of another."""
    model = exported(built(Mlp))
    fp4pass.prepare(model, "sse")
    model(batch())
    fp4pass.convert(model, "nvfp4", method="sse")
    assert targets(model.graph, ops.quantize.default) == 2
    state = model.state_dict()
    scale = state["left.input_global_scale"] / 3
    state |= {"left.input_global_scale": scale, "up.input_global_scale": scale.clone()}
    live = built(Mlp)
    fp4pass.prepare(live, "sse")
    live(batch())
    fp4pass.convert(live, "nvfp4", method="sse")
    for assign in (False, True):
        model.load_state_dict(state, assign=assign)
        live.load_state_dict(state, assign=assign)
        assert torch.equal(model(batch()), live(batch()))
    # Quantizing and multiplying go by one scale, also where its two names have come apart.
    model.load_state_dict(state | {"up.input_global_scale": 5 * scale}, assign=True)
    assert torch.equal(model(batch()), live(batch()))
