"""Windows of tokens, and what a processor makes of images, out of any calibration data."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from ..errors import CalibrationError, ShapeError
from .collate import Example
from .data import Source
from .documents import Document
from .images import processed
from .packing import choose, stream_windows, whole_windows
from .rows import Documents, Rows, Text
from .target import Target
from .tokens import Tokens
from .windows import split_documents

_log = logging.getLogger(__name__)


def examples(
    source: Source,
    tokens: Tokens,
    target: Target,
    *,
    samples: int,
    seq_len: int,
    seed: int | None = None,
) -> list[Example]:
    """Return what a model runs on, an example each: at most `samples`, but for token windows.

    Args:
        source: as `source_of` returns it.
        tokens: makes tokens of documents.
        target: the model.
        samples: how many windows, or rows with images, are wanted.
        seq_len: tokens of a window.
        seed: draw them at random; None spreads them evenly.

    Raises:
        CalibrationError: there is nothing to learn from, or a document is not as expected.
        OptionError: the model needs more than text.
    """
    if isinstance(source, Tensor):
        target.require_text()
        if source.ndim == 2:
            _require_context(source, target)
            return list(source.long())
        return choose(_of_ids(source, target.fitting(seq_len)), samples, seed)
    name, seq_len = source.name, target.fitting(seq_len)
    documents, columns = _documents(source, samples * seq_len, samples, seed)
    pictures = [document for document in documents if document.images]
    plain = [document for document in documents if not document.images]
    windows: list[Example] = []
    if plain:
        target.require_text()
        windows = [*_windows(plain, tokens, seq_len, name)]
    # Of images the rows are chosen before they are read.
    chosen = choose([*pictures, *windows], samples, seed)
    made = [
        processed(each, tokens.processor) if isinstance(each, Document) else each for each in chosen
    ]
    # What is wrong is said alone.
    if columns:
        _log.info("%s", columns)
    if len(made) < samples:
        what = "rows with images" if pictures else f"windows of up to {seq_len} tokens"
        _log.info("%s has %s %s, %s were asked for.", name, len(made), what, samples)
    return made


def _documents(source: Text | Rows, tokens: int, samples: int, seed: int | None) -> Documents:
    if isinstance(source, Rows):
        return source.documents(tokens, samples, seed)
    documents = [Document(text, where=source.name) for text in split_documents(source.text)]
    if not documents:
        raise CalibrationError(f"{source.name}: expected text to learn from, got an empty text.")
    return Documents(documents)


def _of_ids(ids: Tensor, seq_len: int) -> list[Tensor]:
    found = stream_windows([ids.tolist()], seq_len)
    if not found:
        raise CalibrationError("data: expected token ids [tokens], got none.")
    return found


def _windows(
    documents: Sequence[Document], tokens: Tokens, seq_len: int, name: str
) -> list[Tensor]:
    known = [document for document in documents if document.ids]
    others = [document for document in documents if not document.ids]
    chats = [document for document in others if tokens.is_chat(document)]
    texts = [document for document in others if not tokens.is_chat(document)]
    whole = [*(list(document.ids) for document in known), *tokens.of_chats(chats)]
    found = [*stream_windows(tokens.of_texts(texts), seq_len), *whole_windows(whole, seq_len)]
    if not found:
        raise CalibrationError(f"{name}: expected text to learn from, got no tokens.")
    return found


def _require_context(windows: Tensor, target: Target) -> None:
    if not windows.numel():
        raise CalibrationError(f"data: expected token windows, got {list(windows.shape)}.")
    if target.context is not None and windows.shape[1] > target.context:
        raise ShapeError(
            f"data: windows have {windows.shape[1]} tokens, but the context of the model is "
            f"{target.context}. Cut them: data.reshape(-1, {target.context}), or give token ids "
            "[tokens] and seq_len."
        )
