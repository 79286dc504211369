"""What `supports` says yes to, the kernels serve: formats that no list has, by their properties."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_cases import DEVICE, flat, quiet, seeded
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
