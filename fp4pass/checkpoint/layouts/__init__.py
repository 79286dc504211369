"""Layouts: what packed weights are called on disk, and what declares them.

`Layout` is one of them, `register_layout` adds one, `LAYOUTS` are all by their names.
"""

# ruff: noqa: F401

from . import compressed_tensors, gpt_oss, modelopt, own
from .base import (
    BUFFERS,
    LAYOUTS,
    WEIGHTS,
    Layout,
    Shapes,
    get_layout,
    join,
    layout_of,
    register_layout,
    side_files,
    writable_layouts,
)
from .compressed_tensors import CompressedTensors
from .layer import PackedLayer, Piece, Scheme, fused_problems
from .patterns import below, is_plain, matches
