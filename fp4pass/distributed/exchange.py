"""Exchange tensors, parts of them, and statistics between processes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..methods import Stats
from .ranks import Ranks, is_sharded

Leaf = TypeVar("Leaf")

# Bytes of statistics that are exchanged at a time: they need memory until they are added.
_MESSAGE = 1 << 28


class Form(NamedTuple):
    """The shape, dtype and kind of device of a tensor that another rank has."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @staticmethod
    def of(value: Any) -> Any:
        """Return the form of a tensor, other values as they are."""
        if not isinstance(value, Tensor):
            return value
        return Form(tuple(value.shape), value.dtype, value.device.type)

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Return a tensor of this form, on the device that this rank computes on."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def shared_tensors(group: Ranks, own: Mapping[int, Any], owners: Sequence[int]) -> list[Any]:
    """Return the results of every rank, in order, on all of them.

    Args:
        group: the ranks.
        own: of this rank, by its place: a pair of plain values and tensors by name.
        owners: the rank that made each.
    """
    if group.size == 1:
        return [own[i] for i in range(len(owners))]
    forms = {i: (facts, _mapped(tensors, Form.of)) for i, (facts, tensors) in own.items()}
    known = {i: each for some in group.gather(forms) for i, each in some.items()}
    found: list[tuple[Any, dict[str, Any]]] = []
    for i, owner in enumerate(owners):
        facts, tensors = known[i]
        for name, form in tensors.items():
            if isinstance(form, Form):
                mine = own[i][1][name] if i in own else None
                sent = group.broadcast(form.empty() if mine is None else mine, owner)
                tensors[name] = sent if mine is None else mine
        found.append((facts, tensors))
    return found


def whole_tensors(
    group: Ranks, state: Mapping[str, Tensor], ties: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return a state dict whose sharded tensors the first rank has whole, on the CPU.

    Args:
        group: the ranks; each makes the call, with the same names.
        state: as `state_dict` returns it.
        ties: names that stand for that of another name: they get the same tensor again.
    """
    # A state dict with such tensors has imported it.
    if not any(map(is_sharded, state.values())):
        return dict(state)
    from torch.distributed.tensor import DTensor

    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if is_sharded(tensor) and ties.get(name) not in state:
            sharded: Any = tensor
            local: Tensor = sharded.to_local()
            # As bytes, for not every backend knows every dtype.
            bits = local.view(torch.uint8) if local.itemsize == 1 else local
            layout = {"shape": sharded.shape, "stride": sharded.stride(), "run_check": False}
            parts = DTensor.from_local(bits, sharded.device_mesh, sharded.placements, **layout)
            whole = parts.full_tensor().view(local.dtype)
            tensor = whole.to("cpu" if group.rank == 0 else "meta")
        found[name] = tensor
    return {n: found[ties[n]] if is_sharded(tensor) else tensor for n, tensor in found.items()}


@dataclass(frozen=True, eq=False)
class RemoteStats(Stats):
    """Facts of statistics that another rank has.

    Attributes:
        collected: the names of those that were collected.
    """

    collected: frozenset[str] = frozenset()

    def has(self, need: str) -> bool:
        """Return whether a statistic was collected."""
        return need in self.collected


# Of each rank, the number of the statistics that a weight has there.
_Terms = tuple[int, ...]


def summed_statistics(
    group: Ranks, local: Sequence[Stats], needing: Sequence[Sequence[int]], needs: Sequence[str]
) -> list[Stats]:
    """Return the sums over all ranks: each where it is needed, and its facts elsewhere.

    Terms are added in the order of the ranks, so that a number of ranks has the same sums in every
    run. Weights that have one object of statistics on each rank have one sum.

    Args:
        group: the ranks.
        local: statistics of each weight that this rank saw.
        needing: the ranks that need each sum; each of them adds it up.
        needs: the names of all statistics that a method may need.
    """
    if group.size == 1:
        return list(local)
    distinct = list({id(stats): stats for stats in local}.values())
    numbers = {id(stats): i for i, stats in enumerate(distinct)}
    outlines = [_changed(stats, Form.of) for stats in distinct]
    gathered = group.gather((outlines, [numbers[id(stats)] for stats in local]))
    terms: list[_Terms] = list(zip(*(places for _, places in gathered), strict=True))
    outlined = {each: [gathered[rank][0][i] for rank, i in enumerate(each)] for each in terms}
    adding: dict[_Terms, set[int]] = {}
    for each, owners in zip(terms, needing, strict=True):
        adding.setdefault(each, set()).update(owners)
    totals: dict[_Terms, Stats] = {}
    waiting: list[_Terms] = []
    size = 0
    for each in adding:
        more = max(sum(form.nbytes for form in _leaves(one, Form)) for one in outlined[each])
        if waiting and size + more > _MESSAGE:
            totals |= _summed(group, distinct, outlined, {one: adding[one] for one in waiting})
            waiting, size = [], 0
        waiting.append(each)
        size += more
    totals |= _summed(group, distinct, outlined, {one: adding[one] for one in waiting})
    return [
        totals[each] if group.rank in owners else _remote(outlined[each], needs)
        for each, owners in zip(terms, needing, strict=True)
    ]


def _summed(
    group: Ranks,
    distinct: Sequence[Stats],
    outlined: Mapping[_Terms, Sequence[Stats]],
    adding: Mapping[_Terms, set[int]],
) -> dict[_Terms, Stats]:
    """Return the sums that this rank needs, once all ranks have exchanged their terms."""
    sent: list[tuple[Tensor, int]] = []
    received: list[tuple[Tensor, int]] = []
    for terms, owners in adding.items():
        mine = distinct[terms[group.rank]]
        if mine.tokens:
            sent += [(x, to) for to in sorted(owners - {group.rank}) for x in _leaves(mine, Tensor)]
        for rank, outline in enumerate(outlined[terms]):
            if group.rank in owners and rank != group.rank and outline.tokens:
                received += [(form.empty(), rank) for form in _leaves(outline, Form)]
    arrived = iter(group.exchange(sent, received))

    def fill(value: Any) -> Any:
        return next(arrived) if isinstance(value, Form) else value

    totals: dict[_Terms, Stats] = {}
    for terms, owners in adding.items():
        if group.rank in owners:
            every = [
                distinct[terms[rank]] if rank == group.rank else _changed(outline, fill)
                for rank, outline in enumerate(outlined[terms])
                if outline.tokens
            ]
            totals[terms] = functools.reduce(lambda a, b: a.merged(b), every) if every else Stats()
    return totals


def _remote(outlines: Sequence[Stats], needs: Sequence[str]) -> RemoteStats:
    """Return the facts of a sum that other ranks have."""
    return RemoteStats(
        tokens=sum(each.tokens for each in outlines),
        input_amax=max(each.input_amax for each in outlines),
        collected=frozenset(need for each in outlines for need in needs if each.has(need)),
    )


def _changed(stats: Stats, change: Callable[[Any], Any]) -> Stats:
    """Return statistics with each value of their fields changed, such as tensors to forms."""
    known = {each.name: getattr(stats, each.name) for each in dataclasses.fields(stats)}
    return type(stats)(**_mapped(known, change))


def _leaves(stats: Stats, kind: type[Leaf]) -> list[Leaf]:
    """Return the values of one kind in the fields of statistics, in order."""
    found: list[Any] = []
    _changed(stats, found.append)
    return [each for each in found if isinstance(each, kind)]


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with each leaf of its dictionaries and tuples changed."""
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    # Forms are tuples, too.
    return tuple(_mapped(each, change) for each in value) if type(value) is tuple else change(value)
