"""Names of schemes: each is one name for fields of LinearConfig, wherever a format is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4pass
from fp4pass import LinearConfig, Recipe
from fp4pass.core.formats import FORMATS
from fp4pass.errors import OptionError
from fp4pass.record.schemes import EIGHT_BITS, scheme_name, schemes

# Both ways, and two odd formats.
SOME = ["nvfp4", "nvfp4a16", "mxfp6_e2m3a16", "fp8_block", "mxfp4a8", "nvfp4a8_block"]

BOTH_WAYS_OUT = (
    "scheme 'nvfp4a16' leaves inputs in floating point, and weight_only=False quantizes "
    "them. Choose 'nvfp4', or leave weight_only=False out."
)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).eval()


def made(model: nn.Module) -> list[str]:
    return [row.scheme for row in fp4pass.report(model).rows]


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_every_format_has_two_schemes() -> None:
    of_formats = [name for fmt in FORMATS for name in (fmt, f"{fmt}a16")]
    in_fp8 = [f"{fmt}{end}" for fmt in ("nvfp4", "mxfp4") for end in EIGHT_BITS]
    assert list(schemes()) == of_formats + in_fp8
    assert list(schemes())[:4] == ["nvfp4", "nvfp4a16", "mxfp4", "mxfp4a16"]


@pytest.mark.parametrize("name", SOME)
def test_a_scheme_is_its_fields_and_has_its_name(name: str) -> None:
    fields = schemes()[name]
    config = LinearConfig(name, "naive")
    assert config == LinearConfig(method="naive", **fields)
    assert (config.fmt, config.weight_only) == (fields["fmt"], fields["weight_only"])
    assert config.scheme == name and config.to_dict()["fmt"] == fields["fmt"]
    assert LinearConfig.from_dict(config.to_dict()) == config
    assert Recipe(config) == Recipe.from_dict({"fmt": name, "method": "naive"})


@pytest.mark.parametrize("name", ["nvfp4a16", "mxfp6_e2m3"])
def test_a_block_stands_behind_the_name(name: str) -> None:
    block = LinearConfig(name, "naive").format.blocks[1]
    config = LinearConfig(name, "naive", block=block)
    assert config.scheme == f"{name}:{block}"
    assert LinearConfig(config.scheme, "naive") == config


def test_a_format_that_is_registered_later_has_its_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = dataclasses.replace(FORMATS["mxfp4"], name="mine")
    monkeypatch.setitem(FORMATS, "mine", mine)
    assert LinearConfig("minea16", "naive").scheme == "minea16"
    assert scheme_name(mine, weight_only=False) == "mine"


def test_a_name_means_the_same_everywhere() -> None:
    weights = LinearConfig("nvfp4a16")
    assert LinearConfig() == weights
    assert weights.override({"fmt": "mxfp4"}).scheme == "mxfp4"
    assert LinearConfig("nvfp4").override({"fmt": "mxfp4a16"}).scheme == "mxfp4a16"
    assert weights.override({"fmt": "mxfp4", "weight_only": True}).scheme == "mxfp4a16"
    assert LinearConfig("NVFP4A16") == weights and LinearConfig("NVFP4").scheme == "nvfp4"
    assert LinearConfig("nvfp4", weight_only=True) == weights
    assert LinearConfig("nvfp4a16", weight_only=True) == weights


@pytest.mark.parametrize("name", SOME)
def test_convert_takes_a_scheme(name: str) -> None:
    model, fields = fp4pass.convert(mlp(), name, "naive"), schemes()[name]
    assert made(model) == [name] * 2 and repr(model).count(f", {name})") == 2
    assert same_bits(model, fp4pass.convert(mlp(), method="naive", **fields))
    x = torch.randn(3, 64)
    dense = F.linear(x, model[0].weight, model[0].bias)
    assert torch.allclose(model[0](x), dense, atol=1e-6) is fields["weight_only"]


def test_inputs_may_be_in_another_format_than_weights() -> None:
    config = LinearConfig("mxfp4a8")
    assert config.input_format is FORMATS["fp8"] and config.format is FORMATS["mxfp4"]
    assert LinearConfig("mxfp4", inputs="fp8") == config
    assert LinearConfig("mxfp4a8", inputs="fp8_block").scheme == "mxfp4a8_block"
    assert LinearConfig("mxfp4a8:16").scheme == "mxfp4a8:16"
    # One of them decides, and then the other does no more.
    weights = LinearConfig("mxfp4a16")
    assert weights.override({"inputs": "fp8"}) == config
    assert config.override({"weight_only": True}) == weights
    assert config.override({"fmt": "mxfp4"}).input_format is FORMATS["mxfp4"]
    assert LinearConfig("mxfp4a8", weight_only=True) == weights
    assert config.has_input_scale is False and LinearConfig("mxfp4a8_tensor").has_input_scale
    for wrong in ({"fmt": "mxfp4a16"}, {"fmt": "mxfp4", "weight_only": True}):
        with pytest.raises(OptionError, match=r"inputs='fp8' quantizes them"):
            LinearConfig(**wrong, inputs="fp8")
    for fmt in ("fp8_block", "nvint4"):
        with pytest.raises(OptionError, match=f"weights in nvfp4 or mxfp4, got {fmt}"):
            LinearConfig(fmt, inputs="fp8")
    with pytest.raises(OptionError, match="inputs"):
        LinearConfig("mxfp4", inputs="mxfp8")  # type: ignore[arg-type]


def test_rules_take_a_scheme() -> None:
    rules: list[Any] = [("0", {"fmt": "mxfp4a16"}), ("2", {"fmt": "mxfp4"})]
    assert made(fp4pass.convert(mlp(), "nvfp4", "sse", rules=rules)) == ["mxfp4a16", "mxfp4"]
    model = fp4pass.convert(mlp(), "nvfp4a16", "sse", rules=rules)
    assert made(model) == ["mxfp4a16", "mxfp4"]
    # What the call says of inputs holds in its rules, too.
    model = fp4pass.convert(mlp(), method="sse", weight_only=True, rules=rules)
    assert made(model) == ["mxfp4a16", "mxfp4a16"]
    rules = [("2", {"fmt": "mxfp4a8"})]
    model = fp4pass.convert(mlp(), "nvfp4a8", "sse", weight_only=True, rules=rules)
    assert made(model) == ["nvfp4a16", "mxfp4a16"]
    recipe = Recipe.from_dict({"weight_only": True, "rules": [{"2": {"fmt": "mxfp4"}}]})
    assert recipe.configs()[0].scheme == "mxfp4a16"


CONTRADICTIONS: list[Any] = [
    lambda: LinearConfig("nvfp4a16", weight_only=False),
    lambda: LinearConfig().override({"fmt": "nvfp4a16", "weight_only": False}),
    lambda: fp4pass.convert(mlp(), "nvfp4a16", "sse", weight_only=False),
    lambda: fp4pass.prepare(mlp(), fmt="nvfp4a16", weight_only=False),
    lambda: Recipe(rules=(("a", {"fmt": "nvfp4a16", "weight_only": False}),)),
    lambda: Recipe.from_dict({"fmt": "nvfp4a16", "weight_only": False}),
    lambda: Recipe.from_dict([{"a": {"fmt": "nvfp4a16", "weight_only": False}}]),
]


@pytest.mark.parametrize("call", CONTRADICTIONS)
def test_a_contradiction_says_both_ways_out(call: Any) -> None:
    with pytest.raises(OptionError) as caught:
        call()
    assert str(caught.value).endswith(f"fmt: {BOTH_WAYS_OUT}")


def test_a_contradiction_in_a_rule_or_a_file_says_where() -> None:
    with pytest.raises(OptionError, match=r"^In the rule for '\*\.up': fmt: scheme"):
        fp4pass.convert(mlp(), rules=[("*.up", {"fmt": "nvfp4a16", "weight_only": False})])
    with pytest.raises(OptionError, match=r"^r\.yaml: fmt: scheme 'nvfp4a16'"):
        Recipe.from_dict({"fmt": "nvfp4a16", "weight_only": False}, where="r.yaml")
    rules = [{"a": {"fmt": "nvfp4a16", "weight_only": False}}]
    with pytest.raises(OptionError, match=r"^r\.yaml: In the rule for .a.: fmt: scheme 'nvfp4a16'"):
        Recipe.from_dict({"rules": rules}, where="r.yaml")


def test_one_tensor_has_no_inputs() -> None:
    x = torch.randn(3, 64)
    for name, block in (("nvfp4a16", None), ("nvfp4a16:32", None), ("mxfp4a16", 16)):
        state = fp4pass.quantize(x, name, block)
        plain = fp4pass.quantize(x, name.replace("a16", ""), block)
        assert torch.equal(state.qdata, plain.qdata) and state.format is plain.format


def test_checkpoints_hold_the_fields(tmp_path: Path) -> None:
    """fp4pass.json has the format and `weight_only`, also in rules."""
    rules = [("2", {"fmt": "mxfp4a16"})]
    model = fp4pass.convert(mlp(), "nvfp4a16", "sse", rules=rules)
    fp4pass.save(model, tmp_path / "a")
    old = [("2", {"fmt": "mxfp4", "weight_only": True})]
    fp4pass.save(
        fp4pass.convert(mlp(), "nvfp4", "sse", weight_only=True, rules=old), tmp_path / "b"
    )
    a, b = ((tmp_path / name / "fp4pass.json").read_bytes() for name in "ab")
    assert a == b and b"a16" not in a
    assert made(fp4pass.load(tmp_path / "a", model=mlp())) == ["nvfp4a16", "mxfp4a16"]
