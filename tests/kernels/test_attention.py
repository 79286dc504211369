"""Attention of few queries and what stands before it: kernels and references against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4pass.kernels.attention.naive import (
    COUNTERS,
    Cache,
    NewTokens,
    attention_ref,
    attention_span_ref,
    rotary_attention_ref,
)
from fp4pass.kernels.attention.triton import (
    attention_span_triton,
    attention_triton,
    rotary_attention_triton,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Case:
    """Sizes of attention, and what its mask is."""

    batch: int
    heads: int
    groups: int
    queries: int
    size: int
    width: int
    value_width: int
    mask: str = "filled"


CASES = {
    "one query, one head": Case(1, 1, 1, 1, 33, 64, 64),
    "grouped heads": Case(2, 8, 2, 1, 300, 128, 128),
    "a group of three heads": Case(2, 6, 2, 1, 70, 64, 64, "float"),
    "columns that are no power of two": Case(1, 4, 2, 2, 90, 80, 96, "window"),
    "16 queries": Case(1, 8, 2, 16, 100, 64, 64, "causal"),
    "a mask of each head": Case(2, 4, 2, 2, 50, 64, 64, "heads"),
    "nothing to read": Case(2, 4, 4, 1, 64, 64, 64, "nothing"),
    "wide heads": Case(1, 2, 1, 1, 40, 256, 256, "float"),
}


def mask_of(case: Case, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The first third of the keys is not read where a window is, and the last quarter nowhere."""
    size, queries = case.size, case.queries
    key, query = torch.arange(size), torch.arange(queries)[:, None]
    filled = (key < size - size // 4).expand(queries, size)
    mask = {
        "filled": filled,
        "window": filled & (key > size // 3 + query),
        "causal": filled & (key <= size // 2 + query),
        "nothing": filled.clone().fill_(False),
    }.get(case.mask, filled)[None, None]
    if case.mask == "heads":
        mask = mask & (torch.rand(case.batch, case.heads, queries, size) < 0.5)
    if case.mask == "nothing":
        mask = torch.stack((mask[0], filled[None]))
    if case.mask == "float":
        bias = torch.randn(case.batch, 1, queries, size)
        return bias.masked_fill(~mask, -torch.inf).to(device, dtype)
    return mask.to(device)


def inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys and values (in the memory of [B, S, groups, D]) and a mask."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q = torch.randn(case.batch, case.heads, case.queries, case.width)
    k = torch.randn(case.batch, case.size, case.groups, case.width).transpose(1, 2)
    v = torch.randn(case.batch, case.size, case.groups, case.value_width).transpose(1, 2)
    # What no query reads may hold anything.
    mask = mask_of(case, dtype, device)
    end = case.size - case.size // 4
    k[:, :, end:], v[:, :, end:] = torch.nan, torch.nan
    return *(each.to(device, dtype) for each in (q, k, v)), mask


def exact(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention in float64, the same of |v|, and a bound of the error of its logits."""
    count, end = q.shape[1] // k.shape[1], k.shape[2] - k.shape[2] // 4
    q, k, v = q.double(), k[:, :, :end].double(), v[:, :, :end].double()
    k, v = (each.repeat_interleave(count, 1) for each in (k, v))
    mask = mask[..., :end]
    bias = torch.zeros_like(mask, dtype=torch.float64)
    bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask.double()
    logits = scale * q @ k.mT + bias
    weights = torch.where(logits == -torch.inf, 0, (logits - logits.amax(-1, True)).exp())
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    finite = bias.masked_fill(bias == -torch.inf, 0)
    # A sum of D float32 products, and a number near 1 for the exponential.
    size = (scale * q.abs() @ k.abs().mT + finite.abs()).amax(-1, keepdim=True)
    slack = (q.shape[-1] + 4) * 2.0**-24 * size + 2.0**-20
    return (weights @ v).nan_to_num(), (weights @ v.abs()).nan_to_num(), slack


@pytest.mark.quick(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_attention_is_as_near_to_float64_as_its_dtype_lets_it(
    name: str, dtype: torch.dtype
) -> None:
    case = CASES[name]
    q, k, v, mask = inputs(case, dtype)
    scale = 0.7 * case.width**-0.5
    span, counters = attention_span_triton(mask)
    for found, expected in zip((span, counters), attention_span_ref(mask), strict=True):
        assert torch.equal(found, expected) and found.dtype == torch.int32
    expected, size, slack = exact(q, k, v, mask, scale)
    # Weights are rounded to the dtype of the values, as is the result.
    unit = torch.finfo(dtype).eps / 2
    bound = (unit + 2 * slack + case.size * 2.0**-24) * size * (1 + unit) + unit * expected.abs()
    for attend in (attention_triton, attention_ref):
        found = attend(q, Cache(k, v, mask, span, counters, scale))
        assert not counters.any()
        assert found.shape == (case.batch, case.queries, case.heads, case.value_width)
        assert found.dtype == dtype and found.is_contiguous()
        error = (found.transpose(1, 2).double() - expected).abs()
        assert (error <= bound + 1e-30).all()
        assert not case.mask == "nothing" or not found[0].any()


def test_keys_that_nothing_reads_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span that ends earlier hides what the mask would show."""
    q, k, v, mask = inputs(Case(1, 4, 2, 1, 200, 64, 64), torch.float32)
    span = torch.tensor([[30, 60]], dtype=torch.int32, device=q.device)
    inside = mask.clone()
    inside[..., :30], inside[..., 60:] = False, False
    counters = span.new_zeros(COUNTERS)
    found = attention_triton(q, Cache(k, v, mask, span, counters, 0.1))
    assert torch.equal(found, attention_triton(q, Cache(k, v, inside, span, counters, 0.1)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(
    "case", [Case(1, 32, 8, 1, 832, 128, 128), Case(2, 8, 2, 16, 3000, 128, 64)]
)
def test_replays_have_the_same_bits_after_poisoned_memory(case: Case) -> None:
    """Programs end in another order every time; the parts are added in one."""
    q, k, v, mask = inputs(case, torch.bfloat16)
    expected = attention_triton(q, Cache(k, v, mask, *attention_span_triton(mask), 0.1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        span, counters = attention_span_triton(mask)
        # The second call finds the zeros that the first one left.
        found = [attention_triton(q, Cache(k, v, mask, span, counters, 0.1)) for _ in range(2)]
    for _ in range(20):
        for each in (span, counters, *found):
            each.fill_(77)
        graph.replay()
        assert all(torch.equal(each, expected) for each in found)
        assert not counters.any()


def arguments(
    batch: int, tokens: int, heads: int, groups: int, width: int, norm: bool, dtype: torch.dtype
) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype)

    both = random(batch, tokens, (heads + groups) * width)
    return {
        # Halves of one product, as a layer for q and k at once leaves them.
        "q": both[..., : heads * width].unflatten(-1, (heads, width)),
        "k": both[..., heads * width :].unflatten(-1, (groups, width)),
        "v": random(batch, tokens, groups, 48),
        "q_weight": random(width) if norm else None,
        "k_weight": random(width) if norm else None,
        "eps": 1e-6,
        "cos": random(1, tokens, width),
        "sin": random(batch, tokens, width),
        # One that is not read, where there are two.
        "places": torch.tensor([9, 19, 3][:tokens], device=device),
        "keys": random(batch, groups, 20, width),
        "values": random(batch, groups, 20, 48),
        "mask": (torch.arange(20, device=device) < 17)[None, None, None],
        "scale": 0.1,
    }


@pytest.mark.quick(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 8, 2, 64), (2, 3, 6, 6, 80), (3, 1, 5, 1, 96)], ids=str)
@pytest.mark.parametrize("norm", [True, False])
def test_new_tokens_are_written_with_the_bits_of_eager_and_read(
    norm: bool, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    given = arguments(*sizes, norm, dtype)
    if norm:
        # The first position alone; the other tokens follow.
        given["places"] = torch.tensor(9, device=given["keys"].device)
    given["span"], given["counters"] = attention_span_ref(given["mask"])
    caches = [each.clone() for each in (given["keys"], given["values"])]
    new = NewTokens(*(given[name] for name in NewTokens._fields))
    cache = Cache(*(given[name] for name in Cache._fields))
    expected = rotary_attention_ref(given["q"], new, cache)
    written = cache._replace(keys=caches[0], values=caches[1])
    found = rotary_attention_triton(given["q"], new, written)
    assert not given["counters"].any()
    assert torch.equal(caches[1], given["values"])
    assert found.shape == expected.shape and found.dtype == dtype and found.is_contiguous()
    if not norm:
        assert torch.equal(caches[0], given["keys"])
    elif dtype == torch.float32:
        # The mean of squares is summed in another order.
        bound = 2.0**-21 * given["keys"].abs().max().item()
        torch.testing.assert_close(caches[0], given["keys"], rtol=0, atol=bound)
    else:
        # A number that is next to a rounding boundary may land on its other side.
        assert (caches[0] != given["keys"]).float().mean() < 0.01
    # Queries too, and weights are rounded to the dtype of the values.
    size = 2 * torch.finfo(dtype).eps * given["values"].abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=size)
