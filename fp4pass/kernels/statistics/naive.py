"""Hessians of a layer's input, accumulated over calibration, and the magnitude of weights."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Columns of a block Hessian, whatever the format: a block of 16 reads the diagonal quarters.
HESSIAN_BLOCK = 32

# Dtypes whose products are exact in float32, so that tensor cores give them.
EXACT = (torch.bfloat16, torch.float16)

# Tokens that tensor cores add up: they round towards zero, and only sums of so few are as near as
# those of float32 products (docs/development/notes.md).
_TOKENS = 1024

# Elements of x in float32 at a time, so that a long batch needs no second copy.
_CHUNK = 1 << 22

# Bins of a histogram of float32 magnitudes: by their leading 11 bits, eight an octave.
BINS, _SHIFT = 1 << 11, 20


def observe_ref(
    x: Tensor, hessian: Tensor, count: Tensor, amax: Tensor, visible: Tensor | None = None
) -> None:
    """Add tokens x [..., K] to block Hessians (or none: empty), count and amax, in place."""
    # visible: bool, one for each token, those to add. amax is NaN once there was one.
    x = visible_rows(x, visible)
    padding = len(hessian) * HESSIAN_BLOCK - x.shape[-1]
    for chunk in _chunks(x, count, amax):
        if len(hessian):
            padded = torch.nn.functional.pad(chunk, (0, padding))
            blocks = padded.view(len(chunk), -1, HESSIAN_BLOCK).transpose(0, 1)  # [J, T, 32]
            hessian.baddbmm_(blocks.mT, blocks)


def observe_full_ref(
    x: Tensor, hessian: Tensor, count: Tensor, amax: Tensor, visible: Tensor | None = None
) -> None:
    """Add tokens x [..., K] to the whole Hessian [K, K], count and amax, in place."""
    x = visible_rows(x, visible)
    with ieee_products():
        if x.is_cuda and x.dtype in EXACT:
            _observe_on_tensor_cores(x, hessian, count, amax)
            return
        for chunk in _chunks(x, count, amax):
            hessian.addmm_(chunk.mT, chunk)


def visible_rows(x: Tensor, visible: Tensor | None) -> Tensor:
    """Return the visible tokens [T, K] of x [..., K], x itself where all are."""
    return x if visible is None else x.reshape(-1, x.shape[-1])[visible]


def _observe_on_tensor_cores(x: Tensor, hessian: Tensor, count: Tensor, amax: Tensor) -> None:
    """Add tokens in a dtype of `EXACT`, on a GPU, as `observe_full_ref` does."""
    tokens = x.reshape(-1, x.shape[-1])
    count += len(tokens)
    if not tokens.numel():
        return
    torch.maximum(amax, torch.stack(tokens.aminmax()).abs().max().float(), out=amax)
    for part in tokens.split(_TOKENS):
        torch.addmm(hessian, part.mT, part, out_dtype=torch.float32, out=hessian)


def observe_cross_ref(x: Tensor, reference: Tensor, cross: Tensor) -> None:
    """Add (a - x) x^T of each token to `cross` [K, K], in place."""
    # x, reference: [..., K], the inputs of the quantized model and the a of the original one.
    rows = max(1, _CHUNK // x.shape[-1])
    pairs = [each.reshape(-1, x.shape[-1]).split(rows) for each in (x, reference)]
    with ieee_products():
        for quantized, original in zip(*pairs, strict=True):
            quantized = quantized.to(torch.float32)
            cross.addmm_((original.to(torch.float32) - quantized).mT, quantized)


def observe_magnitudes_ref(x: Tensor, counts: Tensor, visible: Tensor | None = None) -> None:
    """Count the amax of each 16 columns of tokens x [..., K] in a histogram [BINS], in place."""
    blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % 16)).view(-1, -(-x.shape[-1] // 16), 16)
    largest = torch.maximum(blocks.amax(2), -blocks.amin(2)).abs().float()
    bins = largest.view(torch.int32) >> _SHIFT
    # Hidden tokens count as zeros, which `headroom` leaves out.
    bins = bins if visible is None else bins * visible.unsqueeze(1)
    counts.index_add_(0, bins.flatten(), torch.ones_like(bins, dtype=torch.int64).flatten())


def headroom(counts: Tensor) -> float:
    """Return 16,384 times the magnitude, up to a bin, that 1 % of the blocks do not exceed."""
    # So do scales of ModelOpt 0.47. Normal E4M3 scales, which 99 % then keep, span 28,672.
    sums = counts.flatten()[1:].cumsum(0)
    first = ((sums < -(-sums[-1] // 100)).sum() + 2 << _SHIFT).int()
    return 16384.0 * float(first.view(torch.float32))


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
    """Multiply float32 in float32 and add products in it, whatever the process allows torch."""
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    settings: tuple[tuple[Any, str, str | bool], ...] = (
        (cuda, "fp32_precision", "ieee"),
        (cpu, "fp32_precision", "ieee"),
        (cuda, "allow_fp16_accumulation", False),
    )
    before = [getattr(backend, name) for backend, name, _ in settings]
    for backend, name, value in settings:
        setattr(backend, name, value)
    try:
        yield
    finally:
        for (backend, name, _), value in zip(settings, before, strict=True):
            setattr(backend, name, value)


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


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros on the CPU, in memory that the system gives once they are read or written."""
    # A whole Hessian on its way to a GPU would otherwise be written here first.
    size = math.prod(shape) * dtype.itemsize
    if size < mmap.PAGESIZE:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)


def moved_totals(totals: Sequence[Tensor], device: torch.device, has_seen: bool) -> list[Tensor]:
    """Return totals on a device; made there, and not copied, before anything was added."""
    # A compiler would merge those that two observers make in one graph.
    if has_seen or torch.compiler.is_compiling():
        return [total.to(device) for total in totals]
    return [torch.zeros(total.shape, dtype=total.dtype, device=device) for total in totals]
