"""Define what packed weights are called on disk, and what declares them: layouts.

`Layout` is one of them, `register_layout` adds one, `LAYOUTS` are all by their names.
"""

# ruff: noqa: F401

from ...sources.files import Shapes
from . import compressed_tensors, deepseek, gpt_oss, modelopt, own, quark
from .base import (
    CACHE_SCALES,
    LAYOUTS,
    WEIGHTS,
    Layout,
    get_layout,
    layout_of,
    register_layout,
    side_files,
)
from .compressed_tensors import CompressedTensors
from .foreign import expected_shapes, read_layers
from .layer import (
    BUFFERS,
    PackedLayer,
    Piece,
    Scheme,
    fused_problems,
    join,
    join_layers,
    split_layer,
)
from .patterns import below, is_plain, matches
