"""Chats as text, through the chat template of a tokenizer or a processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CalibrationError
from .documents import Document


def has_template(reader: Any) -> bool:
    """Return whether a tokenizer or a processor has a chat template."""
    return bool(getattr(reader, "chat_template", None))


def render_chat(document: Document, processor: Any) -> str:
    """Return the text that a chat template makes of a document, special tokens included.

    The template is that of the processor, or of its tokenizer.

    Raises:
        CalibrationError: there is no template, or it refuses the chat.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    of_parts = has_template(processor) and tokenizer is not processor
    owner = processor if of_parts else tokenizer
    if not has_template(owner):
        raise CalibrationError(
            f"{document.where}: a chat, but the tokenizer has no chat template. Set "
            "tokenizer.chat_template, as that of the instruct version of the model, or give texts."
        )
    shape = _as_parts if of_parts else _as_text
    chat = [{**message, "content": shape(message["content"])} for message in document.messages]
    tools = list(document.tools) or None
    try:
        return str(owner.apply_chat_template(chat, tools=tools, tokenize=False))
    except ImportError as error:
        raise CalibrationError(
            f"{document.where}: chat templates need jinja2: pip install jinja2."
        ) from error
    except _template_errors() as error:
        raise CalibrationError(
            f"{document.where}: the chat template refuses it: {error}. Change its turns, or leave "
            "it out."
        ) from error


def _as_parts(content: Any) -> Any:
    """The content of a message as a list of parts, which templates of processors read."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_text(content: Any) -> Any:
    """The content of a message as a string where all of its parts are text."""
    if isinstance(content, str) or not isinstance(content, list):
        return content
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return content


def _template_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a template that cannot render a chat."""
    import jinja2

    return jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError
