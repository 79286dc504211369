"""Reductions through memory that GPUs share; here two ranks are two streams of one GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp4pass import ops
from fp4pass.kernels.reduce.memory import LARGEST, Memory, count_of_words

pytestmark = pytest.mark.gpu
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture
def memories() -> list[Memory]:
    words = [torch.zeros(count_of_words(2), dtype=torch.int64, device="cuda") for _ in range(2)]
    addresses = [each.data_ptr() for each in words]
    return [Memory.of(each, addresses, rank) for rank, each in enumerate(words)]


def reduced(memories: list[Memory], inputs: list[Tensor], maximum: bool) -> list[Tensor]:
    """What each rank gets; their kernels run at one time."""
    from fp4pass.kernels.reduce.triton import all_reduce_triton

    # What is loaded first would wait for the other stream.
    for memory in memories:
        all_reduce_triton(inputs[0][:0], memory, maximum)
    torch.cuda.synchronize()
    found = []
    for memory, x in zip(memories, inputs, strict=True):
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(all_reduce_triton(x, memory, maximum))
    torch.cuda.synchronize()
    return found


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_both_ranks_get_the_sum_and_the_maximum(dtype: torch.dtype, memories: list[Memory]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    for count in (2, 4096, 130, 4, LARGEST // dtype.itemsize, 64, 4096):
        inputs = [
            torch.randn(count, generator=generator, device="cuda").to(dtype) for _ in range(2)
        ]
        exact = (inputs[0].float() + inputs[1].float()).to(dtype)
        largest = torch.maximum(*inputs)
        for maximum, expected in ((False, exact), (True, largest)):
            for found in reduced(memories, inputs, maximum):
                assert torch.equal(found, expected), (count, maximum)


@on_gpu
def test_a_maximum_keeps_nan(memories: list[Memory]) -> None:
    inputs = [torch.ones(4, device="cuda"), torch.full((4,), float("nan"), device="cuda")]
    assert all(each.isnan().all() for each in reduced(memories, inputs, True))


@on_gpu
def test_a_process_that_is_alone_gets_a_copy() -> None:
    x = torch.randn(3, 5, device="cuda").t()
    found = ops.all_reduce(x, "", False)
    assert torch.equal(found, x) and found.is_contiguous()
