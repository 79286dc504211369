"""The tokens of a forward that `attention_mask` leaves visible: statistics are of no others."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What the input of a layer in an exported graph is made of, where no module tells.
TOKENS, DECODER_TOKENS, NO_TOKENS = "tokens", "decoder tokens", "no tokens"


class Rows(NamedTuple):
    """Which rows of an input count."""

    visible: Tensor | None  # bool [rows]; None: all
    unmapped: Tensor | None  # a mask that hides tokens, but is not of these rows


_ALL = Rows(None, None)


class Tokens:
    """A sequence of tokens."""

    def __init__(self, size: Sequence[int], mask: Tensor | None = None) -> None:
        """size: B and T; mask: bool [B, T], the visible ones, None if all are."""
        self._size, self.mask = tuple(size), mask
        # One tensor for all layers, so that those that read one input observe it once.
        self.rows = None if mask is None else mask.reshape(-1)

    @property
    def size(self) -> tuple[int, ...]:
        """B and T."""
        # Of the mask, whose sizes compiled code does not fix.
        return self._size if self.mask is None else tuple(self.mask.shape)

    def fits(self, x: Tensor) -> bool:
        """Return whether x [..., K] has these tokens as its leading dimensions."""
        batch, length = self.size
        if x.ndim == 2:
            return x.shape[0] == batch * length
        return x.ndim > 2 and x.shape[0] == batch and x.shape[1] == length

    def rows_of(self, x: Tensor) -> Tensor | None:
        """Return which rows of an x that fits are visible, None if all are."""
        if self.mask is None or x.ndim <= 3:
            return self.rows
        mask = self.mask.reshape(*self.size, *[1] * (x.ndim - 3))
        return mask.expand(x.shape[:-1]).reshape(-1)

    def to(self, device: torch.device) -> Tokens:
        """Return the same tokens with their mask on a device."""
        return Tokens(self.size, None if self.mask is None else self.mask.to(device))


class Reading:
    """The tokens that layers read.

    Attributes:
        own: those of a model, an encoder or a decoder.
        decoder: those of the decoder, where it is no module that tells of its own.
        memory: what a decoder reads of its encoder.
        encoder: the tokens of that.
        beyond: a mask that hides tokens, but others than these.
        mask: a mask that hides tokens, None if nothing is hidden.
    """

    def __init__(
        self,
        own: Tokens | None = None,
        decoder: Tokens | None = None,
        memory: Tensor | None = None,
        encoder: Tokens | None = None,
        beyond: Tensor | None = None,
    ) -> None:
        self.own, self.decoder, self.memory, self.encoder = own, decoder, memory, encoder
        self.beyond = beyond
        # Compiled code asks for this alone where nothing is hidden.
        masks = (each.mask for each in (own, decoder, encoder) if each is not None)
        self.mask = next((each for each in masks if each is not None), beyond)

    @property
    def is_beyond(self) -> bool:
        """Whether all tokens that are known to be hidden are others than those that are read."""
        return self.own is None and self.decoder is None and self.beyond is not None

    def find(self, x: Tensor, part: str = "") -> Rows:
        """Return which rows of x [..., K] count."""
        mask = self.mask
        if mask is None:
            return _ALL
        known: tuple[Tokens | None, ...] = (self.own, self.decoder, self.encoder)
        if x is self.memory:
            known = (self.encoder,)
        elif part:
            known = {TOKENS: (self.own,), DECODER_TOKENS: (self.decoder,)}.get(part, ())
        fitting = [each for each in known if each is not None and each.fits(x)]
        # A module that tells of a decoder alone does not say which of two equal sizes is read.
        unclear = len(fitting) > 1 and self.own is not None and fitting[1] is self.decoder
        if not fitting or unclear:
            return Rows(None, mask)
        rows = fitting[0].rows_of(x)
        if rows is not None and rows.device != x.device:
            rows = rows.to(x.device)
        return Rows(rows, None)

    def to(self, device: torch.device) -> Reading:
        """Return the same with masks on a device, without the memory."""
        known = (self.own, self.decoder, self.encoder)
        own, decoder, encoder = (None if each is None else each.to(device) for each in known)
        beyond = None if self.beyond is None else self.beyond.to(device)
        return Reading(own, decoder, None, encoder, beyond)

    def sized(self, size: Sequence[int]) -> Tokens | None:
        """Return the tokens of a size that are read."""
        for each in (self.own, self.decoder):
            if each is not None and each.size == tuple(size):
                return each
        return None


class Scope:
    """A call of a module that begins a sequence of tokens."""

    def __init__(self, reader: object, outer: Scope | None, call: Reading) -> None:
        self.reader, self.outer, self.call = reader, outer, call
        # Behind a part that told of its tokens, layers read these.
        self.now = call


# The scope of each thread.
_SLOT = threading.local()


def current_scope() -> Scope | None:
    """Return the innermost call that runs in this thread, None outside of all."""
    found: Scope | None = getattr(_SLOT, "scope", None)
    return found


def enter_scope(scope: Scope | None) -> None:
    """Set the innermost call that runs in this thread."""
    _SLOT.scope = scope


def visible_rows(x: Tensor, part: str = "") -> Rows:
    """Return which rows of an input x [..., K] of a layer count, in the call that runs."""
    scope = current_scope()
    return _ALL if scope is None else scope.now.find(x, part)


class Kept(NamedTuple):
    """What a call of layers reads, to run them again."""

    reading: Reading
    place: int | str | None  # of the encoder's tokens, among the arguments

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kept | None:
        """Return what layers read that are called so now, on the CPU; None if they read all."""
        scope = current_scope()
        if scope is None or scope.now.mask is None:
            return None
        now = scope.now
        places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        place = next((at for at, x in places if x is now.memory and x is not None), None)
        return Kept(now.to(torch.device("cpu")), place)

    @contextmanager
    def again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Have layers that are called with these arguments read the same."""
        before = current_scope()
        own, place = self.reading, self.place
        memory = None if place is None else args[place] if isinstance(place, int) else kwargs[place]
        call = Reading(own.own, own.decoder, memory, own.encoder, own.beyond)
        enter_scope(Scope(None, before, call))
        try:
            yield
        finally:
            enter_scope(before)
