"""Read the stacked experts of a mixture, expert by expert."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from ..core.quant_state import QuantState
from ..linear import PACKED, SCALE
from .opening import open_checkpoint


def read_experts(directory: str | os.PathLike[str]) -> Iterator[tuple[str, tuple[QuantState, ...]]]:
    """Yield the packed experts of a folder, such as gpt-oss, without a changed bit.

    Args:
        directory: the folder.

    Yields:
        The name of a parameter, such as model.layers.0.mlp.experts.gate_up_proj, and the state of
        each expert [N, K]; gate and up are every other row of gate_up_proj.

    Raises:
        CheckpointError: the folder is damaged or has no stacked experts.

    Example:
        >>> for name, experts in fp4pass.checkpoint.read_experts("gpt-oss-20b"):  # doctest: +SKIP
        ...     print(name, len(experts), experts[0].shape)
    """
    reader = open_checkpoint(directory)
    for name, layer in reader.layers.items():
        if layer.is_stacked:
            parts, shape = reader.parts(name), (layer.shape[1], layer.shape[2])
            packed, scale = parts[PACKED], parts[SCALE]
            assert packed is not None and scale is not None, "open_checkpoint requires both"
            states = [
                QuantState(codes, bits, 1.0, layer.fmt, shape, torch.bfloat16)
                for codes, bits in zip(packed, scale, strict=True)
            ]
            yield name, tuple(states)
