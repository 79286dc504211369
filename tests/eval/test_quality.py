"""The scripts that measure quality, on little text: right numbers, and none measured twice."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from eval.rows import every_row, read, rows_by_key, run
from small_models import TINY, language_model

import fp4pass
from fp4pass.evaluation import output_errors, token_windows

for package in ("transformers", "scipy"):
    pytest.importorskip(package)

SMALL = ("--samples", 4, "--window", 64, "--windows", 6, "--error-windows", 2, "--formats", "nvfp4")


@pytest.fixture(scope="module")
def scripts(script: Any) -> Any:
    """The scripts of eval/, by their names."""
    return {name: script(f"quality.{name}") for name in ("measuring", "models")}


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of the bundled model."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models") / "shallow"
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    language_model(**one).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def measured(
    scripts: Any, methods: Any, shallow: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("quality") / "shallow.json"
    options = ("--model", shallow, *SMALL, "--methods", ",".join(methods))
    run(scripts["models"], *options, "--json", path)
    return path


@pytest.mark.slow
def test_every_block_method_and_kind_of_inputs(methods: Any, measured: Path) -> None:
    result = read(measured)
    assert set(rows_by_key(result)) == every_row(["nvfp4"], methods)
    assert result["model"] == "shallow" and result["calibration"]["tokens"] == 4 * 64
    assert result["texts"]["eval"]["windows"] == 6 and result["texts"]["eval"]["unit"] == "document"
    # What only this machine knows is not kept.
    assert str(measured.parent) not in measured.read_text("utf-8")


@pytest.mark.slow
def test_numbers_are_those_of_the_library(shallow: Path, measured: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, tokenizer = language_model(shallow), transformers.AutoTokenizer.from_pretrained(TINY)
    text = (TINY / "eval.txt").read_text("utf-8")
    calib = (TINY / "calib.txt").read_text("utf-8")
    prepared = fp4pass.prepare(copy.deepcopy(model), "hessian")
    calibration = token_windows(tokenizer, calib, window=64, windows=4)
    fp4pass.calibrate(prepared, calibration.split(8), progress=False)
    options: Any = {"window": 64, "windows": 6, "progress": False}
    found = {}
    for method in ("naive", "hessian"):
        converted = fp4pass.convert(copy.deepcopy(prepared), "nvfp4", method)
        found[method] = fp4pass.evaluate(converted, tokenizer, text, model, **options)
    batches = token_windows(tokenizer, text, window=64, windows=2).split(8)
    errors = output_errors(converted, model, batches, activations=True, progress=False)

    row = rows_by_key(read(measured))["nvfp4", 16, False, "hessian"]
    here = row["texts"]["eval"]
    for name in ("perplexity", "bits_per_byte", "kl", "top1"):
        value = (getattr(found["hessian"], name), *found["hessian"].intervals[name])
        kept = (here[name]["value"], here[name]["low"], here[name]["high"])
        assert kept == pytest.approx(value, rel=1e-5), name
    difference = found["hessian"].difference(found["naive"]).kl
    assert difference is not None
    kept = dict(here["against"]["naive"]["kl"])
    # Of one document there is no verdict.
    assert kept.pop("significant") is difference.significant
    for name, value in kept.items():
        assert value == pytest.approx(getattr(difference, name), rel=1e-5), name
    assert row["bits"] == 4.5
    assert row["layer_error"] == pytest.approx(sum(errors.values()) / len(errors), rel=1e-5)
    assert row["layer_error"] > row["output_error"] > 0


def test_no_document_is_in_both_texts(scripts: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    shared = (TINY / "calib.txt").read_text("utf-8").split("\n<|doc|>\n")[3]
    text.write_text(f"Another document.\n<|doc|>\n{shared}\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"1 of its documents are in .*calib\.txt too"):
        run(scripts["models"], *SMALL, "--text", text)


def test_methods_that_a_block_has_no_statistics_for_are_left_out(scripts: Any) -> None:
    measuring = scripts["measuring"]
    assert measuring.able(["naive", "hessian", "gptq"], 32) == ["naive", "hessian", "gptq"]
    assert measuring.able(["naive", "hessian", "gptq"], 64) == ["naive", "gptq"]
    results = measuring.Results(None, {})
    results.rows = [
        {"format": "int8", "block": block, "weight_only": only, "method": "naive"}
        for block in (64, 128, 256)
        for only in (True, False)
    ]
    groups = measuring.unmeasured(results, torch.nn.Linear(256, 1), ["int8"], ["naive", "hessian"])
    assert groups == [("int8", 32, True), ("int8", 32, False)]
