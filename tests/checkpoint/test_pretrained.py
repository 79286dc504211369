"""save_pretrained of converted models, and configs that models share."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import (
    assert_same_bits,
    language_model,
    packed_model,
    tokens,
)

import fp4pass
from fp4pass.errors import CheckpointError


def test_models_of_one_config_do_not_reach_each_other(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    a, b = (transformers.Qwen3ForCausalLM(config).eval() for _ in range(2))
    packed_model(a, rules=[("lm_head", {})])
    assert a.config is a.model.config is not config and b.config is config
    assert config.tie_word_embeddings and not hasattr(config, "quantization_config")
    b.save_pretrained(tmp_path / "b")
    assert_same_bits(b, language_model(tmp_path / "b", dtype=torch.float32))
    fp4pass.save(a, tmp_path / "a")
    assert_same_bits(a, fp4pass.load(tmp_path / "a"))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_save_pretrained_writes_what_stock_transformers_loads(tmp_path: Path, fmt: str) -> None:
    pytest.importorskip("compressed_tensors")
    model = copy.deepcopy(packed_model(language_model(), fmt=fmt))
    assert json.loads(model.config.to_json_string())["quantization_config"]["ignore"] == ["lm_head"]
    model.save_pretrained(tmp_path / "q")
    fp4pass.save(model, tmp_path / "own")
    again = fp4pass.load(tmp_path / "own")
    again.save_pretrained(tmp_path / "again")
    ids = tokens()
    with torch.no_grad():
        for folder in ("q", "again"):
            assert torch.equal(language_model(tmp_path / folder)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("options", [{"block": 32}, {"weight_only": False}], ids=str)
def test_save_pretrained_refuses_what_has_no_layout(tmp_path: Path, options: Any) -> None:
    model = pickle.loads(pickle.dumps(packed_model(language_model(), **options)))
    with pytest.raises(CheckpointError, match=r"fp4pass\.save"):
        model.save_pretrained(tmp_path / "q")
    assert not (tmp_path / "q").exists()
