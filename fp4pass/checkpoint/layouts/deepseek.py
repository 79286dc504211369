"""The layout of DeepSeek-V4: experts in mxfp4, and other linear layers in FP8 or dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import CheckpointError, UnreadError, as_option, expected
from ...nn.linear import PACKED, SCALE
from .base import Layout, register_layout
from .layer import PackedLayer, Scheme
from .patterns import as_globs, from_globs

_FP8 = torch.float8_e4m3fn

# The rows and columns of a block of it.
_BLOCK = [128, 128]


@register_layout
class DeepSeek(Layout):
    """`weight` and `scale` beside it: experts in int8 for two codes of mxfp4, the others in E4M3.

    All scales are powers of two in E8M0, those of blocks in FP8 too.
    """

    name = "deepseek-v4"
    parts: ClassVar[Mapping[str, str]] = {PACKED: "weight", SCALE: "scale"}
    formats = ("mxfp4", "fp8_block")
    dtypes: ClassVar[Mapping[str, str]] = {PACKED: "I8", SCALE: "F8_E8M0"}

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": _BLOCK,
            "expert_dtype": "fp4",
            "modules_to_not_convert": as_globs(ignore),
        }

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether a quantization_config, with `expert_dtype` of config.json, says so."""
        return declared.get("quant_method") == "fp8" and declared.get("expert_dtype") == "fp4"

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return the scheme of experts, or that of all others."""
        if _is_expert(name):
            return Scheme("mxfp4", weight_only=True, block=32)
        block = declared.get("weight_block_size") or _BLOCK
        if list(block) != _BLOCK:
            wanted = expected("weight_block_size", str(_BLOCK), str(block))
            raise UnreadError(f"{name}: {wanted} Load the folder with the library that wrote it.")
        return Scheme("fp8_block", weight_only=False)

    def ignored(self, declared: Mapping[str, Any]) -> list[str] | None:
        """Return what stays dense."""
        return from_globs(declared.get("modules_to_not_convert") or ())

    def problem(self, layer: PackedLayer) -> str:
        """Return what this layout has no place for in a layer, "" if it holds the layer."""
        found = super().problem(layer)
        if not found and layer.config.weight_only == layer.fmt.has_float_scale:
            found = f"{layer.config.scheme}, only for mxfp4a16 and fp8_block"
        return found

    def encode(self, part: str, tensor: Tensor, layer: PackedLayer) -> Tensor:
        """Return a buffer of a layer as it is stored."""
        if part == PACKED:
            return tensor.view(_FP8 if layer.fmt.has_float_scale else torch.int8)
        if not layer.fmt.has_float_scale:
            return tensor.view(torch.float8_e8m0fnu)
        stored = tensor.to(torch.float8_e8m0fnu)
        if not torch.equal(stored.float(), tensor):
            raise CheckpointError(
                f"{self.name} has powers of two for scales in FP8, and those of this model are "
                f"none. Choose {as_option('layout', 'compressed-tensors')}."
            )
        return stored

    def decode(self, part: str, tensor: Tensor, layer: PackedLayer) -> Tensor:
        """Return a buffer of a layer of what is stored: the inverse of `encode`."""
        if part == SCALE and layer.fmt.has_float_scale:
            return tensor.float()
        return tensor.view(torch.uint8)

    def require(self, layers: Mapping[str, PackedLayer]) -> None:
        """Raise CheckpointError for what this layout has no place for, as other experts."""
        super().require(layers)
        for name, layer in layers.items():
            if _is_expert(name) == layer.fmt.has_float_scale:
                raise CheckpointError(
                    f"{name}: {self.name} has no place for it in {layer.scheme}; it holds experts, "
                    "each a linear layer, in mxfp4a16, and others in fp8_block. Skip the others by "
                    f"{as_option('rules')}, or choose another layout."
                )


def _is_expert(name: str) -> bool:
    return ".experts." in name
