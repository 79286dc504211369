"""Calibration data by the name of a file, a folder, or a data set of `datasets`."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import OptionError, some
from ..float_models import reading, require_hub
from .rows import Rows, Text
from .tokens import Tokens

_log = logging.getLogger(__name__)

_DOCUMENT_LINE = "\n<|doc|>\n"

_SPLITS = ("train", "validation", "test")

# Files of rows, by what `datasets` calls their reader.
_TABLES = {".csv": "csv", ".json": "json", ".parquet": "parquet"}

_FILES = (".txt", ".jsonl", ".md", *_TABLES)

# What `save_to_disk` writes: a data set, or one for each split.
_SAVED = ("state.json", "dataset_dict.json")


def is_source(text: str) -> bool:
    """Return whether a string names a source: a path that exists, or a word as names are.

    Anything else is a text.
    """
    if "\n" in text or not text.strip():
        return False
    like_a_file = Path(text).suffix in _FILES
    return os.path.exists(text) or like_a_file or not any(c.isspace() for c in text)


def open_source(spec: str) -> Text | Rows:
    """Return the text of a file, or the rows of a source.

    A file is plain text, in which a line `<|doc|>` separates documents, .jsonl with a row in each
    line, or a table that `datasets` reads; a folder is one that `save_to_disk` of `datasets` has
    written, or one of data files; anything else is `name[:config][:split]` of `datasets`.
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
        return _json_lines(spec, text) if path.suffix == ".jsonl" else Text(spec, text)
    like_a_file = path.suffix in _FILES
    folder, _, split = spec.partition(":")
    if not path.is_file() and (like_a_file or path.is_absolute() or spec.startswith(".")):
        if not Path(folder).is_dir():
            raise OptionError(f"{spec} does not exist. Expected a file or the name of a dataset.")
    for saved, part in ((path, ""), (Path(folder), split)):
        if any((saved / name).is_file() for name in _SAVED):
            return _saved(spec, saved, part)
    return Rows(spec, _dataset_rows(spec))


def read_text(spec: str, tokens: int | None = None, tokenizer: Any = None) -> str:
    """Return the text of a source, with a line `<|doc|>` between its documents.

    Args:
        spec: as for `open_source`.
        tokens: how many are wanted, None for all; only a data set is read no further.
        tokenizer: of transformers, whose chat template writes chats.
    """
    found = open_source(spec)
    if isinstance(found, Text):
        return found.text
    # Of a file, all documents are kept.
    documents, columns = found.documents(tokens if found.numbers is None else None)
    reader = Tokens(tokenizer)
    for document in documents:
        if document.images:
            raise OptionError(f"{document.where}: expected text, got an image.")
    is_plain = not any(document.messages or document.ids for document in documents)
    texts = [document.text or "" if is_plain else reader.text(document) for document in documents]
    if columns:
        _log.info("%s", columns)
    return _DOCUMENT_LINE.join(texts)


def dataset_rows(data: Any, name: str = "data") -> Rows | None:
    """Return the rows of an object of `datasets`; of its splits, the first usual one; else None."""
    splits = _splits_of(data)
    if splits is not None:
        split = next((each for each in _SPLITS if each in splits), next(iter(splits), None))
        if split is None:
            raise OptionError(f"{name}: expected a split with rows, got none.")
        _log.info("%s: reads the split %s, of %s.", name, split, some(list(splits), 5))
        data, name = splits[split], f"{name}[{split!r}]"
    return Rows(name, data) if _is_dataset(data) else None


def _json_lines(spec: str, text: str) -> Rows:
    rows, numbers = [], []
    # Not splitlines: what else Unicode calls the end of a line may stand in a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError
        except ValueError as error:
            raise OptionError(
                f'{spec}, line {number}: expected a row in JSON, as {{"text": "..."}} or '
                f'{{"messages": [...]}}, got {line!r:.80}.'
            ) from error
        rows.append(row)
        numbers.append(number)
    return Rows(spec, rows, numbers, Path(spec).parent)


def _saved(spec: str, folder: Path, split: str) -> Rows:
    datasets = _datasets(spec)
    with reading(spec, "the dataset"):
        found = datasets.load_from_disk(folder)
    splits = _splits_of(found)
    if split and (splits is None or split not in splits):
        known = "has one split" if splits is None else f"has {some(list(splits), 5)}"
        raise OptionError(f"{spec}: the split {split} does not exist: it {known}.")
    rows = dataset_rows(found[split] if split else found, spec)
    assert rows is not None
    return rows


def _dataset_rows(spec: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a data set, streamed."""
    datasets = _datasets(spec)
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
        yield from datasets.load_dataset(name, *rest, **options)


def _datasets(spec: str) -> Any:
    """The package `datasets`. Raises OptionError without it."""
    try:
        import datasets
    except ImportError as error:
        what = (
            f"{spec} is read by"
            if Path(spec).exists()
            else f"{spec} is no file, and data sets need"
        )
        raise OptionError(
            f"{what} datasets, which is not installed: pip install datasets."
        ) from error
    return datasets


def _is_dataset(data: object) -> bool:
    """Whether an object is a data set of `datasets`, which is not imported for it."""
    return _is_kind(data, ("Dataset", "IterableDataset"))


def _splits_of(data: Any) -> Mapping[str, Any] | None:
    return data if _is_kind(data, ("DatasetDict", "IterableDatasetDict")) else None


def _is_kind(data: object, names: tuple[str, ...]) -> bool:
    datasets = sys.modules.get("datasets")
    kinds = tuple(getattr(datasets, name) for name in names) if datasets is not None else ()
    return isinstance(data, kinds)
