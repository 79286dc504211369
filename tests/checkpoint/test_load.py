"""Folders without our facts: damaged, of other methods, and under the names of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import (
    TINY,
    assert_same_bits,
    change,
    converted,
    language_model,
    logits,
    tokens,
)
from torch import Tensor

import fp4pass
from fp4pass.checkpoint.transcode import transcode
from fp4pass.errors import CheckpointError, OptionError

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")


def nan_scale(scale: Tensor) -> Tensor:
    scale.view(torch.uint8)[3, 1] = 0x7F
    return scale


def negative_scale(scale: Tensor) -> Tensor:
    scale.view(torch.uint8)[3, 1] |= 0x80
    return scale


LAYER = "model.layers.1.mlp.down_proj"
DAMAGE = {
    "a NaN scale": (f"{LAYER}.weight_scale", nan_scale, "holds NaN or a negative scale"),
    "a negative scale": (f"{LAYER}.weight_scale", negative_scale, "holds NaN or a negative"),
    "no scale": (f"{LAYER}.weight_scale", lambda t: None, "no weight_scale beside it"),
    "no global scale": (f"{LAYER}.weight_global_scale", lambda t: None, "has no .*global_scale"),
    "no input scale": (f"{LAYER}.input_global_scale", lambda t: None, "input_global_scale is miss"),
    "zero": (f"{LAYER}.weight_global_scale", torch.zeros_like, "a positive finite number"),
    "infinity": (f"{LAYER}.input_global_scale", lambda t: t / 0, "a positive finite number"),
    "a negative divisor": (f"{LAYER}.weight_global_scale", torch.neg, "a positive finite number"),
    "larger blocks": (f"{LAYER}.weight_scale", lambda t: t[:, ::2].clone(), "blocks of 16, as the"),
    "a shape": (f"{LAYER}.weight_scale", lambda t: t[:-1].clone(), r"\[256, 48\] is wanted"),
    "a dtype": (f"{LAYER}.weight_global_scale", lambda t: t.half(), "F32"),
    "a norm": ("model.norm.weight", lambda t: None, "lacks .*model.norm.weight"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_does_not_fit_is_an_error_that_names_it(tmp_path: Path, what: str) -> None:
    name, edit, message = DAMAGE[what]
    fp4pass.save(converted(weight_only=False), tmp_path / "q")
    (tmp_path / "q" / "fp4pass.json").unlink()
    change(tmp_path / "q", name, edit)
    with pytest.raises(CheckpointError, match=message):
        fp4pass.load(tmp_path / "q")


def test_other_methods_are_named(tmp_path: Path) -> None:
    fp4pass.save(converted(), tmp_path / "q")
    (tmp_path / "q" / "fp4pass.json").unlink()
    path = tmp_path / "q" / "config.json"
    config = json.loads(path.read_text())

    def declare(**facts: Any) -> None:
        path.write_text(json.dumps(config | {"quantization_config": facts}))

    declare(quant_method="gptq")
    with pytest.raises(CheckpointError, match="quant_method is 'gptq'"):
        fp4pass.load(tmp_path / "q")
    facts = config["quantization_config"]
    group = facts["config_groups"]["group_0"]
    declare(**facts | {"config_groups": {"g": group | {"format": "pack-quantized"}}})
    with pytest.raises(CheckpointError, match="its format is 'pack-quantized'"):
        fp4pass.load(tmp_path / "q")
    declare(**facts | {"config_groups": {"g": group | {"targets": ["re:.*q_proj"]}}})
    with pytest.raises(CheckpointError, match="no config_groups"):
        fp4pass.load(tmp_path / "q")
    eight_bits = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": 16}
    declare(**facts | {"config_groups": {"g": group | {"input_activations": eight_bits}}})
    with pytest.raises(CheckpointError, match=r"inputs are quantized by .*'num_bits': 8"):
        fp4pass.load(tmp_path / "q")
    declare(**facts | {"config_groups": {"g": group | {"weights": eight_bits}}})
    with pytest.raises(CheckpointError, match="symmetric floats of 4 bits"):
        fp4pass.load(tmp_path / "q")
    rotated = {"targets": ["Linear"], "location": "input"}
    declare(**facts | {"transform_config": {"config_groups": {"u": {"apply": [rotated]}}}})
    with pytest.raises(CheckpointError, match="'u' is applied to the input"):
        fp4pass.load(tmp_path / "q")
    # What is applied to weights lies in the files.
    rotated["location"] = "weight_input"
    declare(**facts | {"transform_config": {"config_groups": {"u": {"apply": [rotated]}}}})
    fp4pass.load(tmp_path / "q")
    with pytest.raises(CheckpointError, match="not quantized"):
        fp4pass.load(TINY)
    with pytest.raises(OptionError, match="bf16"):
        transcode(tmp_path / "q", tmp_path / "r", "gguf")
    with pytest.raises(CheckpointError, match="not empty"):
        fp4pass.save(converted(), tmp_path / "s")
        transcode(tmp_path / "s", tmp_path / "q", "bf16")


def test_blocks_are_those_that_modelopt_declares(tmp_path: Path) -> None:
    fp4pass.save(converted(), tmp_path / "q", layout="modelopt")
    (tmp_path / "q" / "fp4pass.json").unlink()
    change(tmp_path / "q", f"{LAYER}.weight_scale", lambda t: t[:, ::2].clone())
    with pytest.raises(CheckpointError, match="blocks of 16, as the config says"):
        fp4pass.load(tmp_path / "q")


def test_what_is_dense_gets_the_dtype_of_the_config(tmp_path: Path) -> None:
    """As in stock transformers; without our facts the config is all that is known."""
    model = fp4pass.convert(language_model().float(), "nvfp4", "naive", weight_only=True)
    fp4pass.save(model, tmp_path / "q")
    (tmp_path / "q" / "fp4pass.json").unlink()
    loaded = fp4pass.load(tmp_path / "q")
    assert loaded.model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(language_model(tmp_path / "q")))


def test_scales_of_the_cache_are_said_to_be_unused(tmp_path: Path) -> None:
    model = converted()
    fp4pass.save(model, tmp_path / "q", layout="modelopt")
    (tmp_path / "q" / "fp4pass.json").unlink()
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    save_file(tensors, tmp_path / "q" / "model.safetensors")
    with pytest.warns(UserWarning, match="1 scales of a quantized key-value cache"):
        loaded = fp4pass.load(tmp_path / "q")
    assert torch.equal(logits(loaded), logits(model))


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


def test_dense_experts_are_ignored_by_a_pattern(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **{key: value for key, value in TEXT.items() if key != "model_type"},
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path / "dense")
    model = language_model(tmp_path / "dense")
    fp4pass.convert(model, "nvfp4", "naive", weight_only=True)
    fp4pass.save(model, tmp_path / "q")
    facts = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    experts = r"re:model\.layers\.0\.mlp\.experts.*"
    assert facts["ignore"] == [experts, "model.layers.0.mlp.gate", "lm_head"]
    assert torch.equal(logits(language_model(tmp_path / "q")), logits(model))
    assert_same_bits(fp4pass.load(tmp_path / "q"), model)
    with pytest.raises(CheckpointError, match=r"experts one by one.*fp4pass\.save"):
        model.save_pretrained(tmp_path / "refused")


@pytest.mark.parametrize("weight_only", [True, False])
@pytest.mark.parametrize(
    ("fmt", "layout"),
    [("nvfp4", "compressed-tensors"), ("nvfp4", "modelopt"), ("mxfp4", "compressed-tensors")],
)
def test_stock_transformers_gives_the_logits_of_a_llama(
    tmp_path: Path, fmt: str, weight_only: bool, layout: str
) -> None:
    """Untied, with biases, calibrated; by way of either layout."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{key: value for key, value in TEXT.items() if key != "model_type"},
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "dense")
    model = language_model(tmp_path / "dense")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    fp4pass.prepare(model)
    fp4pass.calibrate(model, [tokens()], progress=False)
    fp4pass.convert(model, fmt, weight_only=weight_only)
    fp4pass.save(model, tmp_path / "q", layout=layout)
    if layout == "modelopt":
        transcode(tmp_path / "q", tmp_path / "c", "compressed-tensors")
        (tmp_path / "q").rename(tmp_path / "m")
        (tmp_path / "c").rename(tmp_path / "q")
    assert torch.equal(logits(language_model(tmp_path / "q")), logits(model))
    assert torch.equal(logits(fp4pass.load(tmp_path / "q")), logits(model))


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
