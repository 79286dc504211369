"""Define what packed weights are called on disk, and what declares them: layouts.

`Layout` is one of them, `register_layout` adds one, `LAYOUTS` are all by their names.
"""

# ruff: noqa: F401

from ..source_files import Shapes
from . import compressed_tensors, deepseek, finegrained_fp8, gpt_oss, modelopt, own, quark
from .base import CACHE_SCALES, LAYOUTS, WEIGHTS, Layout, LayoutName, register_layout
from .compressed_tensors import CompressedTensors
from .foreign import expected_shapes, read_layers
from .known import get_layout, layout_of, side_files
from .layer import BUFFERS, FUSED, PackedLayer, Scheme, fused_problems, join
from .patterns import as_globs, below, is_plain, matches
from .pieces import Piece, has_whole_tiles, join_layers, join_part, joined_record, split_layer
