"""Bring what lies beside weights: files and tensors of the source, a card; upload a folder.

Files and tensors come from the folder that the model was read from: a tokenizer, licenses, code,
tensors that the class has no place for.
"""

from __future__ import annotations

import ast
import fnmatch
import glob
import json
import logging
import math
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import require
from .._compat.torch import model_class
from .._compat.transformers import config_faults, meta_model
from .._compat.transformers_loading import names_in_model
from .._version import __version__
from ..core.files import parse_json, path_of
from ..errors import CheckpointError, OptionError, as_option, expected, some
from ..nn.experts import QUANTIZED, weight_name
from ..record.rows import Row
from ..record.state import (
    WEIGHTS,
    ModelState,
    known_tokenizer,
    named_folder,
    source_folder,
    tensor_files,
    tensor_shapes,
)
from .model_layers import COPIED, NOT_COPIED, is_left_over, is_transformers
from .readers import Readers
from .source_files import MANIFEST, read_tensors, without_scales

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
_WRITTEN = re.compile(r"(model|fp4pass)(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def files_to_copy(
    source: Path, globs: Sequence[str] = (), written: Collection[str] = ()
) -> tuple[list[Path], list[str]]:
    """Return the files of a folder that go with its model, and the names of those that do not.

    A folder may hold training data and keys, so files go by a list. Hidden files, weights, and what
    is `written` anew neither go nor are named; links out of the folder are not followed. Raises
    OptionError for a glob that matches no file.
    """
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
            raise OptionError(
                f"{expected('copy_files', f'a glob of files in {source}', repr(pattern))} It "
                "matches none; it is relative to the folder, and links out of it are not followed."
            )
        chosen |= asked
    own = {*written, *(f"{weights}.index.json" for weights in WEIGHTS)}
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
        _log.info(
            "%s: not copied: %s (%s takes globs)", source, some(left, 5), as_option("copy_files")
        )


@dataclass(frozen=True)
class Beside:
    """The tokenizer and the source that come along with a model."""

    tokenizer: Any  # None where the source has it
    source: Path | None  # the folder that the model was made of
    copy_files: Sequence[str]  # globs of its files that come along, with those that always do

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

    Tensors of modules that the class does not make, as of multi-token prediction, are copied. Only
    named are those of modules that it makes without them, of removed layers, of another class.
    """
    folder = source_folder(model)
    files = {} if folder is None else tensor_files(folder)
    known = dict.fromkeys(_float_names(model))
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


# The model card, and the hub.

_NAME = "README.md"

# Keys of the float model's card that hold for the packed one, too.
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")

# The commands by which each program that may read the folder serves it.
_COMMANDS = {
    "vLLM": "vllm serve {name}",
    "SGLang": "python -m sglang.launch_server --model-path {name}",
}


def check_card(given: Any) -> Mapping[str, Any] | None:
    """Return the evaluations of the card that is asked for, None for none. Raises OptionError."""
    if given is False:
        return None
    require("huggingface_hub")
    evaluations = {} if given is True else given
    if isinstance(evaluations, Mapping) and all(
        hasattr(each, "perplexity") for each in evaluations.values()
    ):
        return evaluations
    wanted = 'True, False or evaluations as {"WikiText-2": fp4pass.evaluate(...)}'
    raise OptionError(expected("card", wanted, f"{given!r:.60}"))


def write_card(
    folder: Path,
    root: nn.Module,
    state: ModelState,
    layout: str,
    readers: Readers,
    evaluations: Mapping[str, Any],
    source: Path | None,
    name: str,
) -> None:
    """Write the card of a folder, complete but for it. name: of its repository, or ""."""
    from huggingface_hub import ModelCard, ModelCardData

    report, kind = state.report, model_class(root).__name__
    there, base = _header_of(source), _hub_id(root)
    if source is not None and (source / MANIFEST).is_file():
        # Packed already, of a model that its own card names.
        base = there.get("base_model") or ""
    inherited = {key: there[key] for key in _INHERITED if there.get(key)}
    if kind.endswith("ForCausalLM"):
        inherited.setdefault("pipeline_tag", "text-generation")
    formats = sorted({row.config.fmt for row in report.converted if row.config})
    header = ModelCardData(
        **inherited,
        base_model=base or None,
        base_model_relation="quantized" if base else None,
        library_name="transformers" if is_transformers(root) else "fp4pass",
        tags=["fp4pass", *formats, layout],
        quantized_by="fp4pass",
    )
    whole = base or (kind if source is None else source.name)
    made_of = f"[{base}](https://huggingface.co/{base})" if base else f"`{whole}`"
    # Not the name of the folder, which may be given another one.
    title = name.rpartition("/")[2] or f"{whole.rpartition('/')[2]} in {' and '.join(formats)}"
    kinds: dict[object, list[Row]] = {}
    for row in report.converted:
        kinds.setdefault(row.config and (row.config.label, row.config.method_name), []).append(row)
    counts = f"{len(report.converted)} of {len(report.rows)} weights"
    recipe = {k: each for k, each in state.recipe.items() if each not in (None, [], {})}
    lines = [
        f"# {title}\n",
        f"{made_of} in 4-bit floating point. fp4pass {__version__} packed {counts}.\n",
        f"```json\n{json.dumps(recipe, indent=1)}\n```\n",
        *_table(
            ("scheme", "method", "weights", "bits each", "weight error", "output error"),
            map(_group, kinds.values()),
        ),
        "\nErrors are means of |W - Q| / |W|, and of |(W - Q) x| / |W x| on the calibration.\n",
        *_table(
            ("text", "tokens", "perplexity", "KL to the original", "same top token"),
            [_evaluation(text, found) for text, found in evaluations.items()],
        ),
        "",
        *_table(
            ("not packed", "reason"),
            ((str(n), why) for why, n in Counter(r.skip_reason for r in report.skipped).items()),
        ),
        f"\nThe layout is {layout}, {readers}.\n",
    ]
    where = name or "path/to/this/folder"
    call = f'snapshot_download("{name}")' if name else f'"{where}"'
    model = ")" if is_transformers(root) else f", model=model)  # a float {kind}"
    hub = "from huggingface_hub import snapshot_download\n" if name else ""
    lines.append(f"```python\nimport fp4pass\n{hub}\nmodel = fp4pass.load({call}{model}\n```")
    commands = [_COMMANDS[each].format(name=where) for each in readers.names if each in _COMMANDS]
    lines += ["\n```sh", *commands, "```"] if commands else []
    if (folder / _NAME).is_file():
        _log.info("%s: the model card replaces that of %s", _NAME, base or source)
    text = "\n".join(lines)
    card = ModelCard(f"---\n{header.to_yaml()}\n---\n\n{text}\n")
    (folder / _NAME).write_text(str(card), encoding="utf-8")


def _hub_id(root: nn.Module) -> str:
    """Return the id of the repository that a model was read from, "" for a folder."""
    path = Path(str(getattr(root, "name_or_path", "") or ""))
    if "snapshots" in path.parts:
        # A folder of the cache: models--user--name/snapshots/commit.
        stored = path.parts[path.parts.index("snapshots") - 1]
        return stored.removeprefix("models--").replace("--", "/")
    return "" if path.exists() or len(path.parts) != 2 else path.as_posix()


def _header_of(source: Path | None) -> dict[str, Any]:
    """Return what the card of the float model declares, {} if it has none that can be read."""
    if source is None or not (source / _NAME).is_file():
        return {}
    import yaml
    from huggingface_hub import ModelCard

    try:
        text = (source / _NAME).read_text(encoding="utf-8")
        card = ModelCard(text, ignore_metadata_errors=True)
        return dict(card.data.to_dict()) if text.startswith("---") else {}
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        _log.warning("%s: its header cannot be read: %s", source / _NAME, error)
        return {}


def _evaluation(text: str, found: Any) -> tuple[str, ...]:
    kl = "-" if found.kl is None else f"{found.kl:.4f} nats a token"
    top = "-" if found.top1 is None else f"{100 * found.top1:.1f} %"
    return text, f"{found.tokens:,}", f"{found.perplexity:.2f}", kl, top


def _group(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return weights with equal options as a row of a table."""
    config, sizes = rows[0].config, [math.prod(row.shape) for row in rows]
    bits = sum(row.bits * n for row, n in zip(rows, sizes, strict=True)) / sum(sizes)
    errors = ([row.weight_error for row in rows], [row.output_error for row in rows])
    shown = ("", "") if config is None else (config.label, config.method_name)
    return (*shown, str(len(rows)), f"{bits:.2f}", *map(_percent, errors))


def _percent(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * sum(known) / len(known):.2f} %" if len(known) == len(values) else "-"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown, none for a table without rows."""
    cells = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    lines = [header, ["---"] * len(header), *cells] if cells else []
    return [f"| {' | '.join(line)} |" for line in lines]


def require_repository(name: str, token: str | None = None) -> None:
    """Raise OptionError or CheckpointError unless the hub knows who asks for a repository."""
    require("huggingface_hub")
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        wanted = 'the name of a repository, as "user/name"'
        raise OptionError(expected("push_to_hub", wanted, name)) from error
    if token is None and get_token() is None:
        raise CheckpointError(
            f"{as_option('push_to_hub', name)}: no token of Hugging Face was found. Run `hf "
            "auth login`, or set HF_TOKEN. Nothing was written."
        )
    with _asking(name, "Nothing was written. Leave push_to_hub out to write the folder alone."):
        HfApi(token=token).whoami()


def upload(folder: Path, name: str, private: bool | None, token: str | None) -> None:
    """Upload a folder; a repository that does not exist is made. Raises CheckpointError."""
    from huggingface_hub import HfApi

    api = HfApi(token=token, library_name="fp4pass", library_version=__version__)
    with _asking(name, f"The folder is whole: upload it with `hf upload {name} {folder}`."):
        made = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=os.fspath(folder),
            commit_message=f"Upload a model that fp4pass {__version__} quantized",
        )


@contextmanager
def _asking(name: str, remedy: str) -> Iterator[None]:
    """Make what the hub and its library raise a CheckpointError that says what to do."""
    from huggingface_hub.errors import HfHubHTTPError

    # httpx in version 1, httpx2 in version 2; both raise more below it than HfHubHTTPError.
    errors: list[Any] = [base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"]
    try:
        yield
    except (*errors, OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{as_option('push_to_hub', name)}: Hugging Face refuses or cannot be reached: "
            f"{lines[0].rstrip('.'):.300}. {remedy}"
        ) from error
