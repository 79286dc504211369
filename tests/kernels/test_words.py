"""Tensors are read as wider words whatever their sizes and wherever they lie in memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernels.cases import DEVICE, seeded
from torch import Tensor

from fp4pass.core.formats import get_format
from fp4pass.kernels.common.tiles import as_words, wider
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.dequantize.triton import dequantize_triton
from fp4pass.kernels.quantize.naive import dynamic_global_scale_ref, quantize_ref
from fp4pass.kernels.quantize.triton import dynamic_global_scale_triton, quantize_triton
from fp4pass.parity.codebook_triton import dequantize_codebook_triton, quantize_codebook_triton
from fp4pass.parity.codebooks import dequantize_codebook_ref, get_codebook, quantize_codebook_ref

# Bytes before a storage begins, and elements before a tensor does: all ways to be aligned or not.
PLACES = list(itertools.product((0, 4, 2, 8), (0, 1, 2, 4, 8)))


def placed(x: Tensor, start: int, offset: int) -> Tensor:
    """Return x in a storage that begins `start` bytes off, behind `offset` elements."""
    if DEVICE == "cuda":
        start = 0
    if start % x.element_size():
        start = x.element_size()
    memory = torch.zeros(start + (offset + x.numel()) * x.element_size(), dtype=torch.uint8)
    memory = memory.to(DEVICE)
    storage = memory
    if start:
        # Through DLPack: a storage whose first byte is in the middle of another.
        storage = torch.frombuffer(memory.numpy(), dtype=torch.uint8, offset=start)
    flat = storage.view(x.dtype)[offset:]
    flat.copy_(x.flatten())
    assert flat.storage_offset() == offset
    return flat.view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_last_word_ends_in_zeros(dtype: torch.dtype) -> None:
    read = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    for count, (start, offset) in itertools.product((1, 2, 3, 5, 7, 8), PLACES):
        x = torch.arange(1, count + 1).to(dtype)
        words = as_words(placed(x, start, offset))
        found = words.view(read).cpu()
        assert torch.equal(found[:count], x.to(read)) and not found[count:].any()
        assert words.data_ptr() % 8 == 0 and len(found) - count < 8 // read.itemsize
    assert as_words(torch.ones((), dtype=dtype)).numel() == 1


def test_what_is_aligned_is_not_copied() -> None:
    x = torch.arange(64, dtype=torch.uint8, device=DEVICE)
    for dtype, start in ((torch.int32, 4), (torch.int64, 8)):
        assert wider(x[start:], dtype).data_ptr() == x.data_ptr() + start


def test_the_global_scale_of_few_numbers() -> None:
    """As of the amax [1] that processes share."""
    fmt = get_format("nvfp4")
    for shape, dtype in itertools.product([(), (1,), (7, 1)], (torch.float32, torch.bfloat16)):
        x = torch.full(shape, -300.0, dtype=dtype)
        found = dynamic_global_scale_triton(placed(x, 4, 1), fmt)
        assert torch.equal(found.cpu(), dynamic_global_scale_ref(x, fmt)), (shape, dtype)


def test_quantizing_and_back_from_anywhere() -> None:
    generator = seeded(0)
    x = torch.randn(1, 32, generator=generator)
    fmt, book = get_format("nvfp4"), get_codebook("nf4:32")
    factor = torch.ones(1)
    packed, scale = quantize_ref(x, factor, fmt)
    codes, absmax = quantize_codebook_ref(x, book)
    dense = dequantize_ref(packed, scale, factor, fmt, torch.float32)
    looked_up = dequantize_codebook_ref(codes, absmax, book, x.shape, torch.float32)
    factor, scale, absmax = (each.to(DEVICE) for each in (factor, scale, absmax))
    for start, offset in ((0, 1), (4, 1), (4, 4)):
        found = quantize_triton(placed(x, start, offset), factor, fmt)
        assert torch.equal(found[0].cpu(), packed)
        stored = placed(packed, start, offset), scale, factor
        assert torch.equal(dequantize_triton(*stored, fmt, torch.float32).cpu(), dense)
        found = quantize_codebook_triton(placed(x, start, offset), book)
        assert torch.equal(found[0].cpu(), codes)
        where = placed(codes, start, offset), absmax, book, x.shape, torch.float32
        assert torch.equal(dequantize_codebook_triton(*where).cpu(), looked_up)
