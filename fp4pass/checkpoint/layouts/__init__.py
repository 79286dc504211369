"""Define what packed weights are called on disk, and what declares them: layouts.

`Layout` is one of them, `register_layout` adds one, `LAYOUTS` are all by their names.
"""

# ruff: noqa: F401

from . import compressed_tensors, fp8, modelopt, mxfp4
from .base import (
    CACHE_SCALES,
    LAYOUTS,
    WEIGHTS,
    Layout,
    LayoutName,
    get_layout,
    layout_of,
    register_layout,
    side_files,
)
from .compressed_tensors import CompressedTensors
from .layer import BUFFERS, FUSED, PackedLayer, Scheme, fused_problems, join
from .names import as_globs, below, is_plain, matches
from .shapes import expected_shapes, read_layers
from .stacks import Piece, has_whole_tiles, join_layers, join_part, joined_record, split_layer
