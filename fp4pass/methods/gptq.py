"""GPTQ: propagate the rounding error of a block to the blocks not yet quantized."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..core.formats import Format
from ..core.quant_state import QuantState
from ..errors import ABOVE_0, ShapeError, expected, require_number, unknown_name
from ..kernels.search.float_scales import gptq_float_scales
from ..kernels.search.joint_reference import ROWS, damp, upper_factor
from ..kernels.statistics.naive import ieee_products
from ..ops.checks import require_hessian
from .base import method
from .statistics import Stats

TARGETS = ("plain", "cross")

# Rows at a time in float64.
_ROWS = 1 << 12


@dataclass(frozen=True)
class Gptq:
    """Options of the method "gptq"; docs/quality.md says how much each improves.

    Float32 scales are chosen before, as by "hessian", and codes one after the other, without
    sweeps.

    Attributes:
        damping: added to the diagonal of the Hessian, relative to its mean.
        shrinkage: the part of the Hessian between blocks that is left out, in [0, 1]. At 0 weights
            fit the calibration text and lose on others; at 1 blocks compensate for nothing.
        sweeps: how often all blocks are visited again.
        target: approximate the weight ("plain"), or its product with the inputs of the float model
            ("cross"), which needs prepare(sequential=True).
        target_damping: as damping, for the target of "cross"; more keeps it nearer to the weight.

    Raises:
        OptionError: a value is out of range.

    Example:
        >>> model = fp4pass.prepare(model, fp4pass.Gptq(damping=0.1))
        >>> model = fp4pass.convert(fp4pass.calibrate(model, batches, progress=False))
    """

    damping: float = 0.1
    shrinkage: float = 0.25
    sweeps: int = 1
    target: str = "plain"
    target_damping: float = 0.5

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise unknown_name("Gptq: target", self.target, TARGETS)
        for name in ("damping", "target_damping"):
            value = getattr(self, name)
            require_number(f"Gptq: {name}", "a number above 0", value, float, ABOVE_0)
        require_number("Gptq: shrinkage", "a number in [0, 1]", self.shrinkage, float, 0, 1)
        require_number("Gptq: sweeps", "0, 1, 2, ...", self.sweeps, least=0)

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields of Stats, beyond the Hessian."""
        return ("cross",) if self.target == "cross" else ()


def target(weight: Tensor, stats: Stats, options: Gptq) -> Tensor:
    """Return the weight V [N, K] of least |W a - V x|^2 + target_damping |W - V|^2, in float32."""
    # a are the inputs of the float model, x those of the quantized one. With H the damped sum of x
    # x^T and C that of (a - x) x^T, V = W + W C H^-1. |W a - Q x|^2 is then (V - Q) H (V - Q)^T for
    # each row and a constant, which `gptq` makes small over Q, with its own damping and shrinkage.
    # Without statistics, before a layer is reached, it is the weight.
    if options.target == "plain" or stats.hessian is None or stats.cross is None:
        return weight
    hessian, cross = stats.hessian.to(weight.device), stats.cross.to(weight.device)
    mean = hessian.diagonal().mean(dtype=torch.float64)
    cross = cross.to(torch.float64) / torch.where(mean > 0, mean, 1.0)
    factor = upper_factor(damp(hessian, options.target_damping))
    found = weight.to(torch.float32, copy=True)
    for rows in found.split(_ROWS):
        # [K, N] for G G^T = H.
        added = torch.linalg.solve_triangular(factor, (rows.double() @ cross).mT, upper=True)
        rows += torch.linalg.solve_triangular(factor.mT, added, upper=False).mT.float()
    return found


@method("gptq", Gptq, needs=("hessian",), target=target, rows_at_once=ROWS, objective="hessian")
def gptq(
    weight: Tensor,
    stats: Stats,
    fmt: Format,
    global_scale: float,
    options: Gptq,
    rows: slice = slice(None),
    scale: float | None = None,
) -> QuantState:
    """Choose scales and codes of small tr (W - Q) H (W - Q)^T, the error of the layer's output."""
    if stats.hessian is None:
        raise ShapeError(expected("The Hessian", f"shape {(weight.shape[1],) * 2}", "None"))
    start, stop, _ = rows.indices(len(weight))
    shape, dense = (stop - start, weight.shape[1]), weight.detach()
    by, given = (float(options.damping), float(options.shrinkage)), (start, stop)
    with ieee_products():
        if fmt.has_float_scale:
            require_hessian(dense, stats.hessian)
            known = None if scale is None else weight.new_full((1, 1), scale, dtype=torch.float32)
            found = gptq_float_scales(dense, stats.hessian, fmt, *by, *given, known)
        else:
            sweeps = options.sweeps
            found = ops.gptq(dense, stats.hessian, global_scale, fmt.key, *by, sweeps, *given)
    return QuantState(*found, global_scale, fmt, shape, weight.dtype)
