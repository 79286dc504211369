"""From a converted model to one that can be trained, and back."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._compat.accelerate import offloaded_tensors
from .._compat.torch import recompile_hooked
from ..checkpoint.finish import finish
from ..core.elements import element_table
from ..core.formats import Format
from ..core.packing import unpack_codes
from ..distributed import sharded_parameter
from ..errors import ShapeError, StateError, expected
from ..experts import QuantizedExpertStack
from ..linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE, QuantizedLinear, replace_linear
from ..packed_linear import become
from ..quantization.state import ModelState, get_state, set_state, unwrap
from .linear import TrainableLinear, steps_of

# What a latent weight starts with of its distance from the value of its code: at 1 it would be the
# original weight, where that has the code, and else on a boundary, from where any step changes it.
_SHARE = 0.5

# The parameters of a student that were trained before it was one.
_FROZEN = "_fp4pass_frozen"

_KEPT = ("config", "weight_dtype", "transposed", "in_features", "out_features")


@torch.no_grad()
def trainable(model: nn.Module, original: nn.Module, *, others: bool = False) -> nn.Module:
    """Give the quantized linear layers of a model float weights to train, and return it.

    In place. The weights are float32 parameters that round to the codes that the model has, so the
    student computes what the converted model does. `freeze` makes it a converted model again.

    Args:
        model: converted or loaded.
        original: the float model that was converted.
        others: whether the rest stays trainable, as norms, biases and embeddings; if not, it no
            longer requires gradients.

    Raises:
        StateError: the model is not converted, is a graph, has experts, is split over processes, or
            is not in memory; or the original is converted.
        ShapeError: the original has other layers.
    """
    root, source = unwrap(model), unwrap(original)
    state = _require_trainable(root)
    weights: dict[int, nn.Parameter] = {}
    layers = [(n, m) for n, m in root.named_modules() if isinstance(m, QuantizedLinear)]
    modules = dict(source.named_modules())
    dense = {name: _original_weight(modules.get(name), name, layer) for name, layer in layers}
    frozen = [name for name, each in root.named_parameters() if each.requires_grad]
    for name, layer in layers:
        stored = layer.packed_weight
        fmt = layer.config.format
        # Layers that share one packed weight train one.
        key = stored.packed.data_ptr()
        if key not in weights:
            steps = steps_of(stored.scale, stored.global_scale, fmt)
            target = layer.config.stored(dense[name].to(steps.device).float())
            weights[key] = nn.Parameter(latent_weight(target, stored.packed, steps, fmt))
        become(
            layer,
            TrainableLinear,
            weight=weights[key],
            buffers={each: layer._buffers[each] for each in (SCALE, GLOBAL, INPUT_GLOBAL)},
            attributes={each: getattr(layer, each) for each in _KEPT},
        )
    # What save_pretrained writes of a student is a float model, with the weights to train.
    root.__dict__.pop("save_pretrained", None)
    getattr(root, "config", root).__dict__.pop("quantization_config", None)
    for name in () if others else frozen:
        root.get_parameter(name).requires_grad_(False)
    root.__dict__[_FROZEN] = [] if others else frozen
    set_state(root, dataclasses.replace(state, status="trainable", files=()))
    recompile_hooked(root)
    return model


@torch.no_grad()
def freeze(student: nn.Module, **facts: Any) -> nn.Module:
    """Pack the weights of what `trainable` returned, in place: it is a converted model again.

    Args:
        student: with whole weights, not sharded ones.
        **facts: plain values for fp4pass.json, under "distilled".

    Raises:
        StateError: it is not a student, or its weights are sharded.
    """
    root = unwrap(student)
    state = get_state(root)
    if state is None or not is_trainable(root):
        raise StateError("The model has no weights to freeze. Call trainable(model, original).")
    sharded = sharded_parameter(root)
    if sharded is not None:
        raise StateError(
            f"{sharded} is sharded over processes. Load the whole state dict into what "
            "trainable() makes of the converted model, and freeze that."
        )
    rows = {row.name: row for row in state.report.rows}
    packed: dict[int, dict[str, Tensor | None]] = {}
    for name, layer in student_layers(root):
        key = id(layer.weight)
        if key not in packed:
            tensors = {each: layer._buffers[each] for each in (SCALE, GLOBAL, INPUT_GLOBAL)}
            packed[key] = {PACKED: layer.packed_codes(), **tensors}
        own = {**packed[key], INPUT_GLOBAL: layer._buffers[INPUT_GLOBAL]}
        options = {each: getattr(layer, each) for each in ("weight_dtype", "transposed")}
        replace_linear(layer, own, layer.config, **options)
        if name in rows:
            # These were of the codes before.
            none: Any = {"weight_error": None, "output_error": None, "proved": None, "gap": None}
            rows[name] = dataclasses.replace(rows[name], **none)
    for name in root.__dict__.pop(_FROZEN):
        root.get_parameter(name).requires_grad_(True)
    finish(root, {**state.recipe, "distilled": facts}, [rows[r.name] for r in state.report.rows])
    recompile_hooked(root)
    return student


def is_trainable(model: nn.Module) -> bool:
    """Return whether a model is what `trainable` returned."""
    state = get_state(model)
    return state is not None and state.status == "trainable"


def student_layers(student: nn.Module) -> list[tuple[str, TrainableLinear]]:
    """Return the layers with weights to train, by name."""
    found = unwrap(student).named_modules()
    return [(name, each) for name, each in found if isinstance(each, TrainableLinear)]


def latent_weight(target: Tensor, packed: Tensor, steps: Tensor, fmt: Format) -> Tensor:
    """Return a float32 weight [N, K] near to a target that rounds to given codes.

    It lies between the value of each code and what is nearest to the target in the cell of that
    code, the interval that rounds to it.
    """
    codes = unpack_codes(packed, fmt.element.bits).unflatten(-1, (-1, fmt.block))
    sign_bit = 1 << (fmt.element.bits - 1)
    sign = torch.where((codes & sign_bit) == 0, 1.0, -1.0)
    value = element_table(fmt.element, codes.device)[codes.int()].abs()
    half = [(b - a) / 2 for a, b in itertools.pairwise(fmt.element.magnitudes)]
    index = (codes & (sign_bit - 1)).int()
    below = torch.tensor([0.0, *half], device=codes.device)[index]
    above = torch.tensor([*half, half[-1]], device=codes.device)[index]
    quotient = target.unflatten(-1, (-1, fmt.block)) / steps.unsqueeze(-1)
    offset = (quotient * sign - value).clamp(-below, above) * _SHARE
    # The sign of zero is one of its code.
    return ((value + offset).copysign(sign) * steps.unsqueeze(-1)).flatten(-2)


def _require_trainable(root: nn.Module) -> ModelState:
    """Return the state of a converted model whose layers can be trained. Raises StateError."""
    state = get_state(root)
    if state is None or state.status != "converted":
        again = "It is trainable already." if is_trainable(root) else "Call fp4pass.convert first."
        raise StateError(f"The model to train is not converted. {again}")
    if isinstance(root, fx.GraphModule):
        raise StateError(
            "The model to train is a graph, whose nodes read packed weights. Convert and train the "
            "model itself, and trace it then."
        )
    for name, layer in root.named_modules():
        if isinstance(layer, QuantizedExpertStack):
            raise StateError(
                f"{name}: stacks of experts cannot be trained, only linear layers. Convert with "
                f"rules=[({name!r}, None)] to train the others beside float experts."
            )
        if isinstance(layer, QuantizedLinear) and layer.is_split:
            raise StateError(
                f"{name}: it is split over processes. Train the whole model, sharded by "
                "torch.distributed.fsdp.fully_shard after trainable()."
            )
    elsewhere = offloaded_tensors(root)
    for name, tensor in itertools.chain(root.named_parameters(), root.named_buffers()):
        if tensor.is_meta or name in elsewhere:
            raise StateError(
                f"{name}: it is not in memory. Load the model to train without offloading."
            )
    return state


def _original_weight(original: nn.Module | None, name: str, layer: QuantizedLinear) -> Tensor:
    """Return the weight [N, K] of a layer before it was converted. Raises if it is not there."""
    if isinstance(original, QuantizedLinear | TrainableLinear):
        raise StateError(f"{name}: the original is converted too. Give the float model.")
    weight = getattr(original, "weight", None)
    if not isinstance(weight, Tensor):
        raise ShapeError(f"{name}: the original has no such layer. Give the float model.")
    wanted = (layer.out_features, layer.in_features)
    shape = tuple(weight.t().shape if layer.transposed else weight.shape)
    if shape != wanted:
        raise ShapeError(expected(f"{name}: the weight of the original", str(wanted), shape))
    if weight.is_meta:
        raise StateError(f"{name}: the weight of the original is on the meta device. Load it.")
    found = weight.detach()
    return found.t() if layer.transposed else found
