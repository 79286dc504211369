"""fp4pass quantize: a float model in, a checkpoint with packed weights out."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from typer import Argument, Option

from .. import calibration
from ..api import convert
from ..api.from_disk import finished_layers, quantize_checkpoint
from ..api.one_call import OwnText
from ..calibration.to_batches import SEQ_LEN
from ..checkpoint import MANIFEST, open_checkpoint, save
from ..checkpoint.beside import require_repository
from ..checkpoint.float_models import files_beside, load_config, load_float, load_tokenizer
from ..checkpoint.float_models import model_class as class_of
from ..checkpoint.layouts import LAYOUTS, get_layout
from ..checkpoint.saving import bytes_of
from ..core.atomic import require_free
from ..core.files import parse_file
from ..errors import OptionError, expected
from ..lab import SCHEMES, Allocation, allocate
from ..nn.kv_cache import CACHE_FORMATS
from ..quantization.recipe import Recipe
from ..record.rows import Report
from ..record.schemes import get_quality
from ..record.schemes import schemes as known_schemes
from ..record.state import report
from ..reporting.charts import ERRORS
from ..reporting.data import layer_facts, summarize
from ..reporting.models import open_packed
from ..reporting.text import size
from . import options as given
from . import screen

Rules = Annotated[
    Path | None, Option(help="A recipe or a list of rules, YAML or JSON; options override it.")
]
Budget = Annotated[
    str | None,
    Option(
        help="Choose the scheme of each layer by measuring: 5.0bits for the best model with that "
        "many bits per weight, 0.02kl for the smallest model within that KL. --method is then sse "
        "by default.",
        metavar="NUMBERbits|NUMBERkl",
        show_default=False,
    ),
]
Schemes = Annotated[
    str | None,
    Option(
        help="Schemes for --budget, separated by commas; bf16 leaves layers unchanged.",
        metavar="NAMES",
        show_default=",".join(SCHEMES),
    ),
]
Data = Annotated[
    str | None,
    Option(
        help="Calibration data: a text file; .jsonl, .csv, .json or .parquet with texts or "
        "chats; a folder of datasets; or name[:config][:split] of a hub dataset.",
        metavar="FILE|DATASET",
        show_default="text that the model writes, if the method needs any",
    ),
]
Samples = Annotated[
    int | None,
    Option(
        help="Calibration windows, also of text that the model writes.",
        show_default="128, or as many as the quality has for its own text",
    ),
]
Cache = Annotated[
    str | None,
    Option(
        help=f"Format of the key-value cache of generate: {', '.join(CACHE_FORMATS)}.",
        metavar="NAME",
        show_default="in float",
    ),
]
Sequential = Annotated[
    bool,
    Option(
        help="Move one layer at a time to the device, and calibrate it on the outputs of the "
        "quantized layers before it; for models larger than the device."
    ),
]
Stream = Annotated[
    bool,
    Option(
        help="Also write each layer to disk once it is packed, and read the next one "
        "meanwhile; for models larger than memory. Needs text only if the method does."
    ),
]
To = Annotated[
    str, Option(help=f"The layout of the checkpoint: {', '.join(LAYOUTS)}.", metavar="LAYOUT")
]
Dtype = Annotated[str, Option(help="Dtype of dense weights: auto, bfloat16, float16 or float32.")]
Push = Annotated[
    str | None,
    Option(help="Upload the folder to a repository on the Hugging Face hub.", metavar="USER/NAME"),
]

_DTYPES = ("auto", "float32", "bfloat16", "float16")


@given.with_config_options
def quantize(
    model: Annotated[str, Argument(help="A folder or a hub id.", show_default=False)],
    output: given.Output,
    rules: Rules = None,
    quality: given.QualityName = None,
    budget: Budget = None,
    schemes: Schemes = None,
    data: Data = None,
    samples: Samples = None,
    seq_len: given.SeqLen = None,
    batch_size: given.BatchSize = 8,
    kv_cache: Cache = None,
    sequential: Sequential = False,
    stream: Stream = False,
    seed: given.Seed = None,
    to: To = "compressed-tensors",
    dtype: Dtype = "auto",
    device: given.Device = None,
    trust_remote_code: given.TrustCode = False,
    copy_files: given.CopyFiles = None,
    max_shard_size: given.ShardSize = "5GB",
    overwrite: given.Overwrite = False,
    card: given.Card = True,
    push_to_hub: Push = None,
    as_json: screen.Json = False,
    *,
    config_options: dict[str, Any],
) -> None:
    """Quantize a model and write a checkpoint that serving engines load.

    torchrun --nproc-per-node N -m fp4pass quantize ... divides the work over N GPUs. Run an
    interrupted command again to resume it.
    """
    group = given.join_processes()
    recipe = given.read_recipe(rules, quality, config_options)
    if kv_cache is not None:
        recipe = dataclasses.replace(recipe, kv_cache=kv_cache)
    by_layers = "--stream" if stream else "--sequential" if sequential else ""
    limit = _read_budget(budget, schemes, config_options, recipe.quality, by_layers, group.size)
    names = SCHEMES if schemes is None else tuple(filter(None, schemes.split(",")))
    if limit is None:
        tried = [recipe]
    else:
        recipe = _with_method(recipe, rules, config_options)
        formats = [name for name in names if name.partition(":")[0] in known_schemes()]
        tried = [recipe.override({"fmt": name}) for name in formats] or [recipe]
    for each in tried:
        _require_possible(each, to, stream)
    bytes_of(max_shard_size)
    chosen = given.choose_device(device)
    if dtype not in _DTYPES:
        raise OptionError(f"--dtype {dtype} does not exist. Known: {', '.join(_DTYPES)}.")
    kept: Any = dtype if dtype == "auto" else getattr(torch, dtype)
    numbers = {"samples": samples, "seq_len": seq_len, "seed": seed}
    needs_text = limit is not None or _needs_text(recipe)
    if data is None and not needs_text:
        _require_no_text(numbers, sequential and not stream)
    if not by_layers and recipe.quality is not None and get_quality(recipe.quality).sequential:
        by_layers = f"--quality {recipe.quality}"
    if by_layers and chosen == "auto":
        raise OptionError(
            f"{by_layers} runs layers on one device. Give its name to --device, not auto, or leave "
            f"{by_layers} out."
        )
    given.require_at_least(2, seq_len=seq_len)
    given.require_at_least(1, samples=samples, batch_size=batch_size)
    text = OwnText(samples, SEQ_LEN if seq_len is None else seq_len, seed or 0)
    windows = 128 if samples is None else samples
    _require_work_for_each(group.size, chosen, windows)
    require_free(output, overwrite, marks=(MANIFEST,))
    if push_to_hub is not None:
        require_repository(push_to_hub)
    given.quiet()
    # First, for a hub that does not answer is tried for a while, once for each file.
    config = load_config(model, trust_remote_code)
    # Wrong globs raise before the work, and so does a folder that cannot be had.
    beside = files_beside(model, copy_files or ())
    given.require_context(config, seq_len)
    processor = load_tokenizer(model, trust_remote_code)
    read: Any = None
    if data is not None:
        counts = {"samples": windows, "seq_len": text.seq_len, "seed": seed}
        is_first_alone = bool(by_layers) or any("cross" in each.needs for each in recipe.configs())
        together = batch_size if limit is None else 1
        read = given.read_batches(
            data, model, processor, config, together, is_first_alone, **counts
        )
    elif needs_text:
        _require_writer(config, model, processor)
        read = text
    # Finished weights wait beside the folder until it is written.
    finished, allocation = finished_layers(output), None
    before = len(list(finished.glob("*.safetensors")))
    if before:
        screen.note(f"resumes: {before} finished {'layers' if stream else 'weights'} in {finished}")
    # With it the model writes its own text.
    reader = processor if read is text else None
    written: dict[str, Any] = {"layout": to, "overwrite": overwrite, "copy_files": copy_files or ()}
    written |= {"max_shard_size": max_shard_size, "card": card, "push_to_hub": push_to_hub}
    try:
        if stream:
            screen.note(f"{model}: {class_of(config).__name__}, layer by layer")
            more: dict[str, Any] = {"dtype": kept, "trust_remote_code": trust_remote_code}
            more |= {"data": read, "tokenizer": reader, "device": chosen, "stream": finished}
            result = quantize_checkpoint(model, output, **more, **written, **recipe.arguments())
        else:
            at = "cpu" if by_layers else chosen
            loaded = load_float(model, kept, at, trust_remote_code)
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
        _print_result(output, result, before, searched, as_json, allocation)


def _require_work_for_each(processes: int, device: str, windows: int) -> None:
    """Raise OptionError where several processes would share one model, or have no window."""
    if processes > 1 and (device == "auto" or windows < processes):
        problem = "--device auto spreads one model, and each process has the whole of it"
        if device != "auto":
            problem = f"--samples {windows} are fewer than the {processes} processes"
        raise OptionError(f"{problem}. Choose another, or run one process.")


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
    for name in ("fmt", "weight_only", "block"):
        if name in options:
            raise OptionError(
                f"--budget decides {given.flag(name)}. Leave it out, and give --schemes."
            )
    if quality is not None:
        raise OptionError("--budget does not go with a quality. Give --method instead.")
    if by_layers:
        raise OptionError(f"--budget does not go with {by_layers}, which runs parts of models.")
    if processes > 1:
        raise OptionError(
            f"--budget runs in one process, not {processes}. Run it in one, and the recipe that it "
            "writes in all."
        )
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)(bits|kl)", budget)
    if match is None:
        raise OptionError(expected("--budget", "a number as in 5.0bits or 0.02kl", budget))
    return {match[2]: float(match[1])}


def _with_method(recipe: Recipe, path: Path | None, options: Mapping[str, Any]) -> Recipe:
    """Return a recipe with the method of `allocate`, unless something says another one."""
    data = {} if path is None else parse_file(path)
    data = data.get("recipe", data) if isinstance(data, Mapping) else {}
    return recipe if "method" in options or "method" in data else recipe.override({"method": "sse"})


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
    decided = ("fmt", "weight_only", "block", "quality", "kv_cache")
    rest: Any = {name: each for name, each in recipe.arguments().items() if name not in decided}
    rest |= {"schemes": schemes, **limit}
    return allocate(model, data=data, tokenizer=processor, **rest)


def _needs_text(recipe: Recipe) -> bool:
    """Return whether a model has to write its own text where none is given."""
    return recipe.kv_cache is not None or any(
        config.needs or (config.format.has_input_scale and not config.weight_only)
        for config in recipe.configs()
    )


def _require_no_text(numbers: Mapping[str, Any], sequential: bool) -> None:
    """Refuse options of calibration where the method needs none."""
    if sequential:
        raise OptionError(
            "--sequential calibrates, and the method needs no text. Give --data FILE, or leave "
            "--sequential out."
        )
    names = [given.flag(name) for name, value in numbers.items() if value is not None]
    if flags := " and ".join(names):
        raise OptionError(f"{flags}: the method needs no calibration text. Leave out {flags}.")


def _require_writer(config: Any, source: str, processor: Any) -> None:
    """Refuse models that cannot write text, where none is given."""
    kind = class_of(config)
    if not getattr(kind, "can_generate", bool)() or getattr(config, "is_encoder_decoder", False):
        raise OptionError(
            f"A model of type {config.model_type} writes no text to calibrate on. Give --data "
            "FILE, or choose --method sse with --scheme nvfp4a16, which need none."
        )
    if processor is None:
        raise OptionError(
            f"{source} has no tokenizer, which writing calibration text needs. Copy one beside the "
            "model, or choose --method sse with --scheme nvfp4a16, which need no text."
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
    resumed: int,
    searched: int,
    as_json: bool,
    allocation: Allocation | None,
) -> None:
    stored = open_checkpoint(output)
    before = open_packed(stored).dense_bytes
    summary = summarize([layer_facts(row) for row in result.converted])
    after = sum(path.stat().st_size for path in set(stored.files.values()))
    if as_json:
        screen.print_json(
            {
                "output": str(stored.folder),
                "layout": stored.layout.name,
                "recipe": stored.recipe,
                "bytes_before": before,
                "bytes_after": after,
                "resumed": resumed,
                "searched": searched,
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
