"""Data of each kind as batches: which tokens, in which windows."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from calibration.readers import TEMPLATE, TURNS, tokenizer
from evaluation.toys import Tokens
from small_models import TINY, language_model, tokens
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fp4pass
from fp4pass.calibration import batches
from fp4pass.errors import CalibrationError, OptionError, ShapeError
from fp4pass.evaluation import token_windows


def ids(found: list[Any]) -> list[int]:
    """All visible tokens of batches, in their order."""
    shown: list[int] = []
    for batch in found:
        plain = {"input_ids": batch} if isinstance(batch, Tensor) else batch
        mask = plain.get("attention_mask", torch.ones_like(plain["input_ids"]))
        shown += plain["input_ids"][mask.bool()].tolist()
    return shown


def written(found: list[Any], reader: Any) -> str:
    return str(reader.decode(ids(found)))


# ---- what is batches already -------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        [torch.ones(2, 4)],
        [{"input_ids": torch.ones(2, 4, dtype=torch.long)}],
        [(torch.ones(2, 4), torch.ones(1))],
        [[torch.ones(2, 4)]],
        [{"text": "a", "pixels": [torch.ones(2)]}, 3][1:],
        [],
        DataLoader(torch.arange(8)),
    ],
)
def test_batches_are_returned_as_they_are(data: Any) -> None:
    assert batches(data) is data


@pytest.mark.core
def test_an_iterator_of_batches_is_read_one_at_a_time() -> None:
    read: list[int] = []

    def make() -> Any:
        for i in range(3):
            read.append(i)
            yield torch.full((2, 4), float(i))

    found = batches(make())
    assert read == [0]
    assert [int(batch[0, 0]) for batch in found] == [0, 1, 2]


# ---- texts --------------------------------------------------------------------------------------


@pytest.mark.core
def test_texts_are_packed_behind_bos() -> None:
    found = batches(["abc", "", "de", "fghij"], Tokens(), seq_len=5, batch_size=1)
    assert [batch.tolist() for batch in found] == [[[0, 1, 2, 3, 0]], [[4, 5, 0, 6, 7]]]
    assert all(batch.dtype == torch.int64 for batch in found)
    one = batches("abc\n<|doc|>\nde\n<|doc|>\nfghij", Tokens(), seq_len=5, batch_size=2)
    assert torch.equal(one[0], torch.cat(found)) and len(one) == 1


@pytest.mark.core
def test_windows_of_a_text_are_those_of_token_windows() -> None:
    text = "\n<|doc|>\n".join("abcdefgh" * 7 for _ in range(9))
    wanted = token_windows(Tokens(), text, window=16, windows=5)
    found = batches(text, Tokens(), samples=5, seq_len=16, batch_size=2)
    assert [len(batch) for batch in found] == [2, 2, 1] and torch.equal(torch.cat(found), wanted)
    every = {tuple(row) for row in token_windows(Tokens(), text, window=16).tolist()}
    drawn = [batches(text, Tokens(), samples=5, seq_len=16, seed=seed)[0] for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert {tuple(row) for row in drawn[0].tolist()} <= every and drawn[0].shape == (5, 16)


def test_a_text_shorter_than_a_window_is_one_shorter_window(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    assert batches(["abc"], Tokens())[0].tolist() == [[0, 1, 2, 3]]
    assert "data has 1 examples, 128 were asked for." in caplog.text
    assert batches(["a"], Tokens(bos=None))[0].tolist() == [[1]]


@pytest.mark.parametrize("data", ["", " \n", ["", "  "], [{"text": None}, {"text": ""}]])
def test_no_text_is_an_error(data: Any) -> None:
    with pytest.raises(CalibrationError, match="data: expected text to learn from, got none"):
        batches(data, Tokens())


# ---- token ids ----------------------------------------------------------------------------------


def test_token_windows_are_all_taken() -> None:
    windows = torch.arange(60, dtype=torch.int32).view(10, 6)
    found = batches(windows, samples=3, seq_len=4, batch_size=4)
    assert [len(batch) for batch in found] == [4, 4, 2]
    assert torch.equal(torch.cat(found), windows.long())
    assert batches(torch.arange(11), seq_len=4)[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ShapeError, match=r"windows have 600 tokens, but the context .* 512"):
        batches(torch.ones(2, 600, dtype=torch.long), model=language_model())


@pytest.mark.core
def test_rows_of_token_ids_stay_whole_without_a_tokenizer() -> None:
    rows = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11]]
    for data in (rows, [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]):
        (found,) = batches(data, seq_len=4)
        assert found["input_ids"].tolist() == [[1, 2, 3, 0], [4, 5, 10, 11], [6, 7, 8, 9]]
        assert found["attention_mask"].tolist() == [[1, 1, 1, 0], [1] * 4, [1] * 4]
    tensors = [{"input_ids": torch.tensor(row)} for row in rows]
    assert batches(tensors, seq_len=4)[0]["input_ids"].shape == (3, 4)


# ---- chats --------------------------------------------------------------------------------------


@pytest.mark.core
def test_a_chat_goes_through_the_template() -> None:
    reader = tokenizer()
    text = "system: be brief\nuser: how do I sort a list?\nassistant: with sorted(list)\n"
    wanted = [reader.bos_token_id, *reader(text, add_special_tokens=False)["input_ids"]]
    for data in (TURNS, [TURNS], [{"messages": TURNS, "id": 3}], [tuple(TURNS)]):
        found = batches(data, reader)
        # One bos, that of the template.
        assert ids(found) == wanted
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    assert ids(batches([parts], reader)) == wanted


@pytest.mark.core
def test_tools_and_their_calls_reach_the_template() -> None:
    tool = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "add", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_calls": None},
    ]
    reader = tokenizer()
    text = written(batches([{"messages": turns, "tools": [tool]}], reader), reader)
    assert text.count('"name": "sum"') == 2 and "tools [" in text and "tool: 3" in text
    without = written(batches([{"messages": turns, "tools": None}], reader), reader)
    assert "tools" not in without and '"arguments": {"a": 1}' in without


@pytest.mark.core
def test_chats_stay_whole_and_padding_is_hidden() -> None:
    reader = tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    chats = [[{"role": "user", "content": "list " * n}] for n in (4, 9, 3)]
    lengths = [len(ids(batches([chat], reader))) for chat in chats]
    (found,) = batches(chats, reader, seq_len=max(lengths))
    # The first and the last go together; the long one fills a window.
    assert found["input_ids"].shape == (2, max(lengths))
    assert found["attention_mask"].sum(1).tolist() == [lengths[0] + lengths[2], lengths[1]]
    short = batches(chats[1:2], reader, seq_len=4)
    assert ids(short) == ids(batches(chats[1:2], reader))


def test_a_tokenizer_without_a_template_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(CalibrationError, match=r"no chat template\. Set tokenizer\.chat_template"):
        batches([TURNS], tokenizer(None))
    turns = [*TURNS, {"role": "critic", "content": "no"}]
    with pytest.raises(CalibrationError, match=r"row 1: .* refuses it: no critics here\. Correct"):
        batches([TURNS, turns], tokenizer())


# ---- rows ---------------------------------------------------------------------------------------

ASKED = "user: add\n\n1 2\nassistant: 3\n"


@pytest.mark.core
@pytest.mark.parametrize(
    ("row", "chat", "plain"),
    [
        ({"text": "a list", "label": 1}, "a list", "a list"),
        ({"body": "a list"}, "a list", "a list"),
        ({"prompt": "add", "response": "3"}, "user: add\nassistant: 3\n", "add\n3"),
        ({"question": "add", "answer": "3", "id": "x"}, "user: add\nassistant: 3\n", "add\n3"),
        ({"instruction": "add", "input": "1 2", "output": "3"}, ASKED, "add\n\n1 2\n3"),
        ({"instruction": "add", "input": "", "output": "3"}, "user: add\nassistant: 3\n", "add\n3"),
    ],
)
def test_columns_of_a_row_are_found(row: dict[str, Any], chat: str, plain: str) -> None:
    """With a chat template answers are turns; without one, lines."""
    reader = tokenizer(TEMPLATE.replace("{{ bos_token }}", ""))
    assert chat in written(batches([row], reader), reader)
    reader = tokenizer(None)
    assert written(batches([row], reader), reader) == reader.bos_token + plain


@pytest.mark.core
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"a": "x", "b": "y"}], r"data, row 0: .*, got a \(str\), b \(str\)\. Looked for: input"),
        ([{"text": "a"}, {"b": 1, "c": "d"}], r"data, row 1: .* got b \(int\), c \(str\)"),
        ([{"text": "a"}, {"text": 3}], "data, row 1: text: expected a string, got int 3"),
        ([{"input_ids": [1]}, {"input_ids": "a"}], "row 1: input_ids: expected a list of integ"),
        ([{"messages": TURNS}, {"messages": "a"}], "row 1: messages: expected a list of messages"),
        (["a", 3], "data, row 1: expected a text, a chat, a row or a list of token ids, got int"),
        ({"text": "a"}, r"got dict\. Put a single batch, or a single row, into a list"),
    ],
)
def test_what_a_row_lacks_is_said(rows: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        batches(rows, tokenizer())


# ---- what the model takes -----------------------------------------------------------------------


def test_windows_are_cut_to_the_context(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = batches("a b c " * 2000, model=language_model(), seq_len=4096, samples=2)
    assert found[0].shape == (2, 512)
    assert "windows have 512 tokens, the context of the model, and not 4096" in caplog.text


@pytest.mark.core
def test_the_first_batch_is_one_window_where_layers_are_calibrated_one_by_one() -> None:
    model = fp4pass.prepare(language_model(), sequential=True)
    found = batches(tokens(6, 8), model=model, batch_size=4)
    assert [len(batch) for batch in found] == [1, 4, 1]


@pytest.mark.core
def test_a_decoder_reads_the_same_text() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)
    model = transformers.T5ForConditionalGeneration(config).eval()
    (even,) = batches(["abcdefgh"], Tokens(), model=model)
    assert torch.equal(even["labels"], even["input_ids"]) and even.keys() == {"input_ids", "labels"}
    (padded,) = batches([[1, 2, 3], [4, 5]], model=model, seq_len=3)
    assert torch.equal(padded["decoder_attention_mask"], padded["attention_mask"])
    assert model(**padded).logits.isfinite().all()


def test_a_model_of_another_input_needs_more_than_text() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.ViTConfig(**sizes, num_attention_heads=2, image_size=32, patch_size=16)
    with pytest.raises(OptionError, match="A model of type vit needs more than text"):
        batches(["abc"], Tokens(), model=transformers.ViTModel(config))


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(OptionError, match=r"tokenizer: expected one .* Pass tokenizer="):
        batches(["abc"], model=nn.Linear(4, 4))
    with pytest.raises(OptionError, match="tokenizer: expected a tokenizer or a processor"):
        batches(["abc"], str(TINY))
    # That of the folder of the model.
    assert ids(batches(["a list"], model=language_model()))[0] == 0
