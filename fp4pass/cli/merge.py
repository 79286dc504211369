"""fp4pass merge: a packed folder and an adapter of PEFT in, a packed folder out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ..calibration.to_batches import SEQ_LEN
from ..checkpoint import MANIFEST, open_checkpoint, save
from ..checkpoint.float_models import files_beside, load_tokenizer
from ..checkpoint.layouts import LAYOUTS, get_layout
from ..checkpoint.saving import bytes_of
from ..core.atomic import require_free
from ..lab import merge as merge_adapters
from ..methods import METHODS
from ..record.config import LinearConfig
from . import options as given
from . import screen


def merge(
    base: Annotated[
        Path, Argument(help="A folder with packed weights.", metavar="BASE", show_default=False)
    ],
    adapter: Annotated[
        Path, Argument(help="A folder that PEFT wrote.", metavar="ADAPTER", show_default=False)
    ],
    output: given.Output,
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
    seq_len: given.SeqLen = None,
    batch_size: given.BatchSize = 8,
    seed: given.Seed = None,
    to: Annotated[
        str | None,
        Option(
            help=f"The layout of the checkpoint: {', '.join(LAYOUTS)}.",
            metavar="LAYOUT",
            show_default="that of BASE",
        ),
    ] = None,
    device: given.Device = None,
    trust_remote_code: given.TrustCode = False,
    copy_files: given.CopyFiles = None,
    max_shard_size: given.ShardSize = "5GB",
    overwrite: given.Overwrite = False,
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
    written: dict[str, Any] = {"layout": layout, "copy_files": copy_files or ()}
    written |= {"max_shard_size": max_shard_size, "overwrite": overwrite}
    save(found.model, output, source=beside, **written)
    if as_json:
        screen.print_json({"output": str(output), "layout": layout, **found.to_dict()})
    else:
        print(f"{output} ({layout}): {found}")
