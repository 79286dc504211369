"""smooth: outliers of activations, moved into weights where a graph proves that this is exact."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from ..errors import CalibrationError, OptionError, StateError
from ..graph.transforms.channel_scaling import Fold
from ..graph.transforms.smooth import smooth_linears
from .observer import OBSERVERS, collect
from .state import get_state, set_state, unwrap


@dataclass(frozen=True)
class Smoothed:
    """Scales that were folded: out of the output of `producer`, into the weights of `linears`.

    smallest, largest: of the scales of the channels, all powers of two.
    """

    producer: str
    linears: tuple[str, ...]
    smallest: float
    largest: float

    def __str__(self) -> str:
        scales = f"{self.smallest:g} to {self.largest:g}"
        return f"{self.producer} -> {', '.join(self.linears)}: {scales}"


def smooth(model: nn.Module, strength: float = 0.5) -> tuple[Smoothed, ...]:
    """Even out the channels of activations of a calibrated model, in place, before `convert`.

    Where linears alone read what a norm or another linear makes, channel j of that is divided by
    s_j and column j of their weights multiplied by it: s_j = x_j^strength / w_j^(1 - strength),
    x_j the root mean square of the channel in calibration and w_j the largest weight of the column,
    divided by the geometric mean and rounded to a power of two. So the float model computes the
    same bits as before, as long as no value leaves the range of its dtype (of float16, it can).
    Statistics change with the inputs: Hessians exactly, the largest input to a bound above it.

    strength: 0 evens out weights alone, 1 activations alone. Only graphs can prove it: exported
    models, and modules of live ones that are functions of one tensor, as gated MLPs are; of these
    nothing else may call the children. What is not proved stays as it is, so look at the result:
    what was folded, in order. Doing it again changes nothing.
    Raises StateError for a model that is converted, not prepared, or prepared for a method without
    Hessians or with sequential=True; CalibrationError if it is not calibrated; OptionError.
    Source: SmoothQuant (arXiv:2211.10438), section 4, with powers of two.
    """
    if type(strength) not in (float, int) or not 0 <= strength <= 1:
        raise OptionError(f"strength is {strength!r}; a number from 0 to 1 is wanted.")
    root = unwrap(model)
    _require_calibrated(root)
    own = _own_addresses(root)
    done = []
    with torch.inference_mode(False), torch.no_grad():
        for graph_module, names in _graphs(root):

            def choose(fold: Fold, names: dict[nn.Module, str] = names) -> Tensor | None:
                return balance(fold, strength, names[fold.linears[0].holder])

            for fold, exponents in smooth_linears(graph_module.graph, own, choose):
                first = fold.divided[0]
                name = first.name if first.name != "weight" else ""
                producer = ".".join(filter(None, (names[first.holder], name)))
                linears = tuple(names[linear.holder] for linear in fold.linears)
                scales = torch.exp2(exponents.double()).aminmax()
                done.append(Smoothed(producer, linears, float(scales.min), float(scales.max)))
    record = get_state(root)
    assert record is not None
    recipe = {**record.recipe, "smooth": strength}
    set_state(root, dataclasses.replace(record, recipe=recipe))
    return tuple(done)


def balance(fold: Fold, strength: float, name: str) -> Tensor | None:
    """The exponents of the scales of a fold: integers [K], None if calibration never reached it or
    called some of its linears more often than others.

    Columns that are all zero, of inputs or of weights, have exponent 0. Raises CalibrationError if
    inputs were not finite; name: of a linear, for it.
    """
    diagonal = collect(fold.observers, name).block_hessian
    if diagonal is None or not _called_alike(fold):
        return None
    weights = [each.tensor.abs().amax(1).double() for each in fold.weights]
    device = weights[0].device
    largest = torch.stack([each.to(device) for each in weights]).amax(0)
    squares = diagonal.diagonal(dim1=-2, dim2=-1).flatten()[: len(largest)]
    squares = squares.to(device).double().clamp(min=0)
    wanted = strength * squares.log2() / 2 - (1 - strength) * largest.log2()
    live = (squares > 0) & (largest > 0) & wanted.isfinite()
    wanted = torch.where(live, wanted, 0)
    # A whole number of octaves is taken off, so that a balanced fold is balanced when seen again.
    mean = torch.floor(wanted.sum() / live.sum().clamp(min=1) + 0.5)
    return torch.where(live, torch.floor(wanted - mean + 0.5), 0).to(torch.int64)


def _called_alike(fold: Fold) -> bool:
    """Whether the linears of a fold, that which makes the tensor too, saw equally many tokens: one
    that did not was called by something that the graph does not know."""
    holders = {each.holder for each in (*fold.divided, *fold.weights)}
    seen = [holder.__dict__[OBSERVERS] for holder in holders if OBSERVERS in holder.__dict__]
    return len({sum(int(o.state[1]) for o in observers) for observers in seen}) == 1


def _require_calibrated(root: nn.Module) -> None:
    record = get_state(root)
    if record is not None and record.status == "converted":
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
    if record.recording is not None:
        raise StateError(
            "The model is prepared with sequential=True, and its layers are observed only in "
            "convert. Prepare a fresh copy without it."
        )
    observers = [o for m in root.modules() for o in m.__dict__.get(OBSERVERS, ())]
    if not any(observer.state[1] for observer in observers):
        raise CalibrationError(
            "The model is not calibrated. Call fp4pass.calibrate(model, batches) first."
        )


def _graphs(root: nn.Module) -> Iterator[tuple[fx.GraphModule, dict[nn.Module, str]]]:
    """The graphs of a prepared model, and the names of the modules in each."""
    names = {module: name for name, module in root.named_modules()}
    if isinstance(root, fx.GraphModule):
        yield root, names
        return


def _own_addresses(root: nn.Module) -> set[int]:
    """The addresses of the tensors of a model that are in one place only, under one name."""
    named = (root.named_parameters, root.named_buffers)
    tensors = [tensor for each in named for _, tensor in each(remove_duplicate=False)]
    # Other subclasses need not have an address.
    plain = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter)]
    counts = Counter(tensor.data_ptr() for tensor in plain if not tensor.is_meta)
    return {address for address, count in counts.items() if count == 1 and address}
