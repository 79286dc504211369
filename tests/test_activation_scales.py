"""activation_scales in models: what a layer computes, and that every door keeps the choice."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from small_models import assert_same_bits, language_model, linears, logits, tokens
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass.core.formats import get_format
from fp4pass.errors import OptionError
from fp4pass.quantization.recipe import Recipe
from fp4pass.record.config import LinearConfig

OPS = torch.ops.fp4pass


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


def test_operators_refuse_scales_that_there_are_not() -> None:
    x, weight = batch(), torch.ones(64)
    calls: list[Any] = [
        lambda: OPS.quantize(x, None, "nvfp4", "best"),
        lambda: OPS.norm_quantize(x, None, weight, None, "rms", 1e-6, None, "nvfp4", "best"),
        lambda: OPS.activate_quantize(x, None, "silu", None, "nvfp4", "best"),
    ]
    for call in calls:
        with pytest.raises(OptionError, match=r"'best'.*naive.*sse"):
            call()


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).eval()


def test_rules_recipes_and_wrong_names() -> None:
    model = two_layers()
    rules = [("2", {"activation_scales": "naive"})]
    fp4pass.convert(model, "mxfp4", "naive", activation_scales="sse", rules=rules)
    assert [model[i].config.activation_scales for i in (0, 2)] == ["sse", "naive"]
    rows = fp4pass.report(model).converted
    assert [row.config.label for row in rows] == ["mxfp4, input scales by sse", "mxfp4"]
    recipe = Recipe(LinearConfig(activation_scales="sse"))
    assert recipe.arguments()["activation_scales"] == "sse"
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    with pytest.raises(OptionError, match="activation_scales 'best'"):
        fp4pass.convert(two_layers(), activation_scales="best")
    with pytest.raises(OptionError, match=r"In the rule for '2'.*'best'"):
        Recipe(rules=(("2", {"activation_scales": "best"}),))


@pytest.mark.slow
def test_compiled_graphs_search_too() -> None:
    model = fp4pass.convert(two_layers(), "mxfp4", "naive", activation_scales="sse")
    x = batch()
    wanted = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), wanted)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model = language_model()
    fp4pass.prepare(model, "naive")
    fp4pass.calibrate(model, [tokens()], progress=False)
    rules = [("*.down_proj", {"activation_scales": "naive"})]
    fp4pass.convert(model, "nvfp4", "naive", activation_scales="sse", rules=rules)
    folder = tmp_path_factory.mktemp("searched") / "model"
    fp4pass.save(model, folder)
    return model, folder


def test_checkpoints_keep_it(searched: tuple[nn.Module, Path]) -> None:
    model, folder = searched
    choices = {name: layer.config.activation_scales for name, layer in linears(model).items()}
    assert set(choices.values()) == {"naive", "sse"}
    loaded = fp4pass.load(folder)
    assert_same_bits(loaded, model)
    assert {
        name: layer.config.activation_scales for name, layer in linears(loaded).items()
    } == choices
    assert torch.equal(logits(loaded), logits(model))
    naive = copy.deepcopy(model)
    for layer in linears(naive).values():
        layer.config = layer.config.override({"activation_scales": "naive"})
    assert not torch.equal(logits(naive), logits(model))
