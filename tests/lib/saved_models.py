"""Tiny models of transformers that readers differ on, converted and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fp4pass
from fp4pass.nn.linear import QuantizedLinear

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2}
HEADS = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
CANNOT = "transformers cannot load this folder by itself"


def mamba() -> Any:
    return transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES, state_size=16))


def funnel() -> Any:
    sizes = {"d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 96, "block_sizes": [1, 1]}
    return transformers.FunnelForMaskedLM(transformers.FunnelConfig(vocab_size=160, **sizes))


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, **HEADS, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def llama4() -> Any:
    sizes = {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 96}
    config = transformers.Llama4TextConfig(**SIZES, **HEADS, **sizes, pad_token_id=0)
    return transformers.Llama4ForCausalLM(config)


def falcon() -> Any:
    return transformers.FalconForCausalLM(transformers.FalconConfig(**SIZES, num_attention_heads=4))


def t5() -> Any:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=160, **sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def deepseek() -> Any:
    """A mixture whose layers beside the experts have other names on disk."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 64}
    sizes |= {"num_experts_per_tok": 2, "n_routed_experts": 4, "o_groups": 2, "o_lora_rank": 64}
    sizes |= {"index_n_heads": 4, "index_head_dim": 32, "max_position_embeddings": 64}
    config = transformers.DeepseekV4Config(vocab_size=160, **sizes, pad_token_id=0)
    return transformers.DeepseekV4ForCausalLM(config)


DENSE_EXPERTS = [("*.experts.*", None)]


def packed(
    model: Any, folder: Path, rules: Any = (), layout: str = "compressed-tensors", **options: Any
) -> tuple[dict[str, Any], list[str]]:
    """Convert and save a model; return what config.json declares, and the names that are packed."""
    torch.manual_seed(0)
    options = {"method": "sse", "weight_only": True, **options}
    fp4pass.convert(model.bfloat16().eval(), rules=rules, **options)
    fp4pass.save(model, folder, layout=layout)
    names = [name for name, each in model.named_modules() if isinstance(each, QuantizedLinear)]
    config = json.loads((folder / "config.json").read_text())
    return config["quantization_config"], names
