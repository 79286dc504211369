"""The search kernels against the reference, which test_search.py holds against brute force."""

from __future__ import annotations

import itertools
import math

import oracle
import pytest
import torch
from blocks import HESSIANS, VARIANTS, WEIGHTS, spectrum
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp4pass.core.formats import Format
from fp4pass.kernels.search.reference import OBJECTIVES, search_ref
from fp4pass.kernels.search.triton import search_triton

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
gpu = pytest.mark.skipif(not GPU, reason="there is no CUDA device")
formats = pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f.key)

# The interpreter divides and overflows as the kernels may: what comes of it is not used.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

# All of them on a GPU; in the interpreter each weight and each Hessian once.
PAIRS = (
    [*itertools.product(WEIGHTS, HESSIANS)]
    if GPU
    else [
        ("bfloat16", "steep"),
        ("bfloat16", "singular"),
        ("bfloat16", "identity"),
        ("heavy-tailed", "mild"),
        ("float16", "cond-1e12"),
        ("adversarial", "mild"),
        ("least", "rank-one"),
        ("largest", "indefinite"),
        ("float64", "one-channel"),
    ]
)


@pytest.fixture(autouse=True)
def wide_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for every program, whatever its size."""
    if not GPU:
        monkeypatch.setattr("fp4pass.kernels.search.triton._LANES", 512)


def check(weight: Tensor, hessian: Tensor | None, g: float, fmt: Format, objective: str) -> None:
    """The bits of the reference; by the Hessian another scale may be as good in float64."""
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


@formats
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("objective", ["naive", "sse"])
def test_blocks(fmt: Format, name: str, objective: str) -> None:
    weight = WEIGHTS[name](torch.Generator().manual_seed(0))
    g = fmt.global_scale_for(weight.abs().max().item())
    check(weight, None, g, fmt, objective)


@formats
@pytest.mark.parametrize(("name", "curvature"), PAIRS)
def test_hessian(fmt: Format, name: str, curvature: str) -> None:
    weight = WEIGHTS[name](torch.Generator().manual_seed(0))
    columns = weight.shape[1] if GPU else 32
    weight, hessian = weight[:, :columns], HESSIANS[curvature]()[: columns // 32]
    check(weight, hessian, fmt.global_scale_for(weight.abs().max().item()), fmt, "hessian")


@formats
def test_a_global_scale_that_is_no_power_of_two_or_too_small(fmt: Format) -> None:
    """As the tensor functions allow: quotients are divided, and the largest scale may clip."""
    weight = WEIGHTS["bfloat16"](torch.Generator().manual_seed(1))[:, :32]
    fitting = fmt.global_scale_for(weight.abs().max().item())
    for g in (fitting * 1.2345678, fitting / 64):
        for objective in OBJECTIVES:
            check(weight, spectrum(0.9)[:1], g, fmt, objective)


@formats
@pytest.mark.parametrize("power", [-150, -60, 60, 118])
def test_the_size_of_a_hessian_does_not_matter(fmt: Format, power: int) -> None:
    weight = WEIGHTS["bfloat16"](torch.Generator().manual_seed(0))[:, :32]
    hessian = spectrum(0.95)[:1].double().mul(2.0**power).float()
    check(weight, hessian, fmt.global_scale_for(weight.abs().max().item()), fmt, "hessian")


@formats
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("rows", "count"), [(0, 2), (1, 1), (3, 5), (33, 1)])
def test_shapes(fmt: Format, objective: str, rows: int, count: int) -> None:
    """No rows, one block, blocks that fill no program; and a weight that is a strided view."""
    columns = count * fmt.block
    weight = torch.randn(columns, rows, generator=torch.Generator().manual_seed(rows)).t()
    for dtype in (torch.bfloat16, torch.float32):
        check(weight.to(dtype), spectrum(0.9)[: math.ceil(columns / 32)], 2.0**-9, fmt, objective)


@formats
def test_a_view_that_is_not_aligned(fmt: Format) -> None:
    storage = torch.randn(1 + 4 * 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for objective in OBJECTIVES:
        check(storage.to(DEVICE)[1:].view(4, 64).cpu(), spectrum(0.9)[:2], 2.0**-9, fmt, objective)
        weight = storage.to(DEVICE)[1:].view(4, 64)
        hessian = spectrum(0.9)[:2].to(DEVICE)
        found = search_triton(weight, hessian, 2.0**-9, fmt, objective)
        copy = search_triton(weight.clone(), hessian, 2.0**-9, fmt, objective)
        assert all(torch.equal(a, b) for a, b in zip(found, copy, strict=True))


@gpu
@pytest.mark.gpu
@formats
@pytest.mark.parametrize("objective", OBJECTIVES)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 300),
    count=st.integers(1, 40),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_random_shapes(
    fmt: Format, objective: str, rows: int, count: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    columns = count * fmt.block
    weight = torch.randn(rows, columns, generator=generator)
    weight = (weight / (torch.rand(rows, columns, generator=generator) + 0.05)).to(dtype)
    root = torch.randn(math.ceil(columns / 32), 32, 1 + seed % 60, generator=generator)
    g = fmt.global_scale_for(weight.abs().max().item())
    check(weight, root @ root.mT, g, fmt, objective)


@gpu
@pytest.mark.gpu
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
