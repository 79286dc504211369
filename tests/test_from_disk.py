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

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("offline")

BATCHES = tokens(3).split(1)


def quantized(folder: Path, method: str = "hessian", **options: Any) -> fp4pass.Report:
    options = {"data": BATCHES, "device": "cpu", "progress": False} | options
    return fp4pass.quantize_checkpoint(TINY, folder, method=method, **options)


def test_options_are_those_of_convert(tmp_path: Path) -> None:
    options: dict[str, Any] = {"weight_only": True, "rules": [("*.down_proj", {"fmt": "mxfp4a16"})]}
    layers = tmp_path / "layers"
    quantized(
        tmp_path / "q", "sse", data=None, stream=layers, layout="compressed-tensors", **options
    )
    expected = fp4pass.convert(language_model(), method="sse", **options)
    assert_same_bits(fp4pass.load(tmp_path / "q"), expected)
    # A folder that is given stays.
    assert len(list(layers.glob("*.safetensors"))) == 4


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


def test_a_folder_as_of_a_model_in_memory(tmp_path: Path) -> None:
    model = fp4pass.prepare(language_model(), "hessian", sequential=True)
    fp4pass.save(
        fp4pass.convert(fp4pass.calibrate(model, BATCHES, progress=False)), tmp_path / "whole"
    )
    report = quantized(tmp_path / "q")
    found, expected = (fp4pass.load(tmp_path / name) for name in ("q", "whole"))
    assert_same_bits(found, expected)
    assert report == fp4pass.report(found) == fp4pass.report(expected)
    # With the tokenizer of the source, and nothing beside it.
    assert (tmp_path / "q" / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q", "whole"]


@pytest.mark.parametrize(
    ("kind", "method", "rules"),
    [
        ("qwen3_moe", "hessian", ()),
        pytest.param("mixtral", "gptq", (("*.down_proj", None),), marks=pytest.mark.slow),
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
