"""A gate, a residual sum and a norm in the launches of products, against products and eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from blocks import VARIANTS
from exact_products import GPU as GPU_MARKS
from exact_products import assert_each_kernel_waits, numbers, weight
from kernel_cases import DEVICE, GPU, covering
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import PackedWeight
from fp4pass.kernels.linear import triton as module
from fp4pass.kernels.linear.naive import Around
from fp4pass.kernels.linear.triton import linear_group_triton, linear_triton
from fp4pass.kernels.norm.naive import rms_norm_of_squares_ref, rms_norm_ref, square_sums_ref
from fp4pass.kernels.quantize.naive import ACTIVATIONS

# numpy, in the interpreter, says when an exponential leaves float32.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Weights are cut in 16, warps share K in steps of 128 columns, and a norm's row may have an end.
SHAPES = [(35, 1024), (2560, 4096), (64, 9728), (16, 128)] if GPU else [(35, 1024), (16, 128)]
FORMATS = [get_format(name) for name in ("nvfp4", "mxfp4")]
BOTH = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.key)


def weights(fmt: Format, n: int, k: int, bias: bool = True) -> list[PackedWeight]:
    """Those of a gate and its factor, with other global scales."""
    found = []
    for seed in (0, 1):
        stored = torch.tensor([fmt.global_scale_of(2.0 ** (seed - 4))], device=DEVICE)
        global_scale = stored if fmt.has_global_scale else None
        of_rows = numbers(n, seed=seed + 2) if bias else None
        found.append(PackedWeight(*weight(fmt, n, k, seed), global_scale, of_rows))
    return found


def rows(m: int, k: int, fmt: Format, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """An input whose products with `weights` are around 1."""
    return numbers(m, k, dtype=dtype) * 2.0 ** (-6 if fmt.scale.subnormal else -12)


def gated(x: Tensor, of: list[PackedWeight], name: str, fmt: Format) -> Tensor:
    (found,) = linear_group_triton(x, of, fmt, around=Around(name))
    return found


def near(found: Tensor, expected: Tensor, share: float) -> bool:
    """Equal but for few results that are one rounding away."""
    step = expected.float().abs() * 2.0**-7 + 1e-6
    differs = found != expected
    distance = (found.float() - expected.float()).abs()
    return bool((differs.sum() <= 1 + share * found.numel()) and (distance <= step).all())


# Rows of one launch and of more; N is odd, and K no multiple of what the warps take.
GATED = [(1, 35, 1024), (3, 33, 512), (8, 35, 544), (9, 19, 64), (0, 5, 64), (1, 8, 32)]
NAMES = list(ACTIVATIONS)


@pytest.mark.quick(1)
@covering(("fmt", "name"), VARIANTS, NAMES)
def test_a_gate_has_the_bits_of_products_and_eager(fmt: Format, name: str) -> None:
    for m, n, k in GATED:
        x, of = rows(m, k, fmt), weights(fmt, n, k)
        found, (gate, up) = gated(x, of, name, fmt), linear_group_triton(x, of, fmt)
        assert found.is_contiguous() and found.isfinite().all()
        # The interpreter's exponentials and tanh are numpy's.
        assert near(found, ACTIVATIONS[name](gate) * up, 0.05)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_a_gate_in_other_dtypes(dtype: torch.dtype) -> None:
    fmt = get_format("nvfp4")
    for m in (2, 9):
        x, of = rows(m, 64, fmt, dtype), weights(fmt, 19, 64, bias=False)
        gate, up = linear_group_triton(x, of, fmt)
        wanted = ACTIVATIONS["silu"](gate) * up
        close = 2.0**-10 if m < 9 else 2e-3
        torch.testing.assert_close(gated(x, of, "silu", fmt), wanted, rtol=close, atol=1e-5)


def test_codes_that_are_not_aligned_are_multiplied_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of both take addresses for multiples of 16."""
    fmt = get_format("nvfp4")
    x, (gate, up) = rows(2, 512, fmt), weights(fmt, 8, 512)
    wanted, launched, kernel = gated(x, [gate, up], "silu", fmt), [], module.gate_kernel

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(module, "gate_kernel", Counted())
    assert torch.equal(gated(x, [gate, up], "silu", fmt), wanted) and not launched
    moved = torch.zeros(gate.packed.numel() + 4, dtype=torch.uint8, device=DEVICE)[4:]
    gate = gate._replace(packed=moved.view(gate.packed.shape).copy_(gate.packed))
    assert torch.equal(gated(x, [gate, up], "silu", fmt), wanted) and len(launched) == 1


@BOTH
@pytest.mark.parametrize("m", [1, 3])
def test_a_sum_has_the_bits_of_a_product_and_eager(m: int, fmt: Format) -> None:
    for n, k in SHAPES:
        x, of = rows(m, k, fmt), weights(fmt, n, k)[0]
        residual = numbers(m, n, seed=5).bfloat16()
        total, squares = linear_group_triton(x, [of], fmt, around=Around(residual=residual))
        assert torch.equal(total, residual + linear_triton(x, of, fmt))
        torch.testing.assert_close(squares, square_sums_ref(total), rtol=1e-6, atol=0)


@pytest.mark.quick(1)
@BOTH
@pytest.mark.parametrize("m", [1, 3])
def test_products_of_a_norm(m: int, fmt: Format) -> None:
    for n, k in SHAPES:
        if k > 8192:
            continue
        x, of = numbers(m, k, seed=7).bfloat16(), weights(fmt, n, k, bias=False)
        gain = (numbers(k, seed=8) * 2.0 ** (-6 if fmt.scale.subnormal else -12)).bfloat16()
        row = (square_sums_ref(x), gain, 1e-6)
        # Of one row and the kernel's own sum of the sums, a few numbers may round otherwise.
        normed = rms_norm_of_squares_ref(x, *row)
        assert near(normed, rms_norm_ref(x, gain, 1e-6), 0.02)
        found = linear_group_triton(x, of, fmt, around=Around(None, None, *row))
        for a, b in zip(found, linear_group_triton(normed, of, fmt), strict=True):
            assert (a.float() - b.float()).norm() <= 2.0**-7 * b.float().norm()
        found = linear_group_triton(x, of, fmt, around=Around("silu", None, *row))
        expected = gated(normed, of, "silu", fmt).float()
        assert (found[0].float() - expected).norm() <= 2.0**-6 * expected.norm()
        again = linear_group_triton(x, of, fmt, around=Around("silu", None, *row))
        assert torch.equal(found[0], again[0])


def test_a_norm_of_tiny_and_huge_rows() -> None:
    """Sums that underflow are made again from the normed row; NaN and infinity stay."""
    fmt = get_format("nvfp4")
    of = weights(fmt, 32, 256, bias=False)
    gain = torch.full((256,), 2.0**-60, device=DEVICE, dtype=torch.bfloat16)
    x = numbers(1, 256, seed=9).bfloat16()

    def product(x: Tensor) -> Tensor:
        norm = Around(None, None, square_sums_ref(x), gain, 1e-6)
        return linear_group_triton(x, of, fmt, around=norm)[0]

    expected = linear_group_triton(rms_norm_ref(x, gain, 1e-6), of, fmt)[0].float()
    assert (product(x).float() - expected).norm() <= 2.0**-7 * expected.norm()
    assert expected.norm() > 0
    x[0, 3] = float("inf")
    assert not product(x).isfinite().any()


class TestGpu:
    pytestmark = GPU_MARKS

    def test_each_kernel_waits_for_the_one_before(self) -> None:
        """Layers of one row, each of which reads what the last one wrote."""
        fmt = get_format("nvfp4")
        up, down = weights(fmt, 9728, 2560, bias=False), weights(fmt, 2560, 9728, bias=False)[:1]
        gain = (numbers(2560, seed=8) * 2.0**-6).bfloat16()
        first = numbers(1, 2560, seed=7).bfloat16()

        def chain(wait: Callable[[], None]) -> Tensor:
            total, squares = first.clone(), square_sums_ref(first)
            wait()
            for _ in range(8):
                norm = (squares, gain, 1e-6)
                (gate,) = linear_group_triton(total, up, fmt, around=Around("silu", None, *norm))
                wait()
                around = Around(residual=total)
                total, squares = linear_group_triton(gate * 2.0**-6, down, fmt, around=around)
                wait()
                norm = (squares, gain, 1e-6)
                for each in linear_group_triton(total, up, fmt, around=Around(None, None, *norm)):
                    total = total + each[:, :2560]
                squares = square_sums_ref(total)
                wait()
            return total

        assert_each_kernel_waits(chain, eager=True)
