"""What other libraries call our formats: the layouts that checkpoints are written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._version import __version__
from .formats import Format, get_format
from .report import Report

# Formats that compressed-tensors names, with what its scheme says of their weights.
_PUBLIC: dict[str, dict[str, Any]] = {
    "nvfp4": {
        "format": "nvfp4-pack-quantized",
        "strategy": "tensor_group",
        "scale_dtype": "torch.float8_e4m3fn",
        "dynamic": "local",
    },
    "mxfp4": {
        "format": "mxfp4-pack-quantized",
        "strategy": "group",
        "scale_dtype": "torch.uint8",
        "dynamic": True,
    },
}


@dataclass(frozen=True)
class Layer:
    """How one stored weight is to be used; what fp4pass.json says of it."""

    format: str
    weight_only: bool
    weight_dtype: str
    transposed: bool
    shape: tuple[int, int]

    @property
    def fmt(self) -> Format:
        return get_format(self.format)


def is_public(layers: Mapping[str, Layer]) -> bool:
    """Whether compressed-tensors has a name for every layer's format."""
    return all(layer.format in _PUBLIC and not layer.transposed for layer in layers.values())


def quantization_config(layers: Mapping[str, Layer], rows: Report) -> dict[str, Any]:
    """The compressed-tensors config, or one under our own name that others refuse."""
    if not is_public(layers):
        return {"quant_method": "fp4pass", "version": __version__}
    schemes: dict[tuple[str, bool], list[str]] = {}
    for name, layer in layers.items():
        schemes.setdefault((layer.format, layer.weight_only), []).append(name)
    groups = {
        f"group_{i}": _scheme(fmt, weight_only, names if len(schemes) > 1 else ["Linear"])
        for i, ((fmt, weight_only), names) in enumerate(schemes.items())
    }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [row.name for row in rows.left_alone],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _scheme(fmt: str, weight_only: bool, targets: list[str]) -> dict[str, Any]:
    public = _PUBLIC[fmt]
    args = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": public["strategy"],
        "group_size": get_format(fmt).block,
        "scale_dtype": public["scale_dtype"],
        "zp_dtype": public["scale_dtype"],
    }
    return {
        "targets": targets,
        "format": public["format"],
        "weights": {**args, "dynamic": False},
        "input_activations": None if weight_only else {**args, "dynamic": public["dynamic"]},
        "output_activations": None,
    }
