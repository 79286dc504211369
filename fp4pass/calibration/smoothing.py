"""smooth: move outliers of activations into weights, where a graph proves that this is exact."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import calibration
from ..core.progress import shown
from ..distributed import ranks
from ..errors import StateError, TraceError, require_number
from ..graph.export import trace_call
from ..graph.folds import Channels, ScaleFold, fold_scales, scale
from ..quantization.observers.batches import call_arguments, device_of, require_batches, run_batches
from ..quantization.observers.observer import collect
from ..quantization.plan import Plan, plan_layers, require_float, require_layers
from ..quantization.quantize import dense_weight
from ..quantization.replace import attach_observers, unprepared
from ..record import state as rec
from ..record.rows import Report

_log = logging.getLogger(__name__)

# Tokens run before a trace, and the share of `_share_left` up to which a model is smoothed: 0.3
# where that lowers KL by 13 to 46 %, 0.5 to 0.65 where by up to 4 %, 0.88 to 0.94 where by none.
_FIRST_TOKENS, _MOST_LEFT = 512, 0.75


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


def smooth(
    model: nn.Module,
    strength: float = 0.5,
    *,
    data: Any = None,
    tokenizer: Any = None,
    progress: bool = True,
) -> tuple[Smoothed, ...]:
    """Even out the channels of inputs and of weights, in place, before a model is quantized.

    Where only linear layers read the output of a norm or another linear, channel j of it is divided
    by s_j and column j of their weights multiplied by it: s_j = x_j^strength / w_j^(1 - strength),
    x_j the root mean square of the channel in calibration and w_j that of the column, in the powers
    of two that leave the least variance in octaves. So the float model computes the same bits as
    before, as long as no value leaves the range of its dtype (of float16, it can). Doing it again
    changes nothing.

    A model is smoothed before `prepare`, for any method: it is run on `data`, and traced unless it
    is a graph, which proves that a call as the first of these reads a tensor nowhere else; a tensor
    that only other calls return, as with `output_hidden_states`, comes divided.

    Args:
        model: A live model in evaluation mode, or the graph of `fp4pass.trace` or torch.export.
            Scales that are not proved stay, so look at the result.
        strength: 0 evens out weights alone, 1 inputs alone.
        data: Run through the model, as by `calibrate`; a few thousand tokens are enough.
        tokenizer: As for `calibrate`.
        progress: As for `convert`.

    Returns:
        The scales that were folded, in the order of the graph.

    Raises:
        StateError: The model is prepared or converted.
        CalibrationError: The data holds nothing to learn from.
        TraceError: torch.export cannot trace a live model, which stays as it is.
        OptionError: strength is not a number from 0 to 1, or text needs a tokenizer and there is
            none.

    Source: SmoothQuant (arXiv:2211.10438), section 4, with powers of two.

    Example:
        >>> [fold.linears for fold in fp4pass.smooth(normed, data=batches, progress=False)]
        [('1',)]
        >>> model = fp4pass.calibrate(fp4pass.prepare(normed), batches, progress=False)
        >>> model = fp4pass.convert(model)
    """
    require_number("strength", "a number from 0 to 1", strength, float, 0, 1)
    root = rec.unwrap(model)
    if require_float(root, "smooth") is not None:
        raise StateError(
            f"smooth: the {type(root).__name__} is prepared already, and its statistics are of "
            "inputs that smoothing changes. Call fp4pass.smooth(model, data=...) before prepare."
        )
    batches = calibration.batches(data, tokenizer, model=root)
    require_batches(batches)
    with shown("smooth", progress):
        graph, found = _smooth(root, strength, list(batches))
    return _folded(graph, found)


def _smooth(
    root: nn.Module, strength: float, batches: list[Any]
) -> tuple[fx.GraphModule, dict[ScaleFold, Tensor]]:
    """Fold scales into a float model; return its graph, and the exponents of each fold [K].

    Raises TraceError, before anything is changed, if the model has no graph.
    """
    # Before anything is run. Without batches, the run says so.
    graph = root if isinstance(root, fx.GraphModule) else None
    if graph is None and batches:
        graph = trace_call(root, *call_arguments(batches[0], device_of(root)))
    _, squares = _observed(root, batches)
    assert graph is not None, "a run refuses no batches"
    names = {module: name for name, module in graph.named_modules()}

    def choose(each: ScaleFold) -> Tensor | None:
        known = squares.get(names[each.linears[0].holder])
        columns = [part.tensor.double().square().flatten(1).sum(1).cpu() for part in each.weights]
        return None if known is None else _balance(torch.stack(columns).sum(0), strength, known)

    # A parameter with two names is left as it is.
    with torch.inference_mode(False), torch.no_grad():
        found = dict(fold_scales(graph.graph, _own_addresses(root), choose))
    rec.remember_smoothing(root, strength)
    return graph, found


@contextmanager
def smoothed_unless_it_fails(
    root: nn.Module, strength: float, batches: list[Any], label: str
) -> Iterator[None]:
    """Smooth a model with outliers and a graph, and log it; an error inside takes that back."""
    found: dict[ScaleFold, Tensor] = {}
    try:
        left = _share_left(root, strength, batches[:1])
        if left <= _MOST_LEFT:
            found = _smooth(root, strength, batches)[1]
            _log.info("%s smoothed the inputs of %d groups of layers", label, len(found))
        else:
            why = "inputs are not smoothed: few outliers, smoothing would leave"
            _log.info("%s: %s %.0f %% of their error", label, why, 100 * left)
    except (StateError, TraceError) as error:
        _log.info("%s: inputs are not smoothed, which needs a graph: %s", label, error)
    try:
        yield
    except BaseException:
        if not rec.is_interrupted(root):
            # The bits of the parameters are as before.
            for fold, exponents in found.items():
                scale(fold, -exponents)
            rec.remember_smoothing(root, None)
        raise


def _share_left(root: nn.Module, strength: float, batches: list[Any]) -> float:
    """Return the share of a predicted error that smoothing leaves in the best tenth of layers."""
    # A graph needs no trace, so that there is little to save.
    if isinstance(root, fx.GraphModule):
        return 0.0
    for each in batches:
        if isinstance(each, Tensor) and each.ndim == 2 and not each.is_floating_point():
            batches = [each[: max(1, _FIRST_TOKENS // max(1, each.shape[1])), :_FIRST_TOKENS]]
    plan, squares = _observed(root, batches)
    shares = []
    for layer in plan.layers:
        if layer.name in squares and squares[layer.name].any():
            with dense_weight(layer) as weight:
                columns = weight[0].float().square().sum(0).double().cpu()
            inputs = squares[layer.name][: len(columns)]
            factors = torch.exp2(2.0 * _balance(columns, strength, inputs))
            # A block's rounding error: the mean square of its inputs, for each of its columns.
            sums = (inputs / factors, columns * factors, inputs, columns)
            x_after, w_after, x, w = (each.view(-1, 16).sum(1) for each in sums)
            shares.append(float((x_after @ w_after) / (x @ w)))
    return sorted(shares)[len(shares) // 10] if shares else 0.0


def _observed(root: nn.Module, batches: list[Any]) -> tuple[Plan, dict[str, Tensor]]:
    """Run a float model; return its layers, and the mean squares of what the dense ones read."""
    config = rec.config_of({"method": "hessian"}, None)
    plan = plan_layers(root, config, ())
    require_layers(plan)
    with unprepared(root, always=True):
        attach_observers(root, plan.layers, set(config.needs))
        state = rec.PreparedState({}, Report(()), config, (), tuple(config.needs), None)
        rec.set_state(root, state)
        run_batches(root, batches, state)
        return plan, _mean_squares(root)


def _mean_squares(root: nn.Module) -> dict[str, Tensor]:
    """Return the mean squares of the channels [K'] that dense layers read, in all processes.

    K' is K, up to a whole block of the Hessian.
    """
    own: dict[str, tuple[Tensor, int]] = {}
    for name, module in root.named_modules():
        stats = collect([module], name)
        if stats.block_hessian is not None and stats.tokens and stats.counts is None:
            squares = stats.block_hessian[0].diagonal(dim1=-2, dim2=-1).flatten() / stats.tokens
            own[name] = (squares.cpu().double(), stats.tokens)
    everywhere = ranks().gather(own)
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for each in everywhere for name in each):
        parts = [each[name] for each in everywhere if name in each]
        total = sum(tokens for _, tokens in parts)
        found[name] = torch.stack([squares * (n / total) for squares, n in parts]).sum(0)
    return found


def _folded(graph: fx.GraphModule, found: Mapping[ScaleFold, Tensor]) -> tuple[Smoothed, ...]:
    """Return what was folded, in the order of the graph."""
    names = {module: name for name, module in graph.named_modules()}
    folds = []
    for fold, exponents in found.items():
        first: Channels = fold.divided[0]
        parts = (names[first.holder], first.name if first.name != "weight" else "")
        linears = tuple(names[linear.holder] for linear in fold.linears)
        scales = torch.exp2(exponents.double()).aminmax()
        producer = ".".join(filter(None, parts))
        folds.append(Smoothed(producer, linears, float(scales.min), float(scales.max)))
    return tuple(folds)


def _balance(columns: Tensor, strength: float, squares: Tensor) -> Tensor:
    """Return the exponents of the scales of columns with sums of squares [K], integers [K]."""
    squares = squares[: len(columns)].clamp(min=0)
    wanted = (strength * squares.log2() - (1 - strength) * columns.log2()) / 2
    # Columns that are all zero, of inputs or of weights, keep scale 1.
    live = wanted.isfinite()
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


def _own_addresses(root: nn.Module) -> set[int]:
    """Return the addresses of the tensors of a model whose memory belongs to no other."""
    named = (root.named_parameters, root.named_buffers)
    tensors = [tensor for each in named for _, tensor in each(remove_duplicate=False)]
    spans: list[tuple[int, int]] = []
    for each in tensors:
        # Other subclasses need not have an address. Gaps between strides are memory, too.
        if type(each) in (Tensor, nn.Parameter) and each.numel() and not each.is_meta:
            sizes = zip(each.shape, each.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in sizes)
            start = each.data_ptr()
            spans.append((start, start + (last + 1) * each.element_size()))
    own, reached = set(), 0.0
    for (first, end), (following, _) in itertools.pairwise([*sorted(spans), (math.inf, math.inf)]):
        if reached <= first and end <= following:
            own.add(int(first))
        reached = max(reached, end)
    return own
