"""prepare, calibrate, convert: the flow on one page."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from tqdm import tqdm

from .checkpoint.saving import enable_save_pretrained
from .config import Rule, Settings, check_rules, make_settings
from .core.quant_state import QuantState
from .errors import CalibrationError, OptionError, StateError
from .graph.transforms.fold_rotations import fold_rotations
from .kernels.rotate.reference import rotate_weight
from .linear import INPUT_GLOBAL, QuantizedLinear, stored_tensors
from .methods import Stats, resolve_method
from .quantization.batches import call_arguments, device_of, require_device
from .quantization.layer_inputs import forget_recording, record, recording_of
from .quantization.plan import (
    Site,
    by_weight,
    dense_weight,
    find_sites,
    selected,
    share_global_scales,
    share_statistics,
)
from .quantization.replace import (
    adapt_inductor,
    attach_observers,
    drop_unused_copies,
    own_config,
    remove_observers,
    rewrite_graph,
    store_packed,
    untie,
    use_slow_paths,
)
from .quantization.report import (
    Record,
    Report,
    Row,
    forget_record,
    get_record,
    make_row,
    set_record,
    unwrap,
)
from .quantization.search_cache import Finished, digest_of
from .quantization.sequential import layer_groups, require_plain


def prepare(
    model: nn.Module,
    method: object = "hessian",
    *,
    rotation: int = 0,
    rules: Sequence[Rule] = (),
    sequential: bool = False,
) -> nn.Module:
    """Put observers in front of the linears of `model`, in place, and return it.

    model: any nn.Module, or the GraphModule of torch.export. method, rotation: what `convert` will
    use; they decide what is collected. rules: as for `convert`, which applies these too.
    sequential: only keep what the first of the model's layers is called with; `convert` then
    calibrates one layer at a time, on the outputs of those that it has quantized
    (docs/quality.md).
    Preparing again keeps the statistics and adds nothing. Raises StateError for a model that is
    converted or holds nothing to quantize, RuleError and OptionError for bad arguments.
    """
    root = unwrap(model)
    resolve_method(method)
    _refuse_converted(root, "prepare")
    before = get_record(root)
    rules = check_rules(rules)
    if before is not None:
        if rules and rules != before.rules:
            raise StateError(
                "The model is prepared with other rules. Give these to convert, where they go "
                "before those of prepare, or prepare a fresh copy of the model."
            )
        rules = before.rules
    # Whatever the format will be; convert asks again with the one that it is given.
    options: dict[str, Any] = {"fmt": "nvfp4", "method": method, "rotation": rotation}
    sites = find_sites(root, rules, **options)
    require_sites(sites)
    default = make_settings(block="default", weight_only=False, **options)
    needs = set(default.needs)
    for site in selected(sites):
        assert site.settings is not None
        needs.update(site.settings.needs)
    if before is not None and not needs <= set(before.needs):
        rotated = f" with rotation={rotation}" if rotation else ""
        raise StateError(
            f"The model is prepared for method {before.recipe['method']!r}, whose observers do not "
            f"collect what {default.method.name!r} needs{rotated}. Prepare a fresh copy of the "
            "model."
        )
    if before is not None and sequential != (recording_of(root) is not None):
        raise StateError(
            f"The model is prepared with sequential={not sequential}. Prepare a fresh copy of it."
        )
    observed = selected(sites)
    if sequential:
        observed = record(root, sites) if before is None else []
    require_plain(observed)
    use_slow_paths(root)
    columns = {site.module: site.columns for site in observed}
    attach_observers(root, columns, tuple(sorted(needs)))
    _forget_compiled()
    if before is None:
        rows = Report(tuple(make_row(site) for site in sites))
        recipe = {"method": _plain(method), "rules": _plain(rules)}
        set_record(root, Record("prepared", recipe, rows, rules, tuple(sorted(needs))))
    return model


def calibrate(model: nn.Module, batches: Iterable[Any], *, progress: bool = True) -> nn.Module:
    """Run `batches` through a prepared model without gradients, and return it.

    batches: mappings are passed as keyword arguments, tuples and lists as positional ones, a
    tensor as the only one; each is moved to the device of the model first.
    Warns if a batch has an attention_mask with zeros: what is padded is observed like the rest.
    Raises StateError if the model is not prepared, CalibrationError if there are no batches.
    """
    record = get_record(model)
    if record is None or record.status != "prepared":
        raise StateError("The model is not prepared. Call fp4pass.prepare(model) first.")
    if model.training:
        warnings.warn(
            "The model is in training mode: dropout is on while it is calibrated. Call "
            "model.eval() first.",
            stacklevel=2,
        )
    if isinstance(batches, Mapping | str | Tensor) or not isinstance(batches, Iterable):
        raise CalibrationError(
            f"batches is one {type(batches).__name__}; an iterable of batches is wanted. Put a "
            "single batch into a list: calibrate(model, [batch])."
        )
    device = device_of(model)
    recording = recording_of(unwrap(model))
    count, warned = 0, False
    seen = record.recipe.get("calibration", {"sha256": "", "batches": 0})
    digest = seen["sha256"]
    with torch.no_grad():
        for batch in tqdm(batches, desc="calibrate", unit="batch", disable=not progress):
            args, kwargs = call_arguments(batch, device)
            mask = kwargs.get("attention_mask")
            # In a mask of floats zero means: attend.
            hides = isinstance(mask, Tensor) and not mask.is_floating_point() and (mask == 0).any()
            if not warned and hides:
                warned = True
                warnings.warn(
                    "A batch has an attention_mask with zeros. Padding is observed like text; "
                    "calibrate on sequences of full length.",
                    stacklevel=2,
                )
            if recording is None:
                model(*args, **kwargs)
            else:
                recording.run(unwrap(model), args, kwargs)
            digest = digest_of(digest, args, kwargs)
            count += 1
    if not count:
        raise CalibrationError("There are no batches to calibrate on: the iterable is empty.")
    seen = {"sha256": digest, "batches": seen["batches"] + count}
    recipe = {**record.recipe, "calibration": seen}
    set_record(unwrap(model), dataclasses.replace(record, recipe=recipe))
    return model


def convert(
    model: nn.Module,
    fmt: str = "nvfp4",
    method: object = "hessian",
    *,
    weight_only: bool = False,
    block: int | str = "default",
    activation_scales: str = "naive",
    rotation: int = 0,
    rules: Sequence[Rule] = (),
    resume: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Quantize the linears of `model` to `fmt`, in place, and return it.

    method: a name or its options; methods that need no data ("naive", "sse") take a model that is
    not prepared. weight_only: leave activations alone; else they are quantized too, with the
    global scale that calibration found or, without, with one for each call. activation_scales: of
    the blocks of these inputs, "naive", from their amax, or "sse", of least squared error, searched
    at every call. rotation: 32, 64 or 128 columns of inputs and weights are rotated together by a
    Hadamard matrix before they are quantized, which spreads outliers: for mxfp4 (docs/quality.md).
    rules: (glob, None) leaves linears alone, (glob, {"fmt", "method", "block", "weight_only",
    "activation_scales", "rotation"}) overrides; the first match wins, then those given to
    `prepare`, then the built-in ones. resume: a folder that keeps every finished weight, so that
    the same call after an interruption searches only the rest; delete it when the model is saved.
    device: after prepare(sequential=True), where to run one layer after the other; by default
    where they are.
    Everything is checked before the first weight is replaced. Code that torch.compile made in this
    process is compiled again when it is next called. With 4-bit inputs torch.compile rounds where
    eager does from then on (docs/graphs.md). Raises CalibrationError for a layer
    that needs data and has none, NonFiniteError, StateError, RuleError or OptionError.
    """
    root = unwrap(model)
    _refuse_converted(root, "convert")
    before = get_record(root)
    rules = (*check_rules(rules), *(before.rules if before else ()))
    options: dict[str, Any] = {
        "fmt": fmt,
        "method": method,
        "weight_only": weight_only,
        "block": block,
        "activation_scales": activation_scales,
        "rotation": rotation,
    }
    sites = find_sites(root, rules, **options)
    require_sites(sites)
    recording = recording_of(root)
    if recording is None and device is not None:
        raise OptionError(
            f"device is {str(device)!r}, but layers run in convert only after "
            "prepare(model, sequential=True). Move the model instead."
        )
    first = sites if recording is None else recording.outside(sites)
    require_plain(first)
    share_statistics(first)
    _require_statistics(first, prepared=before is not None)
    if device is not None:
        require_device(str(device), "device=")
    finished = None if resume is None else Finished(resume)
    if isinstance(root, fx.GraphModule):
        _fold_rotations(root, first)
    share_global_scales(sites)

    forget_record(root)
    forget_recording(root)
    remove_observers(root)
    # Inference tensors could neither be saved for a gradient nor be written to later.
    with torch.inference_mode(False), torch.no_grad():
        rows = _convert_sites(root, first, finished)
        for group in () if recording is None else layer_groups(recording, sites, device):
            try:
                _require_statistics(group, prepared=True)
            except CalibrationError as error:
                raise CalibrationError(
                    f"{error} Whatever came before it is packed already: start again from the "
                    "float model, with resume= to keep what was searched."
                ) from None
            rows.update(_convert_sites(root, group, finished))
    recipe = make_recipe(rules, **options)
    if tokens := max(row.tokens for row in rows.values()):
        seen = {} if before is None else before.recipe.get("calibration", {})
        sequential = {} if recording is None else {"sequential": True}
        recipe["calibration"] = {**seen, "tokens": tokens, **sequential}
    if before is not None and "smooth" in before.recipe:
        recipe["smooth"] = before.recipe["smooth"]
    finish_conversion(root, recipe, [rows[site.name] for site in sites])
    return model


def _fold_rotations(root: fx.GraphModule, sites: Sequence[Site]) -> None:
    """Have linears of a graph give rotated outputs to those that would rotate them."""
    alone = {members[0].module: members[0] for members in by_weight(sites) if len(members) == 1}
    rotations = {m: site.settings.rotation for m, site in alone.items() if site.settings}
    for module, changed in fold_rotations(root, rotations).items():
        site = alone[module]
        assert site.settings is not None
        site.settings = dataclasses.replace(site.settings, **changed)


def _convert_sites(
    root: nn.Module, sites: Sequence[Site], finished: Finished | None
) -> dict[str, Row]:
    """Search, pack and replace, one weight at a time; the row of every site."""
    rows = {site.name: make_row(site) for site in sites if site.reason}
    weights = by_weight(sites)
    if isinstance(root, fx.GraphModule):
        drop_unused_copies(root, {members[0].weight_key for members in weights})
    inputs: dict[tuple[object, ...], Tensor | None] = {}
    # A bar only for models that take long enough to wonder, and where somebody looks.
    bar = tqdm(weights, desc="convert", unit="weight", delay=2.0, leave=False, disable=None)
    for members in bar:
        rows.update(convert_weight(members, inputs, finished))
    if isinstance(root, fx.GraphModule):
        usages = {site.module: site.settings.usage for site in selected(sites) if site.settings}
        rewrite_graph(root, usages)
    return rows


def convert_weight(
    members: Sequence[Site],
    inputs: dict[tuple[object, ...], Tensor | None],
    finished: Finished | None = None,
) -> dict[str, Row]:
    """Search, pack and replace one weight, that of all `members`; the row of each.

    inputs: the scales of inputs, by what decides which linears share one; added to.
    finished: searches done before; added to.
    """
    first, settings = members[0], members[0].settings
    assert settings is not None
    with dense_weight(first) as weight:
        stats = first.stats
        there = {
            name: value.to(weight.device)
            for name in ("block_hessian", "hessian", "cross")
            if (value := getattr(stats, name)) is not None
        }
        stats = dataclasses.replace(stats, **there)
        weight = settings.usage.stored(settings.target(weight, stats))
        if settings.rotation:
            stats = stats.rotated(settings.rotation)
        state = _search(weight, stats, first.global_scale, settings, finished)
        of_stats = [dataclasses.replace(site, stats=stats) for site in members]
        rows = {site.name: make_row(site, weight, state) for site in of_stats}
    input_scale = None
    if not settings.weight_only and stats.tokens:
        input_scale = settings.format.global_scale_for(stats.input_amax)
    tensors = stored_tensors(state, input_scale)
    # Linears that read one input share its scale, to share its quantization too. A graph
    # cannot guard that two values stay equal, so it is one buffer.
    parent = first.name.rpartition(".")[0]
    shared = (parent, settings.format.key, input_scale, state.qdata.device)
    tensors[INPUT_GLOBAL] = inputs.setdefault(shared, tensors[INPUT_GLOBAL])
    bias = first.module._parameters.get("bias")
    if settings.output_rotation and bias is not None:
        # Not in place: the model that was exported has the same tensor.
        rotated = rotate_weight(bias[None], settings.output_rotation)[0].to(bias.dtype)
        first.module.bias = nn.Parameter(rotated, requires_grad=bias.requires_grad)
    for site in members:
        store_packed(site.module, tensors, settings.usage, transposed=site.transposed)
    return rows


def _search(
    weight: Tensor,
    stats: Stats,
    global_scale: float,
    settings: Settings,
    finished: Finished | None,
) -> QuantState:
    """The method's choice for a weight, unless it is finished already."""
    arguments = (weight, stats, settings.format, global_scale, settings.options)
    if finished is None:
        return settings.method.function(*arguments)
    needs = [getattr(stats, need) for need in settings.method.needs]
    choice = (settings.method.name, settings.format.key, global_scale, settings.options)
    key = finished.key(weight, needs, choice)
    state = finished.get(key)
    if state is None:
        state = settings.method.function(*arguments)
        finished.put(key, state)
    return state.to(weight.device)


def make_recipe(rules: Sequence[Rule], **options: Any) -> dict[str, Any]:
    """The options of `convert` as plain values."""
    return {key: _plain(value) for key, value in {**options, "rules": rules}.items()}


def finish_conversion(root: nn.Module, recipe: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """What a model needs besides packed weights: its record, a way to be saved."""
    use_slow_paths(root)
    own_config(root)
    untie(root)
    _forget_compiled()
    set_record(root, Record("converted", recipe, Report(tuple(rows))))
    enable_save_pretrained(root)
    adapt_inductor(not all(row.weight_only for row in rows if not row.reason))


def _refuse_converted(root: nn.Module, verb: str) -> None:
    record = get_record(root)
    converted = [name for name, m in root.named_modules() if isinstance(m, QuantizedLinear)]
    if converted or (record is not None and record.status == "converted"):
        where = f", as {converted[0]!r} is," if converted and converted[0] else ""
        raise StateError(
            f"The model is already converted{where} so there is nothing to {verb}. Start from the "
            "float model again."
        )


def require_sites(sites: Sequence[Site]) -> None:
    """Raise StateError for a model without anything to quantize."""
    if selected(sites):
        return
    reasons = "; ".join(f"{site.name or 'the model'}: {site.reason}" for site in sites[:5])
    raise StateError(
        f"The model has no linear to quantize. {reasons or 'It has no linear at all.'}"
    )


def _require_statistics(sites: Sequence[Site], prepared: bool) -> None:
    """Every site must have what its method needs."""
    lacking = []
    for site in selected(sites):
        assert site.settings is not None
        if any(getattr(site.stats, need) is None for need in site.settings.needs):
            lacking.append(site)
    if not lacking:
        return
    settings = lacking[0].settings
    assert settings is not None
    name = settings.method.name
    rotation = f", rotation={settings.rotation}" if settings.rotation else ""
    wanted = f"fp4pass.prepare(model, {name!r}{rotation})"
    if not prepared:
        raise CalibrationError(
            f"Method {name!r} needs calibration data. Call {wanted} and "
            "run some batches through the model before convert, or choose method='sse'."
        )
    names = ", ".join(site.name or "the model" for site in lacking[:5])
    more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
    if any(site.stats.tokens for site in lacking):
        raise CalibrationError(
            f"{names}{more}: the model was prepared for a method or a rotation that does not "
            f"collect what {name!r} needs{rotation.replace(', ', ' with ')}. Prepare a fresh copy "
            f"with {wanted}."
        )
    raise CalibrationError(
        f"{names}{more}: calibration never reached them. Run batches that use these layers, or "
        f"leave them alone with rules=[({lacking[0].name!r}, None)]."
    )


def _plain(value: Any) -> Any:
    """A choice of options as JSON has it: a method with options as its name and them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"name": resolve_method(value)[0].name, **dataclasses.asdict(value)}
    return value


def _forget_compiled() -> None:
    """Code that torch.compile made of the model as it was must not run any more."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
