"""The layout of gpt-oss: the experts of a mixture, stacked, in mxfp4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...nn.linear import PACKED, SCALE
from .base import Layout, register_layout
from .layer import PackedLayer, Scheme


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
