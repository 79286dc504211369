"""nn.MultiheadAttention whose projections a rule takes: torch's numbers, observed and packed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fp4pass
from fp4pass.errors import CheckpointError, Fp4PassError, OptionError, RuleError
from fp4pass.quantization.observers.attention import CalledAttention, calling_projections

RULES = [("*self_attn.?_proj", {}), ("*_proj", {})]
ALL = [("?_proj", {})]


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(64, 4, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made.eval()


def called(module: nn.Module, rules: Any = ALL) -> Any:
    other = copy.deepcopy(module)
    with calling_projections(other, rules):
        pass
    return other


BOOLEAN = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.3
FLOAT = torch.randn(8, 5, 7, generator=torch.Generator().manual_seed(2))
PADDING = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(7)

# (options of the module, arguments, whether query, key and value are one)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, True),
    "batch first": ({"batch_first": True}, {}, True),
    "no weights": ({"batch_first": True}, {"need_weights": False}, True),
    "each head": ({}, {"average_attn_weights": False}, False),
    "no bias": ({"bias": False}, {"need_weights": False}, False),
    "boolean mask": ({}, {"attn_mask": BOOLEAN}, False),
    "mask of each head": ({}, {"attn_mask": FLOAT, "need_weights": False}, False),
    "padding": ({"batch_first": True}, {"key_padding_mask": PADDING}, False),
    "padding and mask": (
        {},
        {"key_padding_mask": PADDING.float() * -3, "attn_mask": FLOAT[0], "need_weights": False},
        False,
    ),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}, True),
    "causal with weights": ({}, {"attn_mask": CAUSAL, "is_causal": True}, True),
    "kdim and vdim": ({"kdim": 32, "vdim": 48}, {"attn_mask": BOOLEAN}, False),
}


def inputs(module: nn.MultiheadAttention, one: bool, batch: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for length, width in ((5, 64), (7, module.kdim), (7, module.vdim)):
        shape = (length, 2, width) if batch else (length, width)
        x = torch.randn(shape, generator=generator)
        found.append(x.transpose(0, 1) if batch and module.batch_first else x)
    return [found[1]] * 3 if one else found


@pytest.mark.core
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_torch(case: str) -> None:
    options, arguments, one = CASES[case]
    module = attention(**options)
    other = called(module)
    assert type(other) is CalledAttention and isinstance(other, nn.MultiheadAttention)
    query = inputs(module, one)
    for train in (False, True):
        expected = module.train(train)(*query, **arguments)
        found = other.train(train)(*query, **arguments)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
        assert (found[1] is None) == (expected[1] is None)
        if expected[1] is not None:
            torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.core
def test_dropout_and_gradients() -> None:
    module = attention(dropout=1.0).train()
    module.in_proj_weight.requires_grad_(False)
    other = called(module)
    query = inputs(module, True)
    assert torch.equal(other(*query)[1], torch.zeros(2, 7, 7))
    assert not other.q_proj.weight.requires_grad and other.q_proj.bias.requires_grad
    assert other.out_proj.weight.requires_grad
    with pytest.raises(OptionError, match=r"attn_mask: expected the mask that is_causal"):
        other(*query, is_causal=True)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(64, 4, 128, batch_first=True, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x)
        found: Tensor = self.decoder(x[:, :3], memory)
        return found


def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder().eval()


X = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0))


def test_a_rule_has_them_observed_packed_and_saved(tmp_path: Path) -> None:
    rules = [("encoder.*.k_proj", None), ("*self_attn.*_proj", {}), ("*multihead_attn.*_proj", {})]
    model, reference = encoder(), encoder()
    fp4pass.prepare(model, rules=rules)
    torch.testing.assert_close(model(X), reference(X), rtol=1e-4, atol=1e-4)
    fp4pass.convert(model, "nvfp4")
    rows = {row.name: row for row in fp4pass.report(model).rows}
    assert rows["encoder.layers.0.self_attn.k_proj"].skip_reason.startswith("rule (")
    for name in ("q_proj", "v_proj", "out_proj"):
        assert rows[f"encoder.layers.1.self_attn.{name}"].tokens == 12
    # Each sees its own input: queries are of the decoder, keys of the encoder.
    assert rows["decoder.multihead_attn.q_proj"].tokens == 6
    assert rows["decoder.multihead_attn.k_proj"].tokens == 12
    # Three linears of an encoder layer beside k_proj, and all of the decoder's two attentions.
    assert len([row for row in rows.values() if row.config]) == 2 * (3 + 2) + 2 * 4 + 2
    found = model(X)
    assert (found - reference(X)).norm() < 0.2 * reference(X).norm()
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q", model=encoder())
    assert torch.equal(loaded(X), found)
    assert torch.equal(copy.deepcopy(loaded)(X), found)
    other = encoder()
    other.decoder.extra = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="another architecture"):
        fp4pass.load(tmp_path / "q", model=other)
    assert type(other.decoder.self_attn) is nn.MultiheadAttention


@pytest.mark.parametrize("rules", [[], [("*", {})], [("encoder.*", {})], [("*_proj", None)]])
def test_without_a_rule_that_names_them_they_are_skipped(rules: Any) -> None:
    model = fp4pass.convert(encoder(), "nvfp4", method="sse", rules=rules[:1])
    reasons = {row.name: row.skip_reason for row in fp4pass.report(model).skipped}
    assert type(model.decoder.self_attn) is nn.MultiheadAttention
    assert "a rule that ends in q_proj" in reasons["decoder.self_attn.in_proj_weight"]
    assert "self_attn.out_proj" in " ".join(reasons)


@pytest.mark.core
def test_an_error_leaves_the_model_as_it_was() -> None:
    model = encoder()
    before = dict(model.named_parameters())
    with pytest.raises(RuleError):
        fp4pass.prepare(model, rules=[*RULES, ("nothing", None)])
    with pytest.raises(Fp4PassError):
        fp4pass.convert(model, "nvfp4", rules=RULES)
    after = dict(model.named_parameters())
    assert list(before) == list(after) and all(after[name] is before[name] for name in before)
    assert type(model.decoder.self_attn) is nn.MultiheadAttention
    assert torch.equal(model(X), encoder()(X))


def test_transformers_are_told(tmp_path: Path) -> None:
    """Which has no layers of these names, and would leave its own random."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.SiglipVisionConfig(
        **sizes, num_hidden_layers=1, image_size=16, patch_size=8
    )
    torch.manual_seed(0)
    model = transformers.SiglipVisionModel(config).eval()
    rules = [("*head.attention.?_proj", {}), ("*head.attention.out_proj", {})]
    fp4pass.convert(model, method="sse", weight_only=True, rules=rules)
    with pytest.raises(CheckpointError, match=r"projections of its nn.MultiheadAttention"):
        model.save_pretrained(tmp_path / "never")
    with pytest.warns(UserWarning, match=r"does not call its projections, which are packed"):
        fp4pass.save(model, tmp_path / "q")
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    loaded = fp4pass.load(tmp_path / "q")
    assert torch.equal(loaded(x).pooler_output, model(x).pooler_output)
