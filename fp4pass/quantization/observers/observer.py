"""Observers add the inputs of linear layers, or of experts, to statistics."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ... import ops
from ...errors import CalibrationError
from ...graph.rewrite import OBSERVERS
from ...kernels.statistics.naive import BINS, diagonal_blocks, moved_totals, zeros
from ...methods import STATISTICS, ExpertInputs, Stats
from ...nn.experts import ExpertStack, add_stacks, require_adapter, stacks_of, stage_inputs
from ...nn.input_cache import compute_once
from ...ops.checks import require_dense
from .visible_tokens import visible_rows

Hook = TypeVar("Hook", bound=Callable[..., Any])

# Hessian, token count and amax, which one operator adds to, and the other statistics.
State = tuple[Tensor, ...]

# Observers that share their statistics may be called from several threads.
_LOCK = threading.RLock()

# Tokens that every expert is shown, so that those that few tokens reach know some.
_PRIOR_TOKENS = 256

# Whether a thread calls no observer.
_PAUSE = threading.local()


def observes(hook: Hook) -> Hook:
    """Have a hook that adds to what a prepared model has seen do nothing in `unobserved`."""

    @functools.wraps(hook)
    def wrapped(*args: Any) -> Any:
        return None if getattr(_PAUSE, "on", False) else hook(*args)

    return cast(Hook, wrapped)


@contextmanager
def unobserved() -> Iterator[None]:
    """Have calls of prepared models in this thread enter no statistic and no recording."""
    before, _PAUSE.on = getattr(_PAUSE, "on", False), True
    try:
        yield
    finally:
        _PAUSE.on = before


class _Seen:
    """The statistics of a sequence of inputs, for the observers that have seen just these."""

    def __init__(self, state: State, is_empty: bool) -> None:
        # Changed in place only by a single holder, which then makes a new object of it.
        self.state, self.holders, self.is_empty = state, 1, is_empty
        self.stats: Stats | None = None


class Observer(nn.Module):
    """Accumulates the statistics `needs` of its inputs of width `columns`, and returns nothing.

    It is a node of a graph, for `sharers` layers, or runs before a layer through `hook`. Its state
    is no buffer, so that it is not saved and not cast. It is made before any call: torch.compile
    would merge the tensors that two observers make in one graph.
    """

    # For fx: not dead code, though it has no result, and no obstacle to merging its inputs.
    _is_impure = True
    only_reads = True

    def __init__(self, needs: tuple[str, ...], columns: int, sharers: int = 0) -> None:
        super().__init__()
        self.needs = needs
        self.columns, self.sharers = columns, sharers
        self._hessian = _hessian_name(needs)
        self._others = tuple(name for name in needs if STATISTICS[name]["update"])
        # A tensor made in inference mode could not be added to outside of it.
        with torch.inference_mode(False):
            shape = STATISTICS[self._hessian]["shape"](columns)
            hessian = zeros(*(shape if self._hessian in needs else (0, *shape[1:])))
            known = [STATISTICS[name] for name in self._others]
            others = [zeros(*each["shape"](columns), dtype=each["dtype"]) for each in known]
            state = (hessian, zeros(1, dtype=torch.int64), zeros(1), *others)
        self._seen = _Seen(state, is_empty=True)

    @property
    def has_seen(self) -> bool:
        """Whether any input was added."""
        return not self._seen.is_empty

    @property
    def tokens(self) -> int:
        """The number of tokens that were added."""
        return int(self.state[1])

    @property
    def state(self) -> State:
        """Hessian, token count, amax and the rest; equal sequences of inputs may share it."""
        return self._seen.state

    def forward(self, x: Tensor, reference: Tensor | None = None) -> None:
        """Add an input x [..., K] of the layers; reference: the same tokens in the float model."""
        # An exported graph has no observer to write to, and its fake tensors must not stay here.
        # In torch 2.11 is_exporting is true in torch.compile as well, but there x is a Tensor.
        if torch.compiler.is_exporting() and type(x) is not Tensor:
            return
        if x.shape[-1:] != (self.columns,):
            # The layer raises for it.
            return
        with nullcontext() if torch.compiler.is_compiling() else _LOCK:
            self._observe(x, reference)

    def _observe(self, x: Tensor, reference: Tensor | None) -> None:
        state = self._seen.state
        with torch.inference_mode(False):
            if self._seen.holders > 1:
                state = tuple(total.clone() for total in state)
            if state[0].device != x.device:
                state = tuple(moved_totals(state, x.device, self.has_seen))
        observe = ops.observe_full if self._hessian == "hessian" else ops.observe
        visible = visible_rows(x)
        # Most batches hide nothing, and graphs of them have no argument more.
        observe(x.detach(), *state[:3], *(() if visible is None else (visible,)))
        for name, total in zip(self._others, state[3:], strict=True):
            STATISTICS[name]["update"](total, x.detach(), reference, visible)
        self._seen.holders -= 1
        self._seen = _Seen(state, is_empty=False)

    def stats(self) -> Stats:
        """Return the statistics of all inputs so far."""
        if self._seen.stats is None:
            hessian, count, amax, *others = self.state
            found = _hessians(hessian.unsqueeze(0), self.needs)
            found |= {name: x[None] for name, x in zip(self._others, others, strict=True)}
            self._seen.stats = Stats(tokens=int(count), input_amax=float(amax), **found)
        return self._seen.stats

    @observes
    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Observe the input of a layer; those that have seen the same so far share the result."""
        # Not as a module, which would look for hooks of its own for every layer of every call.
        x = args[0] if args else next(iter(kwargs.values()))
        if torch.compiler.is_compiling():
            self.forward(x)
            return
        if not isinstance(x, Tensor) or x.is_meta:
            # There is nothing to see, and the layer raises an error.
            return
        require_dense(f"The input of a prepared {type(module).__name__}", x)
        with _LOCK:
            before = None if self._seen.is_empty else weakref.ref(self._seen)
            key = ("observe", self.needs, self.columns, before)
            # A tensor that is read in two calls may have tokens that one of them hides.
            visible = visible_rows(x)
            add = functools.partial(self._add, x)
            seen = compute_once(x, key, module, add, visible)()
            if seen is None:
                # Whoever had it has gone on since.
                self._add(x)
            elif seen is not self._seen:
                self._seen.holders -= 1
                seen.holders += 1
                self._seen = seen

    def _add(self, x: Tensor) -> weakref.ref[_Seen]:
        """Add x; return a weak reference to the statistics, for the cache must not keep them."""
        self.forward(x)
        return weakref.ref(self._seen)


class ExpertObserver:
    """Accumulates the statistics of a stack of experts, expert by expert.

    second: whether they read activations of their own products; keep: inputs, not whole Hessians.
    """

    sharers = 0

    def __init__(
        self, needs: Sequence[str], experts: int, columns: int, second: bool, keep: bool = False
    ) -> None:
        self.needs, self.experts = tuple(needs), experts
        self._keeps = keep and "hessian" in needs
        name = "block_hessian" if self._keeps else _hessian_name(needs)
        shape = STATISTICS[name]["shape"](columns)
        if self._keeps or name not in needs:
            shape = (0, *shape[1:])
        with torch.inference_mode(False):
            self._own = self._empty(shape)
            self._prior = self._empty(shape) if second and (shape[0] or self._keeps) else None
            self._magnitudes = zeros(BINS, dtype=torch.int64) if "magnitudes" in needs else None
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._prior_inputs: list[tuple[Tensor, Tensor]] = []
        # Whether there was any input, how many experts a token has, tokens shown to all experts.
        self._seen, self._chosen, self._prior_tokens = False, 1, 0

    def _empty(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Return Hessians [E, ...], token counts [E], amax [1] and sums of weights [E], zero."""
        counts = zeros(self.experts, dtype=torch.int64)
        return [zeros(self.experts, *shape), counts, zeros(1), zeros(self.experts)]

    @property
    def has_seen(self) -> bool:
        """Whether any input was added."""
        return self._seen

    @property
    def tokens(self) -> int:
        """The number of tokens that were added, each for all of its experts."""
        return math.ceil(int(self._own[1].sum()) / self._chosen)

    @property
    def lacks(self) -> int:
        """The number of tokens that all experts are still to be shown."""
        return 0 if self._prior is None else max(0, _PRIOR_TOKENS - self._prior_tokens)

    @observes
    def hook(self, stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add inputs x [T, K] or [T, k, K] of the experts ids [T, k], chosen with weights."""
        if len(args) < 3:
            return  # A stack beside a packed one is called, too; `feed` has shown it this.
        self._add(self._own, *args)
        if self._magnitudes is not None:
            known = args[1] < self.experts
            known = known.any(1) if args[0].ndim == 2 else known.flatten()
            with torch.inference_mode(False):
                self._magnitudes = self._magnitudes.to(args[0].device)
                add = STATISTICS["magnitudes"]["update"]
                add(self._magnitudes, args[0].detach(), None, known)
        if self._keeps:
            # A copy, for the model may change them in place; some rows are for no expert.
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
                totals[:] = moved_totals(totals, x.device, bool(totals[1].any()))
        ops.observe_experts(x.detach(), ids, weights.detach().float(), *totals)

    def stats(self) -> Stats:
        """Return the statistics of all inputs so far."""
        hessians, counts, amax, routing = self._own
        found: dict[str, Any] = {"counts": counts, "routing": routing}
        found |= {"tokens": int(counts.sum()), "input_amax": float(amax)}
        found["magnitudes"] = self._magnitudes
        if self._prior is not None:
            found["prior_counts"] = self._prior[1]
        if self._keeps:
            inputs, shown = tuple(self._inputs), tuple(self._prior_inputs)
            return ExpertInputs(**found, inputs=inputs, prior_inputs=shown)
        if self._prior is not None:
            priors = _hessians(self._prior[0], self.needs)
            found |= {f"prior_{name}": each for name, each in priors.items()}
        return Stats(**found, **_hessians(hessians, self.needs))


def _hessian_name(needs: Sequence[str]) -> str:
    return "hessian" if "hessian" in needs else "block_hessian"


def _hessians(total: Tensor, needs: Sequence[str]) -> dict[str, Any]:
    if "hessian" in needs:
        return {"hessian": total, "block_hessian": torch.stack(list(map(diagonal_blocks, total)))}
    return {"block_hessian": total} if "block_hessian" in needs else {}


def is_observer_hook(hook: object) -> bool:
    """Return whether a hook is `Observer.hook`."""
    return hasattr(getattr(hook, "__self__", None), "has_seen")


def shared_observer(holders: Sequence[nn.Module], needs: tuple[str, ...], columns: int) -> Observer:
    """Return the observer that exactly these modules share, a new one if there is none yet."""
    lists: list[list[Observer]] = [holder.__dict__[OBSERVERS] for holder in holders]
    for observer in lists[0]:
        shared = all(any(observer is other for other in others) for others in lists)
        if observer.sharers == len(holders) and shared:
            return observer
    observer = Observer(needs, columns, sharers=len(holders))
    for observers in lists:
        observers.append(observer)
    return observer


def collect(holders: Iterable[nn.Module], name: str) -> Stats:
    """Return the statistics [E, ...] of modules with one weight, E 1 for a dense one, once each."""
    observers = dict.fromkeys(o for holder in holders for o in holder.__dict__.get(OBSERVERS, ()))
    seen: list[Stats] = [o.stats() for o in observers if o.tokens]
    if not seen:
        return Stats()
    stats = functools.reduce(lambda a, b: a.merged(b), seen)
    is_finite = all(math.isfinite(each.input_amax) for each in seen)
    if not is_finite or not all(x.isfinite().all() for x in stats.collected_tensors().values()):
        large = f"reached {stats.input_amax:.3g}, whose square float32 cannot hold,"
        raise CalibrationError(
            f"{name or 'the model'}: its inputs {large if is_finite else 'held NaN or infinity'} "
            "during calibration. Find the batch or the layer they come from, then prepare and "
            "calibrate again."
        )
    return stats


@observes
def feed(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the hooks of the stacks of a module of experts: a forward pre-hook of that module."""
    adapter, stacks = require_adapter(owner), stacks_of(owner)
    hidden, ids, weights = adapter.routed(owner, args, kwargs)
    weights = torch.ones_like(ids, dtype=torch.float32) if weights is None else weights
    visible = rows_of_experts(owner, hidden)
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


def rows_of_experts(owner: nn.Module, hidden: Tensor) -> Tensor | None:
    """Return which rows of the inputs [T, K] of a module of experts count, None if all do."""
    copies = require_adapter(owner).copies(owner)
    rows = visible_rows(hidden[: len(hidden) // max(copies, 1)], is_ordered=copies > 0)
    return rows if rows is None or copies == 1 else rows.repeat(copies)


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
