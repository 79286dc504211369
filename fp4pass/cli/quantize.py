"""fp4pass quantize and merge: what writes folders with packed weights."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import calibration
from ..api import convert
from ..api.from_disk import finished_layers, quantize_checkpoint
from ..api.one_call import OwnText
from ..calibration.to_batches import SEQ_LEN
from ..checkpoint import MANIFEST, open_checkpoint, save
from ..checkpoint.float_models import files_beside, load_config, load_float, load_tokenizer
from ..checkpoint.float_models import model_class as class_of
from ..checkpoint.layouts import get_layout
from ..checkpoint.saving import bytes_of
from ..core.files import parse_file, require_free
from ..errors import OptionError, expected, unknown_name
from ..lab import SCHEMES, Allocation, allocate
from ..lab import merge as merge_adapters
from ..quantization.recipe import Recipe
from ..record.config import LinearConfig
from ..record.rows import Report
from ..record.schemes import SCHEME_FIELDS, get_quality
from ..record.schemes import schemes as known_schemes
from ..record.state import report
from ..reporting.data import Contents, layer_facts, summarize
from ..reporting.text import ERRORS, size
from . import options as given
from . import screen
from .folders import weights_size

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def quantize(
    model: str,
    output: Path,
    rules: Path | None = None,
    quality: str | None = None,
    budget: str | None = None,
    schemes: str | None = None,
    data: str | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    batch_size: int = 8,
    kv_cache: str | None = None,
    sequential: bool = False,
    stream: bool = False,
    seed: int | None = None,
    to: str = "compressed-tensors",
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    copy_files: list[str] | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    card: bool = True,
    json: bool = False,
    **config: Any,
) -> None:
    """Quantize a model and write a checkpoint that serving engines load.

    torchrun --nproc-per-node N -m fp4pass quantize ... divides the work over N GPUs. Run an
    interrupted command again to resume it.
    """
    group = given.join_processes()
    config = {name: value for name, value in config.items() if value is not None}
    recipe = given.read_recipe(rules, quality, config)
    if kv_cache is not None:
        recipe = dataclasses.replace(recipe, kv_cache=kv_cache)
    by_layers = "--stream" if stream else "--sequential" if sequential else ""
    limit = _read_budget(budget, schemes, config, recipe.quality, by_layers, group.size)
    names, tried = SCHEMES if schemes is None else tuple(schemes.split(",")), [recipe]
    if limit is not None:
        # Unless something says another method.
        said = {} if rules is None else parse_file(rules)
        said = said.get("recipe", said) if isinstance(said, Mapping) else {}
        recipe = recipe if "method" in {**config, **said} else recipe.override({"method": "sse"})
        formats = [name for name in names if name.partition(":")[0] in known_schemes()]
        tried = [recipe.override({"fmt": name}) for name in formats] or [recipe]
    for each in tried:
        _require_possible(each, to, stream)
    bytes_of(max_shard_size)
    chosen = given.choose_device(device)
    if dtype not in _DTYPES:
        raise unknown_name("--dtype", dtype, _DTYPES)
    needs_text = limit is not None or recipe.kv_cache is not None or _needs_text(recipe)
    if data is None and not needs_text and by_layers == "--sequential":
        raise OptionError("--sequential calibrates, and the method needs no text. Leave it out.")
    if not by_layers and recipe.quality is not None and get_quality(recipe.quality).sequential:
        by_layers = f"--quality {recipe.quality}"
    if chosen == "auto" and (by_layers or group.size > 1):
        who = by_layers or f"each of {group.size} processes"
        raise OptionError(f"--device auto: {who} runs on one device. Give its name.")
    given.require_at_least(2, seq_len=seq_len)
    given.require_at_least(1, samples=samples, batch_size=batch_size)
    require_free(output, overwrite, marks=(MANIFEST,))
    given.quiet()
    # First, for a hub that does not answer is tried for a while, once for each file.
    settings = load_config(model, trust_remote_code)
    # Wrong globs raise before the work, and so does a folder that cannot be had.
    beside = files_beside(model, copy_files or ())
    given.require_context(settings, seq_len)
    processor = load_tokenizer(model, trust_remote_code)
    read: Any = None
    if data is not None:
        counts = {"samples": samples or 128, "seq_len": seq_len or SEQ_LEN, "seed": seed}
        is_first_alone = bool(by_layers) or any("cross" in each.needs for each in recipe.configs())
        together = batch_size if limit is None else 1
        read = given.read_batches(
            data, model, processor, settings, together, is_first_alone, **counts
        )
    elif needs_text:
        _require_writer(settings, model, processor)
        read = OwnText(samples, seq_len or SEQ_LEN, seed or 0)
    # Finished weights wait beside the folder until it is written.
    finished, allocation = finished_layers(output), None
    before = len(list(finished.glob("*.safetensors")))
    if before:
        screen.note(f"resumes: {before} finished {'layers' if stream else 'weights'} in {finished}")
    # With it the model writes its own text.
    reader = processor if isinstance(read, OwnText) else None
    written: dict[str, Any] = {"layout": to, "overwrite": overwrite, "copy_files": copy_files or ()}
    written |= {"max_shard_size": max_shard_size, "card": card}
    kept: Any = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        if stream:
            screen.note(f"{model}: {class_of(settings).__name__}, layer by layer")
            more: dict[str, Any] = {"dtype": kept, "trust_remote_code": trust_remote_code}
            more |= {"data": read, "tokenizer": reader, "device": chosen, "stream": finished}
            result = quantize_checkpoint(model, output, **more, **written, **recipe.arguments())
        else:
            loaded = load_float(model, kept, "cpu" if by_layers else chosen, trust_remote_code)
            if limit is not None:
                allocation = _allocate(loaded, recipe, limit, names, read, processor)
                recipe = dataclasses.replace(allocation.recipe, kv_cache=recipe.kv_cache)
            screen.note(
                f"{model}: {type(loaded).__name__}, {loaded.num_parameters():,} parameters in "
                f"{str(loaded.dtype).removeprefix('torch.')}"
            )
            if read is not None and not by_layers:
                given.note_dtype("calibrates", loaded)
            place = chosen if by_layers else None
            more = {"data": read, "tokenizer": reader, "device": place, "resume": finished}
            convert(loaded, **more, **recipe.arguments())
            save(loaded, output, source=beside, **written)
            result = report(loaded)
    except KeyboardInterrupt as stop:
        hint = "Run the same command again to resume." if finished.exists() else ""
        raise KeyboardInterrupt(hint) from stop
    if group.rank == 0:
        searched = len(list(finished.glob("*.safetensors"))) - before
        shutil.rmtree(finished, ignore_errors=True)
        done = {"resumed": before, "searched": searched}
        _print_result(output, result, done, json, allocation)


def _read_budget(
    budget: str | None,
    schemes: str | None,
    options: Mapping[str, Any],
    quality: str | None,
    by_layers: str,
    processes: int,
) -> dict[str, float] | None:
    """Return the limit of --budget as `allocate` takes it, None without one."""
    if budget is None:
        if schemes is not None:
            raise OptionError("--schemes is for --budget. Give one, or use --scheme.")
        return None
    others = [given.flag(name) for name in SCHEME_FIELDS if name in options]
    others += ["a quality"] if quality is not None else []
    others += [f"{processes} processes"] if processes > 1 else []
    for each in filter(None, (*others, by_layers)):
        raise OptionError(f"--budget does not go with {each}. Leave one of them out.")
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)(bits|kl)", budget)
    if match is None:
        raise OptionError(expected("--budget", "a number as in 5.0bits or 0.02kl", budget))
    return {match[2]: float(match[1])}


def _allocate(
    model: Any,
    recipe: Recipe,
    limit: Mapping[str, float],
    schemes: tuple[str, ...],
    data: Any,
    processor: Any,
) -> Allocation:
    """Return the choice of schemes for a model, on batches of one window or on its own text."""
    if isinstance(data, OwnText):
        numbers = {**vars(data), "samples": data.samples or 128}
        is_usual = data == OwnText()
        data = None
        if not is_usual:
            data = calibration.batches(None, processor, model=model, batch_size=1, **numbers)
    decided = (*SCHEME_FIELDS, "quality", "kv_cache")
    rest: Any = {name: each for name, each in recipe.arguments().items() if name not in decided}
    rest |= {"schemes": schemes, **limit}
    return allocate(model, data=data, tokenizer=processor, **rest)


def _needs_text(recipe: Recipe) -> bool:
    return any(config.needs or config.has_input_scale for config in recipe.configs())


def _require_writer(config: Any, source: str, processor: Any) -> None:
    """Refuse models that cannot write text, where none is given."""
    kind, problem = class_of(config), ""
    if not getattr(kind, "can_generate", bool)() or getattr(config, "is_encoder_decoder", False):
        problem = f"A model of type {config.model_type} writes no text to calibrate on"
    elif processor is None:
        problem = f"{source} has no tokenizer, which writing calibration text needs"
    if problem:
        raise OptionError(
            f"{problem}. Give --data FILE, or choose --method sse with --scheme nvfp4a16, which "
            "need no text."
        )


def _require_possible(recipe: Recipe, to: str, stream: bool) -> None:
    """Refuse recipes that the layout cannot hold, before hours of work."""
    layout = get_layout(to)
    layout.cache.config(recipe.kv_cache, layout.name)
    if recipe.kv_cache is not None and stream:
        raise OptionError(f"--kv-cache {recipe.kv_cache} does not go with --stream.")
    for config in recipe.configs():
        problem = layout.config_problem(config)
        if problem and not layout.fallback:
            raise OptionError(
                f"--to {to} has no place for {problem}; it holds "
                f"{' and '.join(layout.formats)}. Choose another format or layout."
            )


def _print_result(
    output: Path,
    result: Report,
    counts: Mapping[str, int],
    as_json: bool,
    allocation: Allocation | None,
) -> None:
    found = Contents.of(output)
    before, after, stored = found.dense_bytes(), weights_size(output), found.stored
    summary = summarize([layer_facts(row) for row in result.converted])
    if as_json:
        screen.print_json(
            {
                "output": str(stored.folder),
                "layout": stored.layout.name,
                "recipe": stored.recipe,
                "bytes_before": before,
                "bytes_after": after,
                **counts,
                "summary": summary,
                **({} if allocation is None else {"allocation": allocation.to_dict()}),
                **result.to_dict(),
            }
        )
        return
    if allocation is not None:
        print(f"{allocation}\n")
    header = ("scheme ", "method ", "layers", "bits", "weight err", "output err")
    lines = [
        (
            *(line["label"], line["method"], str(line["layers"]), f"{line['bits']:.2f}"),
            *(screen.percent(line[error]) for error in ERRORS),
        )
        for line in summary
    ]
    screen.print_table(header, lines)
    screen.print_reasons({row.name: row.skip_reason for row in result.skipped})
    share = f"{size(after)} of weights, {after / before:.0%} of {size(before)} before"
    print(f"\n{stored.folder} ({stored.layout.name}): {share}")


def merge(
    base: Path,
    adapter: Path,
    output: Path,
    method: str | None = None,
    data: str | None = None,
    held_out: str | None = None,
    samples: int = 128,
    seq_len: int | None = None,
    batch_size: int = 8,
    seed: int | None = None,
    to: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    copy_files: list[str] | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    card: bool = True,
    json: bool = False,
) -> None:
    """Merge a LoRA adapter into the packed weights of a checkpoint, and measure the cost.

    Each layer that the adapter changes is quantized again in its own scheme; all others keep their
    bytes.
    """
    if method is not None:
        LinearConfig(method=method)
    bytes_of(max_shard_size)
    layout = open_checkpoint(base).layout.name if to is None else get_layout(to).name
    given.require_at_least(2, seq_len=seq_len)
    given.require_at_least(1, samples=samples, batch_size=batch_size)
    require_free(output, overwrite, marks=(MANIFEST,))
    beside = files_beside(str(base), copy_files or ())
    given.quiet()
    # It imports PEFT, and refuses old versions.
    from ..integrations.peft import load_adapter

    model: Any = given.load_any(str(base), given.choose_device(device), trust_remote_code)
    processor = load_tokenizer(str(base), trust_remote_code)
    tuned = load_adapter(model, adapter)
    numbers: Any = {"samples": samples, "seq_len": seq_len or SEQ_LEN, "seed": seed}
    batches: dict[str, Any] = {}
    for name, spec in (("data", data), ("held_out", held_out)):
        if spec is not None:
            given.require_context(model.config, seq_len)
            options: Any = (str(base), processor, model.config, batch_size)
            batches[name] = given.read_batches(spec, *options, **numbers)
    found = merge_adapters(tuned, method, tokenizer=processor, **batches)
    written: dict[str, Any] = {"layout": layout, "copy_files": copy_files or (), "card": card}
    written |= {"max_shard_size": max_shard_size, "overwrite": overwrite}
    save(found.model, output, source=beside, **written)
    if json:
        screen.print_json({"output": str(output), "layout": layout, **found.to_dict()})
    else:
        print(f"{output} ({layout}): {found}")
