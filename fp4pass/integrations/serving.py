"""A server of a packed folder: that of `transformers serve`, for a model that stays packed."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor
from transformers.utils.import_utils import is_serve_available

from .._compat import require
from ..checkpoint.loading import load
from ..checkpoint.reader import is_packed
from ..errors import CheckpointError, OptionError, VersionError, expected

# The names of the files of a tokenizer: without one transformers makes one without words.
_TOKENIZERS = ("*token*.json", "*.tiktoken", "*.model", "vocab.*")

# Fields that transformers ignores and that change no text, and values that ask for nothing.
_HARMLESS = {"user", "store", "metadata", "service_tier", "parallel_tool_calls", "stream_options"}
_NEUTRAL: tuple[Any, ...] = (None, False, 0, "", "none", {}, [], ["text"], {"type": "text"})

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def serve(
    folder: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "auto",
    log_level: str = "error",
    ready: Callable[[str, str], None] = lambda name, address: None,
) -> None:
    """Serve a folder with packed weights and a tokenizer until the process is interrupted."""
    # port: 0 for one that is free. device: "auto" is the GPU, or the CPU without one. log_level:
    # requests are logged at "info". ready: called with the name of the model and the address once
    # it answers. Raises CheckpointError, OptionError, VersionError where it cannot.
    require("transformers")
    if not is_serve_available():
        needed = "fastapi, openai, pydantic and uvicorn"
        raise VersionError(f"The server needs {needed}: pip install 'fp4pass[serving]'.")
    if log_level not in _LOG_LEVELS:
        wanted = f"one of {', '.join(_LOG_LEVELS)}"
        raise OptionError(expected("serve: log_level", wanted, repr(log_level)))
    path = Path(folder)
    if not is_packed(path):
        raise CheckpointError(
            f"{folder}: expected a folder with packed weights, got none. Quantize the model "
            "first (fp4pass quantize), or serve it with transformers serve."
        )
    if not any(each for pattern in _TOKENIZERS for each in path.glob(pattern)):
        raise CheckpointError(
            f"{folder}: expected a tokenizer beside the weights, got none. Save it there: "
            "tokenizer.save_pretrained(folder)."
        )
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not 0 <= port < 1 << 16:
            raise OSError("a port is at most 65535")
        # Before the model is loaded, which may take minutes.
        socket.create_server((host, port), family=kind).close()
    except OSError as error:
        raise OptionError(
            f"serve: {host}, port {port}: {error.strerror or error}. Give another --port (0: any "
            "that is free) or --host."
        ) from error
    processor = AutoProcessor.from_pretrained(path)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = load(path, device_map=device)
    if not (hasattr(model, "can_generate") and model.can_generate()):
        got = type(model).__name__
        raise CheckpointError(expected(str(path), "a model that generates text", got))
    name = path.resolve().name
    server, thread = _started(model, processor, name, host, port, log_level)
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
        # Python would wait for the threads that answer.
        signal.signal(number, lambda *_, code=code: os._exit(code))
    while thread.is_alive() and not server.started:
        time.sleep(0.02)
    if server.started:
        shown = f"[{host}]" if ":" in host else host
        ready(name, f"http://{shown}:{server.servers[0].sockets[0].getsockname()[1]}")
    thread.join()


def _started(
    model: Any, processor: Any, name: str, host: str, port: int, log_level: str
) -> tuple[Any, Any]:
    """Return the server of `transformers serve` for one model, and the thread that it runs in."""
    from transformers.cli import serve as command
    from transformers.cli.serving import chat_completion, completion, model_manager, utils

    class OneModel(model_manager.ModelManager):
        """Has a model that is loaded already, known by its name alone."""

        def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return model, processor

        def process_model_name(self, model_id: str) -> str:  # type: ignore[override]
            return model_id

        def list_models(self, *args: Any) -> list[dict[str, Any]]:
            return [{"id": name, "object": "model", "created": 0, "owned_by": "fp4pass"}]

        # Until transformers 5.23.
        get_gen_models = list_models

    begun = ""
    if getattr(processor, "chat_template", None):
        # Templates of processors read parts.
        text: Any = [{"type": "text", "text": "Hello"}] if hasattr(processor, "tokenizer") else "Hi"
        chat = [{"role": "user", "content": text}]
        begun = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    known = utils.get_response_template

    def response_template(*args: Any) -> Any:
        """Return how answers are parsed: by the model's type, where its own marks are in chats."""
        found = known(*args)
        marks = (found or {}).get("start_anchor", ())
        marks = [marks] if isinstance(marks, str) else marks
        return found if not marks or any(mark in begun for mark in marks) else None

    class Chats(chat_completion.ChatCompletionHandler):
        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            _refuse(_chat_problem(body, bool(begun)) or _problem(body, self._unused_fields))
            return _without_stops(await super().handle_request(body, request_id), body)

    class Texts(completion.CompletionHandler):
        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            prompt = body.get("prompt")
            wrong = "" if prompt and isinstance(prompt, str) else "prompt: expected a string"
            _refuse(wrong or _problem(body, self._unused_fields))
            return _without_stops(await super().handle_request(body, request_id), body)

    changed: list[tuple[Any, str, Any]] = [
        (model_manager, "ModelManager", OneModel),
        (chat_completion, "ChatCompletionHandler", Chats),
        (completion, "CompletionHandler", Texts),
    ]
    before = [getattr(module, key) for module, key, _ in changed]
    utils.get_response_template = response_template  # type: ignore[assignment]
    for module, key, made in changed:
        setattr(module, key, made)
    try:
        options = {"host": host, "port": port, "log_level": log_level}
        found: Any = command.Serve(force_model=name, non_blocking=True, **options)  # type: ignore
    finally:
        for (module, key, _), own in zip(changed, before, strict=True):
            setattr(module, key, own)
    for logger in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(logger).setLevel(log_level.upper())
    return found.server, found._thread


def _refuse(problem: str) -> None:
    from fastapi import HTTPException

    if problem:
        raise HTTPException(status_code=400, detail=f"{problem}.")


def _chat_problem(body: Mapping[str, Any], has_template: bool) -> str:
    """Return why a chat cannot be answered, or ""."""
    messages = body.get("messages")
    if not has_template:
        return "messages: the model has no chat template; ask /v1/completions"
    is_list = isinstance(messages, list) and bool(messages)
    keys = ("content", "tool_calls")
    if not is_list or not all(
        isinstance(each, dict) and "role" in each and any(key in each for key in keys)
        for each in messages or ()
    ):
        return "messages: expected a list of messages, each with role and content"
    return ""


def _problem(body: Mapping[str, Any], unused: set[str]) -> str:
    """Return why a request would be answered by another text than it asks for, or ""."""
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is not None and (type(value) is not int or value < 1):
            return f"{name}: expected at least 1, got {value!r:.60}"
    for name in sorted(unused & body.keys() - _HARMLESS):
        value = body[name]
        is_neutral = value is not True and (value in _NEUTRAL or (name[0] in "nb" and value == 1))
        if not is_neutral:
            return f"{name}: not supported by this server, got {value!r:.60}; leave it out"
    return ""


def _without_stops(response: Any, body: Mapping[str, Any]) -> Any:
    """Return an answer without its stop string, which transformers leaves at the end."""
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if stops and hasattr(response, "body_iterator"):
        response.body_iterator = _cut_events(response.body_iterator, stops)
    elif stops:
        facts = json.loads(response.body)
        for choice in facts["choices"]:
            text = choice.get("message", choice)
            key = "content" if "content" in text else "text"
            text[key] = text[key][: _end(text[key], stops, is_last=True)]
        return type(response)(facts)
    return response


def _end(text: str, stops: Sequence[str], is_last: bool) -> int:
    """Return where a text ends: at a stop string, or before what may be the beginning of one."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found or is_last:
        return min(found, default=len(text))
    begun = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return len(text) - max(begun, default=0)


async def _cut_events(events: AsyncIterator[Any], stops: Sequence[str]) -> AsyncIterator[str]:
    """Yield the events of a stream with the text before a stop string."""
    text, sent = "", 0
    async for part in events:
        for line in filter(None, str(part).split("\n\n")):
            facts = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            for choice in facts.get("choices", ()):
                piece = choice.get("delta", choice)
                key = "text" if "text" in choice else "content"
                text += piece.get(key) or ""
                end = _end(text, stops, is_last=bool(choice.get("finish_reason")))
                if key in piece or end > sent:
                    piece[key] = text[sent:end]
                sent = max(sent, end)
            yield (f"data: {json.dumps(facts)}" if facts else line) + "\n\n"
