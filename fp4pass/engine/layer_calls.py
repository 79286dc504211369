"""Handle the calls of layers: arguments, results, and hidden states that wait."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from ..core.machine import memory_limits
from ..errors import CalibrationError, as_option
from ..ops.registration import opaque
from ..quantization.observers.visible_tokens import Kept

# Positional and keyword arguments of a layer; the place of the hidden state holds None.
Arguments = tuple[list[Any], dict[str, Any]]

# Of all memory: so much is left for layers, and for others.
_LEFT = 1 / 4

# Bytes of zeros that are written at a time.
_WRITTEN = 1 << 24


class Given(NamedTuple):
    """The hidden state of a layer that is not just what the layer before it returned."""

    state: Tensor
    adds: bool  # to what that layer returned, or takes its place

    def after(self, hidden: Tensor) -> Tensor:
        """Return the hidden state of the layer once the one before it has returned `hidden`."""
        state = self.state.to(hidden.device)
        return hidden + state if self.adds else state


@dataclass
class Call:
    """One run of a batch through a stack, on the CPU."""

    hidden: Tensor  # what the next layer gets
    reference: Tensor  # the same in the float model
    # The other arguments of each layer, once if all have the same; None for one passed by.
    arguments: list[Arguments | None] = field(default_factory=list)
    # Which of its tokens count; None for all.
    tokens: Kept | None = None
    # By layer.
    given: dict[int, Given] = field(default_factory=dict)

    def of(self, index: int) -> Arguments | None:
        """Return the other arguments of layer `index`, None if it is not called."""
        return self.arguments[index if len(self.arguments) > 1 else 0]

    @property
    def visible(self) -> int:
        """The number of its tokens that count."""
        rows = None if self.tokens is None else self.tokens.reading.find(self.hidden).visible
        return self.hidden[..., 0].numel() if rows is None else int(rows.sum())


def first_output(output: Any) -> Tensor | None:
    """Return the result of a layer, or the first part of it; None where that is no tensor."""
    found = output
    if isinstance(output, tuple | list | Mapping) and len(output):
        found = next(iter(output.values() if isinstance(output, Mapping) else output))
    return found if isinstance(found, Tensor) else None


def hidden_state(output: Any, name: str) -> Tensor:
    """Return the hidden state for the next layer: the result, or the first part of it."""
    found = first_output(output)
    if found is None:
        raise CalibrationError(
            f"{name} returns a {type(output).__name__} that begins with no tensor, so its layers "
            f"cannot be calibrated one after the other. Leave out {as_option('sequential', True)}."
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
        f"other. Leave out {as_option('sequential', True)}."
    )


def is_filled(cache: Any) -> bool:
    """Return whether a cache of transformers holds anything."""
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


def alike(a: Any, b: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Return whether arguments have one structure, whose tensors and other values are the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same(a, b)
    if type(a) is not type(b):
        return False
    if type(a) in (tuple, list):
        return len(a) == len(b) and all(alike(*each, same) for each in zip(a, b, strict=True))
    if type(a) is dict:
        return list(a) == list(b) and all(alike(a[key], b[key], same) for key in a)
    return same(a, b)


def is_same(a: Any, b: Any) -> bool:
    """Return whether values are one tensor or object, or equal plain values."""
    return a is b or (isinstance(a, bool | int | float | str) and bool(a == b))


def is_equal(a: Any, b: Any) -> bool:
    """Return whether values are equal, tensors in each number."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return a is b or bool(a == b)


def signature(value: Any) -> object:
    """Return all of some arguments but values and batch size, which decide no call of a layer."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape[1:])
    if type(value) in (tuple, list):
        return tuple(map(signature, value))
    if type(value) is dict:
        return tuple((key, signature(each)) for key, each in value.items())
    return value if isinstance(value, bool | int | float | str) else type(value)


@opaque
def offload_hidden_state(state: Tensor, copy: bool = False) -> Tensor:
    """Return a hidden state on the CPU, in memory of its own if `copy`.

    Where less than a quarter of the memory would be left, it goes to a temporary file, deleted with
    it. Raises CalibrationError if there is no room for that either.
    """
    if not state.numel() or _fits(state.nbytes):
        return state.detach().to("cpu", copy=copy)
    try:
        with tempfile.NamedTemporaryFile(prefix="fp4pass-") as file:
            # A disk that is full would end the process when the memory is written to.
            _make_room(file, state.nbytes)
            stored = torch.from_file(file.name, shared=True, size=state.numel(), dtype=state.dtype)
    except OSError as error:
        raise CalibrationError(
            f"Hidden states fit neither in memory nor in {tempfile.gettempdir()}: {error}. Name "
            "another folder in TMPDIR, or calibrate on less text."
        ) from error
    return stored.view(state.shape).copy_(state.detach())


def _fits(size: int) -> bool:
    """Return whether memory has room for so many bytes, of the machine and of each group."""
    return all(each.available - _LEFT * each.total >= size for each in memory_limits())


def _make_room(file: IO[bytes], size: int) -> None:
    """Have a file take its room on the disk, which is an error where there is none."""
    # posix_fallocate is not there on macOS.
    zeros = bytes(min(size, _WRITTEN))
    for start in range(0, size, _WRITTEN):
        file.write(zeros[: size - start])
    file.flush()
