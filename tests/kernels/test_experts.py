"""Products with packed experts, and whole mixtures, on a GPU or interpreted, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from blocks import VARIANTS
from exact_products import (
    DEVICE,
    GPU,
    assert_each_kernel_waits,
    assert_rounded,
    numbers,
    products,
    weight,
)
from kernel_cases import DTYPES, covering, flat
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import PackedWeight
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.experts import triton as module
from fp4pass.kernels.experts.naive import Gate
from fp4pass.kernels.experts.triton import ExpertTiles, config, mix, route
from fp4pass.kernels.linear.decode_triton import InputRows, arranged
from fp4pass.kernels.quantize.naive import quantize_ref

experts_linear_triton = flat("experts_linear")
experts_linear_quantized_triton = flat("experts_linear_quantized")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PAIRS = ExpertTiles(1, 16, 16, 4, 3, warps_share=True)
FEW = ExpertTiles(8, 32, 16, 2, 3, warps_share=True)
EIGHT = ExpertTiles(8, 64, 16, 4, 3)
ROWS = ExpertTiles(16, 64, 16, 4, 3)
# Tiles of the rest of an expert are smaller.
MANY = ExpertTiles(64, 64, 8, 4, 3, rest=32, rows_stay=True)


def stack(fmt: Format, experts: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights whose global scales differ and are no powers of two."""
    packed, scale = weight(fmt, experts * n, k)
    stored = torch.linspace(0.3, 3.7, experts, device=DEVICE) if fmt.has_global_scale else None
    return packed.view(experts, n, -1), scale.view(experts, n, -1), stored


def routed(tokens: int, k: int, experts: int, seed: int = 0) -> Tensor:
    """The experts of tokens, some of which are none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (tokens, k), generator=generator)
    outside = torch.randint(0, 12, (tokens, k), generator=generator)
    ids = torch.where(outside == 0, experts, torch.where(outside == 1, -1, ids))
    return ids.to(DEVICE)


def check(y: Tensor, x: Tensor, ids: Tensor, stored: PackedWeight, fmt: Format) -> None:
    assert_rounded(y, *products(x, ids, stored, fmt), x.shape[-1])
    assert not y[(ids < 0) | (ids >= len(stored.packed))].any()


def run(
    fmt: Format,
    dtype: torch.dtype,
    ids: Tensor,
    n: int,
    k: int,
    *,
    each: bool = False,
    experts: int = 5,
    biased: bool = True,
    tiles: ExpertTiles | None = None,
    quantized: bool = False,
) -> Tensor:
    shape = (*ids.shape, k) if each else (len(ids), k)
    x, weights = numbers(*shape, dtype=dtype), stack(fmt, experts, n, k)
    bias = numbers(experts, n) if biased else None
    if quantized:
        stored = torch.tensor([0.37], device=DEVICE) if fmt.has_global_scale else None
        codes = quantize_ref(x, stored, fmt)
        y = experts_linear_quantized_triton(x, *codes, stored, ids, *weights, bias, fmt)
        x = dequantize_ref(*codes, stored, fmt, torch.float64)
    elif tiles is None:
        y = experts_linear_triton(x, ids, *weights, bias, fmt)
    else:
        y = x.new_empty((*ids.shape, n))
        stored = PackedWeight(*weights, bias)
        module.multiply(InputRows.of_numbers(x), ids, stored, y, not each, fmt, tiles)
    assert y.dtype == dtype
    check(y, x, ids, PackedWeight(*weights, bias), fmt)
    return y


@pytest.mark.quick(2)
@covering(
    ("fmt", "dtype", "each", "quantized"),
    [get_format("nvfp4").with_multiplier(), *VARIANTS],
    DTYPES, (False, True), (False, True),
)  # fmt: skip
def test_every_format(fmt: Format, dtype: torch.dtype, each: bool, quantized: bool) -> None:
    """One token, few and more rows for each expert, and none at all."""
    for tokens, n, blocks in ((1, 33, 5), (7, 17, 3), (0, 5, 2)):
        ids = routed(tokens, 2, 5)
        run(fmt, dtype, ids, n, blocks * fmt.block, each=each, quantized=quantized)


TILES = [(tiles, k) for tiles in (PAIRS, FEW, ROWS, MANY) for k in (512, 80)]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("tiles", "k"), TILES, ids=str)
def test_every_kernel(tiles: ExpertTiles, k: int) -> None:
    """Whole steps and not; experts of many rows, of one and of none; a row that all k share."""
    fmt = get_format("nvfp4")
    ids = routed(12 if tiles.m > 1 else 2, 2, 3)
    ids[ids == 1] = 2
    ids[0, 0] = 0
    for each in (False, True):
        run(fmt, torch.bfloat16, ids, 35, k, each=each, experts=3, tiles=tiles, biased=each)


@pytest.mark.quick(2)
@pytest.mark.parametrize("last", [127, 252])
@pytest.mark.parametrize("tiles", [PAIRS, FEW, EIGHT, ROWS], ids=str)
def test_powers_of_two_are_exact(tiles: ExpertTiles, last: int) -> None:
    """Rows of the identity give columns of the weight: of scales below 2, and of all."""
    fmt = get_format("mxfp4")
    step = 1 if DEVICE == "cuda" else 9
    scale = torch.arange(last, -1, -step, device=DEVICE).to(torch.uint8).unsqueeze(1)
    codes = torch.arange(fmt.block // 2, dtype=torch.uint8, device=DEVICE)
    packed = ((codes * 34 + 16) ^ 0x77).repeat(len(scale), 1)
    eye = torch.eye(fmt.block, dtype=torch.bfloat16, device=DEVICE)[: 16 : (step + 1) // 2]
    ids = torch.zeros(len(eye), 1, dtype=torch.int64, device=DEVICE)
    y = eye.new_empty(len(eye), 1, len(scale))
    stored = PackedWeight(packed.unsqueeze(0), scale.unsqueeze(0), None)
    module.multiply(InputRows.of_numbers(eye), ids, stored, y, True, fmt, tiles)
    expected = dequantize_ref(packed, scale, None, fmt, torch.bfloat16)[:, : 16 : (step + 1) // 2]
    assert torch.equal(y[:, 0], expected.t())


def test_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs of each expert in their order, all in one tile, in more steps than one."""
    monkeypatch.setattr("fp4pass.kernels.experts.triton._PAIRS", 64)
    for tokens, experts, rows in ((1, 3, 8), (70, 3, 16), (9, 12, 8)):
        ids = routed(tokens, 2, experts)
        (order, tiles), _ = route(ids, experts, rows)
        known = torch.where((ids < 0) | (ids >= experts), experts, ids).flatten()
        assert torch.equal(order.long(), known.sort(stable=True).indices)
        seen = torch.zeros_like(known)
        for expert, start, end in tiles.tolist():
            if start < end:
                assert end - start <= rows
                assert (known[order[start:end].long()] == expert).all()
                seen[start:end] += 1
        assert (seen == 1).all()


def test_rows_do_not_meet() -> None:
    """What is not finite stays in its token."""
    fmt = get_format("nvfp4")
    stored = PackedWeight(*stack(fmt, 3, 20, 64))
    for tiles in (PAIRS, FEW, ROWS):
        ids = torch.tensor([[0, 1], [2, 0], [3, 2], [2, 2]], device=DEVICE)
        x = numbers(4, 64, dtype=torch.bfloat16)
        x[3] = float("inf")
        y = x.new_empty((4, 2, 20))
        module.multiply(InputRows.of_numbers(x), ids, stored, y, True, fmt, tiles)
        assert y[:3].isfinite().all() and not y[3].isfinite().any()
        assert not y[2, 0].any()


@pytest.mark.core
def test_tiles_fit() -> None:
    """Every choice for the chips from sm_80 on."""
    for tokens, (experts, k), n, terms, shared in itertools.product(
        [1, 2, 4, 16, 64, 256, 1024, 2048, 8192],
        [(8, 2), (32, 4), (128, 8), (256, 8)],
        [64, 1536, 5760, 28672],
        [1, 2, 3],
        [227 * 1024, 163 * 1024, 99 * 1024],
    ):
        tiles = config(tokens * k, experts, n, terms, shared)
        words = tiles.words * (tiles.warps if tiles.warps_share and tiles.m > 1 else 1)
        needed = tiles.stages * words * (16 * terms * tiles.m + 5 * tiles.n)
        assert needed <= shared, tiles


class TestGpu:
    pytestmark = GPU

    @pytest.mark.parametrize("quantized", [False, True])
    @pytest.mark.parametrize("tokens", [1, 4, 16, 64, 256, 2048])
    def test_layers(self, tokens: int, quantized: bool) -> None:
        """The sizes of Qwen3-30B-A3B and of GPT-OSS-20B."""
        for fmt, experts, k, sizes in (
            (get_format("nvfp4"), 128, 8, ((1536, 2048), (2048, 768))),
            (get_format("mxfp4"), 32, 4, ((5760, 2880), (2880, 2880))),
        ):
            ids = torch.rand(tokens, experts, device=DEVICE).topk(k, -1).indices
            for each, size in zip((False, True), sizes, strict=True):
                chosen = dict(experts=experts, each=each, quantized=quantized, biased=each)
                run(fmt, torch.bfloat16, ids, *size, **chosen)


experts_mixture_triton = flat("experts_mixture")

SILU = Gate("silu")
LIMITED = Gate("silu", interleaved=True, slope=1.702, shift=1.0, limit=0.7)
NVFP4, MXFP4 = get_format("nvfp4"), get_format("mxfp4")


def check_mixture(
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


def run_mixture(
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
    check_mixture(out, x, ids, routing, both, gate, fmt)
    return out


CASES = {
    "pairs, limited": (MXFP4, 3, PAIRS, LIMITED),
    "few rows": (NVFP4, 9, FEW, LIMITED),
    "rows": (NVFP4.with_multiplier(), 9, ROWS, SILU),
    "rest": (NVFP4, 60, MANY, Gate("gelu")),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * ("pairs" in c)) for c in CASES]
)
def test_every_kernel_mixture(case: str) -> None:
    """With biases and without, experts of none, and K that no step divides."""
    fmt, tokens, tiles, gate = CASES[case]
    ids = routed(tokens, 3 if tiles is PAIRS else 2, 5)
    ids[ids == 1] = 2
    run_mixture(fmt, ids, gate, inner=96 if fmt is MXFP4 else 176, tiles=tiles)
    run_mixture(fmt, ids, gate, hidden=96, tiles=tiles, biased=False, dtype=torch.float32, inner=32)


def test_sorted_in_the_launch_that_routes() -> None:
    """What `route` and `arranged` give."""
    x, ids = numbers(70, 176, dtype=torch.bfloat16), routed(70, 2, 3)
    (order, tiles), out = route(ids, 3, 16, x, 16, NVFP4)
    expected, _ = route(ids, 3, 16)
    assert torch.equal(order, expected[0]) and torch.equal(tiles, expected[1])
    assert torch.equal(out, arranged(InputRows.of_numbers(x), 70, 176, 16, NVFP4, True))


class TestGpu_mixture:
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
            first, again = (run_mixture(fmt, ids, gate, **sizes) for _ in range(2))
            assert torch.equal(first, again)

    @pytest.mark.parametrize("mixture", [False, True])
    @pytest.mark.parametrize("tokens", [1, 16, 256, 1024])
    def test_each_kernel_waits_for_the_one_before(self, tokens: int, mixture: bool) -> None:
        """Products, or mixtures, that read what the last one wrote, of ids just written."""
        first = (*stack(NVFP4, 16, 8192 if mixture else 4096, 2048), None)
        second = (*stack(NVFP4, 16, 2048, 4096), None)
        start = numbers(tokens, 2048, dtype=torch.bfloat16)
        ids = [torch.rand(tokens, 16, device=DEVICE).topk(2, -1).indices for _ in range(3)]
        late, routing = torch.zeros_like(ids[0]), torch.full((tokens, 2), 2.0**-24, device=DEVICE)

        def chain(wait: Callable[[], None]) -> Tensor:
            x = start
            for each in ids:
                late.copy_(each)
                wait()
                if mixture:
                    options = ("silu", False, 1.0, 0.0, None, NVFP4)
                    y = experts_mixture_triton(x, late, routing, *first, *second, *options)
                else:
                    h = experts_linear_triton(x, late, *first, NVFP4)
                    wait()
                    y = experts_linear_triton(h * 2.0**-12, late, *second, NVFP4)
                    y = y.sum(1) * 2.0**-12
                wait()
                late.zero_()
                x = y.tanh()
            return x

        assert_each_kernel_waits(chain, eager=False)
