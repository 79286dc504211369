"""Open calibration data of any kind: texts, files, folders, data sets, rows, windows, batches."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from ..checkpoint.float_models import reading, require_hub
from ..core.files import parse_json
from ..errors import CalibrationError, OptionError, expected, some
from .documents import is_chat, is_document, require_columns
from .rows import Rows
from .tokens import Tokens

_log = logging.getLogger(__name__)

_KINDS = "batches, texts, chats, rows, token windows [n, length], a path, or the name of a data set"

_DOCUMENT_LINE = "\n<|doc|>\n"

_SPLITS = ("train", "validation", "test")

# Files of rows, by what `datasets` calls their reader.
_TABLES = {".csv": "csv", ".json": "json", ".parquet": "parquet"}

_FILES = (".txt", ".jsonl", ".md", *_TABLES)

# Files that `save_to_disk` writes: of a data set, or of one for each split.
_SAVED = ("state.json", "dataset_dict.json")


def source_of(data: Any) -> Any:
    """Return calibration data as Rows or token ids [tokens] or [n, length]; batches as they are.

    Of an iterator the first item is read, which tells its kind; of a DataLoader none.

    Raises CalibrationError for other data.
    """
    if isinstance(data, str) and not _is_source(data):
        return Rows.of_text("data", data)
    if isinstance(data, str | os.PathLike):
        return open_source(os.fspath(data))
    if isinstance(data, Tensor):
        if data.is_floating_point() or data.is_complex() or data.ndim not in (1, 2):
            raise _unknown(f"a tensor of {data.dtype} {list(data.shape)}")
        return data
    if isinstance(data, DataLoader):
        return data
    rows = _dataset_rows(data)
    if rows is not None:
        return _by_first(rows.items, rows.name)
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise _unknown(type(data).__name__)
    return Rows("data", [data]) if is_chat(data) else _by_first(data, "data")


def _by_first(items: Any, name: str) -> Any:
    """Return items as Rows if the first of them is a document, else as they are."""
    if hasattr(items, "__getitem__") and hasattr(items, "__len__"):
        first = items[0] if len(items) else None
    else:
        rest = iter(items)
        first = next(rest, None)
        if first is None:
            return ()
        # Read on from here: an iterator cannot begin again.
        items = itertools.chain([first], rest)
    if is_document(first):
        return Rows(name, items)
    if isinstance(first, Mapping) and not _holds_tensor(first):
        plain = (value is None or isinstance(value, str | list | dict) for value in first.values())
        if any(plain):
            require_columns(first, f"{name}, row 0")
    return items


def _holds_tensor(value: object) -> bool:
    """Return whether a tensor is somewhere in a value."""
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)


def _unknown(got: str) -> CalibrationError:
    return CalibrationError(
        f"{expected('data', _KINDS, got)} Put a single batch, or a single row, into a list: "
        "calibrate(model, [batch])."
    )


def _is_source(text: str) -> bool:
    """Return whether a string names a source: a path that exists, or a word as names are."""
    if "\n" in text or not text.strip():
        return False
    like_a_file = Path(text).suffix in _FILES
    return os.path.exists(text) or like_a_file or not any(c.isspace() for c in text)


def open_source(spec: str) -> Rows:
    """Return the rows of a file, a folder or a data set.

    A file is plain text, in which a line `<|doc|>` separates documents, .jsonl with a row in each
    line, or a table that `datasets` reads; a folder is one that `save_to_disk` of `datasets` has
    written, or one of data files; anything else is `name[:config][:split]` of `datasets`.
    """
    path = Path(spec)
    if path.is_file() and path.suffix == ".jsonl":
        return _json_lines(spec)
    if path.is_file() and path.suffix not in _TABLES:
        return Rows.of_text(spec, _read(spec))
    folder, _, split = spec.partition(":")
    is_path = path.suffix in _FILES or path.is_absolute() or spec.startswith(".")
    if is_path and not path.is_file() and not Path(folder).is_dir():
        raise OptionError(f"{spec} does not exist. Expected a file or the name of a dataset.")
    for saved, part in ((path, ""), (Path(folder), split)):
        if any((saved / name).is_file() for name in _SAVED):
            return _saved(spec, saved, part)
    return Rows(spec, _streamed(spec))


def read_text(spec: str, tokens: int | None = None, tokenizer: Any = None) -> str:
    """Return the text of a source, with a line `<|doc|>` between its documents.

    Args:
        spec: as for `open_source`.
        tokens: how many are wanted, None for all; only a data set is read no further.
        tokenizer: of transformers, whose chat template writes chats.
    """
    found = open_source(spec)
    if found.is_text:
        return _read(spec)
    # Of a file, all documents are kept.
    documents = found.documents(tokens if found.numbers is None else None)
    reader = Tokens(tokenizer)
    for document in documents:
        if document.images:
            raise OptionError(f"{document.where}: expected text, got an image.")
    is_plain = not any(document.messages or document.ids for document in documents)
    texts = [document.text or "" if is_plain else reader.text(document) for document in documents]
    found.tell()
    return _DOCUMENT_LINE.join(texts)


def _read(spec: str) -> str:
    try:
        return Path(spec).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{spec} is not text in UTF-8: {error}. Write it in UTF-8, as with iconv -f "
            "ENCODING -t UTF-8; tables are read from .csv, .json and .parquet."
        ) from error


def _json_lines(spec: str) -> Rows:
    rows: dict[int, Any] = {}
    # Not splitlines: a string may hold the other line ends of Unicode.
    for number, line in enumerate(_read(spec).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows[number] = parse_json(line)
            if not isinstance(rows[number], dict):
                raise ValueError
        except ValueError as error:
            raise OptionError(
                f'{spec}, line {number}: expected a row in JSON, as {{"text": "..."}} or '
                f'{{"messages": [...]}}, got {line!r:.80}.'
            ) from error
    return Rows(spec, list(rows.values()), list(rows), Path(spec).parent)


def _dataset_rows(data: Any, name: str = "data") -> Rows | None:
    """Return the rows of an object of `datasets`; of its splits, the first usual one; else None."""
    splits = _splits_of(data)
    if splits is not None:
        split = next((each for each in _SPLITS if each in splits), next(iter(splits), None))
        if split is None:
            raise OptionError(f"{name}: expected a split with rows, got none.")
        _log.info("%s: reads the split %s, of %s.", name, split, some(list(splits), 5))
        data, name = splits[split], f"{name}[{split!r}]"
    return Rows(name, data) if _is_kind(data, "Dataset", "IterableDataset") else None


def _saved(spec: str, folder: Path, split: str) -> Rows:
    """Return the rows of a split, or of all, of a folder by `save_to_disk`."""
    datasets = _datasets(spec)
    with reading(spec, "the dataset"):
        found = datasets.load_from_disk(folder)
    splits = _splits_of(found)
    if split and (splits is None or split not in splits):
        known = "has one split" if splits is None else f"has {some(list(splits), 5)}"
        raise OptionError(f"{spec}: the split {split} does not exist: it {known}.")
    rows = _dataset_rows(found[split] if split else found, spec)
    assert rows is not None
    return rows


def _streamed(spec: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a table, of a folder of data files, or of a data set of the hub."""
    datasets = _datasets(spec)
    is_table = Path(spec).is_file()
    name, *rest = [spec] if is_table else spec.split(":")
    # One word after the name is a split if it is one of the usual.
    is_split = bool(rest) and (len(rest) > 1 or rest[0].partition("[")[0] in _SPLITS)
    options: dict[str, Any] = {"split": rest.pop() if is_split else _SPLITS[0], "streaming": True}
    if len(rest) > 1:
        raise OptionError(f"{spec}: a dataset is name[:config][:split].")
    if is_table:
        options["data_files"], name = name, _TABLES[Path(spec).suffix]
    elif not Path(name).exists():
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        require_hub(name, (cache / name.replace("/", "___")).exists())
    datasets.disable_progress_bars()
    with reading(spec, "the dataset"):
        yield from datasets.load_dataset(name, *rest, **options)


def _datasets(spec: str) -> Any:
    """Return the package `datasets`. Raises OptionError without it."""
    try:
        import datasets
    except ImportError as error:
        what = f"{spec} is no file, and data sets need"
        what = f"{spec} is read by" if Path(spec).exists() else what
        raise OptionError(
            f"{what} datasets, which is not installed: pip install datasets."
        ) from error
    return datasets


def _splits_of(data: Any) -> Mapping[str, Any] | None:
    return data if _is_kind(data, "DatasetDict", "IterableDatasetDict") else None


def _is_kind(data: object, *names: str) -> bool:
    """Return whether an object is of a class of `datasets`, which is not imported to look."""
    datasets = sys.modules.get("datasets")
    kinds = tuple(getattr(datasets, name) for name in names) if datasets is not None else ()
    return isinstance(data, kinds)
