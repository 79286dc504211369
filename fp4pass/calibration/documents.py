"""Make documents, the examples of calibration data, of texts, chats and rows of tables."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.files import parse_json
from ..errors import CalibrationError

Row = Mapping[str, Any]

# The keys of a message, as chat templates and as ShareGPT name them.
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
    f"input_ids; {', '.join(_CHATS)}, lists of role and content; {', '.join(_TEXTS)}; one of "
    f"{', '.join(_QUESTIONS)} with one of {', '.join(_ANSWERS)}; images; or one column of strings"
)

# The mark of an image in texts of many data sets.
IMAGE_MARK = "<image>"


@dataclass(frozen=True)
class Document:
    """One example of calibration data."""

    text: str | None = None  # read where there is no chat, or no chat template for it
    messages: tuple[Mapping[str, Any], ...] = ()  # of a chat, with the keys "role" and "content"
    tools: tuple[Any, ...] = ()  # JSON schemas that a chat can use
    ids: tuple[int, ...] = ()  # tokens, where they are known
    images: tuple[Any, ...] = ()  # of the text or of the messages, in their order
    where: str = "data"  # it stands, for errors

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
    # A message that calls tools may have no content.
    return all(
        isinstance(each, Mapping)
        and not each.keys().isdisjoint(_ROLE)
        and not each.keys().isdisjoint((*_CONTENT, "tool_calls"))
        for each in value
    )


def is_document(item: object) -> bool:
    """Return whether an item is a text, a chat, a row with text, or token ids; not a batch."""
    if isinstance(item, Mapping):
        return bool(columns_of(item))
    is_ids = isinstance(item, list) and as_ids(item) is not None
    return isinstance(item, str) or is_chat(item) or is_ids


def as_ids(value: Any) -> tuple[int, ...] | None:
    """Return token ids of a list of integers or an integer array [tokens]; None for others."""
    if isinstance(value, Tensor) and (value.ndim != 1 or value.is_floating_point()):
        return None
    listed = value.tolist() if hasattr(value, "tolist") else value
    is_list = isinstance(listed, list | tuple) and (bool(listed) or listed is not value)
    return tuple(listed) if is_list and all(type(each) is int for each in listed) else None


def chat_document(value: Iterable[Mapping[str, Any]], where: str, **facts: Any) -> Document:
    """Return the document of a chat, whose images stand apart.

    Rows of a table have None where a message lacks what others have.
    """
    messages: list[dict[str, Any]] = list(map(_without_none, value))
    for message in messages:
        if "role" not in message:
            role = message.pop("from")
            message["role"] = _ROLES.get(role, role)
        message["content"] = message.pop("value", None) or message.get("content", "")
    return _images_apart(Document(messages=tuple(messages), where=where, **facts))


def columns_of(row: Row) -> tuple[str, ...]:
    """Return the columns that a row is read by, () if it has none that are known.

    None stands for any value: rows of a table may lack one.
    """

    def first(names: Sequence[str], fits: Callable[[Any], bool]) -> tuple[str, ...]:
        found = (name for name in names if name in row and (row[name] is None or fits(row[name])))
        return tuple(found)[:1]

    def is_text(value: object) -> bool:
        return isinstance(value, str)

    def is_turn(value: object) -> bool:
        return isinstance(value, str) or is_chat(value)

    images = first(_IMAGES, lambda value: not isinstance(value, int | float))
    found = (
        first(("input_ids",), lambda value: as_ids(value) is not None)
        or first(_CHATS, lambda value: is_chat(_decoded(value)))
        or first(_TEXTS, is_text)
    )
    asked, answer = first(_QUESTIONS, is_turn), first(_ANSWERS, is_turn)
    if not found and asked and answer:
        found = (*asked, *first(_CONTEXTS, is_text), *answer)
    if not found and not images and len(row) == 1:
        found = first(tuple(row), is_text)
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
    tools: Any = _decoded(given.pop("tools", ())) or ()
    if isinstance(tools, str) or not all(isinstance(tool, Mapping) for tool in tools):
        raise CalibrationError(f"{where}: tools: expected JSON schemas, got {tools!r:.80}.")

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
        schemas = tuple(map(_without_none, tools))
        return chat_document(chat, where, tools=schemas, images=images)
    parts = list(given.values())
    if any(map(is_chat, parts)):
        # A prompt and an answer that are messages themselves.
        roles = ("user", *["assistant"] * len(parts))
        turns = [
            part if is_chat(part) else [{"role": role, "content": part}]
            for role, part in zip(roles, parts, strict=False)
        ]
        return chat_document([m for turn in turns for m in turn], where, images=images)
    for name, part in given.items():
        if not isinstance(part, str):
            raise wrong(name, "a string")
    if len(parts) < 2:
        return Document("".join(parts) or None, images=images, where=where)
    asked, answer = "\n\n".join(filter(None, parts[:-1])), parts[-1]
    pair = ({"role": "user", "content": asked}, {"role": "assistant", "content": answer})
    return chat_document(pair, where, text=f"{asked}\n{answer}", images=images)


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


def _without_none(value: Any) -> Any:
    """Return a value without each None in it, as rows of a table have them."""
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_without_none(each) for each in value]
    return value


def _images_apart(document: Document) -> Document:
    """Return a document with the images that its messages hold, or have a place for, apart.

    Images that come beside messages without a place for them go into the first turn of the user.
    """
    beside, images, messages = list(document.images), [], []
    for message in document.messages:
        content: Any = message["content"]
        if isinstance(content, list):
            parts, content = content, []
            for part in parts:
                is_image = isinstance(part, Mapping) and part.get("type") in ("image", "image_url")
                content.append({"type": "image"} if is_image else part)
                if not is_image:
                    continue
                held = _held(part)
                if held is None and not beside:
                    raise CalibrationError(
                        f"{document.where}: a message with a place for an image, but no image is "
                        'left for it. Give it as {"type": "image", "image": ...}, or in a column '
                        "image or images."
                    )
                images.append(beside.pop(0) if held is None else held)
        messages.append({**message, "content": content})
    if beside:
        _place(messages, len(beside))
        # Places that were left in the text come in the order of the turns.
        images = [*images, *beside]
    return dataclasses.replace(document, messages=tuple(messages), images=tuple(images))


def _held(part: Mapping[str, Any]) -> Any:
    """Return the image that a part of a message holds, None where it is a place for one."""
    if "image_url" in part:
        url = part["image_url"]
        return url.get("url") if isinstance(url, Mapping) else url
    places = ("image", "url", "path", "base64")
    return next((part[key] for key in places if part.get(key) is not None), None)


def _place(messages: list[dict[str, Any]], count: int) -> None:
    """Make parts of images in the texts of messages, where they stand or else at the beginning."""
    marked = [m for m in messages if isinstance(m["content"], str) and IMAGE_MARK in m["content"]]
    if sum(message["content"].count(IMAGE_MARK) for message in marked) == count:
        for message in marked:
            message["content"] = content_parts(message["content"])
        return
    first = next((m for m in messages if m["role"] == "user"), messages[0])
    own = first["content"]
    own = [{"type": "text", "text": own}] if isinstance(own, str) else list(own)
    first["content"] = [*({"type": "image"} for _ in range(count)), *own]


def content_parts(text: str) -> list[dict[str, Any]]:
    """Return a text as parts of a message, the mark of an image as a place for one."""
    pieces = [each for each in re.split(f"({IMAGE_MARK})", text) if each.strip()]
    return [
        {"type": "image"} if each == IMAGE_MARK else {"type": "text", "text": each.strip("\n")}
        for each in pieces
    ]
