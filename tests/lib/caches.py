"""The cache of keys and values by the name that the installed transformers has for it."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import GenerationMixin

# transformers 5.24 renamed `past_key_values` to `cache`.
_FORWARD = inspect.signature(GenerationMixin.prepare_inputs_for_generation)
NAME = next(name for name in ("cache", "past_key_values") if name in _FORWARD.parameters)


def given(cache: Any) -> dict[str, Any]:
    """The keyword argument of a model for a cache."""
    return {NAME: cache}


def kept(output: Any) -> Any:
    """The cache in the output of a model."""
    return getattr(output, NAME)
