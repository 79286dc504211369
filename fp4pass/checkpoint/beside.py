"""Bring what lies beside weights: files and tensors of the source.

Files and tensors come from the folder that the model was read from: a tokenizer, licenses, code,
tensors that the class has no place for.
"""

from __future__ import annotations

import ast
import fnmatch
import glob
import logging
import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.torch import model_class
from .._compat.transformers import config_faults, meta_model
from .._compat.transformers_loading import names_in_model
from ..core.files import parse_json, path_of
from ..errors import OptionError, as_option, expected, some
from ..nn.experts import QUANTIZED, weight_name
from ..record.rows import Row
from ..record.state import known_tokenizer, named_folder, source_folder, tensor_files, tensor_shapes
from .model_layers import COPIED, NOT_COPIED, is_left_over
from .source_files import read_tensors, without_scales

_log = logging.getLogger(__name__)

# Of a tokenizer or a processor, as the classes of transformers name them.
_READERS = (
    *("tokenizer.*json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "vocab-*.json", "*_vocab.json", "merges.txt", "*.model"),
    *("*.model.v*", "*.spm", "*.tiktoken", "tekken.json", "bpe.codes", "dict.txt", "emoji.json"),
    *("normalizer.json", "byte_maps.json", "word_*.json", "prophetnet.tokenizer"),
    *("chat_template.json", "chat_template.jinja", "*processor_config.json"),
    "audio_tokenizer_config.json",
)

# Files that go with a model, in whatever case; further tokenizers of a processor are in folders.
LISTED = (
    *_READERS,
    *(f"*{reader}/{name}" for reader in ("tokenizer", "processor") for name in _READERS),
    *("chat_templates/*.jinja", "additional_chat_templates/*.jinja", "generation_config.json"),
    *("modules.json", "config_sentence_transformers.json", "sentence_*_config.json"),
    *("model_index.json", "custom_generate/*.py", "custom_generate/requirements.txt"),
    *("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*", "README.md"),
)

# Files that go with it from the folders of a pipeline, and of a module behind the model.
_OF_PARTS = ("*config.json", *_READERS)
_OF_MODULES = (*_OF_PARTS, "*.safetensors", "pytorch_model*.bin")

# Configs that may name classes whose code is in the folder, and the keys for them.
_CONFIGS = ("*config.json", "modules.json")
_CLASSES = {"auto_map", "impl", "type"}

# A folder with none of them has no tokenizer and no processor that transformers finds.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("processor_config.json", "preprocessor_config.json", "tekken.json", "spiece.model"),
)

# Names of weights that `save` may write. Other libraries would read a copy.
_WRITTEN = re.compile(
    r"(model|fp4pass)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|pytorch_model\.bin\.index\.json"
)


def files_to_copy(
    source: Path, globs: Sequence[str] = (), written: Collection[str] = ()
) -> tuple[list[Path], list[str]]:
    """Return the files of a folder that go with its model, and the names of those that do not."""
    # A folder may hold training data and keys, so files go by a list. Hidden files, weights, and
    # what is `written` anew neither go nor are named; links out of the folder are not followed.
    # Raises OptionError for a glob that matches no file.
    if isinstance(globs, str):
        raise OptionError(expected("copy_files", "a list of globs", repr(globs)))
    root = source.resolve()
    # The files of a snapshot in the cache of the hub are links.
    places = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]

    def is_inside(path: Path) -> bool:
        return path.is_file() and any(map(path.resolve().is_relative_to, places))

    every = list(_files_below(source))
    files = list(filter(is_inside, every))
    chosen = {path for path in files if _fits(path.relative_to(source).as_posix(), LISTED)}
    for folder, patterns in part_folders(source).items():
        inside = (path for path in files if source / folder in path.parents)
        chosen |= {path for path in inside if _fits(path.name, patterns)}
    chosen |= _code(source, {*files})
    for pattern in globs:
        within = "" if ".." in Path(pattern).parts else pattern
        found = glob.glob(within, root_dir=source, recursive=True)
        asked = {path for path in map(source.joinpath, found) if is_inside(path)}
        if not asked:
            wanted = expected("copy_files", f"a glob of files in {source}", repr(pattern))
            raise OptionError(f"{wanted} Links out of it are not followed.")
        chosen |= asked
    own = {source / name for name in written}
    own |= {path for path in every if path.parent == source and _WRITTEN.fullmatch(path.name)}
    known = {*chosen, *own, *tensor_files(source).values()}
    left = [path.relative_to(source).as_posix() for path in every if path not in known]
    return sorted(chosen - own), left


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and its folders, links too; nothing that is hidden."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _files_below(path)
        else:
            yield path


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(
        name.count("/") == each.count("/") and fnmatch.fnmatchcase(name.lower(), each.lower())
        for each in patterns
    )


def part_folders(source: Path) -> dict[str, tuple[str, ...]]:
    """Return the folders of the parts of a pipeline, with patterns of what goes from each."""
    modules, index = _read(source / "modules.json"), _read(source / "model_index.json")
    parts: dict[Any, tuple[str, ...]] = {}
    if isinstance(index, dict):
        parts |= {name: _OF_PARTS for name, part in index.items() if isinstance(part, list)}
    if isinstance(modules, list):
        parts |= {each.get("path"): _OF_MODULES for each in modules if isinstance(each, dict)}
    paths = {n: os.path.normpath(n) for n in parts if isinstance(n, str)}
    return {path: parts[name] for name, path in paths.items() if path != "."}


def _code(source: Path, files: Collection[Path]) -> set[Path]:
    """Return the Python files whose classes the configs name, and those that they import."""
    configs = [path for path in files if path.parent == source and _fits(path.name, _CONFIGS)]
    names = (name for path in configs for name in _classes(_read(path)))
    left = [source / f"{'/'.join(name.split('.')[:-1])}.py" for name in names]
    found: set[Path] = set()
    while left:
        path = left.pop()
        if path in files and path not in found:
            found.add(path)
            left += _imports(path)
    return found


def _classes(config: Any, is_class: bool = False) -> Iterator[str]:
    """Yield what a config names as a class: module.Class."""
    if isinstance(config, dict):
        for key, each in config.items():
            yield from _classes(each, is_class or key in _CLASSES)
    elif isinstance(config, list):
        for each in config:
            yield from _classes(each, is_class)
    elif isinstance(config, str) and is_class and "." in config:
        yield config


def _imports(path: Path) -> Iterator[Path]:
    """Yield where the modules may be that a Python file imports from beside itself."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(path.parents):
            module = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for each in (module, *(module / alias.name for alias in node.names)):
                yield from (Path(f"{each}.py"), each / "__init__.py")


def _read(path: Path) -> Any:
    try:
        return parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def copy_beside(
    source: Path, target: Path, written: Collection[str], globs: Sequence[str] = ()
) -> None:
    """Copy what `files_to_copy` returns, and log what does not go, at level INFO."""
    files, left = files_to_copy(source, globs, written)
    for file in files:
        new = target / file.relative_to(source)
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, new)
    if left:
        option = as_option("copy_files")
        _log.info("%s: not copied: %s (%s takes globs)", source, some(left, 5), option)


class Beside:
    """The tokenizer and the source of a model, looked for where not given. Raises OptionError."""

    def __init__(
        self,
        root: nn.Module,
        tokenizer: Any,
        source: str | os.PathLike[str] | None,
        copy_files: Sequence[str],
    ) -> None:
        if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
            what = "a tokenizer or processor of transformers, which has save_pretrained"
            raise OptionError(expected("tokenizer", what, type(tokenizer).__name__))
        folder = source_folder(root)
        if source is not None:
            folder = named_folder(os.fspath(path_of(source, "source")))
            if folder is None:
                wanted = "a folder, or a hub id in the cache"
                raise OptionError(expected("source", wanted, str(source)))
        elif tokenizer is None:
            tokenizer = known_tokenizer(root)
        if copy_files:
            if folder is None:
                raise OptionError("copy_files: the model was read from no folder. Give source=DIR.")
            files_to_copy(folder, copy_files)
        # No tokenizer where the source has it; globs of further files of the source.
        self.tokenizer, self.source, self.copy_files = tokenizer, folder, copy_files

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
    """Return what a source has and its model has not: the file of each tensor, and a row."""
    # Tensors of modules that the class does not make, as of multi-token prediction, are copied.
    # Only named are those of modules that it makes without them, of removed layers, of another
    # class.
    folder = source_folder(model)
    files = {} if folder is None else tensor_files(folder)
    modules = model.named_modules(remove_duplicate=False)
    packed = {n: weight_name(n, each) for n, each in modules if isinstance(each, QUANTIZED)}
    known = dict.fromkeys([*packed.values(), *(f"{name}.bias" for name in packed)])
    known |= dict.fromkeys(n for n in model.state_dict() if n.rpartition(".")[0] not in packed)
    spare = [name for name in files if name not in known]
    left = _unplaced(model, spare, known) if spare else []
    if folder is None or not left or getattr(model.config, "quantization_config", None) is not None:
        return {}, []
    try:
        config = type(model.config).from_pretrained(folder)
    except config_faults():
        return {}, []
    name, kept = model_class(model).__name__, set[str]()
    if getattr(config, "quantization_config", None) is not None:
        # Of a source in FP8: what is left is in FP8 too, and the scales of the rest are none.
        left = without_scales(left)
    elif name in (config.architectures or [name]):
        kept = {each for each in left if not is_left_over(model, each)}
    if kept:
        try:
            whole = meta_model(model_class(model), config)
        except config_faults():
            kept = set()
        else:
            kept &= set(_unplaced(whole, left, whole.state_dict()))
    why = f"{name} has no place for it"
    rows = [
        Row(each, shape, skip_reason=f"{why}{COPIED if each in kept else NOT_COPIED}")
        for each, shape in tensor_shapes({each: files[each] for each in left}).items()
    ]
    return {each: files[each] for each in left if each in kept}, rows


def read_carried(files: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that are copied as they are, with their names."""
    yield from read_tensors({n: path for n, path in files.items() if path.suffix != ".bin"})
    for path in sorted({path for path in files.values() if path.suffix == ".bin"}):
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        yield from ((name, held[name]) for name, where in files.items() if where == path)


def _unplaced(model: Any, names: Iterable[str], known: Mapping[str, Any]) -> list[str]:
    """Return the tensors of a folder that are none of a model's, nor made into one."""
    found = names_in_model(model, names, merged=True, known=known)
    return [name for name, target in found.items() if target not in known]
