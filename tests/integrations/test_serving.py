"""The server of packed folders, and transformers' continuous batches of converted models."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
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


# ---- the server ---------------------------------------------------------------------------------

# transformers finds the answer of a model of this type by its own marks.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
QUESTION = "What is a tensor?"


def tokenizer_with(template: str | None) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return converted(weight_only=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Path:
    """A packed model that may write for minutes."""
    path = tmp_path_factory.mktemp("serving") / "tiny-served"
    model.config.max_position_embeddings = 100_000
    fp4pass.save(model, path, tokenizer=tokenizer_with(TEMPLATE))
    return path


def started(folder: Path) -> tuple[Any, str]:
    """A server of a folder, and its address."""
    pytest.importorskip("fastapi")
    command = [sys.executable, "-m", "fp4pass", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line.startswith("tiny-served is served at http://127.0.0.1:") and line.endswith("/v1")
    return process, line.split()[-1]


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    process, address = started(folder)
    with process, openai.OpenAI(base_url=address, api_key="none", max_retries=0) as found:
        yield found
        process.send_signal(signal.SIGTERM)
        assert (process.wait(timeout=30), process.stdout.read()) == (0, "")


def generated(model: Any, text: str) -> str:
    """What `generate` writes after a text."""
    tokenizer = tokenizer_with(None)
    ids = tokenizer(text, return_tensors="pt").input_ids
    found = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(found, skip_special_tokens=True)


def test_answers_are_those_of_generate(model: Any, client: Any) -> None:
    options: dict[str, Any] = {"model": "tiny-served", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(prompt=QUESTION, **options)
    assert whole.choices[0].text == generated(model, QUESTION)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 12)
    asked = [{"role": "user", "content": QUESTION}]
    chat = generated(model, f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    answer = client.chat.completions.create(messages=asked, **options)
    assert answer.choices[0].message.content == chat != whole.choices[0].text
    parts = list(client.chat.completions.create(messages=asked, stream=True, **options))
    assert "".join(each.choices[0].delta.content or "" for each in parts) == chat
    assert len(parts) > 4
    stop = whole.choices[0].text[4:8]
    stopped = client.completions.create(prompt=QUESTION, stop=stop, **options)
    assert stopped.choices[0].text == whole.choices[0].text.partition(stop)[0]
    parts = list(client.completions.create(prompt=QUESTION, stop=[stop], stream=True, **options))
    assert "".join(each.choices[0].text for each in parts) == stopped.choices[0].text


def test_a_server_has_the_model_of_its_folder_alone(client: Any) -> None:
    openai = pytest.importorskip("openai")
    assert [each.id for each in client.models.list().data] == ["tiny-served"]
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="other", prompt="a")


@pytest.mark.parametrize(
    "wrong",
    [{"n": 2}, {"logprobs": True}, {"max_tokens": 0}, {"messages": []}, {"messages": [{}]}],
    ids=str,
)
def test_what_would_be_ignored_is_refused(client: Any, wrong: dict[str, Any]) -> None:
    openai = pytest.importorskip("openai")
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "n": 1, "user": "me"}
    assert client.chat.completions.create(model="tiny-served", **asked).choices
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny-served", **asked | wrong)
    assert f'"{next(iter(wrong))}: ' in error.value.response.text


def test_no_client_holds_the_server(folder: Path) -> None:
    openai = pytest.importorskip("openai")
    process, address = started(folder)
    with process, openai.OpenAI(base_url=address, api_key="none") as client:
        options = {"model": "tiny-served", "prompt": "A", "max_tokens": 50_000, "temperature": 1}
        next(iter(client.completions.create(stream=True, **options)))
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert time.monotonic() - start < 3


def test_what_cannot_be_served_is_refused_in_a_line(folder: Path, tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        done = run("serve", *arguments, code=2)
        assert done.stdout == "" and done.stderr.count("\n") == 1, done.output
        return done.stderr

    assert "expected a folder with packed weights, got none" in refused("/nowhere")
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
    from fp4pass.integrations import serving

    monkeypatch.setattr(serving, "is_serve_available", lambda: False)
    done = run("serve", str(folder), code=2)
    assert "needs fastapi" in done.stderr and "pip install 'fp4pass[serving]'" in done.stderr
