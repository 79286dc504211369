"""Define what packed weights are called on disk, and what declares them: layouts.

`Layout` is one of them, `register_layout` adds one, `LAYOUTS` are all by their names.
"""

# ruff: noqa: F401

from . import compressed_tensors, vendors
from .base import (
    CACHE_SCALES,
    LAYOUTS,
    WEIGHTS,
    Layout,
    LayoutName,
    expected_shapes,
    get_layout,
    layout_of,
    read_layers,
    register_layout,
    side_files,
    written_layouts,
)
from .compressed_tensors import CompressedTensors
from .layer import (
    BUFFERS,
    FUSED,
    PackedLayer,
    Piece,
    Scheme,
    as_globs,
    below,
    fused_problems,
    has_whole_tiles,
    is_plain,
    join,
    join_layers,
    matches,
    split_layer,
)
