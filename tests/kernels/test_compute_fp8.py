"""Products of E4M3 operands: the numbers of the reference, and the kernels against it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, DTYPES, GPU, KEYS, cases, covering, flat, seeded
from torch import Tensor

from fp4pass import ops
from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import PackedInput, PackedWeight
from fp4pass.kernels.compute_fp8 import naive as fp8
from fp4pass.kernels.compute_fp8.triton import multiplies_dense, multiply_with, tiles_of
from fp4pass.kernels.compute_fp8.triton import wide_config as fp8_config
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.linear import triton as linear
from fp4pass.kernels.linear.decode_triton import InputRows, arranged
from fp4pass.kernels.linear.gluon_triton import counters, in_words, multiply_wide, runs_wide
from fp4pass.kernels.linear.naive import Around
from fp4pass.kernels.linear.tiling import Tiles, wide_config, wide_tiles
from fp4pass.kernels.quantize.naive import ACTIVATIONS
from fp4pass.methods import search_scales

linear_ref, linear_quantized_ref = (
    flat(name, "reference") for name in ("linear", "linear_quantized")
)
linear_triton, linear_quantized_triton = flat("linear"), flat("linear_quantized")
linear_group_triton = flat("linear_group")
activate_round_triton, norm_round_triton = flat("activate_round"), flat("norm_round")


def linear_rounded_triton(x: Tensor, factors: Tensor, *stored: Any) -> Tensor:
    """The product of E4M3 rows with their factors; stored: columns of a weight, a format."""
    *weight, fmt = stored
    around = Around(factors=factors)
    return linear.linear_group_triton(x, [PackedWeight(*weight)], fmt, around=around)[0]


# Every number of E4M3, ascending.
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def packed(fmt: Format, rows: int, columns: int, seed: int = 0) -> PackedInput:
    weight = torch.randn(rows, columns, generator=seeded(seed))
    weight /= torch.rand(rows, columns, generator=seeded(seed + 1)) + 0.1
    g = fmt.global_scale_for(weight.abs().max().item())
    state = search_scales(weight.to(DEVICE), fmt, g, "naive").to("cpu")
    divisor = torch.tensor([fmt.global_scale_of(g)]) if fmt.has_global_scale else None
    return PackedInput(state.qdata, state.scale, divisor)


def on_device(stored: PackedInput) -> PackedInput:
    return PackedInput(*(None if each is None else each.to(DEVICE) for each in stored))  # type: ignore[arg-type]


def as_weight(stored: PackedInput) -> PackedWeight:
    return PackedWeight(*on_device(stored))


def nearest(x: Tensor) -> Tensor:
    """The nearest E4M3 number of float64 x, ties to the even code."""
    above = torch.bucketize(x.abs(), E4M3).clamp_(1, 126)
    low, high = E4M3[above - 1], E4M3[above]
    below, over = x.abs() - low, high - x.abs()
    up = (over < below) | ((over == below) & (above % 2 == 0))
    return torch.where(up, high, low) * torch.where(x < 0, -1.0, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_numbers(dtype: torch.dtype) -> None:
    x = torch.randn(9, 96, generator=seeded()).mul(20).to(dtype)
    x[0] = 0
    x[1, 5] = 6e4
    x[2] *= 1e-7
    values, factor = fp8.quantize_rows_ref(x)
    expected = x.abs().amax(1).float() / 448
    on_its_device = fp8.quantize_rows_ref(x.to(DEVICE))
    assert torch.equal(on_its_device[0].cpu().float(), values.float())
    assert torch.equal(on_its_device[1].cpu(), factor)
    assert torch.equal(factor[1:], expected[1:]) and factor[0] == fp8.SMALLEST
    quotient = (x.float() / factor[:, None]).double()
    assert torch.equal(values.double(), nearest(quotient))


@pytest.mark.core
@pytest.mark.parametrize("key", KEYS)
def test_rows_of_codes(key: str) -> None:
    fmt = get_format(key)
    codes, scale, divisor = packed(fmt, 12, 96)
    values, factor = fp8.expand_ref(PackedInput(codes, scale, divisor), fmt)
    exact = dequantize_ref(codes, scale, None, fmt, torch.float32).double()
    power = torch.exp2(fp8.shift_of(scale, fmt).double())
    assert torch.equal(values.double(), nearest(exact * power[:, None]))
    # The largest power of two that fits the largest code of the largest scale.
    largest = fp8.scale_values(scale.amax(1), fmt.scale).double() * fmt.element.max * power
    assert ((largest <= 448) & (2 * largest > 448)).all()
    g = 1.0 if divisor is None else 1 / divisor.double()
    torch.testing.assert_close(factor.double(), g / power, rtol=1e-6, atol=0)
    if fmt.scale.mantissa_bits == 0:
        assert torch.equal(values.double() / power[:, None], exact)


@pytest.mark.core
def test_exponents_of_a_row_may_span_14() -> None:
    fmt = get_format("mxfp4")
    codes = torch.full((2, 32), 0x17, dtype=torch.uint8)  # the codes 6 and 0.5
    for span, exact in ((14, True), (15, False)):
        scale = torch.tensor([[120, 120], [130, 130 - span]], dtype=torch.uint8)
        assert fp8.is_exact(codes, scale, fmt) is exact
    scale[1, 1] = 255
    assert not fp8.is_exact(codes, scale, fmt)
    # A block of zeros has no exponent.
    codes[1, 16:] = 0
    scale[1, 1] = 1
    assert fp8.is_exact(codes, scale, fmt)


@pytest.mark.core
@pytest.mark.parametrize("key", ["nvfp4", "mxfp4"])
def test_products(key: str) -> None:
    fmt = get_format(key)
    weight, bias = packed(fmt, 24, 96), torch.randn(24, generator=seeded(7))
    x = torch.randn(4, 64, 96, generator=seeded(3))
    values, factor = fp8.quantize_rows_ref(x.flatten(0, 1))
    w, w_factor = fp8.expand_ref(weight, fmt)
    dense = (values.double() * factor[:, None]) @ (w.double() * w_factor[:, None]).t() + bias
    assert fp8.uses_fp8("fp8", 64) and not fp8.uses_fp8("fp8", 63)
    found = linear_ref(x, *weight, bias, fmt, "fp8")
    torch.testing.assert_close(found.flatten(0, 1).double(), dense, rtol=1e-5, atol=1e-5)
    rows = packed(fmt, 256, 96, seed=5)
    r, r_factor = fp8.expand_ref(rows, fmt)
    dense = (r.double() * r_factor[:, None]) @ (w.double() * w_factor[:, None]).t()
    arguments = [each if each is None or each.ndim < 2 else each.view(4, 64, -1) for each in rows]
    found = linear_quantized_ref(x, *arguments, *weight, None, fmt, compute="fp8")
    torch.testing.assert_close(found.flatten(0, 1).double(), dense, rtol=1e-5, atol=1e-4)
    if key == "mxfp4":
        # Both operands are exact: nothing changes but the order of sums.
        plain = ops.linear_quantized(x, *arguments, *weight, None, key)
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("activation", "dtype"),
    cases([("silu", torch.bfloat16)], itertools.product(ACTIVATIONS, DTYPES)),
)
def test_rounded_gates(activation: str, dtype: torch.dtype) -> None:
    """Of halves of a product, of its columns in turn, and of two products."""
    both = torch.randn(2, 3, 2 * 1160, generator=seeded(4)).mul(3).to(DEVICE, dtype)
    both[0, 0] = 0
    first, second = both.chunk(2, -1)
    turns = (both[..., ::2], both[..., 1::2])
    for gate, up in ((first, second), turns, (first, second.contiguous())):
        values, factor = activate_round_triton(gate, up, activation)
        expected = fp8.activate_round_ref(gate, up, activation)
        assert values.shape == gate.shape and factor.shape == (2, 3, 1)
        off = (values.float() * factor - expected[0].float() * expected[1]).abs()
        # A last bit of another exponential moves a number in some hundred, by one code.
        assert (off <= 32 * factor).all() and (off != 0).float().mean() < 0.01


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("columns", [1, 40])
def test_products_of_what_is_not_finite_are_nan(columns: int) -> None:
    x = torch.ones(4, columns, dtype=torch.bfloat16, device=DEVICE)
    x[1, -1], x[2, 0] = float("nan"), float("inf")
    gated = activate_round_triton(x, x, "silu")
    _, *normal = norm_round_triton(x, None, torch.ones_like(x[0]), 1e-6)
    for values, factor in (gated, normal):
        assert (values.float() * factor).sum(1).isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_norms(dtype: torch.dtype) -> None:
    x, residual = (torch.randn(2, 3, 1160, generator=seeded(i)).to(DEVICE, dtype) for i in (4, 5))
    x[0, 0] = residual[0, 0] = 0
    weight = torch.randn(1160, generator=seeded(6)).to(DEVICE, dtype)
    for added in (None, residual):
        total, values, factor = norm_round_triton(x, added, weight, 1e-6)
        expected = fp8.norm_round_ref(x, added, weight, 1e-6)
        assert torch.equal(total, expected[0])
        # Squares are added in another order: a last bit moves a number in some hundred by a code.
        eps = max(torch.finfo(dtype).eps, 2.0**-21)
        torch.testing.assert_close(factor, expected[2], rtol=eps, atol=0)
        off = (values.float() * factor - expected[1].float() * expected[2]).abs()
        assert (off <= 32 * factor).all()
        assert (values.float() != expected[1].float()).float().mean() < 0.01


# A K that no step divides, N and M that no tile divides; on a GPU every tile, and those of cuBLAS.
SHAPES = [(70, 40, 288), (9, 24, 64)]
if GPU:
    SHAPES += [(300, 72, 96), (130, 136, 2304), (600, 48, 64), (64, 8192, 4096), (128, 8200, 4096)]
    SHAPES += [(256, 14336, 512), (512, 4096, 4096), (300, 4096, 14336), (1024, 2560, 9728)]


@pytest.mark.quick(2)
@pytest.mark.parametrize("quantized", [False, True])
@covering(("key", "dtype"), ["nvfp4", "mxfp4"], [torch.bfloat16, torch.float32])
def test_kernels_agree_with_the_reference(
    key: str, dtype: torch.dtype, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt = get_format(key)
    for where in ("naive", "triton"):
        monkeypatch.setattr(f"fp4pass.kernels.linear.{where}.uses_fp8", lambda *_: True)
    for m, n, k in SHAPES:
        weight = on_device(packed(fmt, n, k))
        bias = torch.randn(n, generator=seeded(2)).to(DEVICE, dtype)
        x = torch.randn(m, k, generator=seeded(6)).to(DEVICE, dtype)
        w, w_factor = fp8.expand_ref(weight, fmt)
        if quantized:
            rows = on_device(packed(fmt, m, k, seed=8))
            values, factor = fp8.expand_ref(rows, fmt)
            found = linear_quantized_triton(x, *rows, *weight, bias, fmt)
            expected = linear_quantized_ref(x.float(), *rows, *weight, bias, fmt)
        else:
            values, factor = fp8.quantize_rows_ref(x)
            found = linear_triton(x, *weight, bias, fmt)
            expected = linear_ref(x.float(), *weight, bias, fmt)
            if multiplies_dense(m, n, k, dtype, x.device):
                rounded = (values, factor[:, None])
                assert torch.equal(found, linear_rounded_triton(*rounded, *weight, bias, fmt))
        assert found.dtype == dtype and found.shape == (m, n)
        size = (values.float().abs() @ w.float().abs().t()) * factor[:, None] * w_factor
        # One rounding to the dtype, and sums: of fewer bits on FP8 tensor cores, else float32.
        rounding = torch.finfo(dtype).eps * expected.abs()
        off = (found.float() - expected).abs() - rounding
        assert (off <= size * (2.0**-10 if GPU else 1e-6)).all()


@pytest.mark.skipif(GPU, reason="the test above runs cuBLAS")
def test_rounded_rows_multiply_an_expanded_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a plain product in the place of cuBLAS."""

    def product(x: Tensor, w: Tensor, x_factor: Tensor, factor: Tensor, bias: Tensor) -> Tensor:
        y = x.float() @ w.float().t() * x_factor[:, None] * factor + bias
        return y.to(torch.bfloat16)

    place = "fp4pass.kernels.{}.triton.{}"
    monkeypatch.setattr(place.format("compute_fp8", "scaled_mm"), product)
    monkeypatch.setattr(place.format("compute_fp8", "multiplies_dense"), lambda *_: True)
    monkeypatch.setattr(place.format("linear", "has_dense_product"), lambda *_: True)
    monkeypatch.setattr(place.format("linear", "uses_fp8"), lambda *_: True)
    fmt = get_format("nvfp4")
    weight, bias = packed(fmt, 5, 96), torch.randn(5, generator=seeded(2))
    x = torch.randn(2, 3, 96, generator=seeded(6)).bfloat16()
    values, factor = fp8.quantize_rows_ref(x.view(6, 96))
    found = linear_rounded_triton(values.view(x.shape), factor.view(2, 3, 1), *weight, bias, fmt)
    assert torch.equal(found, linear_triton(x, *weight, bias, fmt))
    expected = fp8.multiply_ref((values, factor), PackedWeight(*weight, bias), fmt)
    torch.testing.assert_close(found.view(6, 5).float(), expected, rtol=2.0**-8, atol=1e-6)


@pytest.mark.core
def test_tiles_fit_every_gpu() -> None:
    for m, n in itertools.product((1, 64, 100, 256, 512, 8192), (16, 4096, 14336)):
        for shared_memory in (99, 163, 227):
            tiles = tiles_of(m, n, shared_memory * 1024)
            needed = tiles.stages * 8 * tiles.words * tiles.m + 10 * tiles.words * tiles.n
            assert needed <= shared_memory * 1024


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or not runs_wide(256, torch.device("cuda")),
    reason="needs the tensor cores of Hopper",
)

TILES = [
    (64, 4, 128, 4), (64, 4, 64, 6, 2), (128, 4, 128, 4, 2), (128, 8, 64, 6),
    (256, 8, 128, 3, 2), (256, 8, 64, 6), (256, 4, 64, 3, 2), (64, 4, 64, 3, 4),
]  # fmt: skip


@needs_hopper
@pytest.mark.parametrize("key", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("cut", TILES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(64, 128, 512), (70, 200, 768), (300, 72, 2560)])
def test_products_of_wide(key: str, cut: tuple[int, ...], m: int, n: int, k: int) -> None:
    fmt, tiles = get_format(key), wide_tiles(*cut)
    weight = as_weight(packed(fmt, n, k))
    # Blocks of the smallest and of other scales, where decoding could go wrong.
    weight.scale[0, :3] = torch.tensor([0, 1, 2], device="cuda")
    bias = torch.randn(n, generator=seeded(2)).cuda().bfloat16()
    x = torch.randn(m, k, generator=seeded(6)).cuda().bfloat16()
    out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)

    stored = weight._replace(bias=bias)
    found = multiply_with(tiles, x, stored, out.clone(), fmt)
    assert torch.equal(found, multiply_with(tiles, x, stored, out.clone(), fmt))
    values, factor = fp8.quantize_rows_ref(x)
    dense, w_factor = fp8.expand_ref(weight, fmt)
    left, right = values.double() * factor[:, None], dense.double() * w_factor[:, None]
    _compare(found, left, right, bias, 2.0**-10)

    finished = counters(m, n, tiles, x.device)
    numbers = InputRows.of_numbers(x)
    x_sorted = arranged(numbers, m, k, tiles.words, fmt, False, finished, tiles.m)[0]
    found = multiply_wide(x_sorted, None, in_words(stored), finished, out, fmt, tiles)
    dense = dequantize_ref(*weight[:3], fmt, torch.float32)
    _compare(found, x.double(), dense.double(), bias, 1e-5)


def _compare(
    found: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, sums: float
) -> None:
    expected = x @ w.t() + bias.double()
    size = x.abs() @ w.abs().t() + bias.double().abs()
    off = (found.double() - expected).abs() - 2.0**-8 * expected.abs()
    assert (off <= sums * size).all()


@pytest.mark.core
@pytest.mark.parametrize(
    ("key", "m", "n", "k", "tiles"),
    [
        ("nvfp4", 64, 14336, 4096, wide_tiles(64, 4, 128, 4)),
        ("mxfp4", 48, 4096, 14336, wide_tiles(64, 4, 64, 3, 8)),
        ("nvfp4", 128, 4096, 14336, wide_tiles(128, 4, 128, 3, 2)),
        ("mxfp4", 256, 9728, 2560, wide_tiles(256, 4, 64, 3)),
        ("nvfp4", 512, 14336, 4096, wide_tiles(256, 8, 64, 6)),
        ("nvfp4", 513, 14336, 4096, None),
    ],
)
def test_tiles(key: str, m: int, n: int, k: int, tiles: Tiles | None) -> None:
    assert wide_config(m, n, k, get_format(key)) == tiles


@pytest.mark.core
@pytest.mark.parametrize(
    ("m", "n", "k", "tiles"),
    [
        (64, 4096, 14336, wide_tiles(64, 4, 128, 4, 4)),
        (256, 2560, 9728, wide_tiles(128, 4, 128, 4, 3)),
        (256, 9728, 2560, wide_tiles(256, 4, 128, 3)),
        (512, 4096, 4096, None),
        (1024, 4096, 4096, wide_tiles(256, 8, 128, 3)),
        (64, 64, 256, wide_tiles(64, 4, 128, 4)),
        (128, 14336, 4096, wide_tiles(128, 4, 128, 4)),
    ],
)
def test_tiles_of_fp8(m: int, n: int, k: int, tiles: Tiles | None) -> None:
    assert fp8_config(m, n, k) == tiles
