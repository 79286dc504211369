"""Our own layout, of every format and block, rotated or not; only fp4pass reads it."""

from __future__ import annotations

from ...nn.kv_cache import CACHE_FORMATS
from .base import Layout, register_layout


@register_layout
class Own(Layout):
    """The buffers under their own names; only fp4pass.json says what they are.

    Under the usual file name transformers would load the folder with random weights.
    """

    name = "fp4pass"
    engines = False
    cache_schemes = dict.fromkeys(CACHE_FORMATS)
