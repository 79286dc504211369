"""quantize_checkpoint: a float model on the disk in, a packed one out, a layer in memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..checkpoint.float_models import files_beside, load_float, load_tokenizer
from ..checkpoint.layouts import LayoutName, get_layout
from ..checkpoint.saving import bytes_of, save
from ..checkpoint.source_files import MANIFEST
from ..core.files import path_of, require_free
from ..core.progress import shown
from ..distributed import ranks
from ..errors import OptionError, expected
from ..methods.base import MethodChoice
from ..record.config import LinearOptions, Rules, check_options
from ..record.rows import Report
from ..record.schemes import QualityName, Scheme
from ..record.state import report
from .steps import convert

if TYPE_CHECKING:
    from typing_extensions import Unpack


def quantize_checkpoint(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    fmt: Scheme | None = None,
    method: MethodChoice | None = None,
    *,
    quality: QualityName | None = None,
    data: Any = None,
    rules: Rules = (),
    device: torch.device | str | None = None,
    stream: str | os.PathLike[str] | None = None,
    layout: LayoutName = "compressed-tensors",
    tokenizer: Any = None,
    copy_files: Sequence[str] = (),
    dtype: torch.dtype | str = "auto",
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    card: bool | Mapping[str, Any] = False,
    trust_remote_code: bool = False,
    progress: bool = True,
    **options: Unpack[LinearOptions],
) -> Report:
    """Quantize a transformers model that is larger than memory, and return its report.

    One layer is read at a time, calibrated on the outputs of the quantized ones before it, and
    written as soon as it is packed. The same call after an interruption goes on behind the last
    finished layer.

    Args:
        source: the folder or the hub id of a float model.
        directory: the folder to write, as for `save`.
        fmt: the scheme, as for `convert`.
        method: a name, or an options object such as `Gptq()`; default "hessian".
        quality: as for `convert`.
        data: as for `convert`; None for methods that need none. The first batch runs through two
            layers on the CPU, so a small one is quick; of texts it is one window.
        rules: as for `convert`.
        device: where to work on a layer; by default a GPU if there is one.
        stream: a folder that keeps finished layers and stays; by default one beside `directory`,
            which is removed at the end.
        layout: as for `save`.
        tokenizer: as for `convert` and `save`; by default that of `source`.
        copy_files: as for `save`.
        dtype: of what stays in float; "auto" is that of `source`, any other one copies it.
        max_shard_size: as for `save`; a file of a finished layer may be larger.
        overwrite: as for `save`.
        card: as for `save`.
        trust_remote_code: run the code that a model has.
        progress: as for `convert`.
        **options: fields of `LinearConfig`.

    Raises:
        CheckpointError: the source cannot be read, or the directory not be written.
        CalibrationError: a layer needs data and has none.
        OptionError: an option does not exist.
        RuleError: a rule is malformed or matches nothing.

    Example:
        >>> report = fp4pass.quantize_checkpoint(
        ...     "float-model", "packed", "nvfp4a16", "sse", progress=False
        ... )
        >>> len(report.converted)
        14
    """
    if isinstance(source, nn.Module):
        wanted = "the folder or the hub id of a float model"
        raise OptionError(
            f"{expected('source', wanted, type(source).__name__)} For a model in memory, call "
            "fp4pass.convert(model)."
        )
    target, folder = path_of(directory, "directory"), os.fspath(path_of(source, "source"))
    arguments: dict[str, Any] = {"fmt": fmt, "method": method, "rules": rules, **options}
    # Before hours of work.
    check_options(options)
    get_layout(layout)
    bytes_of(max_shard_size)
    require_free(target, overwrite, marks=(MANIFEST,))
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    files = files_beside(folder, copy_files)
    with shown("quantize", progress):
        model = load_float(folder, dtype, "cpu", trust_remote_code, merge_later=True)
        reader = tokenizer
        if reader is None and not (quality is None and data is None):
            reader = load_tokenizer(folder, trust_remote_code)
        given = {"quality": quality, "data": data, "tokenizer": reader}
        layers = finished_layers(target) if stream is None else path_of(stream, "stream")
        convert(model, device=device, stream=layers, **given, **arguments)
        written: dict[str, Any] = {"layout": layout, "tokenizer": tokenizer, "overwrite": overwrite}
        written |= {"card": card, "copy_files": copy_files}
        save(model, target, source=files, max_shard_size=max_shard_size, **written)
        if stream is None and ranks().rank == 0:
            shutil.rmtree(layers, ignore_errors=True)
    return report(model)


def finished_layers(directory: Path) -> Path:
    """Return the folder beside another one that keeps what an interrupted run has finished."""
    whole = directory.resolve()
    return whole.with_name(f".{whole.name}.fp4pass-resume")
