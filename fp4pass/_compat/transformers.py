"""Private APIs of transformers: names of tied weights, of a checkpoint's tensors, and models.

Tested with 5.17 and 5.23.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from . import require_version


@functools.cache
def require_transformers() -> None:
    """Raise VersionError unless the installed transformers is one of those that were tested."""
    require_version("transformers", ">=5.10,<5.24", extra="hf")


def _private(model: nn.Module, name: str) -> Any:
    """A private attribute of a model of transformers, None for other models."""
    found = getattr(model, name, None)
    if found is not None:
        require_transformers()
    return found


def tied_weights(model: nn.Module) -> Mapping[str, str]:
    """Return the names of weights that are tied, each with the name of the weight that it is."""
    return _private(model, "all_tied_weights_keys") or {}


def ignored_tensors(model: nn.Module) -> Sequence[str]:
    """Return patterns of tensors in checkpoints that a model does not use."""
    return _private(model, "_keys_to_ignore_on_load_unexpected") or ()


def whole_modules(model: nn.Module) -> list[str]:
    """Return the classes of modules that must not be split over devices."""
    return sorted(_private(model, "_no_split_modules") or ())


def model_from_config(cls: Any, config: Any) -> nn.Module:
    """Return a model of a class with new weights."""
    require_transformers()
    model: nn.Module = cls._from_config(config)
    return model


def names_in_model(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the name in a model of each tensor of a checkpoint.

    Args:
        model: of transformers.
        names: of the tensors, as checkpoints of the model's architecture have them.
    """
    require_transformers()
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [
        each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)
    ]
    prefix, state = model.base_model_prefix, model.state_dict()
    return {name: rename_source_key(name, renamings, [], prefix, state)[0] for name in names}
