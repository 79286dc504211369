"""fp4pass transcode: a checkpoint in another layout, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ..checkpoint.transcode import transcode as write
from ..checkpoint.transcode import transcode_targets
from ..reporting.compare import weights_size
from ..reporting.text import size
from . import screen
from .options import CopyFiles, Overwrite, ShardSize


def transcode(
    folder: Annotated[Path, Argument(help="A folder with packed weights.", metavar="DIR")],
    output: Annotated[Path, Option("--output", "-o", help="The folder to write.")],
    to: Annotated[str, Option(help=f"The layout: {', '.join(transcode_targets())}.")],
    copy_files: CopyFiles = None,
    max_shard_size: ShardSize = "5GB",
    overwrite: Overwrite = False,
    as_json: screen.Json = False,
) -> None:
    """Write a checkpoint in another layout; codes and block scales keep their bits.

    bf16 writes dense weights, which any program reads.
    """
    options: dict[str, Any] = {"copy_files": copy_files or (), "overwrite": overwrite}
    write(folder, output, to, max_shard_size=max_shard_size, **options)
    before, after = weights_size(folder), weights_size(output)
    if as_json:
        facts = {"output": str(output), "layout": to, "bytes_before": before, "bytes_after": after}
        screen.print_json(facts)
        return
    print(f"{output}: {to}, {size(after)} of weights; {folder} has {size(before)}")
