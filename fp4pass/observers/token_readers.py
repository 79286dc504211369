"""Hooks of modules that begin a sequence of tokens, and tell which of them their call hides.

They are the model, its encoder and decoder, a tower of images: parts of other models of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._compat.torch import call_no_copies, call_with_copies, intercepts_operators
from .._compat.torch_hooks import (
    add_forward_hooks,
    hook_before,
    remove_forward_hooks,
    runs_uncompiled,
)
from .visible_tokens import (
    DECODER_TOKENS,
    NO_TOKENS,
    TOKENS,
    Reading,
    Scope,
    Tokens,
    current_scope,
    enter_scope,
)

# Arguments: a mask, and what it is a mask of.
_MASK, _TOKENS = "attention_mask", ("input_ids", "inputs_embeds")
_DECODER_MASK = "decoder_attention_mask"
_DECODER_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
_MEMORY, _MEMORY_MASK = "encoder_hidden_states", "encoder_attention_mask"


# The name of the hooks.
_HOOKS = "fp4pass_tokens"


class _Reader:
    """The hooks of a module that begins a sequence of tokens."""

    def __init__(self, positional: Sequence[str], takes: Sequence[str]) -> None:
        """positional: the names of its arguments in order; takes: all names."""
        self.positional, self.takes = tuple(positional), frozenset(takes)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell what a call reads: a forward pre-hook with keyword arguments."""
        outer = scope = current_scope()
        while scope is not None:
            if scope.reader is self:
                # A call before was cut off.
                outer = scope.outer
            scope = scope.outer
        call = self.read(args, kwargs, None if outer is None else outer.call)
        enter_scope(Scope(self, outer, call))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End what `enter` began: a forward hook, called after an error, too."""
        scope = current_scope()
        while scope is not None and scope.reader is not self:
            scope = scope.outer
        if scope is None:
            return
        if scope.outer is not None:
            scope.outer.now = scope.now
        enter_scope(scope.outer)

    def read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], outer: Reading | None = None
    ) -> Reading:
        """Return what a call reads, inside of a call that reads `outer`."""
        given = self._given(args, kwargs)
        size, mask, own = _size_of(given, _TOKENS), given.get(_MASK), None
        if mask is None and outer is not None and outer.is_beyond:
            # Inside of a tower, whose tokens are not those of the mask around it.
            return outer
        is_plain = isinstance(mask, Tensor) and mask.ndim == 2
        if not is_plain and size is not None and (mask is not None or _MASK not in self.takes):
            # A mask of pairs of tokens, or a call that takes none: those of the call around it.
            own = None if outer is None else outer.sized(size)
        beyond = decoder = encoder = None
        if own is None:
            own, beyond = _masked(mask, size, given.get("past_key_values"))
            if own is None and beyond is None and outer is not None:
                beyond = outer.mask
        of_decoder = given.get(_DECODER_MASK)
        if of_decoder is not None or _DECODER_MASK in self.takes:
            decoder, _ = _masked(of_decoder, _size_of(given, _DECODER_TOKENS))
        memory = given.get(_MEMORY)
        if not isinstance(memory, Tensor) or memory.ndim != 3:
            memory = None
        else:
            encoder, _ = _masked(given.get(_MEMORY_MASK), memory.shape[:2])
        return Reading(own, decoder, memory, encoder, beyond)

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by their names, and those that mappings among them hold."""
        given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        for value in (*args, *kwargs.values()):
            if isinstance(value, Mapping):
                given = {**{str(key): each for key, each in value.items()}, **given}
        return given


def _size_of(given: Mapping[str, Any], names: Sequence[str]) -> Sequence[int] | None:
    for name in names:
        value = given.get(name)
        if isinstance(value, Tensor) and value.ndim >= 2:
            return value.shape[:2]
    return None


def _masked(
    mask: object, size: Sequence[int] | None, cache: Any = None
) -> tuple[Tokens | None, Tensor | None]:
    """Return the tokens of a size with a mask, or none and what of it is of other tokens.

    The mask is of tokens [B, past + T] or of pairs [B, ..., T, past + T], of which a token is
    hidden that no other looks at.
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
        if start and hasattr(cache, "get_seq_length"):
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


def parts_of_graph(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return what the nodes of an exported graph are made of, where no module tells.

    It is "" for all in a graph whose arguments do not say which of them are tokens.
    """
    given = [node.name for node in graph.nodes if node.op == "placeholder"]
    of_decoder = {name for name in given if name in _DECODER_TOKENS}
    tokens = {name for name in given if name in _TOKENS}
    made_of: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        own = [node.name] if node.op == "placeholder" else []
        # Equal sizes are one number, whichever tokens it was counted of.
        is_number = isinstance(node.meta.get("val"), int | torch.SymInt)
        operands = [] if is_number else node.all_input_nodes
        made_of[node] = frozenset(own).union(*(made_of[each] for each in operands))

    def part(names: frozenset[str]) -> str:
        if names & of_decoder:
            return DECODER_TOKENS
        return TOKENS if names & tokens else NO_TOKENS

    if not tokens:
        return dict.fromkeys(made_of, "")
    return {node: part(names) for node, names in made_of.items()}


def watch_tokens(root: nn.Module) -> None:
    """Have the modules of a model that begin a sequence of tokens tell what their calls hide."""
    for hook in (_Reader.enter, _Reader.leave):
        runs_uncompiled(hook)
    for module in root.modules():
        is_known = hook_before(module, _HOOKS) is not None
        if not is_known and (module is root or _begins_tokens(module)):
            reader = _Reader(*_names(module))
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


def _begins_tokens(module: nn.Module) -> bool:
    """Return whether a part of a model reads tokens, or images, that it is called with."""
    # As models of transformers say, also those inside of others.
    if isinstance(getattr(module, "main_input_name", None), str):
        return True
    _, takes = _names(module)
    return _MASK in takes and any(name in takes for name in _TOKENS)


def _names(module: nn.Module) -> tuple[list[str], list[str]]:
    """Return what the positional arguments of a module are called in their order, and all."""
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in parameters if each.kind in kinds], [p.name for p in parameters]
