"""What the search kernels take from an Element: constants, PTX, and formats that do not exist."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from blocks import WEIGHTS, spectrum
from kernel_cases import DEVICE, cases, seeded
from torch import Tensor

from fp4pass.core.elements import Element
from fp4pass.core.formats import E2M1, E4M3, E8M0, MXFP4, NVFP4, Format
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.search.hessian_triton import _residual_ptx as residual_ptx
from fp4pass.kernels.search.hessian_triton import packs_pairs
from fp4pass.kernels.search.reference import search_ref
from fp4pass.kernels.search.triton import search_triton

# 4-bit elements of no registered format. The search derives all it needs from them, also where
# other kernels ask for more (`supports`).
MADE_UP = [
    Format("fine", Element.binary("e1m2", 4, 2, 0), E8M0, 16, (16,), False),
    Format("small", Element.binary("e2m1/32", 4, 1, -5), E8M0, 16, (16,), False),
    Format("large", Element.binary("e2m1*2", 4, 1, 1), E8M0, 16, (16,), False),
]


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("fmt", "dtype"),
    cases(
        [*zip(MADE_UP, [torch.bfloat16, torch.float32, torch.bfloat16], strict=True)],
        itertools.product(MADE_UP, [torch.bfloat16, torch.float32]),
    ),
)
def test_formats_that_do_not_exist(fmt: Format, dtype: torch.dtype) -> None:
    """The bits of the reference; by the Hessian an error as small."""
    weight = WEIGHTS["bfloat16"](seeded(0))[:6, :16].to(dtype)
    for objective in ("naive", "sse", "hessian"):
        hessian = spectrum(0.9)[:1] if objective == "hessian" else None
        expected = search_ref(weight, hessian, 1.0, fmt, objective)
        on = None if hessian is None else hessian.to(DEVICE)
        found = [t.cpu() for t in search_triton(weight.to(DEVICE), on, 1.0, fmt, objective)]
        if hessian is None:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        else:
            least = energy(weight, expected, fmt, hessian[0])
            assert (energy(weight, found, fmt, hessian[0]) <= least * (1 + 1e-6)).all()


def energy(weight: Tensor, state: Any, fmt: Format, hessian: Tensor) -> Tensor:
    """Return r^T H r of each row of one block, float64."""
    r = weight.double() - dequantize_ref(*state, None, fmt, torch.float64)
    return ((r @ hessian[: fmt.block, : fmt.block].double()) * r).sum(1)


# Of pairs of float16, rounded once from float64, and of 32-bit words.
ON_PAIRS = {
    "mul.rn.f16x2": operator.mul,
    "fma.rn.f16x2": lambda a, b, c: a * b + c,
    "min.f16x2": np.minimum,
    "max.f16x2": np.maximum,
}
ON_WORDS = {
    "mov.b32": lambda a: a,
    "shr.u32": operator.rshift,
    "and.b32": operator.and_,
    "add.u32": operator.add,
}


def run_ptx(text: str, *operands: np.ndarray) -> np.ndarray:
    """Interpret the PTX of an elementwise operation on pairs of float16."""
    words = [each.view(np.uint32) for each in operands]
    registers = {f"${i + 1}": each for i, each in enumerate(words)}
    for line in text.strip("{} \n").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        to, *sources = (each.strip() for each in rest.split(","))
        of = [
            registers[each] if each in registers else np.full_like(words[0], int(each, 0))
            for each in sources
        ]
        if name in ON_PAIRS:
            result = ON_PAIRS[name](*(each.view(np.float16).astype(np.float64) for each in of))
            registers[to] = result.astype(np.float16).view(np.uint32)
        else:
            registers[to] = ON_WORDS[name](*of)
    return registers["$0"].view(np.float16)


@pytest.mark.parametrize("clips", [False, True])
def test_residuals_of_pairs_are_exact(clips: bool) -> None:
    """Every bfloat16 mantissa at every mantissa of E4M3: the residual of rounding to nearest."""
    assert packs_pairs(torch.bfloat16, NVFP4) and packs_pairs(torch.bfloat16, MXFP4)
    mantissas = torch.arange(128, 256, dtype=torch.float64)
    x = torch.cat([mantissas * 2.0**k for k in range(-24, -9)])
    x = torch.cat((x, -x, torch.zeros(2, dtype=torch.float64)))
    for exponent in (-19, -12, -6):
        for scale in (torch.arange(8, 16, dtype=torch.float64) * 2.0**exponent).tolist():
            near = x[(x / scale).abs() < (64 if clips else E2M1.halving_reach)]
            near = near[: len(near) // 2 * 2]
            inverse = torch.full_like(near, 1 / scale).float() * 2.0**-14
            operands = [near, inverse, torch.full_like(near, -scale * 2.0**14)]
            halves = [each.half().numpy() for each in operands]
            found = run_ptx(residual_ptx(E2M1, clips), *halves)
            expected = near - oracle.values(oracle.codes((near / scale).float())) * scale
            assert torch.equal(torch.from_numpy(found).double(), expected)


def test_pairs_are_for_what_was_proved() -> None:
    for fmt in MADE_UP:
        assert not packs_pairs(torch.bfloat16, fmt)
    assert not packs_pairs(torch.float16, NVFP4) and not packs_pairs(torch.float32, NVFP4)
    fine = dataclasses.replace(E4M3, mantissa_bits=4)
    assert not packs_pairs(torch.bfloat16, dataclasses.replace(NVFP4, scale=fine))
