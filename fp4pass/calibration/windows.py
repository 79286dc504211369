"""Cut a text into windows of tokens, and say which tokens of each window are scored."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError, ShapeError, as_option, expected, require_number

# The line between two documents of a text; each document starts with the tokenizer's bos token.
_DOCUMENT_LINE = re.compile(r"(?:\r?\n)?^<\|doc\|>(?:\r?\n|\r?\Z)", re.MULTILINE)


@dataclass(frozen=True)
class Window:
    """Tokens that a model reads together."""

    ids: Tensor  # [length] int64
    first: int  # index of the first scored token; all after it are scored too
    units: Tensor  # [length - first] int64, the document or the window of each scored token


@dataclass(frozen=True)
class Windows(Sequence[Window]):
    """The windows of a text, in its order."""

    windows: tuple[Window, ...]
    unit: str  # the unit that the bootstrap resamples: "document" or "window"

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: Any) -> Any:
        return self.windows[i]

    @property
    def longest(self) -> int:
        """The tokens of the longest window."""
        return max(len(window.ids) for window in self.windows)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tokens, of the scored positions, and of their units: 16 hex digits."""
        found = hashlib.sha256()
        for window in self.windows:
            found.update(f"{len(window.ids)} {window.first} ".encode())
            found.update(window.ids.numpy(force=True).tobytes())
            found.update(window.units.numpy(force=True).tobytes())
        return found.hexdigest()[:16]

    def batches(self, size: int) -> Iterator[tuple[Window, ...]]:
        """Yield neighbours of one length, at most `size` together, so that nothing is padded."""
        for _, same in itertools.groupby(self.windows, key=lambda window: len(window.ids)):
            while batch := tuple(itertools.islice(same, size)):
                yield batch


def token_windows(
    tokenizer: Any, text: str | Tensor, *, window: int = 512, windows: int | None = None
) -> Tensor:
    """Cut a text into windows of tokens that do not overlap, and drop the rest at the end.

    Args:
        tokenizer: of transformers; None if `text` is token ids.
        text: a string, whose documents are separated by a line `<|doc|>` and packed into one
            stream, each behind the tokenizer's bos token if it has one; or token ids [tokens]; or
            windows of token ids [n, window].
        window: tokens of a window, at least 2.
        windows: how many to keep, spread evenly over the text; None for all.

    Returns:
        [n, window] int64.

    Raises:
        ShapeError: the text is shorter than a window.
        OptionError: an argument is out of range or of another type.

    Example:
        >>> fp4pass.evaluation.token_windows(None, torch.arange(10), window=4)
        tensor([[0, 1, 2, 3],
                [4, 5, 6, 7]])
    """
    cut = cut_windows(tokenizer, text, window=window, windows=windows)
    return torch.stack([each.ids for each in cut])


def cut_windows(
    tokenizer: Any,
    text: str | Tensor,
    *,
    window: int = 512,
    stride: int | None = None,
    windows: int | None = None,
    within_documents: bool = False,
) -> Windows:
    """Cut a text into windows, in which each token is scored at most once.

    Tokens belong to documents if the text has two or more that are known, else to windows.

    Args:
        tokenizer: as for `token_windows`.
        text: as for `token_windows`.
        window: tokens of a window, at least 2.
        stride: new tokens of each window, None for `window`. With fewer, each scored token but
            those of the first window has at least `window - stride` tokens before it, and the last
            window ends with the text.
        windows: as for `token_windows`.
        within_documents: whether each document is cut by itself: its last window ends with it, and
            a document shorter than `window` is one window.

    Raises:
        ShapeError: the text is shorter than a window.
        OptionError: an argument is out of range or of another type.

    Example:
        >>> cut = fp4pass.evaluation.cut_windows(None, torch.arange(10), window=4, stride=2)
        >>> [window.ids.tolist() for window in cut]
        [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 8, 9]]
    """
    if windows is not None:
        require_number("windows", "at least 1", windows, least=1)
    require_number("window", "at least 2 tokens", window, least=2)
    rows = isinstance(text, Tensor) and text.ndim == 2
    step = window if stride is None else stride
    if stride is not None and rows:
        raise OptionError(expected("stride", "None for a text that is cut already", stride))
    require_number("stride", f"1 to {window}, the window", step, least=1, most=window)
    if within_documents and not isinstance(text, str):
        raise OptionError(
            "within_documents: expected a string, got token ids, whose documents are not known."
        )
    stream, sizes = _stream(tokenizer, text)
    if rows:
        width = stream.shape[1]
        starts = range(0, stream.numel() if width > 1 else 0, width or 1)
        spans = [(i, i + width, i + 1) for i in starts]
    elif step == window and not within_documents:
        spans = [(i, i + window, i + 1) for i in range(0, len(stream) - window + 1, window)]
    else:
        parts = sizes if within_documents else [len(stream)] * (len(stream) >= window)
        begins = itertools.accumulate([0, *parts])
        spans = [
            (begin + start, begin + stop, begin + first)
            for begin, size in zip(begins, parts, strict=False)
            for start, stop, first in _sliding(size, window, step)
        ]
    if not spans:
        held = stream.numel()
        smaller = f" or {as_option('window', held)}" if held >= 2 and not rows else ""
        raise ShapeError(
            f"The text: expected at least {window} tokens, those of a window, got {held}. Give a "
            f"longer text{smaller}."
        )
    if windows is not None and windows < len(spans):
        spans = [spans[i * len(spans) // windows] for i in range(windows)]
    flat = stream.flatten().long()
    if len(sizes) > 1:
        owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        units = [owner[first:stop] for _, stop, first in spans]
    else:
        units = [torch.full((stop - first,), i) for i, (_, stop, first) in enumerate(spans)]
    cut = (
        Window(flat[start:stop], first - start, unit)
        for (start, stop, first), unit in zip(spans, units, strict=True)
    )
    return Windows(tuple(cut), "document" if len(sizes) > 1 else "window")


def scored_bytes(tokenizer: Any, windows: Windows) -> Tensor:
    """Return the bytes of text that the scored tokens of each unit stand for: [units] float64."""
    found = torch.zeros(unit_count(windows), dtype=torch.float64)
    for window in windows:
        ids, units = window.ids.tolist(), window.units
        changes = (units.diff().nonzero().flatten() + 1).tolist()
        bounds = [0, *changes, len(units)]
        texts = tokenizer.batch_decode(
            [ids[: window.first + bound] for bound in bounds],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        # The text of a unit is what a longer prefix of the window adds to a shorter one.
        more = torch.tensor([len(text.encode()) for text in texts]).diff().double()
        found.index_add_(0, units[bounds[:-1]], more)
    return found


def unit_count(windows: Windows) -> int:
    """Return one more than the largest unit."""
    return 1 + max(int(window.units.max()) for window in windows)


def _sliding(tokens: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Return (start, end, first scored token) of the windows of a text; the last ends with it."""
    if tokens < 2:
        return []
    end = min(window, tokens)
    spans = [(0, end, 1)]
    while end < tokens:
        scored, end = end, min(end + stride, tokens)
        # A window scores nothing without a token before it.
        spans.append((end - window, end, max(scored, end - window + 1)))
    return spans


def _stream(tokenizer: Any, text: str | Tensor) -> tuple[Tensor, list[int]]:
    """Return the tokens of a text in its own shape, and the sizes of its documents if known."""
    if isinstance(text, str):
        documents = tokenize(tokenizer, split_documents(text))
        return torch.tensor(list(itertools.chain(*documents))), [len(ids) for ids in documents]
    if not isinstance(text, Tensor) or text.is_floating_point() or text.ndim not in (1, 2):
        kinds = "a string, or an integer tensor of token ids [tokens] or [n, window]"
        got = f"a {type(text).__name__}"
        if isinstance(text, Tensor):
            got = f"a tensor of {text.dtype} {list(text.shape)}"
        raise OptionError(expected("The text", kinds, got))
    return text, []


def split_documents(text: str) -> list[str]:
    """Return the documents of a text, which lines `<|doc|>` separate, without empty ones."""
    documents = _DOCUMENT_LINE.split(text.removesuffix("\n"))
    return [document for document in documents if document.strip()]


def tokenize(tokenizer: Any, documents: list[str]) -> list[list[int]]:
    """Return the token ids of each document, behind bos if the tokenizer has it."""
    if not callable(tokenizer):
        raise OptionError(
            "tokenizer: expected one for a text that is a string, got "
            f"{tokenizer!r}. Or give token ids."
        )
    if not documents:
        raise ShapeError("The text: expected at least one document, got an empty text.")
    # `verbose` would warn of documents longer than the context; they are cut into windows.
    encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    start = () if bos is None else (bos,)
    return [[*start, *ids] for ids in encoded]
