"""The arguments and results of layers that are called one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import CalibrationError

# Positional and keyword arguments of a layer; the place of the hidden state holds None.
Arguments = tuple[list[Any], dict[str, Any]]


def hidden_state(output: Any, name: str) -> Tensor:
    """Return what a layer hands to the next: what it returns, or the first part of that."""
    found = output if isinstance(output, Tensor) else None
    if found is None and isinstance(output, tuple | list | Mapping) and len(output):
        found = next(iter(output.values() if isinstance(output, Mapping) else output))
    if not isinstance(found, Tensor):
        raise CalibrationError(
            f"{name} returns a {type(output).__name__} that begins with no tensor, so its layers "
            "cannot be calibrated one after the other. Leave out sequential=True."
        )
    return found


def first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> int | str:
    """Return where the first tensor of a call is."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if isinstance(value, Tensor):
            return place
    raise CalibrationError(
        f"{name} is called without a tensor, so its layers cannot be calibrated one after the "
        "other. Leave out sequential=True."
    )


def is_filled(cache: Any) -> bool:
    """Whether a cache of transformers holds anything."""
    try:
        return bool(cache.get_seq_length())
    except ValueError:
        # One that holds states, and not keys and values, has no length.
        return bool(cache.has_previous_state())


def pick(args: Sequence[Any], kwargs: Mapping[str, Any], slot: int | str | None) -> Any:
    """Return the argument in a place, None if there is none."""
    if isinstance(slot, int):
        return args[slot] if slot < len(args) else None
    return kwargs.get(str(slot))


def map_tensors(value: Any, function: Any) -> Any:
    """Return the same with every tensor replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(each, function) for each in value)
    if type(value) is dict:
        return {key: map_tensors(each, function) for key, each in value.items()}
    return value


def same_arguments(a: Any, b: Any) -> bool:
    """Whether arguments are the same tensors and equal values."""
    if type(a) is not type(b):
        return False
    if type(a) in (tuple, list):
        return len(a) == len(b) and all(map(same_arguments, a, b))
    if type(a) is dict:
        return list(a) == list(b) and all(same_arguments(a[key], b[key]) for key in a)
    return a is b or (isinstance(a, bool | int | float | str) and a == b)
