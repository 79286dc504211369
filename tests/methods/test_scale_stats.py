"""Which scales a quantized weight has, against a loop over its blocks."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from blocks import ALL, WEIGHTS
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.core.quant_state import QuantState
from fp4pass.errors import NonFiniteError, ShapeError
from fp4pass.methods import METHODS, Method
from fp4pass.methods.search import scale_counts, scale_offsets
from fp4pass.quantization.observers.observer import Observer, collect

formats = pytest.mark.parametrize("fmt", ALL[::2], ids=lambda fmt: fmt.key)


def make(kind: str) -> Tensor:
    """14 rows of 256 columns, so that all blocks fit."""
    weight = WEIGHTS[kind](torch.Generator().manual_seed(0))[:14]
    return torch.cat((weight, weight[:, :64]), dim=1).clamp(-1e30, 1e30)


def quantize(weight: Tensor, method: Method, fmt: Format) -> QuantState:
    """The state of a weight; its Hessian prefers some columns of a block to others."""
    x = torch.randn(80, weight.shape[1], generator=torch.Generator().manual_seed(1))
    observer = Observer(method.needs, weight.shape[1])
    observer(x * torch.logspace(-1, 1, 32).repeat(weight.shape[1] // 32))
    g = fmt.global_scale_for(weight.abs().max().item())
    return method.function(weight, collect([observer], "").matrix(0), fmt, g, method.options())


def naive_step(block: Tensor, fmt: Format, global_scale: float) -> int:
    """The place of the naive scale among all: nearest to amax / max, or the power of two below."""
    table = torch.tensor(fmt.scale.values, dtype=torch.float64)
    amax = block.float().abs().max()
    if fmt.scale.mantissa_bits:
        wanted = (amax / (fmt.element.max * global_scale)).double()
        distance = (wanted - table).abs()
        nearest = (distance == distance.min()).nonzero().flatten().tolist()
        return next(i for i in nearest if len(nearest) == 1 or i % 2 == 1)
    largest = 2.0 ** math.floor(math.log2(fmt.element.max))
    return max(int((table <= amax.double() / largest).sum()) - 1, 0)


@formats
@pytest.mark.parametrize("kind", ["normal", "adversarial", "bfloat16"])
def test_offsets_are_those_of_a_loop(kind: str, fmt: Format) -> None:
    weight = make(kind)
    state = quantize(weight, METHODS["sse"], fmt)
    table = list(fmt.scale.values)
    wanted: Counter[int] = Counter()
    for row, scales in zip(weight, state.scale, strict=True):
        for block, byte in zip(row.split(fmt.block), scales, strict=True):
            if block.any():
                chosen = table.index(fmt.scale.decode(int(byte)))
                wanted[chosen - naive_step(block, fmt, state.global_scale)] += 1
    found = scale_offsets(weight, state)
    assert found == wanted and list(found) == sorted(found)
    zeros = sum(not block.any() for row in weight for block in row.split(fmt.block))
    assert sum(found.values()) == state.scale.numel() - zeros
    assert (kind == "adversarial") == (zeros > 0)


@formats
def test_counts_of_a_state_and_of_bits_in_any_dtype(fmt: Format) -> None:
    state = quantize(make("adversarial"), METHODS["sse"], fmt)
    found = scale_counts(state, fmt)
    assert found == Counter(fmt.scale.decode(int(byte)) for byte in state.scale.flatten())
    assert list(found) == sorted(found)
    for bits in (state.scale, state.scale.flatten(), state.scale.view(fmt.scale.storage)):
        assert scale_counts(bits, fmt) == found


@formats
def test_counts_of_bytes_that_are_no_scales(fmt: Format) -> None:
    """Foreign checkpoints have zeros, and what stands for NaN."""
    bits = torch.tensor([0, 0, 1, fmt.scale.nan, 255], dtype=torch.uint8)
    found = scale_counts(bits, fmt)
    assert list(found.values()) == [2, 1, 2]
    zero, least, nothing = found
    assert (zero, least) == (fmt.scale.decode(0), fmt.scale.min) and math.isnan(nothing)


def test_weights_that_do_not_fit() -> None:
    weight = make("normal")
    state = quantize(weight, METHODS["sse"], get_format("nvfp4"))
    with pytest.raises(ShapeError, match=r"shape \(256, 14\) and its quantized state \(14, 256\)"):
        scale_offsets(weight.t(), state)
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        scale_offsets(weight * math.nan, state)
    parameter = torch.nn.Parameter(weight)
    assert scale_offsets(parameter, state) == scale_offsets(weight, state)
