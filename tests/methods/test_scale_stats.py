"""How many blocks of a quantized weight have which scale."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from blocks import ALL, WEIGHTS
from torch import Tensor, nn

from fp4pass.core.formats import Format
from fp4pass.core.quant_state import QuantState
from fp4pass.methods import METHODS, Method
from fp4pass.methods.search import scale_counts
from fp4pass.quantization.observers.observer import OBSERVERS, Observer, collect

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
    holder = nn.Module()
    holder.__dict__[OBSERVERS] = (observer,)
    g = fmt.global_scale_for(weight.abs().max().item())
    return method.function(weight, collect([holder], "").matrix(0), fmt, g, method.options())


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
