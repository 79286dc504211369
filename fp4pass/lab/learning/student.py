"""From a converted model to one that learns its codes, and back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from ..._compat.accelerate import offloaded_tensors
from ..._compat.torch_hooks import recompile_hooked
from ...checkpoint.finish import finish
from ...checkpoint.finished import ConvertedState
from ...distributed import sharded_parameter
from ...errors import (
    NonFiniteError,
    ShapeError,
    StateError,
    expected,
    require_number,
)
from ...nn.experts import QUANTIZED
from ...nn.input_cache import share_nothing
from ...nn.linear import PackedBlocks
from ...quantization.observers.kv_cache import drop_cache
from ...record.state import ModelState, forget_state, get_state, set_state, unwrap
from .layers import (
    LATENT,
    TRAINABLE,
    Codes,
    Latents,
    TrainableExperts,
    TrainableLinear,
    make_trainable,
    original_weight,
)
from .layers import freeze as freeze_layer


@dataclass(frozen=True)
class StudentState(ModelState):
    """The record of a student.

    Attributes:
        converted: the state of the model before.
        untrained: the parameters that required gradients then, and do not as it learns.
    """

    status: ClassVar[str] = "trainable"

    converted: ConvertedState
    untrained: tuple[str, ...]


@torch.no_grad()
def trainable(
    model: nn.Module, original: nn.Module, *, others: bool = True, share: float = 0.5
) -> nn.Module:
    """Give the quantized layers of a converted model latent weights to learn, and return it.

    In place. Latents are float32 parameters that round to the codes of the model, so that the
    student computes what the model does. A whole step of one is to the next code. Embeddings, and
    layers in floating point, no longer require gradients. `freeze` makes it a converted model
    again.

    Args:
        model: converted or loaded.
        original: the float model that was converted.
        others: learn norms and biases too: all parameters with one dimension.
        share: how far latents begin on the way from the values of their codes to the float weight.

    Raises:
        StateError: the model is not converted, is a graph, is split over processes, or is not in
            memory; or the original is converted or has other layers.
        ShapeError: the original has layers of other sizes.
        OptionError: an argument is out of range.

    Example:
        >>> from fp4pass import learning
        >>> student = learning.trainable(model, original)
        >>> loss = learning.kl_loss(student(windows).logits, original(windows).logits)
        >>> loss.backward()
        >>> model = learning.freeze(student)
    """
    require_share(share)
    root, source = unwrap(model), unwrap(original)
    state = _require_trainable(root)
    layers = [(n, m) for n, m in root.named_modules() if isinstance(m, QUANTIZED)]
    dense = {name: _float_weight(source, name, layer) for name, layer in layers}
    wanted = [name for name, each in root.named_parameters() if each.requires_grad]
    untrained = [n for n in wanted if not (others and root.get_parameter(n).ndim < 2)]
    drop_cache(root)
    share_nothing(root)
    latents: Latents = {}
    for name, layer in layers:
        make_trainable(layer, dense[name], share=share, latents=latents)
    # save_pretrained would write a float model, with latents in it.
    root.__dict__.pop("save_pretrained", None)
    getattr(root, "config", root).__dict__.pop("quantization_config", None)
    for name in untrained:
        root.get_parameter(name).requires_grad_(False)
    forget_state(root)
    set_state(root, StudentState(state.recipe, state.report, state, tuple(untrained)))
    recompile_hooked(root)
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
        >>> from fp4pass import learning
        >>> student = learning.trainable(model, original)
        >>> fp4pass.report(learning.freeze(student, steps=0)).converted[0].scheme
        'nvfp4a16'
    """
    root = unwrap(student)
    state = get_state(root)
    if not isinstance(state, StudentState):
        raise StateError("The model has no weights to freeze. Call trainable(model, original).")
    sharded = sharded_parameter(root)
    if sharded is not None:
        raise StateError(
            f"{sharded} is sharded over processes. Load the whole state dict into what "
            "trainable() makes of the converted model, and freeze that."
        )
    rows = {row.name: row for row in state.report.rows}
    codes: Codes = {}
    for name, layer in student_layers(root):
        freeze_layer(layer, codes=codes)
        if name in rows:
            # These were of the codes before.
            none: Any = {"weight_error": None, "output_error": None, "proved": None, "gap": None}
            rows[name] = dataclasses.replace(rows[name], **none)
    for name in state.untrained:
        root.get_parameter(name).requires_grad_(True)
    recipe = {**state.recipe, **({"distilled": facts} if facts else {})}
    ordered = [rows[row.name] for row in state.report.rows]
    finish(root, recipe, ordered, carried=state.converted.carried)
    recompile_hooked(root)
    return student


def require_share(share: object) -> None:
    """Raise OptionError unless latents can begin there."""
    require_number("share", "a number in [0, 1]", share, float, 0, 1)


def is_trainable(model: nn.Module) -> bool:
    """Return whether a model is what `trainable` returned."""
    return isinstance(get_state(model), StudentState)


def student_layers(student: nn.Module) -> list[tuple[str, TrainableLinear | TrainableExperts]]:
    """Return the layers with latents, by name."""
    found = unwrap(student).named_modules()
    return [(name, each) for name, each in found if isinstance(each, TRAINABLE)]


def last_latent(layer: PackedBlocks) -> float:
    """Return the end of the last cell of a layer's codes."""
    return len(layer.config.format.element.magnitudes) - 0.5


def changed_codes(
    student: nn.Module, before: Mapping[str, Tensor], now: Mapping[str, Tensor]
) -> float:
    """Return the share of codes that differ between two states (`trained_state`) of a student."""
    changed = total = 0
    for name, layer in student_layers(student):
        key = f"{name}.{LATENT}"
        # Of layers that share latents the first has them.
        if key in now:
            last = last_latent(layer) - 0.5
            old, new = (each[key].round().clamp_(-last, last) for each in (before, now))
            changed += int((old != new).sum())
            total += old.numel()
    return changed / max(total, 1)


def _require_trainable(root: nn.Module) -> ConvertedState:
    """Return the state of a converted model whose layers can be trained. Raises StateError."""
    state = get_state(root)
    if not isinstance(state, ConvertedState):
        again = "It is trainable already." if is_trainable(root) else "Call fp4pass.convert first."
        raise StateError(f"The model to train is not converted. {again}")
    if isinstance(root, fx.GraphModule):
        raise StateError(
            "The model to train is a graph, whose nodes read packed weights. Convert and train the "
            "model itself, and trace it then."
        )
    for name, layer in root.named_modules():
        if isinstance(layer, QUANTIZED) and layer.is_split:
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
        if tensor.is_inference():
            raise StateError(
                f"{name}: it was made in inference mode, and cannot be trained. Load and convert "
                "the model outside of torch.inference_mode()."
            )
    return state


def _float_weight(original: nn.Module, name: str, layer: PackedBlocks) -> Tensor:
    """Return the weight of a layer before it was converted. Raises unless it fits."""
    weight = original_weight(original, name, layer)
    rows = layer.packed_weight.packed.shape[:-1]
    wanted = layer.as_parameter(torch.empty((*rows, layer.in_features), device="meta")).shape
    if weight.shape != wanted:
        what = f"{name}: the weight of the original"
        raise ShapeError(expected(what, str(tuple(wanted)), str(tuple(weight.shape))))
    if not weight.isfinite().all():
        raise NonFiniteError(
            f"{name}: the weight of the original holds NaN or infinity. Repair it before the call."
        )
    return weight
