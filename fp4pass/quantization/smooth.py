"""Move outliers of activations into weights, where an exported graph proves that this is exact."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..errors import CalibrationError, StateError
from ..graph.folds import Channels, ScaleFold, fold_scales
from ..kernels.statistics.naive import HESSIAN_BLOCK
from ..methods import Stats
from ..record.state import SMOOTH, PreparedState, get_state, set_state
from .observers.observer import Observer, collect, observers_of


@dataclass(frozen=True)
class Smoothed:
    """Scales that were folded, powers of two."""

    producer: str  # makes the tensor whose channels were divided by the scales
    linears: tuple[str, ...]  # the layers whose weights were multiplied by them
    smallest: float
    largest: float

    def __str__(self) -> str:
        scales = f"{self.smallest:g} to {self.largest:g}"
        return f"{self.producer} -> {', '.join(self.linears)}: {scales}"


def smooth_graph(root: fx.GraphModule, strength: float) -> tuple[Smoothed, ...]:
    """Fold scales into a calibrated graph, and into its statistics (`fp4pass.smooth`)."""
    record = _require_calibrated(root)
    found = fold(root, root, strength, _squares_of_graph)
    for each, exponents in found.items():
        for observer in observers_of(linear.holder for linear in each.linears):
            rescale(observer, exponents)
    recipe = {**record.recipe, SMOOTH: strength}
    set_state(root, dataclasses.replace(record, recipe=recipe))
    return smoothed(root, found)


def fold(
    graph: fx.GraphModule,
    owner: nn.Module,
    strength: float,
    squares: Callable[[str, ScaleFold], Tensor | None],
) -> dict[ScaleFold, Tensor]:
    """Fold the scales that a graph proves into its parameters; return their exponents [K].

    Args:
        graph: the graph.
        owner: the model that has all names of the parameters: one with two is left as it is.
        strength: as `fp4pass.smooth` takes it.
        squares: returns the mean squares of the channels [K] that the linears of a fold read, given
            the name of the first of them; None where they are not known.
    """
    names = {module: name for name, module in graph.named_modules()}

    def choose(each: ScaleFold) -> Tensor | None:
        known = squares(names[each.linears[0].holder], each)
        return None if known is None else balance(each, strength, known)

    with torch.inference_mode(False), torch.no_grad():
        return dict(fold_scales(graph.graph, _own_addresses(owner), choose))


def smoothed(graph: fx.GraphModule, found: Mapping[ScaleFold, Tensor]) -> tuple[Smoothed, ...]:
    """Return what was folded, in the order of the graph."""
    names = {module: name for name, module in graph.named_modules()}
    return tuple(_smoothed(each, exponents, names) for each, exponents in found.items())


def mean_squares(stats: Stats) -> Tensor | None:
    """Return the mean squares of the channels [K'] of a dense layer, K' >= K; None without tokens.

    K' is K, up to a whole block of the Hessian.
    """
    if stats.block_hessian is None or not stats.tokens:
        return None
    return stats.block_hessian[0].diagonal(dim1=-2, dim2=-1).flatten() / stats.tokens


def _squares_of_graph(name: str, each: ScaleFold) -> Tensor | None:
    return mean_squares(collect(observers_of(linear.holder for linear in each.linears), name))


def _smoothed(fold: ScaleFold, exponents: Tensor, names: dict[nn.Module, str]) -> Smoothed:
    first: Channels = fold.divided[0]
    parts = (names[first.holder], first.name if first.name != "weight" else "")
    linears = tuple(names[linear.holder] for linear in fold.linears)
    scales = torch.exp2(exponents.double()).aminmax()
    return Smoothed(".".join(filter(None, parts)), linears, float(scales.min), float(scales.max))


def balance(fold: ScaleFold, strength: float, squares: Tensor) -> Tensor:
    """Return the exponents of the scales of a fold, integers [K]; squares: as `mean_squares`."""
    weights = [each.tensor.double().square().flatten(1).sum(1) for each in fold.weights]
    device = weights[0].device
    columns = torch.stack([each.to(device) for each in weights]).sum(0)
    squares = squares.to(device).double()[: len(columns)].clamp(min=0)
    wanted = (strength * squares.log2() - (1 - strength) * columns.log2()) / 2
    # Columns that are all zero, of inputs or of weights, keep scale 1.
    live = (squares > 0) & (columns > 0) & wanted.isfinite()
    exponents = torch.zeros_like(wanted)
    if live.any():
        exponents[live] = nearest_octaves(wanted[live])
    return exponents.to(torch.int64)


def nearest_octaves(wanted: Tensor) -> Tensor:
    """Return the integers [n] from which `wanted` has the least variance, with a mean near 0.

    Rounding cuts the circle of fractions at one half, wherever the channels are: those of one size
    would get scales of 1 and 2. Here all cuts compete. The rest has no better cut, so that the
    scales of a balanced fold are 1.

    Args:
        wanted: float64 [n], n > 0.
    """
    whole = wanted.floor()
    fractions, order = (wanted - whole).sort()
    # Behind cut i the first i fractions are an octave higher: sums of v and v^2 for each i.
    count = torch.arange(len(wanted), device=wanted.device, dtype=wanted.dtype)
    before = fractions.cumsum(0) - fractions
    total, squares = fractions.sum() + count, fractions.square().sum() + 2 * before + count
    cut = int((squares - total.square() / len(wanted)).argmin())
    found = whole.clone()
    found[order[:cut]] -= 1
    return found - torch.floor(found.mean() + 0.5)


def rescale(observer: Observer, exponents: Tensor) -> None:
    """Divide x by 2^exponents [K] in its statistics: the Hessian exactly, amax as a bound."""
    hessian, count, amax = observer.state
    rows = exponents.to(hessian.device)
    if hessian.ndim == 3:
        columns = len(hessian) * HESSIAN_BLOCK
        rows = F.pad(rows, (0, columns - len(rows))).view(len(hessian), HESSIAN_BLOCK)
    inverse = torch.exp2(-rows.double())
    # No magnitude of a channel is above the root of the sum of its squares, whose float32 sum is
    # within 1e-3, nor above that of all channels.
    bound = hessian.diagonal(dim1=-2, dim2=-1).double().clamp(min=0).sqrt() * (1 + 1e-3)
    bound = torch.minimum(bound, amax.double()) * inverse
    scaled = hessian * inverse.unsqueeze(-1).float() * inverse.unsqueeze(-2).float()
    observer.replace((scaled, count, bound.max().float().view(1)))


def _require_calibrated(root: nn.Module) -> PreparedState:
    record = get_state(root)
    if record is not None and not isinstance(record, PreparedState):
        raise StateError(
            "The model is already converted. Call fp4pass.smooth between calibrate and convert."
        )
    if record is None:
        raise StateError(
            "The model is not prepared. Call fp4pass.prepare(model) and calibrate it first."
        )
    method = "-" if record.config is None else record.config.method_name
    if not {"hessian", "block_hessian"} & set(record.needs):
        raise StateError(
            f"The model is prepared for method {method!r}, whose observers do not "
            "measure channels. Prepare a fresh copy with fp4pass.prepare(model, 'hessian')."
        )
    if not any(observer.state[1] for observer in observers_of(root.modules())):
        raise CalibrationError(
            "The model is not calibrated. Call fp4pass.calibrate(model, batches) first."
        )
    return record


def _own_addresses(root: nn.Module) -> set[int]:
    """Return the addresses of the tensors of a model whose memory belongs to no other."""
    named = (root.named_parameters, root.named_buffers)
    tensors = [tensor for each in named for _, tensor in each(remove_duplicate=False)]
    # Other subclasses need not have an address.
    plain = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter)]
    spans = sorted(_span(tensor) for tensor in plain if tensor.numel() and not tensor.is_meta)
    own, reached = set(), 0.0
    for (start, end), (following, _) in itertools.pairwise([*spans, (math.inf, math.inf)]):
        if reached <= start and end <= following:
            own.add(int(start))
        reached = max(reached, end)
    return own


def _span(tensor: Tensor) -> tuple[float, float]:
    """Return where the memory of a tensor begins and ends, gaps between its strides included."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
