"""swap: which layers of a model it swaps, and what the model is afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from layers import K, batch
from small_models import language_model, logits
from torch import Tensor, nn

from fp4pass.errors import NonFiniteError, OptionError, RuleError, ShapeError, StateError
from fp4pass.parity import Linear4bit, swap
from fp4pass.parity.bitsandbytes import PackedWeight


def with_dense_weights(model: nn.Module, swapped: nn.Module) -> nn.Module:
    """`model` with the dense weights of the layers of `swapped`."""
    for name, module in swapped.named_modules():
        if isinstance(module, PackedWeight):
            source: Any = model.get_submodule(name)
            dense = module.weight.detach()
            source.weight.data = dense if isinstance(source, nn.Linear) else dense.t().contiguous()
    return model


@pytest.mark.quick(4)
@pytest.mark.parametrize("case", zoo.CASES, ids=str)
def test_any_model_is_swapped(case: zoo.Case) -> None:
    for module in case.requires:
        pytest.importorskip(module)
    model = case.build()
    wanted = set(zoo.eligible_linears(model))
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        with pytest.raises(StateError, match="accelerate"):
            swap(model)
        return
    swapped = swap(model, "nf4")
    assert {name for name, kind in swapped.items() if kind == "nf4"} == wanted
    assert all(isinstance(model.get_submodule(name), Linear4bit) for name in wanted)
    dense = with_dense_weights(case.build(), model)
    torch.testing.assert_close(case.run(model, 0), case.run(dense, 0))


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_language_model_is_swapped_and_loaded(kind: str, offline: None) -> None:
    model, source = language_model(), language_model()
    swapped = swap(model, kind)
    skipped = {name: reason for name, reason in swapped.items() if reason != kind}
    assert list(skipped) == ["lm_head"] and "output embedding" in skipped["lm_head"]
    found, wanted = logits(model), logits(with_dense_weights(language_model(), model))
    if kind == "int8":
        assert float((found - wanted).norm() / wanted.norm()) < 0.05
    else:
        assert torch.equal(found, wanted)
    assert float((found - logits(source)).norm() / logits(source).norm()) < 0.3
    fresh = copy.deepcopy(source).to("meta")
    swap(fresh, kind)
    state = model.state_dict()
    fresh.load_state_dict(state, assign=True, strict=False)
    fresh.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    assert torch.equal(logits(fresh), found)
    other = language_model()
    swap(other, kind, rules=[("model.layers.0.*", {}), ("*", None)])
    swap(other, kind)
    assert torch.equal(logits(other), found)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, 64), nn.SiLU(), nn.Linear(64, 64), nn.Linear(64, 37))


@pytest.mark.core
def test_patterns_choose() -> None:
    model = mlp()
    assert swap(model, "int8", rules=[("3", None), ("0", {}), ("*", None)]) == {
        "0": "int8",
        "2": "rule ('*', None)",
        "3": "rule ('3', None)",
    }
    swapped = swap(model, "fp4", block_size=32, rules=[("3", None)])
    assert swapped["2"] == "fp4" and swapped["0"].startswith("is Linear8bitLt(in_features=96")
    assert [type(layer).__name__ for layer in model] == [
        "Linear8bitLt",
        "SiLU",
        "Linear4bit",
        "Linear",
    ]
    assert model[2].codebook.block == 32 and model(batch()).shape == (2, 5, 37)


def test_what_cannot_be_swapped_is_a_reason() -> None:
    model = nn.Sequential(nn.Linear(37, 64), nn.Linear(64, 37), nn.Linear(37, 37))
    for dtype in (torch.int32, torch.float8_e4m3fn):
        model[2].weight = nn.Parameter(torch.zeros(37, 37).to(dtype), requires_grad=False)
        with pytest.raises(ShapeError, match=rf"2: .*{dtype}"):
            swap(model, "nf4", rules=[("2", {})])
    model[0].forward = model[0].forward
    swapped = swap(model, "nf4")
    assert "its forward is not its class's" in swapped["0"] and swapped["1"] == "nf4"
    assert "torch.float8_e4m3fn" in swapped["2"]


@pytest.mark.core
def test_heads_routers_and_tied_weights_must_be_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.router = nn.Embedding(64, 64), nn.Linear(64, 64)
            self.first, self.lm_head = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
            self.tied = nn.Linear(64, 64)
            self.tied.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.lm_head(self.tied(self.router(self.first(self.embed(ids)))))

    model = Model()
    skipped = {name: reason for name, reason in swap(model).items() if reason != "nf4"}
    assert skipped == {
        "router": "a router; add a rule to quantize it",
        "lm_head": "output embedding; add a rule to quantize it",
        "tied": "its weight is an embedding's; add a rule to quantize it",
    }
    for name in skipped:
        assert swap(model, rules=[(name, {})])[name] == "nf4"
    assert isinstance(model.embed.weight, nn.Parameter) and isinstance(model.tied, Linear4bit)
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 64)


@pytest.mark.core
def test_shared_weights_share_their_codes() -> None:
    model = mlp()
    model.append(nn.Linear(64, 37))
    model[4].weight = model[3].weight
    with pytest.raises(RuleError, match=r"4 and 3|3 and 4"):
        swap(model, rules=[("4", None)])
    assert isinstance(model[0], nn.Linear) and not isinstance(model[0], Linear4bit)
    swap(model)
    assert model[4].weight_packed is model[3].weight_packed and model[4].bias is not model[3].bias


def test_everything_is_checked_before_anything_is_swapped() -> None:
    model = mlp()
    with torch.no_grad():
        model[3].weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"3: its weight holds NaN.*rules=\[\('3', None\)\]"):
        swap(model)
    assert type(model[0]) is nn.Linear
    for message, error, options in (
        (
            r"rule for '2x' matches no linear.*Did you mean '2'",
            RuleError,
            {"rules": [("0", {}), ("2x", {})]},
        ),
        (r"rule for '\*.mlp.\*' matches no linear", RuleError, {"rules": [("*.mlp.*", None)]}),
        ("kind 'nf5' does not exist. Did you mean 'nf4'", OptionError, {"kind": "nf5"}),
        ("expected None for kind .int8.", OptionError, {"kind": "int8", "block_size": 64}),
        ("no block of 48", OptionError, {"kind": "fp4", "block_size": 48}),
        ("no linear layer to swap. 0: rule", StateError, {"rules": [("*", None)]}),
        ("rules: expected None or {} for", OptionError, {"rules": [("0", {"block": 32})]}),
    ):
        with pytest.raises(error, match=message):
            swap(model, **options)
    with pytest.raises(StateError, match="It has no linear layer at all"):
        swap(nn.Sequential(nn.SiLU()))
