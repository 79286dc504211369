"""The search kernels against the reference, which test_search.py holds against brute force."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from blocks import HESSIANS, ROWS, WEIGHTS, spectrum
from kernel_cases import DEVICE, GPU, KEYS, covering, formats, gpu, quiet, seeded
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.kernels.search.reference import OBJECTIVES, search_ref
from fp4pass.kernels.search.triton import search_triton

pytestmark = quiet


@pytest.fixture(autouse=True)
def wide_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for every program, whatever its size."""
    if not GPU:
        monkeypatch.setattr("fp4pass.kernels.search.triton._LANES", 512)
        monkeypatch.setattr("fp4pass.kernels.search.hessian_triton._ROWS", 32)
        monkeypatch.setattr("fp4pass.kernels.search.hessian_triton._SPLIT", 2)


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
@covering(("key", "name"), KEYS, list(WEIGHTS))
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
