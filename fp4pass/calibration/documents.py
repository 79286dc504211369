"""Make documents, the examples of calibration data, of chats and rows of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.files import parse_json
from ..errors import CalibrationError

Row = Mapping[str, Any]

# Of a message: its role and its content, and as ShareGPT names them.
_ROLE, _CONTENT = ("role", "from"), ("content", "value")

# The roles of ShareGPT, by those of chat templates.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "function_response": "tool"}
_ROLES |= {"observation": "tool"}

# The columns that a row is read by: the first kind of which it has one (of a question: and an
# answer), and images beside it.
_CHATS = ("messages", "conversations", "conversation")
_TEXTS = ("text", "content")
_QUESTIONS = ("prompt", "question", "instruction")
_CONTEXTS = ("input", "context")
_ANSWERS = ("response", "completion", "answer", "output")
_IMAGES = ("images", "image")

_LOOKED_FOR = (
    "input_ids; messages or conversations, lists of role and content; text; prompt, question or "
    "instruction (and input or context) + response, completion, answer or output; image or images "
    "beside them; or a single column of strings"
)


@dataclass(frozen=True)
class Document:
    """One example of calibration data.

    Attributes:
        text: read where there is no chat, or no chat template for it.
        messages: of a chat, with the keys "role" and "content".
        tools: JSON schemas that a chat can use.
        ids: tokens, where they are known.
        images: of the text or of the messages, in their order.
        where: where it stands, for errors.
    """

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()
    ids: tuple[int, ...] = ()
    images: tuple[Any, ...] = ()
    where: str = "data"

    def __bool__(self) -> bool:
        return bool(self.messages or self.ids or self.images or (self.text or "").strip())

    @property
    def characters(self) -> int:
        """The number of characters, four for each known token."""
        if self.messages:
            return sum(len(str(message.get("content") or "")) for message in self.messages)
        return len(self.text or "") or 4 * len(self.ids)


def is_chat(value: object) -> bool:
    """Return whether a value is a list of messages."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(
        isinstance(each, Mapping)
        and any(key in each for key in _ROLE)
        # A message that calls tools may have no content.
        and any(key in each for key in (*_CONTENT, "tool_calls"))
        for each in value
    )


def is_document(item: object) -> bool:
    """Return whether an item is a text, a chat, a row with text, or token ids; not a batch."""
    if isinstance(item, Mapping):
        return bool(columns_of(item))
    is_ids = isinstance(item, list) and as_ids(item) is not None
    return isinstance(item, str) or is_chat(item) or is_ids


def messages_of(value: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return messages with the keys "role" and "content", without those that hold None.

    Rows of a table have None where a message lacks what others have.
    """
    found: list[dict[str, Any]] = list(map(_without_none, value))
    for message in found:
        if "role" not in message:
            role = message.pop("from")
            message["role"] = _ROLES.get(role, role)
        message["content"] = message.pop("value", None) or message.get("content", "")
    return tuple(found)


def as_ids(value: object) -> tuple[int, ...] | None:
    """Return token ids of a list of integers or an integer tensor [tokens]; None for others."""
    if isinstance(value, Tensor):
        return None if value.ndim != 1 or value.is_floating_point() else tuple(value.tolist())
    if hasattr(value, "tolist") and not isinstance(value, str):
        value = value.tolist()
    is_list = isinstance(value, list | tuple) and bool(value)
    if not is_list or not all(type(each) is int for each in value):  # type: ignore[attr-defined]
        return None
    return tuple(value)  # type: ignore[arg-type]


def columns_of(row: Row) -> tuple[str, ...]:
    """Return the columns that a row is read by, () if it has none that are known.

    None stands for any value: rows of a table may lack one.
    """
    images = _first(row, _IMAGES, lambda value: not isinstance(value, int | float))
    found = (
        _first(row, ("input_ids",), lambda value: as_ids(value) is not None)
        or _first(row, _CHATS, lambda value: is_chat(_decoded(value)))
        or _first(row, _TEXTS, _is_text)
    )
    asked, answer = (_first(row, names, _is_turn) for names in (_QUESTIONS, _ANSWERS))
    if not found and asked and answer:
        found = (*asked, *_first(row, _CONTEXTS, _is_text), *answer)
    if not found and not images and len(row) == 1:
        found = _first(row, tuple(row), _is_text)
    # Tokens of a row that a processor has made go with its pixels, as a batch.
    if found == ("input_ids",):
        return () if "pixel_values" in row else found
    tools = ("tools",) if found and found[0] in _CHATS and "tools" in row else ()
    return (*found, *images, *tools)


def require_columns(row: Row, where: str) -> tuple[str, ...]:
    """Return the columns that a row is read by. Raises CalibrationError without any."""
    columns = columns_of(row)
    if not columns:
        shown = ", ".join(f"{key} ({type(value).__name__})" for key, value in row.items())
        raise CalibrationError(
            f"{where}: expected columns that hold text, got {shown or 'none'}. Looked for: "
            f"{_LOOKED_FOR}. Rename the columns, or give the texts themselves as a list."
        )
    return columns


def document_of(row: Row, columns: Sequence[str], where: str) -> Document:
    """Return the document that columns of a row make; an empty one if they hold None.

    Raises CalibrationError for a value of another type.
    """
    given = {name: row[name] for name in columns if row[name] is not None}
    images = next((given.pop(name) for name in _IMAGES if name in given), ())
    images = tuple(images) if isinstance(images, list | tuple) else (images,)
    tools = _tools(given.pop("tools", ()), where)

    def wrong(name: str, wanted: str) -> CalibrationError:
        got = f"{type(given[name]).__name__} {given[name]!r:.80}"
        return CalibrationError(
            f"{where}: {name}: expected {wanted}, got {got}. Correct it, or leave the row out."
        )

    if "input_ids" in given:
        ids = as_ids(given["input_ids"])
        if not ids:
            raise wrong("input_ids", "a list of integers")
        return Document(ids=ids, where=where)
    for name in given.keys() & _CHATS:
        chat: Any = _decoded(given[name])
        if not is_chat(chat):
            raise wrong(name, "a list of messages")
        return Document(messages=messages_of(chat), tools=tools, images=images, where=where)
    parts = list(given.values())
    if any(map(is_chat, parts)):
        # A prompt and an answer that are messages themselves.
        roles = ("user", *["assistant"] * len(parts))
        turns = [
            part if is_chat(part) else [{"role": role, "content": part}]
            for role, part in zip(roles, parts, strict=False)
        ]
        chat = [message for turn in turns for message in turn]
        return Document(messages=messages_of(chat), images=images, where=where)
    for name, part in given.items():
        if not isinstance(part, str):
            raise wrong(name, "a string")
    if len(parts) < 2:
        return Document("".join(parts) or None, images=images, where=where)
    asked, answer = "\n\n".join(filter(None, parts[:-1])), parts[-1]
    pair = ({"role": "user", "content": asked}, {"role": "assistant", "content": answer})
    return Document(f"{asked}\n{answer}", pair, images=images, where=where)


def _first(row: Row, names: Sequence[str], fits: Callable[[Any], bool]) -> tuple[str, ...]:
    """Return the first of some columns that a row has with a value that fits, () without one."""
    found = (name for name in names if name in row and (row[name] is None or fits(row[name])))
    return tuple(found)[:1]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_turn(value: object) -> bool:
    return isinstance(value, str) or is_chat(value)


def _decoded(value: object) -> object:
    """Return a value, or a list of values, parsed where a value is JSON."""
    try:
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            return parse_json(value)
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            return [parse_json(each) for each in value]
    except ValueError:
        pass
    return value


def _tools(tools: Any, where: str) -> tuple[Any, ...]:
    """Return the tools of a row, which may be written in JSON, together or each."""
    found: Any = _decoded(tools) or ()
    if isinstance(found, str) or not all(isinstance(tool, Mapping) for tool in found):
        raise CalibrationError(f"{where}: tools: expected JSON schemas, got {found!r:.80}.")
    return tuple(map(_without_none, found))


def _without_none(value: Any) -> Any:
    """Return a value without each None in it, as rows of a table have them."""
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_without_none(each) for each in value]
    return value
