"""Dense weights keep the dtype that they have, whatever config.json says for others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp4pass
from fp4pass.checkpoint import open_checkpoint

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}


@pytest.mark.filterwarnings("ignore:The folder has no tokenizer")
@pytest.mark.parametrize("scheme", ["nvfp4a16", "fp8"])
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_nothing_is_rounded_in_silence(
    dtype: torch.dtype,
    layout: str,
    scheme: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    fp4pass.convert(model, scheme, "naive", progress=False)
    with caplog.at_level("INFO", "fp4pass"):
        fp4pass.save(model, tmp_path / "q", layout=layout)
    said = [line for line in caplog.messages if "config.json says bfloat16, in which" in line]
    assert len(said) == (dtype != torch.bfloat16)
    (tmp_path / "q" / "fp4pass.json").unlink()
    # Weights in FP8 are computed in the dtype of the model.
    assert open_checkpoint(tmp_path / "q").dtype == str(dtype).removeprefix("torch.")
    loaded = fp4pass.load(tmp_path / "q")
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    weight = "model.layers.0.mlp.up_proj"
    assert torch.equal(loaded.get_submodule(weight).weight, model.get_submodule(weight).weight)
    # Of several dtypes that of most is taken, and that is said.
    file = tmp_path / "q" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.rand(128).float()
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = tensors[name].bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="rounded to the dtype of the model .*model.norm.weight"):
        loaded = fp4pass.load(tmp_path / "q")
    assert loaded.dtype == torch.bfloat16
