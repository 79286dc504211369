"""Stacks whose experts, or the parts of whose rows, have global scales of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mixtures import build, logits
from torch import Tensor

import fp4pass
from fp4pass.errors import ShapeError
from fp4pass.nn.experts import QuantizedExpertStack
from fp4pass.nn.linear import StoredWeight, quantized_linear

pytest.importorskip("transformers")

FIRST = "model.layers.0.mlp.experts"


def converted(weight_only: bool = False) -> Any:
    model = build("qwen3_moe", torch.float32)
    if not weight_only:
        fp4pass.prepare(model, "naive")
        logits(model)
    return fp4pass.convert(model, "nvfp4", "naive", weight_only=weight_only)


def unlike(stack: QuantizedExpertStack, parts: int, inputs: bool) -> QuantizedExpertStack:
    """The stack, with numbers that another library would have chosen."""
    experts = len(stack.weight_packed)
    scale: Any = stack.weight_global_scale
    factors = torch.linspace(0.7, 1.9, experts * parts).view(experts, parts)
    stack.weight_global_scale = scale[:, None] * factors if parts > 1 else scale * factors[:, 0]
    if inputs:
        stack.input_global_scale = stack.input_global_scale * torch.linspace(0.4, 2.1, experts)
    return stack


def of_experts(stack: QuantizedExpertStack, x: Tensor, routing: Tensor) -> Tensor:
    """What a linear layer of each part of each expert computes with its own numbers."""
    out = torch.zeros(*routing.shape, stack.out_features)
    packed, bits, scale, inputs = stack.packed_weight
    scale = scale if scale.ndim == 2 else scale[:, None]
    rows = stack.out_features // scale.shape[1]
    for expert in range(len(packed)):
        pairs = torch.where(routing == expert)
        given = x[pairs[0]] if x.ndim == 2 else x[pairs]
        for part in range(scale.shape[1] if len(given) else 0):
            own = slice(part * rows, (part + 1) * rows)
            of_inputs = None if inputs is None else inputs[expert if len(inputs) > 1 else 0][None]
            number = scale[expert, part][None]
            weight = StoredWeight(packed[expert, own], bits[expert, own], number, of_inputs)
            y = quantized_linear(given, weight, None, stack.config)
            out[(*pairs, own)] = y
    return out


@pytest.mark.parametrize("weight_only", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("each", [False, True])
def test_an_expert_computes_with_its_own_numbers(weight_only: bool, parts: int, each: bool) -> None:
    stack = unlike(
        converted(weight_only).get_submodule(f"{FIRST}.gate_up_proj"), parts, not weight_only
    )
    routing = torch.tensor([[0, 2], [4, 1], [3, 0], [5, -1]])
    x = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(0))
    x = x if each else x[:, 0]
    y = stack(x, routing)
    # But for the order of sums: a code that moved would show.
    assert y.shape == (4, 2, 64)
    assert torch.allclose(y, of_experts(stack, x, routing), rtol=1e-5, atol=1e-5)
    assert not y[3].any()


def test_gradients_are_those_of_the_dense_experts() -> None:
    model = converted()
    for name in ("gate_up_proj", "down_proj"):
        unlike(model.get_submodule(f"{FIRST}.{name}"), 2, True)
    stack = model.get_submodule(f"{FIRST}.gate_up_proj")
    routing = torch.tensor([[0, 2], [4, 1], [3, 0]])
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    grad = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(1))
    (stack(x, routing) * grad).sum().backward()
    wanted = torch.einsum("tkn,tknh->th", grad, stack.weight[routing])
    assert torch.allclose(x.grad, wanted, atol=1e-5)


def test_scales_of_another_number_of_experts_are_refused() -> None:
    stack = converted().get_submodule(f"{FIRST}.down_proj")
    stack.input_global_scale = torch.ones(3)
    with pytest.raises(ShapeError, match=r"x_global_scale: expected \[1\] or \[5\]"):
        stack(torch.randn(2, 2, 32), torch.zeros(2, 2, dtype=torch.int64))
