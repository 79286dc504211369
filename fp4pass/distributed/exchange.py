"""Exchange tensors and statistics between processes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..methods import Stats
from .ranks import Ranks, is_sharded


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
    known: dict[int, Any] = {}
    for each in group.gather({i: (facts, _forms(tensors)) for i, (facts, tensors) in own.items()}):
        known |= each
    found = []
    for i, owner in enumerate(owners):
        facts, forms = known[i]
        mine = own[i][1] if i in own else {}
        tensors = dict.fromkeys(forms)
        for name, form in forms.items():
            if form is not None:
                tensor = mine[name] if name in mine else form.empty()
                tensors[name] = group.broadcast(tensor, owner)
        found.append((facts, tensors))
    return found


def _forms(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: Form.of(each) for name, each in tensors.items()}


def whole_tensors(
    group: Ranks, state: Mapping[str, Tensor], ties: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return a state dict whose sharded tensors the first rank has whole, on the CPU.

    Args:
        group: the ranks; each makes the call, with the same names.
        state: as `state_dict` returns it.
        ties: names that stand for that of another name: they get the same tensor again.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if is_sharded(tensor) and ties.get(name) not in state:
            whole = _whole(tensor)
            tensor = whole.cpu() if group.rank == 0 else whole.to("meta")
        found[name] = tensor
    return {n: found[ties[n]] if is_sharded(tensor) else tensor for n, tensor in found.items()}


def _whole(tensor: Any) -> Tensor:
    """Return a DTensor as a tensor that every rank has."""
    from torch.distributed.tensor import DTensor

    local: Tensor = tensor.to_local()
    # As bytes, for not every backend knows every dtype.
    bits = local.view(torch.uint8) if local.itemsize == 1 else local
    layout = {"shape": tensor.shape, "stride": tensor.stride()}
    mesh, placements = tensor.device_mesh, tensor.placements
    sharded = DTensor.from_local(bits, mesh, placements, run_check=False, **layout)
    return sharded.full_tensor().view(local.dtype)


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


class _Outline(NamedTuple):
    """Statistics without the values of their tensors."""

    kind: type[Stats]
    facts: dict[str, Any]  # plain values, and forms in the places of tensors
    collected: frozenset[str]

    @staticmethod
    def of(stats: Stats, needs: Sequence[str]) -> _Outline:
        facts = {name: _mapped(value, Form.of) for name, value in _fields(stats).items()}
        return _Outline(type(stats), facts, frozenset(filter(stats.has, needs)))


def summed_statistics(
    group: Ranks, local: Sequence[Stats], needing: Sequence[Sequence[int]], needs: Sequence[str]
) -> list[Stats]:
    """Return the sums over all ranks: each where it is needed, and its facts elsewhere.

    Terms are added in the order of the ranks, so that a number of ranks has the same sums in every
    run.

    Args:
        group: the ranks.
        local: statistics of each weight that this rank saw.
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
    """Return the sum of the statistics of a weight on its owner, None elsewhere."""
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
    """Return the sum of one rank on some others, too."""
    outline = group.gather(None if total is None else _Outline.of(total, ()))[source]
    if total is not None:
        for rank in others:
            _send(group, total, rank)
    elif outline is not None and group.rank in others:
        return _receive(group, outline, source)
    return total


def _send(group: Ranks, stats: Stats, to: int) -> None:
    """Send the tensors of statistics, in the order in which `_receive` asks for them."""
    for value in _fields(stats).values():
        _mapped(value, lambda x: group.send(x, to) if isinstance(x, Tensor) else None)


def _receive(group: Ranks, outline: _Outline, source: int) -> Stats:
    def filled(value: Any) -> Any:
        return group.receive(value.empty(), source) if isinstance(value, Form) else value

    return outline.kind(**{name: _mapped(each, filled) for name, each in outline.facts.items()})


def _fields(stats: Stats) -> dict[str, Any]:
    return {each.name: getattr(stats, each.name) for each in dataclasses.fields(stats)}


def _mapped(value: Any, change: Any) -> Any:
    """Return a value with each leaf of its tuples changed."""
    return tuple(_mapped(each, change) for each in value) if type(value) is tuple else change(value)
