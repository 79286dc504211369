"""Windows of a text, and which of their tokens are scored."""

from __future__ import annotations

import pytest
import torch
from evaluation.toys import Tokens

from fp4pass.calibration.windows import scored_bytes
from fp4pass.errors import OptionError, ShapeError
from fp4pass.evaluation import cut_windows, token_windows


def test_documents_are_packed_behind_bos():
    text = "ab\ncd\n<|doc|>\nefg\n<|doc|>\n\n<|doc|>\nh\n"
    newline = ord("\n") - 96
    ids = token_windows(Tokens(), text, window=2)
    assert ids.flatten().tolist() == [0, 1, 2, newline, 3, 4, 0, 5, 6, 7, 0, 8]
    without = token_windows(Tokens(bos=None), text, window=3)
    assert without.tolist() == [[1, 2, newline], [3, 4, 5], [6, 7, 8]]


def test_windows_are_spread_evenly_and_the_rest_is_dropped():
    ids = token_windows(None, torch.arange(43), window=4, windows=4)
    assert ids[:, 0].tolist() == [0, 8, 20, 28]
    assert ids.dtype == torch.int64
    assert len(token_windows(None, torch.arange(43), window=4)) == 10
    assert len(token_windows(None, torch.arange(43), window=4, windows=99)) == 10
    rows = torch.arange(12, dtype=torch.int32).view(3, 4)
    assert token_windows(None, rows, windows=2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_text_shorter_than_a_window():
    with pytest.raises(ShapeError, match="expected at least 5 tokens, those of a window, got 4"):
        token_windows(Tokens(), "abc", window=5)
    with pytest.raises(ShapeError, match="got 7"):
        token_windows(None, torch.arange(7))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("abc", {"tokenizer": None}, "tokenizer: expected one"),
        (torch.ones(8), {"window": 4}, "got a tensor of torch.float32"),
        (torch.ones(2, 2, 2, dtype=torch.int64), {}, "got a tensor of torch.int64"),
        ("abc", {"window": 1}, "window: expected at least 2"),
        ("abc", {"windows": 0}, "windows: expected at least 1"),
    ],
)
def test_bad_arguments(text, options, message):
    tokenizer = options.pop("tokenizer", Tokens())
    with pytest.raises(OptionError, match=message):
        token_windows(tokenizer, text, **options)


@pytest.mark.core
@pytest.mark.parametrize(
    ("tokens", "window", "stride"), [(43, 8, 3), (43, 8, 7), (8, 8, 1), (9, 8, 5), (40, 8, 8)]
)
def test_sliding_windows_score_each_token_once(tokens, window, stride):
    cut = cut_windows(None, torch.arange(tokens), window=window, stride=stride)
    scored = [each.ids[each.first :].tolist() for each in cut]
    if stride < window:
        assert [i for ids in scored for i in ids] == list(range(1, tokens))
        assert all(each.first >= window - stride for each in cut[1:])
    else:
        same = token_windows(None, torch.arange(tokens), window=window)
        assert torch.equal(torch.stack([each.ids for each in cut]), same)
    assert all(len(each.ids) == window for each in cut)
    assert [each.units.unique().tolist() for each in cut] == [[i] for i in range(len(cut))]
    assert (cut.unit, cut[0].first, cut.longest) == ("window", 1, window)


@pytest.mark.core
@pytest.mark.parametrize("stride", [None, 2, 5])
def test_windows_within_documents(stride):
    documents = ["abcdefghijk", "x", "lmn", "opqrstuvwxyzabc"]
    text = "\n<|doc|>\n".join(documents)
    cut = cut_windows(Tokens(), text, window=5, stride=stride, within_documents=True)
    scored: dict[int, list[int]] = {}
    for each in cut:
        (unit,) = each.units.unique().tolist()
        scored.setdefault(unit, []).extend(each.ids[each.first :].tolist())
        whole = [0, *(ord(c) - 96 for c in documents[unit])]
        assert any(whole[i : i + len(each.ids)] == each.ids.tolist() for i in range(len(whole)))
    if stride == 2:
        wanted = {i: [ord(c) - 96 for c in words] for i, words in enumerate(documents)}
        assert scored == wanted
    assert [len(each.ids) for each in cut if len(each.ids) < 5] == [2, 4]
    # A window scores nothing without a token before it.
    assert all(each.first for each in cut)
    assert {len({len(w.ids) for w in batch}) for batch in cut.batches(4)} == {1}
    assert [w for batch in cut.batches(4) for w in batch] == list(cut)


@pytest.mark.core
def test_tokens_belong_to_documents():
    text = "abcd\n<|doc|>\nef\n<|doc|>\nghijk"
    cut = cut_windows(Tokens(), text, window=7)
    # Lines as other systems end them are lines.
    other = cut_windows(Tokens(), text.replace("\n", "\r\n"), window=7)
    assert [window.ids.tolist() for window in other] == [window.ids.tolist() for window in cut]
    assert [each.ids.tolist() for each in cut] == [[0, 1, 2, 3, 4, 0, 5], [6, 0, 7, 8, 9, 10, 11]]
    assert [each.units.tolist() for each in cut] == [[0, 0, 0, 0, 1, 1], [2, 2, 2, 2, 2, 2]]
    assert cut.unit == "document"
    # The first token of a window is not scored, and bos is no text.
    assert scored_bytes(Tokens(), cut).tolist() == [4, 1, 5]
    assert cut_windows(Tokens(), "abcdefghij", window=5).unit == "window"
    others = [{"window": 6}, {"window": 7, "stride": 6}, {"window": 7, "within_documents": True}]
    digests = {cut_windows(Tokens(), text, **options).digest for options in others}
    assert len(digests | {cut.digest}) == 4
