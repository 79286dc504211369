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
from ..common.rounding import band_of, bands, round_to_codes_, round_to_values_, scale_of, spread
from ..statistics.naive import HESSIAN_BLOCK, diagonal_blocks
from .joint_reference import ROWS, damp, upper_factor

# Scales in an octave, 2.2 % apart.
CANDIDATES = 32

# Numbers of a weight in one pass: those that stay in a CPU's cache, those that fill a GPU.
_TILE_CPU, _TILE_GPU = 1 << 17, 1 << 23


def search_float_scales(
    weight: Tensor, hessian: Tensor | None, fmt: Format, objective: str
) -> tuple[Tensor, Tensor]:
    """Quantize a weight [N, K] with a scale for each tile: codes uint8 [N, K], float32 [I, J]."""
    # "naive" takes amax / element.max, "sse" and "hessian" the best of `candidate_scales`, of equal
    # ones the smaller; columns that no token excited are searched by squared error.
    amax = torch.zeros(fmt.scale_shape(*weight.shape), device=weight.device)
    for part in _parts(weight, fmt):
        own, found = band_of(amax, part, fmt), _tiles(weight[part].float(), fmt).abs().amax((1, 3))
        torch.maximum(own, found, out=own)
    scale = scale_of(amax, fmt)
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
    """Return the errors float64 [C, I, J] of a weight [N, K] with each of some scales [C, I, J]."""
    # objective: "sse" or "hessian".
    metric = _metric(hessian, fmt) if objective == "hessian" else None
    share = 1 if metric is None else HESSIAN_BLOCK
    errors = torch.zeros(known.shape, dtype=torch.float64, device=weight.device)
    for part in _parts(weight, fmt):
        x = weight[part].to(torch.float32)
        for candidates, error in zip(known, errors, strict=True):
            steps = spread(band_of(candidates, part, fmt), x.shape, fmt)
            values = round_to_values_(x / steps, fmt.element).double()
            residual = torch.addcmul(x.double(), values, steps.double(), value=-1)
            energies = _tiles(_energies(residual, metric), fmt, share).sum(3).sum(1)
            band_of(error, part, fmt).add_(energies)
    return errors


def codes_at(weight: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Return the codes uint8 [N, K] of a weight, rounded to nearest at scales [I, J]."""
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for part in _parts(weight, fmt):
        x = weight[part].to(torch.float32)
        steps = spread(band_of(scale, part, fmt), x.shape, fmt)
        codes[part] = round_to_codes_(x / steps, fmt.element)
    return codes


def _parts(weight: Tensor, fmt: Format) -> list[slice]:
    numbers = _TILE_CPU if weight.device.type == "cpu" else _TILE_GPU
    return list(bands(weight.shape, fmt, numbers))


def candidate_scales(naive: Tensor) -> Tensor:
    """Return the scales that a search tries, float32 [C, ...], ascending to naive ones [...]."""
    steps = torch.arange(1 - CANDIDATES, 1, dtype=torch.float64, device=naive.device)
    factors = torch.exp2(steps / CANDIDATES).view(-1, *[1] * naive.ndim)
    return (naive.double() * factors).float().clamp_(min=2.0**-126)


def _tiles(x: Tensor, fmt: Format, share: int = 1) -> Tensor:
    """Return [R, K / share] by tiles, [I, rows, J, columns / share], zeros beyond it."""
    rows, columns = fmt.rows or len(x), -(-fmt.block // share) or x.shape[1]
    x = F.pad(x, (0, -x.shape[1] % columns, 0, -len(x) % rows))
    return x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


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


def _energies(residual: Tensor, metric: Tensor | None) -> Tensor:
    """Return the squares of rows [R, K], or their r^T H r by blocks [R, B]."""
    if metric is None:
        return residual.square_()
    padded = F.pad(residual, (0, len(metric) * HESSIAN_BLOCK - residual.shape[-1]))
    blocks = padded.unflatten(1, (len(metric), HESSIAN_BLOCK)).transpose(0, 1)  # [B, R, 32]
    return (blocks @ metric).mul_(blocks).sum(2).t()


def gptq_float_scales(
    weight: Tensor,
    hessian: Tensor,
    fmt: Format,
    damping: float,
    shrinkage: float,
    start: int,
    stop: int,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Round rows of a weight [N, K] column by column, those with the largest inputs first."""
    # scale: [I, J] of tiles, where it is known; else that of "hessian", [K, K] here.
    columns = weight.shape[1]
    if scale is None:
        scale = search_float_scales(weight, diagonal_blocks(hessian), fmt, "hessian")[1]
    missing = -columns % HESSIAN_BLOCK
    hessian = F.pad(hessian, (0, missing, 0, missing))
    damped = damp(hessian, damping, shrinkage, HESSIAN_BLOCK)[:columns, :columns]
    order = damped.diagonal().argsort(descending=True, stable=True)
    factor = upper_factor(damped[order][:, order])
    feedback = (factor / factor.diagonal()).float()  # M of joint_reference.py
    codes = torch.empty((stop - start, columns), dtype=torch.uint8, device=weight.device)
    for part in bands(weight.shape, fmt, ROWS * columns):
        here = range(max(part.start, start), min(part.stop, stop))
        if here:
            shape = (part.stop - part.start, columns)
            steps = spread(band_of(scale, part, fmt), shape, fmt).expand(shape)
            steps = steps[here.start - part.start : here.stop - part.start, order]
            x = weight[here.start : here.stop, order].to(torch.float32)
            found = _round_columns(x, steps, feedback, fmt)
            codes[here.start - start : here.stop - start, order] = found
    return codes, band_of(scale, slice(start, stop), fmt)


def _round_columns(x: Tensor, steps: Tensor, feedback: Tensor, fmt: Format) -> Tensor:
    """Return the codes [R, K] of columns that are rounded in order, with the errors of others."""
    x, steps = x.t().contiguous(), steps.t().contiguous()  # [K, R]
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    residual = torch.zeros_like(x)
    for first in range(0, len(x), HESSIAN_BLOCK):
        here = slice(first, min(first + HESSIAN_BLOCK, len(x)))
        target = torch.addmm(x[here], feedback[:first, here].t(), residual[:first])
        for i in range(here.start, here.stop):
            added = feedback[first:i, i] @ residual[first:i]
            quotient = (target[i - first] + added) / steps[i]
            values = round_to_values_(quotient, fmt.element)
            residual[i] = x[i] - values * steps[i]
            codes[i] = round_to_codes_(values, fmt.element)
    return codes.t()
