"""Recipes, devices, models and data that options of several commands stand for."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..calibration.processor import Processor, Target
from ..calibration.rows import open_source
from ..calibration.to_batches import collate, examples
from ..checkpoint import is_packed, load
from ..checkpoint.float_models import load_float, reading, text_tokenizer
from ..core.machine import require_device
from ..distributed import Ranks, ranks
from ..errors import OptionError, expected
from ..quantization.observers.batches import IN_FLOAT32, is_slow
from ..quantization.recipe import Recipe
from ..record.schemes import get_quality
from .screen import note


def flag(name: str) -> str:
    """Return a parameter as it is typed; the values of `fmt` are names of schemes."""
    return "--scheme" if name == "fmt" else f"--{name.replace('_', '-')}"


def read_recipe(path: Path | None, quality: str | None, options: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a file, of --quality, and of the options of a command before both."""
    decided = [] if quality is None else [n for n in options if n in get_quality(quality).decides]
    if decided:
        flags = " and ".join(map(flag, decided))
        raise OptionError(f"--quality {quality} decides {flags}. Leave out one of them.")
    recipe = Recipe(quality=quality)
    if path is not None:
        recipe = Recipe.read(path, quality, options.get("weight_only"))
    return recipe.override(options)


def choose_device(name: str | None) -> str:
    """Return a device that is there: "auto" spreads a model over all, None is a GPU if any."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "auto":
        require_device(name, "--device ")
    return name


def require_at_least(least: int, **options: int | None) -> None:
    """Raise OptionError for an option below a number."""
    for name, value in options.items():
        if value is not None and value < least:
            raise OptionError(expected(flag(name), f"at least {least}", value))


def read_batches(
    spec: str,
    source: str,
    processor: Any,
    config: Any,
    batch_size: int,
    first_alone: bool = False,
    **numbers: Any,
) -> list[Any]:
    """Return the share of this process of the calibration data that a command names.

    source: the name of the model. numbers: samples, seq_len and seed, as for `batches`.
    """
    group = ranks()
    text_tokenizer(processor, source)
    target, reader = Target.of_config(config), Processor(processor)
    found = examples(open_source(spec), reader, target, **numbers)
    if len(found) < group.size:
        raise OptionError(
            f"{spec} has {len(found)} windows, fewer than the {group.size} processes. Give more "
            "text, or run one process."
        )
    found = found[group.rank :: group.size]
    return collate(found, batch_size, config=config, first_alone=first_alone)


def require_context(config: Any, tokens: int | None) -> None:
    """Refuse windows of --seq-len that a model has no positions for."""
    limit = Target.of_config(config).context
    if limit is not None and tokens is not None and tokens > limit:
        raise OptionError(
            f"--seq-len is {tokens}, but the context of the model is {limit} tokens. "
            f"Choose at most {limit}."
        )


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


def join_processes() -> Ranks:
    """Join the processes that torchrun started, each on a GPU of its own, if it did."""
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1") and not dist.is_initialized():
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
        atexit.register(dist.destroy_process_group)
    return ranks()
