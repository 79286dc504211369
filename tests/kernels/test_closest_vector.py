"""The search of the closest vector against all codes at all scales, and its certificates."""

from __future__ import annotations

import dataclasses

import oracle
import pytest
import torch
from blocks import COLUMNS, HESSIANS, ROWS, WEIGHTS
from kernel_cases import KEYS, covering, seeded
from torch import Tensor

from fp4pass.core.formats import FORMATS, Format, get_format
from fp4pass.kernels.search.branch_and_bound import Found, closest_vectors, prove
from fp4pass.kernels.search.joint_reference import block_hessians, joint_ref, regular
from fp4pass.kernels.search.reference import search_ref

BLOCKS, SIZE = 60, 3

NAMES = ["nvfp4", "mxfp4"]


def small(name: str) -> Format:
    return dataclasses.replace(FORMATS[name], block=SIZE, blocks=(SIZE,))


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Make blocks float64 [B, n], metrics [J, n, n] from round to steep, and which is whose."""
    generator = seeded(seed)
    x = torch.randn(BLOCKS, SIZE, generator=generator, dtype=torch.float64)
    x /= x.abs().amax(1, keepdim=True)
    root = torch.randn(4, SIZE, 5, generator=generator, dtype=torch.float64)
    root *= torch.tensor([1.0, 0.3, 0.1, 0.03]).view(4, 1, 1) ** torch.arange(SIZE).view(1, -1, 1)
    mix = torch.linalg.qr(torch.randn(4, SIZE, SIZE, generator=generator, dtype=torch.float64))[0]
    root = mix @ root
    return x, root @ root.mT, torch.arange(BLOCKS) % 4


def energy(x: Tensor, hessian: Tensor, which: Tensor) -> Tensor:
    return torch.einsum("bi,bij,bj->b", x, hessian[which], x)


def assert_close(a: Tensor, b: Tensor, size: Tensor) -> None:
    """Expect the same losses, up to the rounding of residuals in float64.

    size: the losses of blocks whose elements are all off by their largest.
    """
    off = (a.clamp(min=0).sqrt() - b.clamp(min=0).sqrt()).abs()
    eps = torch.finfo(torch.float64).eps
    assert (off <= 1e-9 * b.clamp(min=0).sqrt() + 32 * eps * size.sqrt()).all()


def best_of_all(x: Tensor, hessian: Tensor, which: Tensor, fmt: Format, unit: float) -> Tensor:
    """Return the least loss of each block by brute force: float64 [B]."""
    values = torch.tensor(sorted(set(fmt.element.values)), dtype=torch.float64)
    codes = torch.cartesian_prod(*[values] * SIZE)
    best = energy(x, hessian, which)
    factor = torch.linalg.cholesky(hessian)
    for scale in fmt.scale.values:
        # Beyond these all codes are 0, or all too small to matter.
        if 2.0**-9 < scale * unit < 8:
            for j in range(len(hessian)):
                own = which == j
                points = (codes * (scale * unit)) @ factor[j]
                distance = torch.cdist(
                    x[own] @ factor[j], points, compute_mode="donot_use_mm_for_euclid_dist"
                )
                best[own] = torch.minimum(best[own], distance.amin(1).square())
    return best


def search(fmt: Format, unit: float, budget: int, seed: int = 0) -> tuple[Found, Tensor]:
    x, hessian, which = problem(seed)
    units = torch.full((BLOCKS,), unit, dtype=torch.float64)
    # To be beaten: all codes 0.
    known = energy(x, hessian, which)
    found = closest_vectors(x, hessian, which, units, known, fmt, budget)
    step = torch.tensor([fmt.scale.decode(b) for b in found.byte.clamp(min=1).tolist()]) * unit
    residual = x - found.values * step.double().unsqueeze(1)
    cost = torch.where(found.improved, energy(residual, hessian, which), known)
    assert_close(cost, found.loss, hessian.diagonal(dim1=1, dim2=2).sum(1)[which])
    return found, best_of_all(x, hessian, which, fmt, unit)


@pytest.mark.quick(1)
@covering(("name", "seed"), NAMES, [0, 1])
def test_the_best_of_all_scales_and_codes(name: str, seed: int) -> None:
    fmt = small(name)
    found, best = search(fmt, 2.0**-5 if fmt.has_global_scale else 1.0, 1 << 20, seed)
    assert torch.equal(found.bound, found.loss)
    torch.testing.assert_close(found.loss, best, rtol=2e-9, atol=0)


BUDGETS = [1, 10, 33, 100, 300]


@pytest.mark.quick(2)
@covering(("name", "budget"), NAMES, BUDGETS)
def test_bounds_hold_whenever_it_stops(name: str, budget: int) -> None:
    """No certificate is wrong: bounds are below the optimum, and equal losses are the optimum."""
    fmt = small(name)
    found, best = search(fmt, 2.0**-5 if fmt.has_global_scale else 1.0, budget)
    assert (found.bound <= best * (1 + 2e-9)).all()
    assert (found.loss >= best * (1 - 1e-12)).all()
    proved = found.bound == found.loss
    torch.testing.assert_close(found.loss[proved], best[proved], rtol=2e-9, atol=0)
    if budget == 1:
        assert not proved.any()


CURVATURES = ["identity", "mild", "singular", "indefinite"]


@pytest.mark.quick(2)
@covering(("key", "curvature", "name"), KEYS, CURVATURES, ["normal", "adversarial", "bfloat16"])
def test_weights_only_get_better(key: str, curvature: str, name: str) -> None:
    """By the losses of the dequantized weight, which are those of the certificate."""
    fmt = get_format(key)
    w, hessian = WEIGHTS[name](seeded(0)), HESSIANS[curvature]()
    g = fmt.global_scale_for(w.abs().max().item())
    before = joint_ref(w, *search_ref(w, hessian, g, fmt, "hessian"), hessian, g, fmt)
    *after, loss, bound = prove(w, *before, hessian, g, fmt, 64)
    metric, size = regular(block_hessians(hessian, COLUMNS, fmt.block))
    metric *= torch.where(size > 0, size, 1.0).unsqueeze(2)
    cost = []
    for packed, scale in (before, after):
        q = oracle.dequantize(packed, scale, g, fmt.name, fmt.block)
        residual = (w.to(torch.float32).double() - q).view(1, ROWS, -1, fmt.block)
        cost.append(oracle.errors(residual, metric)[0])
    largest = w.double().abs().view(ROWS, -1, fmt.block).amax(2)
    assert_close(cost[1], loss, size[:, 0] * fmt.block**2 * largest.square())
    assert_close(torch.maximum(cost[0], cost[1]), cost[0], size[:, 0] * largest.square())
    assert (bound <= loss).all() and (bound >= 0).all()


def test_blocks_of_zeros_are_proved_at_once() -> None:
    fmt, w = FORMATS["nvfp4"], torch.zeros(2, 64)
    w[1] = -0.0
    hessian = HESSIANS["mild"]()[:2]
    before = search_ref(w, hessian, 1.0, fmt, "hessian")
    packed, scale, loss, bound = prove(w, *before, hessian, 1.0, fmt, 1)
    assert torch.equal(packed, before[0]) and torch.equal(scale, before[1])
    assert not loss.any() and not bound.any()
