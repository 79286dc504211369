"""merge: take LoRA adapters into packed weights, and say what it costs."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import ops
from .. import quantization as qn
from .. import record as rec
from ..checkpoint import ConvertedState, finish_model
from ..core.elements import scale_table
from ..core.formats import power_reaching
from ..core.progress import current, shown
from ..distributed import is_sharded
from ..errors import CalibrationError, OptionError, StateError
from ..evaluation import fast_dtype
from ..methods import Gptq, Sse, Stats, resolve_method
from ..nn.linear import GLOBAL, PACKED, SCALE, QuantizedLinear
from ..nn.packed_linear import scale_bits
from ..quantization import LayerPlan, adapters
from ..record import LinearConfig
from . import divergence as kls

_log = logging.getLogger(__name__)

# Windows that a model writes, and that are read; one in so many is held out.
_WRITTEN, _READ, _HELD_OUT = 64, 128, 8


@dataclass(frozen=True)
class Merged:
    """The record of a call of `fp4pass.merge`.

    KL is that of the next token from base + adapter, the mean over held-out tokens in nats; None
    where there were none, or for a model without logits.

    Attributes:
        model: the merged model, without PEFT's wrappers.
        adapters: the names of the adapters.
        layers: the method of each layer that was quantized again, by its name.
        rescaled: layers that kept their codes, under the raised global scale that they share.
        kept: the part of the change of the weights that is left after rounding: the product of what
            they moved by with B A, over the square of B A. The method of the base loses changes of
            less than half a step.
        tokens: that statistics were collected on.
        held_out_tokens: that the KL was measured on.
        kl_after: that of the merged model.
        kl_without: that of the packed layers without their adapters.

    Example:
        >>> fp4pass.lab.Merged(model, ("default",), {"0": "sse"}).to_dict()["layers"]
        {'0': 'sse'}
    """

    model: nn.Module = field(compare=False, repr=False)
    adapters: tuple[str, ...]
    layers: Mapping[str, str]
    rescaled: tuple[str, ...] = ()
    kept: float = 1.0
    tokens: int = 0
    held_out_tokens: int = 0
    kl_after: float | None = None
    kl_without: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as fp4pass.json has them in the list "merged"."""
        found = {name: value for name, value in vars(self).items() if name != "model"}
        lists = {"adapters": list(self.adapters), "rescaled": list(self.rescaled)}
        return {**found, **lists, "layers": dict(self.layers)}

    def __str__(self) -> str:
        counts = Counter(self.layers.values())
        methods = ", ".join(f'{count} by "{name}"' for name, count in counts.items())
        text = (
            f"merged {', '.join(self.adapters)} into {len(self.layers)} layers ({methods}); "
            f"{100 * self.kept:.0f} % of the change of the weights is left"
        )
        if self.kl_after is None:
            return f"{text}; the loss is not measured: give data= or held_out="
        return (
            f"{text}; KL to base + adapter on {self.held_out_tokens:,} held-out tokens: "
            f"{self.kl_after:.3g}, and {self.kl_without:.3g} without the adapter"
        )


def merge(
    model: nn.Module,
    method: object = None,
    *,
    data: Any = None,
    held_out: Any = None,
    tokenizer: Any = None,
    progress: bool = True,
) -> Merged:
    """Merge the active LoRA adapters of a converted model into its packed weights, in place.

    The weight of each packed layer that they change becomes W + scale B A, computed in float32, and
    is quantized again in the scheme of the layer; the inputs that its method looks at are those of
    base + adapter. All other layers keep their bytes, unless they share a global scale that no
    longer reaches: it is multiplied by a power of two for all of them then. Adapters of dense
    layers are merged as PEFT does. Global scales of quantized inputs stay those of the base. The
    model is in evaluation mode then.

    Args:
        model: a converted or loaded model with adapters of PEFT: a `PeftModel`, or one of
            transformers that has loaded or added some.
        method: how the sum is quantized: "sse", which needs no data, "hessian", "gptq", or options
            such as `Gptq()`. By default "gptq", which needs `data` or `tokenizer`.
        data: what to collect statistics on, as for `calibrate`, an eighth of which is held out for
            the KL; all of it for a method without statistics. Without it base + adapter writes its
            own text where the method needs some, or where `tokenizer` is given.
        held_out: as data, for the KL alone; all of `data` is for statistics then.
        tokenizer: of texts; by default that of the folder that the model came from.
        progress: as for `convert`.

    Returns:
        The record, with the merged model, an ordinary converted one, as `model`. It is also logged,
        and in the list "merged" of fp4pass.json.

    Raises:
        StateError: the model is not converted, has no adapter that can be merged, or would lose it.
        CalibrationError: data does not reach a layer whose method needs it.
        OptionError: there is no such method, or it needs text and there is no tokenizer.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
        >>> tuned = get_peft_model(fp4pass.convert(model, "nvfp4a16", "sse"), config)
        >>> merged = fp4pass.merge(tuned, "sse")
        >>> merged.layers, type(merged.model[0]).__name__
        ({'0': 'sse'}, 'QuantizedLinear')
    """
    outer = rec.unwrap(model)
    root = adapters.base_of(outer)
    state = _require_converted(outer, root)
    knows = data is not None or tokenizer is not None
    chosen = LinearConfig(method=Gptq() if method is None else method)
    if "cross" in chosen.needs:
        raise OptionError(
            "method: Gptq(target='cross') compares with a float model, and a merge has none. Give "
            "'gptq'."
        )
    targets, peft = _targets(root, chosen), adapters.peft_of(root)
    if method is None and not knows:
        raise StateError(
            "merge: expected data= or tokenizer=, got neither. 'gptq' rounds with inputs in mind; "
            "method='sse' needs none, and rounds away changes of less than half a step."
        )
    rec.remember_tokenizer(root, tokenizer)
    outer.eval()
    with shown("merge", progress), torch.inference_mode(False), torch.no_grad():
        with fast_dtype(root):
            own, apart = [], []
            if chosen.needs or (knows and held_out is None):
                own = kls.read_windows(root, data, tokenizer, _WRITTEN if data is None else _READ)
            if held_out is not None:
                apart = kls.read_windows(root, held_out, tokenizer, _READ)
            elif chosen.needs:
                apart, own = kls.divided(own, -(-(len(own) - 1) // _HELD_OUT))
            else:
                apart = own
            own, apart = (kls.together(root, each) for each in (own, apart))
            stats = _statistics(root, targets, own) if chosen.needs else {}
            if apart:
                args, kwargs = qn.call_arguments(apart[0], qn.device_of(root))
                apart = apart if hasattr(root(*args, **kwargs), "logits") else []
            before = kls.predictions(root, apart)
            with peft.silenced([each.around for each in targets]):
                without = kls.mean_kl(kls.compare(root, before)) if apart else None
        packed, raised, kept = _packed(root, targets, stats)
        names = {module: _own_name(path) for path, module in root.named_modules()}
        applied = [peft.applied_adapters(each.around) for each in targets]
        for each in targets:
            if (bias := each.change[1]) is not None:
                each.layer.get_parameter("bias").add_(bias)
        for layer, new in packed.items():
            layer._buffers.update({part: new.tensors[part] for part in (PACKED, SCALE, GLOBAL)})
            layer.config = new.config
        for layer, tensors in raised.items():
            layer._buffers.update(tensors)
        again = {names[layer]: new for layer, new in packed.items()}
        shared = {names[layer] for layer in raised}
        peft.unload(outer, adapters.around_packed(root).values())
        rec.forget_state(outer)
        record = Merged(
            model=root,
            adapters=tuple(sorted(set(itertools.chain(*applied)))),
            layers={name: new.config.method_name for name, new in again.items()},
            rescaled=tuple(sorted(shared)),
            kept=kept,
            tokens=max((each.tokens for each in stats.values()), default=0),
        )
        if apart:
            with fast_dtype(root):
                sums = kls.compare(root, before)
            kl: dict[str, Any] = {"kl_after": kls.mean_kl(sums), "kl_without": without}
            record = replace(record, held_out_tokens=int(sums[:, 1].sum()), **kl)
        rows = []
        for row in state.report.rows:
            if row.skip_reason != "an adapter":
                name = _own_name(row.name)
                row = again[name].rows[0] if name in again else replace(row, name=name)
                if name in shared:
                    row = replace(row, note="its global scale was raised in a merge")
                rows.append(row)
        merged = [*state.recipe.get("merged", ()), record.to_dict()]
        finish_model(root, {**state.recipe, "merged": merged}, rows, carried=state.carried)
    _log.info("%s", record)
    return record


def _require_converted(outer: nn.Module, root: nn.Module) -> ConvertedState:
    """Return the record of a converted model that can be merged into."""
    state = rec.get_state(outer) or rec.get_state(root)
    if not isinstance(state, ConvertedState) or isinstance(root, fx.GraphModule):
        raise StateError(
            "merge: the model is not converted as a whole, or is a graph. Call "
            "fp4pass.convert(model) first, give the model that it was called with, or merge into "
            "the float model with PEFT's own merge_and_unload."
        )
    for name, module in root.named_modules():
        if isinstance(module, QuantizedLinear):
            packed: Any = getattr(module, PACKED)
            if packed.is_meta or module.is_split or is_sharded(packed):
                raise StateError(
                    f"{_own_name(name)}: expected a whole packed weight in memory, got one that is "
                    "split or offloaded. Load the model whole in one process, and merge there."
                )
    return state


def _own_name(path: str) -> str:
    """Return the name of a layer once PEFT's wrappers are gone."""
    parts = path.removeprefix("base_model.model.").split(".")
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))


@dataclass(frozen=True, eq=False)
class _Target:
    """A packed layer with adapters that change its weight, and how it is quantized again."""

    name: str  # once PEFT's wrappers are gone
    layer: QuantizedLinear
    around: Any  # of PEFT
    config: LinearConfig

    @property
    def change(self) -> tuple[Tensor, Tensor | None]:
        """The sum that adapters add to the weight, float32 [N, K], and to its bias."""
        found: tuple[Tensor, Tensor | None] = adapters.peft_of(self.around).lora_change(self.around)
        return found

    @property
    def merged(self) -> Tensor:
        """The sum, float32 [N, K]."""
        return _dense(self.layer) + self.change[0]


def _dense(layer: QuantizedLinear) -> Tensor:
    """Return the weight that packed codes stand for, float32 [N, K]."""
    return layer.from_parameter(layer.weight_as(torch.float32))


def _plan(
    name: str, weight: Tensor, number: float | None, config: LinearConfig, stats: Stats
) -> LayerPlan:
    """Return the plan of a weight [N, K]; number: its global scale, or only one, None to choose."""
    fmt, rows, columns = config.format, *weight.shape
    able = resolve_method(config.method)[0].objective is not None
    held = nn.Linear(columns, rows, bias=False, device="meta")
    held.weight = nn.Parameter(weight, requires_grad=False)
    return LayerPlan(
        name=name,
        module=held,
        weight_key=id(held.weight),
        shape=(rows, columns),
        config=config,
        global_scales=(1.0 if number is None or fmt.has_tensor_scale else number,),
        tensor_scale=number if fmt.has_tensor_scale and able else None,
        stats=stats,
    )


def _targets(root: nn.Module, chosen: LinearConfig) -> list[_Target]:
    """Return the packed layers whose weight adapters change. Raises StateError without any."""
    peft, arounds = adapters.peft_of(root), adapters.around_packed(root)
    if not arounds:
        raise StateError(
            "merge: expected adapters of PEFT on packed layers, got a model without. Put them on "
            "with PeftModel.from_pretrained(model, folder), or merge adapters of dense layers "
            "with PEFT's own merge_and_unload."
        )
    names = {module: path for path, module in root.named_modules()}
    sharers = Counter(id(each._buffers.get(PACKED)) for each in names)
    found = []
    for layer, around in arounds.items():
        name = _own_name(names[layer])
        if problem := peft.merge_problem(around):
            raise StateError(f"{name}: it cannot be merged: {problem}. Keep it beside the model.")
        if not isinstance(layer, QuantizedLinear) or not peft.applied_adapters(around):
            continue
        target = _Target(name, layer, around, layer.config.override({"method": chosen.method}))
        # Bytes stay where nothing is added.
        if not any(each is not None and each.any() for each in target.change):
            continue
        if sharers[id(layer._buffers.get(PACKED))] > 1:
            raise StateError(
                f"{name}: it shares its packed weight with another layer, which the adapter would "
                "change, too. Keep the adapter beside the model."
            )
        found.append(target)
    if not found:
        raise StateError(
            "merge: no active adapter changes a packed layer: they are disabled, or add zero. "
            "Enable, train or activate one (model.set_adapter)."
        )
    return found


def _scales(
    root: nn.Module, targets: Sequence[_Target]
) -> dict[QuantizedLinear, tuple[str, float | None]]:
    """Return the layers to quantize, with their names and global scales, None to choose one."""
    # Layers that engines fuse keep one number: where a merged weight is out of its reach, it is
    # multiplied by the smallest power of two that suffices, for all of them.
    parent = adapters.parents(root)
    layers = [
        LayerPlan(
            name=path,
            module=module,
            weight_key=id(module.weight_packed),
            shape=(module.out_features, module.in_features),
            parent=parent(path),
            config=module.config,
        )
        for path, module in root.named_modules()
        if isinstance(module, QuantizedLinear)
    ]
    changed = {target.layer: target for target in targets}
    found: dict[QuantizedLinear, tuple[str, float | None]] = {}
    for group in qn.scale_groups(layers):
        # Layers that had other numbers than their neighbours have their own.
        alike: dict[float, list[Any]] = {}
        for each in group:
            alike.setdefault(_global_scale(each.module), []).append(each)
        for before, sharers in alike.items():
            own = [changed[each.module] for each in sharers if each.module in changed]
            fmt, number = sharers[0].config.format, None
            again = [each for each in sharers if each.module in changed]
            if own and (len(sharers) > 1 or not fmt.has_tensor_scale):
                number = before
            if number is not None and (fmt.has_global_scale or fmt.has_tensor_scale):
                full = before * fmt.element.max * (1 if fmt.has_tensor_scale else fmt.scale.max)
                plans = [_plan(x.name, x.merged, before, x.config, Stats()) for x in own]
                amax = max(amax for plan in plans for amax, _ in qn.survey(plan))
                factor = float(power_reaching(torch.tensor(amax, dtype=torch.float64), full))
                number, again = before * max(1.0, factor), sharers if factor > 1 else again
            found |= {each.module: (_own_name(each.name), number) for each in again}
    return found


def _global_scale(layer: Any) -> float:
    """Return the global scale of a packed layer, or its only one; 1 for a format without."""
    stored, fmt = layer.packed_weight.global_scale, layer.config.format
    if fmt.has_tensor_scale:
        return float(layer.weight_scale)
    return 1.0 if stored is None else fmt.global_scale_of(float(stored))


def _statistics(
    root: nn.Module, targets: Sequence[_Target], batches: Sequence[Any]
) -> dict[QuantizedLinear, Stats]:
    """Return the statistics of the inputs of layers in base + adapter."""
    observed = [
        qn.LinearLayer(x.name, x.layer, id(x.layer), (x.layer.out_features, x.layer.in_features))
        for x in targets
    ]
    try:
        qn.attach_observers(root, observed, targets[0].config.needs)
        for batch in current().each(batches, "batches"):
            args, kwargs = qn.call_arguments(batch, qn.device_of(root))
            qn.count_tokens(root, args, kwargs)
            root(*args, **kwargs)
        return {each.layer: qn.collect([each.layer], each.name) for each in targets}
    finally:
        qn.remove_observers(root)
        sharing = [module for module in root.modules() if qn.quantizes_input(module)]
        qn.share_inputs(root, sharing, adapters.parents(root))


def _packed(
    root: nn.Module, targets: Sequence[_Target], stats: Mapping[QuantizedLinear, Stats]
) -> tuple[dict[QuantizedLinear, Any], dict[QuantizedLinear, dict[str, Tensor]], float]:
    """Return the new weights, the buffers of layers that share their scales, and the part kept."""
    # Of the change D of weights W the part <Q - W, D> / <D, D> is kept, over all of them.
    changed = {target.layer: target for target in targets}
    found: dict[QuantizedLinear, Any] = {}
    raised: dict[QuantizedLinear, dict[str, Tensor]] = {}
    moved = whole = 0.0
    for layer, (name, number) in current().each(_scales(root, targets).items(), "weights"):
        before, target = _dense(layer), changed.get(layer)
        if target is None:
            raised[layer] = _with_global_scale(layer, number)
            continue
        own, config, change = stats.get(layer, Stats()), target.config, target.change[0]
        if not all(map(own.has, config.needs)):
            if config.unreached != "sse":
                raise CalibrationError(
                    f"{name}: no batch reached it, and the method {config.method_name!r} needs its "
                    "inputs. Give data that reaches it, or method='sse'."
                )
            config = config.override({"method": "sse"})
        new = found[layer] = qn.pack_layer(_plan(name, before + change, number, config, own))
        packed, scale, divisor = (new.tensors[part] for part in (PACKED, SCALE, GLOBAL))
        bits, key = scale_bits(scale, config.format.scale.storage), config.format.key
        stored = ops.dequantize(packed, bits, divisor, key, torch.float32)
        moved += float(((config.restored(stored) - before) * change).sum())
        whole += float(change.square().sum())
    return found, raised, moved / whole


def _with_global_scale(layer: QuantizedLinear, number: float | None) -> dict[str, Tensor]:
    """Return the buffers of a layer whose global scale, or only one, becomes a larger one."""
    # Codes stay, and block scales are divided by the power of two, which is exact but for the
    # smallest. Codes of one scale are rounded again.
    assert number is not None, "layers share a number"
    fmt = layer.config.format
    if fmt.has_tensor_scale:
        config = layer.config.override({"method": Sse()})
        new = qn.pack_layer(_plan("", _dense(layer), number, config, Stats())).tensors
        return {PACKED: new[PACKED], SCALE: new[SCALE]}
    bits = scale_bits(layer.weight_scale)
    table = scale_table(fmt.scale, bits.device)
    known, wanted = table[: fmt.scale.last + 1], table[bits.long()] * _global_scale(layer) / number
    above = torch.searchsorted(known, wanted).clamp_(1, len(known) - 1)
    nearest = above - (wanted - known[above - 1] < known[above] - wanted).long()
    # No block that has values gets a scale of zero.
    nearest = torch.where(bits > 0, nearest.clamp_min(1), nearest).to(torch.uint8)
    stored = torch.full_like(layer.get_buffer(GLOBAL), fmt.global_scale_of(number))
    return {SCALE: nearest.view(fmt.scale.storage), GLOBAL: stored}
