"""The folder that a model was read from: its tensors, and the files beside them."""

from __future__ import annotations

import ast
import fnmatch
import glob
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.files import parse_json
from ..errors import OptionError, expected
from ..record.source_folder import tensor_files

# The files that from_pretrained looks for, in its order.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")

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

# Names of weights that `save` may write. Other libraries would read a copy.
_WRITTEN = re.compile(r"(model|fp4pass)(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def files_to_copy(
    source: Path, globs: Sequence[str] = (), written: Collection[str] = ()
) -> tuple[list[Path], list[str]]:
    """Return the files of a folder that go with its model, and the names of those that do not.

    A folder may hold training data and keys, so files go by a list: what transformers,
    sentence-transformers and diffusers look for by name, the code that configs name, licenses.
    Hidden files, the weights that from_pretrained reads, and what is written anew neither go nor
    are named. Links that lead out of the folder are not followed.

    Args:
        source: the folder.
        globs: of further files, relative to the folder.
        written: the names of files that the new folder has of its own.

    Raises:
        OptionError: a glob leads out of the folder, or matches no file there.
    """
    if not isinstance(globs, list | tuple) or not all(isinstance(each, str) for each in globs):
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
        asked = set(filter(is_inside, _matching(source, pattern)))
        if not asked:
            raise OptionError(
                f"{expected('copy_files', f'a glob of files in {source}', repr(pattern))} It "
                "matches none; it is relative to the folder, and links out of it are not followed."
            )
        chosen |= asked
    own = {*written, *(f"{weights}.index.json" for weights in _WEIGHTS)}
    chosen = {
        path
        for path in chosen
        if path.parent != source or not (path.name in own or _WRITTEN.fullmatch(path.name))
    }
    own |= {path.name for path in tensor_files(source).values()}
    kept, left = {path.relative_to(source).parts[0] for path in chosen}, []
    for name in (path.relative_to(source) for path in every if path not in chosen):
        top = name.parts[0]
        if top not in own:
            left.append(name.as_posix() if top in {name.name, *kept} else f"{top}/")
    return sorted(chosen), list(dict.fromkeys(left))


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
    """Return whether a pattern matches a path, folder by folder."""
    return any(
        name.count("/") == each.count("/") and fnmatch.fnmatchcase(name.lower(), each.lower())
        for each in patterns
    )


def _matching(source: Path, pattern: str) -> Iterator[Path]:
    """Yield what a glob matches in a folder, by no way out of it and through no linked folder."""
    if not pattern or Path(pattern).is_absolute() or ".." in Path(pattern).parts:
        return
    for name in glob.glob(pattern, root_dir=source, recursive=True):
        folders = list(Path(name).parents)[:-1]
        if not any((source / folder).is_symlink() for folder in folders):
            yield source / name


def part_folders(source: Path) -> dict[str, tuple[str, ...]]:
    """Return the folders of the parts of a pipeline, with patterns of what goes from each.

    sentence-transformers reads parts behind the model, diffusers parts beside it.
    """
    modules, index = _read(source / "modules.json"), _read(source / "model_index.json")
    parts: dict[Any, tuple[str, ...]] = {}
    if isinstance(index, dict):
        parts |= {name: _OF_PARTS for name, part in index.items() if isinstance(part, list)}
    for each in modules if isinstance(modules, list) else ():
        parts[each.get("path") if isinstance(each, dict) else None] = _OF_MODULES
    return {
        os.path.normpath(folder): patterns
        for folder, patterns in parts.items()
        if isinstance(folder, str) and os.path.normpath(folder) != "."
    }


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
    """Return what a JSON file holds, None for one that is missing or broken."""
    try:
        return parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
