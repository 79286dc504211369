"""The layouts of mxfp4 alone: stacked experts of gpt-oss, and AMD's Quark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from ...errors import UnreadError
from ...nn.linear import PACKED, SCALE
from .base import Layout, register_layout
from .layer import PackedLayer, Scheme
from .names import as_globs, from_globs


@register_layout
class GptOss(Layout):
    """`*_blocks` [E, N, K / 32, 16] and `*_scales` [E, N, K / 32] beside no module of their own.

    A layer is a parameter such as model.layers.0.mlp.experts.gate_up_proj, whose rows are gate and
    up in turn; transformers computes with it as [E, K, N].
    """

    name = "gpt-oss"
    parts: ClassVar[Mapping[str, str]] = {PACKED: "_blocks", SCALE: "_scales"}
    formats = ("mxfp4",)
    stacks = True

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config; what it reads is known by the names of tensors."""
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(ignore)}

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether the experts are packed."""
        return declared.get("quant_method") == "mxfp4"

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return the only scheme."""
        return Scheme("mxfp4", weight_only=True)

    def ignored(self, declared: Mapping[str, Any]) -> list[str] | None:
        """Return what stays dense."""
        return list(declared.get("modules_to_not_convert") or ())


# `OCP_MXFP4Spec` of amd-quark 0.13, without the entries that only its observers read.
_MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
_REST = {"ch_axis": -1, "symmetric": None, "round_method": "half_even", "scale_type": "float"}

# Where a config has what holds for a layer, the most particular first.
_BY_NAME, _BY_CLASS, _FOR_ALL = (
    "layer_quant_config",
    "layer_type_quant_config",
    "global_quant_config",
)
_LINEAR = ("Linear", "nn.Linear", "<class 'torch.nn.modules.linear.Linear'>")


@register_layout
class Quark(Layout):
    """`weight` and `weight_scale`, bytes of E8M0, declared for all layers or by globs of names."""

    name = "quark"
    parts: ClassVar[Mapping[str, str]] = {PACKED: "weight", SCALE: "weight_scale"}
    formats = ("mxfp4",)

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config; what differs from the first layer is named."""
        schemes = {name: _declared(layer) for name, layer in layers.items()}
        usual = next(iter(schemes.values()))
        return {
            "quant_method": self.name,
            "version": "0.13",
            "quant_mode": "eager_mode",
            _FOR_ALL: usual,
            _BY_NAME: {name: each for name, each in schemes.items() if each != usual},
            _BY_CLASS: {},
            "exclude": as_globs(ignore),
            "algo_config": None,
            "softmax_quant_spec": None,
            "kv_cache_quant_config": {},
            "kv_cache_post_rope": False,
            "export": {
                "kv_cache_group": [],
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
        }

    def ignored(self, declared: Mapping[str, Any]) -> list[str] | None:
        """Return what stays dense."""
        return from_globs(declared.get("exclude") or ())

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return what the most particular entry says of a layer."""
        found = _config_of(name, declared)
        weight, inputs = found.get("weight"), found.get("input_tensors")
        if not _is_mxfp4(weight) or not (inputs is None or _is_mxfp4(inputs)):
            raise UnreadError(
                f"{name}: expected weights in fp4 in groups of 32 with scales in e8m0, and inputs "
                f"alike or in floating point, got weights {weight} and inputs {inputs}. Load the "
                "folder with the library that wrote it."
            )
        if inputs is not None and not inputs.get("is_dynamic", True):
            raise UnreadError(
                f"{name}: expected inputs whose scales are computed at each call, got static ones. "
                "Load the folder with the library that wrote it."
            )
        return Scheme(self.formats[0], inputs is None, 32)


def is_read(declared: Mapping[str, Any]) -> bool:
    """Return whether any layer of a quantization_config is in mxfp4."""
    named = (declared.get(_BY_NAME) or {}).values()
    by_class = (declared.get(_BY_CLASS) or {}).values()
    every = (declared.get(_FOR_ALL) or {}, *named, *by_class)
    return any(_is_mxfp4((each or {}).get("weight")) for each in every)


def _config_of(name: str, declared: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry of a config that holds for a linear layer, {} if there is none."""
    for pattern, found in (declared.get(_BY_NAME) or {}).items():
        if fnmatchcase(name, pattern):
            return found
    by_class = declared.get(_BY_CLASS) or {}
    found = next((by_class[each] for each in _LINEAR if each in by_class), None)
    return found or declared.get(_FOR_ALL) or {}


def _is_mxfp4(spec: Any) -> bool:
    """Return whether Quark's words for a tensor are those of mxfp4; a list has two scales."""
    return isinstance(spec, Mapping) and _MXFP4.items() <= spec.items()


def _declared(layer: PackedLayer) -> dict[str, Any]:
    def spec(is_dynamic: bool) -> dict[str, Any]:
        return {**_MXFP4, **_REST, "is_dynamic": is_dynamic}

    inputs = None if layer.config.weight_only else spec(True)
    return {"weight": spec(False), "input_tensors": inputs, "output_tensors": None, "bias": None}
