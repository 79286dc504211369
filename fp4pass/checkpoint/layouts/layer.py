"""What a checkpoint says of one packed layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...config import LinearConfig
from ...core.formats import Format


@dataclass(frozen=True)
class PackedLayer:
    """How one packed weight is to be used; fp4pass.json holds it.

    Attributes:
        config: how the layer is quantized.
        weight_dtype: name of the dtype that the dense weight has.
        transposed: the dense weight is [K, N].
        shape: [N, K], or [E, N, K] for the stacked experts of a mixture.
    """

    config: LinearConfig
    weight_dtype: str
    transposed: bool
    shape: tuple[int, ...]

    @property
    def fmt(self) -> Format:
        """The format as files name it: their layout tells which way global scales go."""
        return self.config.format.with_multiplier(False)

    @property
    def is_stacked(self) -> bool:
        """Whether these are the experts of a mixture in one tensor."""
        return len(self.shape) == 3

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `from_dict` reads them."""
        return {**vars(self), "config": self.config.to_dict(), "shape": list(self.shape)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> PackedLayer:
        """Read what `to_dict` returned."""
        config = LinearConfig.from_dict(data["config"])
        return PackedLayer(**{**data, "config": config, "shape": tuple(data["shape"])})


class Scheme(NamedTuple):
    """What a quantization_config declares of one layer.

    Attributes:
        fmt: name of the format.
        weight_only: the input stays in floating point.
        block: weights that share a scale, None if that is not declared.
        rotation: columns of the input that are rotated together at each call.
    """

    fmt: str
    weight_only: bool
    block: int | None = None
    rotation: int = 0
