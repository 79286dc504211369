"""Compare two sides: a packed model with the float model that it was made of, or two folders."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..checkpoint.layouts import BUFFERS, WEIGHTS, PackedLayer
from ..checkpoint.reader import CheckpointReader, is_packed, open_checkpoint
from ..checkpoint.source_files import find_shards, read_tensor, require_float, tensor_facts
from ..core.fingerprint import dtype_name
from ..core.progress import track
from ..core.quant_state import QuantState
from ..errors import CheckpointError
from ..evaluation import evaluate, fast_dtype
from ..kernels.experts.naive import chosen
from ..methods import Stats, resolve_method
from ..nn.experts import QUANTIZED, QuantizedExpertStack, quantize_pairs, weight_name
from ..nn.linear import GLOBAL, PACKED, SCALE, PackedBlocks, QuantizedLinear, quantize_input
from ..quantization.plan import UNREACHED, LayerPlan, plan_layers
from ..quantization.quantize import dense_weight, with_shared_scales
from ..quantization.recipe import Recipe
from ..record.rows import Report

# Of weight errors that were summed in another order, relative.
_ROUNDING = 1e-6


def relative_error(original: Tensor, other: Tensor) -> float:
    """Return |A - B| / |A|, 0 for equal tensors and infinity for a difference from zeros."""
    difference = original.float() - other.to(original.device).float()
    size = original.float().norm(dtype=torch.float64).item()
    error = difference.norm(dtype=torch.float64).item()
    return error / size if size else (math.inf if error else 0.0)


# ---- a packed model and the float model that it was made of -------------------------------------


@dataclass
class Comparison:
    """The comparison of a packed model with the float model that it was made of."""

    requantized: list[str] = field(default_factory=list)  # layers, compared to the bit
    measured: dict[str, float] = field(default_factory=dict)  # errors of the other layers
    tensors: int = 0  # how many others were compared to the bit
    mismatches: dict[str, str] = field(default_factory=dict)  # by the name of a layer or tensor


@torch.no_grad()
def compare_models(
    stored: CheckpointReader, model: nn.Module, reference: nn.Module, max_error: float
) -> Comparison:
    """Compare every tensor of a packed model, loaded of a folder, with a float model's.

    Layers that need no calibration are quantized again, the others have a weight error: that of the
    report where there is one, and at most `max_error`. All other tensors are equal to the bit.
    """
    found = Comparison()
    rows = Report.from_dict(stored.own["report"]).rows if stored.own else ()
    unseen = {row.name for row in rows if row.skip_reason == UNREACHED}
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
        weight, plan = originals.get(weight_name(name, module)), planned.get(name)
        if not isinstance(weight, Tensor) or weight.shape != module.weight.shape:
            theirs = f"one of {tuple(weight.shape)}" if isinstance(weight, Tensor) else "none"
            problem = (
                f"is a weight of {tuple(module.weight.shape)}, the reference has {theirs} there"
            )
        elif plan is not None and not plan.config.needs:
            found.requantized.append(name)
            problem = _other_bits(plan, module)
        else:
            error = found.measured[name] = _weight_error(weight, module)
            problem = "" if plan is None else _other_global(plan, module)
            wanted = reported.get(name)
            if wanted is not None and not abs(error - wanted) <= _ROUNDING * wanted:
                problem = f"has a weight error of {error:.6f}, not {wanted:.6f}"
            elif not error <= max_error:
                problem = f"has a weight error of {error:.3f}, above {max_error}"
        if problem:
            found.mismatches[name] = problem
    _compare_others(set(packed) | set(stored.layers), model, reference, found)
    return found


def _plan(
    stored: CheckpointReader, reference: nn.Module, unseen: Collection[str]
) -> dict[str, LayerPlan]:
    """Return the plan of the recipe for the reference, with global scales; none without a recipe.

    unseen: layers that were skipped because of the calibration.
    """
    if stored.recipe is None:
        return {}
    recipe = Recipe.from_dict(stored.recipe, f"The recipe of {stored.folder}")
    plan = plan_layers(reference, recipe.config, recipe.rules)
    plan = with_shared_scales(plan.where(lambda entry: entry.name not in unseen))
    return {layer.name: layer for layer in plan.layers}


def _weight_error(weight: Tensor, module: QuantizedLinear | QuantizedExpertStack) -> float:
    """Return the error of a packed weight, before it is rotated back and rounded to its dtype."""
    rows = module.from_parameter(weight)
    if not module.config.rotation:
        return relative_error(rows, module.from_parameter(module.weight))
    stored = torch.cat(list(map(module.config.stored, module.unstacked(rows))))
    return relative_error(stored, module.stored_weight(torch.float32).flatten(0, -2))


def _other_bits(layer: LayerPlan, module: PackedBlocks) -> str:
    """Quantize a weight of the reference again; return what is stored with other bits, or ""."""
    problem = ""
    wanted = type(module).buffers_of(_quantized_again(layer))
    for part in (PACKED, SCALE, GLOBAL):
        theirs, ours = wanted[part], module._buffers[part]
        if theirs is None or ours is None:
            if theirs is not ours:
                problem = f"{part} is there in one of them only"
        elif ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            problem = (
                f"{part} is {ours.dtype} {tuple(ours.shape)}, not {theirs.dtype} {theirs.shape}"
            )
        elif differ := int((_bits(ours) != _bits(theirs).to(ours.device)).sum()):
            problem = (
                f"{differ} bytes of {part} differ from those of the reference, quantized again"
            )
    return problem


def _quantized_again(layer: LayerPlan) -> list[QuantState]:
    """Return what the recipe makes of a weight, or what a source in FP8 has."""
    if layer.kept is not None:
        return list(layer.kept.read())
    method, options = resolve_method(layer.config.method)
    given = {} if layer.tensor_scale is None else {"scale": layer.tensor_scale}
    fmt = layer.config.format
    with dense_weight(layer) as weight:
        return [
            method.quantize(layer.config.stored(each), Stats(), fmt, scale, options, **given)
            for each, scale in zip(weight, layer.global_scales, strict=True)
        ]


def _other_global(layer: LayerPlan, module: QuantizedLinear | QuantizedExpertStack) -> str:
    stored = module.weight_global_scale
    numbers = [] if stored is None else stored.tolist()
    for number, theirs in zip(numbers, layer.global_scales, strict=False):
        ours = module.config.format.global_scale_of(number)
        if ours != theirs:
            return f"has a global scale of {ours}, its group gives {theirs}"
    return ""


def _compare_others(
    layers: Collection[str], model: nn.Module, reference: nn.Module, found: Comparison
) -> None:
    """Compare every tensor that is not packed with the reference's, to the bit."""
    packed = {f"{layer}.{part}" for layer in layers for part in (*BUFFERS, "weight")} | set(layers)
    ours, theirs = (
        {name: t for name, t in each.state_dict().items() if name not in packed}
        for each in (model, reference)
    )
    for name in sorted(set(ours) ^ set(theirs)):
        holder = "the checkpoint" if name in ours else "the reference"
        found.mismatches.setdefault(name, f"is in {holder} only")
    for name in sorted(set(ours) & set(theirs)):
        found.tensors += 1
        mine, other = ours[name], theirs[name].to(ours[name].dtype)
        if mine.shape != other.shape or not torch.equal(_bits(mine), _bits(other).to(mine.device)):
            found.mismatches[name] = "is not the reference's tensor, bit by bit"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


# ---- outputs against those of the dequantized weights -------------------------------------------

# Windows of random tokens that outputs are compared on, and their length.
_WINDOWS, _LENGTH = 4, 128


@dataclass(frozen=True)
class Outputs:
    """The distance of the outputs of a packed model from those of its dequantized weights."""

    tokens: int
    logits: float  # |difference| / |logits| of the dense one
    kl: float  # nats per token
    # Rounding inputs to 4 bits turns a last bit into a step of the format.
    quantizes_inputs: bool

    def mismatches(self) -> dict[str, str]:
        """Return what is above its bound."""
        logits, kl = (0.1, 1e-2) if self.quantizes_inputs else (0.02, 1e-3)
        found = {"logits": (self.logits, logits), "KL": (self.kl, kl)}
        return {
            name: f"{value:.3g} away from the dequantized weights, above {bound}"
            for name, (value, bound) in found.items()
            if not value <= bound
        }

    def __str__(self) -> str:
        return (
            f"outputs on {self.tokens:,} random tokens against the dequantized weights: "
            f"logits differ by {self.logits:.2g}, KL {self.kl:.2g}"
        )


@torch.no_grad()
def compare_outputs(model: Any) -> Outputs | None:
    """Run a packed model, and a copy that multiplies by dense weights, on random tokens.

    None for a model that is no causal language model.
    """
    config = getattr(model, "config", None)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if config is None or head is None or getattr(config, "is_encoder_decoder", False):
        return None
    text, generator = config.get_text_config(), torch.Generator().manual_seed(0)
    length = min(_LENGTH, getattr(text, "max_position_embeddings", None) or _LENGTH)
    ids = torch.randint(text.vocab_size, (_WINDOWS, length), generator=generator)
    dense, quantizes_inputs = copy.deepcopy(model), False
    for module in dense.modules():
        if isinstance(module, QUANTIZED):
            quantizes_inputs |= not module.config.weight_only
            product: Any = _dense_linear if isinstance(module, QuantizedLinear) else _dense_experts
            module.forward = partial(product, module)  # type: ignore[method-assign]
    first = ids[:1].to(next(model.parameters()).device)
    with fast_dtype(model, dense):
        wanted, given = dense(first).logits, model(first).logits
    found = evaluate(model, None, ids, dense)
    return Outputs(
        tokens=found.tokens,
        logits=relative_error(wanted, given),
        kl=found.kl or 0.0,
        quantizes_inputs=quantizes_inputs,
    )


def _dense_linear(packed: QuantizedLinear, input: Tensor) -> Tensor:
    x = packed.checked_input(input)
    bias = None if packed.bias is None else packed.bias.to(x.dtype)
    return F.linear(_stored_input(packed, x), packed.stored_weight(x.dtype), bias)


def _dense_experts(
    packed: QuantizedExpertStack, x: Tensor, ids: Tensor, bias: Tensor | None = None
) -> Tensor:
    x, config, stored = packed.checked_input(x), packed.config, packed.packed_weight
    scales = stored.input_global_scale
    if config.weight_only or scales is None or len(scales) == 1:
        rows = _stored_input(packed, x)
    else:
        # Experts with a scale each read rows of their own.
        codes, bits, _ = quantize_pairs(x, ids, stored, config)
        rows = torch.empty((*ids.shape, x.shape[-1]), dtype=x.dtype, device=x.device)
        for index, pairs in chosen(ids, len(scales)):
            own = scales[index : index + 1]
            rows[pairs] = ops.dequantize(codes[pairs], bits[pairs], own, config.format.key, x.dtype)
    return ops.experts_dense(rows, ids, packed.stored_weight(x.dtype), bias)


def _stored_input(packed: QuantizedLinear | QuantizedExpertStack, x: Tensor) -> Tensor:
    """Return the input that the packed layer multiplies its weight by, in float."""
    config = packed.config
    if config.weight_only:
        return ops.rotate(x, config.input_rotation) if config.input_rotation else x
    codes, scale, global_scale = quantize_input(x, packed.packed_weight, config)
    return ops.dequantize(codes, scale, global_scale, config.format.key, x.dtype)


# ---- two folders --------------------------------------------------------------------------------


def compare_folders(a: Path, b: Path) -> dict[str, Any]:
    """Return how far the weights of two folders are apart: |A - B| / |A| of every layer."""
    first, second = _Weights(a), _Weights(b)
    # All that is packed in one of them; of two float models all matrices.
    names = [*{**first.layers, **second.layers}]
    if not names:
        matrices = [name for name, (shape, _) in tensor_facts(first.files).items() if shape[1:]]
        names = [n.removesuffix(".weight") for n in matrices if n.endswith(".weight")]
    both = [name for name in names if first.holds(name) and second.holds(name)]
    layers = [
        {
            "name": name,
            "formats": [first.label(name), second.label(name)],
            "difference": _difference(first.weight(name), second.weight(name), name),
        }
        for name in track(both, "compare", unit="layers")
    ]
    # A layer that only one has is one name, whatever it has on disk.
    compared = {f"{layer}.weight" for layer in both} | set(both)
    one, two = (
        (each.plain - compared) | (set(each.layers) - set(both)) for each in (first, second)
    )
    common = [
        {"name": name, "difference": _difference(first.tensor(name), second.tensor(name), name)}
        for name in sorted(one & two & set(first.files) & set(second.files))
    ]
    return {
        "folders": [str(a), str(b)],
        "bytes": [weights_size(a), weights_size(b)],
        "layers": layers,
        "other_tensors": len(common),
        "other": [each for each in common if each["difference"] != 0],
        "only_in_first": sorted(one - two),
        "only_in_second": sorted(two - one),
    }


def weights_size(folder: Path) -> int:
    """Return the bytes of the files of weights in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


class _Weights:
    """The tensors of a folder, packed or not."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder.")
        self.packed = open_checkpoint(folder) if is_packed(str(folder)) else None
        if self.packed is None:
            require_float(folder)
            self.files: Mapping[str, Path] = find_shards(folder, WEIGHTS)
            self.layers: Mapping[str, PackedLayer] = {}
            self.plain = set(self.files)
        else:
            self.files, self.layers = self.packed.files, self.packed.float_layers
            self.plain = set(self.packed.plain())

    def holds(self, layer: str) -> bool:
        return layer in self.layers or self._dense_name(layer) in self.files

    def label(self, layer: str) -> str:
        if layer in self.layers:
            return self.layers[layer].fmt.key
        return dtype_name(self.tensor(self._dense_name(layer)).dtype)

    def weight(self, layer: str) -> Tensor:
        """Return a weight in float32, in the direction in which the model has it."""
        if self.packed is not None and layer in self.layers:
            return self.layers[layer].dense(self.packed.dense(layer, torch.float32))
        return self.tensor(self._dense_name(layer)).float()

    def tensor(self, name: str) -> Tensor:
        return read_tensor(self.files, name)

    def _dense_name(self, layer: str) -> str:
        # Stacks of experts are parameters without a module.
        return layer if layer in self.files else f"{layer}.weight"


def _difference(a: Tensor, b: Tensor, name: str) -> float:
    if a.shape != b.shape:
        raise CheckpointError(
            f"{name} is {tuple(a.shape)} in one folder and {tuple(b.shape)} in the other. Compare "
            "checkpoints of one model."
        )
    return relative_error(a, b)
