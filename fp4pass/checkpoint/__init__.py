"""Checkpoints: save, load and convert between the layouts of serving engines.

`save` and `load` are those of fp4pass; `transcode` writes a folder in another layout;
`open_checkpoint` reads one tensor by tensor; `register_layout` adds a `Layout`.
"""

# ruff: noqa: F401

from .beside import TOKENIZER_FILES
from .finished import ConvertedState
from .float_models import model_class
from .layouts import (
    CACHE_SCALES,
    LAYOUTS,
    WEIGHTS,
    Layout,
    PackedLayer,
    Scheme,
    expected_shapes,
    fused_problems,
    join,
    matches,
    read_layers,
    register_layout,
    side_files,
)
from .loading import load
from .model_layers import finish as finish_model
from .reader import CheckpointReader, dense_problem, is_packed, open_checkpoint
from .readers import SERVED
from .saving import save, transcode
from .source_files import (
    MANIFEST,
    bytes_of,
    config_changes,
    read_json,
    read_manifest,
    unread_layers,
    well_formed,
)

__all__ = [
    "LAYOUTS",
    "CheckpointReader",
    "Layout",
    "PackedLayer",
    "Scheme",
    "load",
    "open_checkpoint",
    "register_layout",
    "save",
    "transcode",
]
