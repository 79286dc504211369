"""Linears on 8-bit integers: exact sums, outliers, and the same on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from layers import DTYPES, KINDS, K, batch, linear, made, seeded
from small_models import bits
from torch import Tensor

from fp4pass.errors import ShapeError
from fp4pass.parity import Linear8bitLt, swap
from fp4pass.parity import bitsandbytes as int8

every_kind = pytest.mark.parametrize("kind", KINDS)


def by_formula(layer: Linear8bitLt, x: Tensor) -> Tensor:
    """x W^T + bias in float64, products of codes in int64."""
    codes, scale = layer.weight_codes.long(), layer.weight_scale.double()
    outliers = torch.zeros(x.shape[1], dtype=torch.bool)
    if layer.threshold:
        outliers = (x.abs() >= layer.threshold).any(0)
    kept = torch.where(outliers, 0.0, x.float())
    x_scale = kept.abs().amax(1) / 127
    x_codes = torch.where(kept == 0, 0.0, kept / x_scale[:, None]).round().long()
    assert x_codes.abs().max() <= 127
    y = (x_codes @ codes.t()).double() * x_scale[:, None].double() * scale
    dense = (codes.double() * scale[:, None]).to(x.dtype).double()
    return y + (x.double() * outliers) @ dense.t() + layer.bias.double()


@pytest.mark.core
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("threshold", [0.0, 2.5])
@pytest.mark.parametrize("rows", [1, 33])
def test_int8_is_its_formula(dtype: torch.dtype, threshold: float, rows: int) -> None:
    layer = Linear8bitLt.from_linear(linear(dtype=dtype), threshold)
    x = batch(rows)
    # Of a magnitude that is the threshold, too.
    x[0, 3], x[0, 9], x[-1, 70] = 50.0, threshold, -20.0
    x = x.to(dtype)
    wanted = by_formula(layer, x)
    # The outliers' product is rounded to x's dtype once more, float32 sums of K + 2 by its steps.
    eps = torch.finfo(dtype).eps
    size = x.double().abs() @ layer.weight.double().abs().t() + layer.bias.abs()
    bound = (2 * eps + (K + 4) * (eps if dtype == torch.float64 else 2.0**-23)) * size
    assert ((layer(x).double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("columns", [1, 3, 1041, 2500])
def test_integers_are_exact(columns: int) -> None:
    for rows in (0, 1, 33):
        a = torch.randint(-127, 128, (rows, columns), generator=seeded(rows), dtype=torch.int8)
        b = torch.randint(-127, 128, (9, columns), generator=seeded(9), dtype=torch.int8)
        for left in (a, torch.full_like(a, 127)):
            wanted = left.long() @ b.long().t()
            found = int8.int_mm(left, b)
            assert found.dtype == torch.int32 and torch.equal(found.long(), wanted)
            padded = int8.padded(left, b)
            assert torch.equal((padded[0].long() @ padded[1].long().t())[:rows, :9], wanted)


def test_rows_are_rounded_to_nearest_even() -> None:
    rows = torch.tensor([[127.0, 0.5, 1.5, -2.5, -126.6], [0.0, -0.0, 0.0, 0.0, 0.0]])
    codes, scale = int8.quantize_rows(rows)
    assert codes.tolist() == [[127, 0, 2, -2, -127], [0] * 5] and scale.tolist() == [1.0, 0.0]
    assert torch.equal(int8.dequantize_rows(codes, scale, rows.dtype)[1], torch.zeros(5))
    tiny = torch.full((1, 4), 2.0**-149)
    assert int8.quantize_rows(tiny)[0].abs().max() <= 127


@pytest.mark.core
def test_what_is_not_finite_stays_so() -> None:
    layer = made("int8")
    for value in (float("nan"), float("inf")):
        x = batch(3)
        x[1, 4] = value
        finite = layer(x).isfinite().all(-1)
        assert finite.tolist() == [True, False, True]
        assert Linear8bitLt.from_linear(linear(), 0.0)(x).isfinite().all(-1).tolist() == [
            True,
            False,
            True,
        ]


def test_sums_that_exceed_int32_are_refused() -> None:
    assert int8.MAX_COLUMNS * 127**2 < 2**31 <= (int8.MAX_COLUMNS + 1) * 127**2
    with pytest.raises(ShapeError, match=r"in_features: expected at most 133144.*got 133145"):
        Linear8bitLt(133145, 4, device="meta")


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.gpu
@on_a_gpu
@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_on_a_gpu_agree_with_the_cpu(kind: str, dtype: torch.dtype) -> None:
    layer, x = made(kind, dtype=dtype), batch(40).to(dtype)
    x[3, 5] = 20.0
    moved = copy.deepcopy(layer).cuda()
    assert_close = torch.testing.assert_close
    assert torch.equal(moved.weight.cpu(), layer.weight)
    error = (moved(x.cuda()).cpu() - layer(x)).double().norm() / layer(x).double().norm()
    assert float(error.detach()) < 2 * torch.finfo(dtype).eps + 1e-6
    on_gpu, on_cpu = x.cuda().requires_grad_(), x.clone().requires_grad_()
    moved(on_gpu).sum().backward()
    layer(on_cpu).sum().backward()
    assert_close(on_gpu.grad.cpu(), on_cpu.grad)
    there = linear(dtype=dtype).cuda()
    swap(there, kind)
    assert all(
        torch.equal(bits(there.get_buffer(n).cpu()), bits(t)) for n, t in layer.named_buffers()
    )
