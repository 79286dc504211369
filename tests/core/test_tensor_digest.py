"""A digest of tensors: every byte counts, and it is the same wherever and however they lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fp4pass.core import tensor_digest
from fp4pass.core.tensor_digest import digest_tensors

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    ],
)


def random_bytes(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (count,), dtype=torch.uint8, generator=generator)


def digest(tensor: Tensor) -> str:
    found = digest_tensors({"weight": tensor})
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flipped_bit_anywhere_is_another_digest(dtype: torch.dtype) -> None:
    # Three rows of words and what is left of a fourth one.
    size = (3 * tensor_digest._ROW + 9 * 16) // dtype.itemsize * dtype.itemsize
    raw = random_bytes(size)
    before = digest(raw.view(dtype))
    assert digest(raw.clone().view(dtype)) == before
    for place in (0, 1, 31, tensor_digest._ROW, 2 * tensor_digest._ROW - 1, size - 1):
        other = raw.clone()
        other[place] ^= 1
        assert digest(other.view(dtype)) != before, place


def test_what_a_plain_sum_does_not_see() -> None:
    weight = torch.randn(8, tensor_digest._WORDS).bfloat16()
    before = digest(weight)
    signs = weight.clone()
    # The top bits of four words of 64 bits.
    signs.view(-1)[[3, 7, 11, 15]] *= -1
    swapped = weight.clone()
    swapped[0, :2] = weight[0, [1, 0]]
    rows = weight.roll(1, 0)
    inside = weight.clone()
    inside[2:5, 40:90] *= -3
    # Words at distances of powers of two: no key comes twice.
    distances = [1 << i for i in range(tensor_digest._WORDS.bit_length() - 1)]
    words = [weight.clone() for _ in distances]
    for other, distance in zip(words, distances, strict=True):
        pair = other.view(-1).view(torch.int32)
        pair[[0, distance]] = pair[[distance, 0]]
    others = [signs, swapped, rows, inside, *words]
    assert len({before, *map(digest, others)}) == 1 + len(others)


def test_name_dtype_and_shape_count() -> None:
    weight = torch.zeros(64, 32)
    others = [weight.view(32, 64), weight.view(torch.int32), weight[:63], weight.new_zeros(65, 32)]
    found = {digest(weight), *map(digest, others), digest_tensors({"other": weight})}
    assert len(found) == 6
    empty = torch.zeros(0, 3)
    assert digest(empty) == digest(empty.clone()) != digest(torch.zeros(3, 0))


@pytest.mark.parametrize("shape", [(1024, 256), (257, 129), (3, 500, 130), (40000, 1)])
def test_how_it_lies_in_memory_does_not_count(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(shape).bfloat16()
    expected = digest(weight)
    assert digest(weight.mT.contiguous().mT) == expected
    assert digest(torch.cat([weight, weight], -1)[..., : shape[-1]]) == expected
    # At an odd place of what it is a view of.
    flat = torch.cat([weight.new_zeros(1), weight.flatten()])
    assert digest(flat[1:].view(shape)) == expected
    assert digest(nn.Parameter(weight)) == expected
    monkeypatch.setattr(tensor_digest, "_CPU_CHUNK", tensor_digest._ROW)
    assert digest(weight) == digest(weight.mT.contiguous().mT) == expected


@pytest.mark.parametrize("device", [GPU])
def test_the_digest_of_a_gpu_is_that_of_the_cpu(device: str) -> None:
    tensors = {str(n): torch.randn(n, 1030).bfloat16() for n in (1, 700, 40000)}
    there = {name: tensor.to(device) for name, tensor in tensors.items()}
    assert digest_tensors(there) == digest_tensors(tensors)
    assert digest_tensors({**there, "1": tensors["1"]}) == digest_tensors(tensors)


def test_what_has_no_bytes_here_has_no_digest() -> None:
    meta, sparse = torch.empty(3, device="meta"), torch.eye(3).to_sparse()
    for tensor in (meta, sparse):
        assert digest_tensors({"a": torch.zeros(3), "b": tensor}) is None
