"""The gate of an MLP in the launch of its products, against products and eager's gate."""

from __future__ import annotations

import itertools

import pytest
import torch
from blocks import VARIANTS
from kernels.cases import DEVICE, cases
from kernels.exact import numbers, weight
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import PackedWeight
from fp4pass.kernels.linear import fused
from fp4pass.kernels.linear.fused import linear_gated_triton
from fp4pass.kernels.linear.naive import linear_gated_ref
from fp4pass.kernels.linear.triton import linear_group_triton
from fp4pass.kernels.quantize.naive import ACTIVATIONS

# numpy, in the interpreter, says when an exponential leaves float32.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


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


def expected(x: Tensor, of: list[PackedWeight], name: str, fmt: Format) -> Tensor:
    gate, up = linear_group_triton(x, of, fmt)
    return ACTIVATIONS[name](gate) * up


# Rows of one launch and of more; N is odd, and K no multiple of what the warps take.
SHAPES = [(1, 35, 1024), (3, 33, 512), (8, 35, 544), (9, 19, 64), (0, 5, 64), (1, 8, 32)]
NAMES = list(ACTIVATIONS)
PAIRS = list(zip(VARIANTS, NAMES, strict=True))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("fmt", "name"), cases(PAIRS, itertools.product(VARIANTS, NAMES)))
def test_the_bits_of_products_and_their_gate(fmt: Format, name: str) -> None:
    for m, n, k in SHAPES:
        x, of = rows(m, k, fmt), weights(fmt, n, k)
        found, wanted = linear_gated_triton(x, of, name, fmt), expected(x, of, name, fmt)
        assert found.is_contiguous() and found.isfinite().all()
        # The interpreter's exponentials and tanh are numpy's.
        step = wanted.abs() * 2.0**-7 + 1e-6
        differs = found != wanted
        assert (differs.sum() <= found.numel() / 20) and ((found - wanted).abs() <= step).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    fmt = get_format("nvfp4")
    for m in (2, 9):
        x, of = rows(m, 64, fmt, dtype), weights(fmt, 19, 64, bias=False)
        found, wanted = linear_gated_triton(x, of, "silu", fmt), expected(x, of, "silu", fmt)
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=2.0**-10 if m < 9 else 2e-3, atol=1e-5)


@pytest.mark.parametrize("m", [1, 9])
def test_halves_of_one_weight(m: int) -> None:
    """They are read where they are; a global scale is that of both."""
    fmt = get_format("nvfp4")
    gate, up = weights(fmt, 32, 512)
    up, x = up._replace(global_scale=gate.global_scale), rows(m, 512, fmt)
    columns = (torch.cat(each) for each in zip(gate, up, strict=True))
    merged = PackedWeight(*columns)._replace(global_scale=gate.global_scale)
    found = linear_gated_triton(x, [merged], "silu", fmt)
    assert torch.equal(found, linear_gated_triton(x, [gate, up], "silu", fmt))
    reference = linear_gated_ref(x, [merged], "silu", fmt).float()
    assert (found.float() - reference).norm() <= 0.01 * reference.norm()


@pytest.mark.parametrize("dimensions", [1, 3])
def test_shapes_of_inputs(dimensions: int) -> None:
    fmt = get_format("mxfp4")
    x, of = rows(4, 512, fmt), weights(fmt, 8, 512)
    wanted = linear_gated_triton(x, of, "silu", fmt)
    x, wanted = (x[0], wanted[0]) if dimensions == 1 else (x[:, None], wanted[:, None])
    found = linear_gated_triton(x, of, "silu", fmt)
    assert found.shape == wanted.shape and torch.equal(found, wanted)


def test_codes_that_are_not_aligned_are_multiplied_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of both take addresses for multiples of 16."""
    fmt = get_format("nvfp4")
    x, (gate, up) = rows(2, 512, fmt), weights(fmt, 8, 512)
    wanted = linear_gated_triton(x, [gate, up], "silu", fmt)
    launched = []
    multiply_gate = fused._multiply_gate

    def counted(*args: object) -> Tensor:
        launched.append(args)
        return multiply_gate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(fused, "_multiply_gate", counted)
    assert torch.equal(linear_gated_triton(x, [gate, up], "silu", fmt), wanted) and not launched
    moved = torch.zeros(gate.packed.numel() + 4, dtype=torch.uint8, device=DEVICE)[4:]
    gate = gate._replace(packed=moved.view(gate.packed.shape).copy_(gate.packed))
    found = linear_gated_triton(x, [gate, up], "silu", fmt)
    assert torch.equal(found, wanted) and len(launched) == 1
