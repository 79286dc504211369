"""Layers that learn their codes: the same numbers, gradients for latents, and back."""

from __future__ import annotations

import copy
from typing import Any

import mixtures
import pytest
import torch
from small_models import assert_same_bits
from torch import Tensor, nn

import fp4pass
from fp4pass.errors import ShapeError, StateError
from fp4pass.lab.learning.layers import (
    TrainableExperts,
    TrainableLinear,
    freeze,
    make_trainable,
    original_weight,
)
from fp4pass.methods import Gptq
from fp4pass.nn.experts import QUANTIZED

CASES = {
    "nvfp4-w4a16": ("nvfp4", {"weight_only": True}),
    "nvfp4-w4a4": ("nvfp4", {}),
    "nvfp4-w4a4-sse": ("nvfp4", {"activation_scales": "sse"}),
    "mxfp4-w4a16": ("mxfp4", {"weight_only": True}),
    "mxfp4-w4a4-rotated": ("mxfp4", {"rotation": 32}),
    "mxfp6-w6a6": ("mxfp6_e2m3", {}),
}


def x(seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pair(fmt: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """A float model of two linears, and a converted copy."""
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64, bias=False)).eval().to(dtype)
    method = Gptq() if fmt == "nvfp4" else "sse"
    model = fp4pass.prepare(copy.deepcopy(source), method, **options)
    model = fp4pass.calibrate(model, [x(dtype=dtype)], progress=False)
    return source, fp4pass.convert(model, fmt, method, **options)


def trainable(model: nn.Module, source: nn.Module) -> list[Any]:
    latents: dict[Tensor, nn.Parameter] = {}
    return [
        make_trainable(module, original_weight(source, name, module), latents=latents)
        for name, module in list(model.named_modules())
        if isinstance(module, QUANTIZED)
    ]


def frozen(layers: list[Any]) -> None:
    codes: dict[nn.Parameter, Tensor] = {}
    for layer in layers:
        freeze(layer, codes=codes)


@pytest.mark.quick(4)
@pytest.mark.core
@pytest.mark.parametrize("fmt, options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_layer_computes_as_before_and_is_so_again(
    fmt: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    source, model = pair(fmt, dtype, **options)
    start = copy.deepcopy(model)
    layers = trainable(model, source)
    assert [type(layer) for layer in layers] == [TrainableLinear] * 2
    assert all(layer.latent.dtype == torch.float32 for layer in layers)
    assert torch.equal(model[0].weight, start[0].weight)
    y, wanted = model[0](x(dtype=dtype)), start[0](x(dtype=dtype))
    torch.testing.assert_close(y, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    frozen(layers)
    assert_same_bits(model, start)
    assert torch.equal(model(x(dtype=dtype)), start(x(dtype=dtype)))


def test_a_planted_change_of_a_code_is_stored() -> None:
    source, model = pair("nvfp4", weight_only=True)
    start = copy.deepcopy(model)
    (first, _) = trainable(model, source)
    with torch.no_grad():
        first.latent[3, 5] += 1.0 if first.latent[3, 5] < 6 else -1.0
    freeze(first)
    changed = model[0].weight != start[0].weight
    assert changed.nonzero().tolist() == [[3, 5]]


def test_gradients_pass_both_roundings() -> None:
    """As if weight and input were what they are rounded to, and rounding were the identity."""
    source, model = pair("nvfp4")
    (first, _) = trainable(model, source)
    seen = x().requires_grad_()
    of_x, of_latent, of_bias = torch.autograd.grad(
        first(seen).square().sum(), [seen, first.latent, first.bias]
    )
    rounded = first._rounded(x())
    assert not torch.equal(rounded, x())
    y = rounded @ first.weight.T + first.bias
    torch.testing.assert_close(of_x, 2 * y @ first.weight)
    torch.testing.assert_close(of_bias, 2 * y.sum((0, 1)))
    dense = 2 * y.flatten(0, 1).T @ rounded.flatten(0, 1)
    (wanted,) = torch.autograd.grad((first.weight * dense.detach()).sum(), first.latent)
    torch.testing.assert_close(of_latent, wanted, rtol=1e-4, atol=1e-4)


def test_layers_of_one_weight_share_latents() -> None:
    source, _ = pair("nvfp4")
    source[1] = nn.Linear(64, 96)
    source[1].weight = source[0].weight
    model = fp4pass.convert(copy.deepcopy(source), "nvfp4a16", "sse")
    first, second = trainable(model, source)
    assert first.latent is second.latent
    first.search_scales()
    second.share_scales(first)
    frozen([first, second])
    assert model[0].weight_packed is model[1].weight_packed
    assert model[0].weight_scale is model[1].weight_scale


def test_latents_are_never_cast() -> None:
    source, model = pair("nvfp4", torch.bfloat16)
    first, _ = trainable(model, source)
    before = first.latent.detach().clone()
    model.half()
    assert first.bias.dtype == torch.float16
    assert torch.equal(first.latent, before) and first.latent.requires_grad
    assert isinstance(first.latent, nn.Parameter)
    twin = copy.deepcopy(model)
    assert torch.equal(twin[0].latent, before)


@pytest.mark.quick(2)
@pytest.mark.parametrize("weight_only", [True, False], ids=["w4a16", "w4a4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_experts_learn(name: str, weight_only: bool) -> None:
    source = mixtures.build(name)
    model = fp4pass.prepare(copy.deepcopy(source), "naive")
    model = fp4pass.calibrate(model, [mixtures.ids()], progress=False)
    model = fp4pass.convert(model, "nvfp4", "naive", weight_only=weight_only)
    start, wanted = copy.deepcopy(model), mixtures.logits(model)
    layers = trainable(model, source)
    stacks = [layer for layer in layers if isinstance(layer, TrainableExperts)]
    assert stacks
    torch.testing.assert_close(mixtures.logits(model), wanted, rtol=1e-3, atol=1e-3)
    model(mixtures.ids()).logits.square().sum().backward()
    for stack in stacks:
        assert stack.latent.grad is not None and stack.latent.grad.any((1, 2)).all()
    frozen(layers)
    assert_same_bits(model, start)


def test_experts_with_global_scales_of_inputs() -> None:
    """One for each expert, as some libraries calibrate them."""
    source = mixtures.build("qwen3_moe")
    model = fp4pass.prepare(copy.deepcopy(source), "naive")
    model = fp4pass.calibrate(model, [mixtures.ids()], progress=False)
    model = fp4pass.convert(model, "nvfp4", "naive")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stack: Any = model.get_submodule(name)
    stack.input_global_scale = stack.input_global_scale * 2.0 ** torch.arange(5)
    rows, ids = torch.randn(12, 64), torch.randint(0, 5, (12, 2))
    wanted = stack(rows, ids)
    make_trainable(stack, original_weight(source, name, stack))
    torch.testing.assert_close(stack(rows, ids), wanted)


def test_errors() -> None:
    source, model = pair("nvfp4")
    with pytest.raises(StateError, match="a quantized layer"):
        make_trainable(source[0], source[0].weight)
    with pytest.raises(ShapeError, match=r"expected shape \(96, 64\), got shape \(64, 96\)"):
        make_trainable(model[0], source[0].weight.T)
    with pytest.raises(StateError, match="a layer of make_trainable"):
        freeze(model[0])
    with pytest.raises(StateError, match=r"with a parameter 2\.weight"):
        original_weight(source, "2", model[0])
    with pytest.raises(StateError, match="meta device"):
        original_weight(nn.Linear(64, 96, device="meta"), "", model[0])
