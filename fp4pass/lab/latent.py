"""Layers that learn the codes of a packed weight, and models of them.

A latent is a weight in units of its block's step, scale times global scale. It rounds to a value of
the element as every number does, to nearest, ties to the even code; in the backward rounding counts
as the identity. The latents of a layer stand in for its codes, and its scales stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from .. import ops
from ..core.elements import Element, scale_table
from ..core.formats import Format
from ..core.packing import pack_codes, unpack_codes
from ..distributed import sharded_parameter
from ..errors import NonFiniteError, OptionError, ShapeError, StateError, expected
from ..kernels.common.rounding import round_to_codes_, round_to_values_, thresholds
from ..nn.experts import QUANTIZED, parts_of, quantize_pairs, weight_name
from ..nn.linear import PACKED, PackedBlocks, QuantizedLinear, StoredWeight, quantize_input
from ..record import ModelState, Report, get_state, set_state, unwrap

# Latents begin this part of a cell from its ends, so that no arithmetic rounds them elsewhere.
_MARGIN = 2.0**-10

# From the values of the codes all latents would reach the ends of their cells together, and from
# the float weights noise would take many over them: both ruined a model at rates that this stands.
_SHARE = 0.5


@lru_cache(maxsize=64)
def _cells(element: Element, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the magnitudes [L] float32, and the largest number that rounds to each.

    The last cell is as wide on both sides of its magnitude.
    """
    values = torch.tensor(element.magnitudes, dtype=torch.float64)
    last = 2 * values[-1] - (values[-1] + values[-2]) / 2
    ends = thresholds(element.magnitudes, torch.device("cpu"))
    return values.float().to(device), torch.cat((ends, last.float()[None])).to(device)


def last_latent(element: Element) -> float:
    """Return the end of the last cell, from which a latent can come back."""
    return float(_cells(element, torch.device("cpu"))[1][-1])


def rounded(latent: Tensor, element: Element) -> Tensor:
    """Return the values of the codes of latents; zeros keep their sign."""
    return round_to_values_(latent.clone(), element).copysign_(latent)


def codes_of(latent: Tensor, element: Element) -> Tensor:
    """Return the packed codes [..., P] of latents [..., K]."""
    return pack_codes(round_to_codes_(latent.clone(), element), element.bits)


def steps_of(stored: StoredWeight, fmt: Format) -> Tensor:
    """Return the steps of blocks as `dequantize` computes them: float32 [..., N, K / block].

    A stack [E, N, K] may have a global scale for each expert, or for parts of its rows.
    """
    step = scale_table(fmt.scale, stored.scale.device)[stored.scale.int()]
    factor = stored.global_scale
    if factor is None:
        return step
    if step.ndim == 3:
        rows = step.shape[1] // parts_of(stored)
        factor = factor.view(len(step), -1).repeat_interleave(rows, 1).unsqueeze(-1)
    return step.mul_(factor) if fmt.multiplies else step.div_(factor)


def in_steps(numbers: Tensor, steps: Tensor) -> Tensor:
    """Multiply numbers [..., K] by the steps of their blocks [..., K / block], in place."""
    numbers.unflatten(-1, (steps.shape[-1], -1)).mul_(steps.unsqueeze(-1))
    return numbers


def latent_weight(packed: Tensor, steps: Tensor, target: Tensor, fmt: Format) -> Tensor:
    """Return latents float32 [..., N, K] that round to the codes of a packed weight [..., N, P].

    Each lies half way from the value of its code to what is nearest to the float weight in the cell
    of that code. `target` is that weight as it is stored, rotated if the layer is.
    """
    bits = fmt.element.bits
    codes = unpack_codes(packed, bits)
    index = (codes & ((1 << (bits - 1)) - 1)).long()
    sign = 1.0 - 2.0 * (codes >> (bits - 1))
    values, ends = _cells(fmt.element, packed.device)
    low, high = F.pad(ends[:-1], (1, 0))[index], ends[index]
    margin = _MARGIN * (high - low)
    quotient = target.float().unflatten(-1, (steps.shape[-1], -1)) / steps.unsqueeze(-1)
    # Of a block of zeros the step may be 0.
    wanted = quotient.flatten(-2).nan_to_num_(0.0).mul_(sign)
    wanted = torch.clamp(wanted, low + margin, high - margin)
    return values[index].lerp_(wanted, _SHARE).copysign_(sign)


class _Straight(torch.autograd.Function):
    """Another tensor in place of one, which gets its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return other.view_as(other)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Dense(torch.autograd.Function):
    """The weight of the codes that latents round to, which get its gradient times the steps."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, steps: Tensor, element: Element, dtype: Any) -> Tensor:
        ctx.save_for_backward(steps)
        return in_steps(rounded(latent, element), steps).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (steps,) = ctx.saved_tensors
        return in_steps(grads[0].to(torch.float32, copy=True), steps), None, None, None


class Latent(nn.Module):
    """A packed layer that learns its codes: weight and input are rounded as it rounds them.

    Attributes:
        packed: the layer.
        latent: float32 [N, K], or [E, N, K] of a stack.
    """

    def __init__(self, packed: PackedBlocks, latent: nn.Parameter) -> None:
        super().__init__()
        self.packed, self.latent = packed, latent
        steps = steps_of(packed.packed_weight, packed.config.format)
        self.register_buffer("steps", steps, persistent=False)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the values of the codes that the latents round to, with their gradient."""
        element = self.packed.config.format.element
        found: Tensor = _Dense.apply(self.latent, self.steps, element, dtype)
        return found

    def rows(self, x: Tensor) -> Tensor:
        """Return a checked input, rotated as the weight is."""
        rotation = self.packed.config.input_rotation
        return ops.rotate(x, rotation) if rotation else x


class LatentLinear(Latent):
    """A linear layer that learns its codes."""

    packed: QuantizedLinear

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + bias [..., N] for x [..., K], both rounded, in x's dtype."""
        packed, x = self.packed, self.packed.checked_input(input)
        rows, dtype = self.rows(x), _product_dtype(x)
        if (fmt := packed.config.input_format) is not None:
            with torch.no_grad():
                quantized = quantize_input(x, packed.packed_weight, packed.config)
                other = ops.dequantize(*quantized, fmt.key, x.dtype)
            rows = _Straight.apply(rows, other)
        bias = None if packed.bias is None else packed.bias.to(dtype)
        return F.linear(rows.to(dtype), self.weight(dtype), bias).to(x.dtype)


class LatentExperts(Latent):
    """A stack of experts that learns its codes."""

    def forward(self, x: Tensor, ids: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the products [T, k, N] of x [T, K] or [T, k, K] and the experts ids [T, k]."""
        x = self.packed.checked_input(x)
        rows, dtype = self.rows(x), _product_dtype(x)
        if (fmt := self.packed.config.input_format) is not None:
            other = self._rounded(x, ids, fmt.key)
            rows = rows.unsqueeze(1).expand_as(other) if other.ndim > rows.ndim else rows
            rows = _Straight.apply(rows, other)
        bias = None if bias is None else bias.to(dtype)
        return ops.experts_dense(rows.to(dtype), ids, self.weight(dtype), bias).to(x.dtype)

    @torch.no_grad()
    def _rounded(self, x: Tensor, ids: Tensor, key: str) -> Tensor:
        """Return rounded inputs: [T, k, K] where each expert has a global scale."""
        codes, scale, number = quantize_pairs(x, ids, self.packed.packed_weight, self.packed.config)
        if number is None or len(number) == 1:
            return ops.dequantize(codes, scale, number, key, x.dtype)
        found = x.new_zeros((*ids.shape, x.shape[-1]))
        for i, own in enumerate(number.split(1)):
            pairs = ids == i
            found[pairs] = ops.dequantize(codes[pairs], scale[pairs], own, key, x.dtype)
        return found


def _product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of products: weights times their global scale may not fit float16."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


@dataclass(frozen=True)
class StudentState(ModelState):
    """The record of a student.

    Attributes:
        converted: the state of the model before.
        untrained: the parameters that required gradients then, and do not as it learns.
    """

    status: ClassVar[str] = "trainable"

    converted: ModelState
    untrained: tuple[str, ...]


@torch.no_grad()
def trainable(model: nn.Module, original: nn.Module, *, others: bool = True) -> nn.Module:
    """Give the quantized layers of a converted model latent weights to learn, and return it.

    In place. Latents are float32 parameters in units of the block's step that round to the codes of
    the model, so that the student computes what the model does. Layers with float32 scales stay as
    they are. `freeze` makes it a converted model again.

    Args:
        model: converted or loaded.
        original: the float model that was converted.
        others: learn the parameters in floating point too, but those that require no gradient.

    Raises:
        StateError: the model is not converted, is a graph, is split over processes, or is not in
            memory; or the original is converted or has other layers.
        ShapeError: the original has layers of other sizes.
        OptionError: all layers have float32 scales.

    Example:
        >>> from fp4pass import lab
        >>> student = lab.trainable(model, original)
        >>> loss = lab.kl_loss(student(windows).logits, original(windows).logits)
        >>> loss.backward()
        >>> model = lab.freeze(student)
    """
    root, source = unwrap(model), unwrap(original)
    state = _require_trainable(root)
    # By the codes, which layers may share.
    latents: dict[Tensor, nn.Parameter] = {}
    made: dict[nn.Module, nn.Module] = {}
    for name, layer in root.named_modules():
        if not isinstance(layer, QUANTIZED) or layer.config.format.has_float_scale:
            continue
        stored, fmt = layer.packed_weight, layer.config.format
        target = _target(source, name, layer)
        if layer.weight_packed not in latents:
            latent = latent_weight(stored.packed, steps_of(stored, fmt), target, fmt)
            latents[layer.weight_packed] = nn.Parameter(latent)
        kind = LatentLinear if isinstance(layer, QuantizedLinear) else LatentExperts
        made[layer] = kind(layer, latents[layer.weight_packed]).train(layer.training)
    if not made:
        raise OptionError(
            "No layer can learn: those of the model have float32 scales. Convert it with a scheme "
            'whose scales have 8 bits, such as "nvfp4a16".'
        )
    wanted = [name for name, each in root.named_parameters() if each.requires_grad]
    untrained = [] if others else wanted
    for name in untrained:
        root.get_parameter(name).requires_grad_(False)
    _replace(root, made)
    set_state(root, StudentState(state.recipe, state.report, state, tuple(untrained)))
    return model


@torch.no_grad()
def freeze(student: nn.Module, **facts: Any) -> nn.Module:
    """Pack the codes of what `trainable` returned, in place: it is a converted model again.

    Args:
        student: with whole weights, not sharded ones.
        **facts: plain values for fp4pass.json, under "distilled".

    Raises:
        StateError: it is not a student, or its weights are sharded.

    Example:
        >>> from fp4pass import lab
        >>> student = lab.trainable(model, original)
        >>> fp4pass.report(lab.freeze(student, steps=0)).converted[0].scheme
        'nvfp4a16'
    """
    root = unwrap(student)
    state = get_state(root)
    if not isinstance(state, StudentState):
        raise StateError("The model has no weights to freeze. Call trainable(model, original).")
    if (sharded := sharded_parameter(root)) is not None:
        raise StateError(
            f"{sharded} is sharded over processes. Load the whole state dict into what "
            "trainable() makes of the converted model, and freeze that."
        )
    layers, codes = latents_of(root), dict[Tensor, Tensor]()
    for layer in layers.values():
        key = layer.latent
        if key not in codes:
            codes[key] = codes_of(key.detach(), layer.packed.config.format.element)
        layer.packed._buffers[PACKED] = codes[key]
    _replace(root, {layer: layer.packed for layer in layers.values()})
    # These errors were of the codes before.
    none: Any = {"weight_error": None, "output_error": None, "proved": None, "gap": None}
    rows = [
        dataclasses.replace(row, **none) if row.name in layers else row for row in state.report.rows
    ]
    for name in state.untrained:
        root.get_parameter(name).requires_grad_(True)
    recipe = {**state.recipe, **({"distilled": facts} if facts else {})}
    changed: Any = {"recipe": recipe, "report": Report(tuple(rows))}
    set_state(root, dataclasses.replace(state.converted, **changed))
    return student


def latents_of(student: nn.Module) -> dict[str, Latent]:
    """Return the layers with latents, by name."""
    return {name: each for name, each in student.named_modules() if isinstance(each, Latent)}


def _replace(root: nn.Module, by: Mapping[nn.Module, nn.Module]) -> None:
    """Put other modules in the places of some."""
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in by:
                parent._modules[name] = by[child]


def _require_trainable(root: nn.Module) -> ModelState:
    """Return the state of a converted model whose layers can be trained. Raises StateError."""
    state = get_state(root)
    if state is None or state.status != ModelState.status:
        again = "Call fp4pass.convert first."
        again = "It is trainable already." if isinstance(state, StudentState) else again
        raise StateError(f"The model to train is not converted. {again}")
    if isinstance(root, fx.GraphModule):
        raise StateError(
            "The model to train is a graph, whose nodes read packed weights. Convert and train the "
            "model itself, and trace it then."
        )
    for name, layer in root.named_modules():
        if isinstance(layer, QUANTIZED) and (layer.is_split or PACKED not in layer._buffers):
            raise StateError(f"{name}: it is split over processes. Train the whole model.")
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if tensor.is_meta:
            raise StateError(
                f"{name}: it is not in memory. Load the model to train without offloading."
            )
    return state


def _target(original: nn.Module, name: str, layer: PackedBlocks) -> Tensor:
    """Return the float weight of a layer as it is stored: float32 [..., N, K]."""
    place = weight_name(name, layer)
    try:
        weight = original.get_parameter(place).detach()
    except AttributeError:
        weight = torch.empty(0, device="meta")
    if weight.is_meta:
        raise StateError(
            f"original: expected the float model with a parameter {place}, got "
            f"{type(original).__name__} without it, or without values. Give the model that was "
            "converted."
        )
    rows = layer.packed_weight.packed.shape[:-1]
    wanted = layer.as_parameter(torch.empty((*rows, layer.in_features), device="meta")).shape
    if weight.shape != wanted:
        what = f"{name}: the weight of the original"
        raise ShapeError(expected(what, str(tuple(wanted)), str(tuple(weight.shape))))
    if not weight.isfinite().all():
        raise NonFiniteError(
            f"{name}: the weight of the original holds NaN or infinity. Repair it before the call."
        )
    matrices = layer.unstacked(layer.from_parameter(weight.to(layer.weight_packed.device)))
    return layer.stacked([layer.config.stored(each).float() for each in matrices])
