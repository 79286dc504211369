"""Further tiny models of transformers, most of them mixtures: by the names in their folders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

_TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FULL = {"layer_types": ["full_attention"] * 2}
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
    "deepstack_visual_indexes": [0],
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 32,
}
_GLM_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "image_size": 16,
}

# The class of the model, and its sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Stacks in folders of the float model, in either direction.
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {**_TEXT, "rope_parameters": _SECTIONS},
            "vision_config": _QWEN_VISION,
        },
    ),
    "qwen3_omni_moe_thinker": (
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        {
            "text_config": {**_TEXT, "rope_parameters": _SECTIONS},
            "vision_config": _QWEN_VISION,
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "num_mel_bins": 16,
                "output_dim": 64,
                "downsample_hidden_size": 16,
                "max_source_positions": 20,
            },
        },
    ),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                "moe_intermediate_size": [32, 32],
                "moe_num_experts": 4,
                "moe_k": 2,
                "rope_parameters": {**_SECTIONS, "mrope_section": [3, 3, 2]},
                **_SPARSE,
            },
            "vision_config": {**_GLM_VISION, "spatial_merge_size": 2},
        },
    ),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                **_ROUTED,
                "first_k_dense_replace": 1,
                "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 1.0},
            },
            "vision_config": _GLM_VISION,
        },
    ),
    "cohere2_moe": ("Cohere2MoeForCausalLM", {**_TEXT, **_FULL, **_SPARSE}),
    "exaone_moe": (
        "ExaoneMoeForCausalLM",
        {**_TEXT, **_FULL, **_SPARSE, "sliding_window": 16},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        {**_TEXT, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {**_TEXT, "moe_topk": [2, 2]}),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        {**_TEXT, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaForCausalLM",
        {
            **_TEXT,
            **_ROUTED,
            **_LATENT,
            **_SPARSE,
            "index_head_dim": 32,
            "index_n_heads": 2,
            "index_topk": 16,
            "indexer_types": ["full", "full"],
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **_TEXT,
            "num_local_experts": 4,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
            "layer_types": ["mamba", "attention"],
        },
    ),
    # Names of attention, routers and experts that are shared differ.
    "laguna": (
        "LagunaForCausalLM",
        {
            **_TEXT,
            **_FULL,
            **_SPARSE,
            "num_attention_heads_per_layer": [4, 4],
            "shared_expert_intermediate_size": 32,
        },
    ),
    "inkling": (
        "InklingForCausalLM",
        {
            **_TEXT,
            **_SPARSE,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "n_routed_experts": 4,
            "n_shared_experts": 2,
        },
    ),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        {
            **_TEXT,
            **_ROUTED,
            "q_lora_rank": 32,
            "o_lora_rank": 16,
            "o_groups": 2,
            "qk_rope_head_dim": 8,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "num_hash_layers": 1,
        },
    ),
    # No mixtures: the language model inside has another prefix.
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"text_config": {**_TEXT, "sliding_window": 16}, "vision_config": _VISION},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        },
    ),
    "phimoe": ("PhimoeForCausalLM", {**_TEXT, "num_local_experts": 4}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {**_TEXT, "num_local_experts": 4}),
}


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model with random weights, the same on every call."""
    transformers = pytest.importorskip("transformers")
    kind, sizes = MODELS[name]
    made = getattr(transformers, kind)
    torch.manual_seed(0)
    model = made._from_config(made.config_class(**sizes), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1)
    return model.eval()
