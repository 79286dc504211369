"""Scale search against float64 brute force over every scale, also of blocks that span 2^250."""

from __future__ import annotations

import math
from functools import lru_cache

import oracle
import pytest
import torch
from blocks import ALL, HESSIANS, ROWS, WEIGHTS, check_optimal, spectrum
from kernel_cases import DEVICE, GPU, KEYS, codes_at, covering, formats, gpu, quiet, seeded
from search_definitions import search_naive
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import unpack_codes
from fp4pass.kernels.search.reference import OBJECTIVES, search_ref
from fp4pass.kernels.search.triton import search_stack_triton, search_triton


def make(name: str) -> Tensor:
    return WEIGHTS[name](seeded(0))


@lru_cache(maxsize=1)
def all_residuals(name: str, key: str) -> Tensor:
    """Residuals [S, R, J, n] of one weight at every scale; tests that share them are adjacent."""
    fmt, weight = get_format(key), make(name)
    blocks = weight.float().view(ROWS, -1, fmt.block)
    return oracle.residuals(blocks, fmt.name, fmt.global_scale_for(weight.abs().max().item()))


@covering(("key", "name", "curvature"), KEYS, list(WEIGHTS), list(HESSIANS))
def test_scales_are_optimal(key: str, name: str, curvature: str) -> None:
    """By the sum of squares, and by the Hessian."""
    fmt, weight = get_format(key), make(name)
    g = fmt.global_scale_for(weight.abs().max().item())
    for objective, hessian in (("sse", None), ("hessian", HESSIANS[curvature]())):
        found = search_ref(weight, hessian, g, fmt, objective)
        check_optimal(weight, all_residuals(name, key), fmt, found, hessian)


@pytest.mark.core
@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.key)
def test_every_format_is_searched_by_the_definition(fmt: Format) -> None:
    weight = torch.randn(4, 2 * math.lcm(96, fmt.block), generator=seeded(0))
    g = fmt.global_scale_for(weight.abs().max().item())
    codes, scale, _ = search_naive(weight, None, g, fmt)
    packed, found = search_ref(weight, None, g, fmt, "sse")
    assert torch.equal(found.long(), scale)
    assert torch.equal(unpack_codes(packed, fmt.element.bits), codes)


@pytest.mark.core
@formats
def test_equal_errors_go_to_the_smaller_scale(fmt: Format) -> None:
    """A single non-zero element fits exactly at every scale that divides it by a magnitude."""
    weight = torch.zeros(2, 64)
    weight[0, ::16] = torch.tensor([4.0, 1.5, -3.0, 6.0])
    _, scale = search_ref(weight, None, 1.0, fmt, "sse")
    residual = oracle.residuals(weight.view(2, -1, fmt.block), fmt.name, 1.0)
    errors = oracle.errors(residual, None)
    first = (errors == errors.amin(0)).byte().argmax(0) + 1
    assert torch.equal(scale.long(), first)
    assert (scale[1] == 1).all()


@formats
@pytest.mark.parametrize("name", WEIGHTS)
def test_naive_is_its_definition(fmt: Format, name: str) -> None:
    weight = make(name)
    g = fmt.global_scale_for(weight.abs().max().item())
    packed, scale = search_ref(weight, None, g, fmt, "naive")
    amax = weight.float().abs().view(len(weight), -1, fmt.block).amax(-1)
    if fmt.has_global_scale:
        expected = (amax / (6 * g)).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        exponent = torch.frexp(amax.double()).exponent - 3 + 127
        expected = torch.where(amax == 0, 1, exponent).clamp(1, 254).byte()
    assert torch.equal(scale, expected)
    assert torch.equal(packed, codes_at(weight, scale, g, fmt))


@covering(("key", "curvature"), KEYS, list(HESSIANS))
def test_zero_blocks_take_the_smallest_scale(key: str, curvature: str) -> None:
    """Also where the Hessian is indefinite, and no bound tells scales apart."""
    fmt = get_format(key)
    weight = torch.zeros(2, 64)
    weight[1] = -0.0
    packed, scale = search_ref(weight, HESSIANS[curvature]()[:2], 1.0, fmt, "hessian")
    assert (scale == 1).all()
    assert (packed[0] == 0).all() and (packed[1] == 0x88).all()


@formats
def test_tiles_and_strides_change_nothing(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 128, generator=seeded(0))
    hessian = spectrum(0.9)[:4]
    whole = search_ref(weight, hessian, 2.0**-9, fmt, "hessian")
    strided = search_ref(weight.t().contiguous().t(), hessian, 2.0**-9, fmt, "hessian")
    monkeypatch.setattr("fp4pass.kernels.search.reference._TILE", 1000)
    monkeypatch.setattr("fp4pass.kernels.search.reference._PASS", 2000)
    tiled = search_ref(weight, hessian, 2.0**-9, fmt, "hessian")
    for other in (strided, tiled):
        assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))


pytestmark = quiet


def spanning(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Rows from a span of 1 to 2^250, from subnormals up to the largest; some with ties, zeros."""

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    span = 250 * random(rows, 1)
    lowest = -149 + (270 - span) * random(rows, 1)
    exponent = (lowest + span * random(rows, columns)).round()
    fine = 1 + random(rows, columns)
    coarse = (4 * fine).floor() / 4
    x = torch.where(random(rows, 1) < 0.5, fine, coarse) * 2.0**exponent
    x = x * (random(rows, columns) < 0.9) * (random(rows, columns) - 0.5).sign()
    return x.clamp(-3.4e38, 3.4e38).float()


def hessians(count: int, n: int, generator: torch.Generator) -> Tensor:
    """Positive semidefinite [count, n, n]: some columns zero, all sizes, some of rank one."""

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    root = random(count, n, 2 * n) - 0.5
    root[::4] = torch.eye(n, 2 * n, dtype=torch.float64)
    root[1::4, :, 1:] = 0
    root *= (random(count, n, 1) < random(count, 1, 1)) * 2.0 ** (-40 * random(count, n, 1)).round()
    return (root @ root.mT).float()


def as_quarters(blocks: Tensor) -> Tensor:
    """Hessians of blocks of 16 or 32 as [ceil(K / 32), 32, 32]."""
    if blocks.shape[1] == 32:
        return blocks
    return torch.stack([torch.block_diag(*pair) for pair in blocks.split(2)])


def all_errors(weight: Tensor, fmt: Format, metric: Tensor | None) -> tuple[Tensor, Tensor]:
    """The error [S, R, J] of every scale, and what its sum is rounded relative to."""
    g = fmt.global_scale_for(weight.abs().max().item())
    residual = oracle.residuals(weight.view(len(weight), -1, fmt.block), fmt.name, g)
    errors = oracle.errors(residual, metric)
    return errors, errors if metric is None else oracle.errors(residual.abs(), metric.abs())


@pytest.mark.quick(2)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("key", KEYS)
def test_the_best_of_all_scales(key: str, objective: str) -> None:
    """Of thousands of blocks, to what float64 sums are rounded; and the codes of that scale."""
    fmt, generator = get_format(key), seeded(0)
    weight = spanning(64, 16 * fmt.block, generator)
    g = fmt.global_scale_for(weight.abs().max().item())
    metric = hessians(16, fmt.block, generator) if objective == "hessian" else None
    given = None if metric is None else as_quarters(metric)
    found = search_ref(weight, given, g, fmt, objective)
    assert torch.equal(found[0], codes_at(weight, found[1], g, fmt))
    if objective != "naive":
        errors, rounded = all_errors(weight, fmt, metric)
        at, best = found[1].unsqueeze(0).long() - 1, errors.argmin(0, keepdim=True)
        noise = 1e-12 * (rounded.gather(0, at) + rounded.gather(0, best))
        excess = errors.gather(0, at) - (1 + 1e-6) * errors.gather(0, best) - noise
        assert (excess <= 0).all(), (excess > 0).nonzero()[:5]


@pytest.mark.quick(1)
@covering(("key", "objective"), KEYS, OBJECTIVES)
def test_the_kernels_find_the_same(
    key: str, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt, generator, given = get_format(key), seeded(1), None
    # The interpreter takes 0.5 s for each block that is decided in float64, as most are here.
    count = 16 if DEVICE == "cuda" else 2 if objective == "hessian" else 8
    if not GPU:
        monkeypatch.setattr("fp4pass.kernels.search.triton._LANES", 64)
    weight = spanning(count, count * fmt.block, generator)
    g = fmt.global_scale_for(weight.abs().max().item())
    if objective == "hessian":
        given = as_quarters(hessians(count, fmt.block, generator)).to(DEVICE)
    expected = search_ref(weight, None if given is None else given.cpu(), g, fmt, objective)
    found = search_triton(weight.to(DEVICE), given, g, fmt, objective)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


# The kernels.


@pytest.fixture(autouse=True)
def wide_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for every program, whatever its size."""
    if not GPU:
        monkeypatch.setattr("fp4pass.kernels.search.triton._LANES", 512)
        monkeypatch.setattr("fp4pass.kernels.search.triton._ROWS", 32)
        monkeypatch.setattr("fp4pass.kernels.search.triton._SPLIT", 2)


def check(weight: Tensor, hessian: Tensor | None, g: float, fmt: Format, objective: str) -> None:
    """Expect the bits of the reference; by the Hessian another scale may be as good in float64."""
    expected = search_ref(weight, hessian, g, fmt, objective)
    on = None if hessian is None else hessian.to(DEVICE)
    packed, scale = (t.cpu() for t in search_triton(weight.to(DEVICE), on, g, fmt, objective))
    differs = scale != expected[1]
    if objective == "hessian" and differs.any():
        assert hessian is not None
        blocks = weight.float().view(len(weight), -1, fmt.block)
        metric = oracle.block_hessians(hessian, weight.shape[1], fmt.block)
        errors = oracle.errors(oracle.residuals(blocks, fmt.name, g), metric)
        slack = 1e-12 * torch.linalg.matrix_norm(metric, 2) * blocks.double().square().sum(-1)
        found = errors.gather(0, scale.unsqueeze(0).long() - 1)[0]
        least = errors.amin(0)
        assert (found - least <= 1e-6 * least.abs() + slack).all()
        same = ~differs.repeat_interleave(fmt.block // 2, 1)
        assert torch.equal(packed[same], expected[0][same])
    else:
        assert not differs.any(), differs.nonzero()[:4]
        assert torch.equal(packed, expected[0])


@pytest.mark.quick(3)
@covering(("key", "name"), KEYS[::-1], list(WEIGHTS))
def test_blocks(key: str, name: str) -> None:
    fmt = get_format(key)
    weight = WEIGHTS[name](seeded(0))
    g = fmt.global_scale_for(weight.abs().max().item())
    for objective in ("naive", "sse"):
        check(weight, None, g, fmt, objective)


@pytest.mark.quick(2)
@covering(("key", "name", "curvature"), KEYS, list(WEIGHTS), list(HESSIANS), rest=GPU)
def test_hessian(key: str, name: str, curvature: str) -> None:
    fmt, weight = get_format(key), WEIGHTS[name](seeded(0))
    columns = weight.shape[1] if GPU else 32
    # Blocks that go to float64, here most, take the interpreter 0.1 s each.
    rows = ROWS if GPU or name not in ("heavy-tailed", "least", "largest", "float64") else 5
    weight, hessian = weight[:rows, :columns], HESSIANS[curvature]()[: columns // 32]
    check(weight, hessian, fmt.global_scale_for(weight.abs().max().item()), fmt, "hessian")


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("factor", [1.2345678, 2**-6])
def test_a_global_scale_that_is_no_power_of_two_or_too_small(key: str, factor: float) -> None:
    """As the tensor functions allow: quotients are divided, and the largest scale may clip."""
    fmt = get_format(key)
    weight = WEIGHTS["bfloat16"](seeded(1))[:, :32]
    # Where scales clip, float64 decides all blocks.
    weight = weight if GPU or factor > 1 else weight[:1, : fmt.block]
    g = fmt.global_scale_for(weight.abs().max().item()) * factor
    for objective in OBJECTIVES:
        check(weight, spectrum(0.9)[:1], g, fmt, objective)


SHAPES = [(0, 2), (1, 1), (3, 5), (33, 1)]


@pytest.mark.quick(2)
@covering(("key", "shape"), KEYS, SHAPES)
def test_shapes(key: str, shape: tuple[int, int]) -> None:
    """No rows, one block, blocks that fill no program; and a weight that is a strided view."""
    fmt, (rows, count) = get_format(key), shape
    columns = count * fmt.block
    weight = torch.randn(columns, rows, generator=seeded(rows)).t()
    hessian = spectrum(0.9)[: math.ceil(columns / 32)]
    for objective in OBJECTIVES:
        for dtype in (torch.bfloat16, torch.float32)[: 1 if objective == "hessian" else 2]:
            check(weight.to(dtype), hessian, 2.0**-9, fmt, objective)


@pytest.mark.quick(1)
def test_a_stack_is_searched_as_each_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other global scales, in memory that is no stack's, and in two launches."""
    fmt = get_format("nvfp4")
    one = WEIGHTS["bfloat16"](seeded(0))[:3, :32].contiguous().to(DEVICE)
    stack = torch.stack((one, one / 8, one.flip(0) / 64), dim=1).transpose(0, 1)
    monkeypatch.setattr("fp4pass.kernels.search.triton._AT_ONCE", 2 * one.numel())
    scales = [fmt.global_scale_for(w.abs().max().item()) for w in stack]
    packed, scale = search_stack_triton(stack, scales, fmt, "sse")
    for i, (weight, g) in enumerate(zip(stack, scales, strict=True)):
        expected = search_triton(weight, None, g, fmt, "sse")
        assert torch.equal(packed[i], expected[0]) and torch.equal(scale[i], expected[1])


@gpu
@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_large_layer_twice(fmt: Format, dtype: torch.dtype, objective: str) -> None:
    """Equal to the reference on its first rows and to itself, with blocks listed in any order."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    weight = torch.randn(2560, 4096, generator=generator, device=DEVICE)
    weight = (weight / (torch.rand(weight.shape, generator=generator, device=DEVICE) + 0.05)).to(
        dtype
    )
    root = torch.randn(128, 32, 48, generator=generator, device=DEVICE)
    hessian = root @ root.mT
    g = fmt.global_scale_for(weight.abs().max().item())
    first = search_triton(weight, hessian, g, fmt, objective)
    second = search_triton(weight, hessian, g, fmt, objective)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    expected = search_ref(weight[:256], hessian, g, fmt, objective)
    assert all(torch.equal(a[:256], b) for a, b in zip(first, expected, strict=True))
