"""fp4pass quantize: a float model in, a checkpoint with packed weights out."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ..api import convert
from ..calibration.to_batches import SEQ_LEN, collate
from ..checkpoint import float_models
from ..checkpoint.float_models import open_float_source
from ..checkpoint.layouts import LAYOUTS, get_layout
from ..checkpoint.publish import require_repository
from ..checkpoint.reader import CheckpointReader, open_checkpoint
from ..checkpoint.saving import save
from ..checkpoint.source_files import MANIFEST
from ..checkpoint.writer import bytes_of
from ..core.atomic import require_free
from ..engine.one_call import OwnText
from ..errors import OptionError, expected
from ..from_disk import finished_layers, quantize_checkpoint
from ..lab import Allocation
from ..nn.kv_cache import CACHE_FORMATS
from ..quantization.recipe import Recipe
from ..record.quality import get_quality
from ..record.rows import Report
from ..record.state import report
from ..reporting.charts import ERRORS
from ..reporting.data import layer_facts, summarize
from ..reporting.models import open_packed
from ..reporting.text import size
from . import screen, sources
from .budget import Asked, Budget, Schemes
from .calibrating import calibrated, one_call, read_examples, require_context, require_writer
from .options import (
    BatchSize,
    Card,
    CopyFiles,
    Device,
    Overwrite,
    QualityName,
    Seed,
    SeqLen,
    ShardSize,
    TrustCode,
    read_recipe,
    with_config_options,
)


@with_config_options
def quantize(
    model: Annotated[str, Argument(help="A folder or a hub id.", show_default=False)],
    output: Annotated[Path, Option("--output", "-o", help="The folder to write.")],
    rules: Annotated[
        Path | None, Option(help="A recipe or a list of rules, YAML or JSON; options override it.")
    ] = None,
    quality: QualityName = None,
    budget: Budget = None,
    schemes: Schemes = None,
    data: Annotated[
        str | None,
        Option(
            help="Calibration data: a text file; .jsonl, .csv, .json or .parquet with texts or "
            "chats; a folder of datasets; or name[:config][:split] of a hub dataset.",
            metavar="FILE|DATASET",
            show_default="text that the model writes, if the method needs any",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        Option(
            help="Calibration windows, also of text that the model writes.",
            show_default="128, or as many as the quality has for its own text",
        ),
    ] = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = 8,
    kv_cache: Annotated[
        str | None,
        Option(
            help=f"Format of the key-value cache of generate: {', '.join(CACHE_FORMATS)}.",
            metavar="NAME",
            show_default="in float",
        ),
    ] = None,
    sequential: Annotated[
        bool,
        Option(
            help="Move one layer at a time to the device, and calibrate it on the outputs of the "
            "quantized layers before it; for models larger than the device."
        ),
    ] = False,
    stream: Annotated[
        bool,
        Option(
            help="Also write each layer to disk once it is packed, and read the next one "
            "meanwhile; for models larger than memory. Needs text only if the method does."
        ),
    ] = False,
    seed: Seed = None,
    to: Annotated[
        str,
        Option(
            help=f"The layout of the checkpoint: {', '.join(LAYOUTS)}.",
            metavar="LAYOUT",
        ),
    ] = "compressed-tensors",
    dtype: Annotated[
        str, Option(help="Dtype of dense weights: auto, bfloat16, float16 or float32.")
    ] = "auto",
    device: Device = None,
    trust_remote_code: TrustCode = False,
    copy_files: CopyFiles = None,
    max_shard_size: ShardSize = "5GB",
    overwrite: Overwrite = False,
    card: Card = True,
    push_to_hub: Annotated[
        str | None,
        Option(
            help="Upload the folder to a repository on the Hugging Face hub.", metavar="USER/NAME"
        ),
    ] = None,
    as_json: screen.Json = False,
    *,
    config_options: dict[str, Any],
) -> None:
    """Quantize a model and write a checkpoint that serving engines load.

    torchrun --nproc-per-node N -m fp4pass quantize ... divides the work over N GPUs. Run an
    interrupted command again to resume it.
    """
    group = sources.join_processes()
    recipe = read_recipe(rules, quality, config_options)
    if kv_cache is not None:
        recipe = dataclasses.replace(recipe, kv_cache=kv_cache)
    layer_by_layer = "--stream" if stream else "--sequential" if sequential else ""
    asked = Asked.read(budget, schemes, config_options, layer_by_layer, group.size)
    if asked is not None:
        recipe = asked.with_method(recipe, rules, config_options)
    for each in [recipe] if asked is None else asked.recipes(recipe):
        _require_possible(each, to, stream)
    bytes_of(max_shard_size)
    chosen, kept = sources.choose_device(device), sources.choose_dtype(dtype)
    if sequential and data is None and not stream and not _needs_text(recipe):
        raise OptionError(
            "--sequential calibrates, and the method needs no text. Give --data FILE, or leave "
            "--sequential out."
        )
    if data is None and asked is None and not _needs_text(recipe):
        numbers = {"--samples": samples, "--seq-len": seq_len, "--seed": seed}
        given = " and ".join(name for name, value in numbers.items() if value is not None)
        if given:
            raise OptionError(f"{given}: the method needs no calibration text. Leave out {given}.")
    by_layers = layer_by_layer
    if recipe.quality is not None and get_quality(recipe.quality).sequential:
        by_layers = by_layers or f"--quality {recipe.quality}"
    if by_layers and chosen == "auto":
        raise OptionError(
            f"{by_layers} runs layers on one device. Give its name to --device, not auto, or leave "
            f"{by_layers} out."
        )
    windows = 128 if samples is None else samples
    length = SEQ_LEN if seq_len is None else seq_len
    sources.require_windows(seq_len=length, samples=windows)
    if group.size > 1 and (chosen == "auto" or windows < group.size):
        problem = "--device auto spreads one model, and each process has the whole of it"
        if chosen != "auto":
            problem = f"--samples {windows} are fewer than the {group.size} processes"
        raise OptionError(f"{problem}. Choose another, or run one process.")
    if batch_size < 1:
        raise OptionError(expected("--batch-size", "at least 1", batch_size))
    require_free(output, overwrite, marks=(MANIFEST,))
    if push_to_hub is not None:
        require_repository(push_to_hub)
    sources.quiet()
    # First, for a hub that does not answer is tried for a while, once for each file.
    config = float_models.load_config(model, trust_remote_code)
    # Wrong globs raise before the work, and so does a folder that cannot be had.
    beside = float_models.files_beside(model, copy_files or ())
    if (held := open_float_source(model)) is not None:
        screen.note(held.sentence)
    if seq_len is not None:
        require_context(config, seq_len, "--seq-len")
    processor = float_models.load_tokenizer(model, trust_remote_code)
    if data is None and (asked is not None or _needs_text(recipe)):
        require_writer(config)
        if processor is None:
            raise OptionError(
                f"{model} has no tokenizer, which writing calibration text needs. Copy one beside "
                "the model, or choose --method sse with --scheme nvfp4a16, which need no text."
            )
    read, text = None, OwnText(samples, length, seed or 0)
    if data is not None:
        float_models.text_tokenizer(processor, model)
        options: dict[str, Any] = {"samples": windows, "seq_len": length, "seed": seed}
        every = read_examples(data, processor, config, **options)
        if len(every) < group.size:
            raise OptionError(
                f"{data} has {len(every)} windows, fewer than the {group.size} processes. Give "
                "more text, or run one process."
            )
        read = every[group.rank :: group.size]
    # Finished weights wait beside the folder until it is written.
    allocation: Allocation | None = None
    finished = finished_layers(output)
    what = "layers" if stream else "weights"
    if found := _count(finished):
        screen.note(f"resumes: {found} finished {what} in {finished}")
    written: dict[str, Any] = {"layout": to, "overwrite": overwrite}
    written |= {"max_shard_size": max_shard_size, "card": card, "push_to_hub": push_to_hub}
    written["copy_files"] = copy_files or ()
    try:
        if stream:
            screen.note(f"{model}: {float_models.model_class(config).__name__}, layer by layer")
            batches: Any = None
            if read is not None:
                batches = collate(read, batch_size, config=config, first_alone=True)
            elif _needs_text(recipe):
                # It writes its own text only for who gives what reads it.
                written["tokenizer"], batches = processor, text
            result = quantize_checkpoint(
                model,
                output,
                data=batches,
                device=chosen,
                stream=finished,
                dtype=kept,
                trust_remote_code=trust_remote_code,
                **written,
                **recipe.arguments(),
            )
        else:
            loaded = float_models.load_float(
                model, kept, "cpu" if by_layers and asked is None else chosen, trust_remote_code
            )
            if asked is not None:
                allocation = asked.allocate(loaded, recipe, read, processor, text)
                recipe = dataclasses.replace(allocation.recipe, kv_cache=recipe.kv_cache)
            # Wrong rules raise before the calibration.
            place = chosen if by_layers else None
            call = one_call(loaded, recipe, by_layers=sequential, device=place).writing(text)
            screen.note(
                f"{model}: {type(loaded).__name__}, {loaded.num_parameters():,} parameters in "
                f"{str(loaded.dtype).removeprefix('torch.')}"
            )
            with calibrated(call, read, batch_size, tokenizer=processor) as arguments:
                convert(loaded, **arguments, device=place, resume=finished)
            call.record()
            save(loaded, output, source=beside, **written)
            result = report(loaded)
    except KeyboardInterrupt as stop:
        hint = "Run the same command again to resume." if finished.exists() else ""
        raise KeyboardInterrupt(hint) from stop
    if group.rank:
        return
    counts = found, _count(finished) - found
    shutil.rmtree(finished, ignore_errors=True)
    _print_result(open_checkpoint(output), result, counts, as_json, allocation)


def _needs_text(recipe: Recipe) -> bool:
    """Return whether a model has to write its own text where none is given."""
    needs = (
        config.needs or (config.format.has_input_scale and not config.weight_only)
        for config in recipe.configs()
    )
    return recipe.kv_cache is not None or any(map(bool, needs))


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


def _count(finished: Path) -> int:
    return len(list(finished.glob("*.safetensors")))


def _print_result(
    stored: CheckpointReader,
    result: Report,
    counts: tuple[int, int],
    as_json: bool,
    allocation: Allocation | None,
) -> None:
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
                "resumed": counts[0],
                "searched": counts[1],
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
