"""Checkpoints: save, load and convert between the layouts of serving engines.

`save` and `load` are those of fp4pass; `transcode` writes a folder in another layout;
`open_checkpoint` reads one tensor by tensor; `register_layout` adds a `Layout`.
"""

from .finish import finish as finish_model  # noqa: F401, for the lab
from .finished import ConvertedState as ConvertedState
from .layouts import LAYOUTS, Layout, PackedLayer, Scheme, register_layout
from .loading import load
from .opening import open_checkpoint, read_experts
from .reader import CheckpointReader
from .saving import save
from .transcode import transcode

__all__ = [
    "LAYOUTS",
    "CheckpointReader",
    "Layout",
    "PackedLayer",
    "Scheme",
    "load",
    "open_checkpoint",
    "read_experts",
    "register_layout",
    "save",
    "transcode",
]


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)
