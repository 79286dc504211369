"""Scale search against float64 brute force over every scale of the format."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from torch import Tensor

from fp4pass.formats import FORMATS, Format, get_format
from fp4pass.kernels.search_ref import search_ref

VARIANTS = [get_format(f.name, block) for f in FORMATS.values() for block in f.blocks]
ROWS, COLUMNS = 24, 192


def heavy_tailed(generator: torch.Generator) -> Tensor:
    normal = torch.randn(ROWS, COLUMNS, generator=generator)
    return normal / (torch.rand(ROWS, COLUMNS, generator=generator) + 0.02)


def adversarial(generator: torch.Generator) -> Tensor:
    """Blocks at the places where searches go wrong, in one matrix."""
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    x[0] = 0
    x[1] = 0
    x[1, ::16] = torch.linspace(-3, 3, COLUMNS // 16)
    x[2] = 0.3
    x[2, ::32] = 4.0
    x[3] *= 1e-3  # below the smallest scale once row 4 has set the global scale
    x[4] *= 1e4
    x[5] = torch.tensor([6.0, -4, 3, -2, 1.5, -1, 0.5, 0] * (COLUMNS // 8))
    x[6] = x[5] * 1.0625
    x[7] = 5.0 * torch.sign(x[7])
    x[8] = torch.where(torch.rand(COLUMNS, generator=generator) < 0.9, 1e-20, 1.0)
    x[9] *= torch.logspace(-12, 3, COLUMNS)
    x[10] = 7 * 2.0 ** torch.randint(-9, 9, (COLUMNS,), generator=generator)
    x[11] = torch.tensor(-0.0)
    x[12] *= 2.0**-9
    return x


WEIGHTS = {
    "normal": lambda g: torch.randn(ROWS, COLUMNS, generator=g) * 0.02,
    "heavy-tailed": heavy_tailed,
    "adversarial": adversarial,
    "bfloat16": lambda g: heavy_tailed(g).bfloat16(),
    "float16": lambda g: torch.randn(ROWS, COLUMNS, generator=g).half() * 0.01,
    "float64": lambda g: torch.randn(ROWS, COLUMNS, generator=g, dtype=torch.float64),
    "least": lambda g: torch.randn(ROWS, COLUMNS, generator=g) * 2.0**-140,
    "largest": lambda g: torch.rand(ROWS, COLUMNS, generator=g) * 3.4e38,
}


def spectrum(decay: float) -> Tensor:
    generator = torch.Generator().manual_seed(int(decay * 100))
    groups = math.ceil(COLUMNS / 32)
    root = torch.randn(groups, 32, 256, generator=generator, dtype=torch.float64)
    mix = torch.linalg.qr(torch.randn(groups, 32, 32, generator=generator, dtype=torch.float64))[0]
    root = mix @ (decay ** torch.arange(32, dtype=torch.float64).view(1, 32, 1) * root)
    return (root @ root.mT).float()


def few_tokens() -> Tensor:
    """Five tokens and a dead channel: singular, with rounding below zero."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(math.ceil(COLUMNS / 32), 32, 5, generator=generator)
    x[:, 3] = 0
    x[1] = 0  # columns that calibration never excited
    return x @ x.mT


HESSIANS = {
    "identity": lambda: torch.eye(32).expand(COLUMNS // 32, 32, 32),
    "mild": lambda: spectrum(0.95),
    "steep": lambda: spectrum(0.7),
    "cond-1e12": lambda: spectrum(0.65),
    "singular": few_tokens,
    "rank-one": lambda: torch.ones(COLUMNS // 32, 32, 32) * 3,
}


def check_optimal(
    weight: Tensor, packed: Tensor, scale: Tensor, fmt: Format, g: float, hessian: Tensor | None
) -> None:
    blocks = weight.float().reshape(-1, fmt.block)
    metric = None
    slack = torch.zeros(len(blocks), dtype=torch.float64)
    if hessian is not None:
        parts = [hessian[:, i : i + fmt.block, i : i + fmt.block] for i in range(0, 32, fmt.block)]
        metric = torch.stack(parts, dim=1).flatten(0, 1).double()[: weight.shape[1] // fmt.block]
        metric = metric.repeat(len(weight), 1, 1)
        top = torch.linalg.matrix_norm(metric, 2)
        slack = 1e-12 * top * blocks.double().square().sum(-1)
    errors = oracle.all_errors(blocks, fmt.name, g, metric)
    chosen = errors.gather(0, scale.reshape(1, -1).long() - 1)[0]
    excess = chosen - errors.amin(0) * (1 + 1e-6) - slack
    assert (excess <= 0).all(), (excess.argmax(), excess.amax())
    step = (oracle.scales(fmt.name)[scale.long() - 1] * g).float().repeat_interleave(fmt.block, 1)
    codes = oracle.codes(weight.float() / step)
    assert torch.equal(torch.stack((packed & 15, packed >> 4), -1).flatten(-2), codes.byte())


@pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f.key)
@pytest.mark.parametrize("name", WEIGHTS)
def test_sse_is_optimal(fmt: Format, name: str) -> None:
    weight = WEIGHTS[name](torch.Generator().manual_seed(0))
    g = fmt.global_scale_for(weight.abs().max().item())
    packed, scale = search_ref(weight, None, g, fmt, "sse")
    check_optimal(weight, packed, scale, fmt, g, None)


@pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f.key)
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("curvature", HESSIANS)
def test_hessian_is_optimal(fmt: Format, name: str, curvature: str) -> None:
    weight = WEIGHTS[name](torch.Generator().manual_seed(0))
    hessian = HESSIANS[curvature]()
    g = fmt.global_scale_for(weight.abs().max().item())
    packed, scale = search_ref(weight, hessian, g, fmt, "hessian")
    check_optimal(weight, packed, scale, fmt, g, hessian)


@pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f.key)
def test_equal_errors_go_to_the_smaller_scale(fmt: Format) -> None:
    """A single non-zero element fits exactly at every scale that divides it by a magnitude."""
    weight = torch.zeros(2, 64)
    weight[0, ::16] = torch.tensor([4.0, 1.5, -3.0, 6.0])
    _, scale = search_ref(weight, None, 1.0, fmt, "sse")
    errors = oracle.all_errors(weight.view(-1, fmt.block), fmt.name, 1.0, None)
    first = (errors == errors.amin(0)).byte().argmax(0) + 1
    assert torch.equal(scale.flatten().long(), first)
    assert (scale[1] == 1).all()


@pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f.key)
@pytest.mark.parametrize("name", WEIGHTS)
def test_naive_is_its_definition(fmt: Format, name: str) -> None:
    weight = WEIGHTS[name](torch.Generator().manual_seed(0))
    g = fmt.global_scale_for(weight.abs().max().item())
    packed, scale = search_ref(weight, None, g, fmt, "naive")
    amax = weight.float().abs().view(len(weight), -1, fmt.block).amax(-1)
    if fmt.has_global_scale:
        wanted = (amax / (6 * g)).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        exponent = torch.frexp(amax.double()).exponent - 3 + 127
        wanted = torch.where(amax == 0, 1, exponent).clamp(1, 254).byte()
    assert torch.equal(scale, wanted)
    step = (oracle.scales(fmt.name)[scale.long() - 1] * g).float().repeat_interleave(fmt.block, 1)
    codes = oracle.codes(weight.float() / step).byte()
    assert torch.equal(torch.stack((packed & 15, packed >> 4), -1).flatten(-2), codes)


def test_a_hessian_that_is_zero_means_sse() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    fmt = FORMATS["nvfp4"]
    zero = search_ref(weight, torch.zeros(2, 32, 32), 2.0**-10, fmt, "hessian")
    sse = search_ref(weight, None, 2.0**-10, fmt, "sse")
    assert all(torch.equal(a, b) for a, b in zip(zero, sse, strict=True))


@pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f.key)
def test_tiles_and_strides_change_nothing(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
    hessian = spectrum(0.9)[:4]
    whole = search_ref(weight, hessian, 2.0**-9, fmt, "hessian")
    strided = search_ref(weight.t().contiguous().t(), hessian, 2.0**-9, fmt, "hessian")
    monkeypatch.setattr("fp4pass.kernels.search_ref._TILE", 1000)
    monkeypatch.setattr("fp4pass.kernels.search_ref._PASS", 2000)
    tiled = search_ref(weight, hessian, 2.0**-9, fmt, "hessian")
    for other in (strided, tiled):
        assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))
