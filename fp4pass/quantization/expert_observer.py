"""Observers of experts: the statistics of what each expert of a stack reads."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..experts import ExpertStack, add_stack, require_adapter, stacks_of, stage_inputs
from ..graph.rewrite import OBSERVERS
from ..kernels.statistics.naive import diagonal_blocks
from ..methods import STATISTICS, ExpertInputs, ExpertStats
from .visible_tokens import NO_TOKENS, Rows, visible_rows

# Tokens whose activations every expert sees, so that those that few tokens reach know some.
_PRIOR_TOKENS = 256


class ExpertObserver:
    """Accumulates the statistics of a stack, expert by expert.

    To `keep` the inputs in place of whole Hessians takes less memory.
    """

    sharers = 0

    def __init__(
        self, needs: Sequence[str], experts: int, columns: int, second: bool, keep: bool = False
    ) -> None:
        self.needs, self.experts = tuple(needs), experts
        self._keeps = keep and "hessian" in needs
        whole = "hessian" in needs and not keep
        self.statistic = "hessian" if whole else "block_hessian"
        shape = STATISTICS[self.statistic]["shape"](columns)
        if self._keeps or self.statistic not in needs:
            shape = (0, *shape[1:])
        with torch.inference_mode(False):
            self._own = self._empty(shape)
            self._prior = self._empty(shape) if second and (shape[0] or self._keeps) else None
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._prior_inputs: list[tuple[Tensor, Tensor]] = []
        # Whether there was any input, how many experts a token has, tokens shown to all experts.
        self._seen, self._chosen, self._prior_tokens = False, 1, 0
        # A mask that hides tokens, but is not of the rows that it saw.
        self.unmapped: Tensor | None = None
        self.is_unmapped_said = False

    def _empty(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Return Hessians [E, ...], token counts [E], amax [1] and sums of weights [E], zero."""
        zeros = functools.partial(torch.zeros, dtype=torch.float32, device="cpu")
        counts = zeros(self.experts, dtype=torch.int64)
        return [zeros(self.experts, *shape), counts, zeros(1), zeros(self.experts)]

    @property
    def has_seen(self) -> bool:
        """Whether any input was added."""
        return self._seen

    @property
    def tokens(self) -> int:
        """How many tokens were added, each for all of its experts."""
        return math.ceil(int(self._own[1].sum()) / self._chosen)

    @property
    def lacks(self) -> int:
        """How many tokens all experts are still to see."""
        return 0 if self._prior is None else max(0, _PRIOR_TOKENS - self._prior_tokens)

    def hook(self, stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add inputs x [T, K] or [T, k, K] of the experts ids [T, k], chosen with weights."""
        if len(args) < 3:
            return  # A stack beside a packed one is called, too; `feed` has shown it this.
        self._add(self._own, *args)
        if self._keeps:
            # A copy, for the model may change them in place; of some rows no expert is asked for.
            own = (args[1] < self.experts).any(1)
            self._inputs.append((args[0].detach()[own], args[1][own]))
        self._seen, self._chosen = True, args[1].shape[-1]

    def add_prior(self, x: Tensor, ids: Tensor) -> None:
        """Add inputs of experts that were not chosen."""
        assert self._prior is not None, "only asked for what it lacks"
        self._add(self._prior, x, ids, torch.zeros_like(ids, dtype=torch.float32))
        if self._keeps:
            self._prior_inputs.append((x.detach(), ids))
        self._prior_tokens += len(ids)

    def _add(self, totals: list[Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> None:
        with torch.inference_mode(False):
            if totals[0].device != x.device:
                totals[:] = [total.to(x.device) for total in totals]
        ops.observe_experts(x.detach(), ids, weights.detach().float(), *totals)

    def stats(self) -> ExpertStats:
        """Return what it has seen."""
        _, counts, amax, routing = self._own
        found: dict[str, Any] = {"counts": counts, "routing": routing}
        found |= {"tokens": int(counts.sum()), "input_amax": float(amax)}
        if self._prior is not None:
            found["prior_counts"] = self._prior[1]
        if self._keeps:
            inputs, shown = tuple(self._inputs), tuple(self._prior_inputs)
            return ExpertInputs(**found, inputs=inputs, prior_inputs=shown)
        for prefix, totals in (("", self._own), ("prior_", self._prior)):
            if totals is not None and self.statistic in self.needs:
                found[prefix + self.statistic] = totals[0]
                if self.statistic == "hessian":
                    blocks = torch.stack(list(map(diagonal_blocks, totals[0])))
                    found[prefix + "block_hessian"] = blocks
        return ExpertStats(**found)


def feed(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Show the hooks on the stacks of experts what these are called with: a forward pre-hook."""
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
    # What nobody looks at is not computed.
    count = max((i + 1 for i, s in enumerate(adapter.stages) if hooked.intersection(s)), default=0)
    with torch.no_grad():
        for stage, x in itertools.islice(stage_inputs(owner, hidden, ids), count):
            for name in hooked.intersection(stage):
                # What no expert is asked for counts nowhere.
                nobody = len(stacks[name].dense)
                asked = ids if visible is None else ids.where(visible.unsqueeze(1), nobody)
                _call_hooks(stacks[name], x, asked, weights)
                for observer in stacks[name].__dict__.get(OBSERVERS, ()):
                    if observer.lacks and hidden.numel():
                        rows = adapter.arbitrary(owner, hidden)
                        every = torch.arange(observer.experts, device=ids.device)
                        every = every.expand(len(rows), observer.experts)
                        if visible is not None:
                            # Compiled code has one shape for all masks: visible tokens go first.
                            shown = visible[: len(rows)]
                            order = shown.logical_not().argsort(stable=True)
                            every = every.where(shown.unsqueeze(1), nobody)[order]
                            rows = rows[order]
                        rows, every = rows[: observer.lacks], every[: observer.lacks]
                        *_, (_, inner) = stage_inputs(owner, rows, every)
                        observer.add_prior(inner, every)


def rows_of_experts(owner: nn.Module, hidden: Tensor) -> Rows:
    """Return which rows of the inputs [T, K] of a module of experts count."""
    copies = require_adapter(owner).copies(owner)
    first = hidden[: len(hidden) // max(copies, 1)]
    rows = visible_rows(first, "" if copies else NO_TOKENS)
    if rows.visible is None or copies == 1:
        return rows
    return Rows(rows.visible.repeat(copies), None)


def _call_hooks(stack: ExpertStack, *args: Tensor) -> None:
    for hook in stack._forward_pre_hooks.values():
        hook(stack, args, {})


def observe_stack(stack: ExpertStack, needs: Sequence[str]) -> None:
    """Make a stack a module of its model, and observe what its experts read."""
    owner = stack.owner
    add_stack(stack)
    observers = stack.__dict__.setdefault(OBSERVERS, [])
    if not observers:
        observers.append(new_observer(stack, needs))
        stack.register_forward_pre_hook(observers[0].hook, with_kwargs=True)
    if feed not in owner._forward_pre_hooks.values():
        owner.register_forward_pre_hook(feed, with_kwargs=True)


def new_observer(stack: ExpertStack, needs: Sequence[str], keep: bool = False) -> ExpertObserver:
    """Return what observes a stack."""
    experts, _, columns = stack.dense.shape
    # Nobody but an expert has what its own products activate.
    second = stack.stage != require_adapter(stack.owner).stages[0]
    return ExpertObserver(needs, experts, columns, second, keep)
