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
from .rows import Rows
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
    if isinstance(source, Tensor) and source.ndim == 2:
        target.require_text()
        _require_context(source, target)
        return list(source.long())
    name = source.name if isinstance(source, Rows) else "data"
    seq_len = target.fitting(seq_len)
    documents = _documents(source, samples * seq_len, samples, seed)
    pictures = [document for document in documents if document.images]
    plain = [document for document in documents if not document.images]
    windows: list[Example] = []
    if plain:
        target.require_text()
        windows = [*_windows(plain, tokens, seq_len, name, samples)]
    # Of images the rows are chosen before they are read.
    chosen = choose([*pictures, *windows], samples, seed)
    return [
        processed(each, tokens.processor) if isinstance(each, Document) else each for each in chosen
    ]


def _documents(
    source: str | Rows | Tensor, tokens: int, samples: int, seed: int | None
) -> list[Document]:
    if isinstance(source, Rows):
        return source.documents(tokens, samples, seed)
    if isinstance(source, Tensor):
        return [Document(ids=tuple(source.tolist()))]
    documents = [Document(text) for text in split_documents(source)]
    if not documents:
        raise CalibrationError("data: expected text to learn from, got an empty text.")
    return documents


def _windows(
    documents: Sequence[Document], tokens: Tokens, seq_len: int, name: str, samples: int
) -> list[Tensor]:
    known = [document for document in documents if document.ids]
    others = [document for document in documents if not document.ids]
    chats = [document for document in others if tokens.is_chat(document)]
    texts = [document for document in others if not tokens.is_chat(document)]
    whole = [*(list(document.ids) for document in known), *tokens.of_chats(chats)]
    found = [*stream_windows(tokens.of_texts(texts), seq_len), *whole_windows(whole, seq_len)]
    if not found:
        raise CalibrationError(f"{name}: expected text to learn from, got no tokens.")
    if len(found) < samples:
        count, longest = len(found), max(map(len, found))
        _log.info(
            "%s has %s of %s tokens, %s were asked for.",
            *(name, f"{count} window{'s' * (count > 1)}", longest, samples),
        )
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
