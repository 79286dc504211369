"""compute= and activation_scales= in models: what layers compute, and that every door keeps it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mixtures
import oracle
import pytest
import torch
from post_grad import compiled, fresh
from small_models import assert_same_bits, converted, linears, logits
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass import ops
from fp4pass.core.formats import get_format
from fp4pass.core.packing import PackedInput, PackedWeight
from fp4pass.errors import OptionError, StateError
from fp4pass.graph.inductor import compile_report, install_passes
from fp4pass.kernels.linear.naive import linear_quantized_ref, linear_ref
from fp4pass.quantization.recipe import Recipe
from fp4pass.record.config import LinearConfig

# Rows that are computed in FP8 whatever the layer.
MANY = 256


def two_layers(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 48))


def rows(count: int, columns: int = 64) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_a_layer_computes_what_the_reference_does(fmt: str) -> None:
    x = rows(MANY)
    for weight_only in (True, False):
        model = fp4pass.convert(two_layers(), fmt, "sse", weight_only=weight_only, compute="fp8")
        plain = fp4pass.convert(two_layers(), fmt, "sse", weight_only=weight_only)
        layer, record = model[0], model[0].config.format
        weight = PackedWeight(*layer.packed_weight[:3], layer.bias)
        if weight_only:
            expected = linear_ref(x, weight, record, "fp8")
        else:
            scale = ops.dynamic_global_scale(x, fmt) if fmt == "nvfp4" else None
            given = PackedInput(*ops.quantize(x, scale, fmt), scale)
            expected = linear_quantized_ref(x, given, weight, record, compute="fp8")
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(x[:5]), plain[0](x[:5]))
        if fmt == "mxfp4" and not weight_only:
            # Both operands are exact.
            torch.testing.assert_close(layer(x), plain[0](x), rtol=1e-5, atol=1e-6)
        else:
            assert not torch.equal(layer(x), plain[0](x))


def test_experts_stay_as_they_are() -> None:
    def look() -> dict[str, tuple[str, str]]:
        rows = fp4pass.report(model).converted
        return {row.name: (row.config.compute, row.note) for row in rows}

    model = fp4pass.convert(mixtures.build("qwen3_moe"), "nvfp4", "sse", compute="fp8")
    found = look()
    stacks = {name for name in found if ".experts." in name}
    assert stacks and {found[name][0] for name in stacks} == {"input"}
    assert all("products of experts" in found[name][1] for name in stacks)
    assert {found[name] for name in found.keys() - stacks} == {("fp8", "")}
    fp4pass.set_compute(model, "input")
    fp4pass.set_compute(model, "fp8")
    assert look() == found


def test_it_is_set_on_a_model_and_taken_back(tmp_path: Path) -> None:
    x = rows(MANY)
    plain = fp4pass.convert(two_layers(), "nvfp4", "sse", weight_only=True)
    before = plain(x)
    asked = fp4pass.convert(two_layers(), "nvfp4", "sse", weight_only=True, compute="fp8")
    fp4pass.save(plain, tmp_path / "q")
    loaded: Any = fp4pass.load(tmp_path / "q", model=two_layers())
    for model in (plain, loaded):
        assert fp4pass.set_compute(model, "fp8") is model
        assert torch.equal(model(x), asked(x)) and not torch.equal(model(x), before)
        assert {row.config.compute for row in fp4pass.report(model).converted} == {"fp8"}
        assert "fp8 products" in repr(model)
    fp4pass.save(plain, tmp_path / "fp8")
    again: Any = fp4pass.load(tmp_path / "fp8", model=two_layers())
    assert torch.equal(again(x), asked(x))
    fp4pass.set_compute(plain, "input")
    assert torch.equal(plain(x), before)


def test_wrong_calls() -> None:
    with pytest.raises(StateError, match="set_compute: expected a live model"):
        fp4pass.set_compute(two_layers(), "fp8")
    model = fp4pass.convert(two_layers(), "nvfp4", "sse")
    graph = torch.export.export(two_layers(), (rows(MANY),)).module()
    graph = fp4pass.convert(graph, "mxfp4", "sse", weight_only=True, compute="fp8")
    wanted = fp4pass.convert(two_layers(), "mxfp4", "sse", weight_only=True, compute="fp8")
    assert torch.equal(graph(rows(MANY)), wanted(rows(MANY)))
    with pytest.raises(StateError, match="set_compute: expected a live model"):
        fp4pass.set_compute(graph, "input")
    with pytest.raises(OptionError, match=r"compute 'fp4' does not exist"):
        fp4pass.set_compute(model, "fp4")
    stored = model[0].packed_weight[:3]
    with pytest.raises(OptionError, match=r"compute 'bf16' does not exist"):
        ops.linear(rows(1), *stored, None, "nvfp4", "bf16")
    with pytest.raises(OptionError, match=r"compute None does not exist"):
        fp4pass.convert(two_layers(), "nvfp4", "sse", rules=[("0", {"compute": None})])


class Attention(nn.Module):
    """Three products of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) * self.v(x)


@pytest.mark.quick(1)
@pytest.mark.parametrize("weight_only", [True, False])
def test_compiled_models_merge_products_of_one_input(weight_only: bool) -> None:
    torch.manual_seed(0)
    options = {"weight_only": weight_only, "compute": "fp8"}
    model = fp4pass.convert(Attention(), "mxfp4", "sse", **options).eval()
    group = "linear_group" if weight_only else "linear_quantized_group"
    with fresh(), torch.no_grad():
        install_passes()
        run = compiled(model, dynamic=True)
        for count in (5, MANY):
            x = rows(count)
            torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
        (graph,) = compile_report().graphs
        fp4pass.set_compute(model, "input")
        torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
        assert len(compile_report().graphs) == 2
    assert {name for name in graph.after if name.startswith("linear")} == {group}
    assert graph.after[group] == 1


# ---- activation_scales --------------------------------------------------------------------------


def batch(columns: int = 64) -> Tensor:
    return torch.randn(48, columns, generator=torch.Generator().manual_seed(1)) ** 3


def best(x: Tensor, name: str, g: float) -> Tensor:
    """x rounded at the best scale of each block, in float64 by brute force."""
    block = get_format(name).block
    residual = oracle.residuals(x.view(len(x), -1, block), name, g)
    at = oracle.errors(residual, None).argmin(0)
    kept = residual.gather(0, at[None, ..., None].expand(1, -1, -1, block))[0]
    return x.double() - kept.flatten(1)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_a_layer_rounds_its_input_as_well_as_can_be(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 32)
    fp4pass.prepare(layer, "naive")
    layer(batch())
    fp4pass.convert(layer, name, "naive", activation_scales="sse")
    g = 1 / layer.input_global_scale.item() if name == "nvfp4" else 1.0
    wanted = F.linear(best(batch(), name, g).float(), layer.weight, layer.bias)
    torch.testing.assert_close(layer(batch()), wanted)
    naive = copy.deepcopy(layer)
    naive.config = naive.config.override({"activation_scales": "naive"})
    assert not torch.equal(naive(batch()), layer(batch()))
    assert f"{name}, input scales by sse" in repr(layer)


def two_wide_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).eval()


def test_rules_recipes_and_wrong_names_of_input_scales() -> None:
    model = two_wide_layers()
    rules = [("2", {"activation_scales": "naive"})]
    fp4pass.convert(model, "mxfp4", "naive", activation_scales="sse", rules=rules)
    assert [model[i].config.activation_scales for i in (0, 2)] == ["sse", "naive"]
    rows = fp4pass.report(model).converted
    assert [row.config.label for row in rows] == ["mxfp4, input scales by sse", "mxfp4"]
    recipe = Recipe(LinearConfig(activation_scales="sse"))
    assert recipe.arguments()["activation_scales"] == "sse"
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    with pytest.raises(OptionError, match="activation_scales 'best'"):
        fp4pass.convert(two_wide_layers(), activation_scales="best")
    with pytest.raises(OptionError, match=r"In the rule for '2'.*'best'"):
        Recipe(rules=(("2", {"activation_scales": "best"}),))


def test_checkpoints_keep_the_search_of_input_scales(tmp_path: Path) -> None:
    rules = [("*.down_proj", {"activation_scales": "naive"})]
    model = converted(weight_only=False, activation_scales="sse", rules=rules)
    fp4pass.save(model, tmp_path / "model")
    loaded = fp4pass.load(tmp_path / "model")
    assert_same_bits(loaded, model)
    chosen = [
        {name: layer.config.activation_scales for name, layer in linears(each).items()}
        for each in (model, loaded)
    ]
    assert chosen[0] == chosen[1] and set(chosen[0].values()) == {"naive", "sse"}
    assert torch.equal(logits(loaded), logits(model))
    naive = copy.deepcopy(model)
    for layer in linears(naive).values():
        layer.config = layer.config.override({"activation_scales": "naive"})
    assert not torch.equal(logits(naive), logits(model))
