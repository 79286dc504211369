"""Tiny transformers of diffusers with random weights, and what a sampler passes to each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor

Made = tuple[Any, dict[str, Any]]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def flux() -> Made:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        axes_dims_rope=[8, 12, 12],
        guidance_embeds=True,
    )
    return model, {
        "hidden_states": random(1, 16, 16),
        "encoder_hidden_states": random(1, 8, 64),
        "pooled_projections": random(1, 32),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }


def qwen_image() -> Made:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=64,
        axes_dims_rope=(8, 12, 12),
    )
    return model, {
        "hidden_states": random(1, 16, 16),
        "encoder_hidden_states": random(1, 8, 64),
        "encoder_hidden_states_mask": torch.ones(1, 8, dtype=torch.long),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 4, 4)]],
    }


def sd3() -> Made:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=64,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
    )
    return model, {
        "hidden_states": random(1, 4, 8, 8),
        "encoder_hidden_states": random(1, 8, 64),
        "pooled_projections": random(1, 32),
        "timestep": torch.tensor([500]),
    }


def wan() -> Made:
    """A video; its class keeps some layers in float32."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=64,
        freq_dim=32,
        ffn_dim=128,
        num_layers=1,
        rope_max_seq_len=32,
    )
    return model, {
        "hidden_states": random(1, 4, 2, 8, 8),
        "encoder_hidden_states": random(1, 8, 64),
        "timestep": torch.tensor([500]),
    }


def ltx() -> Made:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=32,
        cross_attention_dim=64,
        num_layers=1,
        caption_channels=64,
    )
    return model, {
        "hidden_states": random(1, 32, 16),
        "encoder_hidden_states": random(1, 8, 64),
        "encoder_attention_mask": torch.ones(1, 8, dtype=torch.long),
        "timestep": torch.tensor([500]),
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }


def unet() -> Made:
    """Convolutions, and linear layers between them."""
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64,
    )
    return model, {
        "sample": random(1, 4, 8, 8),
        "encoder_hidden_states": random(1, 8, 64),
        "timestep": torch.tensor([5]),
    }


def hidream() -> Made:
    """A mixture of experts."""
    model = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        caption_channels=[64, 64],
        text_emb_dim=64,
        axes_dims_rope=(16, 8, 8),
        max_resolution=(8, 8),
        llama_layers=(0, 1),
    )
    return model, {
        "hidden_states": random(1, 4, 8, 8),
        "encoder_hidden_states_t5": random(1, 8, 64),
        "encoder_hidden_states_llama3": random(2, 1, 8, 64),
        "pooled_embeds": random(1, 64),
        "timesteps": torch.tensor([5]),
    }


MODELS: dict[str, Callable[[], Made]] = {
    each.__name__: each for each in (flux, qwen_image, sd3, wan, ltx, unet, hidream)
}


def make(name: str, dtype: torch.dtype = torch.float32) -> Made:
    """The model, its weights always the same, and a call of it in a dtype."""
    torch.manual_seed(0)
    model, call = MODELS[name]()

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return model.eval(), {key: cast(value) for key, value in call.items()}


def run(model: Any, call: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**call, return_dict=False)[0]
