"""LinearConfig is the one record: everything that takes or shows options is made of its fields."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp4pass
from fp4pass.errors import OptionError
from fp4pass.record.config import FIELDS, OPTIONS, LinearConfig

# Another value than the default for each option; a new field needs one here.
OTHER: dict[str, Any] = {
    "fmt": "mxfp4",
    "method": fp4pass.Naive(),
    "weight_only": True,
    "block": 32,
    "inputs": "fp8",
    "activation_scales": "sse",
    "input_range": "headroom",
    "rotation": 32,
    "unreached": "skip",
    "expert_prior": 4.0,
    "compute": "fp8",
}


def beside(name: str) -> dict[str, Any]:
    """Options that another value of an option goes with."""
    return {"method": "sse"} | ({"fmt": "nvfp4"} if name == "inputs" else {"weight_only": True})


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))


def test_every_option_has_another_value() -> None:
    assert set(OTHER) == {each.name for each in OPTIONS}


@pytest.mark.parametrize("call", [fp4pass.prepare, fp4pass.convert])
def test_an_unknown_option_has_a_nearest_one(call: Any) -> None:
    with pytest.raises(OptionError, match=r"Option 'blok' .*Did you mean 'block'"):
        call(model(), blok=32)


@pytest.mark.parametrize("name", OTHER)
def test_an_option_goes_from_the_call_to_the_layer_and_back(name: str, tmp_path: Path) -> None:
    """By convert, a rule and a recipe, through the report, a checkpoint and plain values."""
    value = OTHER[name]
    default = beside(name)
    expected = LinearConfig(**{**default, name: value})
    assert getattr(expected, name) == value
    converted = fp4pass.convert(model(), **{**default, name: value})
    ruled = fp4pass.convert(model(), **default, rules=[("*", {name: value})])
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(fp4pass.Recipe(expected).to_dict()))
    by_recipe = fp4pass.convert(model(), **fp4pass.Recipe.read(path).arguments())
    fp4pass.save(by_recipe, tmp_path / "q") if expected.weight_only else None
    for each in (converted, ruled, by_recipe):
        assert [layer.config for layer in each] == [expected, expected]
        assert [row.config for row in fp4pass.report(each).rows] == [expected, expected]
    if expected.weight_only:
        loaded: Any = fp4pass.load(tmp_path / "q", model=model())
        assert loaded[0].config == expected
    assert LinearConfig.from_dict(json.loads(json.dumps(expected.to_dict()))) == expected


@pytest.mark.parametrize("name", OTHER)
def test_convert_takes_what_prepare_was_told(name: str) -> None:
    options = {**beside(name), name: OTHER[name]}
    prepared = fp4pass.prepare(model(), **options)
    converted: Any = fp4pass.convert(prepared)
    assert converted[0].config == LinearConfig(**options)
    # What convert is told goes before it.
    prepared = fp4pass.prepare(model(), **options)
    default = getattr(LinearConfig(), name)
    if default is None:
        return  # It says nothing.
    told = {"method": "sse"} if name == "method" else {name: default}
    again: Any = fp4pass.convert(prepared, **told)
    assert getattr(again[0].config, name) == getattr(LinearConfig(**told), name)


@pytest.mark.core
def test_rules_and_method_of_prepare_hold_in_convert() -> None:
    prepared = fp4pass.prepare(model(), "gptq", rules=[("1", {"fmt": "mxfp4"})])
    prepared.eval()
    fp4pass.calibrate(prepared, [torch.randn(40, 64)], progress=False)
    converted: Any = fp4pass.convert(prepared)
    assert [layer.config.method_name for layer in converted] == ["gptq", "gptq"]
    assert [layer.config.fmt for layer in converted] == ["nvfp4", "mxfp4"]


def test_a_record_is_checked_settled_and_frozen() -> None:
    config = LinearConfig("nvfp4:32", "gptq")
    assert (config.fmt, config.block, config.method) == ("nvfp4", 32, fp4pass.Gptq())
    assert config == LinearConfig("nvfp4", fp4pass.Gptq(), block=32)
    assert hash(config) == hash(LinearConfig("nvfp4", fp4pass.Gptq(), block=32))
    assert config.override({"fmt": "mxfp4"}).block == 32
    assert LinearConfig("mxfp4", block=16).override({"fmt": "nvfp4"}).block == 16
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block = 16  # type: ignore[misc]
    for bad in ({"fmt": "nvfp5"}, {"block": 7}, {"weight_only": 1}, {"rotation": 5}, {"method": 3}):
        with pytest.raises(OptionError):
            LinearConfig(**bad)


@pytest.mark.core
def test_facts_are_stored_and_cannot_be_given() -> None:
    facts = {each.name for each in FIELDS} - {each.name for each in OPTIONS}
    assert facts == {"folded", "output_rotation", "multiplies"}
    for name in facts:
        with pytest.raises(OptionError, match=f"Option '{name}' does not exist"):
            fp4pass.convert(model(), "nvfp4", "sse", **{name: True})
        assert name in LinearConfig().to_dict()
