"""Perplexity, KL and output errors against straightforward float64 computations."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass.errors import OptionError, ShapeError, StateError
from fp4pass.evaluate import output_errors, token_windows

TINY_LM = Path(__file__).parents[1] / "examples" / "tiny_lm"
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
        monkeypatch.setattr(sys.modules["fp4pass.evaluate"], "_CHUNK", chunk)
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
    }


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
