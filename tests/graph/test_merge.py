"""The passes that merge calls, on graphs by hand and on compiled models of the zoo."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from post_grad import compiled, fresh, run_passes
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fp4pass
from fp4pass.graph import inductor as install
from fp4pass.graph.inductor.fusions import fuse_quantizers
from fp4pass.graph.inductor.merge import group_linears, join_counters, share_calls

ops = torch.ops.fp4pass


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with fresh():
        yield


def converted(name: str, fmt: str, *, calibrate: bool, weight_only: bool = False) -> nn.Module:
    case = next(case for case in zoo.CASES if case.name == name)
    model = case.build()
    if calibrate:
        fp4pass.prepare(model, "sse")
        with torch.no_grad():
            case.run(model, 0)
    return fp4pass.convert(model, fmt, "sse", weight_only=weight_only)


def run_compiled(name: str, model: nn.Module, *passes: object) -> Tensor:
    """The model's output by Inductor's graph, with these passes or those that are installed."""
    case = next(case for case in zoo.CASES if case.name == name)

    def change(graph: fx.Graph) -> None:
        for each in passes:
            each(graph)  # type: ignore[operator]

    with torch.no_grad():
        return case.run(compiled(model, change if passes else None), 1)


def nothing(graph: fx.Graph) -> int:
    return 0


def calls(counts: dict[str, int]) -> tuple[int, int]:
    """How many quantizations and products a compiled graph has."""
    products = sum(count for name, count in counts.items() if name.startswith("linear"))
    return counts.get("quantize", 0), products


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "calibrate", "weight_only"),
    [("llama", True, False), ("gemma3", True, True), ("t5", False, False), ("bert", True, False)],
)
def test_merging_calls_changes_no_bit(name: str, calibrate: bool, weight_only: bool) -> None:
    model = converted(name, "nvfp4", calibrate=calibrate, weight_only=weight_only)
    merged = run_compiled(name, model)
    assert torch.equal(run_compiled(name, model, nothing), merged)
    assert len(fp4pass.compile_report().graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_fused_quantizers_compile(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with generated code: what Inductor is told of the operators' arguments fits."""

    def fuse_all(graph: fx.Graph) -> int:
        return fuse_quantizers(graph, lambda _: True)

    model = converted("llama", fmt, calibrate=True)
    case = next(case for case in zoo.CASES if case.name == "llama")
    monkeypatch.setattr(install, "PASSES", (share_calls, fuse_all, group_linears))
    with torch.no_grad():
        eager, found = case.run(model, 1), case.run(torch.compile(model, fullgraph=True), 1)
    # A code that flips changes what follows.
    assert (found - eager).norm() <= 0.1 * eager.norm()
    (graph,) = fp4pass.compile_report().graphs
    assert graph.changes == {"share_calls": 6, "fuse_all": 6, "group_linears": 6}
    fused = {name: count for name, count in graph.after.items() if "quantize" in name}
    assert fused["quantize"] == 2 and fused["activate_quantize"] == 2
    assert fused["norm_quantize"] == 4


def test_shared_scales_survive_a_move_and_a_copy() -> None:
    model = converted("llama", "nvfp4", calibrate=True)

    def tensors(model: nn.Module) -> int:
        scales = [m.input_global_scale for m in model.modules() if hasattr(m, "input_global_scale")]
        assert len(scales) == 14
        return len({id(scale) for scale in scales})

    shared = tensors(model)
    assert shared <= 8
    assert tensors(copy.deepcopy(model)) == shared
    assert tensors(model.to(torch.float64)) == shared
    # As a move to another device, which gives every buffer new memory.
    assert tensors(model._apply(torch.clone)) == shared
    assert tensors(model.to("meta")) == 14


@pytest.mark.slow
def test_a_loaded_model_shares_what_it_shared(tmp_path: Path) -> None:
    model = converted("llama", "nvfp4", calibrate=True)
    # Written under each name, for what reads files would ask how they are shared.
    state = model.state_dict()
    scales = [state[name] for name in state if name.endswith("input_global_scale")]
    assert len({scale.data_ptr() for scale in scales}) == len(scales) == 14
    fp4pass.save(model, tmp_path / "saved")
    loaded = fp4pass.load(tmp_path / "saved")
    for layer in loaded.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        assert attention.q_proj.input_global_scale is attention.v_proj.input_global_scale
        assert mlp.gate_proj.input_global_scale is mlp.up_proj.input_global_scale
    run_compiled("llama", loaded)
    (graph,) = fp4pass.compile_report().graphs
    assert calls(graph.after)[0] == 8


def test_loading_other_scales_ends_the_sharing() -> None:
    model = converted("llama", "nvfp4", calibrate=True)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.input_global_scale is attention.k_proj.input_global_scale
    state = model.state_dict()
    model.load_state_dict(state)
    assert attention.q_proj.input_global_scale is attention.k_proj.input_global_scale
    name = "model.layers.0.self_attn.k_proj.input_global_scale"
    before = state[name].clone()
    state[name] *= 2
    model.load_state_dict(state)
    assert torch.equal(attention.k_proj.input_global_scale, before * 2)
    assert torch.equal(attention.q_proj.input_global_scale, before)


def products(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """One product after the other, with what uses it between them."""
    found = []
    for packed, scale in zip(weights[::2], weights[1::2], strict=True):
        y = ops.linear(x, packed, scale.view(torch.uint8), None, None, "mxfp4")
        found.append(y.relu() + 1)
    return found


def operands(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for n in sizes:
        weight = torch.randn(n, 64, generator=generator)
        packed, scale = ops.search(weight, None, 1.0, "mxfp4", "naive")
        found += [packed, scale.view(torch.float8_e8m0fnu)]
    return found


@pytest.mark.core
def test_products_are_grouped_where_the_first_one_stood() -> None:
    x, weights = torch.randn(3, 64), operands(8, 24, 16)
    traced = make_fx(products)(x, *weights)
    expected = traced(x, *weights)
    assert group_linears(traced.graph) == 2
    assert group_linears(traced.graph) == 0
    traced.graph.lint()
    traced.recompile()
    assert all(map(torch.equal, traced(x, *weights), expected))
    names = [str(node.target) for node in traced.graph.nodes]
    assert names.count("fp4pass.linear_group.default") == 1
    assert "fp4pass.linear.default" not in names


@pytest.mark.core
def test_a_weight_that_is_made_later_is_not_grouped() -> None:
    def function(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        y = ops.linear(x, packed, scale, None, None, "mxfp4")
        # Depends on the first product.
        other = packed + y.sum().to(torch.uint8)
        return y + ops.linear(x, other, scale, None, None, "mxfp4")

    x, (packed, scale) = torch.randn(3, 64), operands(8)
    traced = make_fx(function)(x, packed, scale.view(torch.uint8))
    assert group_linears(traced.graph) == 0


@pytest.mark.core
def test_calls_are_shared_only_where_all_arguments_are_equal() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        parts = [ops.quantize(x, each, "nvfp4") for each in (a, b, a)]
        parts += [ops.quantize(x, a, "nvfp4:32"), ops.quantize(x + 0, a, "nvfp4")]
        return [each for pair in parts for each in pair]

    x, a = torch.randn(3, 64), torch.ones(1)
    traced: fx.GraphModule = make_fx(function)(x, a, a.clone())
    expected = traced(x, a, 2 * a)
    assert share_calls(traced.graph) == 1
    assert share_calls(traced.graph) == 0
    traced.graph.lint()
    traced.recompile()
    assert all(map(torch.equal, traced(x, a, 2 * a), expected))


def each_counts(kept: list[Tensor]) -> list[Tensor]:
    before = [each + 10 for each in kept]
    for each in kept:
        each.add_(1)
    return before


def two_numbers(kept: list[Tensor]) -> None:
    for i, each in enumerate(kept):
        each.add_(1 + i % 2)


def of_another(kept: list[Tensor]) -> None:
    kept[0].copy_(kept[1] + 1)
    kept[1].copy_(kept[0] + 1)


@pytest.mark.parametrize(
    ("step", "values", "removed"),
    [
        (each_counts, (3, 5, 7), 2),
        (two_numbers, (3, 5, 7, 9, 11), 3),
        (of_another, (3, 5), 0),
        (each_counts, (3,), 0),
        (each_counts, (3.0, 5.0), 0),
    ],
    ids=["one call", "a call for each number", "of another counter", "alone", "of floats"],
)
def test_counters_are_added_to_in_one_call(
    step: Callable[..., Any], values: tuple[float, ...], removed: int
) -> None:
    kept, eager = ([torch.tensor(value) for value in values] for _ in range(2))
    with torch.no_grad():
        expected = step(eager)
        found, counts, _ = run_passes(
            step, (kept,), lambda graph: join_counters(graph, lambda node: True)
        )
    assert kept == eager and found == expected and counts == [removed, 0]
