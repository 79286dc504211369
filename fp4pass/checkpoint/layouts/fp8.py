"""The layouts of FP8 with a scale for each block: DeepSeek-V3 and Qwen3-FP8, and DeepSeek-V4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...core.formats import WHOLE
from ...errors import CheckpointError, UnreadError, as_option, as_rules, expected
from ...nn.linear import INPUT_GLOBAL, PACKED, SCALE
from .base import Layout, register_layout
from .layer import PackedLayer, Scheme, is_tile
from .names import as_globs, from_globs

# The rows and columns of a block.
_BLOCK = [128, 128]


@register_layout
class FineGrainedFp8(Layout):
    """`weight` and `weight_scale_inv`, which multiplies in spite of its name.

    Everything but the layers that `modules_to_not_convert` lists is in FP8.
    """

    name = "finegrained-fp8"
    parts: ClassVar[Mapping[str, str]] = {
        PACKED: "weight",
        SCALE: "weight_scale_inv",
        INPUT_GLOBAL: "activation_scale",
    }
    formats = ("fp8_block", "fp8_tensor")
    multiplies = True

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether a quantization_config declares this layout."""
        # The experts of DeepSeek-V4 are in another format.
        return declared.get("quant_method") == "fp8" and declared.get("expert_dtype") != "fp4"

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config."""
        first = next(iter(layers.values()))
        # A pattern of what is below a module is the name of that module here.
        names = [each.removesuffix(".*") for each in as_globs(ignore)]
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "static" if first.static_inputs else "dynamic",
            "weight_block_size": None if first.fmt.block == WHOLE else _BLOCK,
            "modules_to_not_convert": list(dict.fromkeys(names)),
        }

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return the scheme of all layers."""
        block = declared.get("weight_block_size", _BLOCK)
        inputs = declared.get("activation_scheme", "dynamic")
        if (block is not None and not is_tile(block)) or inputs not in ("dynamic", "static"):
            known = "weight_block_size of two sizes or none, and dynamic or static inputs"
            raise UnreadError(
                f"{name}: {expected('quantization_config', known, f'{block} and {inputs!r}')} "
                "Load the folder with the library that wrote it."
            )
        fmt, is_static = self.formats[block is None], inputs == "static"
        tile = tuple(block) if block is not None and list(block) != _BLOCK else ()
        return Scheme(fmt, weight_only=False, static_inputs=is_static, tile=tile)

    def ignored(self, declared: Mapping[str, Any]) -> list[str] | None:
        """Return what stays dense."""
        names = declared.get("modules_to_not_convert") or declared.get("ignored_layers")
        return None if names is None else list(names)

    def scale_shapes(self, layer: PackedLayer) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scales of a layer may have on disk, the written one first."""
        return ((), (1,), (1, 1)) if layer.fmt.rows == WHOLE else (layer.scale_shape,)

    def problem(self, layer: PackedLayer) -> str:
        """Return what this layout has no place for in a layer, "" if it holds the layer."""
        found = super().problem(layer)
        if not found and layer.config.weight_only:
            return f"{layer.fmt.key} of weights only: its readers quantize inputs"
        return found

    def require(self, layers: Mapping[str, PackedLayer]) -> None:
        """Raise CheckpointError for the first layer that this layout has no place for."""
        super().require(layers)
        first, *others = layers
        for name in others:
            if layers[name].scheme != layers[first].scheme:
                raise CheckpointError(
                    f"{name}: {self.name} has one scheme for all layers, and {first} is "
                    f"{layers[first].scheme}, this one {layers[name].scheme}. Choose "
                    f"{as_option('layout', 'compressed-tensors')}, which has a group for each."
                )
        for name in layers:
            if not any(map(str.isdigit, name.split("."))):
                raise CheckpointError(
                    f"{name}: readers of {self.name} take it for dense. Skip it with "
                    f"{as_rules(name)}, or choose {as_option('layout', 'compressed-tensors')}."
                )


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
            return tensor.view(torch.float8_e4m3fn if layer.fmt.has_float_scale else torch.int8)
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
