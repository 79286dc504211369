"""Products of inputs in FP8 and weights in 4 bits, against float64 products of what they say."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, GPU, flat, seeded
from torch import Tensor

from fp4pass import ops
from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import PackedInput, PackedWeight
from fp4pass.kernels.compute_fp8.naive import expand_ref
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.quantize.naive import quantize_ref
from fp4pass.methods import search_scales
from fp4pass.record.schemes import EIGHT_BITS

REFERENCE, TRITON = flat("linear_quantized", "reference"), flat("linear_quantized")
GROUP = flat("linear_quantized_group")
EXPERTS_REFERENCE = flat("experts_linear_quantized", "reference")
EXPERTS_TRITON = flat("experts_linear_quantized")

INPUTS = tuple(EIGHT_BITS.values())
KEYS = ("mxfp4", "nvfp4", "nvfp4:16:multiplier", "mxfp4:16")


def weight(key: str, n: int, k: int, seed: int = 0) -> PackedWeight:
    fmt = get_format(key)
    dense = torch.randn(n, k, generator=seeded(seed)).to(DEVICE)
    g = fmt.global_scale_for(dense.abs().max().item())
    state = search_scales(dense, fmt, g, "naive")
    stored = torch.tensor([fmt.global_scale_of(g)], device=DEVICE) if g != 1 else None
    bias = torch.randn(n, generator=seeded(seed + 1)).to(DEVICE)
    return PackedWeight(state.qdata, state.scale, stored, bias)


def rows_of(x: Tensor, inputs: str) -> PackedInput:
    static = torch.tensor([0.01], device=x.device) if inputs == "fp8_tensor" else None
    return PackedInput(*quantize_ref(x, static, get_format(inputs)), None)


def exact(
    rows: PackedInput, stored: PackedWeight, fmt: Format, inputs: str
) -> tuple[Tensor, Tensor]:
    """The float64 product, and that of magnitudes; from 64 rows on of weights rounded to E4M3."""
    of_x = get_format(inputs)
    numbers = dequantize_ref(rows.packed, rows.scale, None, of_x, torch.float32).double()
    dense = dequantize_ref(*stored[:3], fmt, torch.float32).double()
    if len(numbers) >= 64:
        values, factor = expand_ref(stored, fmt)
        dense = values.double() * factor.double()[:, None]
    bias = torch.zeros(()) if stored.bias is None else stored.bias.double()
    return numbers @ dense.t() + bias, numbers.abs() @ dense.abs().t() + bias.abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("key", KEYS)
def test_products_are_those_of_the_codes(key: str, inputs: str, dtype: torch.dtype) -> None:
    fmt, sizes = get_format(key), (48, 192)
    for rows in (1, 3, 20, 70) if dtype == torch.bfloat16 or GPU else (2,):
        stored = weight(key, *sizes, seed=rows)
        stored = stored._replace(bias=None if rows == 3 else stored.bias)
        # Not like the weight, for FP8 tensor cores cut large sums.
        x = torch.randn(rows, sizes[1], generator=seeded(rows + 100)).to(DEVICE, dtype)
        x[0] *= 1e-3
        codes = rows_of(x, inputs)
        wanted, size = exact(codes, stored, fmt, inputs)
        for product in (REFERENCE, TRITON):
            y = product(x, *codes, *stored, fmt, 0, "input", inputs)
            assert y.dtype == dtype and y.shape == wanted.shape
            # The result is rounded once. FP8 tensor cores keep few bits of a sum.
            step = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
            of_sums = 2**-20 if product is REFERENCE or not GPU else 2**-17 if rows < 64 else 2**-10
            assert ((y.double() - wanted).abs() <= step * wanted.abs() + of_sums * size).all()


@pytest.mark.parametrize("rows", [1, 5])
def test_a_group_is_its_products(rows: int) -> None:
    fmt = get_format("mxfp4")
    x = torch.randn(2, rows, 256, generator=seeded()).to(DEVICE, torch.bfloat16)[0]
    codes = rows_of(x, "fp8")
    members = [weight("mxfp4", n, 256, seed=n) for n in (64, 96)]
    columns = [list(each) for each in zip(*members, strict=True)]
    found = GROUP(x, *codes, *columns, fmt, "input", "fp8")
    for y, stored in zip(found, members, strict=True):
        alone = TRITON(x, *codes, *stored, fmt, 0, "input", "fp8")
        torch.testing.assert_close(y, alone, rtol=2**-7, atol=2**-10)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("shared", [True, False])
def test_experts(inputs: str, shared: bool) -> None:
    fmt, (experts, tokens, fan) = get_format("mxfp4"), (3, 6, 2)
    members = [weight("mxfp4", 32, 128, seed=i) for i in range(experts)]
    packed, scale = (torch.stack([each[i] for each in members]) for i in (0, 1))
    bias = torch.stack([each.bias for each in members if each.bias is not None])
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 3], [0, 2], [-1, 1]], device=DEVICE)
    shape = (tokens, 128) if shared else (tokens, fan, 128)
    x = torch.randn(shape, generator=seeded()).to(DEVICE, torch.bfloat16)
    codes = rows_of(x, inputs)
    for own in (None, bias):
        arguments = (x, *codes, ids, packed, scale, None, own, fmt, inputs)
        wanted = EXPERTS_REFERENCE(*arguments)
        valid = (ids >= 0) & (ids < experts)
        assert wanted[valid].abs().sum() > 0
        found = EXPERTS_TRITON(*arguments)[valid]
        torch.testing.assert_close(found, wanted[valid], rtol=2**-7, atol=2**-9)


def test_gradients_are_those_of_the_dense_product() -> None:
    stored = weight("mxfp4", 32, 64)
    x = torch.randn(4, 64, generator=seeded()).to(DEVICE).requires_grad_()
    packed, scale = ops.quantize(x, None, "fp8")
    y = ops.linear_quantized(x, packed, scale, None, *stored, "mxfp4", 0, "input", "fp8")
    y.sum().backward()
    dense = ops.dequantize(*stored[:3], "mxfp4", torch.float32)
    torch.testing.assert_close(x.grad, dense.sum(0).expand(4, 64))
