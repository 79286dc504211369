"""Statistics that calibration collects of the inputs of linear layers, and errors by them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..core.quant_state import QuantState
from ..errors import ShapeError, expected
from ..kernels.common.rounding import bands
from ..kernels.experts.naive import expert_hessian, hessian_of_all
from ..kernels.rotate.naive import rotate_blocks, rotate_hessian
from ..kernels.statistics import naive as kernels

# Elements of a weight in one pass: those that fit into a CPU's cache, those that fill a GPU.
_TILE_CPU, _TILE_GPU = 1 << 19, 1 << 23

Update = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], None]
# Inputs x [T, K] or [T, k, K] and the experts ids [T, k] of each batch.
Inputs = tuple[tuple[Tensor, Tensor], ...]


def _statistic(
    shape: Callable[[int], tuple[int, ...]],
    rotate: Callable[[Tensor, int], Tensor] | None = None,
    update: Update | None = None,
    prior: Callable[[int], float] = lambda columns: 0.0,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Return a field of Stats: a total over the tokens of inputs x [..., K], first zero."""
    # `shape` is that of the total, given K. `rotate` returns the total of inputs that are rotated
    # in blocks, None if it cannot be told. `update` adds x to a total in place, given both, the
    # same tokens in the float model (None outside of layer-by-layer calibration) and bool [T] (None
    # if all count); None for those of the operators `observe`. `prior` returns how many average
    # tokens are added to those of one expert, given K (docs/moe.md).
    metadata = {"shape": shape, "rotate": rotate, "update": update, "prior": prior, "dtype": dtype}
    return field(default=None, metadata=metadata)


def _square(columns: int) -> tuple[int, int]:
    return columns, columns


def _blocks(columns: int) -> tuple[int, int, int]:
    return math.ceil(columns / kernels.HESSIAN_BLOCK), kernels.HESSIAN_BLOCK, kernels.HESSIAN_BLOCK


def _add_cross(total: Tensor, x: Tensor, reference: Tensor | None, visible: Tensor | None) -> None:
    if reference is not None:
        kernels.observe_cross_ref(x, reference, total)


@dataclass(frozen=True, eq=False)
class Stats:
    """Statistics of the inputs of a linear layer; None for those that were not collected.

    A method reads those of one matrix [N, K]. A plan has those of a stack [E, N, K] of them, one
    for a dense layer: each total has E in front, and `matrix` returns the statistics of one.

    Attributes:
        block_hessian: float32 [ceil(K / 32), 32, 32], the sum over tokens of x x^T in blocks.
        tokens: number of tokens, of all matrices together.
        input_amax: largest magnitude; 0.0 without tokens.
        hessian: float32 [K, K], the whole sum.
        cross: float32 [K, K], the sum of (a - x) x^T, where the float model has the input a.
        magnitudes: int64 [2048], a histogram of the largest magnitudes of 16 columns, with eight
            bins an octave.
        counts: int64 [E], tokens of each expert; None for a dense layer.
        routing: float32 [E], the sum of the weights that its tokens gave each expert.
        prior_block_hessian: sums [E, ...] over tokens that each expert was shown, chosen or not;
            without them the average is that of all experts.
        prior_hessian: the same for the whole sums.
        prior_counts: int64 [E], the number of these tokens.

    Example:
        >>> sums = torch.stack([torch.eye(32), 3 * torch.eye(32)])
        >>> stack = fp4pass.methods.Stats(hessian=sums, tokens=4, counts=torch.tensor([1, 3]))
        >>> stack.merged(stack).tokens, stack.matrix(1, prior=2.0).hessian[0, 0]
        (8, tensor(5.))
    """

    block_hessian: Tensor | None = _statistic(_blocks, rotate_blocks, prior=lambda columns: 32.0)  # noqa: RUF009
    tokens: int = 0
    input_amax: float = 0.0
    hessian: Tensor | None = _statistic(_square, rotate_hessian, prior=lambda columns: columns / 2)  # noqa: RUF009
    cross: Tensor | None = _statistic(_square, update=_add_cross)  # noqa: RUF009
    magnitudes: Tensor | None = _statistic(  # noqa: RUF009
        lambda columns: (kernels.BINS,),
        update=lambda total, x, reference, visible: kernels.observe_magnitudes_ref(
            x, total, visible
        ),
        dtype=torch.int64,
    )
    counts: Tensor | None = None
    routing: Tensor | None = None
    prior_block_hessian: Tensor | None = None
    prior_hessian: Tensor | None = None
    prior_counts: Tensor | None = None

    def has(self, need: str) -> bool:
        """Return whether a statistic was collected."""
        return getattr(self, need) is not None

    def collected_tensors(self) -> dict[str, Tensor]:
        """Return the sums that were collected, by name; histograms are of no matrix."""
        sums = (name for name, each in STATISTICS.items() if each["dtype"].is_floating_point)
        return {name: value for name in sums if (value := getattr(self, name)) is not None}

    def to(self, device: torch.device) -> Stats:
        """Return the same statistics on a device."""
        known = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        tensors = {name: each for name, each in known.items() if isinstance(each, Tensor)}
        moved: dict[str, Any] = {name: each.to(device) for name, each in tensors.items()}
        return dataclasses.replace(self, **moved)

    def merged(self, other: Stats) -> Stats:
        """Return the statistics of both sequences of inputs, as far as both have them."""
        found: dict[str, Any] = {}
        for each in dataclasses.fields(self):
            ours, theirs = getattr(self, each.name), getattr(other, each.name)
            theirs = theirs.to(ours.device) if isinstance(ours, Tensor) else theirs
            found[each.name] = None if ours is None or theirs is None else ours + theirs
        found["input_amax"] = max(self.input_amax, other.input_amax)
        return type(self)(**found)

    def matrix(self, index: int, prior: float | None = None) -> Stats:
        """Return the statistics of one matrix, those of an expert blended with average tokens.

        Args:
            index: the matrix.
            prior: the number of average tokens; None for that of each statistic.
        """
        found = self._own(index)
        if self.counts is None:
            return Stats(tokens=self.tokens, input_amax=self.input_amax, **found)
        average: dict[str, Tensor] = {}
        for name, own in found.items():
            worth = STATISTICS[name]["prior"](own.shape[-1]) if prior is None else prior
            if worth:
                average = average or self._average(index)
                found[name] = own + worth * average[name]
        return Stats(tokens=int(self.counts[index]), input_amax=self.input_amax, **found)

    def _own(self, index: int) -> dict[str, Tensor]:
        """Return the sums of one matrix."""
        return {name: total[index] for name, total in self.collected_tensors().items()}

    def _average(self, index: int) -> dict[str, Tensor]:
        """Return the averages over the tokens that an expert was shown, or over all experts."""
        if not (shown := self._shown(index)):
            return self._averages
        return {
            name: getattr(self, f"prior_{name}")[index] / shown for name in self.collected_tensors()
        }

    def _shown(self, index: int) -> int:
        """Return the number of tokens that an expert was shown, chosen or not."""
        return 0 if self.prior_counts is None else int(self.prior_counts[index])

    @cached_property
    def _averages(self) -> dict[str, Tensor]:
        """The averages over the tokens of all experts."""
        return {
            name: each.sum(0) / max(self.tokens, 1)
            for name, each in self.collected_tensors().items()
        }

    def rotated(self, rotation: int) -> Stats:
        """Return the statistics of rotated inputs of one matrix, with a bound as `input_amax`.

        A rotation by more than 32 needs the whole Hessian, else blocks count as uncorrelated.
        """
        found = {
            name: STATISTICS[name]["rotate"](total, rotation)
            for name, total in self.collected_tensors().items()
            if STATISTICS[name]["rotate"] is not None
        }
        if self.hessian is not None:
            found["block_hessian"] = kernels.diagonal_blocks(found["hessian"])
        return Stats(tokens=self.tokens, input_amax=self.input_amax * math.sqrt(rotation), **found)


# The statistics, by their names (`_statistic`).
STATISTICS = {each.name: each.metadata for each in dataclasses.fields(Stats) if each.metadata}


@dataclass(frozen=True, eq=False)
class ExpertInputs(Stats):
    """Statistics whose Hessians are made of inputs when asked for, one expert at a time."""

    # `prior_inputs` are those that each expert was shown, chosen or not.

    inputs: Inputs = ()
    prior_inputs: Inputs = ()

    def has(self, need: str) -> bool:
        """Return whether a statistic was collected."""
        is_made = need in ("hessian", "block_hessian")
        return bool(self.inputs) if is_made else super().has(need)

    def _own(self, index: int) -> dict[str, Tensor]:
        return _both(expert_hessian(self.inputs, index, self._device))

    def _average(self, index: int) -> dict[str, Tensor]:
        if not (shown := self._shown(index)):
            return self._averages
        return _both(expert_hessian(self.prior_inputs, index, self._device) / shown)

    @cached_property
    def _averages(self) -> dict[str, Tensor]:
        assert self.counts is not None, "the observer counts"
        total = hessian_of_all(self.inputs, len(self.counts), self._device)
        return _both(total / max(self.tokens, 1))

    @property
    def _device(self) -> torch.device:
        assert self.counts is not None, "the observer counts"
        return self.counts.device


def _both(hessian: Tensor) -> dict[str, Tensor]:
    """Return a Hessian with its blocks."""
    return {"hessian": hessian, "block_hessian": kernels.diagonal_blocks(hessian)}


def squared_errors(weight: Tensor, state: QuantState, stats: Stats | None = None) -> list[float]:
    """Return |W - Q|^2 and |W|^2, and with a Hessian the squared lengths of (W - Q) x and W x.

    Args:
        weight: [N, K], a float tensor.
        state: the same weight as any method quantized it.
        stats: of the layer's inputs x, over whose tokens the last two are summed: by the whole
            Hessian, which sees that errors of one block make up for those of others, else by its
            diagonal blocks.

    Raises:
        ShapeError: the state is that of another weight.

    Example:
        >>> weight = torch.randn(4, 32)
        >>> error, size = fp4pass.methods.squared_errors(weight, fp4pass.quantize(weight, "nvfp4"))
        >>> 0 < error < 0.02 * size
        True
    """
    if tuple(weight.shape) != state.shape:
        raise ShapeError(expected("weight", f"the shape of state, {state.shape}", weight.shape))
    stats = stats or Stats()
    has_hessian = stats.hessian is not None or stats.block_hessian is not None
    fmt, device = state.format, weight.device
    divisor = torch.tensor([1.0 / state.global_scale], dtype=torch.float32, device=device)
    sums = torch.zeros(2, 2 if has_hessian else 1, dtype=torch.float64, device=device)
    numbers = _TILE_CPU if device.type == "cpu" else _TILE_GPU
    for part in bands(weight.shape, fmt, numbers):
        dense = weight[part].detach().float()
        own = state.rows(part.start, part.stop)
        stored = (own.qdata, own.scale, divisor)
        quantized = ops.dequantize(*stored, fmt.key, torch.float32)
        both = torch.stack((dense - quantized, dense))  # [2, R, K]
        sums[:, 0] += both.double().square_().sum((1, 2))
        if has_hessian:
            sums[:, 1] += output_energies(both, stats)
    # An indefinite Hessian by rounding has energies a little below zero.
    return sums.clamp_(min=0).t().flatten().tolist()


def output_energies(rows: Tensor, stats: Stats) -> Tensor:
    """Return float64 [B], tr V H V^T for each V of float32 rows [B, R, K], as Hessians tell it."""
    if stats.hessian is not None:
        hessian = stats.hessian.to(rows.device)
        with kernels.ieee_products():
            return ((rows @ hessian) * rows).sum((1, 2), dtype=torch.float64)
    assert stats.block_hessian is not None, "the caller has a Hessian"
    hessian = stats.block_hessian.to(rows.device, torch.float64)
    padding = len(hessian) * kernels.HESSIAN_BLOCK - rows.shape[-1]
    padded = torch.nn.functional.pad(rows, (0, padding)).double()
    blocks = padded.flatten(0, 1).view(-1, len(hessian), kernels.HESSIAN_BLOCK).transpose(0, 1)
    energy = (blocks @ hessian * blocks).sum((0, 2))
    return energy.view(len(rows), -1).sum(1)
