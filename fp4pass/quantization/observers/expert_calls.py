"""Show the observers of experts the inputs of their module."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graph.rewrite import OBSERVERS
from ...nn.experts import ExpertStack, add_stacks, require_adapter, stacks_of, stage_inputs
from .observer import ExpertObserver
from .reached import observes
from .visible_tokens import NO_TOKENS, Rows, visible_rows


@observes
def feed(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the hooks of the stacks of a module of experts: a forward pre-hook of that module."""
    adapter, stacks = require_adapter(owner), stacks_of(owner)
    hidden, ids, weights = adapter.routed(owner, args, kwargs)
    weights = torch.ones_like(ids, dtype=torch.float32) if weights is None else weights
    visible, unmapped = rows_of_experts(owner, hidden)
    for stack in stacks.values() if unmapped is not None else ():
        for observer in stack.__dict__.get(OBSERVERS, ()):
            observer.unmapped = unmapped
    if visible is not None and not torch.compiler.is_compiling():
        hidden, ids, weights = hidden[visible], ids[visible], weights[visible]
        visible = None
    hooked = {name for name, stack in stacks.items() if stack._forward_pre_hooks}
    # Products that no hook sees are not computed.
    count = max((i + 1 for i, s in enumerate(adapter.stages) if hooked.intersection(s)), default=0)
    with torch.no_grad():
        for stage, x in itertools.islice(stage_inputs(owner, hidden, ids), count):
            for name in hooked.intersection(stage):
                stack = stacks[name]
                # An id beyond the experts counts nowhere.
                nobody = len(stack.dense)
                chosen = ids if visible is None else ids.where(visible.unsqueeze(1), nobody)
                for hook in stack._forward_pre_hooks.values():
                    hook(stack, (x, chosen, weights), {})
                for observer in stack.__dict__.get(OBSERVERS, ()):
                    if observer.lacks and hidden.numel():
                        _add_prior(observer, owner, hidden, visible, nobody)


def _add_prior(
    observer: ExpertObserver, owner: nn.Module, hidden: Tensor, visible: Tensor | None, nobody: int
) -> None:
    """Show all experts of a stack as many tokens as its observer lacks."""
    rows = require_adapter(owner).arbitrary(owner, hidden)
    every = torch.arange(observer.experts, device=hidden.device).expand(len(rows), -1)
    if visible is not None:
        # Compiled code has one shape for all masks: visible tokens go first.
        shown = visible[: len(rows)]
        order = shown.logical_not().argsort(stable=True)
        every, rows = every.where(shown.unsqueeze(1), nobody)[order], rows[order]
    rows, every = rows[: observer.lacks], every[: observer.lacks]
    *_, (_, inner) = stage_inputs(owner, rows, every)
    observer.add_prior(inner, every)


def rows_of_experts(owner: nn.Module, hidden: Tensor) -> Rows:
    """Return the rows of the inputs [T, K] of a module of experts that count."""
    copies = require_adapter(owner).copies(owner)
    first = hidden[: len(hidden) // max(copies, 1)]
    rows = visible_rows(first, "" if copies else NO_TOKENS)
    if rows.visible is None or copies == 1:
        return rows
    return Rows(rows.visible.repeat(copies), None)


def observe_stacks(modules: Iterable[nn.Module], needs: Sequence[str]) -> None:
    """Observe the inputs of the stacks of experts among some modules, added to their model."""
    for stack in add_stacks(modules):
        observers = stack.__dict__.setdefault(OBSERVERS, [])
        if not observers:
            observers.append(new_observer(stack, needs))
            stack.register_forward_pre_hook(observers[0].hook, with_kwargs=True)
        if feed not in stack.owner._forward_pre_hooks.values():
            stack.owner.register_forward_pre_hook(feed, with_kwargs=True)


def new_observer(stack: ExpertStack, needs: Sequence[str], keep: bool = False) -> ExpertObserver:
    """Return an observer for a stack."""
    experts, _, columns = stack.dense.shape
    # Only an expert itself has the activations of its own products.
    second = stack.stage != require_adapter(stack.owner).stages[0]
    return ExpertObserver(needs, experts, columns, second, keep)
