"""quantize_blocks against brute force in float64, and against formulas that are published."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from blocks import BLOCKS, VARIANTS
from every_format import TABLES, hessian_of, inputs, rounded, sample, steps_of
from torch import Tensor

from fp4pass import functional as F
from fp4pass.core.formats import Format, get_format
from fp4pass.methods import search_scales
from fp4pass.quantization.functional import quantize_blocks

IDS: Any = lambda fmt: fmt.key  # noqa: E731
every_objective = pytest.mark.parametrize("objective", F.OBJECTIVES)


def block_errors(x: Tensor, dequant: Tensor, hessian: Tensor | None) -> Tensor:
    """Errors float64 [..., N, J] of blocks [..., N, J, n], by squares or by H [J, n, n]."""
    r = x.double() - dequant
    if hessian is None:
        return r.square().sum(-1)
    return (torch.einsum("...ji,jik->...jk", r, hessian) * r).sum(-1)


@lru_cache(maxsize=4)
def brute_force(key: str, global_scale: float, by_hessian: bool) -> Tensor:
    """The least error of each block of `sample` over all scales: [N, J]."""
    fmt = get_format(key)
    x = sample(fmt)
    hessian = hessian_of(inputs(fmt), fmt.block) if by_hessian else None
    least = torch.full(x.shape[:-1], math.inf, dtype=torch.float64)
    for step in steps_of(fmt.name, global_scale):
        dequant = rounded(x / step, fmt.name) * step.double()
        least = torch.minimum(least, block_errors(x, dequant, hessian))
    return least


def test_tables_cover_all_formats() -> None:
    assert set(TABLES) == set(BLOCKS)


def check_best(fmt: Format, objective: str, global_scale: Any, device: str = "cpu") -> None:
    """Scales have the least error of all, and codes are the nearest at them."""
    x, by_hessian = sample(fmt), objective == "hessian"
    more = {"inputs": inputs(fmt)} if by_hessian else {}
    found = quantize_blocks(x.to(device), fmt.name, objective, global_scale=global_scale, **more)
    auto = fmt.global_scale_for(x.abs().max().item())
    g = torch.tensor(auto if global_scale == "auto" else global_scale).item()
    assert found.global_scale == g and found.format == fmt
    steps, values = found.steps().cpu(), found.values().cpu()
    assert torch.equal(steps, steps_of(fmt.name, g)[found.scale.cpu().long() - 1])
    assert torch.equal(values.double(), rounded(x / steps.unsqueeze(-1), fmt.name))
    assert torch.equal(found.dequantize().cpu(), values * steps.unsqueeze(-1))
    hessian = hessian_of(inputs(fmt), fmt.block) if by_hessian else None
    errors = block_errors(x, values.double() * steps.unsqueeze(-1).double(), hessian)
    # Products with a global scale that is no power of two are rounded, as residuals are compared.
    slack = 1e-6 if math.frexp(g)[0] == 0.5 else 1e-5
    assert (errors <= brute_force(fmt.key, g, by_hessian) * (1 + slack)).all()


SCALES = [1.0, "auto", 2.0**-6, 0.0037]
# Every element and scale once; global scales that cut scales off and that are rounded; blocks as
# wide as a Hessian of calibration and wider.
BEST = [
    *(pytest.param(fmt, "auto", id=f"{fmt.key}-auto") for fmt in BLOCKS.values()),
    *(pytest.param(BLOCKS["nvfp4"], g, id=f"nvfp4-{g}") for g in (1.0, 2.0**-6, 0.0037)),
    pytest.param(get_format("nvfp4", 32), "auto", id="nvfp4:32-auto"),
    pytest.param(get_format("int8", 64), "auto", id="int8:64-auto"),
]


@pytest.mark.parametrize("objective", ["sse", "hessian"])
@pytest.mark.parametrize("fmt, global_scale", BEST)
def test_scales_are_the_best_of_all(fmt: Format, global_scale: Any, objective: str) -> None:
    check_best(fmt, objective, global_scale)


# Published formulas; amax is within the reach of the scales.
PUBLISHED = {
    "nvfp4": lambda amax: (amax / 6).to(torch.float8_e4m3fn).double(),
    "nvint4": lambda amax: (amax / 7).to(torch.float8_e4m3fn).double(),
    "int8": lambda amax: amax.to(torch.float8_e4m3fn).double() / 127,
    "mxfp4": lambda amax: 2.0 ** (torch.floor(torch.log2(amax.double())) - 2),
}


@pytest.mark.core
@pytest.mark.parametrize("name", PUBLISHED)
def test_naive_is_what_is_published(name: str) -> None:
    fmt = BLOCKS[name]
    x = torch.randn(400, fmt.block, generator=torch.Generator().manual_seed(0)) * 3
    found = quantize_blocks(x, name, "naive", global_scale=1 / 127 if name == "int8" else 1.0)
    wanted, steps = PUBLISHED[name](x.abs().amax(-1)), found.steps()
    assert steps.shape == (400,)
    # The step of int8 is a product in float32 and not a quotient.
    assert torch.allclose(steps.double(), wanted, rtol=2.0**-23, atol=0)
    assert name == "int8" or torch.equal(steps.double(), wanted)
    assert torch.equal(found.values().double(), rounded(x / steps.unsqueeze(-1), name))


@pytest.mark.core
@pytest.mark.parametrize("power", [-126, 0, 13, 127])
def test_exponents_at_powers_of_two_are_exact(power: int) -> None:
    """Where the log2 of float32 may land on either side."""
    x = torch.zeros(3, 32)
    x[:, 5] = torch.tensor(2.0**power)
    x[1] = torch.nextafter(x[1], torch.tensor(0.0))
    x[2] = torch.nextafter(x[2], torch.tensor(math.inf)) * (x[2] > 0)
    wanted = [power - 2, power - 3, power - 2]
    steps = quantize_blocks(x, "mxfp4", "naive").steps()
    assert steps.log2().tolist() == [max(e, -126) for e in wanted]


@pytest.mark.core
@every_objective
@pytest.mark.parametrize("key", ["nvfp4", "int8:64"])
def test_zero_blocks_have_the_smallest_scale(key: str, objective: str) -> None:
    fmt = get_format(key)
    x = sample(fmt)
    x[0] = 0.0
    more = {"inputs": inputs(fmt)} if objective == "hessian" else {}
    found = quantize_blocks(x, fmt.name, objective, **more)
    assert (found.scale[0] == 1).all() and (found.values()[0] == 0).all()
    assert found.dequantize().isfinite().all() and found.steps().isfinite().all()


@pytest.mark.core
@pytest.mark.parametrize("name", ["nvfp4", "nvint4"])
def test_scales_saturate(name: str) -> None:
    """Naive scales are at most 448, not NaN, and at least 2^-9, not 0."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    large, small = x * 1e5, x * 1e-5
    assert (quantize_blocks(large, name, "naive", global_scale=1.0).steps() == 448).all()
    assert (quantize_blocks(small, name, "naive", global_scale=1.0).steps() == 2.0**-9).all()
    for objective in ("sse", "hessian"):
        more = {"block_hessian": torch.eye(16).unsqueeze(0)} if objective == "hessian" else {}
        values = quantize_blocks(large, name, objective, global_scale=1.0, **more).values()
        assert values.isfinite().all() and values.abs().max() == TABLES[name][0][-1]
    blocks = quantize_blocks(large, name, "naive")
    g, found = blocks.global_scale, blocks.steps() / blocks.global_scale
    assert torch.equal(found.double(), PUBLISHED[name](large.abs().amax(-1) / g))


def test_ties_go_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor([[6.0, *ties, -6.0, *(-t for t in ties)]])
    found = quantize_blocks(x, "nvfp4", "naive", global_scale=1.0)
    wanted = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert found.steps().item() == 1.0
    assert found.values().tolist() == [[*wanted, *(-w for w in wanted)]]
    x = torch.tensor([[7.0, 0.5, 1.5, 2.5, -2.5, -3.5] + [0.0] * 10])
    integers = quantize_blocks(x, "nvint4", "naive", global_scale=1.0).values()
    assert integers[0, :6].tolist() == [7.0, 0.0, 2.0, 2.0, -2.0, -4.0]


@pytest.mark.core
@pytest.mark.parametrize("columns", [1, 2, 5])
def test_the_search_of_a_layer_finds_the_same(columns: int) -> None:
    """The same bits as a layer's search with the block Hessians of its calibration."""
    fmt = BLOCKS["nvfp4"]
    x, X = sample(fmt, columns=columns), inputs(fmt, columns=columns)
    padded = torch.nn.functional.pad(X, (0, -X.shape[1] % 32))
    statistics = hessian_of(padded, 32).float()
    found = quantize_blocks(x, objective="hessian", inputs=X)
    state = search_scales(x.flatten(1), fmt, found.global_scale, "hessian", statistics)
    assert torch.equal(found.packed.flatten(1), state.qdata)
    assert torch.equal(found.scale, state.scale)


@pytest.mark.core
@pytest.mark.parametrize("g", [2.0**-126, 2.0**126, 3e-38, 7e37])
def test_extreme_global_scales_stay_finite(g: float) -> None:
    for size in (2.0**-140, 1.0, 2.0**120):
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)) * size
        for objective in ("naive", "sse"):
            found = quantize_blocks(x, objective=objective, global_scale=g)
            assert found.steps().isfinite().all() and found.dequantize().isfinite().all()


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@every_objective
@pytest.mark.parametrize("fmt", [pytest.param(fmt, marks=gpu, id=fmt.key) for fmt in VARIANTS])
def test_a_gpu_finds_the_bits_of_the_cpu(fmt: Format, objective: str) -> None:
    x = sample(fmt).bfloat16()
    more = {"inputs": inputs(fmt)} if objective == "hessian" else {}
    for g in ("auto", 2.0**-6) if fmt.has_global_scale else ("auto",):
        wanted = quantize_blocks(x, fmt.name, objective, global_scale=g, **more)
        found = quantize_blocks(x.cuda(), fmt.name, objective, global_scale=g, **more)
        assert torch.equal(found.packed.cpu(), wanted.packed)
        assert torch.equal(found.scale.cpu(), wanted.scale)
        assert torch.equal(found.dequantize().cpu(), wanted.dequantize())
