"""smooth: fold scales of channels into weights, of a live model or of a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import calibration
from ..core.progress import shown
from ..distributed import ranks
from ..errors import OptionError, StateError
from ..graph.export import trace
from ..graph.folds import ScaleFold, unfold_scales
from ..quantization.checks import require_float, require_layers
from ..quantization.observers.batches import call_arguments, device_of, require_batches, run_batches
from ..quantization.observers.observer import collect, observers_of
from ..quantization.plan import plan_layers
from ..quantization.replace import attach_observers
from ..quantization.restore import unprepared_after
from ..quantization.smooth import Smoothed, fold, mean_squares, smooth_graph, smoothed
from ..record.rows import Report
from ..record.state import (
    PreparedState,
    config_of,
    forget_smoothing,
    is_interrupted,
    remember_smoothing,
    set_state,
    unwrap,
)


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

    A live model is smoothed before `prepare`, for any method: it is run on `data`, and traced,
    which proves that a call as the first of these reads a tensor nowhere else; a tensor that only
    other calls return, as with `output_hidden_states`, comes divided. A graph is smoothed between
    `calibrate` and `convert`, by what it was calibrated on: its Hessians change exactly, the
    largest input to a bound above it.

    Args:
        model: A live model in evaluation mode, or the graph of `fp4pass.trace` or torch.export.
            Scales that are not proved stay, so look at the result.
        strength: 0 evens out weights alone, 1 inputs alone.
        data: Run through a live model, as by `calibrate`; a few thousand tokens are enough.
        tokenizer: As for `calibrate`.
        progress: As for `convert`.

    Returns:
        The scales that were folded, in the order of the graph.

    Raises:
        StateError: A live model is prepared or converted; a graph is converted, not prepared, or
            prepared for a method without Hessians.
        CalibrationError: A graph is not calibrated, or the data holds nothing to learn from.
        TraceError: torch.export cannot trace a live model, which stays as it is.
        OptionError: strength is not a number from 0 to 1, data is given for a graph, or text
            needs a tokenizer and there is none.

    Source: SmoothQuant (arXiv:2211.10438), section 4, with powers of two.

    Example:
        >>> [fold.linears for fold in fp4pass.smooth(normed, data=batches, progress=False)]
        [('1',)]
        >>> model = fp4pass.calibrate(fp4pass.prepare(normed), batches, progress=False)
        >>> model = fp4pass.convert(model)
    """
    if type(strength) not in (float, int) or not 0 <= strength <= 1:
        raise OptionError(f"strength: expected a number from 0 to 1, got {strength!r}.")
    root = unwrap(model)
    if not isinstance(root, fx.GraphModule):
        if require_float(root, "smooth") is not None:
            raise StateError(
                f"smooth: the live {type(root).__name__} is prepared already, and its statistics "
                "are of inputs that smoothing changes. Call fp4pass.smooth(model, data=...) before "
                "prepare, or prepare, calibrate and smooth fp4pass.trace(model, example)."
            )
        batches = calibration.batches(data, tokenizer, model=root)
        require_batches(batches)
        with shown("smooth", progress):
            graph, found = smooth_live(root, strength, list(batches))
        return smoothed(graph, found)
    if data is not None or tokenizer is not None:
        raise OptionError(
            "smooth: data= and tokenizer= are for a live model. A graph is smoothed by what it was "
            "calibrated on: give them to fp4pass.calibrate(graph, data, tokenizer=...)."
        )
    return smooth_graph(root, strength)


def smooth_live(
    root: nn.Module, strength: float, batches: list[Any]
) -> tuple[fx.GraphModule, dict[ScaleFold, Tensor]]:
    """Fold scales into a live float model; return its graph, and the exponents of each fold [K].

    Raises TraceError, before anything is changed, if the model has no graph.
    """
    # Before anything is run. Without batches, the run says so.
    graph = trace(root, _example(batches[0], root), cache_length=0) if batches else None
    config = config_of({"method": "hessian"}, None)
    plan = plan_layers(root, config, ())
    require_layers(plan)
    with unprepared_after(root):
        attach_observers(root, plan.layers, set(config.needs))
        state = PreparedState({}, Report(()), config, (), tuple(config.needs), None)
        set_state(root, state)
        run_batches(root, batches, state)
        squares = _mean_squares(root)
    assert graph is not None, "a run refuses no batches"

    def known(name: str, each: ScaleFold) -> Tensor | None:
        return squares.get(name)

    found = fold(graph, root, strength, known)
    remember_smoothing(root, strength)
    return graph, found


@contextmanager
def smoothed_unless_it_fails(
    root: nn.Module, strength: float, batches: list[Any]
) -> Iterator[tuple[Smoothed, ...]]:
    """Smooth a live model; after an error inside, its bits are as before.

    Raises TraceError, before anything is changed, if the model has no graph.
    """
    graph, found = smooth_live(root, strength, batches)
    try:
        yield smoothed(graph, found)
    except BaseException:
        if not is_interrupted(root):
            unfold_scales(found.items())
            forget_smoothing(root)
        raise


def _example(batch: Any, root: nn.Module) -> Any:
    """Return a batch as `trace` takes it: of two rows or more."""
    args, kwargs = call_arguments(batch, device_of(root))

    def doubled(value: Any) -> Any:
        is_one = isinstance(value, Tensor) and value.ndim > 0 and len(value) == 1
        return torch.cat([value, value]) if is_one else value

    return {name: doubled(value) for name, value in kwargs.items()} or tuple(map(doubled, args))


def _mean_squares(root: nn.Module) -> dict[str, Tensor]:
    """Return those of the inputs of the dense layers of a calibrated model, in all processes."""
    own: dict[str, tuple[Tensor, int]] = {}
    for name, module in root.named_modules():
        stats = collect(observers_of([module]), name)
        squares = mean_squares(stats)
        if squares is not None and stats.counts is None:
            own[name] = (squares.cpu().double(), stats.tokens)
    everywhere = ranks().gather(own)
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for each in everywhere for name in each):
        parts = [each[name] for each in everywhere if name in each]
        total = sum(tokens for _, tokens in parts)
        found[name] = torch.stack([squares * (n / total) for squares, n in parts]).sum(0)
    return found
