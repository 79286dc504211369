"""Quantize one model on several processes: find them, assign work to them, exchange tensors."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import RankError, StateError
from .methods import Stats

Value = TypeVar("Value")

# A process waits for others so long: for searches of a part that is larger, or for a folder.
_PATIENCE = timedelta(hours=2)

# They come to a call of fp4pass together but for the batches that each has run before it.
_ARRIVAL = timedelta(minutes=30)


@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes that quantize one model; all of them make every call, in one order."""

    rank: int = 0
    size: int = 1
    group: Any = None  # of Gloo
    # Where tensors of a GPU go as they are.
    has_nccl: bool = False

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, by rank. Raises RankError if one has ended."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, value, group=self.group)
        except RuntimeError as error:
            raise RankError(
                f"Rank {self.rank}: another process has ended, or did not make the same call of "
                f"fp4pass within {_PATIENCE}. Its own error says why. ({_last_line(error)})"
            ) from error
        return found

    def require_equal(self, what: str, value: object) -> None:
        """Raise StateError on every rank unless all have an equal value."""
        found = self.gather(value)
        others = [str(rank) for rank, each in enumerate(found) if each != found[0]]
        if others:
            raise StateError(
                f"{what} is not the same in all processes: rank {', '.join(others)} has another "
                "than rank 0. Every process prepares and converts the same whole model with the "
                "same options, before it is split or sharded; only the batches differ."
            )

    def arrive(self) -> None:
        """Wait for all ranks to make a call. Raises RankError that says which did not."""
        if self.size == 1:
            return
        try:
            dist.monitored_barrier(self.group, timeout=_ARRIVAL)
        except RuntimeError as error:
            raise RankError(
                f"Not all processes made this call of fp4pass within {_ARRIVAL}, or one has ended: "
                f"make it in every one, not only in the first. ({_last_line(error)})"
            ) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Have an error of one rank end all: with RankError, the rank itself with its own."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            self.gather(f"{type(error).__name__}: {error}")
            raise
        for rank, message in enumerate(self.gather(None)):
            if message is not None:
                raise RankError(f"Rank {rank} failed: {message}")

    @contextmanager
    def first_alone(self) -> Iterator[bool]:
        """Yield whether this rank works for all, who wait for it; an error of it ends all."""
        with self.together():
            yield self.rank == 0

    def exchange(
        self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]
    ) -> list[Tensor]:
        """Send tensors to other ranks, and fill and return those that others send, all at once."""
        # Each stands with the other rank. Two ranks name theirs in one order.
        raw = [(self._bytes(tensor), rank) for tensor, rank in received]
        calls: list[tuple[Any, Tensor, int]] = [(dist.irecv, *each) for each in raw]
        calls += [(dist.isend, self._bytes(tensor), rank) for tensor, rank in sent]
        counts: Counter[tuple[Any, int]] = Counter()
        waiting: dict[str, list[dist.P2POp]] = {}
        for call, each, rank in calls:
            # Gloo tells messages of a rank by a tag of their own.
            tag = counts[call, rank]
            counts[call, rank] += 1
            if each.numel():
                operation = dist.P2POp(call, each, rank, self._group_of(each.device), tag)
                waiting.setdefault(each.device.type, []).append(operation)
        for _, operations in sorted(waiting.items()):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return [
            each.to(like.device).view(like.dtype).view(like.shape)
            for (each, _), (like, _) in zip(raw, received, strict=True)
        ]

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of one rank, of which others have shape, dtype and device."""
        out = tensor.contiguous()
        if not out.numel():
            return out
        raw = self._bytes(out)
        dist.broadcast(raw, source, group=self._group_of(out.device))
        return raw.to(out.device).view(out.dtype).view(out.shape)

    def _bytes(self, tensor: Tensor) -> Tensor:
        # For not every backend knows every dtype.
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return raw if raw.is_cuda and self.has_nccl else raw.cpu()

    def _group_of(self, device: torch.device) -> Any:
        return None if device.type == "cuda" and self.has_nccl else self.group


# A process that is alone.
ONE = Ranks()

# The last default group, and what was made of it.
_KNOWN: list[tuple[Any, Ranks]] = []


def ranks() -> Ranks:
    """Return the ranks of the process group, one without any; the first call is made by all."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return ONE
    default = dist.group.WORLD
    if not _KNOWN or _KNOWN[0][0] is not default:
        # Objects go over a group of its own, whatever backend tensors use.
        try:
            group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        except RuntimeError as error:
            raise RankError(f"Not all processes came here: {_last_line(error)}") from error
        has_nccl = "nccl" in str(dist.get_backend_config())
        found = Ranks(dist.get_rank(), dist.get_world_size(), group, has_nccl)
        _KNOWN[:] = [(default, found)]
    return _KNOWN[0][1]


def _last_line(error: Exception) -> str:
    """Return the end of what torch says, which is the cause."""
    return str(error).strip().rpartition("\n")[2][:200]


def require_initialized() -> None:
    """Raise StateError where several processes run that do not know of each other."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size in ("", "1") or not dist.is_available() or dist.is_initialized():
        return
    raise StateError(
        f"WORLD_SIZE is {size}, but torch.distributed is not initialized: each process would "
        "calibrate by its own batches, and get other codes. Call "
        "torch.distributed.init_process_group() first, or unset WORLD_SIZE."
    )


def sharded_parameter(model: nn.Module) -> str | None:
    """Return the name of a parameter that is a DTensor: that of several processes."""
    named = model.named_parameters()
    return next((name for name, each in named if is_sharded(each)), None)


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, of which processes have parts."""
    # Importing it takes a second, and a caller with a DTensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def divide(jobs: Sequence[tuple[float, Sequence[float]]], size: int) -> list[tuple[int, ...]]:
    """Assign the parts of jobs to ranks, the largest first, to the rank with the least work."""
    # jobs: a cost for each rank that does a part of a job, and the costs of its parts. Those of
    # several parts come last, and are taken apart where all are done earlier so.
    apart, latest = _assigned(jobs, size)
    whole, latest_whole = _assigned([(first, [sum(parts)]) for first, parts in jobs], size)
    if latest < latest_whole:
        return apart
    return [owners * len(parts) for owners, (_, parts) in zip(whole, jobs, strict=True)]


def _assigned(
    jobs: Sequence[tuple[float, Sequence[float]]], size: int
) -> tuple[list[tuple[int, ...]], float]:
    """Assign each part of each job to a rank; return the ranks, and the work of the busiest."""
    costs = [first + sum(parts) for first, parts in jobs]
    fair = sum(costs) / size
    loads = [0.0] * size
    found: list[tuple[int, ...]] = [()] * len(jobs)
    for job in sorted(range(len(jobs)), key=lambda i: (len(jobs[i][1]) > 1, -costs[i], i)):
        first, parts = jobs[job]
        counts: dict[int, int] = {}
        for part in parts:
            with_first = [
                load + (0.0 if rank in counts else first) for rank, load in enumerate(loads)
            ]
            # A rank that has begun goes on while there is room.
            rank = next(reversed(counts), None)
            if rank is None or loads[rank] + part > fair:
                rank = with_first.index(min(with_first))
            loads[rank] = with_first[rank] + part
            counts[rank] = counts.get(rank, 0) + 1
        found[job] = tuple(rank for rank, count in counts.items() for _ in range(count))
    return found, max(loads)


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
    """Return the results of every rank, in order, on all of them."""
    # own: of this rank, by place: a pair of plain values and tensors by name. owners: all ranks.
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
    """Return a state dict whose sharded tensors the first rank has whole, on the CPU."""
    # Each rank makes the call. ties: names that stand for another, and get its tensor again.
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
    """Facts of statistics that another rank has."""

    collected: frozenset[str] = frozenset()  # the names of those

    def has(self, need: str) -> bool:
        """Return whether a statistic was collected."""
        return need in self.collected


# Of each rank, the number of the statistics that a weight has there.
_Terms = tuple[int, ...]


def summed_statistics(
    group: Ranks, local: Sequence[Stats], needing: Sequence[Sequence[int]], needs: Sequence[str]
) -> list[Stats]:
    """Return the sums over all ranks: each where it is needed, and its facts elsewhere."""
    # Terms are added in the order of the ranks, so that a number of ranks has the same sums in
    # every run. Weights that have one object of statistics on each rank have one sum. local: of
    # weights that this rank saw. needing: the ranks that need, and add up, each. needs: all names.
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
