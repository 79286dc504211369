"""save_pretrained of converted models, and configs that models share."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import assert_same_bits, language_model, packed_model, tokens

import fp4pass
import fp4pass.parity
from fp4pass.errors import CheckpointError, StateError


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


def whole_of_a_converted_part(road: str, folder: Path) -> Any:
    model = language_model()
    if road == "a part":
        packed_model(model.model)
    elif road == "swapped":
        fp4pass.parity.swap(model)
    else:
        peft = pytest.importorskip("peft")
        packed_model(model.model)
        config = peft.LoraConfig(r=2, target_modules="all-linear")
        adapted = peft.get_peft_model(model, config)
        adapted.save_pretrained(folder / "adapters")
        assert (folder / "adapters" / "adapter_model.safetensors").exists()
        return adapted.get_base_model()
    return model


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize("road", ["a part", "swapped", "adapters"])
def test_save_pretrained_of_the_whole_refuses_a_converted_part(tmp_path: Path, road: str) -> None:
    model = whole_of_a_converted_part(road, tmp_path)
    with pytest.raises(
        StateError, match=r"A part of the model is converted \(model.layers.*rules="
    ):
        model.save_pretrained(tmp_path / "q")
    assert not list(tmp_path.glob("q/*.safetensors"))
    # What else is in the process saves as it does, and so does the part by itself.
    language_model().save_pretrained(tmp_path / "float")
    assert len(model.state_dict()) > 0
    if road == "a part":
        model.model.save_pretrained(tmp_path / "part")
        with pytest.raises(RuntimeError, match="weight_packed"):
            language_model().load_state_dict(model.state_dict())
