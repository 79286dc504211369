"""Search float32 scales of tiles in plain torch, the same on every device.

A tile is 1 x K, 128 x 128 or N x K elements of a weight. The search tries `CANDIDATES` scales from
amax / element.max down, over one octave: half of a scale has the same points, less the largest
binade and with one more of the smallest. The error of each candidate is summed in float64 over the
whole tile, and the best candidate wins.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.formats import WHOLE, Format
from ..common.rounding import (
    band_of,
    bands,
    round_to_codes_,
    round_to_values_,
    row_amax,
    scale_of,
    spread,
    tile_sums,
)
from ..statistics.naive import HESSIAN_BLOCK, diagonal_blocks

# Scales in an octave, 2.2 % apart.
CANDIDATES = 32

# Numbers of a weight in one pass: those that stay in a CPU's cache, those that fill a GPU.
_TILE_CPU, _TILE_GPU = 1 << 17, 1 << 23


def search_float_scales(
    weight: Tensor, hessian: Tensor | None, fmt: Format, objective: str
) -> tuple[Tensor, Tensor]:
    """Quantize a weight [N, K] with a scale for each tile: codes uint8 [N, K], float32 [I, J].

    "naive" takes amax / element.max, "sse" and "hessian" the best of `candidate_scales`, of equal
    ones the smaller; columns that no token excited are searched by squared error.
    """
    scale = scale_of(_amax(weight, _parts(weight, fmt), fmt), fmt)
    if objective != "naive" and weight.numel():
        known = candidate_scales(scale)  # [C, I, J], ascending
        errors = scale_errors(weight, hessian, known, fmt, objective)
        # The first of equal ones, which argmin does not promise.
        places = torch.arange(len(known), device=weight.device).view(-1, 1, 1)
        best = torch.where(errors == errors.amin(0), places, len(known)).amin(0)
        scale = known.gather(0, best.unsqueeze(0))[0]
    return codes_at(weight, scale, fmt), scale


def scale_errors(
    weight: Tensor, hessian: Tensor | None, known: Tensor, fmt: Format, objective: str
) -> Tensor:
    """Return the errors float64 [C, I, J] of a weight [N, K] with each of some scales [C, I, J].

    objective: "sse" or "hessian".
    """
    metric = _metric(hessian, fmt) if objective == "hessian" else None
    errors = torch.zeros(known.shape, dtype=torch.float64, device=weight.device)
    for part in _parts(weight, fmt):
        x = weight[part].to(torch.float32)
        for candidates, error in zip(known, errors, strict=True):
            own = band_of(candidates, part, fmt)
            residual = _residual(x, spread(own, x.shape, fmt), fmt)
            of_rows = _row_errors(residual, metric, fmt)
            band_of(error, part, fmt).add_(_sum_rows(of_rows, fmt))
    return errors


def codes_at(weight: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Return the codes uint8 [N, K] of a weight, rounded to nearest at scales [I, J]."""
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for part in _parts(weight, fmt):
        x = weight[part].to(torch.float32)
        codes[part] = round_to_codes_(
            x / spread(band_of(scale, part, fmt), x.shape, fmt), fmt.element
        )
    return codes


def _parts(weight: Tensor, fmt: Format) -> list[slice]:
    numbers = _TILE_CPU if weight.device.type == "cpu" else _TILE_GPU
    return list(bands(weight.shape, fmt, numbers))


def candidate_scales(naive: Tensor) -> Tensor:
    """Return the scales that a search tries, float32 [C, ...], ascending to naive ones [...]."""
    steps = torch.arange(1 - CANDIDATES, 1, dtype=torch.float64, device=naive.device)
    factors = torch.exp2(steps / CANDIDATES).view(-1, *[1] * naive.ndim)
    return (naive.double() * factors).float().clamp_(min=2.0**-126)


def in_blocks(hessian: Tensor) -> Tensor:
    """Return the diagonal blocks [ceil(K / 32), 32, 32] of a Hessian [K, K], zeros beyond it."""
    missing = -len(hessian) % HESSIAN_BLOCK
    return diagonal_blocks(F.pad(hessian, (0, missing, 0, missing)), HESSIAN_BLOCK)


def _amax(weight: Tensor, parts: list[slice], fmt: Format) -> Tensor:
    """Return the largest magnitude of each tile, float32 [I, J]."""
    found = [_rows(row_amax(weight[part].to(torch.float32), fmt), fmt).amax(1) for part in parts]
    if not found:
        return weight.new_zeros(fmt.scale_shape(*weight.shape), dtype=torch.float32)
    joined = torch.cat(found)
    return joined.amax(0, keepdim=True) if fmt.rows == WHOLE else joined


def _rows(x: Tensor, fmt: Format) -> Tensor:
    """Return what rows [R, J] have, not negative, by tiles: [I, rows, J], zero where they end."""
    unit = len(x) if fmt.rows == WHOLE else fmt.rows
    return F.pad(x, (0, 0, 0, -len(x) % unit)).unflatten(0, (-1, unit))


def _sum_rows(x: Tensor, fmt: Format) -> Tensor:
    return _rows(x, fmt).sum(1)


def _residual(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Return x minus its rounded value, float64."""
    values = round_to_values_(x / scale, fmt.element)
    return torch.addcmul(x.double(), values.double(), scale.double(), value=-1)


def _metric(hessian: Tensor | None, fmt: Format) -> Tensor:
    """Return the Hessians float64 [B, 32, 32]; the identity where none of a tile was excited."""
    assert hessian is not None, "the operator refuses it"
    full = hessian.to(torch.float64)
    full = (full + full.mT) / 2
    per_tile = len(full) if fmt.block == WHOLE else fmt.block // HESSIAN_BLOCK
    excited = full.abs().amax((1, 2))
    tiles = F.pad(excited, (0, -len(full) % per_tile)).view(-1, per_tile).amax(1)
    dead = (tiles == 0).repeat_interleave(per_tile)[: len(full)]
    identity = torch.eye(HESSIAN_BLOCK, dtype=torch.float64, device=full.device)
    return torch.where(dead.view(-1, 1, 1), identity, full)


def _row_errors(residual: Tensor, metric: Tensor | None, fmt: Format) -> Tensor:
    """Return the errors float64 [R, J] of rows [R, K]: sums of squares, or of r^T H r by blocks."""
    if metric is None:
        return tile_sums(residual.square_(), fmt)
    padded = F.pad(residual, (0, len(metric) * HESSIAN_BLOCK - residual.shape[-1]))
    blocks = padded.unflatten(1, (len(metric), HESSIAN_BLOCK)).transpose(0, 1)  # [B, R, 32]
    energy = (blocks @ metric).mul_(blocks).sum(2).t()  # [R, B]
    if fmt.block == WHOLE:
        return energy.sum(1, keepdim=True)
    share = fmt.block // HESSIAN_BLOCK
    return F.pad(energy, (0, -energy.shape[1] % share)).unflatten(1, (-1, share)).sum(2)
