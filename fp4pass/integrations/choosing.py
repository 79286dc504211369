"""Choose what libraries leave packed, and name it to them; imported without any of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._compat.transformers_loading import loads_model
from ..checkpoint import in_config
from ..checkpoint.layouts import CompressedTensors

# Those that transformers reads with no library, or with one that fp4pass is not in need of.
KEPT_PACKED = ("modelopt", "quark")

# Those that transformers reads, and that stay packed where sentence-transformers loads a model.
ASKED = (CompressedTensors.name,)


class QuantMethod(str):
    """The `quant_method` of a config, which diffusers reads as a member of an enumeration."""

    @property
    def value(self) -> str:
        """The plain name."""
        return str(self)


# The method of `Fp4PassConfig`, and of the folders that diffusers writes.
METHOD = QuantMethod(in_config.METHOD)


def choose(declared: Mapping[str, Any], given: Any) -> Any:
    """Return the config of a folder that stays packed, None for one that transformers reads."""
    if given is None and declared.get("quant_method") == CompressedTensors.name:
        # transformers reads these, unless the model is called by another library than itself.
        if not CompressedTensors().detect(declared) or not loads_model():
            return None
    elif given is None and declared.get("quant_method") == "quark":
        # Quark has formats of its own library.
        from ..checkpoint.layouts.mxfp4 import is_read

        if not is_read(declared):
            return None
    elif given is not None and type(given).__name__ != "PackedConfig":
        return None
    # It imports transformers, and refuses old versions.
    from .packed_folders import PackedConfig

    return PackedConfig.from_dict(declared)


def read_described(declared: Mapping[str, Any]) -> Any:
    """Return the config of a folder that diffusers wrote."""
    # It imports diffusers, and refuses old versions.
    from .diffusers import DescribedConfig

    return DescribedConfig(declared)


def diffusers_quantizer(config: Any, **kwargs: Any) -> Any:
    """Return the quantizer of a config of diffusers."""
    from .diffusers import PackedQuantizer

    return PackedQuantizer(config, **kwargs)
