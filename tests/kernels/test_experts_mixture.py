"""Both products of experts, their gate and their sum, in few launches, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exact_products import DEVICE, GPU, assert_each_kernel_waits, numbers, products
from kernel_cases import flat
from kernels.test_experts import FEW, MANY, PAIRS, ROWS, routed, stack
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import PackedWeight
from fp4pass.kernels.experts.matmul_triton import route, route_and_arrange
from fp4pass.kernels.experts.naive import Gate
from fp4pass.kernels.experts.triton import ExpertTiles, mix
from fp4pass.kernels.linear.decode_triton import InputRows, arranged

experts_mixture_triton = flat("experts_mixture")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SILU = Gate("silu")
LIMITED = Gate("silu", interleaved=True, slope=1.702, shift=1.0, limit=0.7)
NVFP4, MXFP4 = get_format("nvfp4"), get_format("mxfp4")


def check(
    found: Tensor, x: Tensor, ids: Tensor, routing: Tensor, both: tuple[PackedWeight, PackedWeight],
    gate: Gate, fmt: Format,
) -> None:  # fmt: skip
    """Float32 sums, and roundings to bfloat16 of what is between the products and of products."""
    half, float32 = 2.0**-8, 2.0**-23
    product, mass = products(x, ids, both[0], fmt)
    h = gate(product)
    # By how much gates move: silu has slopes up to 1.1, and 1.1 |g| is more than it is.
    slack = (x.shape[1] + 4) * float32 * mass
    halves = (slice(None, None, 2), slice(1, None, 2)) if gate.interleaved else None
    parts = [t[..., halves[i]] if halves else t.chunk(2, -1)[i] for t in (product, slack)
             for i in range(2)]  # fmt: skip
    g, up, of_g, of_up = parts
    moved = 1.1 * (up.abs() + gate.shift) * of_g + 1.1 * g.abs() * of_up + 16 * float32 * h.abs()
    moved = moved + half * (h.abs() + moved)
    y, mass = products(h, ids, both[1], fmt)
    _, carried = products(moved, ids, both[1]._replace(bias=None), fmt)
    error = carried + (h.shape[-1] + 4) * float32 * (mass + carried)
    error = error + half * (y.abs() + error)
    weights = routing.double().unsqueeze(-1)
    expected, error = (y * weights).sum(1), (error * weights.abs()).sum(1)
    error = error + 2 * half * (expected.abs() + error)
    difference = (found.double() - expected).abs()
    assert (difference <= error).all(), (difference / error).max()


def run(
    fmt: Format,
    ids: Tensor,
    gate: Gate,
    *,
    hidden: int = 64,
    inner: int = 48,
    experts: int = 5,
    biased: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    tiles: ExpertTiles | None = None,
) -> Tensor:
    bias = [numbers(experts, n) if biased else None for n in (2 * inner, hidden)]
    both = (
        PackedWeight(*stack(fmt, experts, 2 * inner, hidden), bias[0]),
        PackedWeight(*stack(fmt, experts, hidden, inner), bias[1]),
    )
    x = numbers(len(ids), hidden, dtype=torch.bfloat16) * 0.125
    routing = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2))
    routing = (routing - 0.3).to(DEVICE, dtype)
    out = x.new_empty((len(ids), hidden))
    if tiles is None:
        options = (gate.activation, gate.interleaved, gate.slope, gate.shift, gate.limit)
        out = experts_mixture_triton(x, ids, routing, *both[0], *both[1], *options, fmt)
    else:
        mix(x, ids, routing, out, *both, gate, fmt, (tiles, tiles))
    check(out, x, ids, routing, both, gate, fmt)
    return out


CASES = {
    "pairs": (NVFP4, 3, PAIRS, SILU),
    "pairs, limited": (MXFP4, 3, PAIRS, LIMITED),
    "few rows": (NVFP4, 9, FEW, LIMITED),
    "few rows, gelu": (MXFP4, 9, FEW, Gate("gelu_tanh")),
    "rows": (NVFP4.with_multiplier(), 9, ROWS, SILU),
    "rows, limited": (MXFP4, 9, ROWS, LIMITED),
    "rest": (NVFP4, 60, MANY, Gate("gelu")),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "case",
    # The others hold what these do, of another gate or format.
    [
        pytest.param(
            c,
            marks=pytest.mark.slow
            if c in ("pairs", "pairs, limited", "few rows, gelu", "rows, limited")
            else (),
        )
        for c in CASES
    ],
)
def test_every_kernel(case: str) -> None:
    """With biases and without, experts of none, and K that no step divides."""
    fmt, tokens, tiles, gate = CASES[case]
    ids = routed(tokens, 3 if tiles is PAIRS else 2, 5)
    ids[ids == 1] = 2
    run(fmt, ids, gate, inner=96 if fmt is MXFP4 else 176, tiles=tiles)
    run(fmt, ids, gate, hidden=96, tiles=tiles, biased=False, dtype=torch.float32, inner=32)


@pytest.mark.parametrize("tokens", [1, 7])
def test_tokens_without_experts(tokens: int) -> None:
    """They are zeros, whatever weights they have; those of no token are no rows."""
    ids = torch.full((tokens, 2), 5, device=DEVICE)
    assert not run(NVFP4, ids, SILU).any()
    assert run(NVFP4, ids[:0], SILU).shape == (0, 64)


def test_sorted_in_the_launch_that_routes() -> None:
    """What `route` and `arranged` give."""
    x, ids = numbers(70, 176, dtype=torch.bfloat16), routed(70, 2, 3)
    (order, tiles), out = route_and_arrange(ids, 3, 16, x, 16, NVFP4)
    expected = route(ids, 3, 16)
    assert torch.equal(order, expected[0]) and torch.equal(tiles, expected[1])
    assert torch.equal(out, arranged(InputRows.of_numbers(x), 70, 176, 16, NVFP4, True))


class TestGpu:
    pytestmark = GPU

    @pytest.mark.parametrize("tokens", [1, 4, 16, 64, 256, 2048])
    def test_layers(self, tokens: int) -> None:
        """The sizes of Qwen3-30B-A3B and of GPT-OSS-20B, and the same bits every time."""
        for fmt, gate, experts, k, hidden, inner in (
            (NVFP4, SILU, 128, 8, 2048, 768),
            (MXFP4, LIMITED, 32, 4, 2880, 2880),
            (NVFP4, LIMITED, 32, 4, 2880, 2880),
        ):
            ids = torch.rand(tokens, experts, device=DEVICE).topk(k, -1).indices
            sizes = dict(hidden=hidden, inner=inner, experts=experts)
            first, again = (run(fmt, ids, gate, **sizes) for _ in range(2))
            assert torch.equal(first, again)

    @pytest.mark.parametrize("tokens", [1, 16, 256, 1024])
    def test_each_kernel_waits_for_the_one_before(self, tokens: int) -> None:
        """Mixtures of what the last one wrote, of ids just written."""
        both = (*stack(NVFP4, 16, 8192, 2048), None, *stack(NVFP4, 16, 2048, 4096), None)
        start = numbers(tokens, 2048, dtype=torch.bfloat16)
        ids = [torch.rand(tokens, 16, device=DEVICE).topk(2, -1).indices for _ in range(3)]
        late, routing = torch.zeros_like(ids[0]), torch.full((tokens, 2), 2.0**-24, device=DEVICE)

        def chain(wait: Callable[[], None]) -> Tensor:
            x = start
            for each in ids:
                late.copy_(each)
                wait()
                options = ("silu", False, 1.0, 0.0, None, NVFP4)
                y = experts_mixture_triton(x, late, routing, *both, *options)
                wait()
                late.zero_()
                x = y.tanh()
            return x

        assert_each_kernel_waits(chain, eager=False)
