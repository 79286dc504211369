"""transformers' server and its continuous batches, of converted models and of packed folders."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from compiled_quality import BUNDLED
from torch import nn

import fp4pass
from fp4pass.errors import OptionError

transformers = pytest.importorskip("transformers")

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [40] * 9]
DEVICE = "cpu"


def converted(**options: Any) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    return fp4pass.convert(model.eval().to(DEVICE), "nvfp4", "naive", **options)


def batched(model: Any) -> list[list[int]]:
    """What continuous batches write behind the prompts."""
    config = transformers.GenerationConfig(
        max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    found = model.generate_batch(
        PROMPTS, generation_config=config, continuous_batching_config=pages, progress_bar=False
    )
    assert not any(each.error for each in found.values())
    return [found[name].generated_tokens for name in sorted(found)]


def alone(model: Any) -> list[list[int]]:
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    device = model.device
    each = (model.generate(torch.tensor([ids], device=device), **options)[0] for ids in PROMPTS)
    return [text[len(ids) :].tolist() for ids, text in zip(PROMPTS, each, strict=True)]


@pytest.mark.slow
def test_requests_that_run_together_get_what_each_gets_alone() -> None:
    model = converted(weight_only=True)
    assert batched(model) == alone(model)


# As models of this type have it: the server takes answers apart by that.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTIONS = ["What is a tensor?", "def load(path):"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed model that takes chats."""
    path = tmp_path_factory.mktemp("serving") / "tiny-served"
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.chat_template = TEMPLATE
    fp4pass.save(converted(weight_only=True), path, tokenizer=tokenizer)
    return path


@contextmanager
def server(*arguments: str) -> Iterator[tuple[str, str]]:
    """What `fp4pass serve` prints when it is ready, and its address."""
    command = [sys.executable, "-m", "fp4pass", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        yield line, line.rpartition(" ")[2]
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    # One line, and the exit code of an interrupted command.
    assert (rest, process.returncode) == ("", 130)


@pytest.mark.slow
@pytest.mark.parametrize("batching", [False, True])
def test_answers_of_the_server_are_those_of_generate(folder: Path, batching: bool) -> None:
    openai = pytest.importorskip("openai")
    pytest.importorskip("fastapi")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = fp4pass.load(folder)
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0}

    def generated(text: str) -> str:
        ids = tokenizer(text, return_tensors="pt").input_ids
        found = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        return tokenizer.decode(found, skip_special_tokens=True)

    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    begin, end = "<|im_start|>", "<|im_end|>\n"
    chats = [generated(f"{begin}user\n{each}{end}{begin}assistant\n") for each in QUESTIONS]
    texts = [generated(question) for question in QUESTIONS]
    assert all([*chats, *texts])
    extra = ["--continuous-batching"] if batching else []
    with server(str(folder), *extra) as (line, address):
        assert line == f"tiny-served is served at {address}" and address.endswith("/v1")
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            (listed,) = client.models.list().data
            assert listed.id == client.models.retrieve("tiny-served").id == "tiny-served"
            chat, complete = client.chat.completions.create, client.completions.create
            for name in ("tiny-served", str(folder), f"{folder}"):
                answer = chat(model=name, messages=asked[0], **options)
                assert answer.choices[0].message.content == chats[0]
            with ThreadPoolExecutor() as pool:
                both = pool.map(lambda each: chat(model=name, messages=each, **options), asked)
                assert [each.choices[0].message.content for each in both] == chats
            stream = chat(model=name, messages=asked[1], stream=True, **options)
            parts = [each.choices[0].delta.content or "" for each in stream if each.choices]
            assert "".join(parts) == chats[1] and len(parts) > 2
            for prompt, text in zip(QUESTIONS, texts, strict=True):
                answer = complete(model=name, prompt=prompt, **options)
                assert answer.choices[0].text == text and answer.usage.completion_tokens == 12
            with pytest.raises(openai.NotFoundError, match=r"expected 'tiny-served'.*got 'other'"):
                chat(model="other", messages=asked[0], **options)
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve("other")
            hot = {**options, "temperature": 0.7}
            if batching:
                with pytest.raises(openai.BadRequestError, match="samples all requests alike"):
                    chat(model=name, messages=asked[0], **hot)
            else:
                assert chat(model=name, messages=asked[0], **hot).choices[0].message.content


def test_a_folder_is_served_packed(folder: Path) -> None:
    from fp4pass.integrations.serving import load_packed

    served = load_packed(folder, DEVICE, "auto")
    model = converted(weight_only=True)
    assert str(fp4pass.report(served)) == str(fp4pass.report(model))
    assert alone(served) == alone(model)
    with pytest.raises(OptionError, match=r"expected --dtype float32, .* got float16"):
        load_packed(folder, DEVICE, torch.float16)


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


def test_what_the_server_needs_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    done = run("serve", str(folder), code=2)
    assert "pip install 'fp4pass[serving]'" in done.stderr


def test_a_port_that_is_taken_is_refused_before_the_model_is_loaded() -> None:
    from fp4pass._compat.transformers_serving import _bound

    (first,) = _bound("127.0.0.1", 0)
    port = first.getsockname()[1]
    first.listen()
    with pytest.raises(OptionError, match=rf"127\.0\.0\.1, port {port}: Address already in use"):
        _bound("127.0.0.1", port)
    first.close()
    # Of a name with several addresses all have one port.
    several = _bound("localhost", 0)
    assert len({each.getsockname()[1] for each in several}) == 1
    for each in several:
        each.close()
    with pytest.raises(OptionError, match="Give another --port"):
        _bound("127.0.0.1", 70000)
