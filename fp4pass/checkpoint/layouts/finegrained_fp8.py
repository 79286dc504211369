"""The layout of DeepSeek-V3 and Qwen3-FP8: FP8 with a scale for each block, for all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...core.formats import WHOLE
from ...errors import CheckpointError, UnreadError, as_option, as_rules, expected
from ...nn.linear import INPUT_GLOBAL, PACKED, SCALE
from .base import Layout, register_layout
from .layer import PackedLayer, Scheme, is_tile
from .patterns import as_globs

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
