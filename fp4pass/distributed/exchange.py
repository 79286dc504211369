"""Exchange tensors, parts of them, and statistics between processes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..methods import Stats
from .ranks import Ranks, as_bytes, is_sharded

Item = TypeVar("Item")

# Bytes of a message: links take as long for them as for more, and they need memory beside the
# model until they are added or unpacked.
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
    known: dict[int, Any] = {}
    for each in group.gather({i: (facts, _forms(tensors)) for i, (facts, tensors) in own.items()}):
        known |= each
    found: list[tuple[Any, dict[str, Any]]] = [
        (known[i][0], dict.fromkeys(known[i][1])) for i in range(len(owners))
    ]
    wanted = [
        (owners[i], form, (i, name))
        for i in sorted(range(len(owners)), key=lambda i: owners[i])
        for name, form in known[i][1].items()
        if form is not None
    ]
    for message in _messages(wanted, lambda each: each[1].nbytes, lambda each: each[:1]):
        source = message[0][0]
        places = [place for *_, place in message]
        mine = [own[i][1][name] if i in own else None for i, name in places]
        forms = [form for _, form, _ in message]
        for (i, name), tensor in zip(places, _broadcast(group, source, mine, forms), strict=True):
            found[i][1][name] = tensor
    return found


def _forms(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: Form.of(each) for name, each in tensors.items()}


def _messages(
    items: Iterable[Item], size: Callable[[Item], int], key: Callable[[Item], Any]
) -> Iterator[list[Item]]:
    """Yield items that stand together and have one key, at most `_MESSAGE` bytes at a time."""
    part: list[Item] = []
    total = 0
    for item in items:
        if part and (total + size(item) > _MESSAGE or key(item) != key(part[0])):
            yield part
            part, total = [], 0
        part.append(item)
        total += size(item)
    if part:
        yield part


def _broadcast(
    group: Ranks, source: int, own: Sequence[Tensor | None], forms: Sequence[Form]
) -> list[Tensor]:
    """Return tensors of one rank, those of one kind of device in one message."""
    found: dict[int, Tensor] = {}
    for device in sorted({form.device for form in forms}):
        at = [i for i, form in enumerate(forms) if form.device == device]
        if source == group.rank:
            tensors: list[Any] = [own[i] for i in at]
            group.broadcast(torch.cat([as_bytes(each) for each in tensors]), source)
            found |= dict(zip(at, tensors, strict=True))
            continue
        sizes = [forms[i].nbytes for i in at]
        whole = group.broadcast(torch.empty(sum(sizes), dtype=torch.uint8, device=device), source)
        for i, part in zip(at, whole.split(sizes), strict=True):
            # In memory of its own, which files of the model are made of.
            found[i] = part.clone().view(forms[i].dtype).view(forms[i].shape)
    return [found[i] for i in range(len(forms))]


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

    @property
    def is_empty(self) -> bool:
        """Whether no token was seen."""
        return not self.facts["tokens"]

    @property
    def forms(self) -> list[Form]:
        """The forms of the tensors, in the order of `_tensors`."""
        return [each for each in _leaves(self.facts) if isinstance(each, Form)]

    def filled(self, tensors: Iterable[Tensor]) -> Stats:
        """Return the statistics, given their tensors."""
        left = iter(tensors)

        def fill(value: Any) -> Any:
            return next(left) if isinstance(value, Form) else value

        return self.kind(**{name: _mapped(each, fill) for name, each in self.facts.items()})


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
    own = [_Outline.of(stats, needs) for stats in distinct], [numbers[id(x)] for x in local]
    gathered = group.gather(own)
    known = [outlines for outlines, _ in gathered]
    terms: list[_Terms] = list(zip(*(places for _, places in gathered), strict=True))
    adding: dict[_Terms, set[int]] = {}
    for each, owners in zip(terms, needing, strict=True):
        adding.setdefault(each, set()).update(owners)

    def size(job: tuple[_Terms, set[int]]) -> int:
        return max(sum(form.nbytes for form in known[r][i].forms) for r, i in enumerate(job[0]))

    totals: dict[_Terms, Stats] = {}
    for message in _messages(adding.items(), size, lambda job: None):
        totals |= _summed(group, distinct, known, message)
    return [
        totals[each] if group.rank in owners else _remote(known, each)
        for each, owners in zip(terms, needing, strict=True)
    ]


def _summed(
    group: Ranks,
    distinct: Sequence[Stats],
    known: Sequence[Sequence[_Outline]],
    jobs: Sequence[tuple[_Terms, set[int]]],
) -> dict[_Terms, Stats]:
    """Return the sums that this rank needs, once all ranks have exchanged their terms."""
    sent: list[tuple[Tensor, int]] = []
    received: list[tuple[Tensor, int]] = []
    for terms, owners in jobs:
        mine = distinct[terms[group.rank]]
        if mine.tokens:
            sent += [(x, to) for to in sorted(owners - {group.rank}) for x in _tensors(mine)]
        for rank, i in enumerate(terms):
            if group.rank in owners and rank != group.rank and not known[rank][i].is_empty:
                received += [(form.empty(), rank) for form in known[rank][i].forms]
    arrived = iter(group.exchange(sent, received))
    totals: dict[_Terms, Stats] = {}
    for terms, owners in jobs:
        if group.rank not in owners:
            continue
        every = [
            distinct[i] if rank == group.rank else known[rank][i].filled(arrived)
            for rank, i in enumerate(terms)
            if not known[rank][i].is_empty
        ]
        totals[terms] = functools.reduce(lambda a, b: a.merged(b), every) if every else Stats()
    return totals


def _remote(known: Sequence[Sequence[_Outline]], terms: _Terms) -> RemoteStats:
    """Return the facts of a sum that other ranks have."""
    outlines = [known[rank][i] for rank, i in enumerate(terms)]
    tokens = sum(each.facts["tokens"] for each in outlines)
    amax = max(each.facts["input_amax"] for each in outlines)
    collected = frozenset().union(*(each.collected for each in outlines))
    return RemoteStats(tokens=tokens, input_amax=amax, collected=collected)


def _fields(stats: Stats) -> dict[str, Any]:
    return {each.name: getattr(stats, each.name) for each in dataclasses.fields(stats)}


def _tensors(stats: Stats) -> list[Tensor]:
    return [each for each in _leaves(_fields(stats)) if isinstance(each, Tensor)]


def _leaves(facts: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values of facts, and of tuples in them, in order."""
    # Forms are tuples, too.
    todo = list(facts.values())[::-1]
    while todo:
        value = todo.pop()
        if type(value) is tuple:
            todo += value[::-1]
        else:
            yield value


def _mapped(value: Any, change: Any) -> Any:
    """Return a value with each leaf of its tuples changed."""
    return tuple(_mapped(each, change) for each in value) if type(value) is tuple else change(value)
