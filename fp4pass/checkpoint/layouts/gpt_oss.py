"""The layout of gpt-oss: the experts of a mixture, stacked, in mxfp4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from ...config import LinearConfig
from ...core.formats import get_format
from ...errors import CheckpointError
from ...linear import PACKED, SCALE
from .base import Layout, Shapes, register_layout
from .layer import PackedLayer

_FORMAT = get_format("mxfp4")


@register_layout
class GptOss(Layout):
    """`*_blocks` [E, N, K / 32, 16] and `*_scales` [E, N, K / 32] beside no module of their own.

    A layer is a parameter such as model.layers.0.mlp.experts.gate_up_proj, whose rows are gate and
    up in turn; transformers computes with it as [E, K, N].
    """

    name = "gpt-oss"
    parts: ClassVar[Mapping[str, str]] = {PACKED: "_blocks", SCALE: "_scales"}
    formats = (_FORMAT.key,)

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config; what it reads is known by the names of tensors."""
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(ignore)}

    def problem(self, layer: PackedLayer) -> str:
        """Return what this layout has no place for in a layer, "" if it holds the layer."""
        if not layer.is_stacked:
            return "a linear layer: only experts are packed. Skip the others with a rule"
        if not layer.transposed:
            return "experts that the model does not have as [E, K, N]"
        if not layer.config.weight_only:
            return "experts with 4-bit inputs"
        return self.config_problem(layer.config)

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether the experts are packed."""
        return declared.get("quant_method") == "mxfp4"

    def ignored(self, declared: Mapping[str, Any]) -> list[str] | None:
        """Return what stays dense."""
        return list(declared.get("modules_to_not_convert") or ())

    def tensor_name(self, layer: str, part: str) -> str:
        """Return the name on disk, a suffix of that of the parameter."""
        return layer + self.parts[part]

    def dense_name(self, layer: str) -> str:
        """Return the name of the parameter."""
        return layer

    def encode(self, part: str, tensor: Tensor, multiplies: bool = False) -> Tensor:
        """Return codes [E, N, K / 32, 16] or scales [E, N, K / 32]."""
        size = _FORMAT.packed_columns(_FORMAT.block)
        return tensor.unflatten(-1, (-1, size)) if part == PACKED else tensor

    def decode(self, part: str, tensor: Tensor, multiplies: bool = False) -> Tensor:
        """Return codes [E, N, K / 2] or scales [E, N, K / 32]."""
        return tensor.flatten(-2) if part == PACKED else tensor

    def read(
        self, declared: Mapping[str, Any], shapes: Shapes, dtype: str
    ) -> dict[str, PackedLayer]:
        """Return the stacks of experts; arguments as for `Layout.read`."""
        blocks, scales = self.parts[PACKED], self.parts[SCALE]
        config = LinearConfig(_FORMAT.name, None, weight_only=True)
        layers = {}
        for name in (each.removesuffix(blocks) for each in shapes if each.endswith(blocks)):
            if name + scales not in shapes:
                raise CheckpointError(f"There is no {name}{scales}. Copy the folder again.")
            shape, _ = shapes[name + blocks]
            if len(shape) != 4:
                raise CheckpointError(
                    f"{name}{blocks}: expected shape [experts, N, K / 32, 16], got {list(shape)}."
                )
            experts, rows, columns = shape[0], shape[1], shape[2] * _FORMAT.block
            layers[name] = PackedLayer(config, dtype, True, (experts, rows, columns))
        return layers

    def expected(self, layer: PackedLayer) -> dict[str, tuple[tuple[tuple[int, ...], ...], str]]:
        """Return the shapes and the dtype of blocks and scales."""
        experts, rows, columns = layer.shape
        scale = (experts, rows, columns // _FORMAT.block)
        return {
            PACKED: (((*scale, _FORMAT.packed_columns(_FORMAT.block)),), "U8"),
            SCALE: ((scale,), "U8"),
        }
