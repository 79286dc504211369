"""Statistics of several processes, summed where they are needed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..methods import Stats
from .ranks import Ranks
from .tensors import empty, form_of


@dataclass(frozen=True, eq=False)
class RemoteStats(Stats):
    """What is known of statistics that another rank has.

    Attributes:
        collected: the names of those that were collected.
    """

    collected: frozenset[str] = frozenset()

    def has(self, need: str) -> bool:
        """Return whether a statistic was collected."""
        return need in self.collected


def summed_statistics(
    group: Ranks, local: Sequence[Stats], needing: Sequence[Sequence[int]], needs: Sequence[str]
) -> list[Stats]:
    """Return the sums over all ranks: each where it is needed, and what is known of it elsewhere.

    Terms are added in the order of the ranks, so that a number of ranks has the same sums in every
    run.

    Args:
        group: the ranks.
        local: what this rank saw of each weight.
        needing: the ranks that need each sum; the first of them adds it up.
        needs: the names of all statistics that a method may need.
    """
    if group.size == 1:
        return list(local)
    known = group.gather([_Outline.of(stats, needs) for stats in local])
    found: list[Stats] = []
    for i, (own, owners) in enumerate(zip(local, needing, strict=True)):
        outlines = [each[i] for each in known]
        total = _summed(group, own, outlines, owners[0])
        others = sorted(set(owners) - {owners[0]})
        if others:
            total = _passed_on(group, total, owners[0], others)
        if total is None:
            tokens = sum(each.facts["tokens"] for each in outlines)
            amax = max(each.facts["input_amax"] for each in outlines)
            collected = frozenset().union(*(each.collected for each in outlines))
            total = RemoteStats(tokens=tokens, input_amax=amax, collected=collected)
        found.append(total)
    return found


def _summed(group: Ranks, own: Stats, outlines: Sequence[_Outline], owner: int) -> Stats | None:
    """Return the sum of what the ranks saw of a weight to its owner, None to others."""
    if owner != group.rank:
        _send(group, own, owner)
        return None
    every = [
        own if rank == owner else _receive(group, outline, rank)
        for rank, outline in enumerate(outlines)
    ]
    seen = [stats for stats in every if stats.tokens]
    return functools.reduce(lambda a, b: a.merged(b), seen) if seen else Stats()


def _passed_on(
    group: Ranks, total: Stats | None, source: int, others: Sequence[int]
) -> Stats | None:
    """Return the sum of one rank to some others, too."""
    outline = group.gather(None if total is None else _Outline.of(total, ()))[source]
    if total is not None:
        for rank in others:
            _send(group, total, rank)
    elif outline is not None and group.rank in others:
        return _receive(group, outline, source)
    return total


@dataclass(frozen=True)
class _Outline:
    """Statistics without the values of their tensors."""

    kind: type[Stats]
    facts: dict[str, Any]  # plain values, and forms in the places of tensors
    collected: frozenset[str]

    @staticmethod
    def of(stats: Stats, needs: Sequence[str]) -> _Outline:
        facts = {each.name: getattr(stats, each.name) for each in dataclasses.fields(stats)}
        plain = {name: _mapped(value, _Hole.of) for name, value in facts.items()}
        return _Outline(type(stats), plain, frozenset(filter(stats.has, needs)))


@dataclass(frozen=True)
class _Hole:
    """The place of a tensor."""

    form: Any

    @staticmethod
    def of(value: Any) -> Any:
        return _Hole(form_of(value)) if isinstance(value, Tensor) else value


def _receive(group: Ranks, outline: _Outline, source: int) -> Stats:
    def filled(value: Any) -> Any:
        return group.receive(empty(value.form), source) if isinstance(value, _Hole) else value

    facts = {name: _mapped(value, filled) for name, value in outline.facts.items()}
    return outline.kind(**facts)


def _send(group: Ranks, stats: Stats, to: int) -> None:
    """Send the tensors of statistics, in the order in which `_receive` asks for them."""

    def sent(value: Any) -> None:
        if isinstance(value, Tensor):
            group.send(value, to)

    for each in dataclasses.fields(stats):
        _mapped(getattr(stats, each.name), sent)


def _mapped(value: Any, change: Any) -> Any:
    """Return a value with each leaf of its tuples changed."""
    return tuple(_mapped(each, change) for each in value) if type(value) is tuple else change(value)
