"""Models, tokenizers and texts by what a command line calls them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.float_models import load_float, reading, require_hub
from ..checkpoint.loading import load
from ..checkpoint.reader import is_packed
from ..core.devices import require_device
from ..errors import OptionError, expected
from ..evaluation import token_windows
from ..evaluation.computing import IN_FLOAT32, is_slow
from .screen import note

# A dataset is read until it has this many characters for each token that is wanted: four or five
# are usual, and windows are spread over what is left.
_CHARACTERS = 16

_DOCUMENT_LINE = "\n<|doc|>\n"


_SPLITS = ("train", "validation", "test")

# Files of rows, by what `datasets` calls their reader.
_TABLES = {".csv": "csv", ".json": "json", ".parquet": "parquet"}


def choose_device(name: str | None) -> str:
    """A device that is there: "auto" spreads a model over all, None is a GPU if there is one."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "auto":
        require_device(name, "--device ")
    return name


def choose_dtype(name: str) -> torch.dtype | str:
    """A float dtype by its name, or "auto"."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto" and name not in known:
        raise OptionError(f"--dtype {name} does not exist. Known: auto, {', '.join(known)}.")
    return known.get(name, name)


def quiet() -> None:
    """Keep what transformers and the hub print off the screen."""
    import huggingface_hub
    import transformers

    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def load_any(source: str, device: str, trust: bool = False) -> nn.Module:
    """The model of a folder with packed weights, or a float model."""
    if is_packed(source):
        quiet()
        with reading(source, "the model"):
            return load(source, device_map=device)
    return load_float(source, "auto", device, trust)


def note_dtype(what: str, *models: nn.Module | None) -> None:
    """Say so if one of the models computes in another dtype than that of its weights."""
    if any(model is not None and is_slow(model) for model in models):
        note(f"{what} {IN_FLOAT32}")


def read_text(spec: str, tokens: int | None = None) -> str:
    """The text of a file, or of `name[:config][:split]` of `datasets`.

    A file is plain text, in which a line `<|doc|>` separates documents, .jsonl with a "text" in
    each line, or a table that `datasets` reads. tokens: how many are wanted, None for all; only
    what `datasets` reads is read no further.
    """
    path = Path(spec)
    if path.is_file() and path.suffix not in _TABLES:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise OptionError(
                f"{spec} is not text in UTF-8: {error}. Write it in UTF-8, as with iconv -f "
                "ENCODING -t UTF-8; tables are read from .csv, .json and .parquet."
            ) from error
        return _DOCUMENT_LINE.join(_json_lines(spec, text)) if path.suffix == ".jsonl" else text
    like_a_file = path.suffix in (".txt", ".jsonl", ".md", *_TABLES)
    if not path.is_file() and (like_a_file or path.is_absolute() or spec.startswith(".")):
        if not Path(spec.partition(":")[0]).is_dir():
            raise OptionError(f"{spec} does not exist. Expected a file or the name of a dataset.")
    return _DOCUMENT_LINE.join(_dataset_texts(spec, tokens))


def _json_lines(spec: str, text: str) -> Iterator[str]:
    # Not splitlines: what else Unicode calls the end of a line may stand in a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
            if not isinstance(document, str | None):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(
                f'{spec}, line {number}: no JSON with a "text", as {{"text": "..."}}.'
            ) from error
        if document is not None:
            yield document


def _dataset_texts(spec: str, tokens: int | None) -> Iterator[str]:
    """The text of the rows of a dataset, streamed."""
    try:
        import datasets
    except ImportError as error:
        raise OptionError(
            f"{spec} is no file, and datasets are read by datasets: pip install 'fp4pass[cli]'."
        ) from error
    is_table = Path(spec).is_file()
    name, *rest = [spec] if is_table else spec.split(":")
    # One word after the name is a split if it is one of the usual.
    is_split = bool(rest) and (len(rest) > 1 or rest[0].partition("[")[0] in _SPLITS)
    split = rest.pop() if is_split else _SPLITS[0]
    if len(rest) > 1:
        raise OptionError(f"{spec}: a dataset is name[:config][:split].")
    options: dict[str, Any] = {"split": split, "streaming": True}
    if is_table:
        options["data_files"], name = name, _TABLES[Path(spec).suffix]
    elif not Path(name).exists():
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        require_hub(name, (cache / name.replace("/", "___")).exists())
    datasets.disable_progress_bars()
    with reading(spec, "the dataset"):
        rows = iter(datasets.load_dataset(name, *rest, **options))
        first = next(rows, None)
        if first is None:
            raise OptionError(f"{spec} has no rows.")
        columns = [column for column, value in first.items() if isinstance(value, str)]
        if not columns:
            raise OptionError(f"{spec} has no column of text, only {', '.join(first)}.")
        column = "text" if "text" in columns else columns[0]
        if len(columns) > 1 and column != "text":
            note(f"{spec} has no column 'text': {column!r} is read, of {', '.join(columns)}.")
        characters = 0
        for row in itertools.chain([first], rows):
            text = str(row[column] or "")
            yield text
            characters += len(text)
            if tokens is not None and characters >= _CHARACTERS * tokens:
                return


def require_windows(**options: int) -> None:
    """Raise OptionError for tokens of a window and, after them, windows that are too few."""
    for (name, value), least in zip(options.items(), (2, 1), strict=True):
        if value < least:
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(expected(flag, f"at least {least}", value))


def choose_windows(
    tokenizer: Any, spec: str, *, window: int, windows: int, seed: int | None = None
) -> Tensor:
    """Windows [windows, window] of a text, spread evenly or, with a seed, drawn at random."""
    ids = token_windows(tokenizer, read_text(spec, window * windows), window=window)
    if len(ids) < windows:
        note(f"{spec} has {len(ids)} windows of {window} tokens, {windows} were asked for.")
    if seed is None:
        return token_windows(tokenizer, ids, windows=windows)
    generator = torch.Generator().manual_seed(seed)
    return ids[torch.randperm(len(ids), generator=generator)[:windows]]
