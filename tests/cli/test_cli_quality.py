"""fp4pass quantize by a quality, and without text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CALIBRATED, run, run_json
from small_models import TINY, assert_same_bits, language_model, tokens

import fp4pass
from fp4pass.methods import Naive
from fp4pass.record.quality import QUALITIES, Quality

for package in ("transformers", "typer", "rich", "yaml"):
    pytest.importorskip(package)

pytestmark = pytest.mark.usefixtures("offline")

# Two layers are enough.
RULES = {f"model.layers.{i}.*": None for i in (2, 3)}


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps([{glob: skip} for glob, skip in RULES.items()]))
    return path


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What models write."""
    windows = tokens(4)
    monkeypatch.setattr("fp4pass.calibration.sample", lambda *args, **options: windows)
    return windows


def test_a_quality_is_printed_recorded_and_shown(
    tmp_path: Path, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, smoothed = tmp_path / "q", []

    @contextmanager
    def note(root: Any, strength: float, batches: list[Any]) -> Iterator[list[Any]]:
        smoothed.append((strength, len(batches)))
        yield []

    # Tracing takes longer than all else.
    monkeypatch.setattr("fp4pass.engine.smoothing.smoothed_unless_it_fails", note)
    options = ("--scheme", "nvfp4", "--quality", "good", "--rules", rules, *CALIBRATED)
    result = run("quantize", TINY, "-o", out, *options)
    assert 'quality "good": a few seconds (4 layers, 256 tokens; estimated' in result.stderr
    recipe = run_json("inspect", out)["recipe"]
    assert recipe["quality"] == "good" and recipe["method"]["name"] == "hessian"
    assert smoothed == [(0.5, 1)]
    assert "recipe:\n  quality: good\n" in run("inspect", out).stdout
    run("report", out, "-o", tmp_path / "r.html")
    assert json.loads((tmp_path / "r.json").read_text())["recipe"]["quality"] == "good"
    assert "&#34;quality&#34;: &#34;good&#34;" in (tmp_path / "r.html").read_text()


def test_a_folder_of_a_quality_that_changed_since_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("quantize", TINY, "-o", tmp_path / "q", "--quality", "fast", "--weight-only")
    monkeypatch.setitem(QUALITIES, "fast", Quality({"method": Naive()}))
    recipe = run_json("inspect", tmp_path / "q")["recipe"]
    assert (recipe["quality"], recipe["method"]) == ("fast", {"name": "sse"})
    # To do it again, somebody has to say what is meant.
    own = tmp_path / "q" / "fp4pass.json"
    result = run("quantize", TINY, "-o", tmp_path / "again", "--rules", own, code=2)
    assert "method: quality 'fast' stands for" in result.stderr and "Leave out" in result.stderr


@pytest.mark.slow
def test_best_runs_one_layer_after_the_other(
    tmp_path: Path, rules: Path, written: torch.Tensor
) -> None:
    options = ("--scheme", "nvfp4", "--quality", "best", "--rules", rules)
    run("quantize", TINY, "-o", tmp_path / "q", *options)
    expected = fp4pass.convert(
        language_model(),
        "nvfp4",
        quality="best",
        data=written,
        rules=list(RULES.items()),
        progress=False,
    )
    assert_same_bits(fp4pass.load(tmp_path / "q"), expected)
    recipe = json.loads((tmp_path / "q" / "fp4pass.json").read_text())["recipe"]
    assert recipe["smooth"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--stream",)], ids=["memory", "stream"])
def test_without_text_the_model_writes_its_own(
    tmp_path: Path, rules: Path, written: torch.Tensor, more: tuple[str, ...]
) -> None:
    result = run("quantize", TINY, "-o", tmp_path / "q", "--rules", rules, *more)
    assert 'method "hessian": ' in result.stderr and "tokens of its own text" in result.stderr
    expected = fp4pass.convert(
        language_model(),
        data=written,
        rules=list(RULES.items()),
        progress=False,
        **({"stream": tmp_path / "layers"} if more else {}),
    )
    assert_same_bits(fp4pass.load(tmp_path / "q"), expected)


@pytest.mark.quick(6)
@pytest.mark.parametrize("more", [(), ("--stream",)], ids=["memory", "stream"])
def test_numbers_of_windows_hold_for_text_that_the_model_writes(
    tmp_path: Path, rules: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the same codes as in Python, also where a CPU runs a model in float32."""
    monkeypatch.setattr("fp4pass.quantization.observers.batches.cpu_has_bfloat16", lambda: False)
    given = ("--samples", 3, "--seq-len", 20, "--seed", 5, *more)
    run("quantize", TINY, "-o", tmp_path / "q", "--rules", rules, *given)
    found = fp4pass.load(tmp_path / "q")
    assert {row.tokens for row in fp4pass.report(found).converted} == {60}
    transformers = pytest.importorskip("transformers")
    reader = transformers.AutoTokenizer.from_pretrained(TINY)
    model = language_model()
    numbers = {"samples": 3, "seq_len": 20, "seed": 5}
    with fp4pass.evaluation.fast_dtype(*([] if more else [model])):
        text = fp4pass.calibration.batches(None, reader, model=model, **numbers)
    assert [each.shape for each in text] == [(3, 20)]
    stream = {"stream": tmp_path / "layers"} if more else {}
    fp4pass.convert(model, data=text, rules=list(RULES.items()), progress=False, **stream)
    assert_same_bits(found, model)


@pytest.mark.parametrize(
    ("recipe", "options", "match"),
    [
        (None, ("--method", "sse"), "--quality best decides --method. Leave out one of them."),
        ({"method": "gptq"}, (), "method: quality 'best' stands for"),
        ({"quality": "good"}, (), "quality: 'good', and --quality best is given"),
        (None, ("--device", "auto"), "--quality best runs layers on one device"),
    ],
    ids=["option", "recipe", "two", "device"],
)
def test_contradictions_are_refused_before_the_model_is_read(
    tmp_path: Path, recipe: Any, options: tuple[str, ...], match: str
) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe))
    given = (*(("--rules", path) if recipe else ()), *options)
    result = run("quantize", "nowhere", "-o", tmp_path / "q", "--quality", "best", *given, code=2)
    assert match in result.stderr and not (tmp_path / "q").exists()
