"""Compile, load and call the functions of kernels.cpp."""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import logging
import os
import platform
import tempfile
from ctypes import POINTER, byref, c_bool, c_float, c_int, c_int64, c_uint32, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._compat.torch import build_library
from ...core.elements import element_table, scale_table
from ...core.formats import Format
from ...errors import BuildError

_log = logging.getLogger(__name__)

# Sources that Inductor pastes, each after those it includes, and that eager PyTorch compiles.
HEADERS = tuple(Path(__file__).with_name(name) for name in ("few_rows.h", "dequantize.h"))
SOURCES = (*HEADERS, Path(__file__).with_name("kernels.cpp"))

# The dtypes that the functions are compiled for, by the end of their names.
DTYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}

# Numbers that a thread should have to work on, so that starting it pays.
_SHARE = 1 << 15


class Weight(ctypes.Structure):
    """A packed weight, as few_rows.h has it."""

    _fields_ = [
        ("packed", c_void_p),
        ("scale", c_void_p),
        ("global_scale", c_void_p),
        ("values", c_void_p),
        ("steps", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("block", c_int64),
        ("multiplies", c_bool),
    ]


class Grid(ctypes.Structure):
    """Binary floats of few bits, as kernels.cpp has them."""

    _fields_ = [("mantissa_bits", c_int), ("min_exponent", c_int), ("max", c_float)]


class Rounding(ctypes.Structure):
    """Rules by which a block of activations is rounded, as kernels.cpp has them."""

    _fields_ = [
        ("element", Grid),
        ("scale", Grid),
        ("last", c_int),
        ("nan", c_int),
        ("carry", c_uint32),
        ("shift", c_int),
        ("steps", c_void_p),
        ("global_scale", c_float),
        ("full", c_float),
        ("has_global_scale", c_bool),
    ]


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "product": (c_void_p, c_int64, POINTER(Weight), c_void_p, c_void_p, c_int),
    "quantize": (c_void_p, c_void_p, c_void_p, c_int64, c_int, POINTER(Rounding), c_int),
    "dequantize": (POINTER(Weight), c_int64, c_int64, c_void_p, c_int),
}


@lru_cache(maxsize=1)
def load() -> tuple[dict[tuple[str, torch.dtype], Any], str | None]:
    """Return the functions by name and dtype, and the reason if there are none.

    The first call on a machine compiles them in two seconds.
    """
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
    parts += [path.read_text() for path in SOURCES]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    library = cache_folder() / f"{name}.so"
    if not library.exists():
        _log.info("Compiling the CPU kernels to %s.", library)
        build_library(SOURCES[-1], library)
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
