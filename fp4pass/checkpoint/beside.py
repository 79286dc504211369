"""Files beside the weights of a checkpoint: of the folder that it is made of, and its tokenizer."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.torch import model_class
from .._compat.transformers import config_faults, meta_model
from .._compat.transformers_loading import names_in_model
from ..core.files import path_of
from ..errors import OptionError, as_option, expected, some
from ..nn.experts import QUANTIZED, weight_name
from ..record.rows import Row
from ..record.source_folder import named_folder, source_folder, tensor_files, tensor_shapes
from ..record.state import known_tokenizer
from .copied_files import files_to_copy
from .source_files import read_tensors
from .unread import without_scales

# The end of the reasons of rows for source tensors that the model has no place for.
COPIED, NOT_COPIED = ": copied as it is", ": not copied"

_log = logging.getLogger(__name__)

# A folder with none of them has no tokenizer and no processor that transformers finds.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("processor_config.json", "preprocessor_config.json", "tekken.json", "spiece.model"),
)


def copy_beside(
    source: Path, target: Path, written: Collection[str], globs: Sequence[str] = ()
) -> None:
    """Copy the files of a folder that go with its model, and log which do not, at level INFO.

    written: the names of files that the new folder has of its own.
    globs: of further files of the folder. Raises OptionError for one that matches none.
    """
    files, left = files_to_copy(source, globs, written)
    for file in files:
        new = target / file.relative_to(source)
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, new)
    if left:
        _log.info(
            "%s: not copied: %s (%s takes globs)", source, some(left, 5), as_option("copy_files")
        )


@dataclass(frozen=True)
class Beside:
    """The tokenizer and the source that come along with a model.

    Attributes:
        tokenizer: a tokenizer or processor, None where the source has it.
        source: the folder that the model was made of, None if there is none.
        copy_files: globs of its files that come along, with those that always do.
    """

    tokenizer: Any
    source: Path | None
    copy_files: Sequence[str]

    @staticmethod
    def of(
        root: nn.Module,
        tokenizer: Any,
        source: str | os.PathLike[str] | None,
        copy_files: Sequence[str],
    ) -> Beside:
        """Find what comes along, as far as it is not given. Raises OptionError."""
        if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
            what = "a tokenizer or processor of transformers, which has save_pretrained"
            raise OptionError(expected("tokenizer", what, type(tokenizer).__name__))
        if source is None:
            tokenizer = known_tokenizer(root) if tokenizer is None else tokenizer
            folder = source_folder(root)
        else:
            folder = named_folder(os.fspath(path_of(source, "source")))
            if folder is None:
                wanted = "a folder, or a hub id in the cache"
                raise OptionError(expected("source", wanted, str(source)))
        if copy_files and folder is None:
            raise OptionError("copy_files: the model was read from no folder. Give source=DIR.")
        if copy_files and folder is not None:
            files_to_copy(folder, copy_files)
        return Beside(tokenizer, folder, copy_files)

    def copy(self, target: Path, written: Collection[str]) -> None:
        """Copy files of the source, but for those that are `written`."""
        if self.source is not None:
            copy_beside(self.source, target, written, self.copy_files)

    def write_tokenizer(self, root: nn.Module, target: Path) -> None:
        """Write the tokenizer; warn if a model that reads text is left without one."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(target)
            return
        config: Any = getattr(root, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else None
        if not getattr(text, "vocab_size", None):
            return
        if not any((target / name).is_file() for name in TOKENIZER_FILES):
            where = "the model was read from no folder"
            if self.source is not None:
                where = f"{self.source} has none either"
            warnings.warn(
                f"The folder has no tokenizer, and engines need one: none was given, and {where}. "
                "Pass it: fp4pass.save(model, dir, tokenizer=tokenizer).",
                stacklevel=4,
            )


def beyond_model(model: Any) -> tuple[dict[str, Path], list[Row]]:
    """Return what a source has and its model has not: the file of each tensor, and a row.

    Tensors of modules that the class does not make, as those of multi-token prediction, are copied
    to a checkpoint. Only named are tensors of modules that it makes without them, as tables that it
    computes; of layers that were removed; and all of a source that is of another class.
    """
    folder = source_folder(model)
    files = {} if folder is None else tensor_files(folder)
    known = dict.fromkeys(_float_names(model))
    spare = [name for name in files if name not in known]
    left = _unplaced(model, spare, known) if spare else []
    if folder is None or not left:
        return {}, []
    config = _config_of(model, folder)
    if config is None or getattr(model.config, "quantization_config", None) is not None:
        return {}, []
    name = model_class(model).__name__
    classes = config.architectures or [name]
    kept = set(left) if name in classes else set()
    if getattr(config, "quantization_config", None) is not None:
        # Of a source in FP8: what is left is in FP8 too, and the scales of the rest are none.
        left, kept = without_scales(left), set()
    kept -= {each for each in left if is_left_over(model, each)}
    kept &= _beyond_source(model, config, left) if kept else kept
    why = f"{name} has no place for it"
    rows = [
        Row(each, shape, skip_reason=f"{why}{COPIED if each in kept else NOT_COPIED}")
        for each, shape in tensor_shapes({each: files[each] for each in left}).items()
    ]
    return {each: files[each] for each in left if each in kept}, rows


def copied_rows(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> list[Row]:
    """Return the rows of tensors that a packed folder holds beyond its model."""
    why = f"{model_class(model).__name__} has no place for it{COPIED}"
    return [Row(name, shape, skip_reason=why) for name, shape in shapes.items()]


def is_left_over(model: nn.Module, name: str) -> bool:
    """Return whether a tensor is of a module that a model has, or like a buffer that it has."""
    owner, _, last = name.rpartition(".")
    like = f"{owner.rpartition('.')[2]}.{last}"
    buffers = (each for each, _ in model.named_buffers())
    is_module = any(owner == each for each, _ in model.named_modules(remove_duplicate=False))
    return is_module or any(f".{each}".endswith(f".{like}") for each in buffers)


def read_carried(files: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that are copied as they are, with their names."""
    yield from read_tensors({n: path for n, path in files.items() if path.suffix != ".bin"})
    for path in sorted({path for path in files.values() if path.suffix == ".bin"}):
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        yield from ((name, held[name]) for name, where in files.items() if where == path)


def _float_names(model: nn.Module) -> Iterator[str]:
    """Yield the names that the state dict of the float model has."""
    modules = model.named_modules(remove_duplicate=False)
    packed = {
        name: weight_name(name, each) for name, each in modules if isinstance(each, QUANTIZED)
    }
    yield from packed.values()
    yield from (n for n in model.state_dict() if n.rpartition(".")[0] not in packed)
    yield from (f"{name}.bias" for name in packed)


def _unplaced(model: Any, names: Iterable[str], known: Mapping[str, Any]) -> list[str]:
    """Return the tensors of a folder that are none of a model's, nor made into one."""
    found = names_in_model(model, names, merged=True, known=known)
    return [name for name, target in found.items() if target not in known]


def _config_of(model: Any, folder: Path) -> Any:
    """Return the config of a folder, None where the class of the model reads none there."""
    try:
        return type(model.config).from_pretrained(folder)
    except config_faults():
        return None


def _beyond_source(model: Any, config: Any, names: Iterable[str]) -> set[str]:
    """Return the tensors for which the model that the config of a folder makes has no place."""
    try:
        whole = meta_model(model_class(model), config)
    except config_faults():
        return set()
    return set(_unplaced(whole, names, whole.state_dict()))
