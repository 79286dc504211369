"""What calibration data is made of: documents, and how one is told from a batch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Of a message: its role and its content, and as ShareGPT names them.
_ROLE, _CONTENT = ("role", "from"), ("content", "value")

# The roles of ShareGPT, by those of chat templates.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "function_response": "tool"}
_ROLES |= {"observation": "tool"}


@dataclass(frozen=True)
class Document:
    """One example of calibration data.

    Attributes:
        text: what is read where there is no chat, or no chat template for it.
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
        """How many characters it has, four for each known token."""
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


def chat_in(value: object) -> list[Any] | None:
    """Return the messages of a value, which may be written in JSON, together or each; else None."""
    chat: Any = decoded(value)
    return list(chat) if is_chat(chat) else None


def decoded(value: object) -> object:
    """Return a value, or a list of values, of which those in JSON are read; else as it is."""
    try:
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            return json.loads(value)
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            return [json.loads(each) for each in value]
    except ValueError:
        pass
    return value


def messages_of(value: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return messages with the keys "role" and "content", without those that hold None.

    Rows of a table have None where a message lacks what others have.
    """
    return tuple(_message(without_none(message)) for message in value)


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    message = dict(given)
    if "role" not in message:
        role = message.pop("from")
        message["role"] = _ROLES.get(role, role)
    message["content"] = message.pop("value", None) or message.get("content", "")
    return message


def without_none(value: Any) -> Any:
    """Return a value without what in it is None, as rows of a table have it."""
    if isinstance(value, Mapping):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [without_none(each) for each in value]
    return value


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


def holds_tensor(value: object) -> bool:
    """Return whether a tensor is somewhere in a value."""
    if isinstance(value, Mapping):
        return any(map(holds_tensor, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return any(map(holds_tensor, value))
    return isinstance(value, Tensor)
