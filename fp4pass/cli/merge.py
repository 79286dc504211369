"""fp4pass merge: a packed folder and an adapter of PEFT in, a packed folder out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

from typer import Argument, Option

from ..calibration.to_batches import SEQ_LEN, collate
from ..checkpoint import float_models
from ..checkpoint.layouts import LAYOUTS, LayoutName, get_layout
from ..checkpoint.reader import open_checkpoint
from ..checkpoint.saving import save
from ..checkpoint.source_files import MANIFEST
from ..checkpoint.writer import bytes_of
from ..core.atomic import require_free
from ..errors import OptionError, expected
from ..lab import merge as merge_adapters
from ..methods import METHODS
from ..record.config import LinearConfig
from . import screen, sources
from .calibrating import read_examples, require_context
from .options import (
    BatchSize,
    Card,
    CopyFiles,
    Device,
    Overwrite,
    Seed,
    SeqLen,
    ShardSize,
    TrustCode,
)


def merge(
    base: Annotated[
        Path, Argument(help="A folder with packed weights.", metavar="BASE", show_default=False)
    ],
    adapter: Annotated[
        Path, Argument(help="A folder that PEFT wrote.", metavar="ADAPTER", show_default=False)
    ],
    output: Annotated[Path, Option("--output", "-o", help="The folder to write.")],
    method: Annotated[
        str | None,
        Option(
            help=f"Method for the merged weights. One of {', '.join(METHODS)}.",
            metavar="NAME",
            show_default="gptq",
        ),
    ] = None,
    data: Annotated[
        str | None,
        Option(
            help="Calibration data, as for quantize; an eighth of it is held out to measure the "
            "cost.",
            metavar="FILE|DATASET",
            show_default="text that base + adapter writes",
        ),
    ] = None,
    held_out: Annotated[
        str | None,
        Option(
            help="Other data to measure the cost on.",
            metavar="FILE|DATASET",
            show_default="a part of --data",
        ),
    ] = None,
    samples: Annotated[int, Option(help="Windows to read.")] = 128,
    seq_len: SeqLen = None,
    batch_size: BatchSize = 8,
    seed: Seed = None,
    to: Annotated[
        str | None,
        Option(
            help=f"The layout of the checkpoint: {', '.join(LAYOUTS)}.",
            metavar="LAYOUT",
            show_default="that of BASE",
        ),
    ] = None,
    device: Device = None,
    trust_remote_code: TrustCode = False,
    copy_files: CopyFiles = None,
    max_shard_size: ShardSize = "5GB",
    overwrite: Overwrite = False,
    card: Card = True,
    as_json: screen.Json = False,
) -> None:
    """Merge a LoRA adapter into the packed weights of a checkpoint, and measure the cost.

    Each layer that the adapter changes is quantized again in its own scheme; all others keep their
    bytes.
    """
    if method is not None:
        LinearConfig(method=method)
    bytes_of(max_shard_size)
    layout = open_checkpoint(base).layout.name if to is None else get_layout(to).name
    if batch_size < 1:
        raise OptionError(expected("--batch-size", "at least 1", batch_size))
    if data is not None or held_out is not None:
        sources.require_windows(seq_len=SEQ_LEN if seq_len is None else seq_len, samples=samples)
    require_free(output, overwrite, marks=(MANIFEST,))
    beside = float_models.files_beside(str(base), copy_files or ())
    sources.quiet()
    # It imports PEFT, and refuses old versions.
    from ..integrations.peft import load_adapter

    model: Any = sources.load_any(str(base), sources.choose_device(device), trust_remote_code)
    processor = float_models.load_tokenizer(str(base), trust_remote_code)
    tuned = load_adapter(model, adapter)
    options: dict[str, Any] = {"samples": samples, "seq_len": seq_len or SEQ_LEN, "seed": seed}
    batches: dict[str, Any] = {}
    for name, spec in (("data", data), ("held_out", held_out)):
        if spec is not None:
            if seq_len is not None:
                require_context(model.config, seq_len, "--seq-len")
            float_models.text_tokenizer(processor, str(base))
            read = read_examples(spec, processor, model.config, **options)
            batches[name] = collate(read, batch_size, config=model.config)
    found = merge_adapters(tuned, method, tokenizer=processor, **batches)
    save(
        found.model,
        output,
        layout=cast(LayoutName, layout),
        source=beside,
        copy_files=copy_files or (),
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        card=card,
    )
    if as_json:
        screen.print_json({"output": str(output), "layout": layout, **found.to_dict()})
        return
    print(f"{output} ({layout}): {found}")
