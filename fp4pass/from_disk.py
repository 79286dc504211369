"""quantize_checkpoint: a float model on the disk in, a packed one out, a layer in memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .api import convert
from .checkpoint.atomic import require_free
from .checkpoint.float_models import files_beside, load_float, load_tokenizer
from .checkpoint.layouts import get_layout
from .checkpoint.manifest import MANIFEST
from .checkpoint.safetensors_io import bytes_of
from .checkpoint.saving import save
from .config import Rule, with_options
from .core.paths import path_of
from .distributed import ranks
from .quantization.report import Report, report


@with_options
def quantize_checkpoint(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    fmt: str | None = None,
    method: object = None,
    *,
    quality: str | None = None,
    data: Any = None,
    rules: Sequence[Rule] = (),
    device: torch.device | str | None = None,
    stream: str | os.PathLike[str] | None = None,
    layout: str = "compressed-tensors",
    tokenizer: Any = None,
    dtype: torch.dtype | str = "auto",
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: bool = True,
    **options: Any,
) -> Report:
    """Quantize a transformers model that is larger than memory, and return its report.

    One layer is read at a time, calibrated on the outputs of the quantized ones before it, and
    written as soon as it is packed. The same call after an interruption goes on behind the last
    finished layer.

    Args:
        source: the folder or the hub id of a float model.
        directory: the folder to write, as for `save`.
        fmt: the format; default "nvfp4".
        method: a name, or an options object such as `Gptq()`; default "hessian".
        quality: as for `convert`.
        data: as for `convert`; None for methods that need none. The first batch runs through two
            layers on the CPU, so a small one is quick.
        rules: as for `convert`.
        device: where to work on a layer; by default a GPU if there is one.
        stream: a folder that keeps finished layers and stays; by default one beside `directory`,
            which is removed at the end.
        layout: as for `save`.
        tokenizer: as for `convert` and `save`; by default that of `source`, whose files are copied
            with all else that lies beside its weights.
        dtype: of what stays in float; "auto" is that of `source`, any other one copies it.
        max_shard_size: as for `save`; a file of a finished layer may be larger.
        overwrite: as for `save`.
        trust_remote_code: run the code that a model brings along.
        progress: show a progress bar.
        **options: fields of `LinearConfig`.

    Raises:
        CheckpointError: the source cannot be read, or the directory not be written.
        CalibrationError: a layer needs data and has none.
        OptionError: an option does not exist.
        RuleError: a rule is malformed or matches nothing.
    """
    target, folder = path_of(directory, "directory"), os.fspath(path_of(source, "source"))
    # Before hours of work.
    get_layout(layout)
    bytes_of(max_shard_size)
    require_free(target, overwrite, marks=(MANIFEST,))
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    files = files_beside(folder)
    model = load_float(folder, dtype, "cpu", trust_remote_code, merge_later=True)
    reader = tokenizer
    if reader is None and not (quality is None and data is None):
        reader = load_tokenizer(folder, trust_remote_code)
    given = {"quality": quality, "data": data, "tokenizer": reader, "progress": progress}
    layers = finished_layers(target) if stream is None else path_of(stream, "stream")
    convert(model, fmt, method, rules=rules, device=device, stream=layers, **given, **options)
    written: dict[str, Any] = {"layout": layout, "tokenizer": tokenizer, "overwrite": overwrite}
    save(model, target, source=files, max_shard_size=max_shard_size, **written)
    if stream is None and ranks().rank == 0:
        shutil.rmtree(layers, ignore_errors=True)
    return report(model)


def finished_layers(directory: Path) -> Path:
    """Return the folder beside another one that keeps what an interrupted run has finished."""
    whole = directory.resolve()
    return whole.with_name(f".{whole.name}.fp4pass-resume")
