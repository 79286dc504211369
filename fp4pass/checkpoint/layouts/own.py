"""Our own layout, of every format and block, rotated or not; only fp4pass reads it."""

from __future__ import annotations

from torch import Tensor

from ...kv_cache import CACHE_FORMATS
from .base import Layout, register_layout
from .layer import PackedLayer


@register_layout
class Own(Layout):
    """The buffers under their own names; only fp4pass.json says what they are.

    Under the usual file name transformers would load the folder with random weights.
    """

    name = "fp4pass"
    weights = "fp4pass.safetensors"
    dtype = ""
    engines = False
    cache_formats = tuple(CACHE_FORMATS)

    def encode(self, part: str, tensor: Tensor, multiplies: bool = False) -> Tensor:
        """Return a buffer as it is: fp4pass.json says which way global scales go."""
        return tensor

    def decode(self, part: str, tensor: Tensor, multiplies: bool = False) -> Tensor:
        """Return a buffer as it is."""
        return tensor

    def problem(self, layer: PackedLayer) -> str:
        """Return "": it holds every linear layer."""
        return ""
