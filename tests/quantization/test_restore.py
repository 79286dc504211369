"""Converted models made dense again: the weights as they were rounded, and nothing else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mixtures
import pytest
import torch
from small_models import TINY, converted, language_model, logits
from torch import Tensor, nn

import fp4pass
from fp4pass.errors import OptionError, StateError
from fp4pass.nn.linear import QuantizedLinear

transformers = pytest.importorskip("transformers")

# Whose products have the bits of dense ones.
pytestmark = pytest.mark.usefixtures("references")


def rounded(model: nn.Module) -> dict[str, Tensor]:
    """The dense weights of packed layers, by their names."""
    packed = (item for item in model.named_modules() if isinstance(item[1], QuantizedLinear))
    return {f"{name}.weight": layer.weight for name, layer in packed}


def sequential(**options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))
    return fp4pass.convert(model, method="sse", weight_only=True, **options)


@pytest.mark.quick(1)
@pytest.mark.parametrize("road", ["converted", "loaded", "copied", "with a config"])
def test_dequantize_of_transformers_gives_the_rounded_weights(road: str, tmp_path: Path) -> None:
    from fp4pass.integrations import Fp4PassConfig

    model = converted()
    weights, expected = rounded(model), logits(model)
    if road == "loaded":
        fp4pass.save(model, tmp_path / "packed")
        model = fp4pass.load(tmp_path / "packed")
    elif road == "copied":
        model, first = copy.deepcopy(model), model
    elif road == "with a config":
        options = {"dtype": model.dtype, "quantization_config": Fp4PassConfig(method="naive")}
        model = transformers.AutoModelForCausalLM.from_pretrained(TINY, **options).eval()
    assert model.dequantize() is model
    state = model.state_dict()
    assert list(state) == list(language_model().state_dict()) and len(weights) == 28
    assert all(torch.equal(state[name], weight) for name, weight in weights.items())
    assert torch.equal(logits(model), expected)
    if road == "copied":
        assert len(rounded(first)) == 28
    # It is a float model for everybody.
    with pytest.raises(ValueError, match="first quantize your model"):
        model.dequantize()
    with pytest.raises(StateError, match="neither prepared nor converted"):
        fp4pass.report(model)
    model.save_pretrained(tmp_path / "dense")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype="auto")
    assert torch.equal(logits(again.eval()), expected)
    assert not any("quantiz" in name for name in model.config.to_dict())
    assert fp4pass.convert(model, "nvfp4", method="sse") is model


def test_a_converted_model_casts_and_moves_as_before() -> None:
    """transformers forbids it for models that it knows to be quantized."""
    model = converted().half().float().to(torch.bfloat16).to("cpu")
    assert model.dtype == torch.bfloat16 and len(rounded(model)) == 28
    assert {each.dtype for each in model.dequantize().parameters()} == {torch.bfloat16}
    assert logits(model).dtype == torch.bfloat16
    other = converted()
    assert {each.dtype for each in other.dequantize("float64").parameters()} == {torch.float64}


@pytest.mark.core
@pytest.mark.parametrize("scheme", ["fp8a16", "fp8_blocka16", "fp8_tensora16", "nvfp4a16"])
def test_weights_have_the_dtype_in_which_the_model_runs(scheme: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).bfloat16()
    fp4pass.convert(model, scheme, "naive", progress=False).float()
    x = torch.randn(4, 64)
    expected = model(x)
    fp4pass.dequantize(model)
    assert model[0].weight.dtype == torch.float32
    assert torch.equal(model(x), expected)
    mixture = mixtures.build("qwen3_moe", torch.bfloat16)
    fp4pass.convert(mixture, scheme, "naive", progress=False).float()
    expected = mixtures.logits(mixture)
    fp4pass.dequantize(mixture)
    torch.testing.assert_close(mixtures.logits(mixture), expected, rtol=1e-5, atol=1e-5)


def test_any_module_is_made_dense() -> None:
    model = sequential()
    x = torch.randn(3, 32)
    weights, expected = rounded(model), model(x)
    assert fp4pass.dequantize(model) is model
    assert [type(each) for each in model] == [nn.Linear, nn.ReLU, nn.Linear]
    assert str(model[0]) == "Linear(in_features=32, out_features=64, bias=True)"
    assert all(torch.equal(model.get_parameter(name), each) for name, each in weights.items())
    assert all(each.requires_grad for each in model.parameters())
    assert torch.equal(model(x), expected)
    # A part of a model, and a layer alone.
    model = sequential()
    fp4pass.dequantize(model[0])
    assert type(model[0]) is nn.Linear and isinstance(model[2], QuantizedLinear)


def test_inputs_are_not_quantized_any_more() -> None:
    model = fp4pass.convert(
        nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "nvfp4", method="sse"
    )
    x = torch.randn(3, 32)
    weights = rounded(model)
    expected = x
    for name, weight in weights.items():
        bias = model.get_parameter(name.replace("weight", "bias"))
        expected = nn.functional.linear(expected, weight, bias)
    assert torch.equal(fp4pass.dequantize(model)(x), expected)


@pytest.mark.core
def test_weights_that_are_shared_stay_shared() -> None:
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    second.weight = first.weight
    model: Any = fp4pass.convert(nn.Sequential(first, second), method="sse", weight_only=True)
    fp4pass.dequantize(model)
    assert model[0].weight is model[1].weight


@pytest.mark.core
def test_a_rotated_layer_gets_its_weight_in_the_original_basis() -> None:
    model = sequential(rotation=32)
    x = torch.randn(3, 32)
    expected = model(x)
    torch.testing.assert_close(fp4pass.dequantize(model)(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.core
def test_experts_are_their_class_again() -> None:
    model = mixtures.build("qwen3_moe")
    kinds = [type(each) for each in model.modules()]
    names = list(model.state_dict())
    fp4pass.convert(model, method="sse", weight_only=True)
    expected = mixtures.logits(model)
    model.dequantize()
    assert [type(each) for each in model.modules()] == kinds and list(model.state_dict()) == names
    torch.testing.assert_close(mixtures.logits(model), expected, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_made_dense_is_refused_whole() -> None:
    for wrong in (3, torch.ones(2), None):
        with pytest.raises(OptionError, match="what quantize returned, or a converted model"):
            fp4pass.dequantize(wrong)
    with pytest.raises(StateError, match="no packed layer"):
        fp4pass.dequantize(nn.Linear(32, 32))
    split = sequential()
    split[2].is_split = True
    with pytest.raises(StateError, match=r"2: expected a whole packed weight.* split over"):
        fp4pass.dequantize(split)
    far = sequential().to("meta")
    with pytest.raises(StateError, match=r"0: expected a whole packed weight.* offloaded"):
        fp4pass.dequantize(far)
    graph = torch.export.export(nn.Sequential(nn.Linear(32, 32)), (torch.ones(2, 32),)).module()
    fp4pass.convert(graph, method="sse", weight_only=True)
    with pytest.raises(StateError, match="got a graph"):
        fp4pass.dequantize(graph)
    assert all(len(rounded(each)) == 2 for each in (split, far))
