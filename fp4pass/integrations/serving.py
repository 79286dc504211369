"""A plain server of a packed folder with OpenAI's API, which answers one request at a time."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from torch import Tensor

from .._compat.transformers import config_faults
from ..checkpoint.loading import load
from ..checkpoint.reader import is_packed
from ..errors import CheckpointError, OptionError, expected

_log = logging.getLogger(__name__)

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

# The names of the files of a tokenizer.
_TOKENIZERS = ("*token*.json", "*.tiktoken", "*.model", "vocab.*")

# Tokens of a prompt with its answer, for models whose config has no limit.
_POSITIONS = 8192

# Bytes of a body: so many, and so many for each position.
_BODY_BYTES, _BYTES_PER_POSITION = 2**20, 8

# Below this temperature logits overflow; vLLM is greedy there, too.
_COLDEST = 1e-5

# Fields that change no text.
_HARMLESS = {
    *("user", "store", "metadata", "service_tier", "safety_identifier", "parallel_tool_calls"),
    *("prompt_cache_key", "prompt_cache_retention"),
}

# Values of fields that ask for what is done without the field.
_NEUTRAL: dict[str, Any] = {
    **{"n": 1, "best_of": 1, "echo": False, "suffix": "", "logprobs": False, "top_logprobs": 0},
    **{"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "modalities": ["text"]},
    **{"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "tool_calls": []},
}


class _Refused(Exception):
    """A request that is answered by an error."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        facts = {"message": message, "type": kind, "param": param, "code": code}
        self.status, self.body = status, {"error": facts}


def _text_of(content: Any) -> Any:
    """Return the text of content that is a list of parts."""
    if not isinstance(content, list):
        return content
    texts: list[Any] = [part.get("text") for part in content if isinstance(part, dict)]
    is_text = all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    if not is_text or not all(isinstance(text, str) for text in texts):
        raise ValueError("expected a string or parts of type text, each with a string")
    return "\n".join(texts)


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def require_supported(self, where: str = "") -> None:
        """Raise for a field that would change the text if it were not ignored."""
        for name, value in (self.model_extra or {}).items():
            neutral = _NEUTRAL.get(name)
            # False equals 0, and asks for something else.
            is_neutral = value == neutral and isinstance(value, bool) is isinstance(neutral, bool)
            if not (is_neutral or value is None or name in _HARMLESS):
                param = f"{where}{name:.60}"
                message = f"{param}: not supported by this server, got {value!r:.60}. Leave it out."
                raise _Refused(400, message, param)

    def known(self) -> dict[str, Any]:
        """Return the fields that are supported and given."""
        return self.model_dump(include=set(type(self).model_fields), exclude_none=True)


class _Message(_Fields):
    role: Literal["system", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of)]
    name: str | None = None


class _TemplateOptions(_Fields):
    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: str | None = None


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class _Asked(_Fields):
    """Fields of both chats and completions."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    # Text is compared with them at each token.
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]] | None,
        FailFast(),
        Field(max_length=16),
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def sampling(self) -> dict[str, Any]:
        """Return options of `generate`; what is not asked for is as in the generation config."""
        found: dict[str, Any] = {} if self.top_p is None else {"top_p": self.top_p}
        if self.temperature is None:
            return found
        if self.temperature < _COLDEST:
            return {"do_sample": False}
        return {**found, "do_sample": True, "temperature": self.temperature}

    def choice(self, text: str, reason: str | None, **role: str) -> dict[str, Any]:
        """Return text of an answer in OpenAI's form."""
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


class _Completion(_Asked):
    prompt: Annotated[
        str, BeforeValidator(lambda x: x[0] if isinstance(x, list) and len(x) == 1 else x)
    ]
    # OpenAI's default.
    max_tokens: int | None = Field(16, ge=1)


class _Chat(_Asked):
    messages: Annotated[list[_Message], FailFast(), Field(min_length=1, max_length=10_000)]
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: _TemplateOptions | None = None

    def require_supported(self, where: str = "") -> None:
        """Raise for a field, here or further in, that would change the text."""
        super().require_supported()
        for index, message in enumerate(self.messages):
            message.require_supported(f"messages.{index}.")
        if self.chat_template_kwargs is not None:
            self.chat_template_kwargs.require_supported("chat_template_kwargs.")

    def choice(self, text: str, reason: str | None, **role: str) -> dict[str, Any]:
        """Return text of an answer in OpenAI's form."""
        said = {"delta" if self.stream else "message": {**role, "content": text}}
        return {"index": 0, **said, "logprobs": None, "finish_reason": reason}


class _Answer:
    """An answer while `generate` writes it, and the criterion that stops it."""

    def __init__(self, asked: _Asked, prompt: list[int], most: int, model: Any, tokenizer: Any):
        """Take a request, its tokens, and the most of the answer."""
        self.asked, self.prompt, self.most, self.tokenizer = asked, prompt, most, tokenizer
        # With an encoder, one token stands before the answer.
        self.before = 1 if model.config.is_encoder_decoder else len(prompt)
        ends = model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]
        self.stops = asked.stop or []
        # The text that was written, where it is not sent.
        self.text: list[str] = []
        self.send: Callable[[str], object] = self.text.append
        self.tokens: list[int] = []
        # The reason why it ended, and whether to stop, which is also set where nobody waits for it.
        self.reason, self.is_over = "length", False
        # Text that may be the beginning of a stop string.
        self._held = ""
        # The text of tokens[:_read] is known. Tokens are decoded from _start on, for what one
        # says depends on whether something is before it.
        self._start = self._read = 0

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """Read the new tokens, and return whether to stop."""
        for token in input_ids[0, self.before + len(self.tokens) :].tolist():
            if not self.is_over:
                self.tokens.append(token)
                if token in self.ends:
                    self.reason, self.is_over = "stop", True
                self.advance()
        return torch.full((len(input_ids),), self.is_over, device=input_ids.device)

    def advance(self, is_last: bool = False) -> None:
        """Send the new text, without a stop string and what may be half of something."""
        known = self._decode(self.tokens[self._start : self._read])
        text = self._decode(self.tokens[self._start :])
        # Half a character decodes to U+FFFD.
        if len(text) > len(known) and (is_last or not text.endswith("\ufffd")):
            self._held += text[len(known) :]
            self._start, self._read = self._read, len(self.tokens)
        found = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            self._held, self.stops = self._held[: min(found)], []
            self.reason, self.is_over = "stop", True
        starts = (stop[:size] for stop in self.stops for size in range(1, len(stop)))
        begun = max((len(start) for start in starts if self._held.endswith(start)), default=0)
        sent = len(self._held) - (0 if is_last else begun)
        if sent:
            self.send(self._held[:sent])
            self._held = self._held[sent:]

    def _decode(self, tokens: list[int]) -> str:
        # A clean-up would change what is sent already.
        return self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def usage(self) -> dict[str, int]:
        """Return the counts of tokens."""
        old, new = len(self.prompt), len(self.tokens)
        return {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}


class Service:
    """A model, and the application (`app`) that answers requests to it."""

    def __init__(self, model: Any, tokenizer: Any, names: Sequence[str], created: int = 0) -> None:
        """Take a model and the names that requests call it by; the first is listed."""
        self.model, self.tokenizer, self.names = model, tokenizer, names
        self.entry = {"id": names[0], "object": "model", "created": created, "owned_by": "fp4pass"}
        text = model.config.get_text_config(decoder=True)
        limit = getattr(text, "max_position_embeddings", None)
        self.positions: int = limit or _POSITIONS
        self.most_bytes = _BODY_BYTES + _BYTES_PER_POSITION * self.positions
        # A thread each: a request is read while another is answered, and all stay in order.
        self._reader, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        # Encoding sets options of the tokenizer the first time, which decoding must not meet.
        tokenizer("Hello")
        # Chat templates of some models with images show no content but lists of parts.
        self._has_parts = False
        with suppress(_Refused):
            self._has_parts = "Hello" not in self._render([{"role": "user", "content": "Hello"}])
        self.app = app = FastAPI(openapi_url=None, redirect_slashes=False)
        app.get("/health")(lambda: {"status": "ok"})
        app.get("/v1/models")(lambda: {"object": "list", "data": [self.entry]})
        app.get("/v1/models/{name:path}")(self._named)
        app.post("/v1/chat/completions")(self._chat)
        app.post("/v1/completions")(self._complete)
        for kind in (_Refused, ValidationError, HTTPException, ClientDisconnect, Exception):
            app.add_exception_handler(kind, _answer_error)

    async def _named(self, name: str) -> dict[str, Any]:
        self._require_name(name)
        return self.entry

    async def _chat(self, request: Request) -> Response:
        return await self._respond(request, _Chat)

    async def _complete(self, request: Request) -> Response:
        return await self._respond(request, _Completion)

    async def _respond(self, request: Request, kind: type[_Asked]) -> Response:
        """Answer a request in its turn."""
        asked = kind.model_validate_json(await self._body(request))
        self._require_name(asked.model)
        asked.require_supported()
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._reader, self._read, asked)
        chat = "chat.completion.chunk" if asked.stream else "chat.completion"
        facts = {
            "id": f"fp4pass-{uuid.uuid4().hex}",
            "object": chat if kind is _Chat else "text_completion",
            "created": int(time.time()),
            "model": self.names[0],
        }
        parts: asyncio.Queue[str | None] = asyncio.Queue()
        if asked.stream:
            answer.send = lambda text: loop.call_soon_threadsafe(parts.put_nowait, text)
        writing = loop.run_in_executor(self._writer, self._write, answer)
        if asked.stream:
            writing.add_done_callback(lambda _: parts.put_nowait(None))
            events = _events(answer, facts, parts, writing)
            return StreamingResponse(events, media_type="text/event-stream")
        try:
            while not writing.done():
                if await request.is_disconnected():
                    raise ClientDisconnect()
                await asyncio.wait([writing], timeout=0.2)
        finally:
            answer.is_over = True
        if error := writing.exception():
            raise _refusal(error)
        choice = asked.choice("".join(answer.text), answer.reason, role="assistant")
        return JSONResponse({**facts, "choices": [choice], "usage": answer.usage()})

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request, of which no more than the limit is kept."""
        declared = request.headers.get("content-length", "")
        is_long = declared.isdecimal() and int(declared) > self.most_bytes
        body = bytearray()
        if not is_long:
            async for chunk in request.stream():
                body += chunk
                if is_long := len(body) > self.most_bytes:
                    break
        if is_long:
            raise _Refused(413, f"The body: expected at most {self.most_bytes} bytes, got more.")
        # A page of any site can have a browser send other types without asking this server.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise _Refused(415, expected("content-type", "application/json", f"{kind!r:.60}"))
        return bytes(body)

    def _require_name(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            wanted = f"{self.names[0]!r}, the only one of this server"
            message = expected("model", wanted, f"{name!r:.200}")
            raise _Refused(404, message, "model", "model_not_found")

    def _read(self, asked: _Asked) -> _Answer:
        """Return the answer that a request begins."""
        if isinstance(asked, _Chat):
            param, most = "messages", asked.max_completion_tokens or asked.max_tokens
            options = asked.chat_template_kwargs or _TemplateOptions()
            text = self._render([each.known() for each in asked.messages], **options.known())
            tokens = self.tokenizer(text, add_special_tokens=False).input_ids
        else:
            assert isinstance(asked, _Completion)
            param, most = "prompt", asked.max_tokens
            tokens = self.tokenizer(asked.prompt).input_ids
        if not tokens:
            raise _Refused(400, expected(param, "at least one token", "none"), param)
        rest = self.positions - len(tokens)
        if rest < (most or 1):
            message = (
                f"{param}: expected at most {self.positions} tokens of prompt and answer, the "
                f"positions of the model, got {len(tokens)} + {most or 1}."
            )
            raise _Refused(400, message, param, "context_length_exceeded")
        most = most or min(self.model.generation_config.max_new_tokens or rest, rest)
        return _Answer(asked, tokens, most, self.model, self.tokenizer)

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the text of a chat."""
        if not self.tokenizer.chat_template:
            message = f"messages: {self.names[0]} has no chat template. Ask /v1/completions."
            raise _Refused(400, message, "messages")
        if self._has_parts:
            for each in messages:
                each["content"] = [{"type": "text", "text": each["content"]}]
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options
            )
        except (TemplateError, TypeError, ValueError) as error:
            message = f"messages: the chat template refuses them: {error!s:.200}."
            raise _Refused(400, message, "messages") from error

    def _write(self, answer: _Answer) -> None:
        """Generate an answer."""
        if answer.is_over:
            return
        asked = answer.asked
        if asked.seed is None:
            torch.seed()
        else:
            torch.manual_seed(asked.seed)
        prompt = torch.tensor([answer.prompt], device=self.model.device)
        self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=answer.most,
            num_beams=1,
            stopping_criteria=[answer],
            **asked.sampling(),
        )
        answer.advance(is_last=True)


async def _events(
    answer: _Answer,
    facts: Mapping[str, Any],
    parts: asyncio.Queue[str | None],
    writing: asyncio.Future[None],
) -> AsyncIterator[str]:
    """Yield the events of a stream: the role, parts of the text, why it ended, and the counts."""

    def event(*choices: Mapping[str, Any], usage: Mapping[str, int] | None = None) -> str:
        return f"data: {json.dumps({**facts, 'choices': choices, 'usage': usage})}\n\n"

    asked = answer.asked
    try:
        yield event(asked.choice("", None, role="assistant"))
        while (text := await parts.get()) is not None:
            yield event(asked.choice(text, None))
        if error := writing.exception():
            yield f"data: {json.dumps(_refusal(error).body)}\n\n"
        else:
            yield event(asked.choice("", answer.reason))
            if asked.stream_options and asked.stream_options.include_usage:
                yield event(usage=answer.usage())
        yield "data: [DONE]\n\n"
    finally:
        answer.is_over = True


def _refusal(error: BaseException) -> _Refused:
    """Return an error as clients read it."""
    if isinstance(error, _Refused):
        return error
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False)[0]
        param = ".".join(map(str, found["loc"]))
        got = f", got {found['input']!r:.60}" if param and found["type"] != "missing" else ""
        return _Refused(400, f"{param or 'The body'}: {found['msg']}{got}.", param or None)
    if not isinstance(error, ClientDisconnect):
        _log.error("A request failed.", exc_info=error)
    return _Refused(500, f"The server failed: {type(error).__name__}. Its log says more.")


async def _answer_error(request: Request, error: Any) -> Response:
    """Answer an error in OpenAI's form."""
    if isinstance(error, HTTPException):
        path = f"{request.method} {request.url.path:.200}"
        refused = _Refused(error.status_code, f"{path}: {error.detail}.")
        return JSONResponse(refused.body, refused.status, error.headers)
    refused = _refusal(error)
    return JSONResponse(refused.body, refused.status)


def serve(
    folder: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "auto",
    log_level: str = "error",
    ready: Callable[[str, str], None] = lambda name, address: None,
) -> None:
    """Serve a folder with packed weights until the process is interrupted.

    Args:
        folder: with packed weights and a tokenizer.
        host: an address or name of this machine.
        port: 0 for one that is free.
        device: "auto" is the GPU, or the CPU without one.
        log_level: "debug", "info", "warning", "error" or "critical"; requests are logged at "info".
        ready: called with the name of the model and the address once it answers.

    Raises:
        CheckpointError: the folder has no packed weights or no tokenizer, or generates no text.
        OptionError: an option does not fit, or the address is in use.
    """
    from transformers import AutoTokenizer

    if log_level not in _LOG_LEVELS:
        wanted = f"one of {', '.join(_LOG_LEVELS)}"
        raise OptionError(expected("serve: log_level", wanted, repr(log_level)))
    path = Path(folder)
    _require_servable(path)
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not 0 <= port < 1 << 16:
            raise OSError("a port is at most 65535")
        # Before the model is loaded, which may take minutes.
        listening = socket.create_server((host, port), family=kind, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(
            f"serve: {host}, port {port}: {reason}. Give another --port (0: any that is free) or "
            "--host."
        ) from error
    with listening:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = load(path, device_map=device)
        if not (hasattr(model, "can_generate") and model.can_generate()):
            wanted = "a model that generates text"
            raise CheckpointError(expected(str(path), wanted, type(model).__name__))
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
        except config_faults() as error:
            raise CheckpointError(f"{path}: its tokenizer cannot be read: {error}") from error
        name = path.resolve().name
        names = (name, os.fspath(folder), str(path), str(path.resolve()))
        app = Service(model, tokenizer, names, int(path.stat().st_mtime)).app
        config = uvicorn.Config(
            app, log_level=log_level, lifespan="off", ws="none", timeout_graceful_shutdown=1
        )
        shown = f"[{host}]" if ":" in host else host
        ready(name, f"http://{shown}:{listening.getsockname()[1]}")
        # uvicorn raises a signal again once connections are closed. Python would then wait for the
        # thread that generates.
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
            signal.signal(number, lambda *_, code=code: os._exit(code))
        uvicorn.Server(config).run(sockets=[listening])


def _require_servable(folder: Path) -> None:
    """Raise CheckpointError unless a folder has packed weights and a tokenizer."""
    if not folder.is_dir():
        got = "a file" if folder.exists() else "nothing there"
        raise CheckpointError(expected(str(folder), "a folder with packed weights", got))
    if not is_packed(folder):
        raise CheckpointError(
            f"{folder}: expected a folder with packed weights, got one without. Quantize the model "
            "first (fp4pass quantize), or serve it with transformers serve."
        )
    if not any(path for pattern in _TOKENIZERS for path in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder}: expected a tokenizer beside the weights, got none. Save it there: "
            "tokenizer.save_pretrained(folder)."
        )
