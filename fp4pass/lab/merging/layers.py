"""The layers of a merge: which ones change, and the global scales that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...core.elements import scale_table
from ...core.formats import power_reaching
from ...errors import OptionError, StateError
from ...kernels.search.float_scales import codes_at
from ...methods import Gptq, Sse, Stats, resolve_method
from ...nn.linear import GLOBAL, PACKED, SCALE, QuantizedLinear
from ...nn.packed_linear import scale_bits
from ...quantization.adapters import (
    applied_adapters,
    around_packed,
    lora_change,
    merge_problem,
    parents,
)
from ...quantization.plan import LayerPlan, scale_groups
from ...quantization.search import stored_amax
from ...record.config import LinearConfig

# The modules of PEFT that stand between a layer and its parent.
_BETWEEN = ("base_layer", "original_module")

# The path of a model in PEFT's own.
_BELOW = "base_model.model."


def own_name(path: str) -> str:
    """Return the name of a layer once PEFT's wrappers are gone."""
    parts = path.removeprefix(_BELOW).split(".")
    return ".".join(part for part in parts if part not in _BETWEEN)


@dataclass(frozen=True, eq=False)
class Target:
    """A packed layer with adapters that change its weight.

    Attributes:
        name: of the layer once PEFT's wrappers are gone.
        layer: the packed layer.
        around: what PEFT has put around it.
        config: how it is quantized again.
    """

    name: str
    layer: QuantizedLinear
    around: Any
    config: LinearConfig

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.layer.out_features, self.layer.in_features

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters."""
        return applied_adapters(self.around)

    @property
    def bias(self) -> Tensor | None:
        """The bias with the change of the adapters, float32 [N]; None for one that stays."""
        change = lora_change(self.around)[1]
        return None if change is None else self.layer.get_parameter("bias").float() + change

    def planned(
        self,
        number: float | None,
        stats: Stats | None = None,
        config: LinearConfig | None = None,
    ) -> LayerPlan:
        """Return the plan of the merged weight, which is made in float32 here.

        number: its global scale, or its only one; None to choose that.
        """
        config = self.config if config is None else config
        is_given = config.format.has_tensor_scale and number is not None
        able = config.method is None or resolve_method(config.method)[0].objective is not None
        change = lora_change(self.around)[0]
        weight = dense_weight(self.layer) + change
        rows, columns = weight.shape
        held = nn.Linear(columns, rows, bias=False, device="meta")
        held.weight = nn.Parameter(weight, requires_grad=False)
        return LayerPlan(
            name=self.name,
            module=held,
            weight_key=id(held.weight),
            shape=tuple(weight.shape),
            config=config,
            global_scales=(1.0 if is_given or number is None else number,),
            tensor_scale=number if is_given and able else None,
            stats=Stats() if stats is None else stats,
        )


def dense_weight(layer: QuantizedLinear) -> Tensor:
    """Return the weight that packed codes stand for, float32 [N, K]."""
    stored = layer.stored_weight(torch.float32)
    return layer.config.restored(stored) if layer.config.is_rotated else stored


def kept_change(target: Target, buffers: Mapping[str, Tensor | None]) -> tuple[float, float]:
    """Return <Q - W, D> and <D, D>: of the change D of a weight W, and how much of it Q has.

    buffers: of Q, in place of those of the layer.
    """
    change, before, fmt = lora_change(target.around)[0], target.layer, target.config.format
    packed, scale, number = (buffers[name] for name in (PACKED, SCALE, GLOBAL))
    scale = scale_bits(scale, fmt.scale.storage)  # type: ignore[arg-type]
    stored = ops.dequantize(packed, scale, number, fmt.key, torch.float32)
    moved = target.config.restored(stored) - dense_weight(before)
    return float((moved * change).sum()), float(change.square().sum())


def find_targets(root: nn.Module, choose: Callable[[LinearConfig], LinearConfig]) -> list[Target]:
    """Return the packed layers of a model whose adapters change their weight.

    Args:
        root: the model that PEFT has put adapters into.
        choose: returns the config with which a layer is quantized again.

    Raises:
        StateError: no packed layer has adapters, they are off, or one has none that can be added.
    """
    arounds = around_packed(root)
    if not arounds:
        raise StateError(
            "merge: expected adapters of PEFT on packed layers, got a model without. Put them on "
            "with PeftModel.from_pretrained(model, folder), or merge adapters of dense layers "
            "with PEFT's own merge_and_unload."
        )
    if all(around.disable_adapters for around in arounds.values()):
        raise StateError("merge: the adapters are disabled. Enable those that are to be merged.")
    names = {module: path for path, module in root.named_modules()}
    owners: dict[int, int] = {}
    for module in names:
        if isinstance(module, QuantizedLinear):
            key = id(module._buffers.get(PACKED))
            owners[key] = owners.get(key, 0) + 1
    found = []
    for layer, around in arounds.items():
        name = own_name(names[layer])
        if problem := merge_problem(around):
            raise StateError(f"{name}: it cannot be merged: {problem}. Keep it beside the model.")
        if not isinstance(layer, QuantizedLinear) or not applied_adapters(around):
            continue
        weight, bias = lora_change(around)
        if not weight.any() and (bias is None or not bias.any()):
            # Bytes stay where nothing is added.
            continue
        if owners.get(id(layer._buffers.get(PACKED)), 1) > 1:
            raise StateError(
                f"{name}: it shares its packed weight with another layer, which the adapter would "
                "change, too. Keep the adapter beside the model."
            )
        found.append(Target(name, layer, around, choose(layer.config)))
    if not found:
        raise StateError(
            "merge: no active adapter changes a packed layer: all of them add zero. Train it, or "
            "activate another (model.set_adapter)."
        )
    return found


def chooser(method: object, has_data: bool) -> Callable[[LinearConfig], LinearConfig]:
    """Return a function from the config of a layer to that with which it is quantized again.

    Args:
        method: a name or options; None for "gptq" with data, and for "sse" without.
        has_data: whether statistics of inputs are collected.

    Raises:
        OptionError: there is no such method, or it needs the float model.
    """
    chosen = LinearConfig(method=(Gptq() if has_data else Sse()) if method is None else method)
    if "cross" in chosen.needs:
        raise OptionError(
            "method: Gptq(target='cross') compares with a float model, and a merge has none. Give "
            "'gptq'."
        )
    return lambda config: config.override({"method": chosen.method})


@dataclass(frozen=True, eq=False)
class Scales:
    """The global scales of merged layers, and of those that share a raised one.

    Attributes:
        of: the global scale of each merged layer, or its only one; None for one to be chosen.
        rescaled: the factor of each other layer whose group has a larger one now.
    """

    of: Mapping[nn.Module, float | None]
    rescaled: Mapping[QuantizedLinear, float]


def shared_scales(root: nn.Module, targets: Sequence[Target]) -> Scales:
    """Return the global scales after a merge: those of before, as far as they reach.

    Layers that engines fuse keep one number: where a merged weight is out of its reach, it is
    multiplied by the smallest power of two that suffices, for all of them. Layers that had other
    numbers than their neighbours have their own.
    """
    parent = parents(root)
    packed = [
        LayerPlan(
            name=path,
            module=module,
            weight_key=id(module.packed_weight.packed),
            shape=(module.out_features, module.in_features),
            transposed=module.transposed,
            parent=parent(path),
            config=module.config,
        )
        for path, module in root.named_modules()
        if isinstance(module, QuantizedLinear)
    ]
    changed = {target.layer: target for target in targets}
    of: dict[nn.Module, float | None] = {}
    rescaled: dict[QuantizedLinear, float] = {}
    for group in scale_groups(packed):
        members: list[Any] = [layer.module for layer in group]
        if changed.keys().isdisjoint(members):
            continue
        alike: dict[float, list[Any]] = {}
        for member in members:
            alike.setdefault(global_scale_of(member), []).append(member)
        for before, sharers in alike.items():
            own = [changed[each] for each in sharers if each in changed]
            if not own:
                continue
            if sharers[0].config.format.has_tensor_scale and len(sharers) == 1:
                of[sharers[0]] = None
                continue
            amax = max(max(stored_amax(target.planned(before))) for target in own)
            factor = _factor(amax, before, sharers[0].config)
            of |= {target.layer: before * factor for target in own}
            if factor > 1:
                rescaled |= {each: factor for each in sharers if each not in changed}
    return Scales(of, rescaled)


def global_scale_of(layer: QuantizedLinear) -> float:
    """Return the global scale of a packed layer, or its only one; 1 for a format without."""
    stored, fmt = layer.packed_weight.global_scale, layer.config.format
    if fmt.has_tensor_scale:
        return float(layer.weight_scale)
    return 1.0 if stored is None else fmt.global_scale_of(float(stored))


def _factor(amax: float, global_scale: float, config: LinearConfig) -> float:
    """Return the smallest power of two, at least 1, by which a global scale reaches a magnitude."""
    fmt = config.format
    if not (fmt.has_global_scale or fmt.has_tensor_scale):
        return 1.0
    full = global_scale * fmt.element.max * (1 if fmt.has_tensor_scale else fmt.scale.max)
    return max(1.0, float(power_reaching(torch.tensor(amax, dtype=torch.float64), full)))


def rescaled_buffers(layer: QuantizedLinear, factor: float) -> dict[str, Tensor]:
    """Return the scales of a layer whose global scale, or only one, is larger by a power of two.

    Block scales, or codes, are divided by it, which is exact but for the smallest.
    """
    fmt = layer.config.format
    if fmt.has_tensor_scale:
        scale = layer.weight_scale * factor
        weight = layer.stored_weight(torch.float32)
        return {PACKED: codes_at(weight, scale, fmt), SCALE: scale}
    bits = scale_bits(layer.weight_scale)
    table = scale_table(fmt.scale, bits.device)
    wanted = table[bits.long()] / factor
    known = table[: fmt.scale.last + 1]
    above = torch.searchsorted(known, wanted).clamp_(1, len(known) - 1)
    nearer = wanted - known[above - 1] < known[above] - wanted
    new = torch.where(nearer, above - 1, above)
    # No block that has values gets a scale of zero.
    new = torch.where(bits > 0, new.clamp_min(1), new)
    stored = global_scale_of(layer) * factor
    number = torch.full_like(layer._buffers[GLOBAL], fmt.global_scale_of(stored))  # type: ignore[arg-type]
    scale = new.to(torch.uint8).view(fmt.scale.storage)
    return {SCALE: scale, GLOBAL: number}
