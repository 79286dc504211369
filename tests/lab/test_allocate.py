"""Schemes under a budget: the choice, what it is beside, and what is refused."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import random
import sys
from typing import Any

import pytest
import torch
from evaluation.toys import Toy
from mixtures import build as mixture
from small_models import assert_same_bits
from torch import Tensor, nn

import fp4pass
from fp4pass.errors import CalibrationError, Fp4PassError, OptionError, StateError
from fp4pass.lab import Allocation
from fp4pass.lab.allocate import FLOAT, Cost, cheapest
from fp4pass.nn.linear import QuantizedLinear

pytest.importorskip("transformers")

EIGHT = "mxfp8a16"
SCHEMES = ("nvfp4a16", EIGHT, "bf16")


def decoder(seed: int = 0, **changes: Any) -> Any:
    """Two small layers."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    torch.manual_seed(seed)
    options = {**sizes, **heads, "tie_word_embeddings": False, **changes}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def windows(count: int = 12, length: int = 16, high: int = 64) -> Tensor:
    return torch.randint(1, high, (count, length), generator=torch.Generator().manual_seed(1))


def allocated(model: nn.Module, **options: Any) -> Allocation:
    given = {"schemes": SCHEMES, "data": windows(), "windows": 4, "held_out": 6} | options
    return fp4pass.allocate(model, progress=False, **given)


def schemes_of(found: Allocation, part: str) -> set[str]:
    return {group.scheme for group in found.groups if any(part in name for name in group.layers)}


def test_a_budget_of_bits_is_met_and_the_model_is_as_it_was() -> None:
    model = decoder()
    before = copy.deepcopy(model)
    found = allocated(model, bits=6.0)
    assert_same_bits(model, before)
    assert 5.0 < found.bits <= 6.0 and found.uniform is not None
    assert found.kl <= found.uniform.kl
    assert found.chosen.bytes == sum(g.costs[g.scheme].bytes for g in found.groups)
    assert found.chosen.predicted == pytest.approx(sum(g.costs[g.scheme].kl for g in found.groups))
    # The recipe makes the model that was measured.
    packed = fp4pass.convert(model, **found.recipe.arguments(), progress=False)
    rows = {row.name: row.scheme for row in fp4pass.report(packed).converted}
    for group in found.groups:
        for name in group.layers:
            assert rows.get(name, FLOAT) == group.scheme
    stored = sum(
        module.weight_packed.nbytes + module.weight_scale.nbytes
        for module in packed.modules()
        if isinstance(module, QuantizedLinear)
    )
    floats = [group for group in found.groups if group.scheme == FLOAT]
    assert stored == found.chosen.bytes - sum(group.costs[FLOAT].bytes for group in floats)


def test_the_held_out_kl_is_that_of_the_converted_model() -> None:
    model, data = decoder(), windows()
    found = allocated(model, bits=6.0, data=data)
    packed = fp4pass.convert(copy.deepcopy(model), **found.recipe.arguments(), progress=False)
    apart = data[[1, 3, 5, 7, 9, 11]]
    with torch.no_grad():
        p, q = (each(apart).logits.log_softmax(-1).double() for each in (model, packed))
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert found.text == {"measured": 4 * 16, "held_out": 6 * 16, "calibration": 6 * 16}
    assert_same_bits(fp4pass.convert(model, method="sse", rules=found, progress=False), packed)


def test_costs_are_those_of_the_group_alone() -> None:
    model, data = decoder(), windows()
    found = allocated(model, bits=6.0, data=data)
    group = found.groups[2]
    rules = [*((name, {}) for name in group.layers), ("*", None)]
    packed = fp4pass.convert(copy.deepcopy(model), "nvfp4a16", "sse", rules=rules, progress=False)
    rest = data[[0, 2, 4, 6, 8, 10]]
    measured = rest[[0, 2, 3, 5]]
    with torch.no_grad():
        p, q = (each(measured).logits.log_softmax(-1).double() for each in (model, packed))
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    assert group.costs["nvfp4a16"].kl == pytest.approx(kl, rel=1e-3)


def test_a_kl_is_met_by_the_smallest_model_that_was_found() -> None:
    model = decoder()
    small = allocated(model, bits=4.6)
    wanted = small.kl / 3
    found = allocated(model, kl=wanted)
    assert found.kl <= wanted and small.bits < found.bits < 16
    smaller = [each for each in found.measured if each.bytes < found.chosen.bytes]
    assert all(each.kl > wanted for each in smaller)
    assert found.chosen in found.measured and len(found.measured) <= 6 + 2
    # What all groups together are far below needs no more than the smallest scheme.
    loose = allocated(model, kl=10 * small.kl)
    assert {group.scheme for group in loose.groups} == {"nvfp4a16"}


def test_a_kl_that_no_scheme_reaches() -> None:
    with pytest.raises(OptionError, match=r"kl=1e-12: the nearest model has [\d.e-]+\."):
        allocated(decoder(), kl=1e-12, schemes=("nvfp4a16", EIGHT))
    with pytest.raises(OptionError, match=r"the nearest model has [\d.e-]+\. Give a larger kl"):
        allocated(decoder(), kl=1e-12)


def test_rules_are_kept() -> None:
    rules = [
        ("*.0.self_attn.*", None),
        ("*.gate_proj", {"unreached": "skip"}),
        ("*.up_proj", {"unreached": "skip"}),
    ]
    found = allocated(decoder(), bits=5.0, rules=rules)
    assert not schemes_of(found, "0.self_attn")
    packed = fp4pass.convert(decoder(), **found.recipe.arguments(), progress=False)
    rows = {row.name: row for row in fp4pass.report(packed).rows}
    assert rows["model.layers.0.self_attn.q_proj"].config is None
    gate = rows["model.layers.0.mlp.gate_proj"].config
    assert gate is None or gate.unreached == "skip"


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_groups_by_projection(name: str) -> None:
    model = mixture(name)
    found = allocated(model, bits=6.0, data=windows(high=90))
    experts = [g.layers for g in found.groups if "experts" in g.layers[0]]
    assert experts and all(len(names) == 1 for names in experts)
    assert {names[0].rpartition(".")[2] for names in experts} == {"gate_up_proj", "down_proj"}
    packed = fp4pass.convert(model, **found.recipe.arguments(), progress=False)
    rows = {row.name: row.scheme for row in fp4pass.report(packed).converted}
    assert rows == {n: g.scheme for g in found.groups for n in g.layers if g.scheme != FLOAT}


class Listed(nn.Module):
    """Experts that are linear layers in a list, all called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 32), "down": nn.Linear(32, 32)}) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(each["down"](each["up"](x).relu()) for each in self.experts)


class WithList(nn.Module):
    """Logits behind two layers of such experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(Listed() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_experts_in_a_list_are_one_group_and_one_rule() -> None:
    torch.manual_seed(0)
    found = allocated(WithList().eval(), bits=5.0, rules=[("head", None)])
    assert [len(group.layers) for group in found.groups] == [3, 3, 3, 3]
    assert all("experts.*" in glob or "*" in glob for glob, _ in found.rules[:-1])


def test_layers_that_no_text_reaches_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = allocated(Toy().eval(), bits=6.0, data=windows(high=40))
    assert "the text does not reach unused: these layers stay as they are" in caplog.text
    packed = fp4pass.convert(Toy().eval(), **found.recipe.arguments(), progress=False)
    assert type(packed.unused) is nn.Linear


def test_a_uniform_model_that_is_better_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that say the opposite of the truth choose a mixture that is worse."""
    module = sys.modules["fp4pass.lab.allocate"]
    true = module._measure

    def wrong(*args: Any) -> Any:
        costs = true(*args)
        for i, each in enumerate(costs):
            # The last groups, which the uniform choice would leave, are said to cost the most.
            change = {s: type(c)(c.bytes, (i + 1) * (1 + (s != EIGHT))) for s, c in each.items()}
            each.update(change)
        return costs

    monkeypatch.setattr(module, "_measure", wrong)
    kinds = set()
    for seed in range(4):
        found = allocated(decoder(seed), bits=5.5, schemes=("nvfp4a16", EIGHT))
        assert found.uniform is not None and found.kl <= found.uniform.kl
        kinds.add(found.is_uniform)
        if found.is_uniform:
            assert found.chosen == found.uniform and "No mixture was better" in str(found)
    assert True in kinds


def test_the_report_has_it_all() -> None:
    found = allocated(decoder(), bits=6.0)
    text = str(found)
    assert text.startswith(f"bits=6: {found.bits:.3f} bits a weight, KL ")
    assert "uniform nvfp4a16" in text and "model.layers.1.mlp.gate_proj, up_proj" in text
    plain = found.to_dict()
    assert plain["chosen"]["kl"] == found.kl and len(plain["groups"]) == 8
    assert fp4pass.Recipe.from_dict(plain["recipe"]) == found.recipe
    assert json.loads(json.dumps(plain)) == plain


WRONG: dict[str, tuple[dict[str, Any], type[Fp4PassError], str]] = {
    "neither": ({}, OptionError, "expected bits= or kl=, got neither. bits=5.0 is for"),
    "both": ({"bits": 5, "kl": 0.1}, OptionError, "expected bits= or kl=, got both"),
    "negative": ({"kl": -1.0}, OptionError, "kl: expected a positive number"),
    "too small": ({"bits": 4.4}, OptionError, r"expected from 4\.5000, the bits of the smallest"),
    "too large": ({"bits": 33}, OptionError, r"to below 32\.0000, those of the largest"),
    "unknown": ({"bits": 5, "schemes": ("nvfp5", "bf16")}, OptionError, "Did you mean 'nvfp4'"),
    "one": ({"bits": 5, "schemes": ("nvfp4a16",)}, OptionError, "Add 'bf16' to leave layers"),
    "only float": ({"bits": 5, "schemes": ("bf16",)}, OptionError, "at least one that quantizes"),
    "a format": ({"bits": 5, "fmt": "nvfp4"}, OptionError, "Leave it out of the options"),
    "a rule": (
        {"bits": 5, "rules": [("*.down_proj", {"fmt": "mxfp4"})]},
        OptionError,
        r"schemes decides fmt. Leave it out of \*\.down_proj",
    ),
    "little text": ({"bits": 5, "data": windows(1)}, CalibrationError, "two windows or more"),
    "beyond": ({"bits": 5, "data": windows(high=80)}, CalibrationError, "0 to 63, the vocabulary"),
    "no tokens": (
        {"bits": 5, "data": [windows(4), windows(0)]},
        CalibrationError,
        r"data: batch 1: expected tokens, got \[0, 16\]",
    ),
    "no windows": ({"bits": 5, "windows": 0}, OptionError, "windows: expected at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        allocated(decoder(), **options)


def test_models_that_it_is_not_for() -> None:
    packed = fp4pass.convert(decoder(), "nvfp4a16", "sse", progress=False)
    with pytest.raises(StateError, match="already converted"):
        allocated(packed, bits=5)
    with pytest.raises(StateError, match="The model is prepared"):
        allocated(fp4pass.prepare(decoder(), "naive"), bits=5)
    with pytest.raises(StateError, match="evaluation mode"):
        allocated(decoder().train(), bits=5)
    with pytest.raises(StateError, match="a causal language model"):
        allocated(nn.Sequential(nn.Linear(32, 32)).eval(), bits=5, data=[torch.ones(2, 32)] * 3)
    traced = fp4pass.trace(decoder(), (windows(2),))
    with pytest.raises(StateError, match="is prepared, or a graph"):
        allocated(traced, bits=5)


Groups = list[list[tuple[float, float]]]


def sums(groups: Groups, chosen: tuple[int, ...] | list[int]) -> tuple[float, float]:
    weight = value = 0.0
    for choices, place in zip(groups, chosen, strict=True):
        weight, value = weight + choices[place][0], value + choices[place][1]
    return weight, value


def brute_force(groups: Groups, limit: float) -> float | None:
    every = itertools.product(*(range(len(choices)) for choices in groups))
    found = [value for weight, value in (sums(groups, each) for each in every) if weight <= limit]
    return min(found, default=None)


def test_the_knapsack_is_the_best_of_all_choices() -> None:
    rng = random.Random(0)

    def number() -> float:
        return rng.choice([rng.randint(0, 20), rng.random() * 9])

    infeasible = 0
    for _ in range(400):
        sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 6))]
        groups = [[(number(), number()) for _ in range(size)] for size in sizes]
        limit = rng.random() * 60
        swaps = rng.random() < 0.5
        costs = [
            {str(i): Cost(b, a) if swaps else Cost(a, b) for i, (a, b) in enumerate(each)}
            for each in groups
        ]
        best = brute_force(groups, limit)
        found = cheapest(costs, limit, "kl" if swaps else "bytes")
        if best is None or found is None:
            infeasible += 1
            assert best is None and found is None
            continue
        weight, value = sums(groups, [int(each) for each in found])
        assert weight <= limit * (1 + 1e-9)
        assert value == pytest.approx(best, rel=1e-12, abs=1e-12)
    assert 15 < infeasible < 300
