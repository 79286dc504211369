"""Layers of fp4pass.parity of every kind, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp4pass.parity import Linear4bit, Linear8bitLt
from fp4pass.parity.bitsandbytes import PackedWeight

K, N = 96, 40
KINDS = ["nf4", "fp4", "int8"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(
    columns: int = K, dtype: torch.dtype = torch.float32, bias: bool = True, scale: float = 1.0
) -> nn.Linear:
    layer = nn.Linear(columns, N, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=seeded(1)) * scale)
    return layer


def empty(kind: str, columns: int = K, **options: Any) -> PackedWeight:
    if kind == "int8":
        return Linear8bitLt(columns, N, **options)
    return Linear4bit(columns, N, quant_type=kind, **options)


def made(kind: str, columns: int = K, **options: Any) -> PackedWeight:
    source = linear(columns, **options)
    if kind == "int8":
        return Linear8bitLt.from_linear(source)
    return Linear4bit.from_linear(source, kind)


def batch(*shape: int, columns: int = K) -> Tensor:
    return torch.randn(*(shape or (2, 5)), columns, generator=seeded(2))
