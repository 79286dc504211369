"""Hessians of a layer's input, accumulated over calibration, and the magnitude of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Columns of a block Hessian, whatever the format: a block of 16 reads the diagonal quarters.
HESSIAN_BLOCK = 32

# Elements of x in float32 at a time, so that a long batch needs no second copy.
_CHUNK = 1 << 22


def observe_ref(x: Tensor, hessian: Tensor, count: Tensor, amax: Tensor) -> None:
    """Add tokens x [..., K] to block Hessians (or none: empty), count and amax, in place."""
    # amax is NaN once there was one.
    padding = len(hessian) * HESSIAN_BLOCK - x.shape[-1]
    for chunk in _chunks(x, count, amax):
        if len(hessian):
            padded = torch.nn.functional.pad(chunk, (0, padding))
            blocks = padded.view(len(chunk), -1, HESSIAN_BLOCK).transpose(0, 1)  # [J, T, 32]
            hessian.baddbmm_(blocks.mT, blocks)


def observe_full_ref(x: Tensor, hessian: Tensor, count: Tensor, amax: Tensor) -> None:
    """Add tokens x [..., K] to the whole Hessian [K, K], count and amax, in place."""
    with ieee_products():
        for chunk in _chunks(x, count, amax):
            hessian.addmm_(chunk.mT, chunk)


def observe_cross_ref(x: Tensor, reference: Tensor, cross: Tensor) -> None:
    """Add (a - x) x^T of each token to `cross` [K, K], in place."""
    # x, reference: [..., K], the inputs of the quantized model and the a of the original one.
    rows = max(1, _CHUNK // x.shape[-1])
    pairs = [each.reshape(-1, x.shape[-1]).split(rows) for each in (x, reference)]
    with ieee_products():
        for quantized, original in zip(*pairs, strict=True):
            quantized = quantized.to(torch.float32)
            cross.addmm_((original.to(torch.float32) - quantized).mT, quantized)


def _chunks(x: Tensor, count: Tensor, amax: Tensor) -> Iterator[Tensor]:
    """Yield the tokens of x [..., K] as float32 [T, K], and update count and amax."""
    tokens = x.reshape(-1, x.shape[-1])
    count += len(tokens)
    if not tokens.numel():
        return
    for chunk in tokens.split(max(1, _CHUNK // x.shape[-1])):
        chunk = chunk.to(torch.float32)
        torch.maximum(amax, chunk.abs().amax(), out=amax)
        yield chunk


@contextmanager
def ieee_products() -> Iterator[None]:
    """Multiply float32 in float32, whatever `torch.set_float32_matmul_precision` says."""
    cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    backends = (torch.backends.cuda.matmul, cpu)
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def diagonal_blocks(hessian: Tensor, block: int = HESSIAN_BLOCK) -> Tensor:
    """Return a copy of the diagonal blocks [ceil(K / n), n, n] of [K, K], padded with zeros."""
    if padding := -len(hessian) % block:
        hessian = torch.nn.functional.pad(hessian, (0, padding, 0, padding))
    blocks = hessian.unflatten(0, (-1, block)).unflatten(2, (-1, block))  # [J, n, J, n]
    blocks = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return blocks.clone(memory_format=torch.contiguous_format)


def weight_amax(weight: Tensor) -> float:
    """Return the largest magnitude in float32, not finite if any element is not."""
    low, high = torch.aminmax(weight.detach())
    return max(abs(float(low.float())), abs(float(high.float())))
