"""Perplexity, KL and output errors against straightforward float64 computations."""

from __future__ import annotations

import copy
import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fp4pass
from fp4pass.errors import OptionError, ShapeError, StateError
from fp4pass.evaluation.intervals import SUMS, Bootstrap, _quantile, changes, intervals
from fp4pass.evaluation.logits import logits_reader
from fp4pass.evaluation.metrics import Evaluation, output_errors, token_windows
from fp4pass.evaluation.windows import cut_windows, scored_bytes

TINY_LM = Path(__file__).parents[2] / "examples" / "tiny_lm"
VOCABULARY = 40


class Tokens:
    """A tokenizer of one token a character; id 0 is bos if it has one."""

    def __init__(self, bos: int | None = 0) -> None:
        self.bos_token_id = bos

    def __call__(self, documents: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(c) - 96 for c in document] for document in documents]}

    def batch_decode(self, rows: list[list[int]], **_: object) -> list[str]:
        return ["".join(chr(i + 96) for i in row if i) for row in rows]


class Toy(nn.Module):
    """Logits of a token from that token alone, which is causal enough."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)
        self.unused = nn.Linear(32, 32)
        self.head = nn.Linear(32, vocabulary)

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids)
        return SimpleNamespace(logits=self.head(x + self.down(F.relu(self.up(x)))))


@pytest.fixture
def toy() -> Toy:
    torch.manual_seed(0)
    return Toy().eval()


@pytest.fixture(scope="module")
def tiny():
    """The bundled model, a 4-bit copy of it, its tokenizer, and 8 held-out windows of 64."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_LM)
    converted = fp4pass.convert(copy.deepcopy(model), "mxfp4", "sse")
    text = (TINY_LM / "eval.txt").read_text(encoding="utf-8")
    return model, converted, tokenizer, token_windows(tokenizer, text, window=64, windows=8)


# ---- windows ----------------------------------------------------------------------------------


def test_documents_are_packed_behind_bos():
    text = "ab\ncd\n<|doc|>\nefg\n<|doc|>\n\n<|doc|>\nh\n"
    newline = ord("\n") - 96
    ids = token_windows(Tokens(), text, window=2)
    assert ids.flatten().tolist() == [0, 1, 2, newline, 3, 4, 0, 5, 6, 7, 0, 8]
    without = token_windows(Tokens(bos=None), text, window=3)
    assert without.tolist() == [[1, 2, newline], [3, 4, 5], [6, 7, 8]]


def test_doc_line_is_not_searched_inside_lines():
    text = "a<|doc|>\n<|doc|>b"
    assert token_windows(Tokens(), text, window=18).shape == (1, 18)


def test_windows_are_spread_evenly_and_the_rest_is_dropped():
    ids = token_windows(None, torch.arange(43), window=4, windows=4)
    assert ids[:, 0].tolist() == [0, 8, 20, 28]
    assert ids.dtype == torch.int64
    assert len(token_windows(None, torch.arange(43), window=4)) == 10
    assert len(token_windows(None, torch.arange(43), window=4, windows=99)) == 10
    rows = torch.arange(12, dtype=torch.int32).view(3, 4)
    assert token_windows(None, rows, windows=2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("text", ["", "\n", "<|doc|>", "\n<|doc|>\n  \n<|doc|>\n"])
def test_empty_text(text):
    with pytest.raises(ShapeError, match="empty"):
        token_windows(Tokens(), text)


def test_text_shorter_than_a_window():
    with pytest.raises(ShapeError, match="4 tokens, and a window of 5"):
        token_windows(Tokens(), "abc", window=5)
    with pytest.raises(ShapeError, match="7 tokens"):
        token_windows(None, torch.arange(7))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("abc", {"tokenizer": None}, "tokenizer is needed"),
        (["abc"], {}, "is a list"),
        (torch.ones(8), {"window": 4}, "is a Tensor"),
        (torch.ones(2, 2, 2, dtype=torch.int64), {}, "is a Tensor"),
        ("abc", {"window": 1}, "window is 1"),
        ("abc", {"windows": 0}, "windows is 0"),
    ],
)
def test_bad_arguments(text, options, message):
    tokenizer = options.pop("tokenizer", Tokens())
    with pytest.raises(OptionError, match=message):
        token_windows(tokenizer, text, **options)


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
    assert {len({len(w.ids) for w in batch}) for batch in cut.batches(4)} == {1}
    assert [w for batch in cut.batches(4) for w in batch] == list(cut)


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


def test_strides_that_cannot_be():
    for stride in (0, 6):
        with pytest.raises(OptionError, match=f"stride is {stride}; 1 to 5"):
            cut_windows(Tokens(), "abcdefghi", window=5, stride=stride)
    with pytest.raises(OptionError, match="cut already"):
        cut_windows(None, torch.arange(12).view(3, 4), stride=2)
    with pytest.raises(OptionError, match="Documents are not known"):
        cut_windows(None, torch.arange(1000), within_documents=True)


# ---- evaluate ---------------------------------------------------------------------------------


@torch.no_grad()
def straightforward(model, reference, ids):
    """Mean nll, KL and agreement in float64, a window at a time."""
    terms = []
    for row in ids:
        q = model(row[None]).logits[0, :-1].double().log_softmax(-1)
        p = reference(row[None]).logits[0, :-1].double().log_softmax(-1)
        nll = F.nll_loss(q, row[1:], reduction="none")
        kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
        terms.append(torch.stack((nll, kl, (p.argmax(-1) == q.argmax(-1)).double())))
    return torch.cat(terms, 1).mean(1).tolist()


@pytest.mark.parametrize("chunk", [None, 3 * 2048])
def test_against_float64(tiny, chunk, monkeypatch):
    if chunk:
        monkeypatch.setattr(sys.modules["fp4pass.evaluation.metrics"], "_CHUNK", chunk)
    model, converted, tokenizer, ids = tiny
    found = fp4pass.evaluate(converted, tokenizer, ids, model, batch_size=3, progress=False)
    nll, kl, top1 = straightforward(converted, model, ids)
    assert math.log(found.perplexity) == pytest.approx(nll, rel=1e-5)
    # A KL is a small difference of float32 logits, and batches of another size round otherwise.
    assert found.kl == pytest.approx(kl, rel=1e-3)
    assert found.top1 == pytest.approx(top1, abs=1.5 / found.tokens)
    assert found.kl > 0.01
    # In a byte-level vocabulary each character of a token stands for one byte.
    names = [tokenizer.convert_ids_to_tokens(row[1:]) for row in ids.tolist()]
    size = sum(len(name) for row in names for name in row if name != "<|doc|>")
    assert found.bits_per_byte == pytest.approx(nll * found.tokens / math.log(2) / size, rel=1e-3)
    assert (found.windows, found.tokens) == (8, 8 * 63)


def test_a_model_against_itself(tiny):
    model, _, tokenizer, ids = tiny
    found = fp4pass.evaluate(model, tokenizer, ids, model, progress=False)
    assert (found.kl, found.top1) == (0.0, 1.0)
    assert found.to_dict() == {
        "windows": 8,
        "tokens": 504,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "kl": 0.0,
        "top1": 1.0,
        "top_p_kl": 0.0,
        "top_p": 0.95,
        "unit": "window",
        "units": 8,
        "confidence": 0.95,
        "intervals": {name: list(ends) for name, ends in found.intervals.items()},
        "digest": found.digest,
    }
    assert found.intervals["kl"] == (0.0, 0.0) and found.intervals["top1"] == (1.0, 1.0)
    assert torch.tensor(found.to_dict(sums=True)["sums"]).shape == (8, len(SUMS))


def test_text_without_reference_or_progress(toy, capsys):
    text = "abcdefgh" * 10
    found = fp4pass.evaluate(toy, Tokens(), text, window=9, progress=False)
    ids = token_windows(Tokens(), text, window=9)
    nll, _, _ = straightforward(toy, toy, ids)
    assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-6)
    assert found.bits_per_byte == pytest.approx(nll / math.log(2), rel=1e-6)
    assert (found.kl, found.top1) == (None, None)
    assert fp4pass.evaluate(toy, None, ids, progress=False).bits_per_byte is None
    assert capsys.readouterr() == ("", "")
    fp4pass.evaluate(toy, None, ids)
    assert "evaluate" in capsys.readouterr().err


def test_a_token_that_is_ruled_out_adds_nothing(toy):
    ids = torch.randint(1, VOCABULARY, (2, 16))
    with torch.no_grad():
        toy.head.bias[0] = -math.inf
    found = fp4pass.evaluate(copy.deepcopy(toy), None, ids, toy, progress=False)
    assert (found.kl, found.top1) == (0.0, 1.0)


@pytest.mark.parametrize("ruled_out", [1, VOCABULARY - 1])
def test_what_a_model_rules_out_is_infinitely_far(toy, ruled_out):
    other = copy.deepcopy(toy)
    with torch.no_grad():
        toy.head.bias[0] += 9
        other.head.bias[:ruled_out] = -math.inf
    ids = torch.full((4, 16), VOCABULARY - 1)
    found = fp4pass.evaluate(other, None, ids, toy, progress=False)
    assert (found.kl, found.top_p_kl) == (math.inf, math.inf)
    assert set(found.intervals) == {"perplexity", "top1"}
    difference = found.difference(fp4pass.evaluate(toy, None, ids, toy, progress=False))
    assert (difference.kl.value, difference.kl.significant) == (math.inf, None)


def test_compiled_models_and_plain_logits(toy):
    class Plain(Toy):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).logits

    plain = Plain().eval()
    plain.load_state_dict(toy.state_dict())
    ids = torch.randint(1, VOCABULARY, (3, 16))
    wrapped = torch.compile(plain, backend="eager")
    found = fp4pass.evaluate(wrapped, None, ids, toy, progress=False)
    assert (found.kl, found.top1) == (pytest.approx(0.0, abs=1e-9), 1.0)


def test_refusals(toy):
    ids = torch.randint(1, VOCABULARY, (2, 16))
    with pytest.raises(OptionError, match="batch_size is 0"):
        fp4pass.evaluate(toy, None, ids, batch_size=0)
    for options in ({"top_p": 0.0}, {"top_p": 1.1}, {"confidence": 1.0}, {"resamples": 0}):
        with pytest.raises(OptionError, match=f"{next(iter(options))} is "):
            fp4pass.evaluate(toy, None, ids, **options)
    with pytest.raises(StateError, match="training mode"):
        fp4pass.evaluate(copy.deepcopy(toy).train(), None, ids)
    with pytest.raises(StateError, match="training mode"):
        fp4pass.evaluate(toy, None, ids, copy.deepcopy(toy).train())
    with pytest.raises(ShapeError, match="The reference has logits"):
        fp4pass.evaluate(toy, None, ids, Toy(VOCABULARY + 1).eval(), progress=False)
    with pytest.raises(StateError, match="without logits"):
        fp4pass.evaluate(nn.Flatten(1).eval(), None, ids, progress=False)
    toy.config = SimpleNamespace(max_position_embeddings=15)
    with pytest.raises(OptionError, match="the context of the model is 15"):
        fp4pass.evaluate(toy, None, ids)


@torch.no_grad()
def terms_of(model, reference, cut, top_p):
    """A row for each scored token: its unit, nll, KL, agreement, KL in the nucleus; in float64."""
    rows = []
    for window in cut:
        q = model(window.ids[None]).logits[0].double().log_softmax(-1)
        p = reference(window.ids[None]).logits[0].double().log_softmax(-1)
        for i, unit in zip(
            range(window.first, len(window.ids)), window.units.tolist(), strict=True
        ):
            a, b = p[i - 1], q[i - 1]
            order = a.argsort(descending=True)
            size = next(n for n in range(1, len(a) + 1) if a[order[:n]].exp().sum() >= top_p)
            kept = order[:size]
            a_kept, b_kept = a[kept].log_softmax(-1), b[kept].log_softmax(-1)
            kls = [
                F.kl_div(x, y, log_target=True, reduction="sum")
                for y, x in ((a, b), (a_kept, b_kept))
            ]
            rows.append([unit, -b[window.ids[i]], kls[0], a.argmax() == b.argmax(), kls[1]])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "top_p"),
    [({"stride": 20}, 0.95), ({"stride": 64}, 0.5), ({"within_documents": True}, 0.999)],
)
def test_sliding_windows_and_nuclei_against_float64(tiny, options, top_p):
    model, converted, tokenizer, _ = tiny
    text = (TINY_LM / "eval.txt").read_text(encoding="utf-8")[:3000]
    options = {"window": 64, "windows": 6, **options}
    cut = cut_windows(tokenizer, text, **options)
    wanted = terms_of(converted, model, cut, top_p)
    found = fp4pass.evaluate(
        converted, tokenizer, text, model, top_p=top_p, progress=False, **options
    )
    assert found.tokens == len(wanted) and (found.unit, found.windows) == ("document", 6)
    mean = wanted.mean(0).tolist()
    assert math.log(found.perplexity) == pytest.approx(mean[1], rel=1e-5)
    assert found.kl == pytest.approx(mean[2], rel=1e-3)
    assert found.top1 == pytest.approx(mean[3], abs=1.5 / found.tokens)
    # A token at the edge of the nucleus is in or out by a rounding.
    assert found.top_p_kl == pytest.approx(mean[4], rel=5e-3)
    units = wanted[:, 0].unique()
    for unit, sums in zip(units, found.sums, strict=True):
        own = wanted[wanted[:, 0] == unit]
        assert sums[SUMS.index("tokens")] == len(own)
        assert sums[SUMS.index("nll")].item() == pytest.approx(own[:, 1].sum().item(), rel=1e-4)
        assert sums[SUMS.index("kl")].item() == pytest.approx(own[:, 2].sum().item(), rel=1e-2)
    assert found.sums[:, SUMS.index("bytes")].sum() == pytest.approx(
        scored_bytes(tokenizer, cut).sum().item()
    )
    assert set(found.intervals) == {"perplexity", "bits_per_byte", "kl", "top_p_kl", "top1"}
    for name, (low, high) in found.intervals.items():
        assert low < getattr(found, name) < high


def test_a_stride_of_one_window_is_the_default(tiny):
    _, converted, tokenizer, _ = tiny
    text = (TINY_LM / "eval.txt").read_text(encoding="utf-8")[:3000]
    found, same, sliding = (
        fp4pass.evaluate(converted, tokenizer, text, window=64, stride=stride, progress=False)
        for stride in (None, 64, 16)
    )
    assert found == same
    assert sliding.perplexity < found.perplexity


def test_nuclei(toy):
    """Of all tokens, of ties, and of masses that all of them hardly have."""
    ids = torch.randint(1, VOCABULARY, (4, 16))
    with torch.no_grad():
        toy.head.weight.zero_()
        toy.head.bias.copy_(torch.tensor([3.0, 1.0, 1.0, *[-9.0] * (VOCABULARY - 3)]))
    other = copy.deepcopy(toy)
    with torch.no_grad():
        other.head.bias.copy_(torch.randn(VOCABULARY))
    p, q = (model.head.bias.detach().double() for model in (toy, other))
    for top_p, size in ((0.7, 1), (0.8, 3), (0.99, 3), (0.99999999, VOCABULARY), (1.0, VOCABULARY)):
        # Ties come together: the nucleus is all that is as likely as its least likely token.
        a, b = p[:size].log_softmax(0), q[:size].log_softmax(0)
        found = fp4pass.evaluate(other, None, ids, toy, top_p=top_p, progress=False)
        wanted = F.kl_div(b, a, log_target=True, reduction="sum").item()
        assert found.top_p_kl == pytest.approx(wanted, rel=1e-5, abs=1e-6), top_p
    assert found.top_p_kl == found.kl


# ---- intervals --------------------------------------------------------------------------------


def documents(generator, count, nll=2.0, spread=0.3):
    """Sums of documents of many lengths, whose tokens have a mean nll of `nll`, and its noise."""
    tokens = generator.integers(20, 400, count).astype(float)
    noise = spread * generator.standard_gamma(4.0, count) / 2 - spread * 2
    sums = np.full((count, len(SUMS)), math.nan)
    sums[:, SUMS.index("tokens")] = tokens
    sums[:, SUMS.index("nll")] = tokens * (nll + noise)
    return sums


@pytest.mark.parametrize("count", [20, 60])
def test_intervals_cover_what_they_say(count):
    generator = np.random.default_rng(0)
    rounds, options = 400, Bootstrap(resamples=600)
    alone = paired = narrower = 0
    for _ in range(rounds):
        ours = documents(generator, count)
        (low, high) = intervals(ours, options)["perplexity"]
        alone += low <= math.exp(2.0) <= high
        theirs = ours.copy()
        tokens = ours[:, SUMS.index("tokens")]
        theirs[:, SUMS.index("nll")] -= tokens * generator.normal(0.1, 0.05, count)
        ratio = changes(ours, theirs, options)["perplexity_ratio"]
        paired += ratio.low <= math.exp(0.1) <= ratio.high
        narrower += ratio.high - ratio.low < (high - low) / math.exp(2.0) / 2
    # 3 standard deviations of 400 throws are 3.3 %; few documents cost a percent or two more.
    least = 0.95 - 0.033 - 0.3 / count
    assert least <= alone / rounds <= 0.983
    assert least <= paired / rounds <= 0.983
    assert narrower >= 0.99 * rounds


def test_intervals_are_those_of_scipy(monkeypatch):
    scipy_stats = pytest.importorskip("scipy.stats")
    for units in (5, 20, 1000):
        student = scipy_stats.t.ppf(0.975, units - 1) * math.sqrt(units / (units - 1))
        assert _quantile(0.975, units) == pytest.approx(student, rel=3e-3)
    # scipy does not widen intervals where units are few.
    normal = scipy_stats.norm.ppf
    monkeypatch.setattr("fp4pass.evaluation.intervals._quantile", lambda tail, units: normal(tail))
    sums = documents(np.random.default_rng(1), 40)
    tokens, nll = (sums[:, SUMS.index(name)] for name in ("tokens", "nll"))
    theirs = scipy_stats.bootstrap(
        (nll, tokens),
        lambda nll, tokens, axis: np.exp(nll.sum(axis) / tokens.sum(axis)),
        paired=True,
        n_resamples=20000,
        vectorized=True,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    ours = intervals(sums, Bootstrap(resamples=20000))["perplexity"]
    assert ours == pytest.approx(tuple(theirs), rel=5e-3)
    percentiles = np.array(intervals(sums, Bootstrap(confidence=0.5))["perplexity"])
    assert ours[0] < percentiles[0] < percentiles[1] < ours[1]


def test_many_units_are_resampled_in_parts(monkeypatch):
    sums = documents(np.random.default_rng(2), 30)
    wanted = intervals(sums, Bootstrap(resamples=100))
    monkeypatch.setattr("fp4pass.evaluation.intervals._WEIGHTS", 7 * 30)
    assert intervals(sums, Bootstrap(resamples=100))["perplexity"] == pytest.approx(
        wanted["perplexity"]
    )
    assert intervals(sums, Bootstrap(resamples=100, seed=1)) != wanted
    assert intervals(sums[:1], Bootstrap()) == {}


def test_differences(tiny):
    model, converted, tokenizer, _ = tiny
    text = (TINY_LM / "eval.txt").read_text(encoding="utf-8")

    def measure(model: nn.Module, reference: nn.Module | None = None, **options: object):
        options = {"window": 64, "windows": 40, "progress": False, **options}
        return fp4pass.evaluate(model, tokenizer, text, reference, **options)

    before, found = measure(model), measure(converted, model)
    difference = found.difference(before)
    assert difference.perplexity.value == pytest.approx(found.perplexity - before.perplexity)
    ratio = difference.perplexity_ratio
    assert ratio.value == pytest.approx(found.perplexity / before.perplexity)
    assert ratio.significant and 1 < ratio.low < ratio.value < ratio.high
    low, high = found.intervals["perplexity"]
    assert difference.perplexity.high - difference.perplexity.low < (high - low) / 3
    assert (difference.kl, difference.top1) == (None, None)
    assert difference.to_dict()["bits_per_byte"]["significant"] is True
    nothing = found.difference(measure(copy.deepcopy(converted), model)).to_dict()
    assert nothing.pop("confidence") == 0.95
    for name, change in nothing.items():
        same = float(name == "perplexity_ratio")
        assert change == {"value": same, "low": same, "high": same, "significant": False}
    assert found.difference(measure(converted, model, top_p=0.9)).top_p_kl is None
    for options in ({"stride": 32}, {"window": 32}, {"windows": 39}):
        with pytest.raises(StateError, match="different tokens"):
            found.difference(measure(model, **options))
    with pytest.raises(StateError, match="no sums"):
        found.difference(Evaluation(8, 504, 3.0))
    alone = measure(model, windows=1)
    one = alone.difference(alone).perplexity
    assert alone.unit == "document" and (alone.units > 1 or one.significant is None)


def test_one_window_has_no_interval(toy):
    ids = torch.randint(1, VOCABULARY, (1, 16))
    found = fp4pass.evaluate(toy, None, ids, toy, progress=False)
    assert (found.units, found.intervals) == (1, {})
    change = found.difference(found).kl
    assert (change.value, change.low, change.significant) == (0.0, None, None)


# ---- large logits -----------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operator makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                self.bytes = max(self.bytes, each.nbytes)
        return made


def large(name: str = "Llama", **options: object) -> nn.Module:
    """A tiny model with a vocabulary that is not."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=20000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **options,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)
    return model


@pytest.fixture
def small_limits(monkeypatch):
    """Logits of 1 MB may be whole, and 4 rows of `large` are looked at together."""
    monkeypatch.setattr("fp4pass.evaluation.logits._WHOLE", 1 << 20)
    monkeypatch.setattr(sys.modules["fp4pass.evaluation.metrics"], "_CHUNK", 80000)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {}),
        ("Gemma2", {"final_logit_softcapping": 1.0}),
        ("Granite", {"logits_scaling": 7.0}),
        ("Cohere", {"logit_scale": 3.0}),
    ],
)
def test_large_logits_come_in_parts(name, options, small_limits, caplog):
    model = large(name, **options)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        reference.get_output_embeddings().weight.add_(0.1)
    ids = torch.randint(3, 20000, (5, 100))
    assert logits_reader(model, ids[0], 4).in_parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp4pass.evaluation.logits._WHOLE", 1 << 40)
        with Largest() as whole:
            wanted = fp4pass.evaluate(
                model, None, ids, reference, batch_size=4, resamples=2, progress=False
            )
    with Largest() as parts:
        found = fp4pass.evaluate(
            model, None, ids, reference, batch_size=4, resamples=2, progress=False
        )
    assert found.perplexity == pytest.approx(wanted.perplexity, rel=1e-4)
    assert found.kl == pytest.approx(wanted.kl, rel=1e-3) and found.kl > 0
    assert whole.bytes >= 4 * 100 * 20000 * 2
    # The probe in float32, the largest there is; 4 rows in float64 are a fourth of it.
    assert parts.bytes <= max(32 * 20000 * 4, model.get_output_embeddings().weight.nbytes)
    assert "forward" not in vars(model.base_model) and not caplog.records


def test_large_logits_that_have_no_parts(small_limits, caplog):
    """Then fewer windows run at once, and the reason is said once."""
    sys.modules["fp4pass.evaluation.logits"]._warn.cache_clear()
    caplog.set_level(logging.WARNING, "fp4pass")
    ids = torch.randint(3, 20000, (3, 20))
    model = large()
    wanted = fp4pass.evaluate(model, None, ids, progress=False)
    compiled = torch.compile(model, backend="eager")
    assert logits_reader(compiled, ids[0], 3).batch_size == 1
    quantized = fp4pass.convert(copy.deepcopy(model), method="naive", rules=[("lm_head", {})])
    assert not logits_reader(quantized, ids[0], 3).in_parts

    class Shifted(type(model)):
        """Its head looks at where a token is."""

        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + torch.arange(output.logits.shape[1])[:, None]
            return output

    class Around(type(model)):
        """Asks its base model for a tuple."""

        def forward(self, input_ids):
            (hidden,) = self.model(input_ids, use_cache=False, return_dict=False)
            return self.lm_head(hidden)

    for kind in (Shifted, Around):
        other = copy.deepcopy(model)
        other.__class__ = kind
        for _ in range(2):
            found = fp4pass.evaluate(other, None, ids, progress=False)
        assert found.windows == 3 and "forward" not in vars(other.base_model)
    assert found.perplexity == pytest.approx(wanted.perplexity, rel=1e-4)
    reasons = [record.getMessage().partition(": ")[2] for record in caplog.records]
    wanted_reasons = ("is compiled", "quantizes its input", "away", "gets a tuple")
    assert all(part in reason for part, reason in zip(wanted_reasons, reasons, strict=True))


# ---- output errors ----------------------------------------------------------------------------


def inputs_of(model: nn.Module, name: str, batches: list[Tensor]) -> Tensor:
    """Everything that one linear of a model gets, as [tokens, K]."""
    seen: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(
        lambda _, args: seen.append(args[0].flatten(0, -2))
    )
    with torch.no_grad():
        for batch in batches:
            model(batch)
    hook.remove()
    return torch.cat(seen)


@pytest.mark.parametrize("activations", [False, True])
def test_output_errors_of_tiny_lm(tiny, activations):
    model, converted, _, ids = tiny
    batches = list(ids.split(3))
    errors = output_errors(converted, model, batches, activations=activations, progress=False)
    assert set(errors) == {row.name for row in fp4pass.report(converted).converted}
    for name in list(errors)[::9]:
        x = inputs_of(model, name, batches)
        wanted = x.double() @ model.get_submodule(name).weight.double().t()
        quantized = converted.get_submodule(name)
        with torch.no_grad():
            # Activations have one global scale a call; MXFP4 has none, so one call is as three.
            got = (
                quantized(x).double() if activations else x.double() @ quantized.weight.double().t()
            )
        assert errors[name] == pytest.approx(
            ((got - wanted).norm() / wanted.norm()).item(), rel=1e-4
        )
    assert not any(module._forward_hooks for module in model.modules())


def test_output_errors_of_conv1d():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, n_positions=16, vocab_size=VOCABULARY
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    converted = fp4pass.convert(copy.deepcopy(model), method="naive", weight_only=True)
    batches = [torch.randint(1, VOCABULARY, (2, 16))]
    weights = output_errors(converted, model, batches, progress=False)
    layers = output_errors(converted, model, batches, activations=True, progress=False)
    name = "transformer.h.0.mlp.c_fc"
    x = inputs_of(model, name, batches).double()
    weight = model.get_submodule(name).weight.double()
    difference = x @ (weight - converted.get_submodule(name).weight.double())
    assert weights[name] == pytest.approx(
        (difference.norm() / (x @ weight).norm()).item(), rel=1e-4
    )
    # With float activations and float32 outputs, the layer has the error of its weight.
    assert layers == pytest.approx(weights, rel=1e-3)


def test_output_errors_of_what_is_not_reached(toy):
    converted = fp4pass.convert(copy.deepcopy(toy), method="naive", rules=[("head", None)])
    errors = output_errors(converted, toy, [torch.randint(1, VOCABULARY, (2, 16))], progress=False)
    assert set(errors) == {"up", "down", "unused"}
    assert math.isnan(errors["unused"]) and errors["up"] > 0


def test_output_errors_refusals(toy):
    converted = fp4pass.convert(copy.deepcopy(toy), method="naive")
    with pytest.raises(StateError, match="no converted linear"):
        output_errors(toy, toy, [])
    with pytest.raises(StateError, match="no float linear of this name"):
        output_errors(converted, converted, [])
    with pytest.raises(StateError, match="no float linear of this name"):
        output_errors(converted, nn.Linear(2, 2), [])
