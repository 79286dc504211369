"""Open calibration data of any kind, and read its rows one after the other as documents."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..checkpoint.float_models import reading, require_hub
from ..core.files import parse_json
from ..errors import CalibrationError, OptionError, expected, some
from .documents import (
    Document,
    as_ids,
    chat_document,
    document_of,
    is_chat,
    is_document,
    require_columns,
)
from .processor import Processor
from .windows import split_documents

_log = logging.getLogger(__name__)

_KINDS = "batches, texts, chats, rows, token windows [n, length], a path, or the name of a data set"

# Rows are read until they have this many characters for each token to read: four or five
# are usual, and windows are spread over what is left.
_CHARACTERS = 16

# About the golden ratio: steps of it spread over a range however many they are.
_STEP = 0.618

_SPLITS = ("train", "validation", "test")

# Files of rows, by what `datasets` calls their reader.
_TABLES = {".csv": "csv", ".json": "json", ".parquet": "parquet"}

_FILES = (".txt", ".jsonl", ".md", *_TABLES)


@dataclass(frozen=True)
class Rows:
    """Items of calibration data, by the name of their source."""

    name: str
    items: Iterable[Any]  # texts, chats, rows or lists of tokens
    numbers: Sequence[int] | None = None  # the line of each item in a file, if it has lines
    folder: Path | None = None  # where images lie that an item names by a relative path
    is_text: bool = False  # the items are documents of one text; all are read

    def documents(
        self, tokens: int | None, examples: int = 0, seed: int | None = None
    ) -> list[Document]:
        """Return documents of the items in their order, as many as are enough.

        That is for `tokens` of text, or `examples` with images; None for all. From a longer
        sequence items are taken evenly or, with a seed, at random; from an iterable the first.
        """
        columns: dict[tuple[str, ...], tuple[str, ...]] = {}
        found: dict[int, Document] = {}
        characters = seen = images = 0
        for i, item in self._visited(tokens, seed):
            seen += 1
            document = self._document(item, self._where(i), columns)
            if not document:
                continue
            found[i] = document
            images += bool(document.images)
            characters += 0 if document.images else document.characters
            enough = tokens is not None and characters >= _CHARACTERS * tokens
            if not self.is_text and (enough or (examples and images >= examples)):
                break
        if not found:
            what = f"{seen} rows without text" if seen else "no rows"
            what = "an empty text" if self.is_text else what
            raise CalibrationError(f"{self.name}: expected text to learn from, got {what}.")
        for names, read in itertools.islice(columns.items(), 1):
            others = f", of {', '.join(names)}" if len(names) > len(read) else ""
            _log.info("%s: reads %s%s.", self.name, " + ".join(read), others)
        return [found[i] for i in sorted(found)]

    def _where(self, i: int) -> str:
        if self.is_text:
            return self.name
        line = f"row {i}" if self.numbers is None else f"line {self.numbers[i]}"
        return f"{self.name}, {line}"

    def _visited(self, tokens: int | None, seed: int | None) -> Iterator[tuple[int, Any]]:
        """Yield items with their indices, so that the first of them are spread over all."""
        items: Any = self.items
        if self.is_text or not _is_sequence(items) or tokens is None:
            yield from enumerate(items)
            return
        count = len(items)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            order: Iterable[int] = torch.randperm(count, generator=generator).tolist()
        else:
            step = max(1, round(_STEP * count))
            while math.gcd(step, count) > 1:
                step += 1
            order = (i * step % count for i in range(count))
        for i in order:
            yield i, items[i]

    def _document(
        self, item: Any, where: str, known: dict[tuple[str, ...], tuple[str, ...]]
    ) -> Document:
        """Return the document of an item; known: the columns that are read, by those of a row."""
        if isinstance(item, str):
            return Document(item, where=where)
        if is_chat(item):
            return chat_document(item, where)
        if not isinstance(item, Mapping):
            ids = as_ids(item)
            if ids is None:
                kinds = "a text, a chat, a row or a list of token ids"
                raise CalibrationError(expected(where, kinds, type(item).__name__))
            return Document(ids=ids, where=where)
        # By its names alone: what one row holds, the next one may lack.
        names = tuple(item)
        if names not in known:
            known[names] = require_columns(item, where)
        document = document_of(item, known[names], where)
        return dataclasses.replace(document, images=tuple(map(self._beside, document.images)))

    def _beside(self, image: Any) -> Any:
        """Return the path of an image that lies in the folder, others as they are."""
        if self.folder is None or not isinstance(image, str) or os.path.exists(image):
            return image
        path = self.folder / image
        return str(path) if path.is_file() else image


def source_of(data: Any) -> Any:
    """Return calibration data as Rows or token ids [tokens] or [n, length]; batches as they are.

    Of an iterator the first item is read, which tells its kind; of a DataLoader none.

    Raises CalibrationError for other data.
    """
    if isinstance(data, str) and not _is_source(data):
        return Rows("data", split_documents(data), is_text=True)
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


def _is_sequence(items: Any) -> bool:
    # Rows of `datasets` have an order and a length, and are no sequences by their class.
    return hasattr(items, "__getitem__") and hasattr(items, "__len__")


def _by_first(items: Any, name: str) -> Any:
    """Return items as Rows if the first of them is a document, else as they are."""
    if _is_sequence(items):
        first = items[0] if len(items) else None
    else:
        rest = iter(items)
        first = next(rest, None)
        # Read on from here: an iterator cannot begin again.
        items = () if first is None else itertools.chain([first], rest)
    if is_document(first):
        return Rows(name, items)
    if isinstance(first, Mapping) and not _holds_tensor(first):
        plain = (value is None or isinstance(value, str | list | dict) for value in first.values())
        if any(plain):
            require_columns(first, f"{name}, row 0")
    return items


def _holds_tensor(value: object) -> bool:
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
    line, or a table; anything else is `name[:config][:split]` of `datasets`, whose name may be a
    folder.
    """
    path = Path(spec)
    if path.is_file() and path.suffix == ".jsonl":
        return _json_lines(spec)
    if path.is_file() and path.suffix not in _TABLES:
        return Rows(spec, split_documents(_read(spec)), is_text=True)
    is_path = path.suffix in _FILES or path.is_absolute() or spec.startswith(".")
    if is_path and not path.is_file() and not Path(spec.partition(":")[0]).is_dir():
        raise OptionError(f"{spec} does not exist. Expected a file or the name of a dataset.")
    rows = _dataset_rows(_loaded(spec), spec)
    assert rows is not None, "datasets loads data sets"
    if _is_sequence(rows.items):
        return rows
    return dataclasses.replace(rows, items=_streamed(spec, rows.items))


def _streamed(spec: str, rows: Iterable[Any]) -> Iterator[Any]:
    with reading(spec, "the dataset"):
        yield from rows


def read_text(spec: str, tokens: int | None = None, tokenizer: Any = None) -> str:
    """Return the text of a source, with a line `<|doc|>` between its documents.

    A data set is read as far as `tokens` are wanted; the chat template of `tokenizer` writes chats.
    """
    found = open_source(spec)
    if found.is_text:
        return _read(spec)
    # Of a file, all documents are kept.
    documents = found.documents(tokens if found.numbers is None else None)
    for document in documents:
        if document.images:
            raise OptionError(f"{document.where}: expected text, got an image.")
    is_plain = not any(document.messages or document.ids for document in documents)
    reader = Processor(tokenizer)
    texts = [document.text or "" if is_plain else reader.text(document) for document in documents]
    return "\n<|doc|>\n".join(texts)


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
    # Nobody has such an object where the package is not imported.
    datasets: Any = sys.modules.get("datasets")
    if datasets is None:
        return None
    if isinstance(data, datasets.DatasetDict | datasets.IterableDatasetDict):
        split = next((each for each in (*_SPLITS, *data) if each in data), None)
        if split is None:
            raise OptionError(f"{name}: expected a split with rows, got none.")
        _log.info("%s: reads the split %s, of %s.", name, split, some(list(data), 5))
        data, name = data[split], f"{name}[{split!r}]"
    is_rows = isinstance(data, datasets.Dataset | datasets.IterableDataset)
    return Rows(name, data) if is_rows else None


def _loaded(spec: str) -> Any:
    """Return what `datasets` loads by a name: a table, a folder, or a data set of the hub."""
    try:
        import datasets
    except ImportError as error:
        what = f"{spec} is no file, and data sets need"
        what = f"{spec} is read by" if Path(spec).exists() else what
        raise OptionError(
            f"{what} datasets, which is not installed: pip install datasets."
        ) from error
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
        if any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
            # A folder by `save_to_disk`.
            found, split = datasets.load_from_disk(name), spec.partition(":")[2]
            if split and (not isinstance(found, dict) or split not in found):
                raise OptionError(f"{spec}: the split {split} does not exist.")
            return found[split] if split else found
        return datasets.load_dataset(name, *rest, **options)
