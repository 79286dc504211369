"""Weights and Hessians on which scale searches go wrong, and what an optimal result is."""

from __future__ import annotations

import math

import oracle
import torch
from torch import Tensor

from fp4pass.core.formats import FORMATS, Format, get_format
from fp4pass.core.packing import unpack_codes
from fp4pass.kernels.common.tiles import supports

# Formats of blocks with 8-bit scales; tests/test_float_scales.py has the others.
BLOCKS = {name: fmt for name, fmt in FORMATS.items() if not fmt.has_float_scale}
# Those that the Triton kernels know, and two of the others: of 6 and of 8 bits.
VARIANTS = [get_format(f.name, block) for f in BLOCKS.values() if supports(f) for block in f.blocks]
ALL = [*VARIANTS, get_format("mxfp6_e2m3"), get_format("int8", 64)]
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


def one_channel() -> Tensor:
    """All but one channel of 16 may be clipped at no cost, which pays at a fine scale."""
    hessian = torch.zeros(COLUMNS // 32, 32, 32)
    hessian[:, 0, 0] = hessian[:, 16, 16] = 5.0
    return hessian


def indefinite() -> Tensor:
    """Eigenvalues clearly below zero, as rounding leaves them where H is singular, but larger."""
    hessian = few_tokens()
    return hessian - 1e-3 * hessian.amax() * torch.eye(32)


HESSIANS = {
    "identity": lambda: torch.eye(32).expand(COLUMNS // 32, 32, 32),
    "mild": lambda: spectrum(0.95),
    "steep": lambda: spectrum(0.7),
    "cond-1e12": lambda: spectrum(0.65),
    "singular": few_tokens,
    "one-channel": one_channel,
    "indefinite": indefinite,
    "rank-one": lambda: torch.ones(COLUMNS // 32, 32, 32) * 3,
}


def check_optimal(
    weight: Tensor,
    residual: Tensor,
    fmt: Format,
    found: tuple[Tensor, Tensor],
    hessian: Tensor | None,
) -> None:
    """The codes are round-to-nearest at the scale, whose error is the least of all scales'."""
    packed, scale = found
    metric, slack = None, torch.zeros(1, dtype=torch.float64)
    if hessian is not None:
        metric = oracle.block_hessians(hessian, weight.shape[1], fmt.block)
        square = weight.double().view(len(weight), -1, fmt.block).square().sum(-1)
        slack = 1e-12 * torch.linalg.matrix_norm(metric, 2) * square
    errors = oracle.errors(residual, metric)
    chosen = errors.gather(0, scale.unsqueeze(0).long() - 1)[0]
    least = errors.amin(0)
    excess = chosen - least - 1e-6 * least.abs() - slack
    assert (excess <= 0).all(), (excess.argmax(), excess.amax())
    g = fmt.global_scale_for(weight.abs().max().item())
    step = (oracle.scales(fmt.name)[scale.long() - 1] * g).float().repeat_interleave(fmt.block, 1)
    assert torch.equal(unpack_codes(packed), oracle.codes(weight.float() / step).byte())
