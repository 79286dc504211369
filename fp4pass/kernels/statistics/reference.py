"""Hessians of a layer's input, accumulated over calibration, and errors of a quantized weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...core.formats import Format
from ..dequantize.reference import dequantize_ref

# Columns of a block Hessian, whatever the format: a block of 16 reads the diagonal quarters.
HESSIAN_BLOCK = 32

# Elements of x in float32 at a time, so that a long batch needs no second copy.
_CHUNK = 1 << 22

# Elements of a weight in one pass.
_TILE = 1 << 21


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


def output_energy(rows: Tensor, hessian: Tensor) -> float:
    """Return tr V H V^T, the squared length of V x over all tokens x, of rows V [N, K]."""
    total = torch.zeros((), dtype=torch.float64, device=rows.device)
    with ieee_products():
        for part in rows.split(max(1, _CHUNK // rows.shape[1])):
            part = part.to(torch.float32)
            total += ((part @ hessian) * part).sum(dtype=torch.float64)
    return max(float(total), 0.0)


def errors_ref(
    weight: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    hessian: Tensor | None,
    fmt: Format,
) -> Tensor:
    """Return the squared errors of a quantized weight and what they relate to: float64 [4]."""
    # |W - Q|^2, |W|^2, tr (W - Q) H (W - Q)^T and tr W H W^T; the last two are 0 without Hessians.
    rows, columns = weight.shape
    sums = torch.zeros(4, dtype=torch.float64, device=weight.device)
    for start in range(0, rows, max(1, _TILE // columns)):
        part = slice(start, start + max(1, _TILE // columns))
        dense = weight[part].float()
        quantized = dequantize_ref(packed[part], scale[part], global_scale, fmt, torch.float32)
        both = torch.stack((dense - quantized, dense)).double()  # [2, R, K]
        sums[:2] += both.square().sum((1, 2))
        if hessian is not None:
            padding = hessian.shape[0] * HESSIAN_BLOCK - columns
            padded = torch.nn.functional.pad(both, (0, padding))
            blocks = padded.flatten(0, 1).view(-1, len(hessian), HESSIAN_BLOCK).transpose(0, 1)
            energy = (blocks @ hessian.double() * blocks).sum((0, 2))
            sums[2:] += energy.view(2, -1).sum(1)
    return sums
