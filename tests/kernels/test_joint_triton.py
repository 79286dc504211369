"""The kernel that chooses scale and codes together, against the reference and its definition."""

from __future__ import annotations

import itertools
from typing import Any

import oracle
import pytest
import torch
from blocks import COLUMNS, HESSIANS, VARIANTS, WEIGHTS
from kernel_cases import DEVICE, GPU, KEYS, cases, formats, quiet, seeded
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.kernels.search.joint_reference import (
    Metric,
    as_blocks,
    block_hessians,
    choose_blocks,
    joint_ref,
    losses,
    make_metric,
    normalize,
    regular,
)
from fp4pass.kernels.search.joint_triton import choose_blocks_triton, joint_triton
from fp4pass.kernels.search.reference import search_ref
from fp4pass.kernels.statistics.naive import ieee_products

EPS = torch.finfo(torch.float32).eps

pytestmark = quiet


@pytest.fixture(autouse=True)
def wide_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for every program, whatever its size."""
    if not GPU:
        monkeypatch.setattr("fp4pass.kernels.search.joint_triton._LANES", 64)


def put(value: Any) -> Any:
    """Move a tensor or a metric to the device of the kernels."""
    if isinstance(value, Metric):
        return Metric(*(put(getattr(value, name)) for name in vars(value)))
    return None if value is None else value.to(DEVICE)


def problem(fmt: Format, columns: int, rows: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    """Make normalized blocks [J, n, R], the units of their scales [J, R], and Hessians.

    Hessians of condition 1e2 and 1e7 in turn. Blocks: zero, far below the smallest scale, above the
    largest, of one element, heavy-tailed and normal.
    """
    n, generator = fmt.block, seeded(fmt.block)
    mix = torch.linalg.qr(torch.randn(columns, n, n, generator=generator, dtype=torch.float64))[0]
    steep = torch.tensor([2.0, 7.0], dtype=torch.float64).repeat(columns)[:columns].view(-1, 1)
    values = 10 ** (-steep * torch.linspace(0, 1, n, dtype=torch.float64))
    hessian = (mix * values.unsqueeze(1)) @ mix.mT
    x = torch.randn(columns, n, rows, generator=generator) * 0.02
    x[:, :, 10:20] /= torch.rand(columns, n, 10, generator=generator) + 0.02
    x[:, :, 0] = 0
    x[:, :, 1] *= 1e-20
    x[:, :, 2] *= 1e12
    x[:, 1:, 3] = 0
    x, unit = normalize(x, 2.0**-9 if fmt.has_global_scale else 1.0, fmt, 1)
    # A target is not normalized, but near what is.
    x[:, :, 20:30] *= 1.7
    return x, unit[:, 0], (hessian + hessian.mT) / 2


def agree(found: Tensor, expected: Tensor) -> None:
    """Expect the same losses [J, R], but for a block in a hundred where a rounding nearly tied."""
    off = (found - expected).abs() > 1e-5 * expected
    assert off.double().mean() <= 0.01, (found[off], expected[off])
    assert found.sum().item() == pytest.approx(expected.sum().item(), rel=1e-2)


def check_codes(x: Tensor, q: Tensor, byte: Tensor, unit: Tensor, fmt: Format) -> Tensor:
    """Expect q [J, n, R] to be elements times scales; return the scales' float64 values."""
    step = (oracle.scales(fmt.name)[byte - 1] * unit.double()).clamp(2.0**-100, 2.0**100)
    step = step.unsqueeze(1)
    assert torch.equal(q.double(), oracle.values(oracle.codes((q / step).float())) * step)
    return step


@pytest.mark.quick(1)
# At 6 scales, and at 17 of the other scale type.
@pytest.mark.parametrize(
    ("key", "joint"),
    cases(
        [("mxfp4:16", False), ("mxfp4:16", True), ("nvfp4", False)],
        itertools.product(KEYS, (False, True)),
    ),
)
def test_choices(key: str, joint: bool) -> None:
    """The choice costs as little as the reference's, and as much as the kernel says."""
    fmt = get_format(key)
    columns = 2 if GPU else 1
    x, unit, hessian = problem(fmt, columns)
    metric = make_metric(hessian)
    out = choose_blocks_triton(put(x), put(metric), put(unit), fmt, joint)
    q, byte, loss = (each.cpu() for each in out)
    expected = choose_blocks(x, metric, unit, fmt, joint)
    assert [(each.shape, each.dtype) for each in out] == [(e.shape, e.dtype) for e in expected]
    step = check_codes(x, q, byte, unit, fmt)
    nearest = oracle.values(oracle.codes((x / step).float())) * step
    assert torch.equal(q.double(), nearest) != joint
    exact = losses(x.double() - q.double(), hessian)
    size = losses((x - q).double().abs(), hessian.abs())
    assert ((loss - exact).abs() <= 2 * fmt.block * EPS * size).all()
    agree(exact, losses(x.double() - expected[0].double(), hessian))
    assert not q[:, :, 0].any() and torch.equal(byte[:, 0], expected[1][:, 0])


@pytest.mark.quick(3)
@formats
@pytest.mark.parametrize("shape", [(1, 1), (3, 0), (0, 3)])
def test_shapes(fmt: Format, shape: tuple[int, int]) -> None:
    x, unit, hessian = problem(fmt, 3)
    columns, rows = shape
    x, unit = x[:columns, :, 15 : 15 + rows], unit[:columns, 15 : 15 + rows]
    metric = make_metric(hessian[:columns])
    q, byte, loss = choose_blocks_triton(put(x), put(metric), put(unit), fmt, False)
    assert q.shape == x.shape and byte.shape == loss.shape == (columns, rows)
    if x.numel():
        assert torch.equal(q.cpu(), choose_blocks(x, metric, unit, fmt, False)[0])


@pytest.mark.parametrize("fmt", VARIANTS if GPU else [get_format("mxfp4:16")], ids=lambda f: f.key)
@pytest.mark.parametrize("curvature", HESSIANS if GPU else ["steep"])
def test_joint(fmt: Format, curvature: str) -> None:
    """No block gets worse by the kernel either, and all together are as good as the reference's."""
    columns = COLUMNS if GPU else 16
    w = WEIGHTS["adversarial"](seeded(0))[:, :columns]
    hessian = HESSIANS[curvature]()[: -(-columns // 32)]
    g = fmt.global_scale_for(w.abs().max().item())
    before = search_ref(w, hessian, g, fmt, "hessian")
    with ieee_products():
        expected = joint_ref(w, *before, hessian, g, fmt)
        arguments = (put(w), *(put(each) for each in before), put(hessian), g, fmt)
        found = [each.cpu() for each in joint_triton(*arguments)]
    exact = block_hessians(hessian, columns, fmt.block)
    residuals = []
    for packed, scale in (before, expected, found):
        q = oracle.dequantize(packed, scale, g, fmt.name, fmt.block)
        residuals.append(as_blocks(w.double() - q, fmt.block))
    old, _, new = (losses(each, exact) for each in residuals)
    # An indefinite Hessian may leave a small sum of large terms.
    terms = losses(residuals[0].abs(), exact.abs()) + losses(residuals[2].abs(), exact.abs())
    assert (new <= old + 1e-12 * terms).all()
    cost = [losses(each, regular(exact)[0]) for each in residuals]
    assert float(cost[2].sum()) == pytest.approx(float(cost[1].sum()), rel=1e-3)
