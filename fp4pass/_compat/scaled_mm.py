"""Products of E4M3 operands by torch: a private function, whose public form is newer than 2.11."""

from __future__ import annotations

import torch
from torch import Tensor


def has_fp8(device: torch.device) -> bool:
    """Return whether a device has FP8 tensor cores."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def scaled_mm(
    x: Tensor,
    weight: Tensor,
    x_factors: Tensor,
    factors: Tensor,
    bias: Tensor | None,
    fast: bool = True,
) -> Tensor:
    """Return bfloat16 (x W^T) * x_factors * factors + bias of E4M3 x [M, K] and W [N, K].

    Its sums keep fewer bits than float32 has, as those of FP8 tensor cores do; unless they are
    fast, they are added to float32 ones every few columns.
    """
    bias = None if bias is None else bias.to(torch.bfloat16)
    scales = (x_factors[:, None], factors[None])
    return torch._scaled_mm(
        x, weight.t(), *scales, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def has_block_scaled_mm(device: torch.device) -> bool:
    """Return whether `block_scaled_mm` serves a device: cuBLAS 12.9 on Hopper has the product."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    version = tuple(map(int, torch.version.cuda.split(".")[:2]))
    return version >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def block_scaled_mm(x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor) -> Tensor:
    """Return bfloat16 x W^T of E4M3 x [M, K] and W [N, K] with float32 scales of blocks.

    x_scales [M, K / 128] are of 128 columns of a row, scales [N / 128, K / 128] of 128 x 128. M is
    a multiple of 4, N of 128, K of 512. Sums of 128 columns keep fewer bits than float32 has.
    """
    # cuBLAS reads the scales of x column by column, and those of W in rows of a multiple of four.
    # Versions of torch ask for different strides of other rows.
    by_columns = x_scales.t().contiguous().t()
    return torch._scaled_mm(x, weight.t(), by_columns, scales.t(), out_dtype=torch.bfloat16)
