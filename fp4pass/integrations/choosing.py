"""Choose which folders transformers leaves packed; it is imported without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Those that transformers reads with no library, or with one that fp4pass is not in need of.
KEPT_PACKED = ("modelopt", "quark")


def choose(declared: Mapping[str, Any], given: Any) -> Any:
    """Return the config of a folder that stays packed, None for one that transformers reads."""
    if given is None and declared.get("quant_method") == "quark":
        # Quark has formats of its own library.
        from ..checkpoint.layouts.quark import is_read

        if not is_read(declared):
            return None
    elif given is not None and type(given).__name__ != "PackedConfig":
        return None
    # It imports transformers, and refuses versions that were not tested.
    from .packed_folders import PackedConfig

    return PackedConfig.from_dict(declared)
