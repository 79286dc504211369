"""Tiny mixtures of experts of transformers, one of each layout of their weights."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp4pass.nn.experts import QUANTIZED, QuantizedExpertStack

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": 32,
    "mlp_ratio": 1.0,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
_FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
_SMALL = {"intermediate_size": 64, "moe_intermediate_size": 32}

# The class without Config or ForCausalLM, and its sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Five experts: no power of two.
    "qwen3_moe": ("Qwen3Moe", {**_SMALL, "num_experts": 5, "num_experts_per_tok": 2}),
    "mixtral": (
        "Mixtral",
        {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 3},
    ),
    "olmoe": ("Olmoe", {**_FOUR, "intermediate_size": 32}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_SMALL,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    # Transposed and interleaved, with biases and a gate of its own.
    "gpt_oss": (
        "GptOss",
        {
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
        },
    ),
    # Stacked on disk, under other names.
    "granitemoe": (
        "GraniteMoe",
        {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": ("Qwen2Moe", {**_FOUR, **_SMALL, "shared_expert_intermediate_size": 64}),
    # Without a gate.
    "nemotron_h": (
        "NemotronH",
        {
            **_SMALL,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_shared_expert_intermediate_size": 32,
            "layers_block_type": ["moe", "attention"],
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            **_SMALL,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # Transposed.
    "aria": (
        "AriaText",
        {
            "intermediate_size": 32,
            "moe_num_experts": 4,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
        },
    ),
    # Without the decorator, and with experts that give their input back.
    "longcat_flash": (
        "LongcatFlash",
        {
            "num_hidden_layers": 4,  # two attentions a layer
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 3,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    # Transposed, and called with a copy of all tokens for each expert.
    "llama4_text": (
        "Llama4",
        {
            "intermediate_size": 96,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
        },
    ),
    # Gate and up are apart, and experts lie below each other, those of the last one transposed.
    "dbrx": (
        "Dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "hidden_size": 64,
                "ffn_hidden_size": 32,
                "moe_num_experts": 4,
                "moe_top_k": 2,
            },
        },
    ),
    # One stack in a module, of attention too, called with the inputs sorted by experts.
    "jetmoe": (
        "JetMoe",
        {
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "kv_channels": 16,
        },
    ),
    # With a gate of its own that clamps, in a model that sees, too.
    "step3p7": (
        "Step3p7",
        {
            **_SMALL,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "share_expert_dim": 32,
            "mlp_layer_types": ["dense", "sparse"],
            "sliding_window": 16,
            "swiglu_limits": [0.0, 0.3],
        },
    ),
}

# Those whose class has no decorator.
UNDECORATED = ("longcat_flash", "step3p7", "llama4_text", "dbrx", "jetmoe")

# What text does not reach.
UNREAD: dict[str, list[Any]] = {
    "step3p7": [("model.vision_model.*", None), ("model.multi_modal_projector*", None)]
}


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with random weights, the same on every call."""
    transformers = pytest.importorskip("transformers")
    kind, sizes = MODELS[name]
    text = "TextConfig" if name in ("gemma4", "llama4_text") else "Config"
    common = {"vocab_size": 96, "pad_token_id": 0} if name == "dbrx" else _SIZES
    options = {**common, **sizes, **changes}
    task = "CausalLM"
    if name == "step3p7":
        options, task = {"text_config": options, "vision_config": _VISION}, "ConditionalGeneration"
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
