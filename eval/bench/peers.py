"""What a user could install instead, as functions that eval/bench/kernels.py times.

A linear of a peer takes the bf16 weight [N, K] and how many copies to rotate over, and returns as
many functions of x. Each library is imported by the function that uses it; `installed` says which
are there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]

LIBRARIES = ("bitsandbytes", "torchao")


def installed() -> dict[str, str]:
    """The version of each library that is there."""
    found = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    return {name: importlib.metadata.version(name) for name in found}


def cublas(weight: Tensor, copies: int) -> list[Linear]:
    weights = [weight.clone() for _ in range(copies)]
    return [lambda x, w=w: F.linear(x, w) for w in weights]


def bitsandbytes_nf4(weight: Tensor, copies: int) -> list[Linear]:
    return _bitsandbytes(weight, copies, "nf4")


def bitsandbytes_fp4(weight: Tensor, copies: int) -> list[Linear]:
    return _bitsandbytes(weight, copies, "fp4")


def _bitsandbytes(weight: Tensor, copies: int, kind: str) -> list[Linear]:
    """4-bit floats with a float32 scale per 64 weights."""
    import bitsandbytes as bnb

    found = []
    for _ in range(copies):
        packed, state = bnb.functional.quantize_4bit(weight, quant_type=kind, blocksize=64)
        found.append(lambda x, p=packed, s=state: bnb.matmul_4bit(x, p.t(), quant_state=s))
    return found


def torchao_int4(weight: Tensor, copies: int) -> list[Linear]:
    """Its tile-packed int4 in groups of 64; the other int4 layouts need a package not on PyPI."""
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    config = Int4WeightOnlyConfig(group_size=64, int4_packing_format="tile_packed_to_4d")
    found = []
    for _ in range(copies):
        layer = torch.nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        quantize_(layer, config)
        found.append(layer)
    return found


# Of each linear: its maker and the largest M at which it is worth the time.
LINEARS: dict[str, tuple[Callable[[Tensor, int], list[Linear]], int]] = {
    "bitsandbytes nf4": (bitsandbytes_nf4, 2048),
    "bitsandbytes fp4": (bitsandbytes_fp4, 2048),
    "torchao int4": (torchao_int4, 256),
}


def bitsandbytes_dequantize(weight: Tensor) -> Callable[[], Tensor]:
    """Its nf4 back to bf16."""
    import bitsandbytes as bnb

    packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    return lambda: bnb.functional.dequantize_4bit(packed, state)


def torchao_quantize(x: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Its NVFP4 with a given per-tensor scale, by torch.compile."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    compiled = torch.compile(nvfp4_quantize, fullgraph=True)
    per_tensor = x.abs().amax().float() / (448 * 6)
    return lambda: compiled(x, 16, per_tensor)


def torch_block_hessians(x: Tensor) -> Callable[[], Tensor]:
    """Blocks of 32 columns by one batched product in bf16."""
    blocks = x.view(len(x), -1, 32).transpose(0, 1)
    return lambda: blocks.mT @ blocks
