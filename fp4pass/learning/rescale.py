"""Search the block scales of a student again, for what its latents stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..distributed import is_sharded
from ..linear import SCALE
from .latent import search_again
from .student import student_layers


@torch.no_grad()
def rescale(student: nn.Module) -> None:
    """Search the scales of all layers of a student again, and express its latents in them.

    Exactly, by squared errors. Of several processes each searches whole layers.
    """
    known: dict[int, Any] = {}
    for _, layer in student_layers(student):
        own: Any = layer.latent
        if id(own) in known:
            layer.share_scales(known[id(own)])
            continue
        known[id(own)] = layer
        whole = own.full_tensor() if is_sharded(own) else own
        scale = search_again(whole, layer.stored_scales, layer.config.format)
        layer._buffers[SCALE] = scale.view(layer.config.format.scale.storage)
        if whole is not own:
            from torch.distributed.tensor import distribute_tensor

            parts: Any = distribute_tensor(whole, own.device_mesh, own.placements)
            own.to_local().copy_(parts.to_local())
