"""Models, devices, dtypes and processes of a command."""

from __future__ import annotations

import atexit
import logging
import os

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.float_models import load_float, reading
from ..checkpoint.loading import load
from ..checkpoint.reader import is_packed
from ..core.machine import require_device
from ..distributed import Ranks, ranks
from ..errors import OptionError, expected
from ..quantization.observers.batches import IN_FLOAT32, is_slow
from .screen import note


def choose_device(name: str | None) -> str:
    """Return a device that is there: "auto" spreads a model over all, None is a GPU if any."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "auto":
        require_device(name, "--device ")
    return name


def choose_dtype(name: str) -> torch.dtype | str:
    """Return a float dtype by its name, or "auto"."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto" and name not in known:
        raise OptionError(f"--dtype {name} does not exist. Known: auto, {', '.join(known)}.")
    return known.get(name, name)


def quiet() -> None:
    """Keep what transformers, the hub and bitsandbytes (by PEFT) print off the screen."""
    import huggingface_hub
    import transformers

    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def load_any(source: str, device: str, trust: bool = False) -> nn.Module:
    """Load the model of a folder with packed weights, or a float model."""
    if is_packed(source):
        quiet()
        with reading(source, "the model"):
            return load(source, device_map=device)
    return load_float(source, "auto", device, trust)


def note_dtype(what: str, *models: nn.Module | None) -> None:
    """Say so if one of the models computes in another dtype than that of its weights."""
    if any(model is not None and is_slow(model) for model in models):
        note(f"{what} {IN_FLOAT32}")


def require_windows(**options: int) -> None:
    """Raise OptionError for tokens of a window and, after them, windows that are too few."""
    for (name, value), least in zip(options.items(), (2, 1), strict=True):
        if value < least:
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(expected(flag, f"at least {least}", value))


def join_processes() -> Ranks:
    """Join the processes that torchrun started, each on a GPU of its own, if it did."""
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1") and not dist.is_initialized():
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
        atexit.register(dist.destroy_process_group)
    return ranks()
