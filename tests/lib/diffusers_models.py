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


def of(kind: str, sizes: dict[str, Any], **call: Any) -> Callable[[], Made]:
    """A class of diffusers with sizes, and its call; tuples of whole numbers are random tensors."""

    def made() -> Made:
        given = {key: random(*e) if isinstance(e, tuple) else e for key, e in call.items()}
        return getattr(diffusers, kind)(**sizes), given

    return made


_HEADS = dict(num_attention_heads=2, attention_head_dim=32)
_WIDE = dict(_HEADS, joint_attention_dim=64)
_FLUX = dict(_WIDE, patch_size=1, in_channels=16, num_layers=1, num_single_layers=1)
_FLUX |= dict(pooled_projection_dim=32, axes_dims_rope=[8, 12, 12], guidance_embeds=True)
_QWEN = dict(_WIDE, patch_size=2, in_channels=16, out_channels=4, num_layers=1)
_LATENT = dict(patch_size=2, in_channels=4, out_channels=4)
_SD3 = dict(_WIDE, **_LATENT, sample_size=8, num_layers=2, caption_projection_dim=64)
_SD3 |= dict(pooled_projection_dim=32, pos_embed_max_size=8)
_WAN = dict(_HEADS, in_channels=4, out_channels=4, text_dim=64, freq_dim=32, ffn_dim=128)
_WAN |= dict(patch_size=(1, 2, 2), num_layers=1, rope_max_seq_len=32)
_LTX = dict(_HEADS, in_channels=16, out_channels=16, cross_attention_dim=64, num_layers=1)
_UNET = dict(sample_size=8, block_out_channels=(32, 64), layers_per_block=1)
_UNET |= dict(down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"))
_UNET |= dict(up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=64)
_HIDREAM = dict(_HEADS, **_LATENT, num_layers=1, num_single_layers=1, caption_channels=[64, 64])
_HIDREAM |= dict(text_emb_dim=64, axes_dims_rope=(16, 8, 8), max_resolution=(8, 8))
_TEXT = dict(encoder_hidden_states=(1, 8, 64))
_HALF = dict(timestep=torch.tensor([0.5]))
_FULL = dict(timestep=torch.tensor([500]))
_MASK = torch.ones(1, 8, dtype=torch.long)
_PLACES = dict(img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(8, 3))

MODELS: dict[str, Callable[[], Made]] = {
    "flux": of(
        "FluxTransformer2DModel",
        _FLUX,
        hidden_states=(1, 16, 16),
        **_TEXT,
        pooled_projections=(1, 32),
        **_HALF,
        guidance=torch.tensor([3.5]),
        **_PLACES,
    ),
    "qwen_image": of(
        "QwenImageTransformer2DModel",
        dict(_QWEN, axes_dims_rope=(8, 12, 12)),
        hidden_states=(1, 16, 16),
        **_TEXT,
        encoder_hidden_states_mask=_MASK,
        **_HALF,
        img_shapes=[[(1, 4, 4)]],
    ),
    "sd3": of(
        "SD3Transformer2DModel",
        _SD3,
        hidden_states=(1, 4, 8, 8),
        **_TEXT,
        pooled_projections=(1, 32),
        **_FULL,
    ),
    # A video; its class keeps some layers in float32.
    "wan": of("WanTransformer3DModel", _WAN, hidden_states=(1, 4, 2, 8, 8), **_TEXT, **_FULL),
    "ltx": of(
        "LTXVideoTransformer3DModel",
        dict(_LTX, caption_channels=64),
        hidden_states=(1, 32, 16),
        **_TEXT,
        encoder_attention_mask=_MASK,
        **_FULL,
        num_frames=2,
        height=4,
        width=4,
    ),
    # Convolutions, and linear layers between them.
    "unet": of(
        "UNet2DConditionModel", _UNET, sample=(1, 4, 8, 8), **_TEXT, timestep=torch.tensor([5])
    ),
    # A mixture of experts.
    "hidream": of(
        "HiDreamImageTransformer2DModel",
        dict(_HIDREAM, llama_layers=(0, 1)),
        hidden_states=(1, 4, 8, 8),
        encoder_hidden_states_t5=(1, 8, 64),
        encoder_hidden_states_llama3=(2, 1, 8, 64),
        pooled_embeds=(1, 64),
        timesteps=torch.tensor([5]),
    ),
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
