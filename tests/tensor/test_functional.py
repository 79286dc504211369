"""fp4pass.functional against brute force in float64, and against what qwantize's are said to do."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from blocks import ALL, VARIANTS
from every_format import TABLES, hessian_of, inputs, rounded, sample, steps_of
from torch import Tensor

from fp4pass import functional as F
from fp4pass.core.formats import FORMATS, Format, get_format
from fp4pass.core.quant_state import unpack_codes
from fp4pass.errors import OptionError, ShapeError
from fp4pass.kernels.search.reference import search_ref
from fp4pass.methods.base import search_scales
from fp4pass.tensor import blocks as blockwise

IDS: Any = lambda fmt: fmt.key  # noqa: E731


def block_errors(x: Tensor, dequant: Tensor, hessian: Tensor | None) -> Tensor:
    """Errors float64 [..., N, J] of blocks [..., N, J, n], by squares or by H [J, n, n]."""
    r = x.double() - dequant
    if hessian is None:
        return r.square().sum(-1)
    return (torch.einsum("...ji,jik->...jk", r, hessian) * r).sum(-1)


@lru_cache(maxsize=4)
def brute_force(key: str, global_scale: float, by_hessian: bool) -> Tensor:
    """The least error of each block of `sample` over all scales: [N, J]."""
    fmt = next(f for f in ALL if f.key == key)
    x = sample(fmt)
    steps = steps_of(fmt.name, global_scale)
    hessian = hessian_of(inputs(fmt), fmt.block) if by_hessian else None
    least = torch.full(x.shape[:-1], math.inf, dtype=torch.float64)
    for step in steps:
        dequant = rounded(x / step, fmt.name) * step.double()
        least = torch.minimum(least, block_errors(x, dequant, hessian))
    return least


def function(fmt: Format, ending: str) -> Any:
    return getattr(F, f"{fmt.name}_{ending}")


def test_the_tables_are_of_all_formats() -> None:
    assert set(TABLES) == set(FORMATS)


SCALES = [None, "auto", 2.0**-6, 0.0037]


def check_best(fmt: Format, name: str, global_scale: Any, device: str = "cpu") -> None:
    """Scales are those of least error of all; quants are what x rounds to at them."""
    x, by_hessian = sample(fmt), "hessian" in name
    more = {"X": inputs(fmt)} if by_hessian else {}
    found = function(fmt, name)(x.to(device), -1, True, global_scale=global_scale, **more)
    scales, quants, dequant = (part.cpu() for part in found)
    g = given(fmt, global_scale, x)
    assert torch.isin(scales, steps_of(fmt.name, g)).all()
    assert torch.equal(quants.double(), rounded(x / scales.unsqueeze(-1), fmt.name))
    assert torch.equal(dequant, quants * scales.unsqueeze(-1))
    hessian = hessian_of(inputs(fmt), fmt.block) if by_hessian else None
    exact = quants.double() * scales.unsqueeze(-1).double()
    errors = block_errors(x, exact, hessian)
    # Products with a global scale that is no power of two are rounded, as residuals are compared.
    slack = 1e-6 if math.frexp(g)[0] == 0.5 else 1e-5
    assert (errors <= brute_force(fmt.key, g, by_hessian) * (1 + slack)).all()


@pytest.mark.parametrize("global_scale", SCALES)
@pytest.mark.parametrize("ending", ["optimal", "optimal_hessian"])
@pytest.mark.parametrize("fmt", ALL, ids=IDS)
def test_scales_are_the_best_of_all(fmt: Format, ending: str, global_scale: Any) -> None:
    if isinstance(global_scale, float) and not fmt.has_global_scale:
        with pytest.raises(OptionError, match="has no global scale"):
            function(fmt, ending)(sample(fmt), global_scale=global_scale)
        return
    check_best(fmt, ending, global_scale)


def given(fmt: Format, global_scale: Any, x: Tensor) -> float:
    """The global scale as a number, by what the documentation says."""
    if global_scale == "auto":
        return F.global_scale_for(x, fmt.key).item()
    if global_scale is None:
        global_scale = 1 / 127 if fmt.element.bits == 8 and fmt.has_global_scale else 1.0
    return torch.tensor(global_scale).item()


@pytest.mark.parametrize("fmt", ALL, ids=IDS)
def test_never_worse_than_naive(fmt: Format) -> None:
    x = sample(fmt)
    hessian = hessian_of(inputs(fmt), fmt.block)
    naive = function(fmt, "naive")(x, return_dequant=True)[2].double()
    best = function(fmt, "optimal")(x, return_dequant=True)[2].double()
    by_inputs = function(fmt, "optimal_hessian")(x, -1, True, inputs(fmt))[2].double()
    slack = 1 + 1e-6
    assert (block_errors(x, best, None) <= block_errors(x, naive, None) * slack).all()
    by_hessian = block_errors(x, by_inputs, hessian)
    for other in (naive, best):
        assert (by_hessian <= block_errors(x, other, hessian) * slack).all()


# What is published, in formulas; amax is within the reach of the scales.
PUBLISHED = {
    "nvfp4": lambda amax: (amax / 6).to(torch.float8_e4m3fn).double(),
    "nvint4": lambda amax: (amax / 7).to(torch.float8_e4m3fn).double(),
    "int8": lambda amax: amax.to(torch.float8_e4m3fn).double() / 127,
    "mxfp4": lambda amax: 2.0 ** (torch.floor(torch.log2(amax.double())) - 2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_naive_is_what_is_published(name: str) -> None:
    fmt = FORMATS[name]
    x = torch.randn(400, fmt.block, generator=torch.Generator().manual_seed(0)) * 3
    scales, quants = function(fmt, "naive")(x)
    wanted = PUBLISHED[name](x.abs().amax(-1))
    assert scales.shape == (400,) and quants.shape == x.shape
    # int8's scale is a product in float32 and not a quotient.
    assert torch.allclose(scales.double(), wanted, rtol=2.0**-23, atol=0)
    assert name == "int8" or torch.equal(scales.double(), wanted)
    assert torch.equal(quants.double(), rounded(x / scales.unsqueeze(-1), name))


@pytest.mark.parametrize("power", [-126, -30, -4, -1, 0, 1, 2, 13, 127])
def test_exponents_at_powers_of_two_are_exact(power: int) -> None:
    """Where float32's log2 may land on either side."""
    x = torch.zeros(3, 32)
    x[:, 5] = torch.tensor(2.0**power)
    x[1] = torch.nextafter(x[1], torch.tensor(0.0))
    x[2] = torch.nextafter(x[2], torch.tensor(math.inf)) * (x[2] > 0)
    scales, _ = F.mxfp4_naive(x)
    wanted = [power - 2, power - 3, power - 2]
    assert scales.log2().tolist() == [max(e, -126) for e in wanted]


@pytest.mark.parametrize("fmt", ALL, ids=IDS)
@pytest.mark.parametrize("ending", ["naive", "optimal", "optimal_hessian"])
def test_zero_blocks_have_the_smallest_scale(fmt: Format, ending: str) -> None:
    x = sample(fmt)
    x[0] = 0.0
    more = {"X": inputs(fmt)} if ending == "optimal_hessian" else {}
    scales, quants, dequant = function(fmt, ending)(x, return_dequant=True, **more)
    assert (scales[0] == steps_of(fmt.name, given(fmt, None, x))[0]).all()
    assert (quants[0] == 0).all() and dequant.isfinite().all() and scales.isfinite().all()


@pytest.mark.parametrize("name", ["nvfp4", "nvint4"])
def test_scales_end_where_they_end(name: str) -> None:
    """Naive scales are 448 above, not NaN, and 2^-9 below, not 0."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    large, small = x * 1e5, x * 1e-5
    assert (function(FORMATS[name], "naive")(large)[0] == 448).all()
    assert (function(FORMATS[name], "naive")(small)[0] == 2.0**-9).all()
    for ending in ("optimal", "optimal_hessian"):
        more = {"H_blocks": torch.eye(16).unsqueeze(0)} if "hessian" in ending else {}
        quants = function(FORMATS[name], ending)(large, **more)[1]
        assert quants.isfinite().all() and quants.abs().max() == TABLES[name][0][-1]
    scales, _ = function(FORMATS[name], "naive")(large, global_scale="auto")
    wanted = PUBLISHED[name](large.abs().amax(-1) / F.global_scale_for(large, name))
    assert torch.equal((scales / F.global_scale_for(large, name)).double(), wanted)


def test_ties_go_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor([[6.0, *ties, -6.0, *(-t for t in ties)]])
    scales, quants = F.nvfp4_naive(x)
    wanted = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert scales.item() == 1.0
    assert quants.tolist() == [[*wanted, *(-w for w in wanted)]]
    integers = F.nvint4_naive(torch.tensor([[7.0, 0.5, 1.5, 2.5, -2.5, -3.5] + [0.0] * 10]))[1]
    assert integers[0, :6].tolist() == [7.0, 0.0, 2.0, 2.0, -2.0, -4.0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("fmt", [FORMATS[n] for n in ("nvfp4", "int8", "mxfp6_e2m3")], ids=IDS)
def test_the_block_may_be_any_dimension(fmt: Format, dim: int, packed: bool) -> None:
    x = sample(fmt)
    last = function(fmt, "optimal_hessian")(x, -1, True, inputs(fmt), packed=packed)
    # The blocks of a row stay behind the rows.
    moved = x.movedim(-1, dim)
    found = function(fmt, "optimal_hessian")(moved, dim, True, inputs(fmt), packed=packed)
    assert torch.equal(found[0], last[0])
    for a, b in zip(found[1:], last[1:], strict=True):
        assert torch.equal(a, b.movedim(-1, dim))
    assert torch.equal(function(fmt, "dequantize")(found[0], found[1], dim), found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int8"])
def test_dtypes_are_read_as_float32(name: str, dtype: torch.dtype) -> None:
    fmt = FORMATS[name]
    x = torch.randn(6, 3, fmt.block, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = x.clone()
    for ending in ("naive", "optimal", "optimal_hessian"):
        more = {"X": inputs(fmt).to(dtype)} if ending == "optimal_hessian" else {}
        found = function(fmt, ending)(x.requires_grad_(), -1, True, **more)
        wanted = function(fmt, ending)(x.detach().float(), -1, True, **more)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b) and a.dtype == torch.float32 and not a.requires_grad
        x = x.detach()
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int8", "nvfp4_ue5m3"])
def test_inputs_may_come_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = FORMATS[name]
    x, X = sample(fmt), inputs(fmt)
    optimal = function(fmt, "optimal_hessian")
    whole = optimal(x, X=X)
    assert torch.equal(optimal(x, X=X.bfloat16())[0], whole[0])  # up to 40, exact in bfloat16
    assert torch.equal(optimal(x, X=X.view(4, 20, -1))[0], whole[0])
    blocks = hessian_of(X, fmt.block)
    for hessian in (blocks, blocks.float(), blocks * 1e30, blocks * 1e-30):
        assert torch.equal(optimal(x, H_blocks=hessian)[0], whole[0])
    assert torch.equal(optimal(x, X=X * math.nan, H_blocks=blocks)[0], whole[0])
    monkeypatch.setattr(blockwise, "_CHUNK", 7 * X.shape[1])
    assert torch.equal(optimal(x, X=X)[0], whole[0])


def test_a_row_of_blocks_may_be_flat() -> None:
    """[N * J, n] and [2, N / 2, J, n] are [N, J, n]; an order in which they are not is refused."""
    fmt = FORMATS["nvfp4"]
    x, X = sample(fmt), inputs(fmt)
    scales, quants = F.nvfp4_optimal_hessian(x, X=X)
    flat = F.nvfp4_optimal_hessian(x.flatten(0, 1), X=X)
    assert torch.equal(flat[0], scales.flatten()) and torch.equal(flat[1], quants.flatten(0, 1))
    deep = F.nvfp4_optimal_hessian(x.view(2, 12, 3, 16), X=X)
    assert torch.equal(deep[0], scales.view(2, 12, 3))
    split = F.nvfp4_optimal_hessian(x.view(8, 3, 3, 1, 16), X=X)
    assert torch.equal(split[0], scales.view(8, 3, 3, 1))
    with pytest.raises(ShapeError, match=r"\[N, 3\] is wanted"):
        F.nvfp4_optimal_hessian(x[:23].transpose(0, 1), X=X)


@pytest.mark.parametrize("columns", [1, 2, 5])
def test_hessians_of_16_are_where_calibration_has_them(columns: int) -> None:
    """The same bits as a layer's search with the block Hessians of its calibration."""
    fmt = FORMATS["nvfp4"]
    x, X = sample(fmt, columns=columns), inputs(fmt, columns=columns)
    padded = torch.nn.functional.pad(X, (0, -X.shape[1] % 32))
    statistics = hessian_of(padded, 32).float()
    g = F.global_scale_for(x)
    state = search_scales(x.flatten(1), fmt, g.item(), "hessian", statistics)
    scales, codes = F.nvfp4_optimal_hessian(x, X=X, global_scale=g, packed=True)
    assert torch.equal(codes.flatten(1), state.qdata)
    assert torch.equal(F.scale_bytes(scales, "nvfp4", g), state.scale)


def test_the_search_refuses_hessians_narrower_than_a_block() -> None:
    """As calibration of a layer gives them to a format with blocks of 64."""
    fmt = get_format("int8", 64)
    x, narrow = sample(fmt).flatten(1), torch.eye(32).expand(6, 32, 32)
    with pytest.raises(ShapeError, match="32 columns, which are no whole blocks of 64"):
        search_ref(x, narrow, 1.0, fmt, "hessian")
    wide = torch.eye(64).expand(3, 64, 64)
    _, by_hessian = search_ref(x, wide, 1.0, fmt, "hessian")
    _, by_squares = search_ref(x, None, 1.0, fmt, "sse")
    assert torch.equal(by_hessian, by_squares)


@pytest.mark.parametrize("fmt", ALL, ids=IDS)
def test_packed_codes_stand_for_the_values(fmt: Format) -> None:
    x = sample(fmt)
    scales, quants, dequant = function(fmt, "optimal")(x, return_dequant=True)
    same, packed, also = function(fmt, "optimal")(x, return_dequant=True, packed=True)
    assert torch.equal(scales, same) and torch.equal(dequant, also)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*x.shape[:-1], fmt.block * fmt.element.bits // 8)
    alone = function(fmt, "optimal")(x, packed=True)
    assert len(alone) == 2 and torch.equal(alone[1], packed)
    dequantize = function(fmt, "dequantize")
    assert torch.equal(dequantize(scales, packed), dequant)
    assert torch.equal(dequantize(scales, quants), dequant)
    codes = unpack_codes(packed, fmt.element.bits)
    assert torch.equal(torch.signbit(quants), codes >= 1 << (fmt.element.bits - 1))
    bits = F.scale_bytes(scales, fmt.key)
    assert torch.equal(
        torch.tensor(fmt.scale.values)[bits.long() - 1] * given(fmt, None, x), scales
    )


def test_a_global_scale_is_a_number_or_a_tensor_of_one() -> None:
    x = sample(FORMATS["nvfp4"])
    wanted = F.nvfp4_optimal(x, global_scale=2.0**-5)
    for g in (torch.tensor(2.0**-5), torch.tensor([2.0**-5], dtype=torch.float64)):
        assert torch.equal(F.nvfp4_optimal(x, global_scale=g)[0], wanted[0])
    auto = F.global_scale_for(x)
    assert auto.dtype == torch.float32 and auto.shape == ()
    assert auto * 448 * 6 >= x.abs().max() > auto * 224 * 6
    assert torch.equal(
        F.nvfp4_naive(x, global_scale=auto)[0], F.nvfp4_naive(x, global_scale="auto")[0]
    )
    assert F.global_scale_for(x, "mxfp4") == 1.0 == F.global_scale_for(torch.zeros(2, 16))
    for g in (0.0, -1.0, math.nan, math.inf, 1e-45, 2e38):
        with pytest.raises(OptionError, match="2\\^-126 to 2\\^126 is wanted"):
            F.nvfp4_naive(x, global_scale=g)
    with pytest.raises(OptionError, match="'auto' or a number"):
        F.nvfp4_naive(x, global_scale="amax")
    with pytest.raises(ShapeError, match="one number is wanted"):
        F.nvfp4_naive(x, global_scale=torch.ones(3))


@pytest.mark.parametrize("g", [2.0**-126, 2.0**126, 3e-38, 7e37])
def test_global_scales_at_the_ends_stay_finite(g: float) -> None:
    for size in (2.0**-140, 1.0, 2.0**120):
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)) * size
        for ending in ("naive", "optimal"):
            found = function(FORMATS["nvfp4"], ending)(x, -1, True, global_scale=g)
            assert all(part.isfinite().all() for part in found)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=IDS)
@pytest.mark.parametrize("ending", ["naive", "optimal", "optimal_hessian"])
def test_triton_names_say_why_they_cannot_run(fmt: Format, ending: str) -> None:
    more = {"X": inputs(fmt)} if ending == "optimal_hessian" else {}
    with pytest.raises(OptionError, match=f"W is on cpu. {fmt.name}_{ending} finds the same"):
        function(fmt, f"{ending}_triton")(sample(fmt), **more)


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("ending", ["naive", "optimal", "optimal_hessian"])
@pytest.mark.parametrize("fmt", [pytest.param(fmt, marks=gpu, id=fmt.key) for fmt in VARIANTS])
def test_a_gpu_finds_the_bits_of_the_cpu(fmt: Format, ending: str) -> None:
    x = sample(fmt).bfloat16()
    more = {"X": inputs(fmt)} if ending == "optimal_hessian" else {}
    for global_scale in (None, "auto", 2.0**-6) if fmt.has_global_scale else (None, "auto"):
        wanted = function(fmt, ending)(x, -1, True, global_scale=global_scale, **more)
        for name in (ending, f"{ending}_triton"):
            found = function(fmt, name)(x.cuda(), -1, True, global_scale=global_scale, **more)
            for a, b in zip(found, wanted, strict=True):
                assert a.is_cuda and torch.equal(a.cpu(), b)


@pytest.mark.parametrize("ending", ["optimal", "optimal_hessian"])
@pytest.mark.parametrize("fmt", [pytest.param(fmt, marks=gpu, id=fmt.key) for fmt in ALL])
def test_scales_are_the_best_of_all_on_a_gpu(fmt: Format, ending: str) -> None:
    for global_scale in SCALES if fmt.has_global_scale else (None, "auto"):
        check_best(fmt, ending, global_scale, "cuda")
    if fmt not in VARIANTS:
        with pytest.raises(OptionError, match="the kernels do not know"):
            function(fmt, f"{ending}_triton")(sample(fmt).cuda())
