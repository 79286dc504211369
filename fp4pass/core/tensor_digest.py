"""A digest of all bytes of tensors, equal on every device and computed where they are."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

# 32-bit words that have a sum; what is left of a tensor goes into the digest as it is.
_WORDS = 1 << 13
_ROW = 4 * _WORDS

# Sums of each row. Keys of one are independent of those of another.
_LANES = 2

# Bytes at a time: as many rows as stay in the cache of a core, or keep a GPU busy.
_CPU_CHUNK = 16 * _ROW
_GPU_CHUNK = 1 << 26


def digest_tensors(tensors: Mapping[str, Tensor]) -> str | None:
    """Return a digest of names, dtypes, shapes and all bytes; None if a tensor has no bytes here.

    Such are tensors on the meta device, sparse ones, and those of a subclass, whose bytes are not
    all that they stand for.

    A row of words w has the sums of a_i w_i modulo 2^64, with keys a_i that are uniform and do not
    depend on w. Two rows that differ in word i have an equal sum if a_i (w_i - w'_i) is one certain
    number. As |w_i - w'_i| < 2^32, at most 2^31 of the 2^64 keys make it so: the chance is 2^-33,
    and 2^-66 for both sums. Words of 64 bits would not do: two flipped top bits leave every sum of
    odd keys as it is. Of the sums, and of bytes behind the last row, SHA-256 is taken.
    """
    folded: dict[str, Tensor] = {}
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not is_plain or tensor.is_meta or tensor.is_quantized:
            return None
        total.update(f"{name!r} {tensor.dtype} {tuple(tensor.shape)};".encode())
        folded[name] = torch.cat(list(_folded(tensor.resolve_conj().resolve_neg())))
    host: dict[str, Tensor] = {}
    for device in {each.device for each in folded.values()}:
        there = {name: each for name, each in folded.items() if each.device == device}
        # One copy for all of them.
        together = torch.cat(list(there.values())).cpu()
        sizes = [len(each) for each in there.values()]
        host.update(zip(there, together.split(sizes), strict=True))
    for name in folded:
        total.update(host[name].numpy().data)
    return total.hexdigest()


def _folded(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of the sums of all whole rows, then of what is behind them."""
    yield torch.empty(0, dtype=torch.uint8, device=tensor.device)
    keys = _keys(tensor.device)
    wide = products = keys.new_empty(0, _WORDS)
    for raw in _chunks(tensor):
        rows = len(raw) // _ROW
        if rows:
            # The same for all chunks: new memory costs a CPU more than the products.
            if rows > len(products):
                wide, products = (keys.new_empty(rows, _WORDS) for _ in range(2))
            words = raw[: rows * _ROW].view(torch.int32).view(rows, _WORDS)
            # A GPU widens while it multiplies.
            words = words if words.is_cuda else wide[:rows].copy_(words)
            sums = [torch.mul(words, each, out=products[:rows]).sum(1) for each in keys]
            yield torch.stack(sums, 1).view(torch.uint8).flatten()
        yield raw[rows * _ROW :]


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a tensor in the order of its elements: whole rows, but for the last."""
    size = _GPU_CHUNK if tensor.is_cuda else _CPU_CHUNK * torch.get_num_threads()
    if tensor.is_contiguous():
        raw = tensor.reshape(-1).view(torch.uint8)
        parts: tuple[Tensor, ...] = raw.split(size)
    elif tensor.numel():
        # Each part is whole rows, so that only the last leaves a rest.
        step = _ROW // math.gcd(_ROW, tensor[0].nbytes)
        step *= max(size // (step * tensor[0].nbytes), 1)
        parts = tensor.split(step)
    else:
        parts = ()
    for part in parts:
        raw = part.contiguous().view(-1).view(torch.uint8)
        # A view of wider words needs a multiple of their size in front.
        yield raw if raw.storage_offset() % 4 == 0 else raw.clone()


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """Return the keys of the words of a row, int64 [_LANES, _WORDS], the same everywhere."""
    raw = hashlib.shake_256(b"fp4pass: a digest of tensors").digest(8 * _LANES * _WORDS)
    keys = torch.frombuffer(bytearray(raw), dtype=torch.int64)
    return keys.view(_LANES, _WORDS).to(device)
