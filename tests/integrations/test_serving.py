"""The server of packed folders, and transformers' continuous batches of converted models."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import run
from compiled_quality import BUNDLED
from torch import nn

import fp4pass

transformers = pytest.importorskip("transformers")

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [40] * 9]


def converted(**options: Any) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    return fp4pass.convert(model.eval(), "nvfp4", "naive", **options)


@pytest.mark.slow
def test_requests_that_run_together_get_what_each_gets_alone() -> None:
    """Through transformers' continuous batches."""
    model: Any = converted(weight_only=True)
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    found = model.generate_batch(
        PROMPTS,
        generation_config=transformers.GenerationConfig(eos_token_id=-1, **options),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            num_blocks=16, max_batch_tokens=64
        ),
        progress_bar=False,
    )
    for name, ids in zip(sorted(found), PROMPTS, strict=True):
        alone = model.generate(torch.tensor([ids]), eos_token_id=None, **options)[0, len(ids) :]
        assert not found[name].error and found[name].generated_tokens == alone.tolist()


# ---- the server in this process ---------------------------------------------------------------

# A model of this type is expected to have another one.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}"
    "{{ raise_exception('a user speaks first') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if enable_thinking %}Think.{% endif %}assistant:"
)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
COLD: dict[str, Any] = {"temperature": 0}


def tokenizer_with(template: str | None) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.chat_template = template
    return tokenizer


def client_of(model: Any, template: str | None = TEMPLATE) -> Any:
    """A client of a server of a model in this process."""
    pytest.importorskip("fastapi")
    testing = pytest.importorskip("fastapi.testclient")
    from fp4pass.integrations.serving import Service

    service = Service(model, tokenizer_with(template), ["tiny", "/a/tiny"])
    return testing.TestClient(service.app, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def model() -> Any:
    return converted(weight_only=True)


@pytest.fixture(scope="module")
def client(model: Any) -> Iterator[Any]:
    with client_of(model) as found:
        yield found


def generated(model: Any, text: str, most: int = 12) -> str:
    """What `generate` writes after a text."""
    tokenizer = tokenizer_with(None)
    ids = tokenizer(text, return_tensors="pt").input_ids
    found = model.generate(ids, max_new_tokens=most, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(found, skip_special_tokens=True)


def said(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def events(answer: Any) -> list[dict[str, Any]]:
    """The parts of a stream."""
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *found, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(each.removeprefix("data: ")) for each in found]


def test_answers_are_those_of_generate(model: Any, client: Any) -> None:
    question = "What is a tensor?"
    text, chat = generated(model, question), generated(model, f"user: {question}\nassistant:")
    assert text and chat
    body = {"prompt": question, "max_tokens": 12, **COLD}
    for more in ({}, {"model": "/a/tiny"}, {"prompt": [question]}, {"seed": 7}, {"user": "me"}):
        answer = client.post(TEXT, json=body | more).json()
        assert answer["choices"][0]["text"] == text
    assert answer["choices"][0]["finish_reason"] == "length"
    counts = {"prompt_tokens": 10, "completion_tokens": 12, "total_tokens": 22}
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["usage"] == counts
    parts = [{"type": "text", "text": question}]
    for content in (question, parts):
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 12}
        answer = client.post(CHAT, json=asked | COLD).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": chat}
    assert answer["object"] == "chat.completion"

    streamed = {**asked, **COLD, "stream": True, "stream_options": {"include_usage": True}}
    first, *middle, last, usage = events(client.post(CHAT, json=streamed))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(each["choices"][0]["delta"]["content"] for each in middle) == chat
    assert len(middle) > 4 and last["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 12)
    assert {each["object"] for each in (first, usage)} == {"chat.completion.chunk"}
    # Without a limit the answer has 16 tokens, or of a chat what is left.
    answer = client.post(TEXT, json={"prompt": question, **COLD}).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_options_of_sampling_and_of_the_template(client: Any) -> None:
    body = {"prompt": "def load(", "max_tokens": 12, "temperature": 1.5, "top_p": 0.9}
    one, same, other, none = (
        client.post(TEXT, json=body | {"seed": seed}).json()["choices"][0]["text"]
        for seed in (1, 1, 2, None)
    )
    assert one == same and len({one, other, none}) == 3
    asked = {"messages": said("a"), "max_tokens": 1, **COLD}
    counts = [
        client.post(CHAT, json=asked | {"chat_template_kwargs": given}).json()["usage"]
        for given in ({}, {"enable_thinking": True})
    ]
    assert counts[0]["prompt_tokens"] < counts[1]["prompt_tokens"]


def test_a_template_that_takes_parts_alone_gets_parts(model: Any) -> None:
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    with client_of(model, template) as client:
        answer = client.post(CHAT, json={"messages": said("def f("), "max_tokens": 8, **COLD})
    assert answer.json()["choices"][0]["message"]["content"] == generated(model, "def f(", 8)


def test_openai_s_client(client: Any) -> None:
    openai = pytest.importorskip("openai")
    asks = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client)
    assert [each.id for each in asks.models.list().data] == ["tiny"]
    assert asks.models.retrieve("tiny").owned_by == "fp4pass"
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 4, **COLD}
    whole = asks.chat.completions.create(messages=said("a"), **options).choices[0].message
    stream = asks.chat.completions.create(messages=said("a"), stream=True, **options)
    assert "".join(each.choices[0].delta.content or "" for each in stream) == whole.content
    with pytest.raises(openai.NotFoundError, match=r"expected 'tiny'.*got 'other'"):
        asks.completions.create(prompt="a", **options | {"model": "other"})
    with pytest.raises(openai.BadRequestError, match="n: not supported"):
        asks.completions.create(prompt="a", n=2, **options)


# ---- what a model writes, by a script ---------------------------------------------------------


class Scripted:
    """A model that writes given tokens."""

    def __init__(self, *tokens: int, error: Exception | None = None) -> None:
        self.tokens, self.error, self.written = tokens, error, 0
        self.config = SimpleNamespace(is_encoder_decoder=False, max_position_embeddings=64)
        self.config.get_text_config = lambda decoder: self.config
        self.generation_config = SimpleNamespace(eos_token_id=0, max_new_tokens=None)
        self.device = torch.device("cpu")

    def generate(
        self, ids: torch.Tensor, max_new_tokens: int, stopping_criteria: Any, **options: Any
    ) -> None:
        self.written = 0
        for token in self.tokens[:max_new_tokens]:
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
            self.written += 1
            if any([bool(each(ids, None).all()) for each in stopping_criteria]):
                return
        if self.error is not None:
            raise self.error


def both(client: Any, body: dict[str, Any]) -> tuple[str, str, int]:
    """The text of an answer, why it ended and its tokens, the same streamed and at once."""
    answer = client.post(TEXT, json=body).json()
    whole, counts = answer["choices"][0], answer["usage"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = events(client.post(TEXT, json=body | options))
    texts = [each["choices"][0]["text"] for each in parts]
    assert "".join(texts) == whole["text"] and last["usage"] == counts
    assert parts[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    return whole["text"], whole["finish_reason"], counts["completion_tokens"]


def test_stop_strings_are_left_out_with_every_part_of_them() -> None:
    text = "one two, three; one two, four"
    tokens = tokenizer_with(None)(text).input_ids
    with client_of(Scripted(*tokens)) as client:
        body = {"prompt": "a", "max_tokens": 40}
        assert both(client, body) == (text, "stop" if len(tokens) > 40 else "length", len(tokens))
        for stop in ("two, three", "ne two, f", ", ", "e", "r", ["four", "; o"], ["three", "re"]):
            each = [stop] if isinstance(stop, str) else stop
            end = min(text.index(one) for one in each)
            found, reason, count = both(client, body | {"stop": stop})
            assert (found, reason) == (text[:end], "stop")
            # Not a token is written after it.
            first = min(text.index(one) + len(one) for one in each)
            assert len(tokenizer_with(None).decode(tokens[: count - 1])) < first
        # What only began is text.
        for stop in ("four!", "two, fourth"):
            assert both(client, body | {"stop": stop})[:2] == (text, "length")


def test_characters_are_whole_and_none_is_dropped() -> None:
    tokenizer = tokenizer_with(None)
    text = "añ — 日本 🙂🙂 end"
    tokens = tokenizer(text).input_ids
    assert len(tokens) > len(text)
    for count in range(1, len(tokens) + 1):
        with client_of(Scripted(*tokens[:count])) as client:
            found, reason, _ = both(client, {"prompt": "a", "max_tokens": count})
            assert (found, reason) == (tokenizer.decode(tokens[:count]), "length")
    body = {"prompt": "a", "max_tokens": len(tokens), "stream": True}
    parts = [each["choices"][0]["text"] for each in events(client.post(TEXT, json=body))]
    assert "".join(parts) == text and not any("\ufffd" in part for part in parts)


def test_an_end_of_text_is_no_text_and_ends_the_answer() -> None:
    tokens = tokenizer_with(None)("done").input_ids
    with client_of(Scripted(*tokens, 0, 7, 7)) as client:
        assert both(client, {"prompt": "a"}) == ("done", "stop", len(tokens) + 1)
        assert both(client, {"prompt": "a", "max_tokens": 1})[1] == "length"


def test_errors_of_the_model_are_answered_and_the_next_request_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Scripted(7, 8, error=torch.OutOfMemoryError("secret"))
    with client_of(model) as client:
        body = {"prompt": "a"}
        answer = client.post(TEXT, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (500, "server_error")
        assert "OutOfMemoryError" in error["message"] and "secret" not in answer.text
        *_, last = events(client.post(TEXT, json=body | {"stream": True}))
        assert last == {"error": error}
        assert "secret" in caplog.text
        model.error = None
        assert client.post(TEXT, json=body).status_code == 200


# ---- bad requests -----------------------------------------------------------------------------

GOOD = {TEXT: {"prompt": "a", "max_tokens": 2}, CHAT: {"messages": said("a"), "max_tokens": 2}}
IMAGE = [{"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}]
BAD: list[tuple[str, dict[str, Any], str]] = [
    *((TEXT, {"max_tokens": bad}, "max_tokens") for bad in (0, "8", 8.5, True)),
    (TEXT, {"max_tokens": 10**30}, f"got 1 + {10**30}"),
    (CHAT, {"max_completion_tokens": 512}, "+ 512"),
    (CHAT, {"messages": said("tensor " * 600)}, "at most 512 tokens of prompt and answer"),
    *((TEXT, {"prompt": bad}, "prompt") for bad in ("", None, [], [1, 2], ["a", "b"])),
    *((CHAT, {"messages": bad}, "messages") for bad in ([], None, {}, [1])),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "'user'"),
    *(
        (CHAT, {"messages": [{"role": "user", "content": content}]}, "messages.0.content")
        for content in (None, IMAGE, [3], [{"type": "text"}], [{"type": "text", "text": 3}])
    ),
    # Thousands of faults are not all collected.
    (CHAT, {"messages": [3] * 100_000}, "messages.0: "),
    (TEXT, {"stop": [3] * 100_000}, "stop.0: "),
    (CHAT, {"chat_template_kwargs": dict.fromkeys(map(str, range(50_000)), 3)}, "kwargs.0: not"),
    (CHAT, {"messages": said("a", "b")[1:]}, "the chat template refuses them: a user speaks first"),
    (CHAT, {"messages": [said("a")[0] | {"tool_calls": [{}]}]}, "messages.0.tool_calls"),
    *((TEXT, {"model": bad}, "model") for bad in ([], True)),
    *((TEXT, {"temperature": bad}, "temperature") for bad in (float("nan"), -1, 2.5, True)),
    *((TEXT, {"top_p": bad}, "top_p") for bad in (0, 1.5)),
    (TEXT, {"seed": 2**70}, "seed"),
    *((TEXT, {"stop": bad}, "stop") for bad in ("", [3], ["a"] * 17, "a" * 257)),
    (TEXT, {"stream": "yes"}, "stream"),
    (TEXT, {"stream_options": 3}, "stream_options"),
    *(
        (path, {name: value}, f"{name}: not supported by this server")
        for path in GOOD
        for name, value in {
            **{"n": 2, "logprobs": True, "logit_bias": {"5": 1}, "presence_penalty": 0.5},
            **{"echo": True, "response_format": {"type": "json_object"}, "tools": [{}]},
            **{"chat_template": "a", "top_k": 3},
        }.items()
    ),
    (TEXT, {"logprobs": 0}, "logprobs: not supported"),
    *(
        (CHAT, {"chat_template_kwargs": {name: value}}, f"chat_template_kwargs.{name}")
        for name, value in {"documents": [], "enable_thinking": "yes"}.items()
    ),
]
BODIES = {
    "": "EOF",
    "[]": "an object",
    '{"prompt": "a", "user": ' + "[" * 100_000: "recursion limit",
    '{"prompt": "\\ud800"}': "Invalid JSON",
    '{"prompt": "a" "n": 1}': "Invalid JSON",
}


def refused(answer: Any, status: int, words: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and words in error["message"], error
    assert len(error["message"]) < 500


def test_bad_requests_are_refused_with_the_reason(client: Any) -> None:
    headers = {"content-type": "application/json"}
    for path, change, words in BAD:
        content = json.dumps(GOOD[path] | change)
        refused(client.post(path, content=content, headers=headers), 400, words)
    for content, words in BODIES.items():
        refused(client.post(TEXT, content=content, headers=headers), 400, words)
    refused(client.post(TEXT, content=b"\xff\xfe{}", headers=headers), 400, "Invalid JSON")
    for model in ("other", "", "../tiny"):
        refused(client.post(TEXT, json=GOOD[TEXT] | {"model": model}), 404, "expected 'tiny'")
    refused(client.get("/v1/models/other"), 404, "expected 'tiny'")
    for path in ("/", "/v1/responses", "/v1/completions/", "/docs", "/openapi.json"):
        refused(client.post(path, json={}), 404, "Not Found")
    for path in (TEXT, CHAT):
        refused(client.get(path), 405, "Method Not Allowed")
    refused(client.post("/v1/models"), 405, "Method Not Allowed")
    refused(client.post(TEXT, content=json.dumps(GOOD[TEXT])), 415, "application/json")
    refused(client.post(TEXT, json={"prompt": "a" * 2**21}), 413, "at most 1052672 bytes")
    assert client.get("/health").json() == {"status": "ok"}
    for path, body in GOOD.items():
        assert client.post(path, json=body).status_code == 200


def test_fields_that_clients_send_change_nothing(client: Any) -> None:
    neutral = {
        **{"n": 1, "logprobs": None, "presence_penalty": 0, "frequency_penalty": 0.0, "stop": None},
        **{"logit_bias": {}, "user": "me", "store": False, "metadata": {"a": "b"}, "stream": False},
        **{"service_tier": "auto", "stream_options": None, "seed": None, "tools": None},
        **{"response_format": {"type": "text"}, "temperature": None, "top_p": 1.0},
    }
    for path, body in GOOD.items():
        answer, plain = client.post(path, json=body | neutral), client.post(path, json=body)
        assert answer.json()["choices"] == plain.json()["choices"]


def test_a_folder_without_a_chat_template_says_so(model: Any) -> None:
    with client_of(model, None) as client:
        refused(client.post(CHAT, json=GOOD[CHAT]), 400, "has no chat template. Ask /v1/complet")
        assert client.post(TEXT, json=GOOD[TEXT]).status_code == 200


# ---- the command ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed model that may write for minutes."""
    path = tmp_path_factory.mktemp("serving") / "tiny-served"
    model: Any = converted(weight_only=True)
    model.config.max_position_embeddings = 100_000
    fp4pass.save(model, path, tokenizer=tokenizer_with(TEMPLATE))
    return path


@pytest.mark.parametrize(
    ("sign", "code"),
    [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_no_client_holds_the_server(folder: Path, sign: int, code: int) -> None:
    pytest.importorskip("fastapi")
    command = [sys.executable, "-m", "fp4pass", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    address = line.removeprefix("tiny-served is served at http://")
    host, port = address.removesuffix("/v1").split(":")
    assert (host, address[-3:]) == ("127.0.0.1", "/v1")
    opened = []

    def ask(body: Any, **options: Any) -> Any:
        opened.append(http.client.HTTPConnection(host, int(port), timeout=60))
        content = json.dumps(body) if isinstance(body, dict) else body
        opened[-1].request("POST", TEXT, content, {"Content-Type": "application/json"}, **options)
        return opened[-1]

    def memory() -> int:
        text = Path(f"/proc/{process.pid}/statm")
        return int(text.read_text().split()[1]) * 4096 if text.exists() else 0

    try:
        before = memory()
        large = b"x" * 2**16
        for body in (large * 1000, (large for _ in range(1000))):
            answer = ask(body, encode_chunked=not isinstance(body, bytes)).getresponse()
            assert answer.status == 413
        assert memory() - before < 2**25
        endless = {"prompt": "A", "max_tokens": 50_000, "temperature": 1}
        # Those who are gone are not waited for: while it is written, streamed or not, and in line.
        stream = ask(endless | {"stream": True}).getresponse()
        assert stream.read(400).startswith(b"data: ")
        waiting = ask(endless)
        time.sleep(0.3)
        stream.close()
        opened[-2].close()
        waiting.close()
        last = ask({"prompt": "A", "max_tokens": 2}).getresponse()
        assert json.loads(last.read())["usage"]["completion_tokens"] == 2
        # Nor is the end.
        stream = ask(endless | {"stream": True}).getresponse()
        stream.read(400)
        ask(endless)
        start = time.monotonic()
        process.send_signal(sign)
        assert process.wait(timeout=30) == code
        assert time.monotonic() - start < 3
        with suppress(http.client.IncompleteRead):
            stream.read()
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        for each in opened:
            each.close()


def test_what_cannot_be_served_is_refused_in_a_line(folder: Path, tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        done = run("serve", *arguments, code=2)
        assert done.stdout == "" and done.stderr.count("\n") == 1, done.output
        return done.stderr

    assert "expected a folder with packed weights, got nothing there" in refused("/nowhere")
    assert "Quantize the model first (fp4pass quantize)" in refused(str(BUNDLED))
    fp4pass.save(converted(weight_only=True), tmp_path / "bare")
    for path in (tmp_path / "bare").glob("*token*"):
        path.unlink()
    assert "expected a tokenizer beside the weights" in refused(str(tmp_path / "bare"))
    assert "expected one of debug, info" in refused(str(folder), "--log-level", "loud")
    assert "--continuous-batching" in refused(str(folder), "--continuous-batching")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1, port {port}: Address already in use" in refused(
            str(folder), "--port", port
        )
    assert "Give another --port" in refused(str(folder), "--port", "70000")


def test_what_the_server_needs_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fp4pass.integrations.serving", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = run("serve", str(folder), code=2)
    assert "needs uvicorn" in done.stderr and "pip install 'fp4pass[serving]'" in done.stderr
