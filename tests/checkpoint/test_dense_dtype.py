"""Dense weights are rounded to the dtype that config.json says for others with a word only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fp4pass

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}


@pytest.mark.filterwarnings("ignore:The folder has no tokenizer")
@pytest.mark.parametrize("scheme", ["nvfp4a16", "fp8"])
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_nothing_is_rounded_in_silence(
    dtype: torch.dtype, layout: str, scheme: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    fp4pass.convert(model, scheme, "naive", progress=False)
    fp4pass.save(model, tmp_path / "q", layout=layout)
    assert_equal(model, fp4pass.load(tmp_path / "q"))
    # Without our facts it is the dtype of the config, as in stock transformers.
    (tmp_path / "q" / "fp4pass.json").unlink()
    if dtype == torch.bfloat16:
        assert_equal(model, fp4pass.load(tmp_path / "q"))
        return
    with pytest.warns(UserWarning, match="rounded to the dtype that config.json says .*embed_tok"):
        loaded = fp4pass.load(tmp_path / "q")
    assert loaded.dtype == torch.bfloat16
    own = transformers.LlamaForCausalLM(config).to(dtype)
    assert_equal(model, fp4pass.load(tmp_path / "q", model=own))
    # What changes no number needs no word.
    rounded = transformers.LlamaForCausalLM(config).bfloat16().to(dtype)
    fp4pass.save(fp4pass.convert(rounded, scheme, "naive", progress=False), tmp_path / "r")
    (tmp_path / "r" / "fp4pass.json").unlink()
    fp4pass.load(tmp_path / "r")


def assert_equal(model: Any, loaded: Any) -> None:
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name
