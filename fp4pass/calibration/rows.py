"""Read calibration data of any kind as documents: texts, chats, images and token ids."""

from __future__ import annotations

import itertools
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
from ..errors import CalibrationError, OptionError, expected
from .processor import Document, Processor
from .windows import split_documents

_KINDS = "batches, texts, chats, rows, token windows [n, length], a path, or the name of a data set"

# Rows are read until they have this many characters for each token to read: four or five
# are usual, and windows are spread over what is left.
_CHARACTERS = 16

# About the golden ratio: steps of it spread a range however many they are.
_STEP = 0.618

_SPLITS = ("train", "validation", "test")

# Files of rows, by what `datasets` calls their reader.
_TABLES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}

_FILES = (".txt", ".md", *_TABLES)

# The columns of a row, in the order in which they are looked for: the first that it has is read,
# a question with its answer, and images beside it.
_CHATS = ("messages", "conversations")
_TEXTS = ("text", "content")
_QUESTIONS = ("prompt", "question", "instruction")
_CONTEXTS = ("input", "context")
_ANSWERS = ("response", "completion", "answer", "output")
_IMAGES = ("images", "image")

_LOOKED_FOR = (
    f"input_ids; {', '.join(_CHATS)}, lists of role and content; {', '.join(_TEXTS)}; one of "
    f"{', '.join(_QUESTIONS)} with one of {', '.join(_ANSWERS)}; images; or one column of strings"
)

# The roles of ShareGPT, whose messages have "from" and "value", by those of chat templates.
_ROLES = {"human": "user", "gpt": "assistant"}

# The mark of an image in texts of data sets; images stand before the text here.
_IMAGE_MARK = "<image>"


@dataclass(frozen=True)
class Rows:
    """Items of calibration data, by the name of their source."""

    name: str
    items: Iterable[Any]  # texts, chats, rows or lists of tokens
    is_text: bool = False  # the items are documents of one text; all are read

    def documents(
        self, tokens: int | None, examples: int = 0, seed: int | None = None
    ) -> list[Document]:
        """Return documents of the items in their order, as many as are enough."""
        # That is for `tokens` of text, or `examples` with images; None for all. From a longer
        # sequence items are taken evenly or, with a seed, at random; from an iterable the first.
        found: dict[int, Document] = {}
        characters = images = 0
        for i, item in self._visited(tokens, seed):
            document = document_of(item, self.name if self.is_text else f"{self.name}, row {i}")
            if not document:
                continue
            found[i] = document
            images += document.has_images
            characters += 0 if document.has_images else document.characters
            enough = tokens is not None and characters >= _CHARACTERS * tokens
            if not self.is_text and (enough or (examples and images >= examples)):
                break
        if not found:
            raise CalibrationError(f"{self.name}: expected text to learn from, got none.")
        return [found[i] for i in sorted(found)]

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


def document_of(item: Any, where: str) -> Document:
    """Return the document of an item, empty if its columns hold None. Raises CalibrationError."""
    if isinstance(item, str):
        return Document(item, where=where)
    if _is_chat(item):
        return _chat(item, where)
    if isinstance(item, Mapping):
        return _row_document(item, where)
    ids = _as_ids(item)
    if ids is None:
        kinds = "a text, a chat, a row or a list of token ids"
        raise CalibrationError(expected(where, kinds, type(item).__name__))
    return Document(ids=ids, where=where)


def _columns(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns that a row is read by, () if it has none that are known."""

    def first(*names: str) -> tuple[str, ...]:
        return tuple(name for name in names if name in row)[:1]

    # Tokens of a row that a processor has made go with its pixels, as a batch.
    if "pixel_values" in row:
        return ()
    found = first("input_ids", *_CHATS, *_TEXTS)
    if not found and (asked := first(*_QUESTIONS)) and (answer := first(*_ANSWERS)):
        found = (*asked, *first(*_CONTEXTS), *answer)
    if not found and len(row) == 1 and isinstance(next(iter(row.values())), str):
        found = tuple(row)
    return found


def _row_document(row: Mapping[str, Any], where: str) -> Document:
    columns = _columns(row)
    images = next((row[name] for name in _IMAGES if row.get(name) is not None), ())
    images = tuple(images) if isinstance(images, list | tuple) else (images,)
    if not columns and not any(name in row for name in _IMAGES):
        shown = ", ".join(f"{key} ({type(value).__name__})" for key, value in row.items())
        raise CalibrationError(
            f"{where}: expected columns that hold text, got {shown or 'none'}. Looked for: "
            f"{_LOOKED_FOR}. Rename the columns, or give the texts themselves as a list."
        )
    given = {name: row[name] for name in columns if row[name] is not None}

    def require(fits: bool, name: str, wanted: str) -> None:
        if not fits:
            got = f"{type(given[name]).__name__} {given[name]!r:.80}"
            raise CalibrationError(
                f"{where}: {name}: expected {wanted}, got {got}. Correct it, or leave the row out."
            )

    if "input_ids" in given:
        ids = _as_ids(given["input_ids"]) or ()
        require(bool(ids), "input_ids", "a list of integers")
        return Document(ids=ids, where=where)
    for name in given.keys() & _CHATS:
        chat = _parsed(given[name])
        require(_is_chat(chat), name, "a list of messages")
        return _chat(chat, where, _parsed(row.get("tools")) or (), images)
    for name, part in given.items():
        require(isinstance(part, str), name, "a string")
    *asked, answer = given.values() if given else ("",)
    if asked:
        question = "\n\n".join(filter(None, asked))
        pair = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
        return _chat(pair, where, (), images, f"{question}\n{answer}")
    if images:
        return _chat([{"role": "user", "content": answer}], where, (), images)
    return Document(answer, where=where)


def _chat(
    chat: Iterable[Mapping[str, Any]],
    where: str,
    tools: Sequence[Any] = (),
    images: Sequence[Any] = (),
    text: str | None = None,
) -> Document:
    """Return the document of a chat, with images where it has places for them, or in front."""
    # Rows of a table have None where a message lacks what others have.
    messages: list[dict[str, Any]] = list(map(_without_none, chat))
    left, places = list(images), 0
    for message in messages:
        if "role" not in message:
            message["role"] = _ROLES.get(message["from"], message.pop("from"))
        content = message.pop("value", None) or message.get("content", "")
        if isinstance(content, str):
            message["content"] = content.replace(_IMAGE_MARK, "").strip("\n") if images else content
            continue
        message["content"] = parts = [dict(part) for part in content]
        for part in parts:
            if part.get("type") == "image_url":
                url = part.pop("image_url")
                part |= {"type": "image", "url": url["url"] if isinstance(url, Mapping) else url}
            if part.get("type") == "image":
                places += 1
                if len(part) == 1 and left:
                    part["image"] = left.pop(0)
                elif len(part) == 1:
                    raise CalibrationError(
                        f"{where}: a message with a place for an image, but no image is left for "
                        'it. Give it as {"type": "image", "image": ...}, or in a column image.'
                    )
    if left:
        first = next((each for each in messages if each["role"] == "user"), messages[0])
        own = first["content"]
        own = [{"type": "text", "text": own}] * bool(own) if isinstance(own, str) else own
        first["content"] = [*({"type": "image", "image": each} for each in left), *own]
    schemas = tuple(map(_without_none, tools))
    return Document(text, tuple(messages), schemas, (), bool(left or places), where)


def _parsed(value: Any) -> Any:
    """Return a list with the objects that `datasets` holds as JSON where they differ."""
    try:
        is_list = isinstance(value, list)
        return [parse_json(x) if isinstance(x, str) else x for x in value] if is_list else value
    except ValueError:
        return value


def _is_chat(value: object) -> bool:
    """Return whether a value is a list of messages; one that calls tools may have no content."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(each, Mapping) and ("role" in each or "from" in each) for each in value)
    )


def _as_ids(value: Any) -> tuple[int, ...] | None:
    """Return token ids of a list of integers or an integer array [tokens]; None for others."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    is_list = isinstance(listed, list | tuple) and (bool(listed) or listed is not value)
    return tuple(listed) if is_list and all(type(each) is int for each in listed) else None


def _without_none(value: Any) -> Any:
    """Return a value without each None in it, as rows of a table have them."""
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_without_none(each) for each in value]
    return value


def source_of(data: Any) -> Any:
    """Return calibration data as Rows or token ids [tokens] or [n, length]; batches as they are."""
    # The first item of an iterator tells its kind; none is read of a DataLoader.
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
    # Nobody has an object of `datasets` where the package is not imported.
    datasets: Any = sys.modules.get("datasets")
    if datasets is not None:
        if isinstance(data, datasets.DatasetDict | datasets.IterableDatasetDict):
            data = data[next(each for each in (*_SPLITS, *data) if each in data)]
        if isinstance(data, datasets.Dataset | datasets.IterableDataset):
            return Rows("data", data)
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise _unknown(type(data).__name__)
    return Rows("data", [data]) if _is_chat(data) else _by_first(data)


def _is_sequence(items: Any) -> bool:
    # Rows of `datasets` have an order and a length, and are no sequences by their class.
    return hasattr(items, "__getitem__") and hasattr(items, "__len__")


def _by_first(items: Any) -> Any:
    """Return items as Rows if the first of them is a document, else as they are."""
    if _is_sequence(items):
        first = items[0] if len(items) else None
    else:
        rest = iter(items)
        first = next(rest, None)
        # Read on from here: an iterator cannot begin again.
        items = () if first is None else itertools.chain([first], rest)
    if isinstance(first, Mapping):
        others = [value for name, value in first.items() if name not in _IMAGES]
        is_batch = any(isinstance(each, Tensor) and each.ndim != 1 for each in others)
        known = bool(_columns(first)) or len(others) < len(first)
        is_rows = not is_batch and (known or any(isinstance(each, str) for each in others))
    else:
        is_ids = isinstance(first, list) and _as_ids(first) is not None
        is_rows = isinstance(first, str) or is_ids or _is_chat(first)
    return Rows("data", items) if is_rows else items


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
    """Return the rows of a file, a folder or a data set."""
    # A file is a table that `datasets` reads, by its suffix, or plain text, in which a line
    # `<|doc|>` separates documents; anything else is `name[:config][:split]` of `datasets`, whose
    # name may be a folder.
    path = Path(spec)
    if path.is_file() and path.suffix not in _TABLES:
        return Rows(spec, split_documents(_read(path)), is_text=True)
    name, *rest = [spec] if path.is_file() else spec.split(":")
    is_path = path.suffix in _FILES or path.is_absolute() or spec.startswith(".")
    if is_path and not Path(name).exists():
        raise OptionError(f"{spec} does not exist. Expected a file or the name of a dataset.")
    if len(rest) > 2:
        raise OptionError(f"{spec}: a dataset is name[:config][:split].")
    try:
        import datasets
    except ImportError as error:
        raise OptionError(
            f"{spec} is read by datasets, which is not installed: pip install datasets."
        ) from error
    # One word after the name is a split if it is one of the usual.
    is_split = bool(rest) and (len(rest) > 1 or rest[0].partition("[")[0] in _SPLITS)
    options: dict[str, Any] = {"split": rest.pop() if is_split else _SPLITS[0], "streaming": True}
    if path.is_file():
        options["data_files"], name = spec, _TABLES[path.suffix]
    elif not Path(name).exists():
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        require_hub(name, (cache / name.replace("/", "___")).exists())
    datasets.disable_progress_bars()
    with reading(spec, "the dataset"):
        rows = datasets.load_dataset(name, *rest, **options)
    read = _streamed(spec, rows)
    # Whole, so that what is taken of it is spread over all.
    return Rows(spec, list(read) if options.get("data_files") and name == "json" else read)


def _streamed(spec: str, rows: Iterable[Any]) -> Iterator[Any]:
    with reading(spec, "the dataset"):
        yield from rows


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{path} is not text in UTF-8: {error}. Write it in UTF-8, as with iconv -f "
            "ENCODING -t UTF-8; tables are read from .csv, .json, .jsonl and .parquet."
        ) from error


def read_text(spec: str, tokens: int | None = None, tokenizer: Any = None) -> str:
    """Return the text of a source, with a line `<|doc|>` between its documents."""
    # A data set is read as far as `tokens` are wanted; the chat template of `tokenizer` writes
    # chats.
    found, is_file = open_source(spec), Path(spec).is_file()
    if found.is_text:
        return _read(Path(spec))
    documents = found.documents(None if is_file else tokens)
    for document in documents:
        if document.has_images:
            raise OptionError(f"{document.where}: expected text, got an image.")
    is_plain = not any(document.messages or document.ids for document in documents)
    reader = Processor(tokenizer)
    texts = [document.text or "" if is_plain else reader.text(document) for document in documents]
    return "\n<|doc|>\n".join(texts)
