"""Files that lie beside the weights of the folder that a checkpoint is made of."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from ..core.source_files import copy_files
from .layouts import side_files
from .manifest import MANIFEST

_log = logging.getLogger(__name__)


def copy_beside(source: Path, target: Path, read: Iterable[Path] = ()) -> None:
    """Copy all but weights and what declares them, and log what is left out, at level INFO.

    read: files whose tensors are in the new folder.
    """
    written = {MANIFEST, "config.json", *side_files(), *(path.name for path in read)}
    if left := copy_files(source, target, written):
        _log.info("%s: not copied, for they are other weights: %s", source, ", ".join(left))
