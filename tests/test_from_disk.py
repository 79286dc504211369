"""quantize_checkpoint: from one folder to another, a layer at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mixtures import build as mixture
from mixtures import ids
from small_models import TINY, assert_same_bits, language_model, tokens

import fp4pass
from fp4pass.checkpoint import finished
from fp4pass.errors import CheckpointError, OptionError
from fp4pass.quantization import search

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("offline")

BATCHES = tokens(3).split(1)


def in_memory(folder: Path, method: str = "hessian", layout: str = "compressed-tensors") -> Path:
    """The same by a model in memory."""
    model = fp4pass.prepare(language_model(), method, sequential=True)
    fp4pass.calibrate(model, BATCHES, progress=False)
    fp4pass.save(fp4pass.convert(model), folder, layout=layout)
    return folder


def quantized(folder: Path, method: str = "hessian", **options: Any) -> fp4pass.Report:
    options = {"data": BATCHES, "device": "cpu", "progress": False} | options
    return fp4pass.quantize_checkpoint(TINY, folder, method=method, **options)


@pytest.mark.slow
def test_a_folder_as_of_a_model_in_memory(tmp_path: Path) -> None:
    expected = fp4pass.load(in_memory(tmp_path / "whole"))
    report = quantized(tmp_path / "q")
    model = fp4pass.load(tmp_path / "q")
    assert_same_bits(model, expected)
    assert report == fp4pass.report(model) == fp4pass.report(expected)
    # With the tokenizer of the source, and nothing beside it.
    assert (tmp_path / "q" / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q", "whole"]


def test_options_are_those_of_convert(tmp_path: Path) -> None:
    options: dict[str, Any] = {"weight_only": True, "rules": [("*.down_proj", {"fmt": "mxfp4a16"})]}
    layers = tmp_path / "layers"
    quantized(
        tmp_path / "q", "sse", data=None, stream=layers, layout="compressed-tensors", **options
    )
    expected = fp4pass.convert(language_model(), method="sse", **options)
    assert_same_bits(fp4pass.load(tmp_path / "q"), expected)
    # A folder that is given stays, and what it holds was not written a second time.
    files = {path.stat().st_ino for path in layers.glob("*.safetensors")}
    shards = {path.stat().st_ino for path in (tmp_path / "q").glob("*.safetensors")}
    assert len(files) == 4 and len(shards) == 5 and files < shards


def test_what_is_wrong_comes_to_light_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp4pass.api.from_disk.load_float", lambda *a, **b: pytest.fail("read"))
    with pytest.raises(OptionError, match=r"weight_onyl.*weight_only"):
        quantized(tmp_path / "q", weight_onyl=True)
    with pytest.raises(OptionError, match="layout"):
        quantized(tmp_path / "q", layout="gguf")
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "notes").write_text("")
    with pytest.raises(CheckpointError, match="is not empty"):
        quantized(tmp_path / "q")


@pytest.mark.slow
def test_going_on_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, done = search._search, 0

    def interrupted(*args: Any) -> Any:
        nonlocal done
        done += 1
        if done == 17:
            raise KeyboardInterrupt
        return before(*args)

    monkeypatch.setattr(search, "_search", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantized(tmp_path / "q")
    # Two layers of seven linears are finished, and the folder is not there yet.
    assert not (tmp_path / "q").exists()
    quantized(tmp_path / "q")
    assert done == 17 + 14
    quantized(tmp_path / "again")
    files = {path.name: path.read_bytes() for path in (tmp_path / "q").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}


QUICK = ("qwen3_moe", "hessian", ())
DENSE_DOWN = (("*.down_proj", None),)


@pytest.mark.parametrize(
    ("kind", "method", "rules"),
    [
        QUICK,
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for kind in ("qwen3_moe", "mixtral")
            for method in ("sse", "hessian", "gptq")
            for rules in ((), DENSE_DOWN)
            if (case := (kind, method, rules)) != QUICK
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:transformers cannot load this folder")
@pytest.mark.filterwarnings("ignore:compressed-tensors has no place for stacks of experts")
def test_a_mixture_goes_on_after_an_interruption(
    kind: str, method: str, rules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of which a stack of the experts stays dense."""
    mixture(kind).save_pretrained(tmp_path / "m")
    data = [ids(1), ids(2)]

    def run(name: str) -> dict[str, bytes]:
        options: dict[str, Any] = {"data": data, "device": "cpu", "progress": False}
        options |= {"unreached": "sse", "rules": rules, "fmt": "mxfp4"}
        target = tmp_path / name
        fp4pass.quantize_checkpoint(
            tmp_path / "m", target, method=method, weight_only=method == "sse", **options
        )
        return {path.name: path.read_bytes() for path in target.iterdir()}

    def cut(folder: Any, name: str, *args: Any) -> None:
        if name.endswith(".1"):
            raise KeyboardInterrupt
        keep(folder, name, *args)

    expected, keep = run("whole"), finished.FinishedLayers.keep
    with monkeypatch.context() as patch:
        patch.setattr(finished.FinishedLayers, "keep", cut)
        with pytest.raises(KeyboardInterrupt):
            run("parts")
    assert [path.name for path in tmp_path.glob(".parts*/*.safetensors")] == [
        "model.layers.0.safetensors"
    ]
    assert run("parts") == expected
