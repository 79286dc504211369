"""Files beside the weights of a checkpoint: of the folder that it is made of, and its tokenizer."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..core.paths import path_of
from ..core.source_files import copy_files, named_folder, source_folder
from ..errors import OptionError, expected
from ..state import known_tokenizer
from .layouts import side_files
from .manifest import MANIFEST

_log = logging.getLogger(__name__)

# A folder with none of them has no tokenizer and no processor that transformers finds.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("processor_config.json", "preprocessor_config.json", "tekken.json", "spiece.model"),
)


def copy_beside(source: Path, target: Path, read: Iterable[Path] = ()) -> None:
    """Copy all but weights and what declares them, and log what is left out, at level INFO.

    read: files whose tensors are in the new folder.
    """
    written = {MANIFEST, "config.json", *side_files(), *(path.name for path in read)}
    if left := copy_files(source, target, written):
        _log.info("%s: not copied, for they are other weights: %s", source, ", ".join(left))


@dataclass(frozen=True)
class Beside:
    """What comes along with a model.

    Attributes:
        tokenizer: a tokenizer or processor, None where the source has it.
        source: the folder that the model was made of, None if there is none.
    """

    tokenizer: Any
    source: Path | None

    @staticmethod
    def of(root: nn.Module, tokenizer: Any, source: str | os.PathLike[str] | None) -> Beside:
        """Find what comes along, as far as it is not given. Raises OptionError."""
        if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
            what = "a tokenizer or processor of transformers, which has save_pretrained"
            raise OptionError(expected("tokenizer", what, type(tokenizer).__name__))
        if source is None:
            known = known_tokenizer(root) if tokenizer is None else tokenizer
            return Beside(known, source_folder(root))
        folder = named_folder(os.fspath(path_of(source, "source")))
        if folder is None:
            raise OptionError(expected("source", "a folder, or a hub id in the cache", str(source)))
        return Beside(tokenizer, folder)

    def copy(self, target: Path) -> None:
        """Copy the files of the source."""
        if self.source is not None:
            copy_beside(self.source, target)

    def write_tokenizer(self, root: nn.Module, target: Path) -> None:
        """Write the tokenizer; warn if a model that reads text is left without one."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(target)
            return
        config: Any = getattr(root, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else None
        if not getattr(text, "vocab_size", None):
            return
        if not any((target / name).is_file() for name in _TOKENIZER_FILES):
            where = "the model was read from no folder"
            if self.source is not None:
                where = f"{self.source} has none either"
            warnings.warn(
                f"The folder has no tokenizer, and engines need one: none was given, and {where}. "
                "Pass it: fp4pass.save(model, dir, tokenizer=tokenizer).",
                stacklevel=4,
            )
