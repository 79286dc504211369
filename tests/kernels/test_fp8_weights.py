"""Kernels for FP8 weights and inputs, on a GPU or in the interpreter, against the references."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, DTYPES, gpu, quiet, seeded
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import PackedInput, PackedWeight
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.dequantize.triton import dequantize_triton
from fp4pass.kernels.linear.fp8_weights_triton import has_tensor_cores, linear_fp8_weights, sizes_of
from fp4pass.kernels.linear.naive import linear_quantized_ref, linear_ref
from fp4pass.kernels.quantize.naive import activate_quantize_ref, norm_quantize_ref, quantize_ref
from fp4pass.kernels.quantize.triton import (
    activate_quantize_triton,
    norm_quantize_triton,
    quantize_triton,
)
from fp4pass.kernels.search.reference import search_ref

pytestmark = quiet

FORMATS = [get_format(name) for name in ("fp8", "fp8_block", "fp8_tensor", "mxfp8")]
formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.key)

# FP8 tensor cores keep fewer bits of the sum of 32 products than float32 has.
KEPT = 2.0**-12 if has_tensor_cores(torch.device(DEVICE)) else 2.0**-20

# Of one rounding of a result, and of float32 sums.
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}


def numbers(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, columns, generator=seeded(rows))
    return x.to(dtype).to(DEVICE)


def columns_of(fmt: Format) -> int:
    return 288 if fmt.has_float_scale else 96


@pytest.mark.quick(2)
@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_inputs_get_the_bits_of_the_reference(fmt: Format, dtype: torch.dtype) -> None:
    x = numbers(7, columns_of(fmt), dtype)
    x[0], x[1, 5], x[2, 7] = 0, float("nan"), -float("inf")
    x[3] *= 1e-6
    x[4] = -0.0
    statics: list[Tensor | None] = [None]
    if fmt.has_float_scale:
        statics.append(torch.tensor([0.01], device=DEVICE))
    if fmt.block == 0:
        statics.append(torch.linspace(0.01, 1, 7, device=DEVICE)[:, None])
    for static in statics:
        found, wanted = quantize_triton(x, static, fmt), quantize_ref(x, static, fmt)
        assert torch.equal(found[0], wanted[0])
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.quick(2)
@formats
def test_norms_and_activations_before_it(fmt: Format) -> None:
    """Sums of another order put few values on the other side of a boundary."""
    k = columns_of(fmt)
    x, other = numbers(6, k, torch.bfloat16), numbers(5, k, torch.bfloat16)[:1].expand(6, k)
    row = numbers(2, k, torch.bfloat16)[0]
    norms = (("rms", None), ("layer", row))
    for kind, bias in norms:
        arguments = (x, other, row, bias, kind, 1e-5, None, fmt)
        found, wanted = norm_quantize_triton(*arguments), norm_quantize_ref(*arguments)
        assert torch.equal(found[0], wanted[0])
        assert (found[1] != wanted[1]).float().mean() < 0.03
    activated = (x, other, "silu", None, fmt)
    found, wanted = activate_quantize_triton(*activated), activate_quantize_ref(*activated)
    assert (found[0] != wanted[0]).float().mean() < 0.03


@pytest.mark.quick(1)
@formats
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_codes_get_the_values_of_the_reference(fmt: Format, dtype: torch.dtype) -> None:
    """Weights and inputs, every code, more columns than a program has, and stacks of matrices."""
    for leading, k in (((3,), 2080), ((2, 130), 160)):
        codes = torch.randint(256, (*leading, k), dtype=torch.uint8, generator=seeded())
        of_weight = (*leading[:-1], *fmt.scale_shape(leading[-1], k))
        for shape in (of_weight, (*leading, fmt.scale_columns(k))):
            if fmt.has_float_scale:
                scale = torch.rand(shape, generator=seeded(1)) + 2.0**-126
            else:
                scale = torch.randint(256, shape, dtype=torch.uint8, generator=seeded(1))
            wanted = dequantize_ref(codes, scale, None, fmt, dtype)
            found = dequantize_triton(codes.to(DEVICE), scale.to(DEVICE), None, fmt, dtype).cpu()
            assert found.dtype == dtype
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


SHAPES = [(1, 140), (3, 5), (20, 33), (130, 40)]


@pytest.mark.quick(1)
@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(fmt: Format, dtype: torch.dtype) -> None:
    k = columns_of(fmt)
    for m, n in SHAPES:
        weight = numbers(n, k, torch.float32) * 0.1
        packed, scale = search_ref(weight, None, 1.0, fmt, "naive")
        x, bias = numbers(m, k, dtype), numbers(n, 1, dtype)[:, 0] if n > 5 else None
        stored = PackedWeight(packed, scale, None, bias)
        wide = stored._replace(bias=None if bias is None else bias.double())
        rows = PackedInput(*quantize_ref(x, None, fmt), None)
        for found, exact, kept in (
            (linear_fp8_weights(x, None, stored, fmt), linear_ref(x.double(), wide, fmt), 2.0**-20),
            (
                linear_fp8_weights(x, rows, stored, fmt),
                linear_quantized_ref(x.double(), rows, wide, fmt),
                KEPT,
            ),
        ):
            assert found.dtype == dtype and found.shape == (m, n)
            mass = (x.double().abs() @ weight.double().abs().t()).amax()
            allowed = exact.abs() * EPS[dtype] + mass * kept
            assert ((found.double() - exact).abs() <= allowed).all()


@gpu
@pytest.mark.parametrize("k", [256, 640])
def test_blocks_of_many_rows(k: int) -> None:
    """Scales of 128 x 128, which cuBLAS multiplies on Hopper, and rows that it does not take."""
    fmt = get_format("fp8_block")
    packed, scale = search_ref(numbers(384, k, torch.float32), None, 1.0, fmt, "naive")
    stored = PackedWeight(packed, scale, None, None)
    dense = dequantize_ref(packed, scale, None, fmt, torch.float64)
    for m in (128, 130, 512):
        x = numbers(m, k, torch.bfloat16) * torch.linspace(0.01, 9, m, device=DEVICE)[:, None]
        rows = PackedInput(*quantize_ref(x.bfloat16(), None, fmt), None)
        found = linear_fp8_weights(x.bfloat16(), rows, stored, fmt)
        exact = linear_quantized_ref(x.double(), rows, stored, fmt)
        mass = x.double().abs() @ dense.abs().t()
        assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 + mass * KEPT).all()


@formats
def test_tiles_fit_any_gpu(fmt: Format) -> None:
    import triton.language as tl

    for shared in (99, 163, 227):
        for operand in (tl.bfloat16, tl.float16, tl.float8e4nv, tl.float32):
            for m in (2, 17, 100, 4096):
                sizes = sizes_of(m, 4096, operand, fmt, shared * 1024)
                size = operand.primitive_bitwidth // 8
                held = sizes.stages * sizes.k * (sizes.m * size + sizes.n)
                assert held <= shared * 1024
                assert fmt.block != 128 or sizes.k == 128
