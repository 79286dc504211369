"""Products of llama.cpp's library on a CPU, by the package libggml-python of PyPI."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch
from torch import Tensor

# Numbers of ggml's types.
TYPES = {"float32": 0, "bfloat16": 30, "mxfp4": 39}


class _Options(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool)]


def version() -> str | None:
    """The version of ggml, or None where the package is not installed."""
    found = importlib.util.find_spec("libggml")
    if found is None or found.origin is None:
        return None
    base = _library(Path(found.origin).parent, "base")
    base.ggml_version.restype = c_char_p
    return base.ggml_version().decode()


def _library(package: Path, part: str) -> ctypes.CDLL:
    (path,) = package.glob(f"lib*/libggml-{part}.so")
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def chain(weights: list[Tensor], x: Tensor, kind: str, threads: int) -> Callable[[], Tensor]:
    """What multiplies x [M, K] by one weight [N, K] after the other, in a type of ggml.

    It rounds x to 8-bit blocks before products with MXFP4.
    """
    spec = importlib.util.find_spec("libggml")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    base, cpu = _library(package, "base"), _library(package, "cpu")
    base.ggml_init.argtypes, base.ggml_init.restype = (_Options,), c_void_p
    base.ggml_new_tensor_2d.argtypes = (c_void_p, c_int, c_int64, c_int64)
    base.ggml_mul_mat.argtypes = (c_void_p, c_void_p, c_void_p)
    base.ggml_get_data.argtypes = base.ggml_nbytes.argtypes = (c_void_p,)
    base.ggml_new_graph.argtypes = (c_void_p,)
    base.ggml_build_forward_expand.argtypes = (c_void_p, c_void_p)
    base.ggml_build_forward_expand.restype = None
    for name in ("new_tensor_2d", "mul_mat", "get_data", "new_graph"):
        getattr(base, f"ggml_{name}").restype = c_void_p
    quantize = base.ggml_quantize_chunk
    quantize.argtypes = (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)
    compute = cpu.ggml_graph_compute_with_ctx
    compute.argtypes = (c_void_p, c_void_p, c_int)

    room = sum(w.numel() * 4 for w in weights) + 64 * x.numel() * 4 + (64 << 20)
    context = base.ggml_init(_Options(room, None, False))
    rows, columns = x.shape
    y = first = base.ggml_new_tensor_2d(context, TYPES["float32"], columns, rows)
    x = x.float().contiguous()
    ctypes.memmove(base.ggml_get_data(first), x.data_ptr(), x.numel() * 4)
    for weight in weights:
        n, k = weight.shape
        w = base.ggml_new_tensor_2d(context, TYPES[kind], k, n)
        numbers = weight.float().contiguous()
        quantize(TYPES[kind], numbers.data_ptr(), base.ggml_get_data(w), 0, n, k, None)
        y = base.ggml_mul_mat(context, w, y)
    graph = base.ggml_new_graph(context)
    base.ggml_build_forward_expand(graph, y)
    result = torch.empty(rows, weights[-1].shape[0])

    def run() -> Tensor:
        compute(context, graph, threads)
        ctypes.memmove(result.data_ptr(), base.ggml_get_data(y), result.numel() * 4)
        return result

    return run
