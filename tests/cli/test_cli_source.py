"""fp4pass quantize of a folder that holds more than its class: tensors and files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import PLAIN, run
from safetensors.torch import load_file, save_file
from small_models import TINY

import fp4pass
from fp4pass.checkpoint.reader import open_checkpoint

transformers = pytest.importorskip("transformers")
for package in ("typer", "rich", "yaml"):
    pytest.importorskip(package)

pytestmark = pytest.mark.usefixtures("offline")

SPARE = {"mtp.fc.weight": torch.randn(64, 128), "mtp.norm.weight": torch.ones(64)}


def source(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=128, num_attention_heads=2, **sizes)
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **SPARE}, file, metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "LICENSE").write_text("free")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_text("other weights")
    return folder


@pytest.mark.parametrize("options", [(), ("--stream",)], ids=["memory", "stream"])
def test_all_of_a_source_is_in_the_output_or_named(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    folder, target = source(tmp_path / "m"), tmp_path / "q"
    result = run("quantize", folder, "-o", target, *PLAIN, *options)
    assert f"{folder}: not copied: onnx/ (--copy-files" in result.stderr
    assert "mtp.fc.weight, mtp.norm.weight: LlamaForSequenceClassification" in result.stdout
    assert "score: a head that LlamaForSequenceClassification adds" in result.stdout
    for name in ("tokenizer.json", "tokenizer_config.json", "1_Pooling/config.json", "LICENSE"):
        assert (target / name).read_bytes() == (folder / name).read_bytes()
    assert "| method | " in (target / "README.md").read_text()
    stored = open_checkpoint(target)
    tensors = dict(stored.tensors([*SPARE, "score.weight"]))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in SPARE.items())
    declared = json.loads((target / "config.json").read_text())["quantization_config"]
    assert set(declared["ignore"]) == {"score", "mtp.fc"}
    before = load_file(folder / "model.safetensors")
    packed = {f"{name}.weight" for name in stored.layers}
    assert before.keys() == packed | set(stored.plain())
    run("verify", target, "--reference", folder)
    assert isinstance(fp4pass.load(target).score.weight, torch.nn.Parameter)


def test_globs_of_more_files_are_an_option_of_what_writes_folders(tmp_path: Path) -> None:
    folder, more = source(tmp_path / "m"), ("--copy-files", "onnx/*")
    for name, options in {"q": (), "r": ("--stream",)}.items():
        run("quantize", folder, "-o", tmp_path / name, *PLAIN, *options, *more)
        assert (tmp_path / name / "onnx" / "model.onnx").read_text() == "other weights"
    run("transcode", tmp_path / "q", "-o", tmp_path / "s", "--to", "bf16", *more)
    assert (tmp_path / "s" / "onnx" / "model.onnx").read_text() == "other weights"
    wrong = ("-o", tmp_path / "t", *PLAIN, "--copy-files", "*.png")
    result = run("quantize", folder, *wrong, code=2)
    assert f"--copy-files: expected a glob of files in {folder}, got '*.png'" in result.stderr
    assert not (tmp_path / "t").exists()


def test_a_card_takes_the_place_of_that_of_the_model_unless_it_is_left_out(tmp_path: Path) -> None:
    run("quantize", TINY, "-o", tmp_path / "q", *PLAIN)
    card = (tmp_path / "q/README.md").read_text()
    assert "`tiny_lm` in 4-bit floating point. fp4pass packed 28 of 29 weights." in card
    run("quantize", TINY, "-o", tmp_path / "r", *PLAIN, "--no-card")
    assert (tmp_path / "r/README.md").read_bytes() == (TINY / "README.md").read_bytes()


def test_a_model_is_not_begun_that_nobody_may_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    options = ("-o", tmp_path / "q", *PLAIN, "--push-to-hub", "me/tiny")
    result = run("quantize", TINY, *options, code=2)
    assert "there is no token of Hugging Face here. Run `hf auth login`" in result.stderr
    assert not any(tmp_path.iterdir())
