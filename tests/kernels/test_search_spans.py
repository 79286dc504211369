"""Blocks whose magnitudes span up to 2^250, and Hessians with zero columns: best of all scales."""

from __future__ import annotations

import itertools
from fractions import Fraction

import oracle
import pytest
import torch
from kernel_cases import DEVICE, KEYS, cases, quiet, seeded
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import unpack_codes
from fp4pass.kernels.search.joint_reference import joint_ref
from fp4pass.kernels.search.reference import OBJECTIVES, search_ref
from fp4pass.kernels.search.triton import search_triton

F0, MAGNITUDES = Fraction(0), list(enumerate(map(Fraction, oracle.MAGNITUDES.tolist())))

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


def check_codes(weight: Tensor, found: tuple[Tensor, Tensor], fmt: Format) -> None:
    packed, scale = found
    g = fmt.global_scale_for(weight.abs().max().item())
    step = (oracle.scales(fmt.name)[scale.long() - 1] * g).float().repeat_interleave(fmt.block, 1)
    assert torch.equal(unpack_codes(packed), oracle.codes(weight / step).byte())


def exact_error(x: list[float], scale: float, metric: list[list[float]]) -> Fraction:
    """r^T H r of one block, without any rounding."""
    r = []
    for value in map(Fraction, x):
        near = [(abs(abs(value) - m * Fraction(scale)), i % 2, m) for i, m in MAGNITUDES]
        r.append(abs(value) - min(near)[2] * Fraction(scale))
        r[-1] *= -1 if value < 0 else 1
    pairs = (
        (h, a, b) for row, a in zip(metric, r, strict=True) for h, b in zip(row, r, strict=True)
    )
    return sum((Fraction(h) * a * b for h, a, b in pairs if h), F0)


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
    check_codes(weight, found, fmt)
    if objective != "naive":
        errors, rounded = all_errors(weight, fmt, metric)
        at, best = found[1].unsqueeze(0).long() - 1, errors.argmin(0, keepdim=True)
        noise = 1e-12 * (rounded.gather(0, at) + rounded.gather(0, best))
        excess = errors.gather(0, at) - (1 + 1e-6) * errors.gather(0, best) - noise
        assert (excess <= 0).all(), (excess > 0).nonzero()[:5]
    if metric is not None:
        # The oracle itself: one block of each Hessian that is diagonal, in exact fractions.
        scales = (oracle.scales(fmt.name) * g).tolist()
        for j in range(0, 16, 4):
            x, h = weight.view(64, 16, -1)[j, j].tolist(), metric[j].tolist()
            exact = [exact_error(x, scale, h) for scale in scales]
            chosen = exact[int(found[1][j, j]) - 1]
            assert chosen <= min(exact) * (1 + Fraction(1, 10**9)), (j, chosen, min(exact))


QUICK = [("nvfp4", "naive"), ("mxfp4", "sse"), ("mxfp4", "hessian")]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("key", "objective"), cases(QUICK, itertools.product(KEYS, OBJECTIVES)))
def test_the_kernels_find_the_same(
    key: str, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt, generator, given = get_format(key), seeded(1), None
    # The interpreter takes 0.5 s for each block that is decided in float64, as most are here.
    count = 16 if DEVICE == "cuda" else 2 if objective == "hessian" else 8
    if DEVICE == "cpu":
        monkeypatch.setattr("fp4pass.kernels.search.triton._LANES", 64)
    weight = spanning(count, count * fmt.block, generator)
    g = fmt.global_scale_for(weight.abs().max().item())
    if objective == "hessian":
        given = as_quarters(hessians(count, fmt.block, generator)).to(DEVICE)
    expected = search_ref(weight, None if given is None else given.cpu(), g, fmt, objective)
    found = search_triton(weight.to(DEVICE), given, g, fmt, objective)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


FAULT = (0, 2.0**60), (5, 1.3 * 2.0**-38), (9, -1.1 * 2.0**-39)


@pytest.mark.slow
def test_small_elements_beside_a_column_that_is_zero() -> None:
    """The scale that serves them is 2^99 below the largest element, which costs nothing."""
    weight, hessian = torch.zeros(1, 32), torch.eye(32).unsqueeze(0).clone()
    for i, value in FAULT:
        weight[0, i] = value
    hessian[0, 0, 0] = 0
    fmt = get_format("mxfp4")
    expected = search_ref(weight, hessian, 1.0, fmt, "hessian")
    assert expected[1].item() == all_errors(weight, fmt, hessian)[0].argmin().item() + 1 < 90
    found = search_triton(weight.to(DEVICE), hessian.to(DEVICE), 1.0, fmt, "hessian")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
    # Codes that are chosen with the scale make no block worse, wherever that is.
    assert all(
        torch.equal(a, b)
        for a, b in zip(joint_ref(weight, *expected, hessian, 1.0, fmt), expected, strict=True)
    )
