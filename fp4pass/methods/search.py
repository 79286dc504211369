"""Block scales by an exact search: naive, of least squared error, or of least output error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..core.formats import Format
from ..core.quant_state import QuantState
from ..errors import OptionError, ShapeError, expected, require_number, unknown_name
from ..kernels.search.float_scales import codes_at
from ..kernels.statistics.naive import ieee_products
from ..ops.checks import require_block_scales, require_weight
from .base import Certificate, Result, method
from .statistics import Stats

CODES = ("rtn", "joint")


def search_scales(
    weight: Tensor, fmt: Format, global_scale: float, objective: str, hessian: Tensor | None = None
) -> QuantState:
    """Quantize a weight by the exact search of `ops.search`.

    Args:
        weight: [N, K].
        fmt: the format.
        global_scale: the multiplier of all block scales.
        objective: "naive", "sse" or "hessian".
        hessian: [ceil(K / 32), 32, 32] float32 for "hessian".

    Raises:
        ShapeError: the weight has no whole blocks.
        DtypeError: it is no float tensor.
        NonFiniteError: it holds NaN or infinity.

    Example:
        >>> fmt = fp4pass.LinearConfig("nvfp4").format
        >>> state = fp4pass.methods.search_scales(torch.randn(4, 32), fmt, 2.0**-10, "sse")
        >>> state.scale.shape
        torch.Size([4, 2])
    """
    require_weight(weight, fmt)
    if not 0.0 < global_scale < math.inf:
        raise OptionError(expected("global_scale", "a positive number", global_scale))
    return _search(weight, fmt, global_scale, objective, hessian)


def may_be_exact(matrix: Tensor, fmt: Format) -> bool:
    """Return whether a matrix [N, K] may be of a format: the block of the largest number is."""
    if not fmt.has_global_scale:
        return False
    place = int(matrix.detach().abs().argmax())
    block = matrix.detach().reshape(-1, fmt.block)[place // fmt.block].clone().view(1, -1)
    return _is_exact(block, fmt, 2 * fmt.global_scale_for(float(block.abs().max())))


def exact_global_scale(matrices: Sequence[Tensor], fmt: Format, global_scale: float) -> float:
    """Return the global scale of matrices: twice the given one if "sse" is exact only with that."""
    # Numbers that were quantized before, when one that was clipped was larger, have had the next.
    for scale in (global_scale, 2 * global_scale):
        if all(_is_exact(x, fmt, scale) for x in matrices):
            return scale
    return global_scale


def _is_exact(matrix: Tensor, fmt: Format, global_scale: float) -> bool:
    """Return whether "sse" changes no number of a matrix."""
    if global_scale > 2.0**126:
        return False
    packed, bits = ops.search(matrix.detach(), None, global_scale, fmt.key, "sse")
    stored = torch.tensor([fmt.global_scale_of(global_scale)], device=matrix.device)
    dense = ops.dequantize(packed, bits, stored, fmt.key, torch.float32)
    return torch.equal(dense, matrix.detach().float())


def _search(
    weight: Tensor,
    fmt: Format,
    global_scale: float,
    objective: str,
    hessian: Tensor | None = None,
    scale: float | None = None,
) -> QuantState:
    weight, shape, dtype = weight.detach(), tuple(weight.shape), weight.dtype
    if scale is not None:
        of_tensor = weight.new_full((1, 1), scale, dtype=torch.float32)
        codes = codes_at(weight, of_tensor, fmt)
        return QuantState(codes, of_tensor, global_scale, fmt, shape, dtype)
    packed, bits = ops.search(weight, hessian, global_scale, fmt.key, objective)
    return QuantState(packed, bits, global_scale, fmt, shape, dtype)


def _search_stack(
    objective: str, weight: Tensor, fmt: Format, global_scales: Sequence[float], options: Any
) -> list[QuantState]:
    """Search all matrices of a stack [E, N, K] at once."""
    packed, scale = ops.search_stack(weight.detach(), global_scales, fmt.key, objective)
    found = zip(packed, scale, global_scales, strict=True)
    return [QuantState(*each, fmt, tuple(weight.shape[1:]), weight.dtype) for each in found]


@dataclass(frozen=True)
class Naive:
    """Options of the method "naive": none.

    Example:
        >>> model = fp4pass.convert(model, "nvfp4a16", fp4pass.Naive())
    """


@dataclass(frozen=True)
class Sse:
    """Options of the method "sse": none.

    Example:
        >>> model = fp4pass.convert(model, "nvfp4a16", fp4pass.Sse())
    """


def _alone(
    objective: str,
    weight: Tensor,
    stats: Stats,
    fmt: Format,
    global_scale: float,
    options: Naive | Sse,
    scale: float | None = None,
) -> QuantState:
    """Choose the scale of each block by the weight alone."""
    # "naive" rounds amax / element.max to a scale; for powers of two it takes the exponent of amax.
    # "sse" minimizes sum(r^2) over all scales of the format; for float32 scales over an octave
    # below amax / element.max, 2^(1/32) apart.
    return _search(weight, fmt, global_scale, objective, scale=scale)


for _objective, _options in (("naive", Naive), ("sse", Sse)):
    _stack = partial(_search_stack, _objective)
    method(_objective, _options, stack=_stack, objective=_objective)(partial(_alone, _objective))


@dataclass(frozen=True)
class Hessian:
    """Options of the method "hessian".

    Attributes:
        codes: "rtn" rounds to nearest, so that the scales are proved optimal; "joint" chooses codes
            with the scale, which makes no block worse and many better.
        exact: search until scale and codes are proved optimal, or the budget is spent; the
            report has the proved share and the gap. It takes minutes for a million weights.
        node_budget: nodes to look at for each block.

    Raises:
        OptionError: a value is out of range.

    Example:
        >>> model = fp4pass.prepare(model, fp4pass.Hessian(codes="joint"))
        >>> model = fp4pass.convert(fp4pass.calibrate(model, batches, progress=False))
    """

    codes: str = "rtn"
    exact: bool = False
    node_budget: int = 4096

    def __post_init__(self) -> None:
        if self.codes not in CODES:
            raise unknown_name("Hessian: codes", self.codes, CODES)
        if not isinstance(self.exact, bool):  # as a recipe may have it
            raise OptionError(expected("Hessian: exact", "True or False", repr(self.exact)))
        require_number("Hessian: node_budget", "1, 2, ...", self.node_budget, least=1)

    @property
    def needs_block_scales(self) -> bool:
        """Whether it is for formats with 8-bit block scales alone."""
        return self.codes == "joint" or self.exact


def certify(
    weight: Tensor, state: QuantState, block_hessian: Tensor, node_budget: int = 4096
) -> tuple[QuantState, Certificate]:
    """Search better scales and codes for each block, and bound how far they are from the best.

    Args:
        weight: [N, K].
        state: the weight as any method quantized it.
        block_hessian: [ceil(K / 32), 32, 32] float32.
        node_budget: nodes to look at for each block.

    Example:
        >>> weight = torch.randn(1, 16)
        >>> state = fp4pass.quantize(weight, "nvfp4")
        >>> better, certificate = fp4pass.methods.certify(weight, state, torch.eye(32)[None])
        >>> bool((certificate.bound <= certificate.loss).all())
        True
    """
    if tuple(weight.shape) != state.shape:
        raise ShapeError(expected("weight", f"the shape of state, {state.shape}", weight.shape))
    # Imported late: few programs prove anything.
    from ..kernels.search.branch_and_bound import prove

    arguments = (block_hessian, state.global_scale, state.format, node_budget)
    qdata, scale, loss, bound = prove(weight.detach(), state.qdata, state.scale, *arguments)
    return dataclasses.replace(state, qdata=qdata, scale=scale), Certificate(loss, bound)


@method("hessian", Hessian, needs=("block_hessian",), objective="hessian")
def hessian(
    weight: Tensor,
    stats: Stats,
    fmt: Format,
    global_scale: float,
    options: Hessian,
    scale: float | None = None,
) -> QuantState | Result:
    """Choose the scale of each block that minimizes r^T H r, over the same scales as "sse"."""
    # A row, or a tile of more columns than a block of the Hessian has, has the sum over its blocks.
    block_hessian = stats.block_hessian
    state = _search(weight, fmt, global_scale, "hessian", block_hessian, scale)
    assert block_hessian is not None, "the search refuses it"
    if options.codes == "joint" or options.exact:
        stored = (state.qdata, state.scale)
        with ieee_products():
            qdata, bits = ops.joint(weight.detach(), *stored, block_hessian, global_scale, fmt.key)
        state = dataclasses.replace(state, qdata=qdata, scale=bits)
    if not options.exact:
        return state
    return certify(weight, state, block_hessian, options.node_budget)


def scale_counts(scale: QuantState | Tensor, fmt: Format) -> dict[float, int]:
    """Count the blocks by scale, without the global scale: {scale: blocks}, ascending, NaN last."""
    require_block_scales(fmt)
    bits = scale.scale if isinstance(scale, QuantState) else scale.view(torch.uint8)
    found: dict[float, int] = {}
    for byte, count in enumerate(bits.flatten().int().bincount().tolist()):
        if not count:
            continue
        # One NaN for all bytes that stand for no scale.
        value = fmt.scale.decode(byte) if byte < fmt.scale.nan else math.nan
        found[value] = found.get(value, 0) + count
    return found
