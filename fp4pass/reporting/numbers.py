"""Numbers as JSON and as readers have them, for the page and the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any


def finite(value: Any) -> Any:
    """Return values as they come back from JSON, in which a number that is not finite is null."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, None if one of the values is not known or there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def size(count: float) -> str:
    """Return bytes in decimal units, as disks and hubs have them."""
    if count < 1000:
        return f"{count:.0f} B"
    unit, divisor = ("GB", 1e9) if count >= 1e9 else ("MB", 1e6) if count >= 1e6 else ("kB", 1e3)
    return f"{count / divisor:.2f} {unit}"


def tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a tensor of a safetensors dtype, such as BF16 or F8_E4M3."""
    width = re.search(r"\d+", dtype)
    return math.prod(shape) * (int(width[0]) if width else 8) // 8
