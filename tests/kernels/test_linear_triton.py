"""Linear layers on packed weights, on a GPU (or in Triton's interpreter), against float64."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from blocks import VARIANTS
from exact_products import (
    DEVICE,
    GPU,
    assert_each_kernel_waits,
    assert_rounded,
    numbers,
    products,
    weight,
)
from kernel_cases import DTYPES, cases, covering, flat, formats_and_dtypes
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import PackedWeight
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.linear import tiling
from fp4pass.kernels.linear import triton as module
from fp4pass.kernels.linear.decode_triton import InputRows
from fp4pass.kernels.linear.tiling import Tiles, config
from fp4pass.kernels.quantize.naive import quantize_ref
from fp4pass.kernels.quantize.triton import quantize_triton

linear_triton, linear_quantized_triton = flat("linear"), flat("linear_quantized")
linear_group_triton = flat("linear_group")
linear_quantized_group_triton = flat("linear_quantized_group")

# numpy, in the interpreter, says when a product leaves float32.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def empty(dtype: torch.dtype) -> torch.Tensor:
    """What stands for the input that was quantized, whose dtype the result has."""
    return torch.empty(0, dtype=dtype, device=DEVICE)


def check(y, x, packed, scale, divisors, bias, fmt) -> None:
    """A linear is a stack of one matrix; the global scales of both operands multiply."""
    factor = math.prod(fmt.global_scale_of(d.item()) for d in divisors if d is not None)
    stored = torch.tensor([fmt.global_scale_of(factor)], dtype=torch.float64)
    rows = x.reshape(-1, x.shape[-1])
    ids = torch.zeros(len(rows), 1, dtype=torch.int64, device=DEVICE)
    one = PackedWeight(packed[None], scale[None], stored, None if bias is None else bias[None])
    exact, mass = products(rows, ids, one, fmt)
    shape = (*x.shape[:-1], len(packed))
    assert_rounded(y, exact.view(shape), mass.view(shape), x.shape[-1])


def run(fmt, dtype, m, n, k, divisor=None, bias=None, tiles=None) -> torch.Tensor:
    x, (packed, scale) = numbers(m, k, dtype=dtype), weight(fmt, n, k)
    divisor = None if divisor is None else torch.tensor([divisor], device=DEVICE)
    if tiles is None:
        y = linear_triton(x, packed, scale, divisor, bias, fmt)
    else:
        out = x.new_empty(m, n)
        stored = PackedWeight(packed, scale, divisor, bias)
        y = module.multiply(InputRows.of_numbers(x), stored, out, fmt, tiles)
    assert y.dtype == dtype
    check(y, x, packed, scale, [divisor], bias, fmt)
    return y


@pytest.mark.quick(2)
@formats_and_dtypes
def test_linear(fmt: Format, dtype: torch.dtype) -> None:
    for m, n, blocks in ((0, 5, 2), (1, 33, 9), (2, 1, 1), (5, 70, 17), (9, 33, 9), (17, 19, 3)):
        run(fmt, dtype, m, n, blocks * fmt.block, divisor=3.7, bias=numbers(n, dtype=dtype))
    run(fmt, dtype, 1, 17, 32 * fmt.block)


ROWS = [2, 3, 5, 8, 9, 15, 16]


@pytest.mark.quick(2)
@covering(("fmt", "m"), VARIANTS, ROWS)
def test_few_rows(fmt: Format, m: int) -> None:
    """Two whole steps, and what is left to the other kernels; N is odd."""
    fmt = fmt.with_multiplier()
    for k in (1024, 544, fmt.block):
        run(fmt, torch.bfloat16, m, 35, k, divisor=0.3, bias=numbers(35))


# Of 6144 columns four programs share a sum, of 2080 two.
SHARED = [(35, 2080, False), (35, 6144, False), (993, 2048, True)]


@pytest.mark.parametrize(("n", "k", "warps_share"), cases(SHARED[:1], SHARED))
def test_programs_share_a_sum(n: int, k: int, warps_share: bool) -> None:
    """With codes in place of x, too."""
    fmt = get_format("nvfp4")
    tiles = config(9, n, k, 1, 227 * 1024)
    assert tiles.parts > 1 and tiles.warps_share is warps_share
    run(fmt, torch.bfloat16, 9, n, k, divisor=3.7, bias=numbers(n))
    packed, scale = weight(fmt, n, k)
    divisors = [torch.tensor([value], device=DEVICE) for value in (0.37, 3.7)]
    x_packed, x_scale = quantize_ref(numbers(9, k), divisors[0], fmt)
    bias = numbers(n)
    activations = (empty(torch.bfloat16), x_packed, x_scale, divisors[0])
    y = linear_quantized_triton(*activations, packed, scale, divisors[1], bias, fmt)
    x = dequantize_ref(x_packed, x_scale, None, fmt, torch.float64)
    check(y, x, packed, scale, divisors, bias, fmt)


@pytest.mark.core
def test_few_rows_do_not_meet() -> None:
    """What is not finite at the end of a row, or beyond the last, stays out of the others."""
    fmt = get_format("nvfp4")
    packed, scale = weight(fmt, 5, 48)
    x = numbers(6, 48, dtype=torch.bfloat16)
    x[3:] = float("nan")
    for m in (2, 3):
        assert linear_triton(x[:m], packed, scale, None, None, fmt).isfinite().all()
    x[1] = float("inf")
    y = linear_triton(x[:3], packed, scale, None, None, fmt)
    assert y[[0, 2]].isfinite().all() and not y[1].isfinite().any()


@pytest.mark.quick(2)
@formats_and_dtypes
def test_linear_quantized(fmt: Format, dtype: torch.dtype) -> None:
    for m, n, blocks in ((0, 5, 2), (1, 33, 9), (3, 70, 17), (17, 19, 1)):
        k = blocks * fmt.block
        packed, scale = weight(fmt, n, k)
        fmt = fmt.with_multiplier(m != 3)
        x_divisor, divisor = (torch.tensor([number], device=DEVICE) for number in (2.7, 8.0))
        x_packed, x_scale = quantize_ref(numbers(m, k), x_divisor, fmt)
        arguments = (x_divisor, packed, scale, divisor, numbers(n), fmt)
        y = linear_quantized_triton(empty(dtype), x_packed, x_scale, *arguments)
        assert y.dtype == dtype
        x = dequantize_ref(x_packed, x_scale, None, fmt, torch.float64)
        check(y, x, packed, scale, [x_divisor, divisor], numbers(n), fmt)
        if m > 1:
            # A row with a block that was not finite.
            x_scale[1, 0] = fmt.scale.nan
            y = linear_quantized_triton(empty(dtype), x_packed, x_scale, *arguments)
            assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


def test_more_quantized_rows_than_offsets_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are multiplied a part at a time, with leading dimensions that parts do not respect."""
    fmt = get_format("nvfp4")
    packed, scale = weight(fmt, 33, 48)
    x_packed, x_scale = quantize_ref(numbers(3, 7, 48), None, fmt)
    monkeypatch.setattr(module, "MAX_ROWS", 4)
    activations = (empty(torch.float32), x_packed, x_scale, None)
    y = linear_quantized_triton(*activations, packed, scale, None, numbers(33), fmt)
    x = dequantize_ref(x_packed, x_scale, None, fmt, torch.float64)
    check(y, x, packed, scale, [], numbers(33), fmt)


@pytest.mark.parametrize(
    "fmt", cases([(VARIANTS[0],), (VARIANTS[-1],)], ((fmt,) for fmt in VARIANTS))
)
def test_weights_are_exact(fmt: Format) -> None:
    """A row of the identity gives a column of the weight, whatever its scales."""
    # 6 * 2^127 is infinite, and so is what it is added to.
    last = fmt.scale.last if fmt.scale.subnormal else 252
    scale = torch.arange(last + 1, dtype=torch.uint8, device=DEVICE).unsqueeze(1)
    codes = torch.arange(fmt.block // 2, dtype=torch.uint8, device=DEVICE)
    # All 16 codes; element 0 is the largest.
    packed = ((codes * 34 + 16) ^ 0x77).repeat(last + 1, 1)
    expected = dequantize_ref(packed, scale, None, fmt, torch.float32).t()
    eye = torch.eye(fmt.block, device=DEVICE)
    for dtype in DTYPES if DEVICE == "cuda" else DTYPES[:1]:
        for rows in (eye, eye[5:6]):
            y = linear_triton(rows.to(dtype), packed, scale, None, None, fmt)
            assert torch.equal(y, (rows @ expected).to(dtype))
    # With 6 the scale is 1.
    x_packed, x_scale = quantize_ref(6 * eye, None, fmt)
    y = linear_quantized_triton(eye, x_packed, x_scale, None, packed, scale, None, None, fmt)
    assert torch.equal(y, 6 * expected)


@pytest.mark.quick(2)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30, 1e-30])
def test_far_activations(value: float) -> None:
    """What is not finite stays in its row; float32 keeps range and precision."""
    fmt = get_format("nvfp4")
    packed, scale = weight(fmt, 5, 64)
    packed |= 0x11
    for m in (1, 3):
        x = numbers(m, 64)
        x[0] = 0.0
        x[0, 7] = value
        divisor = torch.tensor([2.0**10], device=DEVICE)
        y = linear_triton(x, packed, scale, divisor, None, fmt)
        dense = dequantize_ref(packed, scale, divisor, fmt, torch.float32)
        assert torch.allclose(y[0], dense[:, 7] * value, rtol=2**-22, atol=0, equal_nan=True)
        assert y[1:].isfinite().all()


@pytest.mark.core
def test_a_dense_weight_where_it_is_faster() -> None:
    nvfp4, mxfp4 = get_format("nvfp4"), get_format("mxfp4")
    assert tiling.fuses(256, 14336, torch.bfloat16, nvfp4)
    assert not tiling.fuses(256, 14336, torch.bfloat16, mxfp4)
    assert not tiling.fuses(256, 9728, torch.bfloat16, nvfp4)
    assert not tiling.fuses(257, 14336, torch.bfloat16, nvfp4)
    assert not tiling.fuses(65, 4096, torch.float16, nvfp4)


def tilings() -> list[Tiles]:
    """Every choice of tiles that `config` makes, for the chips from sm_80 on."""
    found = set()
    for m, n, k, terms, shared in itertools.product(
        [1, *(1 << i for i in range(1, 12)), 300, 384],
        [64, 2560, 4096, 9728, 14336],
        [272, 2560, 4096, 14336],
        [1, 2, 3],
        [227 * 1024, 163 * 1024, 99 * 1024],
    ):
        tiles = config(m, n, k, terms, shared)
        words = tiles.words * (tiles.warps if tiles.warps_share and m > 1 else 1)
        needed = tiles.stages * words * (16 * terms * tiles.m + 5 * tiles.n)
        assert needed <= shared or tiles.m == 8
        found.add((m == 1, tiles))
    return sorted(found, key=str)


def tilings_of_other_products() -> list[tuple[bool, Tiles]]:
    """Of those that differ in nothing but stages and launches, one."""
    found = {}
    for one, tiles in tilings():
        key = dataclasses.replace(tiles, stages=0, releases=False)
        found.setdefault((one, key), (one, tiles))
    return list(found.values())


@pytest.mark.quick(4)
@pytest.mark.parametrize(("one", "tiles"), cases(tilings_of_other_products(), tilings()))
def test_every_tiling(one: bool, tiles: Tiles) -> None:
    most = tiles.m if tiles.warps_share else min(tiles.m + 1, 300)
    m = 1 if one else most if DEVICE == "cuda" else 3
    n = 130 if DEVICE == "cuda" else 70
    k = 2048 + 32 if DEVICE == "cuda" else 288
    if tiles.warps_share and not one:
        k = 2048 if DEVICE == "cuda" else 512 * tiles.parts
    run(get_format("nvfp4"), torch.bfloat16, m, n, k, divisor=2.0, tiles=tiles)
    if DEVICE == "cuda":
        run(get_format("mxfp4"), torch.bfloat16, m, 130, 4096, bias=numbers(130), tiles=tiles)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("quantized", [False, True])
def test_many_rows_use_a_dense_weight(
    dtype: torch.dtype, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt = get_format("nvfp4")
    monkeypatch.setattr(module, "fuses", lambda *_: False)
    packed, scale = weight(fmt, 19, 64)
    divisor, bias = torch.tensor([4.0], device=DEVICE), numbers(19, dtype=dtype)
    x = numbers(2, 3, 64, dtype=dtype)
    if quantized:
        x_packed, x_scale = quantize_ref(x, None, fmt)
        x = dequantize_ref(x_packed, x_scale, None, fmt, torch.float64)
        activations = (empty(dtype), x_packed, x_scale, None)
        y = linear_quantized_triton(*activations, packed, scale, divisor, bias, fmt)
    else:
        y = linear_triton(x, packed, scale, divisor, bias, fmt)
    assert y.dtype == dtype
    check(y, x, packed, scale, [divisor], bias, fmt)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_many_quantized_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a dense weight, in parts, by a product that CPUs do not have."""

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return a.to(out_dtype) @ b.to(out_dtype)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(module, "_FUSED_QUANTIZED", 4)
    monkeypatch.setattr(module, "MAX_ROWS", 3)
    fmt, (divisor, x_divisor) = get_format("nvfp4"), torch.tensor([[3.7], [0.37]], device=DEVICE)
    packed, scale = weight(fmt, 19, 64)
    x_packed, x_scale = quantize_ref(numbers(5, 64), x_divisor, fmt)
    activations, bias = (empty(dtype), x_packed, x_scale, x_divisor), numbers(19)
    y = linear_quantized_triton(*activations, packed, scale, divisor, bias, fmt)
    x = dequantize_ref(x_packed, x_scale, None, fmt, torch.float64)
    check(y, x, packed, scale, [x_divisor, divisor], bias, fmt)


SIZES = [(33, 17), (1, 40, 16), (16, 16)]
# Rows, columns and biases: one row, few rows, and rows that are no group's.
PRODUCTS = [(1, 96, "all"), (1, 512, "none"), (3, 512, "all"), (8, 512, "some"), (9, 64, "none")]
KINDS = ["quantized", *DTYPES]


@pytest.mark.quick(2)
@covering(("fmt", "sizes", "product", "kind"), VARIANTS, SIZES, PRODUCTS, KINDS)
def test_groups_have_the_bits_of_their_members(
    fmt: Format, sizes: tuple[int, ...], product: tuple[int, int, str], kind: torch.dtype | str
) -> None:
    """Weights of several sizes, with numbers or codes in place of x."""
    m, k, biased = product
    global_scale = [torch.tensor([2.0 + i], device=DEVICE) for i in range(len(sizes))]
    packed, scale = zip(*(weight(fmt, n, k) for n in sizes), strict=True)
    bias = [
        numbers(n) if biased == "all" or (biased == "some" and i) else None
        for i, n in enumerate(sizes)
    ]
    each = list(zip(packed, scale, global_scale, bias, strict=True))
    x = numbers(m, 1, k, dtype=torch.bfloat16 if kind == "quantized" else kind)
    if kind == "quantized":
        x_scale = torch.tensor([0.5], device=DEVICE)
        activations = (x, *quantize_ref(x, x_scale, fmt), x_scale)
        several, one = linear_quantized_group_triton, linear_quantized_triton
    else:
        activations = (x,)
        several, one = linear_group_triton, linear_triton
    found = several(*activations, packed, scale, global_scale, bias, fmt)
    for y, stored in zip(found, each, strict=True):
        assert torch.equal(y, one(*activations, *stored, fmt))


class TestGpu:
    pytestmark = GPU

    @pytest.mark.parametrize(
        "n,k", [(4096, 4096), (2560, 9728), (1000, 2832), (14336, 4096), (1024, 14336)]
    )
    def test_large(self, n: int, k: int) -> None:
        fmt = get_format("nvfp4")
        for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 512, 1024):
            run(fmt, torch.bfloat16, m, n, k, divisor=512.0, bias=numbers(n))

    @pytest.mark.parametrize("key", ["nvfp4", "mxfp4"])
    def test_a_row_of_any_size(self, key: str) -> None:
        """Products that leave what tensor cores hold of codes are made again."""
        fmt = get_format(key)
        packed, scale = weight(fmt, 200, 4096)
        row = numbers(1, 4096, dtype=torch.bfloat16)
        for exponent in (-110, -80, -60, -30, 0, 30, 60, 80):
            x = row * 2.0**exponent
            y = linear_triton(x, packed, scale, None, None, fmt)
            check(y, x.double(), packed, scale, [None, None], None, fmt)
        assert not linear_triton(row * 0, packed, scale, None, None, fmt).any()
        row[0, 7] = math.nan
        assert linear_triton(row, packed, scale, None, None, fmt).isnan().all()

    @pytest.mark.parametrize("quantized", [False, True])
    @pytest.mark.parametrize("m", [1, 4, 16, 32, 64, 128, 300])
    def test_each_kernel_waits_for_the_one_before(self, m: int, quantized: bool) -> None:
        """Products that read what the last one wrote, of weights that were just written."""
        fmt = get_format("nvfp4")
        sizes = (14336, 4096), (4096, 14336)
        # So divided, what is multiplied does not vanish.
        stored = [(*weight(fmt, *size), torch.tensor([256.0], device=DEVICE)) for size in sizes]
        late = [torch.zeros_like(packed) for packed, _, _ in stored]
        start = numbers(m, 4096, dtype=torch.bfloat16)
        one = torch.ones(1, device=DEVICE)

        def chain(wait: Callable[[], None]) -> Tensor:
            x = start
            for _ in range(6):
                for (packed, scale, divisor), written in zip(stored, late, strict=True):
                    written.copy_(packed)
                    wait()
                    if quantized:
                        codes = quantize_triton(x, one, fmt)
                        wait()
                        operands = (*codes, one, written, scale, divisor, None, fmt)
                        x = linear_quantized_triton(x, *operands)
                    else:
                        x = linear_triton(x, written, scale, divisor, None, fmt)
                    wait()
                    written.zero_()
                    x = x.tanh()
            return x

        assert_each_kernel_waits(chain, eager=True)
