"""Find the tokens that `attention_mask` leaves visible: no others enter statistics.

Modules that begin a sequence of tokens (a model, its encoder and decoder, a tower of images) have
hooks that note what each of their calls hides. Observers ask `visible_rows`.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ..._compat import torch as compat

# Arguments: a mask, and the tokens that it is a mask of.
_MASK, TOKEN_ARGUMENTS = "attention_mask", ("input_ids", "inputs_embeds")
_DECODER_MASK = "decoder_attention_mask"
DECODER_ARGUMENTS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
_MEMORY, _MEMORY_MASK = "encoder_hidden_states", "encoder_attention_mask"

# The name of the hooks.
_HOOKS = "fp4pass_tokens"


class Tokens:
    """A sequence of tokens [B, T]; mask: bool, the visible ones, None if all are."""

    def __init__(self, size: Sequence[int], mask: Tensor | None = None) -> None:
        self._size, self.mask = tuple(size), mask
        # One tensor for all layers, so that those that read one input observe it once.
        self.rows = None if mask is None else mask.reshape(-1)

    @property
    def size(self) -> tuple[int, ...]:
        """B and T."""
        # Of the mask, whose sizes compiled code does not fix.
        return self._size if self.mask is None else tuple(self.mask.shape)

    def fits(self, x: Tensor) -> bool:
        """Return whether x [B, T, K] or [B * T, K] has these tokens."""
        batch, length = self.size
        if x.ndim == 2:
            return x.shape[0] == batch * length
        return x.ndim == 3 and tuple(x.shape[:2]) == (batch, length)


class Reading:
    """The tokens that layers read."""

    def __init__(
        self,
        own: Tokens | None = None,  # of a model, an encoder or a decoder
        decoder: Tokens | None = None,  # where it has no hooks of its own
        memory: Tensor | None = None,  # outputs of an encoder that a decoder reads
        encoder: Tokens | None = None,  # of the memory
        elsewhere: bool = False,  # whether a mask hides other tokens than these
    ) -> None:
        self.own, self.decoder, self.memory, self.encoder = own, decoder, memory, encoder
        self.elsewhere = elsewhere
        # Compiled code asks for this alone where nothing is hidden.
        known = (own, decoder, encoder)
        self.hides = elsewhere or any(each is not None and each.mask is not None for each in known)
        # Whether a layer read something else while tokens were hidden.
        self.missed = False

    def find(self, x: Tensor, is_ordered: bool = True) -> Tensor | None:
        """Return which rows of x [..., K] count, None if all do; without order no row is known."""
        if not self.hides:
            return None
        known = (self.encoder,) if x is self.memory else (self.own, self.decoder, self.encoder)
        fitting = [each for each in known if is_ordered and each is not None and each.fits(x)]
        # A module that tells of a decoder alone does not say which of two equal sizes is read.
        if not fitting or (len(fitting) > 1 and self.own and fitting[1] is self.decoder):
            self.missed = True
            return None
        rows = fitting[0].rows
        return None if rows is None else rows.to(x.device)

    def on_cpu(self) -> Reading:
        """Return the same with masks on the CPU, without the memory."""

        def moved(tokens: Tokens | None) -> Tokens | None:
            if tokens is None or tokens.mask is None:
                return tokens
            return Tokens(tokens.size, tokens.mask.cpu())

        own, decoder, encoder = map(moved, (self.own, self.decoder, self.encoder))
        return Reading(own, decoder, None, encoder, self.elsewhere)


def _warn() -> None:
    warnings.warn(
        "attention_mask hides tokens of a batch, but the inputs of some layers are not of its "
        "[batch, tokens]: all of these entered the statistics. If padding is among them, calibrate "
        "on sequences of full length.",
        stacklevel=2,
    )


class Scope:
    """A call of a module that begins a sequence of tokens."""

    def __init__(self, reader: object, outer: Scope | None, call: Reading) -> None:
        self.reader, self.outer, self.call = reader, outer, call
        # After a part that told of its tokens, layers read these.
        self.now = call
        # Whether a layer in a call inside of it read what the masks are not of.
        self.missed = False


# The scope of each thread.
_SLOT = threading.local()


def _scope() -> Scope | None:
    return getattr(_SLOT, "scope", None)


def visible_rows(x: Tensor, is_ordered: bool = True) -> Tensor | None:
    """Return which rows of an input x [..., K] count in the call that runs, None if all do."""
    scope = _scope()
    return None if scope is None else scope.now.find(x, is_ordered)


class Kept(NamedTuple):
    """The tokens that a call of layers reads, kept to run it again."""

    reading: Reading
    place: int | str | None  # of the encoder's tokens, among the arguments

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kept | None:
        """Return the tokens of the call that runs, on the CPU; None if all of them count."""
        scope = _scope()
        if scope is None or not scope.now.hides:
            return None
        now = scope.now
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        place = next((at for at, x in given if x is not None and x is now.memory), None)
        return Kept(now.on_cpu(), place)

    @contextmanager
    def again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Have layers that are called with these arguments read the same tokens."""
        before, own = _scope(), self.reading
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        call = Reading(own.own, own.decoder, given.get(self.place), own.encoder, own.elsewhere)
        _SLOT.scope = Scope(None, before, call)
        try:
            yield
        finally:
            _SLOT.scope = before
        if call.missed:
            _warn()


class _Reader:
    """The hooks of a module that begins a sequence of tokens."""

    def __init__(self, module: nn.Module) -> None:
        parameters = inspect.signature(module.forward).parameters
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positional = [name for name, each in parameters.items() if each.kind in kinds]
        self.takes = frozenset(parameters)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the tokens of a call: a forward pre-hook with keyword arguments."""
        outer = scope = _scope()
        while scope is not None:
            if scope.reader is self:
                # A call before was cut off.
                outer = scope.outer
            scope = scope.outer
        call = self.read(args, kwargs, None if outer is None else outer.call)
        _SLOT.scope = Scope(self, outer, call)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End what `enter` began: a forward hook, called after an error, too."""
        scope = _scope()
        while scope is not None and scope.reader is not self:
            scope = scope.outer
        if scope is None:
            return
        _SLOT.scope = scope.outer
        missed = scope.missed or scope.call.missed or scope.now.missed
        if scope.outer is not None:
            scope.outer.now = scope.now
            scope.outer.missed = scope.outer.missed or missed
        elif missed:
            _warn()

    def read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], outer: Reading | None = None
    ) -> Reading:
        """Return the tokens of a call inside of a call that reads `outer`."""
        given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        for value in (*args, *kwargs.values()):
            if isinstance(value, Mapping):
                given = {**{str(key): each for key, each in value.items()}, **given}
        size, mask, own = _size_of(given, TOKEN_ARGUMENTS), given.get(_MASK), None
        is_of_pairs = mask is not None and not _is_plain(mask)
        if size is not None and (is_of_pairs or (mask is None and _MASK not in self.takes)):
            # A mask of pairs of tokens, or a call that takes none: those of the call around it.
            around = () if outer is None else (outer.own, outer.decoder)
            own = next((each for each in around if each and each.size == tuple(size)), None)
        own = own or _masked(mask, size)
        elsewhere = own is None and (mask is not None if outer is None else outer.hides)
        decoder = encoder = None
        if given.get(_DECODER_MASK) is not None or _DECODER_MASK in self.takes:
            decoder = _masked(given.get(_DECODER_MASK), _size_of(given, DECODER_ARGUMENTS))
        memory = given.get(_MEMORY)
        if isinstance(memory, Tensor) and memory.ndim == 3:
            encoder = _masked(given.get(_MEMORY_MASK), memory.shape[:2])
        else:
            memory = None
        return Reading(own, decoder, memory, encoder, elsewhere)


def _size_of(given: Mapping[str, Any], names: Sequence[str]) -> Sequence[int] | None:
    tensors = (given[name] for name in names if isinstance(given.get(name), Tensor))
    return next((x.shape[:2] for x in tensors if x.ndim >= 2), None)


def _is_plain(mask: object) -> bool:
    return isinstance(mask, Tensor) and mask.ndim == 2


def _masked(mask: Any, size: Sequence[int] | None) -> Tokens | None:
    """Return the tokens of a size with a mask [B, past + T], None unless it is one of them."""
    if not _is_plain(mask):
        return None if size is None or mask is not None else Tokens(size)
    batch, length = size = mask.shape if size is None else size
    # Numbers of packed sequences are positive, too.
    visible = mask > 0
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not (is_traced or compat.intercepts_operators()) and bool(visible.all()):
        return Tokens(size)
    start = mask.shape[1] - length
    if mask.shape[0] not in (1, batch) or start < 0:
        return None
    return Tokens(size, visible[:, start:].expand(batch, length))


def count_tokens(
    root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, int]:
    """Return how many tokens a call of a watched model has, and how many of them are hidden."""
    hook = compat.hook_before(root, _HOOKS)
    if hook is None:
        return 0, 0
    call: Reading = hook.__self__.read(args, kwargs)
    parts = [each for each in (call.own, call.decoder) if each is not None]
    hidden = sum(int((~each.mask).sum()) for each in parts if each.mask is not None)
    return sum(each.size[0] * each.size[1] for each in parts), hidden


def watch_tokens(root: nn.Module) -> None:
    """Put hooks on the modules that begin a sequence of tokens, which note what a call hides."""
    for hook in (_Reader.enter, _Reader.leave):
        compat.runs_uncompiled(hook)
    for module in root.modules():
        if compat.hook_before(module, _HOOKS) is not None:
            continue
        reader = _Reader(module)
        # As models of transformers say, also those inside of others.
        is_model = isinstance(getattr(module, "main_input_name", None), str)
        is_masked = _MASK in reader.takes and not reader.takes.isdisjoint(TOKEN_ARGUMENTS)
        if module is root or is_model or is_masked:
            compat.add_forward_hooks(module, _HOOKS, reader.enter, reader.leave, with_kwargs=True)
    if isinstance(root, fx.GraphModule):
        # Copies lose the hooks.
        compat.call_no_copies(root, watch_tokens)
        compat.call_with_copies(root, watch_tokens)


@contextmanager
def watching_tokens(root: nn.Module) -> Iterator[None]:
    """Watch the tokens of a model for a while, unless it is watched."""
    is_watched = compat.hook_before(root, _HOOKS) is not None
    watch_tokens(root)
    try:
        yield
    finally:
        if not is_watched:
            unwatch_tokens(root)


def unwatch_tokens(root: nn.Module) -> None:
    """Take what `watch_tokens` put in out again."""
    for module in root.modules():
        compat.remove_forward_hooks(module, _HOOKS)
    compat.call_no_copies(root, watch_tokens)
