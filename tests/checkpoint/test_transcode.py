"""From one layout to another, and to dense weights, without a changed bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import (
    TINY,
    Packed,
    Saved,
    assert_same_bits,
    converted,
    language_model,
    linears,
    logits,
)
from torch import Tensor, nn

import fp4pass
from fp4pass.checkpoint import transcode
from fp4pass.errors import OptionError

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore:.*pkg_resources|.*treespec:FutureWarning")


@pytest.mark.parametrize("weight_only", [True, False])
def test_there_and_back_are_the_same_bytes(saved: Saved, tmp_path: Path, weight_only: bool) -> None:
    (tmp_path / "c").symlink_to(saved("nvfp4", weight_only))
    transcode(tmp_path / "c", tmp_path / "m", "modelopt")
    transcode(tmp_path / "m", tmp_path / "c2", "compressed-tensors")
    transcode(tmp_path / "c2", tmp_path / "m2", "modelopt")
    for a, b in (("c", "c2"), ("m", "m2")):
        names = sorted(path.name for path in (tmp_path / a).iterdir())
        assert names == sorted(path.name for path in (tmp_path / b).iterdir())
        for name in names:
            assert (tmp_path / a / name).read_bytes() == (tmp_path / b / name).read_bytes(), name
    assert_same_bits(fp4pass.load(tmp_path / "m"), fp4pass.load(tmp_path / "c"))


@pytest.mark.parametrize("source", ["compressed-tensors", "modelopt"])
def test_dense_weights_run_without_any_library(
    saved: Saved, packed: Packed, tmp_path: Path, source: str
) -> None:
    transcode(saved(layout=source), tmp_path / "dense", "bf16", max_shard_size="1MB")
    assert len(list((tmp_path / "dense").glob("model-*-of-*.safetensors"))) > 3
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in config
    stock = language_model(tmp_path / "dense")
    assert not linears(stock)
    assert torch.equal(logits(stock), logits(packed()))


def test_what_lies_beside_comes_along(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = "{{ messages }}"
    fp4pass.save(converted(), tmp_path / "q", tokenizer=tokenizer, max_shard_size="1MB")
    for to in ("modelopt", "bf16"):
        transcode(tmp_path / "q", tmp_path / to, to)
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / to)
        assert again.chat_template == tokenizer.chat_template
        assert again("one two").input_ids == tokenizer("one two").input_ids
        assert (tmp_path / to / "generation_config.json").is_file()
        assert not list((tmp_path / to).glob("*.index.json"))
    with pytest.raises(OptionError, match="save_pretrained"):
        fp4pass.save(converted(), tmp_path / "r", tokenizer="tokenizer")


def test_shared_weights_have_every_name_in_every_layout(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model = fp4pass.prepare(Twice(), "naive")
    model(torch.randn(3, 64))
    fp4pass.convert(model, "nvfp4", "naive", weight_only=False)
    fp4pass.save(model, tmp_path / "m", layout="modelopt")
    names = set(load_file(tmp_path / "m" / "model.safetensors"))
    assert {"a.weight", "b.weight", "b.weight_scale_2"} <= names
    transcode(tmp_path / "m", tmp_path / "c", "compressed-tensors")
    for folder in ("m", "c"):
        loaded = fp4pass.load(tmp_path / folder, model=Twice())
        assert loaded.a is loaded.b
        assert_same_bits(loaded, model)
    transcode(tmp_path / "c", tmp_path / "dense", "bf16")
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    assert torch.equal(dense["b.weight"], model.a.weight.bfloat16())
    assert set(dense) == {"a.weight", "a.bias", "b.weight"}


@pytest.mark.parametrize(
    ("source", "pattern", "target", "wanted"),
    [
        ("modelopt", "*lm_head*", "compressed-tensors", r"re:.*lm_head.*$"),
        ("compressed-tensors", r"re:model\.(embed|other)_tokens", "modelopt", "model.embed_tokens"),
    ],
)
def test_what_stays_dense_is_said_in_the_words_of_the_layout(
    foreign_copy: Saved, source: str, pattern: str, target: str, wanted: str
) -> None:
    """A glob is no pattern, and each reader would take the dense layers for packed ones."""
    folder = foreign_copy(layout=source)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = [pattern]
    (folder / "config.json").write_text(json.dumps(config))
    transcode(folder, folder.parent / "r", target)
    written = json.loads((folder.parent / "r" / "config.json").read_text())
    assert wanted in written["quantization_config"]["ignore"]
    assert pattern == wanted or pattern not in written["quantization_config"]["ignore"]


def test_scales_of_a_cache_that_is_not_read_are_left_out_with_a_warning(
    foreign_copy: Saved, tmp_path: Path
) -> None:
    """As ModelOpt writes them, beside projections."""
    folder = foreign_copy("nvfp4", True, "modelopt")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    save_file(tensors, folder / "model.safetensors")
    with pytest.warns(UserWarning, match=r"1 scales of a quantized .*k_proj.k_scale"):
        transcode(folder, tmp_path / "dense", "bf16")
    assert not any("scale" in name for name in load_file(tmp_path / "dense" / "model.safetensors"))
