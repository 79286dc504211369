"""The note on quantized inputs for machines without FP4 tensor cores, where they only cost."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

from ..core.formats import E2M1, E4M3, E8M0
from ..core.machine import has_fp4_tensor_cores
from .config import LinearConfig
from .schemes import scheme_name

_log = logging.getLogger(__name__)


def tensor_core_note(configs: Iterable[LinearConfig], machine: str = "this machine") -> str:
    """Return a sentence on layers whose inputs are quantized for tensor cores that are missing.

    Args:
        configs: of the layers.
        machine: what the sentence calls this machine.

    Returns:
        The sentence; "" where this machine has FP4 tensor cores, or no such layer is there.
    """
    # FP4 tensor cores multiply these alone.
    keys = {
        config.format.with_multiplier(False).key: None
        for config in configs
        if not config.weight_only
        and config.format.element == E2M1
        and config.format.scale in (E4M3, E8M0)
    }
    if not keys or has_fp4_tensor_cores():
        return ""
    names = ", ".join(scheme_name(key, weight_only=False) for key in keys)
    others = ", ".join(scheme_name(key, weight_only=True) for key in keys)
    schemes, s, verb = ("scheme", "s", "is") if len(keys) == 1 else ("schemes", "", "are")
    return (
        f"{schemes.capitalize()} {names} also quantize{s} inputs, for FP4 tensor cores, which "
        f"{machine} lacks. Without them, {schemes} {others} {verb} faster and more accurate."
    )


@functools.cache
def say_once(note: str) -> None:
    """Log a note, once in a process however many models it converts."""
    _log.warning(note)
