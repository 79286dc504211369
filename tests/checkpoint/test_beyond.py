"""Tensors of the source that a model has no place for are in the checkpoint, or in the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fp4pass
import fp4pass.integrations.transformers
from fp4pass.checkpoint import transcode
from fp4pass.checkpoint.reader import open_checkpoint

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32},
    "pad_token_id": 0,
}

# Multi-token prediction, in modules of its own and in a layer behind the last.
SPARE = {
    "mtp.fc.weight": torch.randn(32, 64).bfloat16(),
    "mtp.norm.weight": torch.ones(32),
    "model.layers.2.eh_proj.weight": torch.randn(32, 64),
}
# What earlier versions stored, and the class computes.
TABLES = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
COPIED = "LlamaForCausalLM has no place for it: copied as it is"
NOT_COPIED = "LlamaForCausalLM has no place for it: not copied"


def source(folder: Path, more: Mapping[str, Tensor], **options: Any) -> Path:
    """The folder of a float model, with further tensors in it."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **options)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    return folder


def converted(folder: Path, kind: Any = None, **options: Any) -> Any:
    kind = kind or transformers.LlamaForCausalLM
    model = kind.from_pretrained(folder, **options)
    return fp4pass.convert(model, method="sse", weight_only=True)


def reasons(model: Any) -> dict[str, str]:
    return {row.name: row.skip_reason for row in fp4pass.report(model).skipped}


def held(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in open_checkpoint(folder).tensors()}


def assert_carried(folder: Path) -> None:
    tensors = held(folder)
    for name, tensor in SPARE.items():
        assert torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype
    assert not TABLES.keys() & tensors.keys()


def test_what_the_class_does_not_make_is_copied_and_what_it_computes_is_named(
    tmp_path: Path,
) -> None:
    model = converted(source(tmp_path / "m", {**SPARE, **TABLES}))
    told = reasons(model)
    assert {told[name] for name in SPARE} == {COPIED}
    assert {told[name] for name in TABLES} == {NOT_COPIED}
    fp4pass.save(model, tmp_path / "q")
    assert_carried(tmp_path / "q")
    declared = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert set(declared["ignore"]) == {"lm_head", "mtp.fc", "model.layers.2.eh_proj"}


@pytest.mark.filterwarnings("ignore:.*are rounded to the dtype that config.json")
def test_copied_tensors_go_through_load_save_and_transcode(tmp_path: Path) -> None:
    model = converted(source(tmp_path / "m", {**SPARE, **TABLES}))
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q")
    assert reasons(loaded) == reasons(model)
    ids = torch.arange(8)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    fp4pass.save(loaded, tmp_path / "again")
    assert_carried(tmp_path / "again")
    transcode(tmp_path / "q", tmp_path / "modelopt", "modelopt")
    assert_carried(tmp_path / "modelopt")
    # Without fp4pass.json the class says what it ignores.
    (tmp_path / "modelopt" / "fp4pass.json").unlink()
    with pytest.raises(fp4pass.errors.CheckpointError, match=r"another architecture.*mtp\.fc"):
        fp4pass.load(tmp_path / "modelopt")
    transcode(tmp_path / "q", tmp_path / "dense", "bf16")
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    assert torch.equal(dense["mtp.fc.weight"], SPARE["mtp.fc.weight"])


@pytest.mark.filterwarnings("ignore:.*are rounded to the dtype that config.json")
def test_ignored_tensors_of_another_library_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored = [r"^mtp\.", r"layers\.2\.", r"inv_freq"]
    kind = transformers.LlamaForCausalLM
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", ignored)
    fp4pass.save(converted(source(tmp_path / "m", SPARE)), tmp_path / "q")
    (tmp_path / "q" / "fp4pass.json").unlink()
    loaded = fp4pass.load(tmp_path / "q")
    assert {reasons(loaded)[name] for name in SPARE} == {COPIED}
    fp4pass.save(loaded, tmp_path / "again")
    assert_carried(tmp_path / "again")


def test_a_class_that_was_chosen_on_purpose_names_what_is_not_its_own(tmp_path: Path) -> None:
    folder = source(tmp_path / "m", SPARE)
    model = converted(folder, transformers.LlamaModel)
    told = reasons(model)
    missing = {*SPARE, "lm_head.weight"}
    assert {told[name] for name in missing} == {"LlamaModel has no place for it: not copied"}
    fp4pass.save(model, tmp_path / "q")
    assert not missing & held(tmp_path / "q").keys()
    declared = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert not declared["ignore"]


def test_layers_that_were_removed_are_not_copied(tmp_path: Path) -> None:
    folder = source(tmp_path / "m", SPARE)
    model = converted(folder, num_hidden_layers=1)
    told = reasons(model)
    assert told["model.layers.1.mlp.up_proj.weight"] == NOT_COPIED
    assert {told[name] for name in SPARE} == {COPIED}


def test_a_source_in_pickles_is_read(tmp_path: Path) -> None:
    folder = source(tmp_path / "m", SPARE)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    fp4pass.save(converted(folder), tmp_path / "q")
    assert_carried(tmp_path / "q")


def test_a_source_that_is_gone_stops_save_before_it_writes(tmp_path: Path) -> None:
    folder = source(tmp_path / "m", SPARE)
    model = converted(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(fp4pass.errors.CheckpointError, match=r"model\.safetensors cannot be read"):
        fp4pass.save(model, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_a_model_that_is_quantized_while_it_is_loaded_carries_them_too(tmp_path: Path) -> None:
    folder = source(tmp_path / "m", SPARE)
    config = fp4pass.integrations.transformers.Fp4PassConfig()
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config)
    assert {reasons(model)[name] for name in SPARE} == {COPIED}
    fp4pass.save(model, tmp_path / "q")
    assert_carried(tmp_path / "q")
