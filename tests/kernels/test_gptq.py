"""GPTQ and the joint choice of scale and codes, against their definitions in float64."""

from __future__ import annotations

import itertools
from typing import Any

import oracle
import pytest
import torch
from blocks import COLUMNS, HESSIANS, ROWS, WEIGHTS
from kernel_cases import KEYS, cases, covering, formats, seeded
from search_definitions import gptq_naive
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.search.joint_reference import (
    REFERENCE,
    as_blocks,
    block_hessians,
    choose_blocks,
    damp,
    gptq_ref,
    joint_ref,
    losses,
    make_metric,
    make_problem,
    normalize,
    regular,
    solve,
)
from fp4pass.kernels.search.reference import search_ref
from fp4pass.kernels.statistics.naive import diagonal_blocks

OPTIONS: dict[str, Any] = {"damping": 0.01, "shrinkage": 0.0, "sweeps": 0}
EPS = torch.finfo(torch.float32).eps


def correlated(columns: int = COLUMNS, tokens: int = 400, seed: int = 0) -> Tensor:
    """Return a Hessian [K, K] of inputs that a few directions dominate."""
    generator = seeded(seed)
    mix = torch.randn(columns, columns, generator=generator)
    x = torch.randn(tokens, columns, generator=generator) * 0.97 ** torch.arange(columns)
    x = x @ mix
    return x.mT @ x


def weight(name: str = "normal") -> Tensor:
    return WEIGHTS[name](seeded(0))


def quantized(w: Tensor, hessian: Tensor, fmt: Format, **options: Any) -> Tensor:
    """Return the float64 weight that gptq_ref makes of w."""
    g = fmt.global_scale_for(w.abs().max().item())
    packed, scale = gptq_ref(w, hessian, g, fmt, **OPTIONS | options)
    return oracle.dequantize(packed, scale, g, fmt.name, fmt.block)


def loss(w: Tensor, q: Tensor, hessian: Tensor) -> float:
    residual = w.double() - q
    return float(((residual @ hessian.double()) * residual).sum())


@pytest.mark.core
@covering(("key", "order"), KEYS, ["forwards", "backwards"])
def test_losses_of_blocks_add_up(key: str, order: str) -> None:
    """The sum of r_b^T D_b r_b is tr (W - Q) H (W - Q)^T; D_b = ([H^-1]_bb of the rest)^-1."""
    fmt = get_format(key)
    hessian, x = damp(correlated(), 0.01), weight()
    visited = torch.arange(COLUMNS // fmt.block)
    if order == "backwards":
        visited = visited.flip(0)
    problem = make_problem(hessian, visited, fmt.block, sweeps=False)
    x, unit = normalize(x, fmt.global_scale_for(x.abs().max().item()), fmt, 1)
    q, _ = solve(x.t(), unit.t(), problem, fmt, 0, REFERENCE)
    matrix, metric = problem.rounding
    columns = problem.columns
    ordered = hessian[columns][:, columns]
    residual = (x.double().t() - q.double())[columns]
    total, seen = 0.0, torch.zeros_like(residual)
    for b in range(len(visited)):
        here = slice(b * fmt.block, (b + 1) * fmt.block)
        effective = torch.linalg.inv(
            torch.linalg.inv(ordered[here.start :, here.start :])[: fmt.block, : fmt.block]
        )
        # Its target by OBS: the rest of the weight compensates for what was rounded.
        left = ordered[here.start :, here.start :]
        pull = torch.linalg.solve(left, ordered[here.start :, : here.start] @ seen[: here.start])
        own = residual[here] + pull[: fmt.block]
        total += float(((effective @ own) * own).sum())
        seen[here] = residual[here]
        found = metric.hessian[b].double()
        # Rounded to float32 once.
        assert (found - effective).abs().max() <= 2 * EPS * effective.abs().max()
        rounding = matrix[here, : here.start].double() @ seen[: here.start]
        bound = 4 * EPS * (matrix[here].abs().double() @ seen.abs()).max()
        assert (rounding - pull[: fmt.block]).abs().max() <= bound + 1e-12
        # What is chosen costs about as little as for that target by itself.
        target = (x.double().t()[columns][here] + pull[: fmt.block]).float()[None]
        _, _, cost = choose_blocks(target, metric[b : b + 1], unit.t(), fmt, True)
        spent = ((effective @ own) * own).sum(0)
        assert float(spent.sum()) == pytest.approx(float(cost.sum()), rel=1e-2)
    expected = float(((ordered @ residual) * residual).sum())
    assert total == pytest.approx(expected, rel=1e-12)


@pytest.mark.core
@formats
@pytest.mark.parametrize("shrinkage", [0.0, 0.25])
def test_the_codes_are_those_of_the_definition(
    fmt: Format, shrinkage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both round to nearest, in the order of the weight, but where scales are as good."""

    def nearest(*block: Any) -> Any:
        return choose_blocks(*block[:-1], False)

    monkeypatch.setattr("fp4pass.kernels.search.joint_reference.choose_blocks", nearest)
    w, hessian = weight("normal"), correlated()
    g = fmt.global_scale_for(w.abs().max().item())
    damped = damp(hessian, OPTIONS["damping"], shrinkage, fmt.block)
    problem = make_problem(damped, torch.arange(COLUMNS // fmt.block), fmt.block, sweeps=False)
    x, unit = normalize(w.float(), g, fmt, 1)
    q = solve(x.t(), unit.t(), problem, fmt, 0, REFERENCE)[0].t()
    found = q.double() * (g / unit.double())
    expected = gptq_naive(w, hessian, g, fmt, OPTIONS["damping"], shrinkage)
    assert (found == expected).double().mean() > 0.95
    assert loss(w, found, damped) == pytest.approx(loss(w, expected, damped), rel=1e-3)


@pytest.mark.core
@pytest.mark.parametrize("block", [16, 32])
def test_shrinkage_is_of_what_lies_between_blocks(block: int) -> None:
    hessian = correlated()
    plain, shrunk = damp(hessian, 0.01), damp(hessian, 0.01, 0.25, block)
    number = torch.arange(len(hessian)) // block
    same = number[:, None] == number
    torch.testing.assert_close(shrunk, torch.where(same, plain, 0.75 * plain), rtol=1e-12, atol=0)


@covering(("key", "name"), KEYS, list(WEIGHTS))
def test_better_than_without_the_others(key: str, name: str) -> None:
    """On the whole Hessian, than scales of least output error with codes rounded to nearest."""
    fmt = get_format(key)
    w, hessian = weight(name).float(), correlated()
    g = fmt.global_scale_for(w.abs().max().item())
    packed, scale = search_ref(w, diagonal_blocks(hessian), g, fmt, "hessian")
    base = oracle.dequantize(packed, scale, g, fmt.name, fmt.block)
    damped = damp(hessian, 0.01)
    found = loss(w, quantized(w, hessian, fmt), damped)
    # Without a global scale, weights below all scales become zero whatever is done.
    assert found < loss(w, base, damped) or not base.any()


@pytest.mark.parametrize(("key",), cases([("nvfp4",)], itertools.product(KEYS)))
def test_sweeps_only_lower_the_loss(key: str) -> None:
    fmt = get_format(key)
    w, hessian = weight("heavy-tailed"), correlated()
    damped = damp(hessian, 0.01)
    found = [loss(w, quantized(w, hessian, fmt, sweeps=n), damped) for n in range(4)]
    assert found == sorted(found, reverse=True) and found[0] > found[3]


@pytest.mark.quick(1)
@covering(("key", "sweeps"), KEYS, (0, 2))
def test_same_bits_again_and_row_by_row(
    key: str, sweeps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt, options = get_format(key), OPTIONS | {"sweeps": sweeps}
    w, hessian = weight("heavy-tailed"), correlated()
    g = fmt.global_scale_for(w.abs().max().item())
    found = gptq_ref(w, hessian, g, fmt, **options)
    again = gptq_ref(w.t().contiguous().t(), hessian.clone(), g, fmt, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    # Rows share the Hessian and the order, and nothing else.
    monkeypatch.setattr("fp4pass.kernels.search.joint_reference.ROWS", 16)
    tiled = gptq_ref(w, hessian, g, fmt, **options)
    assert (tiled[1] != found[1]).double().mean() < 0.02
    # Parts of them are those of all.
    for start, stop in ((0, 16), (16, len(w))):
        part = gptq_ref(w, hessian, g, fmt, **options, start=start, stop=stop)
        assert all(torch.equal(a, b[start:stop]) for a, b in zip(part, tiled, strict=True))


@formats
def test_columns_that_no_token_excited_round_to_nearest(fmt: Format) -> None:
    w, hessian = weight(), correlated()
    dead = torch.zeros(COLUMNS, dtype=torch.bool)
    dead[3::7] = True
    dead[-fmt.block :] = True
    hessian[dead] = 0
    hessian[:, dead] = 0
    g = fmt.global_scale_for(w.abs().max().item())
    packed, scale = gptq_ref(w, hessian, g, fmt, **OPTIONS)
    step = (oracle.scales(fmt.name)[scale.long() - 1] * g).repeat_interleave(fmt.block, 1).float()
    q = dequantize_ref(packed, scale, torch.tensor([1 / g]), fmt, torch.float32)
    nearest = oracle.values(oracle.codes(w / step)) * step
    assert torch.equal(q[:, dead].double(), nearest[:, dead])
    # Whatever happens elsewhere, these blocks are those of least squared error.
    _, sse = search_ref(w, None, g, fmt, "sse")
    assert (scale[:, -1] == sse[:, -1]).all()


@covering(("key", "tokens"), KEYS, [0, 1, 5])
def test_singular_hessians(key: str, tokens: int) -> None:
    """Fewer tokens than columns, or none: the damping decides what they leave open."""
    fmt = get_format(key)
    w = weight()
    x = torch.randn(tokens, COLUMNS, generator=seeded(4))
    q = quantized(w, x.mT @ x, fmt, sweeps=1)
    assert q.isfinite().all()
    g = fmt.global_scale_for(w.abs().max().item())
    packed, scale = search_ref(w, None, g, fmt, "sse")
    sse = dequantize_ref(packed, scale, torch.tensor([1 / g]), fmt, torch.float64)
    if tokens:
        assert loss(w, q, x.mT @ x) < 0.5 * loss(w, sse, x.mT @ x)
    else:
        assert torch.equal(q, sse)


CURVATURES = ["identity", "rank-one", "singular", "steep", "indefinite"]


@covering(("key", "joint", "name"), KEYS, (False, True), CURVATURES)
def test_the_loss_is_that_of_the_codes(key: str, joint: bool, name: str) -> None:
    """The loss that choose_blocks reports is the true one, up to float32."""
    fmt = get_format(key)
    hessian, _ = regular(block_hessians(HESSIANS[name](), COLUMNS, fmt.block))
    metric, w = make_metric(hessian), weight("heavy-tailed")
    x, unit = normalize(as_blocks(w, fmt.block), 2.0**-9, fmt, 1)
    q, byte, found = choose_blocks(x, metric, unit[:, 0], fmt, joint)
    exact = losses(x.double() - q.double(), hessian)
    # n products of n sums, each rounded, relative to the sizes of the terms.
    size = losses((x - q).double().abs(), hessian.abs())
    assert ((found - exact).abs() <= 2 * fmt.block * EPS * size).all()
    step = oracle.scales(fmt.name)[byte - 1].unsqueeze(1) * unit.double()
    assert torch.equal(q.double(), oracle.values(oracle.codes((q / step).float())) * step)
    if joint:
        _, _, nearest = choose_blocks(x, metric, unit[:, 0], fmt, False)
        assert found.sum() <= nearest.sum()


@covering(("key", "curvature", "name"), KEYS, list(HESSIANS), list(WEIGHTS))
def test_joint_is_never_worse(key: str, curvature: str, name: str) -> None:
    """Than what it starts from, block by block in float64, and whatever the Hessian is."""
    fmt = get_format(key)
    w, hessian = weight(name), HESSIANS[curvature]()
    g = fmt.global_scale_for(w.abs().max().item())
    before = search_ref(w, hessian, g, fmt, "hessian")
    after = joint_ref(w, *before, hessian, g, fmt)
    metric = block_hessians(hessian, COLUMNS, fmt.block)
    cost = []
    for packed, scale in (before, after):
        q = oracle.dequantize(packed, scale, g, fmt.name, fmt.block)
        residual = (w.to(torch.float32).double() - q).view(ROWS, -1, fmt.block).permute(1, 2, 0)
        cost.append((losses(residual, metric), losses(residual.abs(), metric.abs())))
    assert (cost[1][0] <= cost[0][0] + 1e-14 * cost[0][1]).all()
    if curvature in ("mild", "steep") and name == "normal":
        assert cost[1][0].sum() < 0.9 * cost[0][0].sum()
