"""transformers' server with the weights of a folder kept packed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .._compat.transformers import config_faults
from .._compat.transformers_serving import ServedModel, require_server, run_server
from ..checkpoint.loading import load
from ..checkpoint.opening import is_packed
from ..errors import CheckpointError, OptionError, expected
from ..observers.kv_cache import cache_format_of

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

# Without them continuous batching takes most of the free memory, and on a CPU that is everybody's.
_ON_CPU = ("--cb-max-memory-percent", "0.1", "--cb-max-batch-tokens", "256")

# The names of the files of a tokenizer.
_TOKENIZERS = ("*token*.json", "*.tiktoken", "*.model", "vocab.*")


def serve(
    folder: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "auto",
    continuous_batching: bool = False,
    log_level: str = "error",
    arguments: Sequence[str] = (),
    ready: Callable[[str, str], None] = lambda name, address: None,
) -> None:
    """Serve a folder with packed weights until the process is interrupted.

    Args:
        folder: with packed weights and a tokenizer.
        host: an address or name of this machine.
        port: 0 for one that is free.
        device: "auto" is the GPU, or the CPU without one.
        continuous_batching: run requests together; they sample with the options of the first.
        log_level: "debug", "info", "warning", "error" or "critical"; requests are logged at "info".
        arguments: other options of `transformers serve`, as on its command line.
        ready: called with the name of the model and the address once it answers.

    Raises:
        CheckpointError: the folder has no packed weights, or no tokenizer.
        OptionError: an option does not fit, or the address is in use.
        VersionError: what the server needs is not installed.
    """
    if log_level not in _LOG_LEVELS:
        wanted = f"one of {', '.join(_LOG_LEVELS)}"
        raise OptionError(expected("serve: log_level", wanted, repr(log_level)))
    path = Path(folder)
    _require_servable(path)
    require_server()

    def load_model(device: Any, dtype: Any, attention: str | None) -> Any:
        model = load_packed(path, device, dtype)
        if attention is not None:
            model.set_attn_implementation(attention)
        if continuous_batching and cache_format_of(model) is not None:
            raise OptionError(
                f"{path}: its quantized key-value cache does not work with --continuous-batching, "
                "which has a cache of its own. Leave the option out."
            )
        return model

    name = path.resolve().name
    served = ServedModel(
        name=name,
        names=frozenset({os.fspath(folder), str(path), str(path.resolve()), name}),
        facts={"created": int(path.stat().st_mtime), "owned_by": "fp4pass"},
        load=load_model,
        load_processor=lambda: _load_processor(path),
    )
    batching = "--continuous-batching" if continuous_batching else "--no-continuous-batching"
    bounds = _ON_CPU if continuous_batching and _device(device) == "cpu" else ()
    # The last of an option counts.
    options = ["--device", device, batching, *bounds, *arguments]
    run_server(served, host, port, options, log_level, lambda address: ready(name, address))


def load_packed(folder: Path, device: Any, dtype: Any) -> Any:
    """Return the model of a packed folder. Raises OptionError for another dtype."""
    model: Any = load(folder, device_map=_device(device))
    if dtype not in (None, "auto", model.config.dtype):
        stored = str(model.config.dtype).removeprefix("torch.")
        raise OptionError(
            f"{folder}: expected --dtype {stored}, in which it holds what is not packed, "
            f"got {str(dtype).removeprefix('torch.')}. Leave the option out."
        )
    return model


def _device(device: Any) -> Any:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _require_servable(folder: Path) -> None:
    """Raise CheckpointError unless a folder has packed weights and a tokenizer."""
    if not folder.is_dir():
        got = "a file" if folder.exists() else "nothing there"
        raise CheckpointError(expected(str(folder), "a folder with packed weights", got))
    if not is_packed(folder):
        raise CheckpointError(
            f"{folder}: expected a folder with packed weights, got one without. Quantize the model "
            "first (fp4pass quantize), or serve it with transformers serve."
        )
    if not any(path for pattern in _TOKENIZERS for path in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder}: expected a tokenizer beside the weights, got none. Save it there: "
            "tokenizer.save_pretrained(folder)."
        )


def _load_processor(folder: Path) -> Any:
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(folder)
    except config_faults() as error:
        raise CheckpointError(f"{folder}: its tokenizer cannot be read: {error}") from error
