"""The gate of an MLP in the launch of its products, against products and eager's gate."""

from __future__ import annotations

import itertools

import pytest
import torch
from blocks import VARIANTS
from kernels.cases import cases
from kernels.test_linear_triton import DEVICE, numbers, weight
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.kernels.linear import fused
from fp4pass.kernels.linear.fused import linear_gated_triton
from fp4pass.kernels.linear.reference import linear_gated_ref
from fp4pass.kernels.linear.triton import linear_group_triton
from fp4pass.kernels.quantize.reference import ACTIVATIONS

# numpy, in the interpreter, says when an exponential leaves float32.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def weights(fmt: Format, n: int, k: int, bias: bool = True) -> tuple[list[Tensor | None], ...]:
    """Those of a gate and its factor, with other global scales."""
    packed, scale = zip(*(weight(fmt, n, k, seed) for seed in (0, 1)), strict=True)
    stored = [fmt.global_scale_of(2.0**e) for e in (-4, -3)]
    multiplied = fmt.has_global_scale
    global_scale = [torch.tensor([g], device=DEVICE) if multiplied else None for g in stored]
    biases = [numbers(n, seed=seed) if bias else None for seed in (2, 3)]
    return list(packed), list(scale), global_scale, biases


def rows(m: int, k: int, fmt: Format, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """An input whose products with `weights` are around 1."""
    return numbers(m, k, dtype=dtype) * 2.0 ** (-6 if fmt.scale.subnormal else -12)


def expected(x: Tensor, of: tuple[list[Tensor | None], ...], name: str, fmt: Format) -> Tensor:
    gate, up = linear_group_triton(x, *of, fmt)
    return ACTIVATIONS[name](gate) * up


# Rows of one launch and of more; N is odd, and K no multiple of what the warps take.
SHAPES = [(1, 35, 1024), (3, 33, 512), (8, 35, 544), (9, 19, 64), (0, 5, 64), (1, 8, 32)]
NAMES = list(ACTIVATIONS)
PAIRS = list(zip(VARIANTS, NAMES, strict=True))


@pytest.mark.parametrize(("fmt", "name"), cases(PAIRS, itertools.product(VARIANTS, NAMES)))
def test_the_bits_of_products_and_their_gate(fmt: Format, name: str) -> None:
    for m, n, k in SHAPES:
        x, of = rows(m, k, fmt), weights(fmt, n, k)
        found, wanted = linear_gated_triton(x, *of, name, fmt), expected(x, of, name, fmt)
        assert found.is_contiguous() and found.isfinite().all()
        # The interpreter's exponentials and tanh are numpy's.
        step = wanted.abs() * 2.0**-7 + 1e-6
        differs = found != wanted
        assert (differs.sum() <= found.numel() / 20) and ((found - wanted).abs() <= step).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    fmt = get_format("nvfp4")
    for m in (2, 9):
        x, of = rows(m, 64, fmt, dtype), weights(fmt, 19, 64, bias=False)
        found, wanted = linear_gated_triton(x, *of, "silu", fmt), expected(x, of, "silu", fmt)
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=2.0**-10 if m < 9 else 2e-3, atol=1e-5)


@pytest.mark.parametrize("m", [1, 9])
def test_halves_of_one_weight(m: int) -> None:
    """They are read where they are; a global scale is that of both."""
    fmt = get_format("nvfp4")
    packed, scale, global_scale, bias = weights(fmt, 32, 512)
    x, one = rows(m, 512, fmt), [global_scale[0]]
    merged = [torch.cat(packed)], [torch.cat(scale)], one, [torch.cat(bias)]
    found = linear_gated_triton(x, *merged, "silu", fmt)
    assert torch.equal(found, linear_gated_triton(x, packed, scale, one * 2, bias, "silu", fmt))
    reference = linear_gated_ref(x, *merged, "silu", fmt).float()
    assert (found.float() - reference).norm() <= 0.01 * reference.norm()


@pytest.mark.parametrize("dimensions", [1, 3])
def test_shapes_of_inputs(dimensions: int) -> None:
    fmt = get_format("mxfp4")
    x, of = rows(4, 512, fmt), weights(fmt, 8, 512)
    wanted = linear_gated_triton(x, *of, "silu", fmt)
    x, wanted = (x[0], wanted[0]) if dimensions == 1 else (x[:, None], wanted[:, None])
    found = linear_gated_triton(x, *of, "silu", fmt)
    assert found.shape == wanted.shape and torch.equal(found, wanted)


def test_codes_that_are_not_aligned_are_multiplied_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of both take addresses for multiples of 16."""
    fmt = get_format("nvfp4")
    x, of = rows(2, 512, fmt), weights(fmt, 8, 512)
    wanted = linear_gated_triton(x, *of, "silu", fmt)
    launched = []
    multiply_gate = fused._multiply_gate

    def counted(*args: object) -> Tensor:
        launched.append(args)
        return multiply_gate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(fused, "_multiply_gate", counted)
    assert torch.equal(linear_gated_triton(x, *of, "silu", fmt), wanted) and not launched
    moved = torch.zeros(of[0][0].numel() + 4, dtype=torch.uint8, device=DEVICE)[4:]
    of[0][0] = moved.view(of[0][0].shape).copy_(of[0][0])
    assert torch.equal(linear_gated_triton(x, *of, "silu", fmt), wanted) and len(launched) == 1
