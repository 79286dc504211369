"""activation_scales in models: what a layer computes, and that every door keeps the choice."""

from __future__ import annotations

import copy
from pathlib import Path

import oracle
import pytest
import torch
from small_models import assert_same_bits, converted, linears, logits
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass.core.formats import get_format
from fp4pass.errors import OptionError
from fp4pass.quantization.recipe import Recipe
from fp4pass.record.config import LinearConfig


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


def test_checkpoints_keep_it(tmp_path: Path) -> None:
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
