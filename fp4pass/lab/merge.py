"""merge: take LoRA adapters into packed weights, and say what it costs."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import ops
from ..checkpoint import ConvertedState, finish_model
from ..core import current, power_reaching, scale_table, shown
from ..distributed import is_sharded
from ..errors import CalibrationError, OptionError, StateError
from ..evaluation import fast_dtype
from ..methods import Gptq, Sse, Stats, resolve_method
from ..nn import GLOBAL, PACKED, SCALE, QuantizedLinear, scale_bits
from ..quantization import (
    LayerPlan,
    LinearLayer,
    adapters,
    attach_observers,
    call_arguments,
    collect,
    count_tokens,
    device_of,
    pack_layer,
    quantizes_input,
    remove_observers,
    scale_groups,
    share_inputs,
    stored_amax,
)
from ..record import (
    LinearConfig,
    Row,
    forget_state,
    get_state,
    remember_tokenizer,
    set_state,
    unwrap,
)
from .divergence import Reference, mean_kl, read_windows, spread, together

_log = logging.getLogger(__name__)

# Windows that a model writes: for statistics, and for the KL alone; one in so many is held out.
_WRITTEN, _JUDGING, _HELD_OUT = 64, 16, 8

# The part of a change that has to be left where nobody has chosen a method or measured the loss.
_ENOUGH = 0.8


@dataclass(frozen=True)
class Merged:
    """The record of a call of `fp4pass.merge`.

    KL is that of the next token from base + adapter, the mean over held-out tokens in nats; None
    where there were none, or for a model without logits.

    Attributes:
        model: the merged model, without PEFT's wrappers.
        adapters: the names of the adapters.
        layers: the method of each layer that was quantized again, by its name.
        rescaled: the factor of the global scale of each layer that shares a raised one: its own
            weight is as it was, and its block scales are divided by that.
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
    rescaled: Mapping[str, float] = field(default_factory=dict)
    kept: float = 1.0
    tokens: int = 0
    held_out_tokens: int = 0
    kl_after: float | None = None
    kl_without: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as fp4pass.json has them in the list "merged"."""
        found = {name: value for name, value in vars(self).items() if name != "model"}
        lists = {"adapters": list(self.adapters), "layers": dict(self.layers)}
        return {**found, **lists, "rescaled": dict(self.rescaled)}

    def __str__(self) -> str:
        counts = Counter(self.layers.values())
        methods = ", ".join(f'{count} by "{name}"' for name, count in counts.items())
        text = f"merged {', '.join(self.adapters)} into {len(self.layers)} layers ({methods})"
        if self.rescaled:
            text += f"; {len(self.rescaled)} more share a raised global scale"
        text += f"; {100 * self.kept:.0f} % of the change of the weights is left"
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
    layers are merged as PEFT does. Global scales of quantized inputs stay those of the base.

    Args:
        model: a converted or loaded model with adapters of PEFT: a `PeftModel`, or one of
            transformers that has loaded or added some.
        method: how the sum is quantized: "sse", which needs no data, "hessian", "gptq", or options
            such as `Gptq()`. By default "gptq" with `data` or `tokenizer`; without both "sse", and
            an error if more than a fifth of the change would be rounded away.
        data: what to collect statistics on, as for `calibrate`, an eighth of which is held out for
            the KL. Without it base + adapter writes its own text where the method needs some, or
            where `tokenizer` is given.
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
    outer = unwrap(model)
    root = adapters.base_of(outer)
    state = _require_converted(outer, root)
    knows = data is not None or tokenizer is not None
    chosen = LinearConfig(method=(Gptq() if knows else Sse()) if method is None else method)
    if "cross" in chosen.needs:
        raise OptionError(
            "method: Gptq(target='cross') compares with a float model, and a merge has none. Give "
            "'gptq'."
        )
    targets, peft = _targets(root, chosen), adapters.peft_of(root)
    remember_tokenizer(root, tokenizer)
    with shown("merge", progress), torch.inference_mode(False), torch.no_grad():
        with _evaluating(outer), fast_dtype(root):
            own, apart = _read(root, data, held_out, tokenizer, bool(chosen.needs))
            stats = _statistics(root, targets, own) if chosen.needs else {}
            reference = _reference(root, apart)
            with peft.silenced([each.around for each in targets]):
                without = None if reference is None else mean_kl(reference.compare(root))
        numbers, raised = _shared_scales(root, targets)
        packed, kept = _packed(targets, numbers, stats)
        if method is None and not apart and kept < _ENOUGH:
            raise StateError(
                f"merge: without data {100 * (1 - kept):.0f} % of what the adapter changes would "
                "be rounded away, for it moves weights by less than half a step of their codes. "
                "Call fp4pass.merge(model, 'gptq', data=..., tokenizer=...), which rounds with the "
                "inputs in mind; method='sse' merges all the same."
            )
        names = {layer: _own_name(path) for path, layer in root.named_modules()}
        rescaled = {names[layer]: factor for layer, factor in raised.items()}
        names_of = [peft.applied_adapters(each.around) for each in targets]
        for each in targets:
            new, bias = packed[each.name], each.change[1]
            each.layer._buffers.update(
                {part: new.tensors[part] for part in (PACKED, SCALE, GLOBAL)}
            )
            each.layer.config = new.config
            if bias is not None:
                each.layer.get_parameter("bias").add_(bias)
        for layer, factor in raised.items():
            layer._buffers.update(_rescaled(layer, factor))
        rows = _rows(state, {name: new.rows[0] for name, new in packed.items()}, rescaled)
        record = Merged(
            model=root,
            adapters=tuple(sorted(set(itertools.chain(*names_of)))),
            layers={name: new.config.method_name for name, new in packed.items()},
            rescaled=rescaled,
            kept=kept,
            tokens=max((each.tokens for each in stats.values()), default=0),
        )
        peft.unload(outer, adapters.around_packed(root).values())
        forget_state(outer)
        finish_model(root, state.recipe, rows, carried=state.carried)
        if reference is not None:
            with _evaluating(root), fast_dtype(root):
                sums = reference.compare(root)
            kl: dict[str, Any] = {"kl_after": mean_kl(sums), "kl_without": without}
            record = dataclasses.replace(record, held_out_tokens=int(sums[:, 1].sum()), **kl)
    recipe = {**state.recipe, "merged": [*state.recipe.get("merged", ()), record.to_dict()]}
    finished: Any = get_state(root)
    set_state(root, dataclasses.replace(finished, recipe=recipe))
    _log.info("%s", record)
    return record


def _require_converted(outer: nn.Module, root: nn.Module) -> ConvertedState:
    """Return the record of a converted model that can be merged into."""
    state = get_state(outer) or get_state(root)
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
        peft = adapters.peft_of(self.around)
        change: tuple[Tensor, Tensor | None] = peft.lora_change(self.around)
        return change

    def plan(
        self, number: float | None, stats: Stats | None = None, config: LinearConfig | None = None
    ) -> LayerPlan:
        """Return the plan of the merged weight, made here, as `_plan` does."""
        weight = _dense(self.layer) + self.change[0]
        return _plan(self.name, weight, number, config or self.config, stats)


def _dense(layer: QuantizedLinear) -> Tensor:
    """Return the weight that packed codes stand for, float32 [N, K]."""
    return layer.from_parameter(layer.weight_as(torch.float32))


def _plan(
    name: str,
    weight: Tensor,
    number: float | None,
    config: LinearConfig,
    stats: Stats | None = None,
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
        stats=stats or Stats(),
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


def _shared_scales(
    root: nn.Module, targets: Sequence[_Target]
) -> tuple[dict[str, float | None], dict[QuantizedLinear, float]]:
    """Return the global scales of merged layers: those of before, as far as they reach.

    Layers that engines fuse keep one number: where a merged weight is out of its reach, it is
    multiplied by the smallest power of two that suffices, for all of them. Layers that had other
    numbers than their neighbours have their own.

    Returns:
        The global scale of each merged layer, or its only one, by name, None for one to be chosen;
        and the factor of each other layer whose group has a larger one now.
    """
    parent = adapters.parents(root)
    packed = [
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
    numbers: dict[str, float | None] = {}
    raised: dict[QuantizedLinear, float] = {}
    for group in scale_groups(packed):
        alike: dict[float, list[Any]] = {}
        for each in group:
            alike.setdefault(_global_scale(each.module), []).append(each.module)
        for before, sharers in alike.items():
            own = [changed[each] for each in sharers if each in changed]
            fmt, factor = sharers[0].config.format, 1.0
            if fmt.has_tensor_scale and len(sharers) == 1:
                numbers |= {target.name: None for target in own}
                continue
            if own and (fmt.has_global_scale or fmt.has_tensor_scale):
                amax = max(max(stored_amax(target.plan(before))) for target in own)
                full = before * fmt.element.max * (1 if fmt.has_tensor_scale else fmt.scale.max)
                reach = power_reaching(torch.tensor(amax, dtype=torch.float64), full)
                factor = max(1.0, float(reach))
            numbers |= {target.name: before * factor for target in own}
            if factor > 1:
                raised |= {each: factor for each in sharers if each not in changed}
    return numbers, raised


def _global_scale(layer: Any) -> float:
    """Return the global scale of a packed layer, or its only one; 1 for a format without."""
    stored, fmt = layer.packed_weight.global_scale, layer.config.format
    if fmt.has_tensor_scale:
        return float(layer.weight_scale)
    return 1.0 if stored is None else fmt.global_scale_of(float(stored))


def _rescaled(layer: QuantizedLinear, factor: float) -> dict[str, Tensor | None]:
    """Return the buffers of a layer whose global scale, or only one, is larger by a power of two.

    Block scales, or codes, are divided by it, which is exact but for the smallest.
    """
    fmt, number = layer.config.format, _global_scale(layer) * factor
    if fmt.has_tensor_scale:
        config = layer.config.override({"method": Sse()})
        new = pack_layer(_plan("", _dense(layer), number, config)).tensors
        return {PACKED: new[PACKED], SCALE: new[SCALE]}
    bits = scale_bits(layer.weight_scale)
    table = scale_table(fmt.scale, bits.device)
    known, wanted = table[: fmt.scale.last + 1], table[bits.long()] / factor
    above = torch.searchsorted(known, wanted).clamp_(1, len(known) - 1)
    nearest = above - (wanted - known[above - 1] < known[above] - wanted).long()
    # No block that has values gets a scale of zero.
    nearest = torch.where(bits > 0, nearest.clamp_min(1), nearest).to(torch.uint8)
    stored = torch.full_like(layer.get_buffer(GLOBAL), fmt.global_scale_of(number))
    return {SCALE: nearest.view(fmt.scale.storage), GLOBAL: stored}


def _read(
    root: nn.Module, data: Any, held_out: Any, tokenizer: Any, needs: bool
) -> tuple[list[Any], list[Any]]:
    """Return batches to collect statistics on, and those to measure on."""
    own, apart = [], []
    if data is not None:
        own = read_windows(root, data, tokenizer, 128)
    elif needs or (tokenizer is not None and held_out is None):
        own = read_windows(root, None, tokenizer, _WRITTEN if needs else _JUDGING)
    if held_out is not None:
        apart = read_windows(root, held_out, tokenizer, 128)
    elif data is None and not needs:
        own, apart = [], own
    elif len(own) > 1:
        places = spread(len(own), max(1, len(own) // _HELD_OUT))
        apart = [own[i] for i in places]
        own = [each for i, each in enumerate(own) if i not in places]
    return together(root, own), together(root, apart)


def _statistics(
    root: nn.Module, targets: Sequence[_Target], batches: Sequence[Any]
) -> dict[QuantizedLinear, Stats]:
    """Return the statistics of the inputs of layers in base + adapter."""
    observed = [
        LinearLayer(name, layer, id(layer), (layer.out_features, layer.in_features))
        for name, layer in ((each.name, each.layer) for each in targets)
    ]
    try:
        attach_observers(root, observed, targets[0].config.needs)
        for batch in current().each(batches, "batches"):
            args, kwargs = call_arguments(batch, device_of(root))
            count_tokens(root, args, kwargs)
            root(*args, **kwargs)
        return {each.layer: collect([each.layer], each.name) for each in targets}
    finally:
        remove_observers(root)
        sharing = [module for module in root.modules() if quantizes_input(module)]
        share_inputs(root, sharing, adapters.parents(root))


def _packed(
    targets: Sequence[_Target],
    numbers: Mapping[str, float | None],
    stats: Mapping[QuantizedLinear, Stats],
) -> tuple[dict[str, Any], float]:
    """Return the merged weights by the names of their layers, and how much of the change is left.

    That is <Q - W, D> / <D, D> of the change D of weights W, over all of them.
    """
    found: dict[str, Any] = {}
    moved = whole = 0.0
    for each in current().each(targets, "weights"):
        own, config = stats.get(each.layer, Stats()), each.config
        if not all(map(own.has, config.needs)):
            if config.unreached != "sse":
                raise CalibrationError(
                    f"{each.name}: no batch reached it, and the method {config.method_name!r} "
                    "needs its inputs. Give data that reaches it, or method='sse'."
                )
            config = config.override({"method": "sse"})
        new = found[each.name] = pack_layer(each.plan(numbers[each.name], own, config))
        packed, scale, number = (new.tensors[name] for name in (PACKED, SCALE, GLOBAL))
        bits, key = scale_bits(scale, config.format.scale.storage), config.format.key
        stored = ops.dequantize(packed, bits, number, key, torch.float32)
        change = each.change[0]
        moved += float(((config.restored(stored) - _dense(each.layer)) * change).sum())
        whole += float(change.square().sum())
    return found, moved / whole


def _reference(root: nn.Module, batches: Sequence[Any]) -> Reference | None:
    """Return the predictions of base + adapter, None without batches or logits."""
    if not batches:
        return None
    args, kwargs = call_arguments(batches[0], device_of(root))
    return Reference(root, batches) if hasattr(root(*args, **kwargs), "logits") else None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Have all modules of a model in evaluation mode, and put their modes back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _rows(
    state: ConvertedState, new: Mapping[str, Row], rescaled: Mapping[str, float]
) -> list[Row]:
    """Return the rows of the report, those of merged layers as they are now."""
    found = []
    for row in state.report.rows:
        name = _own_name(row.name)
        row = new.get(name, dataclasses.replace(row, name=name))
        if name in rescaled:
            factor = f"its global scale was raised by {rescaled[name]:g} in a merge"
            row = dataclasses.replace(row, note="; ".join(filter(None, (row.note, factor))))
        if row.skip_reason != "an adapter":
            found.append(row)
    return found
