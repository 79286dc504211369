"""The functions of qwantize, by its names and conventions.

Every registered format has seven functions, here those of nvfp4:

- `nvfp4_naive(W, dim=-1, return_dequant=False)`: scales from the largest magnitudes.
- `nvfp4_optimal(W, dim=-1, return_dequant=False)`: scales of least squared error.
- `nvfp4_optimal_hessian(W, dim=-1, return_dequant=False, X=None, H_blocks=None)`: scales of least
  output error, for the inputs X or their Hessians.
- `nvfp4_naive_triton`, `nvfp4_optimal_triton`, `nvfp4_optimal_hessian_triton`: the same functions.
  Under either name the Triton kernels run wherever they know the format and the device.
- `nvfp4_dequantize(scales, quants, dim=-1)`: quants, values or packed codes, times scales.

The others return scales and quants, and with `return_dequant` their product, all float32; the
scales have the global scale in them. Two more keywords: `global_scale`, as `quantize_blocks` takes
it, or None for 1 (1 / max for elements of 8 bits); and `packed`, for quants that are packed codes,
uint8. docs/tensors.md lists what else differs from qwantize.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.formats import E2M1, E4M3, E8M0, FORMATS, UE4M4, UE5M3, Scale, get_format
from ..core.machine import moved
from ..core.packing import unpack_codes
from ..errors import OptionError, ShapeError
from ..quantization.functional import element_values, error_metrics, quantize_blocks, require_float

_OBJECTIVES = {"naive": "naive", "optimal": "sse", "optimal_hessian": "hessian"}


def _quantize(
    fmt: str,
    objective: str,
    W: Tensor,
    dim: int = -1,
    return_dequant: bool = False,
    X: Tensor | None = None,
    H_blocks: Tensor | None = None,
    *,
    global_scale: float | Tensor | str | None = None,
    packed: bool = False,
) -> tuple[Tensor, ...]:
    """Return the scales and quants of W, and their product with `return_dequant`."""
    if global_scale is None:
        found = get_format(fmt)
        eight_bits = found.has_global_scale and found.element.bits == 8
        global_scale = 1 / found.element.max if eight_bits else 1.0
    options: dict[str, Any] = {"objective": objective, "global_scale": global_scale}
    blocks = quantize_blocks(W, fmt, dim=dim, inputs=X, block_hessian=H_blocks, **options)
    result = (blocks.steps(), blocks.packed if packed else blocks.values())
    return (*result, blocks.dequantize()) if return_dequant else result


def _dequantize(fmt: str, scales: Tensor, quants: Tensor, dim: int = -1) -> Tensor:
    """Multiply scales and quants, which are packed codes if they are uint8."""
    fits = -quants.ndim <= dim < quants.ndim
    if not fits or scales.shape != quants.movedim(dim, -1).shape[:-1]:
        raise ShapeError(
            f"{fmt}_dequantize: expected scales of the shape of quants, {tuple(quants.shape)}, "
            f"without dim={dim}, got {tuple(scales.shape)}."
        )
    if quants.dtype == torch.uint8:
        element = get_format(fmt).element
        quants = element_values(quants.movedim(dim, -1), element).movedim(-1, dim)
    return quants * scales.unsqueeze(dim)


# The formats of blocks, under the names that qwantize has for them.
_FORMATS = {
    {"mxfp8": "mxfp8_e4m3"}.get(name, name): name
    for name, fmt in FORMATS.items()
    if not fmt.has_float_scale
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{known}_{name}{ending}": partial(_quantize, fmt, objective)
    for known, fmt in _FORMATS.items()
    for name, objective in _OBJECTIVES.items()
    for ending in ("", "_triton")
}
_FUNCTIONS |= {f"{known}_dequantize": partial(_dequantize, fmt) for known, fmt in _FORMATS.items()}

__all__ = [
    "build_fp8_e4m3_scales",
    "build_ue4m4_scales",
    "build_ue5m3_scales",
    "build_ue8m0_scales",
    "compute_metrics",
    "fp4_unpack",
    "scales_to_ue8m0_exponent",
    "snap_to_table",
]
__all__ += _FUNCTIONS


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _FUNCTIONS[name]


def compute_metrics(W: Tensor, W_dq: Tensor, X: Tensor | None = None) -> dict[str, float]:
    """Return what `fp4pass.functional.error_metrics` measures of W, W_dq and inputs X."""
    return error_metrics(W, W_dq, X)


def fp4_unpack(input_data: Tensor) -> Tensor:
    """Unpack E2M1 codes uint8 [..., P], low nibble first, to twice their values int8 [..., 2 P]."""
    codes = unpack_codes(input_data)
    doubled = torch.tensor(E2M1.values, device=codes.device).mul_(2).to(torch.int8)
    return doubled[codes.int()]


def _scale_values(scale: Scale, device: torch.device | str = "cpu") -> Tensor:
    """Return the positive values of a scale, ascending: float32 [n], bytes 1 to n."""
    return moved(torch.tensor(scale.values, dtype=torch.float32), device)


build_fp8_e4m3_scales = partial(_scale_values, E4M3)  # [126]
build_ue8m0_scales = partial(_scale_values, E8M0)  # [254]
build_ue4m4_scales = partial(_scale_values, UE4M4)  # [254]
build_ue5m3_scales = partial(_scale_values, UE5M3)  # [254]


def scales_to_ue8m0_exponent(scales_f32: Tensor) -> Tensor:
    """Return the E8M0 bytes, int32, of powers of two from 2^-126 to 2^127."""
    require_float("scales_to_ue8m0_exponent", "scales_f32", scales_f32)
    mantissa, exponent = torch.frexp(scales_f32.double())
    byte = exponent + 126
    strange = (mantissa != 0.5) | (byte < 1) | (byte > E8M0.last)
    if strange.any():
        raise OptionError(
            "scales_to_ue8m0_exponent: expected powers of two from 2^-126 to 2^127, got "
            f"{scales_f32[strange][0].item()}."
        )
    return byte.to(torch.int32)


def snap_to_table(x: Tensor, sorted_table: Tensor) -> Tensor:
    """Return the entry of an ascending table [n] that is nearest to each number; NaN stays NaN.

    Entry i stands for byte i + 1, as in the tables above, and ties go to the even byte, so that
    with the table of E4M3 this is the cast to it.
    """
    table = sorted_table.to(x.device, torch.float64)
    is_ascending = table.ndim == 1 and len(table) and (table[1:] > table[:-1]).all()
    if not x.is_floating_point() or not is_ascending:
        raise OptionError(
            "snap_to_table: expected x of a floating-point dtype and an ascending table [n], got "
            f"{x.dtype} and a table {tuple(table.shape)}."
        )
    number = x.double().contiguous()
    middle = (table[1:] + table[:-1]) / 2
    index = torch.bucketize(number, middle)
    tied = number == torch.cat((middle, middle.new_full((1,), math.nan)))[index]
    nearest = table[index + (tied & (index % 2 == 0))].to(x.dtype)
    return torch.where(x.isnan(), x, nearest)
