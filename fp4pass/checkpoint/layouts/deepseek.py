"""The layout of DeepSeek-V4: experts in mxfp4, and other linear layers in FP8 or dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import CheckpointError, UnreadError
from ...linear import PACKED, SCALE
from ...sources.files import Shapes
from .base import Layout, register_layout
from .layer import PackedLayer, Scheme
from .patterns import as_globs, from_globs

# The bits of codes and scales are those of other layouts, under these dtypes.
_DTYPES = {PACKED: torch.int8, SCALE: torch.float8_e8m0fnu}

# The blocks of weights in FP8 that share a scale, unless the config says otherwise.
_BLOCK = (128, 128)


@register_layout
class DeepSeek(Layout):
    """`weight` in int8 and `scale` in E8M0 beside it, for each expert.

    Linear layers beside the experts are in E4M3 with a power of two for each block, whose product
    is exact in bfloat16: they are read as dense. Written are dense ones.
    """

    name = "deepseek-v4"
    parts: ClassVar[Mapping[str, str]] = {PACKED: "weight", SCALE: "scale"}
    formats = ("mxfp4",)
    dtypes: ClassVar[Mapping[str, str]] = {PACKED: "I8", SCALE: "F8_E8M0"}

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": list(_BLOCK),
            "expert_dtype": "fp4",
            "modules_to_not_convert": as_globs(ignore),
        }

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether a quantization_config, with `expert_dtype` of config.json, says so."""
        return declared.get("quant_method") == "fp8" and declared.get("expert_dtype") == "fp4"

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return the only scheme."""
        return Scheme("mxfp4", weight_only=True, block=32)

    def ignored(self, declared: Mapping[str, Any]) -> list[str] | None:
        """Return what stays dense."""
        return from_globs(declared.get("modules_to_not_convert") or ())

    def problem(self, layer: PackedLayer) -> str:
        """Return what this layout has no place for in a layer, "" if it holds the layer."""
        found = super().problem(layer)
        return found or ("" if layer.config.weight_only else f"{layer.fmt.key} with 4-bit inputs")

    def encode(self, part: str, tensor: Tensor, layer: PackedLayer) -> Tensor:
        """Return a buffer of a layer as it is stored."""
        return tensor.view(_DTYPES[part])

    def decode(self, part: str, tensor: Tensor, layer: PackedLayer) -> Tensor:
        """Return a buffer of a layer of what is stored: the inverse of `encode`."""
        return tensor.view(torch.uint8)

    def require(self, layers: Mapping[str, PackedLayer]) -> None:
        """Raise CheckpointError for what this layout has no place for, as a layer of no expert."""
        super().require(layers)
        for name in layers:
            if ".experts." not in name:
                raise CheckpointError(
                    f"{name}: {self.name} has no place for it; it holds experts in mxfp4, each a "
                    "linear layer. Skip others by rules= of convert, or choose another layout."
                )

    def scaled(self, declared: Mapping[str, Any], shapes: Shapes) -> dict[str, str]:
        """Return the weights in FP8, each with the name of its scales."""
        rows, columns = declared.get("weight_block_size") or _BLOCK
        found = {}
        for name, (shape, kind) in shapes.items():
            if kind != "F8_E4M3" or not name.endswith(".weight"):
                continue
            scale = f"{name.removesuffix('weight')}scale"
            wanted = (-(-shape[0] // rows), -(-shape[1] // columns))
            if shapes.get(scale) != (wanted, "F8_E8M0"):
                raise UnreadError(
                    f"{name}: expected {scale} beside it, F8_E8M0 {list(wanted)}, got "
                    f"{shapes.get(scale, 'none')}. Copy the folder again, or load it with the "
                    "library that wrote it."
                )
            found[name] = scale
        return found

    def unscaled(self, weight: Tensor, scale: Tensor, declared: Mapping[str, Any]) -> Tensor:
        """Return a weight in FP8 times the scales of its blocks, in bfloat16."""
        rows, columns = declared.get("weight_block_size") or _BLOCK
        whole = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return (weight.float() * whole[: len(weight), : weight.shape[1]]).bfloat16()
