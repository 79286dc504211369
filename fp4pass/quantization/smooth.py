"""Move outliers of activations into weights, where an exported graph proves that this is exact."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..errors import CalibrationError, OptionError, StateError
from ..graph.folds import Channels, ScaleFold, fold_scales
from ..kernels.statistics.naive import HESSIAN_BLOCK
from ..observers.observer import Observer, collect, observers_of
from ..state import PreparedState, get_state, set_state, unwrap


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


def smooth(model: nn.Module, strength: float = 0.5) -> tuple[Smoothed, ...]:
    """Even out the channels of activations of a calibrated graph, in place, before `convert`.

    Where only linear layers read the output of a norm or another linear, channel j of it is divided
    by s_j and column j of their weights multiplied by it: s_j = x_j^strength / w_j^(1 - strength),
    x_j the root mean square of the channel in calibration and w_j the largest weight of the column,
    divided by the geometric mean and rounded to a power of two. So the float model computes the
    same bits as before, as long as no value leaves the range of its dtype (of float16, it can).
    Statistics change with the inputs: Hessians exactly, the largest input to a bound above it.
    Doing it again changes nothing.

    Args:
        model: The graph of `fp4pass.trace` or torch.export; only a graph can prove that nothing
            else reads a tensor. Scales that are not proved stay, so look at the result.
        strength: 0 evens out weights alone, 1 activations alone.

    Returns:
        The scales that were folded, in the order of the graph.

    Raises:
        StateError: The model is no graph, converted, not prepared, or prepared for a method
            without Hessians.
        CalibrationError: The model is not calibrated.
        OptionError: strength is not a number from 0 to 1.

    Source: SmoothQuant (arXiv:2211.10438), section 4, with powers of two.

    Example:
        >>> graph = fp4pass.prepare(fp4pass.trace(normed, (batches[0],)))
        >>> graph = fp4pass.calibrate(graph, batches, progress=False)
        >>> [fold.linears for fold in fp4pass.smooth(graph)]
        [('1',)]
        >>> graph = fp4pass.convert(graph)
    """
    if type(strength) not in (float, int) or not 0 <= strength <= 1:
        raise OptionError(f"strength: expected a number from 0 to 1, got {strength!r}.")
    root = unwrap(model)
    if not isinstance(root, fx.GraphModule):
        raise StateError(
            f"smooth: expected the graph of a model, got the live {type(root).__name__}, of which "
            "nobody knows what else reads a tensor. Prepare, calibrate and smooth "
            "fp4pass.trace(model, example) in its place."
        )
    record = _require_calibrated(root)
    names = {module: name for name, module in root.named_modules()}

    def choose(fold: ScaleFold) -> Tensor | None:
        return balance(fold, strength, names[fold.linears[0].holder])

    with torch.inference_mode(False), torch.no_grad():
        folds = fold_scales(root.graph, _own_addresses(root), choose)
        for fold, exponents in folds:
            for observer in observers_of(linear.holder for linear in fold.linears):
                rescale(observer, exponents)
    recipe = {**record.recipe, "smooth": strength}
    set_state(root, dataclasses.replace(record, recipe=recipe))
    return tuple(_smoothed(fold, exponents, names) for fold, exponents in folds)


def _smoothed(fold: ScaleFold, exponents: Tensor, names: dict[nn.Module, str]) -> Smoothed:
    first: Channels = fold.divided[0]
    parts = (names[first.holder], first.name if first.name != "weight" else "")
    linears = tuple(names[linear.holder] for linear in fold.linears)
    scales = torch.exp2(exponents.double()).aminmax()
    return Smoothed(".".join(filter(None, parts)), linears, float(scales.min), float(scales.max))


def balance(fold: ScaleFold, strength: float, name: str) -> Tensor | None:
    """Return the exponents of the scales of a fold, integers [K]; None without calibration."""
    observers = observers_of(linear.holder for linear in fold.linears)
    diagonal = collect(observers, name).block_hessian
    if diagonal is None:
        return None
    weights = [each.tensor.abs().amax(1).double() for each in fold.weights]
    device = weights[0].device
    largest = torch.stack([each.to(device) for each in weights]).amax(0)
    squares = diagonal[0].diagonal(dim1=-2, dim2=-1).flatten()[: len(largest)]
    squares = squares.to(device).double().clamp(min=0)
    wanted = strength * squares.log2() / 2 - (1 - strength) * largest.log2()
    # Columns that are all zero, of inputs or of weights, keep scale 1.
    live = (squares > 0) & (largest > 0) & wanted.isfinite()
    wanted = torch.where(live, wanted, 0)
    # A whole number of octaves is taken off, so that a balanced fold is balanced when seen again.
    mean = torch.floor(wanted.sum() / live.sum().clamp(min=1) + 0.5)
    return torch.where(live, torch.floor(wanted - mean + 0.5), 0).to(torch.int64)


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
