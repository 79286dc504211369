"""Tiny mixtures of experts of transformers, one of each layout of their weights."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp4pass.nn.experts import QUANTIZED, QuantizedExpertStack

_SIZES = dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
_SIZES |= dict(num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0)
_VISION = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28)
_SMALL = dict(intermediate_size=64, moe_intermediate_size=32)
_FOUR = dict(num_experts=4, num_experts_per_tok=2)
_LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
_ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2)
_LATENT = dict(num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32)
_LATENT |= dict(qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
_TWO_KINDS = ["sliding_attention", "full_attention"]


# The class without Config or ForCausalLM, and its sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Five experts: no power of two.
    "qwen3_moe": ("Qwen3Moe", dict(_SMALL, num_experts=5, num_experts_per_tok=2)),
    "mixtral": ("Mixtral", dict(_LOCAL, intermediate_size=64, num_experts_per_tok=3)),
    "olmoe": ("Olmoe", dict(_FOUR, intermediate_size=32)),
    "deepseek_v3": (
        "DeepseekV3",
        dict(_SMALL, **_ROUTED, **_LATENT, n_group=2, topk_group=1, first_k_dense_replace=1),
    ),
    # Transposed and interleaved, with biases and a gate of its own.
    "gpt_oss": ("GptOss", dict(_LOCAL, intermediate_size=64, sliding_window=16)),
    # Stacked on disk, under other names.
    "granitemoe": ("GraniteMoe", dict(_LOCAL, intermediate_size=64)),
    "qwen2_moe": ("Qwen2Moe", dict(_FOUR, **_SMALL, shared_expert_intermediate_size=64)),
    # Without a gate.
    "nemotron_h": (
        "NemotronH",
        dict(
            **_SMALL,
            **_ROUTED,
            moe_shared_expert_intermediate_size=32,
            layers_block_type=["moe", "attention"],
        ),
    ),
    "gemma4": (
        "Gemma4",
        dict(
            **_SMALL,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            global_head_dim=16,
            hidden_size_per_layer_input=0,
            layer_types=_TWO_KINDS,
        ),
    ),
    # Transposed.
    "aria": (
        "AriaText",
        dict(intermediate_size=32, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    ),
    # Without the decorator, and with experts that give their input back; two attentions a layer.
    "longcat_flash": (
        "LongcatFlash",
        dict(
            **_LATENT,
            num_hidden_layers=4,
            n_routed_experts=4,
            zero_expert_num=2,
            moe_topk=3,
            ffn_hidden_size=64,
            expert_ffn_hidden_size=32,
        ),
    ),
    # Transposed, and called with a copy of all tokens for each expert.
    "llama4_text": (
        "Llama4",
        dict(_LOCAL, intermediate_size=96, intermediate_size_mlp=64, num_experts_per_tok=1),
    ),
    # With a gate of its own that clamps, in a model that sees, too.
    "step3p7": (
        "Step3p7",
        dict(
            **_SMALL,
            **_ROUTED,
            share_expert_dim=32,
            mlp_layer_types=["dense", "sparse"],
            sliding_window=16,
            swiglu_limits=[0.0, 0.3],
        ),
    ),
}

# Those whose class has no decorator.
UNDECORATED = ("longcat_flash", "step3p7", "llama4_text")

# What text does not reach.
UNREAD: dict[str, list[Any]] = {
    "step3p7": [("model.vision_model.*", None), ("model.multi_modal_projector*", None)]
}


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with random weights, the same on every call."""
    transformers = pytest.importorskip("transformers")
    kind, sizes = MODELS[name]
    text = "TextConfig" if name in ("gemma4", "llama4_text") else "Config"
    options = {**_SIZES, **sizes, **changes}
    task = "CausalLM"
    if name == "step3p7":
        options, task = (
            {"text_config": options, "vision_config": dict(_VISION, mlp_ratio=1.0)},
            "ConditionalGeneration",
        )
    config = getattr(transformers, kind + text)(**options)
    torch.manual_seed(0)
    # `.to(dtype)` would cast rotary tables, too.
    made = getattr(transformers, f"{kind}For{task}")
    if hasattr(sys.modules[made.__module__], "AriaGroupedExpertsGemm"):
        pytest.skip(f"transformers {transformers.__version__} has no stacks of Aria's experts")
    model = made._from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 3:
                parameter.normal_(std=0.1)
            elif parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter) * 0.03)
    return model.eval()


def ids(seed: int = 0, batch: int = 2, length: int = 40) -> Tensor:
    return torch.randint(1, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, x: Tensor | None = None) -> Tensor:
    return model(ids() if x is None else x).logits


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by their names: those of stacks are hidden behind their parameters."""
    return dict(model.named_modules())


@torch.no_grad()
def twin(original: Any, converted: nn.Module) -> Any:
    """The original, computed expert by expert, with the dequantized weights, in place."""
    original.set_experts_implementation("eager")
    for name, module in converted.named_modules():
        if isinstance(module, QUANTIZED):
            is_stack = isinstance(module, QuantizedExpertStack)
            original.get_parameter(name if is_stack else f"{name}.weight").copy_(module.weight)
    return original


# ---- further models, by the names in their folders ----------------------------------------------

_TEXT = dict(_SIZES, **_SMALL, **_FOUR, bos_token_id=1, eos_token_id=2)
_FULL = {"layer_types": ["full_attention"] * 2}
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_GROUPS = dict(n_routed_experts=4, n_group=1, topk_group=1, n_shared_experts=1)
_ROPE = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3])
_DEEP = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64)
_DEEP |= dict(patch_size=4)
_QWEN_VISION = dict(_DEEP, num_position_embeddings=16, deepstack_visual_indexes=[0])
_GLM_VISION = dict(_DEEP, image_size=16)
_CLIP = dict(_VISION, intermediate_size=64, patch_size=14, projection_dim=32)
_MAMBA = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1)
_ERNIE_TEXT = dict(_TEXT, moe_intermediate_size=[32, 32], moe_num_experts=4, moe_k=2, **_SPARSE)
_ERNIE_TEXT["rope_parameters"] = dict(_ROPE, mrope_section=[3, 3, 2])
_SEEING = "ForConditionalGeneration"

# The class of the model, and its sizes.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    # Stacks in folders of the float model, in either direction.
    "qwen3_vl_moe": (
        f"Qwen3VLMoe{_SEEING}",
        dict(text_config=dict(_TEXT, rope_parameters=_ROPE), vision_config=_QWEN_VISION),
    ),
    "ernie4_5_vl_moe": (
        f"Ernie4_5_VLMoe{_SEEING}",
        dict(text_config=_ERNIE_TEXT, vision_config=dict(_GLM_VISION, spatial_merge_size=2)),
    ),
    "exaone_moe": ("ExaoneMoeForCausalLM", dict(_TEXT, **_FULL, **_SPARSE, sliding_window=16)),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        dict(
            **_TEXT,
            **_MAMBA,
            mamba_chunk_size=16,
            num_local_experts=4,
            shared_intermediate_size=64,
            layer_types=["mamba", "attention"],
        ),
    ),
    # Names of attention, routers and experts that are shared differ.
    "inkling": (
        "InklingForCausalLM",
        {**_TEXT, **_SPARSE, "layer_types": ["hybrid_sliding", "hybrid"]}
        | {"n_routed_experts": 4, "n_shared_experts": 2},
    ),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        {**_TEXT, **_GROUPS, "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2}
        | {"qk_rope_head_dim": 8, "index_head_dim": 16, "index_n_heads": 2, "num_hash_layers": 1},
    ),
    # No mixtures: the language model inside has another prefix.
    "gemma3": (
        f"Gemma3{_SEEING}",
        dict(text_config=dict(_TEXT, sliding_window=16), vision_config=_CLIP),
    ),
    "llava": (
        f"Llava{_SEEING}",
        dict(
            text_config=dict(_TEXT, model_type="llama"),
            vision_config=dict(_CLIP, model_type="clip_vision_model"),
        ),
    ),
}


def build_more(name: str) -> Any:
    """A model in bfloat16 with random weights, the same on every call."""
    transformers = pytest.importorskip("transformers")
    kind, sizes = MORE[name]
    made = getattr(transformers, kind)
    torch.manual_seed(0)
    model = made._from_config(made.config_class(**sizes), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1)
    return model.eval()
