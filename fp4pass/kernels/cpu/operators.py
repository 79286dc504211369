"""Compile the C++, and call it: dequantize, quantize, and multiply few rows by codes."""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import logging
import math
import os
import platform
import tempfile
from collections.abc import Callable
from ctypes import POINTER, byref, c_bool, c_float, c_int, c_int64, c_void_p
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._compat.torch import build_library
from ...core.elements import element_table, scale_table
from ...core.formats import Format
from ...core.packing import PackedWeight, empty_blocks
from ...errors import BuildError
from ..common.rounding import global_multiplier, thresholds
from ..compute_fp8.naive import uses_fp8
from ..dequantize.naive import dequantize_ref
from ..experts.naive import experts_quantize_ref
from ..linear.naive import (
    linear_group_ref,
    linear_quantized_group_ref,
    linear_quantized_ref,
    linear_ref,
)
from ..quantize.naive import activate_quantize_ref, norm_quantize_ref, quantize_ref
from ..rotate.naive import rotate_quantize_ref

_log = logging.getLogger(__name__)

# Inductor pastes the first; eager PyTorch compiles the second, which includes it.
HEADER, SOURCE = (Path(__file__).with_name(name) for name in ("few_rows.h", "kernels.cpp"))

# The dtypes that the functions are compiled for, by the end of their names.
DTYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}

# Numbers that a thread should have to work on, so that starting it pays.
_SHARE = 1 << 15


class Weight(ctypes.Structure):
    """A packed weight, as few_rows.h has it."""

    _fields_ = [
        *((name, c_void_p) for name in ("packed", "scale", "global_scale", "values", "steps")),
        *((name, c_int64) for name in ("n", "k", "block")),
        ("multiplies", c_bool),
    ]


class Rounding(ctypes.Structure):
    """Rules by which a block of activations is rounded, as kernels.cpp has them."""

    _fields_ = [
        *((name, c_void_p) for name in ("middles", "limits", "below", "steps")),
        ("nan", c_int),
        *((name, c_float) for name in ("global_scale", "full")),
        ("has_zero", c_bool),
    ]


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "product": (c_void_p, c_int64, POINTER(Weight), c_void_p, c_void_p, c_int),
    "quantize": (c_void_p, c_void_p, c_void_p, c_int64, c_int, POINTER(Rounding), c_int),
    "dequantize": (POINTER(Weight), c_int64, c_int64, c_void_p, c_int),
}


@lru_cache(maxsize=1)
def load() -> tuple[dict[tuple[str, torch.dtype], Any], str | None]:
    """Return the functions by name and dtype, compiled in two seconds, or the reason for none."""
    try:
        library = ctypes.CDLL(str(_built()))
    except (BuildError, OSError) as error:
        reason = str(error)
        _log.warning("Packed weights are multiplied in plain PyTorch on this CPU: %s", reason)
        return {}, reason
    found = {}
    for name, arguments in _ARGUMENTS.items():
        for dtype, ending in DTYPES.items():
            function = getattr(library, f"{name}_{ending}")
            function.argtypes, function.restype = arguments, None
            found[name, dtype] = function
    return found, None


def _built() -> Path:
    """Return the compiled library: that of an earlier process, if one made it."""
    cpu = torch.cpu.get_capabilities()
    parts = [torch.__version__, platform.platform(), str(sorted(cpu.items()))]
    parts += [path.read_text() for path in (HEADER, SOURCE)]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    library = cache_folder() / f"{name}.so"
    if not library.exists():
        _log.info("Compiling the CPU kernels to %s.", library)
        build_library(SOURCE, library)
    return library


def cache_folder() -> Path:
    """Return the folder of compiled libraries, beside what torch.compile keeps."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if cache is None:
        # Inductor's own default; asking Inductor imports it, which takes a second.
        cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    return Path(cache).absolute() / "fp4pass"


def serves(dtype: torch.dtype, fmt: Format) -> bool:
    """Return whether the functions know a dtype of numbers and a format."""
    return dtype in DTYPES and fmt.element.bits == 4 and fmt.block in (16, 32)


def function(name: str, dtype: torch.dtype, fmt: Format) -> Any:
    """Return a function for tensors of a dtype and a format, or None where there is none."""
    return load()[0].get((name, dtype)) if serves(dtype, fmt) else None


def is_stored(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> bool:
    """Return whether a tensor is in memory as the functions read it."""
    return tensor.is_cpu and tensor.dtype == dtype and tensor.shape == shape


# For good: what has their places may be kept longer than they are.
@cache
def tables(fmt: Format) -> tuple[Tensor, Tensor, int, int]:
    """Return the values of a format's codes and of its scales, and where they are."""
    cpu = torch.device("cpu")
    values, steps = element_table(fmt.element, cpu), scale_table(fmt.scale, cpu)
    return values, steps, values.data_ptr(), steps.data_ptr()


def weight_at(
    packed: Tensor, scale: Tensor, global_scale: Tensor | None, n: int, k: int, fmt: Format
) -> Any:
    """Return what the functions take of a weight [n, k] whose tensors are contiguous."""
    number = None if global_scale is None else global_scale.data_ptr()
    return _weight(packed.data_ptr(), scale.data_ptr(), number, n, k, fmt)


# Making one takes longer than asking for it; there is one for each layer.
@lru_cache(maxsize=1024)
def _weight(packed: int, scale: int, number: int | None, n: int, k: int, fmt: Format) -> Any:
    _, _, values, steps = tables(fmt)
    return byref(Weight(packed, scale, number, values, steps, n, k, fmt.block, fmt.multiplies))


def threads_for(numbers: int) -> int:
    """Return how many threads to start for so many numbers."""
    return max(1, min(torch.get_num_threads(), numbers // _SHARE))


def dequantize_cpu(
    packed: Tensor, scale: Tensor, global_scale: Tensor | None, fmt: Format, dtype: torch.dtype
) -> Tensor:
    """Return the tensor [..., K] that packed codes and scale bits stand for, as the reference."""
    call = function("dequantize", dtype, fmt)
    fits = is_stored(packed, packed.shape) and is_stored(scale, scale.shape)
    fits = fits and 2 * packed.numel() == scale.numel() * fmt.block
    fits = fits and (global_scale is None or is_stored(global_scale, (1,), torch.float32))
    if call is None or not fits:
        return dequantize_ref(packed, scale, global_scale, fmt, dtype)
    packed, scale = packed.contiguous(), scale.contiguous()
    dense = packed.new_empty((*packed.shape[:-1], fmt.columns(packed.shape[-1])), dtype=dtype)
    blocks = scale.numel()
    weight = weight_at(packed, scale, global_scale, blocks, fmt.block, fmt)
    call(weight, 0, blocks, dense.data_ptr(), threads_for(dense.numel()))
    return dense


@cache
def _limits(fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers above which a code, and a scale, is the next (`quantize_ref`)."""
    element, scale, cpu = fmt.element, fmt.scale, torch.device("cpu")
    if scale.mantissa_bits:
        limits = thresholds((0.0, *scale.values), cpu)
    else:
        # The scale of amax has the exponent of its bits + carry.
        exponents = torch.arange(1, scale.last + 1, device=cpu) + math.frexp(element.max)[1]
        bits = ((exponents + 126 - scale.bias) << 23) - element.carry - 1
        limits = bits.clamp_(0, 0x7F800000).int().view(torch.float32)
    floats = (torch.arange(2048, dtype=torch.int32, device=cpu) << 20).view(torch.float32)
    below = torch.bucketize(floats.nan_to_num(), limits).to(torch.uint8)
    middles = F.pad(thresholds(element.magnitudes, cpu), (0, 9))
    return middles, F.pad(limits, (0, 1), value=math.inf), below


@lru_cache(maxsize=1024)
def _rounding(fmt: Format, factor: float, full: float) -> Any:
    places = [each.data_ptr() for each in _limits(fmt)]
    return byref(
        Rounding(*places, tables(fmt)[-1], fmt.scale.nan, factor, full, fmt.scale.mantissa_bits > 0)
    )


def quantize_cpu(
    x: Tensor, global_scale: Tensor | None, fmt: Format, scale_method: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Return packed codes and scale bits of activations x [..., K], as `quantize_ref`."""
    call = function("quantize", x.dtype, fmt)
    if call is None or scale_method != "naive":
        return quantize_ref(x, global_scale, fmt, scale_method)
    # As the reference has it in float32.
    factor = 1.0 if global_scale is None else global_multiplier(global_scale, fmt)
    has_zero = fmt.scale.mantissa_bits > 0
    rounding = _rounding(fmt, float(factor), float(fmt.element.max * factor) if has_zero else 1.0)
    x = x.contiguous()
    packed, scale = empty_blocks(x, fmt)
    pointers = (each.data_ptr() for each in (x, packed, scale))
    call(*pointers, scale.numel(), fmt.block, rounding, threads_for(x.numel()))
    return packed, scale


activate_quantize_cpu = partial(activate_quantize_ref, quantize=quantize_cpu)
norm_quantize_cpu = partial(norm_quantize_ref, quantize=quantize_cpu)
experts_quantize_cpu = partial(experts_quantize_ref, quantize=quantize_cpu)
rotate_quantize_cpu = partial(rotate_quantize_ref, quantize=quantize_cpu)


# Up to so many rows are multiplied by the codes. More share a dense tile, whose products have the
# bits of dense ones.
FEW_ROWS = 4

# Numbers of a weight that are dense at a time. Products of smaller tiles are slower.
TILE = 1 << 21


def linear_cpu(x: Tensor, weight: PackedWeight, fmt: Format, compute: str = "input") -> Tensor:
    """Return x [..., K] times a packed weight [N, K], as `linear_ref` but for the order of sums."""
    packed, scale, global_scale, bias = weight
    n, k = packed.shape[0], x.shape[-1]
    rows = x.numel() // k if k else 0
    call = function("product" if rows <= FEW_ROWS else "dequantize", x.dtype, fmt)
    # Memory that is read must be there; the reference takes other tensors, or raises.
    fits = (
        call is not None
        and k > 0
        and (packed.is_cpu and packed.dtype == torch.uint8 and packed.shape == (n, k // 2))
        and (scale.is_cpu and scale.dtype == torch.uint8 and scale.shape == (n, k // fmt.block))
        and (global_scale is None or is_stored(global_scale, (1,), torch.float32))
        and (bias is None or (bias.is_cpu and bias.shape == (n,)))
    )
    if not fits or (compute != "input" and uses_fp8(compute, rows)):
        return linear_ref(x, weight, fmt, compute)
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    packed, scale = packed.contiguous(), scale.contiguous()
    stored = weight_at(packed, scale, global_scale, n, k, fmt)
    if rows > FEW_ROWS:
        return _multiply_tiles(x, call, stored, n, bias)
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], n))
    at_bias = None if bias is None else bias.data_ptr()
    call(x.data_ptr(), rows, stored, at_bias, y.data_ptr(), threads_for(rows * n * k // 4))
    return y


def _multiply_tiles(
    x: Tensor, dequantize: Callable[..., None], weight: Any, n: int, bias: Tensor | None
) -> Tensor:
    """Return x [..., K] times a weight [N, K], of which some rows are dense at a time."""
    k = x.shape[-1]
    step = min(n, max(1, TILE // k))
    tile = x.new_empty((step, k))
    at, threads = tile.data_ptr(), threads_for(step * k)
    if step == n:
        dequantize(weight, 0, n, at, threads)
        return F.linear(x, tile, bias)
    flat = x.reshape(-1, k)
    y = x.new_empty((len(flat), n))
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        dequantize(weight, rows.start, rows.stop, at, threads)
        dense = tile[: rows.stop - rows.start].t()
        if bias is None:
            torch.mm(flat, dense, out=y[:, rows])
        else:
            torch.addmm(bias[rows], flat, dense, out=y[:, rows])
    return y.view(*x.shape[:-1], n)


linear_quantized_cpu = partial(linear_quantized_ref, dequantize=dequantize_cpu, linear=linear_cpu)
linear_group_cpu = partial(linear_group_ref, linear=linear_cpu)
linear_quantized_group_cpu = partial(linear_quantized_group_ref, linear=linear_quantized_cpu)
