"""Block scales of least output error, by the block Hessians of the calibration inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from .. import ops
from ..core.formats import Format
from ..core.quant_state import QuantState
from ..errors import OptionError, unknown_name
from ..kernels.search.branch_and_bound import prove
from ..kernels.statistics.reference import ieee_products
from .base import Stats, method, search_scales

CODES = ("rtn", "joint")


@dataclass(frozen=True)
class Hessian:
    """Options. Raises OptionError.

    codes: rounded to nearest ("rtn"), so that the scales are the best of all, or chosen with the
    scale ("joint"), which makes no block worse and many better. exact: search on from there until
    scale and codes are proved to be the best, or node_budget nodes were looked at for the block;
    the report says how far that came. It takes minutes for a million weights.
    """

    codes: str = "rtn"
    exact: bool = False
    node_budget: int = 4096

    def __post_init__(self) -> None:
        if self.codes not in CODES:
            raise unknown_name("Hessian: codes", self.codes, CODES)
        if not isinstance(self.exact, bool):
            raise OptionError(f"Hessian: exact is {self.exact!r}; True or False is wanted.")
        if type(self.node_budget) is not int or self.node_budget < 1:
            raise OptionError(
                f"Hessian: node_budget is {self.node_budget!r}; a number above 0 is wanted."
            )


@dataclass(frozen=True, eq=False)
class Certificate:
    """What is known of the optimum of each block: float64 [N, K / block].

    loss: r^T H r; bound: no scale of the format with any codes is below it, to a part in 1e9.
    Eigenvalues of H below 1e-7 of its largest count as that.
    """

    loss: Tensor
    bound: Tensor

    @property
    def proved(self) -> float:
        """The share of the blocks that are as good as any can be."""
        return float((self.bound == self.loss).double().mean())

    @property
    def gap(self) -> float:
        """What at most could be won: the part of the loss that is above the bounds."""
        total = float(self.loss.sum())
        return 1.0 - float(self.bound.sum()) / total if total else 0.0


@dataclass(frozen=True, eq=False)
class Certified(QuantState):
    """A quantized weight with what was proved of it."""

    certificate: Certificate | None = None


def certify(
    weight: Tensor, state: QuantState, block_hessian: Tensor, node_budget: int = 4096
) -> tuple[QuantState, Certificate]:
    """Search better scales and codes for each block of a quantized weight; what is found, and how
    far from the best it can be.

    weight: [N, K]; block_hessian: [ceil(K / 32), 32, 32] float32; node_budget: for each block.
    """
    arguments = (block_hessian, state.global_scale, state.format, node_budget)
    qdata, scale, loss, bound = prove(weight.detach(), state.qdata, state.scale, *arguments)
    return dataclasses.replace(state, qdata=qdata, scale=scale), Certificate(loss, bound)


@method("hessian", Hessian, needs=("block_hessian",))
def hessian(
    weight: Tensor, stats: Stats, fmt: Format, global_scale: float, options: Hessian
) -> QuantState:
    """The scale of each block that minimizes r^T H r, over all scales of the format; codes too."""
    block_hessian = stats.block_hessian
    state = search_scales(weight, fmt, global_scale, "hessian", block_hessian)
    assert block_hessian is not None
    if options.codes == "joint" or options.exact:
        stored = (state.qdata, state.scale)
        with ieee_products():
            qdata, scale = ops.joint(weight.detach(), *stored, block_hessian, global_scale, fmt.key)
        state = dataclasses.replace(state, qdata=qdata, scale=scale)
    if not options.exact:
        return state
    found, certificate = certify(weight, state, block_hessian, options.node_budget)
    facts = {field.name: getattr(found, field.name) for field in dataclasses.fields(QuantState)}
    return Certified(**facts, certificate=certificate)
