"""fp4pass verify: a checkpoint, read back from disk, alone or against the model it was made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor, nn
from typer import Argument, Exit, Option

from .. import float_models
from ..calibration.sources import read_text
from ..calibration.windows import token_windows
from ..checkpoint.checks import problems
from ..checkpoint.layouts import BUFFERS
from ..checkpoint.loading import load
from ..checkpoint.opening import is_packed, open_checkpoint
from ..checkpoint.reader import CheckpointReader
from ..core.progress import track
from ..errors import CheckpointError, OptionError, UnreadError
from ..experts import QUANTIZED, QuantizedExpertStack, weight_name
from ..linear import GLOBAL, PACKED, SCALE, QuantizedLinear
from ..methods import Stats, resolve_method
from ..quantization.plan import LayerPlan, plan_layers
from ..quantization.quantize import with_shared_scales
from ..quantization.recipe import Recipe
from ..quantization.search import dense_weight
from ..quantization.unreached import BY_CALIBRATION
from ..rows import Report
from ..sources.files import MANIFEST
from . import screen, sources
from .options import Device, TrustCode
from .outputs import RANDOM, Outputs, compare_outputs, random_tokens, relative_error

_Packed = QuantizedLinear | QuantizedExpertStack

# Of weight errors that were summed in another order, relative.
_ROUNDING = 1e-6


def verify(
    folder: Annotated[Path, Argument(help="A folder with packed weights.", metavar="DIR")],
    ref: Annotated[
        str | None, Option(help="The float model: a folder or a hub id.", metavar="MODEL")
    ] = None,
    text: Annotated[
        str | None,
        Option(
            help="Text for the outputs, as --calib of quantize; random tokens without.",
            metavar="FILE|DATASET",
        ),
    ] = None,
    windows: Annotated[int, Option(help="Of the text.")] = 4,
    length: Annotated[int, Option(help="Tokens of a window.")] = 128,
    max_error: Annotated[float, Option(help="Largest relative weight error of a layer.")] = 0.3,
    device: Device = None,
    trust_remote_code: TrustCode = False,
    as_json: screen.Json = False,
) -> None:
    """Check a checkpoint, with --ref against the float model it was made of; exit with 1 if wrong.

    Alone: the checksums and numbers of all tensors, their shapes, and what serving engines make of
    the names of layers. Against its model: layers whose method needs no calibration are quantized
    again, and every bit is compared. Others are compared by their weight error. All other tensors
    are compared to the bit, and the outputs with those of a float model that has the dequantized
    weights.
    """
    sources.require_windows(length=length, windows=windows)
    if ref is None and text is not None:
        raise OptionError("--text: expected --ref MODEL too, to compare outputs with, got none.")
    stored, chosen = opened(folder, alone=ref is None), sources.choose_device(device)
    tensors = track(stored.tensors(), "check", len(stored.files), "tensors")
    found = Findings(mismatches=dict(problems(stored, tensors, sums=True)))
    # What is damaged cannot be loaded.
    if ref is not None and not found.mismatches:
        model, reference = _load_both(stored, ref, chosen, trust_remote_code)
        with torch.no_grad():
            check_layers(stored, model, reference, found, max_error)
            check_tensors(stored, model, reference, found)
        # Of wrong weights outputs say nothing.
        if not found.mismatches:
            if text is None:
                ids = random_tokens(reference, windows, length)
            else:
                processor = float_models.load_tokenizer(ref, trust_remote_code)
                tokenizer = float_models.text_tokenizer(processor, ref)
                read = read_text(text, windows * length, tokenizer)
                ids = token_windows(tokenizer, read, window=length, windows=windows)
                if len(ids) < windows:
                    screen.note(f"{text} has {len(ids)} windows, {windows} were asked for.")
            if ids is not None:
                found.outputs = compare_outputs(model, reference, ids, text or RANDOM)
                found.mismatches |= found.outputs.mismatches()
    _print(stored, found, ref is None, as_json)
    if found.mismatches:
        raise Exit(screen.MISMATCH)


@dataclass
class Findings:
    """What the checks found. mismatches: what is wrong, by the name of a layer or a tensor."""

    requantized: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    tensors: int = 0
    outputs: Outputs | None = None
    mismatches: dict[str, str] = field(default_factory=dict)


def opened(folder: Path, alone: bool) -> CheckpointReader:
    """Open a folder; that it is damaged is a check that failed.

    `alone` is without its model: then it may be of stacked experts, or of another fp4pass.
    """
    try:
        stored = open_checkpoint(folder, any_version=alone)
    except UnreadError:
        raise
    except CheckpointError as error:
        if not is_packed(folder, known=True):
            raise
        screen.note(f"mismatch: {error}")
        raise Exit(screen.MISMATCH) from error
    if stored.own is None and (folder / MANIFEST).is_file():
        screen.note(f"{folder / MANIFEST} is of another version, so its checksums are not read")
    return stored


def _load_both(
    stored: CheckpointReader, ref: str, device: str, trust: bool
) -> tuple[nn.Module, nn.Module]:
    """The packed model from disk, and the reference in its dtype."""
    sources.quiet()
    model = load(stored.folder, device_map=device)
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = getattr(torch, stored.own["dtype"]) if stored.own else next(floats, "auto")
    return model, float_models.load_float(ref, dtype, device, trust)


def check_layers(
    stored: CheckpointReader,
    model: nn.Module,
    reference: nn.Module,
    found: Findings,
    max_error: float,
) -> None:
    """Every packed layer against the weight it stands for."""
    rows = Report.from_dict(stored.own["report"]).rows if stored.own else ()
    unseen = {row.name for row in rows if row.skip_reason in BY_CALIBRATION}
    planned = _plan(stored, reference, unseen)
    reported = {row.name: row.weight_error for row in rows if not row.skip_reason}
    # As the model has them: in a folder each expert may be apart.
    packed = {n: each for n, each in model.named_modules() if isinstance(each, QUANTIZED)}
    if stored.recipe is not None:
        for name in set(planned) ^ set(packed):
            where = "is packed, but not by the recipe" if name in packed else "is not packed"
            found.mismatches[name] = where
    originals = dict(reference.named_parameters(remove_duplicate=False))
    for name, module in track(packed.items(), "compare", unit="layers"):
        weight = originals.get(weight_name(name, module))
        if not isinstance(weight, Tensor) or weight.shape != module.weight.shape:
            theirs = f"one of {tuple(weight.shape)}" if isinstance(weight, Tensor) else "none"
            found.mismatches[name] = (
                f"is a weight of {tuple(module.weight.shape)}, the reference has {theirs} there"
            )
        elif name in planned and not planned[name].config.needs:
            _compare_bits(planned[name], module, found)
        else:
            if name in planned:
                _compare_global(planned[name], module, found)
            error = _weight_error(weight, module)
            found.measured[name] = error
            wanted = reported.get(name)
            if wanted is not None and not abs(error - wanted) <= _ROUNDING * wanted:
                found.mismatches[name] = f"has a weight error of {error:.6f}, not {wanted:.6f}"
            elif not error <= max_error:
                found.mismatches[name] = f"has a weight error of {error:.3f}, above {max_error}"


def _plan(
    stored: CheckpointReader, reference: nn.Module, unseen: Collection[str]
) -> dict[str, LayerPlan]:
    """What the recipe makes of the reference, with global scales; nothing without a recipe.

    unseen: layers that were skipped for what calibration saw of them.
    """
    if stored.recipe is None:
        return {}
    recipe = Recipe.from_dict(stored.recipe, f"The recipe of {stored.folder}")
    plan = plan_layers(reference, recipe.config, recipe.rules)
    plan = with_shared_scales(plan.where(lambda entry: entry.name not in unseen))
    return {layer.name: layer for layer in plan.layers}


def _weight_error(weight: Tensor, module: _Packed) -> float:
    """Of a packed weight, before it is rotated back and rounded to its dtype."""
    rows = module.from_parameter(weight)
    if not module.config.rotation:
        return relative_error(rows, module.from_parameter(module.weight))
    stored = torch.cat(list(map(module.config.stored, module.unstacked(rows))))
    return relative_error(stored, module.stored_weight(torch.float32).flatten(0, -2))


def _compare_bits(layer: LayerPlan, module: _Packed, found: Findings) -> None:
    """Quantize the reference's weight again, and compare all that is stored of it."""
    config = layer.config
    method, options = resolve_method(config.method)
    with dense_weight(layer) as weight:
        states = [
            method.quantize(config.stored(each), Stats(), config.format, scale, options).state
            for each, scale in zip(weight, layer.global_scales, strict=True)
        ]
    wanted = type(module).buffers_of(states)
    for part in (PACKED, SCALE, GLOBAL):
        theirs, ours = wanted[part], module._buffers[part]
        if (theirs is None) != (ours is None):
            found.mismatches[layer.name] = f"{part} is there in one of them only"
        elif theirs is not None and ours is not None and not _same_bits(ours, theirs):
            found.mismatches[layer.name] = _how_many(part, ours, theirs)
    found.requantized.append(layer.name)


def _how_many(part: str, ours: Tensor, theirs: Tensor) -> str:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{part} is {ours.dtype} {tuple(ours.shape)}, not {theirs.dtype} {theirs.shape}"
    differ = (_bits(ours) != _bits(theirs).to(ours.device)).sum().item()
    return f"{differ} bytes of {part} differ from those of the reference, quantized again"


def _compare_global(layer: LayerPlan, module: _Packed, found: Findings) -> None:
    stored = module.weight_global_scale
    numbers = [] if stored is None else stored.tolist()
    for number, theirs in zip(numbers, layer.global_scales, strict=False):
        ours = module.config.format.global_scale_of(number)
        if ours != theirs:
            found.mismatches[layer.name] = f"has a global scale of {ours}, its group gives {theirs}"


def check_tensors(
    stored: CheckpointReader, model: nn.Module, reference: nn.Module, found: Findings
) -> None:
    """Every tensor that is not packed against the reference's, to the bit."""
    layers = {name for name, each in model.named_modules() if isinstance(each, QUANTIZED)}
    layers |= set(stored.layers)
    packed = {f"{layer}.{part}" for layer in layers for part in (*BUFFERS, "weight")} | layers
    ours = {name: t for name, t in model.state_dict().items() if name not in packed}
    theirs = {name: t for name, t in reference.state_dict().items() if name not in packed}
    for name in sorted(set(ours) ^ set(theirs)):
        holder = "the checkpoint" if name in ours else "the reference"
        found.mismatches.setdefault(name, f"is in {holder} only")
    for name in sorted(set(ours) & set(theirs)):
        found.tensors += 1
        if not _same_bits(ours[name], theirs[name].to(ours[name].dtype)):
            found.mismatches[name] = "is not the reference's tensor, bit by bit"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(_bits(a), _bits(b).to(a.device))


def _print(stored: CheckpointReader, found: Findings, alone: bool, as_json: bool) -> None:
    folder, outputs = stored.folder, found.outputs
    if as_json:
        facts = {
            "folder": str(folder),
            "layout": stored.layout.name,
            "requantized": found.requantized,
            "weight_errors": found.measured,
            "tensors": found.tensors,
            "outputs": None if outputs is None else outputs.to_dict(),
            "mismatches": found.mismatches,
        }
        screen.print_json(facts)
    elif alone:
        sums = "without checksums" if stored.own is None else "with their checksums"
        print(f"{len(stored.layers)} packed layers, {len(stored.files)} tensors read, {sums}")
        if not found.mismatches:
            print(f"{folder} is in order; --ref MODEL compares it with the model it was made of")
    else:
        if found.requantized:
            print(f"{len(found.requantized)} layers quantized again, every bit compared")
        if found.measured:
            largest = max(found.measured, key=lambda name: found.measured[name])
            print(
                f"{len(found.measured)} layers compared by their weight error, at most "
                f"{screen.percent(found.measured[largest])} ({largest})"
            )
        print(f"{found.tensors} other tensors compared to the bit")
        if outputs is not None:
            print(outputs)
        elif not found.mismatches:
            print("outputs not compared: the model is no causal language model")
        if not found.mismatches:
            print(f"{folder} is what its reference says")
    print_mismatches(folder, found.mismatches)


def print_mismatches(folder: Path, mismatches: Mapping[str, str]) -> None:
    """A line on stderr for each layer or tensor that is wrong, and how many there are."""
    for name, what in mismatches.items():
        screen.note(f"mismatch: {name}: {what}")
    if mismatches:
        screen.note(f"fp4pass: {folder}: {len(mismatches)} mismatches")
