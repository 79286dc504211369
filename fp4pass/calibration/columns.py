"""Which columns of a row hold calibration data, and the document that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import CalibrationError
from .documents import Document, as_ids, chat_in, decoded, is_chat, messages_of, without_none

Row = Mapping[str, Any]

# What a row is read by, in this order, where all of it is there.
_CHATS = ("messages", "conversations", "conversation")
_TEXTS = ("text", "content")
_QUESTIONS = ("prompt", "question", "instruction")
_CONTEXTS = ("input", "context")
_ANSWERS = ("response", "completion", "answer", "output")
_IMAGES = ("images", "image")

LOOKED_FOR = (
    "input_ids; messages or conversations, lists of role and content; text; prompt, question or "
    "instruction (and input or context) + response, completion, answer or output; image or images "
    "beside them; or a single column of strings"
)


def columns_of(row: Row) -> tuple[str, ...]:
    """Return the columns that a row is read by, () if it has none that are known.

    None stands for any value: rows of a table may lack one.
    """
    images = _first(row, _IMAGES, lambda value: not isinstance(value, int | float))
    found = (
        _first(row, ("input_ids",), lambda value: as_ids(value) is not None)
        or _first(row, _CHATS, lambda value: chat_in(value) is not None)
        or _first(row, _TEXTS, lambda value: isinstance(value, str))
        or _pair(row)
    )
    if not found and not images and len(row) == 1:
        found = _first(row, tuple(row), lambda value: isinstance(value, str))
    if not found and not images:
        return ()
    # Tokens of a row that a processor has made go with its pixels, as a batch.
    if found == ("input_ids",):
        return () if "pixel_values" in row else found
    return (
        *found,
        *images,
        *(("tools",) if found and found[0] in _CHATS and "tools" in row else ()),
    )


def document_of(row: Row, columns: Sequence[str], where: str) -> Document:
    """Return the document that columns of a row make; an empty one if they hold None.

    Raises CalibrationError for a value of another type.
    """
    given = {name: row[name] for name in columns if row[name] is not None}
    images = next((given.pop(name) for name in _IMAGES if name in given), ())
    tools = given.pop("tools", ())
    images = tuple(images) if isinstance(images, list | tuple) else (images,)
    if "input_ids" in given:
        return Document(
            ids=as_ids(given["input_ids"]) or _wrong(where, "input_ids", given), where=where
        )
    for name in _CHATS:
        if name in given:
            chat = chat_in(given[name]) or _wrong(where, name, given)
            return Document(
                messages=messages_of(chat), tools=_tools(tools, where), images=images, where=where
            )
    parts = [given[name] for name in columns if name in given]
    if any(is_chat(part) for part in parts):
        # A prompt and an answer that are messages themselves.
        turns = [part if is_chat(part) else _turn(part, i) for i, part in enumerate(parts)]
        chat = [message for turn in turns for message in turn]
        return Document(messages=messages_of(chat), images=images, where=where)
    for name, part in given.items():
        if not isinstance(part, str):
            _wrong(where, name, given)
    if len(parts) < 2:
        return Document(text="".join(parts) or None, images=images, where=where)
    *asked, answer = parts
    text = "\n\n".join(part for part in asked if part)
    chat = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return Document(f"{text}\n{answer}", tuple(chat), images=images, where=where)


def require_columns(row: Row, where: str) -> tuple[str, ...]:
    """Return the columns that a row is read by. Raises CalibrationError without any."""
    columns = columns_of(row)
    if not columns:
        shown = ", ".join(f"{key} ({type(value).__name__})" for key, value in row.items())
        raise CalibrationError(
            f"{where}: expected columns that hold text, got {shown or 'none'}. Looked for: "
            f"{LOOKED_FOR}. Rename the columns, or give the texts themselves as a list."
        )
    return columns


def _first(row: Row, names: Sequence[str], fits: Callable[[Any], bool]) -> tuple[str, ...]:
    found = (name for name in names if name in row and (row[name] is None or fits(row[name])))
    return tuple(found)[:1]


def _pair(row: Row) -> tuple[str, ...]:
    """Return the columns of a question, its context and its answer; () unless it has an answer."""

    def fits(value: Any) -> bool:
        return isinstance(value, str) or is_chat(value)

    asked, answer = _first(row, _QUESTIONS, fits), _first(row, _ANSWERS, fits)
    if asked and answer:
        return (*asked, *_first(row, _CONTEXTS, lambda value: isinstance(value, str)), *answer)
    return ()


def _turn(part: Any, number: int) -> list[dict[str, Any]]:
    return [{"role": "assistant" if number else "user", "content": part}]


def _tools(tools: Any, where: str) -> tuple[Any, ...]:
    """Tools of a row, which may be written in JSON, together or each."""
    found: Any = decoded(tools) or ()
    if isinstance(found, str) or not all(isinstance(tool, Mapping) for tool in found):
        raise CalibrationError(f"{where}: tools: expected JSON schemas, got {found!r:.80}.")
    return tuple(map(without_none, found))


def _wrong(where: str, name: str, given: Mapping[str, Any]) -> Any:
    kinds = {"input_ids": "a list of integers"} | dict.fromkeys(_CHATS, "a list of messages")
    wanted = kinds.get(name, "a string")
    value = given[name]
    raise CalibrationError(
        f"{where}: {name}: expected {wanted}, got {type(value).__name__} {value!r:.80}. "
        "Correct it, or leave the row out."
    )
