"""Every registered format by formula, and blocks that are hard to search."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp4pass.core.formats import Format

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def binary(mantissa: int, bias: int, count: int, first: int = 0) -> list[float]:
    """Numbers with an exponent field and a mantissa field, IEEE's way, from one code to another."""
    found = []
    for code in range(first, count):
        field, fraction = divmod(code, 2**mantissa)
        whole = fraction / 2**mantissa + (field > 0)
        found.append(whole * 2.0 ** (max(field, 1) - bias))
    return found


def stored(dtype: torch.dtype, first: int, count: int) -> list[float]:
    return torch.arange(first, count, dtype=torch.uint8).view(dtype).double().tolist()


E4M3 = stored(torch.float8_e4m3fn, 1, 127)
E8M0 = [2.0 ** (e - 127) for e in range(1, 255)]

# Magnitudes and scales of every format, without a look at its record.
TABLES = {
    "nvfp4": (E2M1, E4M3),
    "mxfp4": (E2M1, E8M0),
    "nvfp4_ue4m4": (E2M1, binary(4, 7, 255, 1)),
    "nvfp4_ue5m3": (E2M1, binary(3, 15, 255, 1)),
    "nvint4": ([float(i) for i in range(8)], E4M3),
    "int8": ([float(i) for i in range(128)], E4M3),
    "mxfp6_e2m3": (binary(3, 1, 32), E8M0),
    "mxfp6_e3m2": (binary(2, 3, 32), E8M0),
    "mxfp8": (stored(torch.float8_e4m3fn, 0, 127), E8M0),
    "mxfp8_e5m2": (stored(torch.float8_e5m2, 0, 124), E8M0),
}


def rounded(quotient: Tensor, name: str) -> Tensor:
    """The magnitude nearest to each float32 quotient, with its sign, ties to the even code."""
    table = torch.tensor(TABLES[name][0], dtype=torch.float64)
    middle = (table[1:] + table[:-1]) / 2
    y = quotient.double().abs()
    index = torch.bucketize(y, middle)
    tied = y == torch.cat((middle, torch.tensor([math.nan])))[index]
    return table[index + (tied & (index % 2 == 1))].copysign(quotient.double())


def steps_of(name: str, global_scale: float) -> Tensor:
    """Every scale times the global scale, as the float32 that quants are multiplied by."""
    scales = torch.tensor(TABLES[name][1], dtype=torch.float32)
    return scales * torch.tensor(global_scale, dtype=torch.float32)


def sample(fmt: Format, rows: int = 24, columns: int = 3) -> Tensor:
    """Normal blocks of many sizes, some with an outlier, some of few magnitudes, one of zeros."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, columns, fmt.block, generator=generator)
    x *= 2.0 ** torch.randint(-12, 9, (rows, columns, 1), generator=generator)
    x[1, :, 0] *= 30
    x[2] = torch.tensor([6.0, -4, 3, -2, 1.5, -1, 0.5, 0] * (fmt.block // 8))
    x[3] = 0.3
    x[3, :, 0] = 4.0
    x[4] = 7.0 * torch.sign(x[4])
    x[5] *= 1e-4
    x[6, -1] = 0.0
    x[7] = x[2] * 1.0625
    return x


def inputs(fmt: Format, tokens: int = 80, columns: int = 3) -> Tensor:
    """Whole numbers, so that sums of products are exact in any order."""
    generator = torch.Generator().manual_seed(2)
    size = (tokens, columns * fmt.block)
    x = torch.randint(-8, 9, size, generator=generator)
    return (x * torch.randint(1, 6, size[1:], generator=generator)).float()


def hessian_of(X: Tensor, block: int) -> Tensor:
    parts = [X[:, i : i + block].double() for i in range(0, X.shape[1], block)]
    return torch.stack([part.T @ part for part in parts])
