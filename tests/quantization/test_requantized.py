"""Weights that were quantized before are kept when "sse" quantizes them again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp4pass
from fp4pass.core.formats import get_format

GLOBAL = ["nvfp4", "nvfp4_ue5m3"]
BLOCKS = [*GLOBAL, "mxfp4", "int8"]


def weights(seed: int, fmt: str) -> Tensor:
    """Random weights, a half of them with a number just beyond what a power of two reaches."""
    generator = torch.Generator().manual_seed(seed)
    record = get_format(fmt)
    block, reach = record.block, record.scale.max if record.has_global_scale else 1.0
    weight = torch.randn(8, 4 * block, generator=generator)
    if seed % 3 == 1:
        weight *= torch.randn(weight.shape, generator=generator).exp()
    if seed % 2:
        full = reach * record.element.max * 2.0 ** -(20 + seed % 5)
        # All of its block is about as large, so that clipping the largest number pays.
        weight *= 0.2 * full / weight.abs().max()
        top = torch.rand(block, generator=generator) * 0.5 + 0.5
        top[seed % block] = 1 + 0.1 * torch.rand((), generator=generator)
        weight[seed % 8, :block] = top * full
    return weight.bfloat16().float() if seed % 4 < 2 else weight


@pytest.mark.parametrize("fmt", BLOCKS)
def test_sse_keeps_what_it_returned(fmt: str) -> None:
    clipped = 0
    for seed in range(12):
        first = fp4pass.quantize(weights(seed, fmt), fmt)
        dense = fp4pass.dequantize(first)
        again = fp4pass.quantize(dense, fmt)
        assert torch.equal(fp4pass.dequantize(again), dense), seed
        plain = get_format(fmt).global_scale_for(float(dense.abs().max()))
        clipped += again.global_scale > plain
        if again.global_scale == first.global_scale:
            assert torch.equal(again.qdata, first.qdata)
            assert torch.equal(again.scale.view(torch.uint8), first.scale.view(torch.uint8))
        else:
            # Both powers of two have the grid: what it was before cannot be told.
            assert again.global_scale == plain == first.global_scale / 2
    # Here the largest magnitude alone tells the wrong scale.
    assert clipped or fmt not in GLOBAL


@pytest.mark.parametrize("fmt", GLOBAL)
def test_the_global_scale_of_other_weights_is_that_of_their_largest_magnitude(fmt: str) -> None:
    for seed in range(16):
        weight = weights(seed, fmt)
        expected = get_format(fmt).global_scale_for(float(weight.abs().max()))
        assert fp4pass.quantize(weight, fmt).global_scale == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_of_layers_is_kept(dtype: torch.dtype) -> None:
    """One of three layers that share a scale was clipped."""

    def made() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 8, dtype=dtype) for _ in range(3)))

    first = made()
    with torch.no_grad():
        for i, layer in enumerate(first):
            layer.weight.copy_(0.01 * weights(0, "nvfp4") if i else weights(1, "nvfp4"))
    fp4pass.convert(first, "nvfp4a16", "sse")
    again = made()
    with torch.no_grad():
        for layer, packed in zip(again, first, strict=True):
            layer.weight.copy_(packed.weight)
    fp4pass.convert(again, "nvfp4a16", "sse")
    for layer, packed in zip(again, first, strict=True):
        assert torch.equal(layer.weight, packed.weight)
