"""Loading into models: names, ties, dtypes and devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import (
    Packed,
    Saved,
    assert_same_bits,
    converted,
    language_model,
    logits,
    mlp,
    packed_model,
)
from torch import nn

import fp4pass
from fp4pass.checkpoint.source_files import find_shards, read_tensors
from fp4pass.errors import CheckpointError, OptionError

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore:.*pkg_resources|.*treespec:FutureWarning")


def test_scales_of_no_declared_cache_are_left_out(foreign_copy: Saved, packed: Packed) -> None:
    folder = foreign_copy(layout="modelopt")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    save_file(tensors, folder / "model.safetensors")
    loaded = fp4pass.load(folder)
    assert torch.equal(logits(loaded), logits(packed()))


def test_a_loaded_model_has_memory_of_its_own(tmp_path: Path) -> None:
    """Whatever becomes of the file; and at addresses where kernels add up as they always do."""
    model = packed_model(mlp())
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q", model=mlp(seed=1))
    path = tmp_path / "q" / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert_same_bits(loaded, model)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded.state_dict().values())


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    fp4pass.save(packed_model(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))), tmp_path)
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read, .*ends within"):
        for _ in read_tensors(find_shards(tmp_path, path.name)):
            os.truncate(path, 8192)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("kind", ["IBert", "Camembert"])
def test_ties_of_all_kinds(tmp_path: Path, kind: str, ours: bool) -> None:
    """By patterns that match other tensors too; to a weight that the model lists later."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    few = {"vocab_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 32}
    config = getattr(transformers, f"{kind}Config")(**sizes, **few)
    model = getattr(transformers, f"{kind}ForMaskedLM")(config).bfloat16().eval()
    # The only plain linear layer of one of them is in its head.
    rules = [("lm_head.dense", {})]
    fp4pass.convert(model, "nvfp4", "naive", weight_only=True, rules=rules)
    fp4pass.save(model, tmp_path / "q")
    if not ours:
        (tmp_path / "q" / "fp4pass.json").unlink()
    loaded = fp4pass.load(tmp_path / "q")
    assert_same_bits(loaded, model)
    assert loaded.get_input_embeddings().weight is loaded.lm_head.decoder.weight


TEXT = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 2000,
}


VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def test_names_of_the_hub_become_those_of_the_model(tmp_path: Path) -> None:
    """As of Llava, whose checkpoints call model.language_model language_model.model."""
    torch.manual_seed(0)
    config = transformers.LlavaConfig(vision_config=VISION, text_config=TEXT, image_token_index=1)
    cls = transformers.LlavaForConditionalGeneration
    cls(config).bfloat16().save_pretrained(tmp_path / "dense")
    model = cls.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16).eval()
    fp4pass.convert(model, "nvfp4", "naive", weight_only=True)
    model.save_pretrained(tmp_path / "hub")
    fp4pass.save(model, tmp_path / "ours")
    names = set(load_file(tmp_path / "hub" / "model.safetensors"))
    assert "language_model.model.layers.0.mlp.up_proj.weight_packed" in names
    for folder in ("hub", "ours"):
        (tmp_path / folder / "fp4pass.json").unlink(missing_ok=True)
        loaded = fp4pass.load(tmp_path / folder)
        assert_same_bits(loaded, model)
        assert torch.equal(logits(loaded), logits(model))
        stock = cls.from_pretrained(tmp_path / folder, dtype=torch.bfloat16).eval()
        assert torch.equal(logits(stock), logits(model))


def masked_bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config).eval()


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=96, d_model=64, d_ff=128, num_layers=1, num_heads=4, d_kv=16,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore:transformers cannot load this folder")
@pytest.mark.parametrize(("make", "head"), [(masked_bert, "*decoder"), (t5, "lm_head")])
@pytest.mark.parametrize("how", ["compressed-tensors", "modelopt", "save_pretrained"])
def test_a_packed_head_beside_ties_that_stay(
    make: Any, head: str, how: str, tmp_path: Path
) -> None:
    """Nothing ties it again: neither `tie_weights` nor loading, into a new model or into one."""
    torch.manual_seed(0)
    model = fp4pass.convert(make(), method="sse", weight_only=True, rules=[(head, {})])
    ids = torch.arange(3, 21).view(2, 9)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if make is t5 else {})
    with torch.no_grad():
        expected = model(**inputs).logits
        model.tie_weights()
        assert torch.equal(model(**inputs).logits, expected)
        if how == "save_pretrained":
            model.save_pretrained(tmp_path / "out")
        else:
            fp4pass.save(model, tmp_path / "out", layout=how)
        for options in ({}, {"model": make()}):
            loaded = fp4pass.load(tmp_path / "out", **options)
            assert torch.equal(loaded(**inputs).logits, expected)
            loaded.tie_weights()
            assert torch.equal(loaded(**inputs).logits, expected)


def test_loading_into_a_prepared_model_takes_its_observers_out(tmp_path: Path) -> None:
    model = packed_model(mlp())
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q", model=fp4pass.prepare(mlp(seed=1)))
    assert not any(m._forward_pre_hooks for m in loaded.modules())
    x = torch.randn(3, 64)
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize(
    "device_map", ["cpu", torch.device("cpu"), "auto", {"": "cpu"}, {"": torch.device("cpu")}]
)
def test_device_maps(saved: Saved, packed: Packed, device_map: Any) -> None:
    loaded = fp4pass.load(saved(), device_map=device_map)
    assert {tensor.device.type for tensor in loaded.state_dict().values()} == {"cpu"}
    assert torch.equal(logits(loaded), logits(packed()))


def test_a_device_map_that_is_none(saved: Saved) -> None:
    with pytest.raises(OptionError, match="got gpu"):
        fp4pass.load(saved(), device_map="gpu")


def test_a_folder_without_our_facts_is_loaded_all_the_same(tmp_path: Path) -> None:
    """As after an upload that left fp4pass.json out."""
    for fmt, layout in (("mxfp4", "compressed-tensors"), ("nvfp4", "modelopt")):
        model = converted(fmt)
        fp4pass.save(model, tmp_path / fmt, layout=layout, max_shard_size="2MB")
        assert (tmp_path / fmt / "model.safetensors.index.json").is_file()
        (tmp_path / fmt / "fp4pass.json").unlink()
        loaded = fp4pass.load(tmp_path / fmt)
        assert_same_bits(model, loaded)
        left = fp4pass.report(loaded).skipped
        assert [row.name for row in left] == ["lm_head"]
        loaded.save_pretrained(tmp_path / f"{fmt}-again")
        assert torch.equal(logits(language_model(tmp_path / f"{fmt}-again")), logits(model))
