"""Output errors of single layers against float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from evaluation.toys import VOCABULARY
from torch import Tensor, nn

import fp4pass
from fp4pass.errors import StateError
from fp4pass.evaluation import output_errors


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


@pytest.mark.core
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


@pytest.mark.core
def test_output_errors_of_what_is_not_reached(toy):
    converted = fp4pass.convert(copy.deepcopy(toy), "nvfp4", method="naive", rules=[("head", None)])
    errors = output_errors(converted, toy, [torch.randint(1, VOCABULARY, (2, 16))], progress=False)
    assert set(errors) == {"up", "down", "unused"}
    assert math.isnan(errors["unused"]) and errors["up"] > 0


@pytest.mark.core
def test_output_errors_refusals(toy):
    converted = fp4pass.convert(copy.deepcopy(toy), "nvfp4", method="naive")
    with pytest.raises(StateError, match="no converted linear"):
        output_errors(toy, toy, [])
    with pytest.raises(StateError, match="expected a float linear layer of this name"):
        output_errors(converted, converted, [])
    with pytest.raises(StateError, match="expected a float linear layer of this name"):
        output_errors(converted, nn.Linear(2, 2), [])
