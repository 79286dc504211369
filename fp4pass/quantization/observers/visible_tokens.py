"""Find the tokens that `attention_mask` leaves visible: no others enter statistics.

Modules that begin a sequence of tokens (a model, its encoder and decoder, a tower of images) have
hooks that note what each of their calls hides. Observers ask `visible_rows`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ..._compat.torch import (
    add_forward_hooks,
    call_no_copies,
    call_with_copies,
    hook_before,
    intercepts_operators,
    remove_forward_hooks,
    runs_uncompiled,
)
from ..._compat.transformers_cache import given_cache

# Kinds of tokens that the input of a layer in an exported graph is computed from.
TOKENS, DECODER_TOKENS, NO_TOKENS = "tokens", "decoder tokens", "no tokens"

# Arguments: a mask, and the tokens that it is a mask of.
_MASK, TOKEN_ARGUMENTS = "attention_mask", ("input_ids", "inputs_embeds")
_DECODER_MASK = "decoder_attention_mask"
DECODER_ARGUMENTS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
_MEMORY, _MEMORY_MASK = "encoder_hidden_states", "encoder_attention_mask"

# The name of the hooks.
_HOOKS = "fp4pass_tokens"


class Rows(NamedTuple):
    """The rows of an input that count."""

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
        return x.ndim > 2 and tuple(x.shape[:2]) == (batch, length)

    def rows_of(self, x: Tensor) -> Tensor | None:
        """Return which rows of an x that fits are visible, None if all are."""
        if self.mask is None or x.ndim <= 3:
            return self.rows
        mask = self.mask.reshape(*self.size, *[1] * (x.ndim - 3))
        return mask.expand(x.shape[:-1]).reshape(-1)


class Reading:
    """The tokens that layers read."""

    def __init__(
        self,
        own: Tokens | None = None,  # of a model, an encoder or a decoder
        decoder: Tokens | None = None,  # where it has no hooks of its own
        memory: Tensor | None = None,  # outputs of an encoder that a decoder reads
        encoder: Tokens | None = None,  # of the memory
        beyond: Tensor | None = None,  # a mask that hides other tokens than these
    ) -> None:
        self.own, self.decoder, self.memory, self.encoder = own, decoder, memory, encoder
        self.beyond = beyond
        # Compiled code asks for this alone where nothing is hidden.
        masks = (each.mask for each in (own, decoder, encoder) if each is not None)
        self.mask = next((each for each in masks if each is not None), beyond)

    def find(self, x: Tensor, part: str = "") -> Rows:
        """Return which rows of x [..., K] count."""
        if self.mask is None:
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
            return Rows(None, self.mask)
        rows = fitting[0].rows_of(x)
        return Rows(None if rows is None else rows.to(x.device), None)

    def on_cpu(self) -> Reading:
        """Return the same with masks on the CPU, without the memory."""

        def moved(tokens: Tokens | None) -> Tokens | None:
            if tokens is None or tokens.mask is None:
                return tokens
            return Tokens(tokens.size, tokens.mask.cpu())

        beyond = None if self.beyond is None else self.beyond.cpu()
        return Reading(moved(self.own), moved(self.decoder), None, moved(self.encoder), beyond)


class Scope:
    """A call of a module that begins a sequence of tokens."""

    def __init__(self, reader: object, outer: Scope | None, call: Reading) -> None:
        self.reader, self.outer, self.call = reader, outer, call
        # Behind a part that told of its tokens, layers read these.
        self.now = call


# The scope of each thread.
_SLOT = threading.local()


def _scope() -> Scope | None:
    """Return the innermost call that runs in this thread, None outside of all."""
    return getattr(_SLOT, "scope", None)


def visible_rows(x: Tensor, part: str = "") -> Rows:
    """Return which rows of an input x [..., K] of a layer count, in the call that runs."""
    scope = _scope()
    return _ALL if scope is None else scope.now.find(x, part)


class Kept(NamedTuple):
    """The tokens that a call of layers reads, kept to run it again."""

    reading: Reading
    place: int | str | None  # of the encoder's tokens, among the arguments

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kept | None:
        """Return the tokens of the call that runs, on the CPU; None if all of them count."""
        scope = _scope()
        if scope is None or scope.now.mask is None:
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
        call = Reading(own.own, own.decoder, given.get(self.place), own.encoder, own.beyond)
        _SLOT.scope = Scope(None, before, call)
        try:
            yield
        finally:
            _SLOT.scope = before


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
        if scope.outer is not None:
            scope.outer.now = scope.now
        _SLOT.scope = scope.outer

    def read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], outer: Reading | None = None
    ) -> Reading:
        """Return the tokens of a call inside of a call that reads `outer`."""
        given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        for value in (*args, *kwargs.values()):
            if isinstance(value, Mapping):
                given = {**{str(key): each for key, each in value.items()}, **given}
        size, mask, own = _size_of(given, TOKEN_ARGUMENTS), given.get(_MASK), None
        if mask is None and outer is not None and outer.beyond is not None:
            if outer.own is None and outer.decoder is None:
                # Inside of a tower, whose tokens are not those of the mask around it.
                return outer
        is_plain = isinstance(mask, Tensor) and mask.ndim == 2
        if not is_plain and size is not None and (mask is not None or _MASK not in self.takes):
            # A mask of pairs of tokens, or a call that takes none: those of the call around it.
            around = () if outer is None else (outer.own, outer.decoder)
            own = next((each for each in around if each and each.size == tuple(size)), None)
        beyond = decoder = encoder = None
        if own is None:
            own, beyond = _masked(mask, size, given)
            if own is None and beyond is None and outer is not None:
                beyond = outer.mask
        if given.get(_DECODER_MASK) is not None or _DECODER_MASK in self.takes:
            decoder, _ = _masked(given.get(_DECODER_MASK), _size_of(given, DECODER_ARGUMENTS))
        memory = given.get(_MEMORY)
        if isinstance(memory, Tensor) and memory.ndim == 3:
            encoder, _ = _masked(given.get(_MEMORY_MASK), memory.shape[:2])
        else:
            memory = None
        return Reading(own, decoder, memory, encoder, beyond)


def _size_of(given: Mapping[str, Any], names: Sequence[str]) -> Sequence[int] | None:
    tensors = (given[name] for name in names if isinstance(given.get(name), Tensor))
    return next((x.shape[:2] for x in tensors if x.ndim >= 2), None)


def _masked(
    mask: object, size: Sequence[int] | None, given: Mapping[str, Any] | None = None
) -> tuple[Tokens | None, Tensor | None]:
    """Return the tokens of a size with a mask, or none and what of it is of other tokens.

    The mask is of tokens [B, past + T] or of pairs [B, ..., T, past + T], of which a token is
    hidden that no other looks at. `given` are the arguments of the call.
    """
    if not isinstance(mask, Tensor) or mask.ndim < 2:
        return (None if size is None or mask is not None else Tokens(size)), None
    visible: Tensor | None = _visible(mask)
    if size is None:
        size = (mask.shape[0], mask.shape[1 if mask.ndim == 2 else -2])
    if visible is None:
        return Tokens(size), None
    (batch, length), total = size, mask.shape[-1]
    start = total - length
    if mask.ndim > 2:
        visible = visible.flatten(1, -2).any(1)
        cache = given_cache(given.values()) if start and given else None
        if cache is not None:
            # A cache of a fixed length has places behind the tokens.
            start = int(cache.get_seq_length())
    if mask.shape[0] not in (1, batch) or not 0 <= start <= total - length:
        return None, visible
    return Tokens(size, visible[:, start : start + length].expand(batch, length)), None


def _visible(mask: Tensor) -> Tensor | None:
    """Return where a mask lets look, None if that is everywhere."""
    if mask.is_floating_point():
        # One that is multiplied has ones; one that is added has zeros, and far below them.
        added = mask > torch.finfo(mask.dtype).min / 2
        visible = torch.where((mask > 0).any(), mask > 0, added)
    else:
        visible = mask != 0
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or intercepts_operators():
        return visible
    return None if bool(visible.all()) else visible


def count_tokens(
    root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, int]:
    """Return how many tokens a call of a watched model has, and how many of them are hidden."""
    hook = hook_before(root, _HOOKS)
    if hook is None:
        return 0, 0
    call: Reading = hook.__self__.read(args, kwargs)
    parts = [each for each in (call.own, call.decoder) if each is not None]
    masks = [each.mask for each in parts if each.mask is not None]
    masks += [] if call.beyond is None else [call.beyond]
    hidden = sum(int((~mask).sum()) for mask in masks)
    total = sum(each.size[0] * each.size[1] for each in parts)
    return total + (0 if call.beyond is None else call.beyond.numel()), hidden


def watch_tokens(root: nn.Module) -> None:
    """Put hooks on the modules that begin a sequence of tokens, which note what a call hides."""
    for hook in (_Reader.enter, _Reader.leave):
        runs_uncompiled(hook)
    for module in root.modules():
        if hook_before(module, _HOOKS) is not None:
            continue
        reader = _Reader(module)
        # As models of transformers say, also those inside of others.
        is_model = isinstance(getattr(module, "main_input_name", None), str)
        is_masked = _MASK in reader.takes and not reader.takes.isdisjoint(TOKEN_ARGUMENTS)
        if module is root or is_model or is_masked:
            add_forward_hooks(module, _HOOKS, reader.enter, reader.leave, with_kwargs=True)
    if isinstance(root, fx.GraphModule):
        # Copies lose the hooks.
        call_no_copies(root, watch_tokens)
        call_with_copies(root, watch_tokens)


@contextmanager
def watching_tokens(root: nn.Module) -> Iterator[None]:
    """Watch the tokens of a model for a while, unless it is watched."""
    is_watched = hook_before(root, _HOOKS) is not None
    watch_tokens(root)
    try:
        yield
    finally:
        if not is_watched:
            unwatch_tokens(root)


def unwatch_tokens(root: nn.Module) -> None:
    """Take what `watch_tokens` put in out again."""
    for module in root.modules():
        remove_forward_hooks(module, _HOOKS)
    call_no_copies(root, watch_tokens)


def parts_of_graph(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the kind of tokens that each node of an exported graph is computed from.

    It is "" for all in a graph whose arguments do not say which of them are tokens.
    """
    made_of: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        own: set[str] = set()
        if node.op == "placeholder":
            kinds = {TOKENS: TOKEN_ARGUMENTS, DECODER_TOKENS: DECODER_ARGUMENTS}
            own = {kind for kind, names in kinds.items() if node.name in names}
        # Equal sizes are one number, whichever tokens it was counted of.
        is_number = isinstance(node.meta.get("val"), int | torch.SymInt)
        operands = [] if is_number else node.all_input_nodes
        made_of[node] = frozenset(own).union(*(made_of[each] for each in operands))
    if not any(TOKENS in parts for parts in made_of.values()):
        return dict.fromkeys(made_of, "")
    # Sorted, the tokens of a decoder come before others.
    return {node: min(parts, default=NO_TOKENS) for node, parts in made_of.items()}
