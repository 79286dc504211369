"""What `supports` says yes to, the kernels serve: formats that no list has, by their properties."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from blocks import WEIGHTS, spectrum
from kernel_cases import DEVICE, covering, flat, quiet, seeded
from torch import Tensor

from fp4pass.core.elements import Element
from fp4pass.core.formats import (
    E2M1,
    E4M3,
    E8M0,
    INT4,
    MXFP4,
    NVFP4,
    UE4M4,
    Format,
    Scale,
    get_format,
)
from fp4pass.kernels.common.tiles import supports
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.dequantize.triton import dequantize_triton
from fp4pass.kernels.quantize.naive import quantize_ref
from fp4pass.kernels.quantize.triton import quantize_triton
from fp4pass.kernels.search.reference import search_ref
from fp4pass.kernels.search.triton import _residual_ptx as residual_ptx
from fp4pass.kernels.search.triton import packs_pairs, search_triton
from fp4pass.ops.registration import OPERATORS, unserved

pytestmark = quiet


DOUBLED = Element.binary("doubled", bits=4, mantissa_bits=1, min_exponent=1)
HALVED = Element.binary("halved", bits=4, mantissa_bits=1, min_exponent=-1)
QUARTERED = Element.binary("quartered", bits=4, mantissa_bits=1, min_exponent=-2)
E1M2 = Element.binary("e1m2", bits=4, mantissa_bits=2, min_exponent=0)
TABLE = Element("table", bits=4, magnitudes=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 7.0))
E5M2 = Scale("e5m2", 2, bias=15, last=122, nan=127, subnormal=True, storage=torch.uint8)
OTHER_BIAS = dataclasses.replace(E4M3, name="e4m3b8", bias=8)
SHIFTED = dataclasses.replace(E8M0, name="shifted", bias=126)

SERVED = {
    "doubled": dataclasses.replace(NVFP4, name="doubled", element=DOUBLED),
    "halved": dataclasses.replace(MXFP4, name="halved", element=HALVED),
    "e5m2": dataclasses.replace(NVFP4, name="e5m2", scale=E5M2, block=32),
    "bias": dataclasses.replace(NVFP4, name="bias", scale=OTHER_BIAS),
}
REFUSED = {
    "integers": dataclasses.replace(NVFP4, element=INT4),
    "finer": dataclasses.replace(NVFP4, element=E1M2),
    "a small dead zone": dataclasses.replace(NVFP4, element=QUARTERED),
    "no minifloat": dataclasses.replace(NVFP4, element=TABLE),
    "eight bits of scale": dataclasses.replace(NVFP4, scale=UE4M4),
    "another bias": dataclasses.replace(MXFP4, scale=SHIFTED),
    "a block of 64": dataclasses.replace(NVFP4, block=64),
}


@pytest.mark.core
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    assert not supports(REFUSED[name])
    assert supports(dataclasses.replace(REFUSED[name], element=E2M1, scale=E4M3, block=16))


def numbers(fmt: Format) -> Tensor:
    x = torch.randn(12, 96, generator=seeded(0))
    x[3] = 0
    x[4, ::7] *= 20
    x[5] = torch.tensor(fmt.element.values * 6) * 0.5
    return x.bfloat16().to(DEVICE)


@pytest.mark.quick(1)
@pytest.mark.parametrize("fmt", SERVED.values(), ids=SERVED)
def test_what_is_served(fmt: Format) -> None:
    """The bits of the reference; searched scales lose less than naive ones, and no code is lost."""
    assert supports(fmt)
    x = numbers(fmt)
    g = fmt.global_scale_for(x.abs().max().item())
    stored = torch.tensor([1 / g], device=DEVICE) if fmt.has_global_scale else None
    packed, scale = quantize_triton(x, stored, fmt)
    wanted = quantize_ref(x, stored, fmt)
    assert torch.equal(packed, wanted[0]) and torch.equal(scale, wanted[1])
    dense = dequantize_ref(packed, scale, stored, fmt, torch.bfloat16)
    assert torch.equal(dequantize_triton(packed, scale, stored, fmt, torch.bfloat16), dense)
    eye = torch.eye(96, device=DEVICE)[:8].bfloat16()
    assert torch.equal(flat("linear")(eye, packed, scale, stored, None, fmt), dense.t()[:8])
    errors = []
    for quantize, method in (
        (quantize_ref, "sse"),
        (quantize_triton, "sse"),
        (quantize_triton, "naive"),
    ):
        found = quantize(x, stored, fmt, method)
        values = dequantize_ref(*found, stored, fmt, torch.float32)
        errors.append((values - x.float()).square().sum().item())
    assert errors[0] <= errors[1] * (1 + 1e-6) and errors[1] < errors[2]


# The operators whose kernels take E4M3 codes beside those of 4 bits.
OF_E4M3 = (
    *("linear", "linear_quantized", "linear_group", "linear_quantized_group"),
    *("quantize", "norm_quantize", "activate_quantize", "dequantize"),
)


@pytest.mark.core
@pytest.mark.parametrize("name", OF_E4M3)
def test_a_gpu_runs_kernels_for_e4m3_codes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reference, which would be right and slow."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernel = OPERATORS[name].triton
    for key in ("nvfp4", "mxfp4", "fp8", "fp8_block", "fp8_tensor", "mxfp8"):
        assert unserved(torch.device("cuda"), get_format(key), kernel) is None, key
    assert "do not know int8" in unserved(torch.device("cuda"), get_format("int8"), kernel)


# ---- what the search derives from an element: constants and PTX --------------------------------

# 4-bit elements of no registered format. The search derives all it needs from them, also where
# other kernels ask for more (`supports`).
MADE_UP = [
    Format("fine", Element.binary("e1m2", 4, 2, 0), E8M0, 16, (16,), False),
    Format("small", Element.binary("e2m1/32", 4, 1, -5), E8M0, 16, (16,), False),
    Format("large", Element.binary("e2m1*2", 4, 1, 1), E8M0, 16, (16,), False),
]


@pytest.mark.quick(1)
@covering(("fmt", "dtype"), MADE_UP, [torch.bfloat16, torch.float32])
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
