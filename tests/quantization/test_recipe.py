"""Recipes as files: what is read is what convert gets, and an error says where it is."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp4pass
from fp4pass.errors import OptionError, RuleError
from fp4pass.methods import METHODS
from fp4pass.quantization.recipe import Recipe
from fp4pass.record.config import LinearConfig
from fp4pass.record.state import get_state

pytest.importorskip("yaml")

FULL = """
fmt: nvfp4
method: {name: sse}
weight_only: true
block: 16
rules:
  - "*.up_proj": {fmt: mxfp4a16, method: {name: naive}}
  - "0.*": null
"""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(64, 64)
        self.down_proj = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.up_proj(x))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Mlp(), Mlp())


def written(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_is_the_arguments_of_convert(tmp_path: Path) -> None:
    recipe = Recipe.read(written(tmp_path, FULL))
    assert (recipe.config.fmt, recipe.config.method) == ("nvfp4", fp4pass.Sse())
    assert recipe.config.weight_only is True and recipe.config.block == 16
    assert recipe.rules == (
        ("*.up_proj", {"fmt": "mxfp4", "method": fp4pass.Naive(), "weight_only": True}),
        ("0.*", None),
    )
    rows = fp4pass.report(fp4pass.convert(model(), **recipe.arguments())).rows
    assert [row.config and (row.config.fmt, row.config.method_name) for row in rows] == [
        ("mxfp4", "naive"),
        None,
        ("mxfp4", "naive"),
        ("nvfp4", "sse"),
    ]


def test_what_is_left_out_is_the_default_of_convert(tmp_path: Path) -> None:
    assert Recipe.read(written(tmp_path, "{}")) == Recipe()
    assert Recipe().arguments() == {
        "fmt": "nvfp4",
        "method": fp4pass.Hessian(),
        "weight_only": True,
        "block": 16,
        "inputs": None,
        "activation_scales": "naive",
        "input_range": "amax",
        "rotation": 0,
        "unreached": "error",
        "expert_prior": None,
        "compute": "input",
        "rules": (),
    }
    rules = Recipe.read(written(tmp_path, "- 'a.*': null\n- ['b', {fmt: mxfp4}]"))
    assert rules == Recipe(rules=(("a.*", None), ("b", {"fmt": "mxfp4"})))


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe.yml", "recipe.json"])
def test_plain_values_and_back(tmp_path: Path, name: str) -> None:
    recipe = Recipe.read(written(tmp_path, FULL))
    data = recipe.to_dict()
    assert Recipe.from_dict(data) == recipe
    # JSON is YAML, too.
    assert Recipe.read(written(tmp_path, json.dumps(data), name)) == recipe
    wrapped = json.dumps({"recipe": data, "versions": {}})
    assert Recipe.read(written(tmp_path, wrapped, name)) == recipe


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_with_its_options(method: str) -> None:
    options = METHODS[method].options()
    for choice in (method, options):
        recipe = Recipe(LinearConfig(method=choice))
        assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    given = {"name": method, **dataclasses.asdict(options)}
    assert Recipe.from_dict({"method": given}).config.method == options


@pytest.mark.core
def test_what_a_model_was_converted_with_is_a_recipe() -> None:
    """As fp4pass.json has it."""
    rules = [("*.up_proj", {"fmt": "mxfp4a16", "method": fp4pass.Naive()}), ("0.*", None)]
    first = fp4pass.convert(model(), method="sse", weight_only=True, rules=rules)
    record = get_state(first)
    assert record is not None
    recipe = Recipe.from_dict(json.loads(json.dumps(record.recipe)))
    assert recipe == Recipe(LinearConfig(method="sse", weight_only=True), tuple(rules))
    again = fp4pass.convert(model(), **recipe.arguments())
    assert fp4pass.report(again) == fp4pass.report(first)
    calibrated = {**record.recipe, "calibration": {"sha256": "", "batches": 1, "tokens": 2}}
    assert Recipe.from_dict(calibrated) == recipe


def test_the_configs_that_layers_can_have() -> None:
    rules: Any = (("a", {"fmt": "mxfp4"}), ("b", None), ("*", {"method": "sse"}), ("c", {}))
    found = [(c.fmt, c.method_name) for c in Recipe(rules=rules).configs()]
    assert found == [("mxfp4", "hessian"), ("nvfp4", "sse")]
    found = [(c.fmt, c.method_name) for c in Recipe(rules=rules[:2]).configs()]
    assert found == [("mxfp4", "hessian"), ("nvfp4", "hessian")]


BAD = [
    ("", "expected a mapping with fmt, .* or a list of rules, got nothing"),
    ("just words", "got 'just words'"),
    ("fmt: nvfp4\nfmtt: mxfp4", "yaml: the key 'fmtt' does not exist. Did you mean 'fmt'"),
    ("fmt: nvfp5", "fmt: Scheme 'nvfp5' does not exist. Did you mean 'nvfp4'"),
    ("fmt: 4", "fmt: Scheme 4 does not exist"),
    ("\nmethod: hesian", "Method 'hesian' .* Did you mean 'hessian'"),
    ("method: {nam: sse}", "method: expected a name"),
    ("method: {name: see}", r"Method 'see' does not exist. Did you mean 'sse'"),
    ("method: {name: sse, damp: 1}", r"Method 'sse': the option 'damp' does not exist"),
    ("weight_only: 1", "weight_only: expected True or False, got 1"),
    ("fmt: mxfp4\nblock: 64", r"block: Format 'mxfp4' has no block of 64"),
    ("block: many", r"block: Format 'nvfp4' has no block of 'many'"),
    ("rules: all", "rules: expected a list of rules, got 'all'"),
    ("rules:\n - a: {}\n - b", r"rules: a rule: expected .*, got b"),
    ("rules:\n - {a: null, b: null}", r"rules: a rule: expected"),
    ("rules:\n - 3: null", r"rules: a rule: expected .* got \(3, None\)"),
    ("rules:\n - a: mxfp4", r"The rule for 'a': expected .* got 'mxfp4'"),
    (
        "rules:\n - a:\n    fmt: mxfp4\n    methd: sse",
        r"rule for 'a', option 'methd' does not exist. Did you mean 'method'",
    ),
    ("rules:\n - a: {fmt: fp4}", r"rule for 'a': fmt: Scheme 'fp4' does not"),
    ("- a: {block: 5}", r"rule for 'a': block: .* no block of 5"),
    ("- a: {rules: []}", r"rule for 'a', option 'rules' does not exist"),
    ("- *.down_proj: null", "line 1: this is not YAML: .* Put names that begin with . in quotes"),
    ("fmt: [", "line 1: this is not YAML"),
    ("fmt: a\nfmt: b", "line 2: the key 'fmt' is there twice"),
    ("recipe:\n  fmtt: a", r"yaml: the key 'fmtt'"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[text for text, _ in BAD])
@pytest.mark.core
def test_an_error_says_where_and_what(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(OptionError, match=message) as error:
        Recipe.read(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_json_has_no_lines_but_keys(tmp_path: Path) -> None:
    path = written(tmp_path, '{"rules": [["a", {"fmtt": 1}]]}', "r.json")
    with pytest.raises(OptionError, match=r"r\.json: In the rule for 'a', option 'fmtt'"):
        Recipe.read(path)
    with pytest.raises(OptionError, match=r"r\.json is not JSON: .*line 1"):
        Recipe.read(written(tmp_path, "{", "r.json"))


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="cannot be read as a recipe: No such file"):
        Recipe.read(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="it is not text"):
        Recipe.read(tmp_path / "binary.yaml")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(OptionError, match=r"PyYAML: pip install 'fp4pass\[cli\]'"):
        Recipe.read(written(tmp_path, FULL))
    assert Recipe.read(written(tmp_path, "{}", "r.json")) == Recipe()


@pytest.mark.core
def test_a_recipe_made_in_python_is_checked_when_it_is_made() -> None:
    for options in ({"fmt": "fp9"}, {"method": 3}, {"block": 7}):
        with pytest.raises(OptionError):
            LinearConfig(**options)
    with pytest.raises(RuleError):
        Recipe(rules=[("a",)])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="In the rule for 'a': fmt: Scheme 'fp9'"):
        Recipe(rules=(("a", {"fmt": "fp9"}),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().rules = ()  # type: ignore[misc]


def test_the_recipe_of_the_page_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    text = page.split("```yaml\n")[1].split("```")[0]
    recipe = Recipe.read(written(tmp_path, text))
    assert recipe.config.method == fp4pass.Hessian() and recipe.config.scheme == "nvfp4a16"
    down = {"fmt": "mxfp4", "weight_only": True}
    assert recipe.rules == (("*.down_proj", down), ("model.layers.0.*", None))
    with pytest.raises(OptionError) as error:
        Recipe.read(written(tmp_path, text.replace("{fmt:", "{fmtt:")))
    shown = str(error.value).replace(f"{tmp_path}/", "")
    assert shown.partition(" Known")[0] in " ".join(page.split())
