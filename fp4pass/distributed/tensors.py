"""Tensors that one rank has and all are to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .ranks import Ranks, is_sharded

# Names and tensors, some of which are not there.
Tensors = Mapping[str, Tensor | None]

# Of a tensor: shape, dtype and the kind of its device.
Form = tuple[tuple[int, ...], torch.dtype, str]


def form_of(tensor: Tensor) -> Form:
    """Return what another rank has to know of a tensor to receive it."""
    return tuple(tensor.shape), tensor.dtype, tensor.device.type


def empty(form: Form) -> Tensor:
    """Return a tensor of a form, on the device that this rank computes on."""
    shape, dtype, kind = form
    return torch.empty(shape, dtype=dtype, device=kind)


def shared_tensors(group: Ranks, own: Mapping[int, Any], owners: Sequence[int]) -> list[Any]:
    """Return what every rank made, in order, on all of them.

    Args:
        group: the ranks.
        own: of this rank, by its place: a pair of plain values and tensors by name.
        owners: the rank that made each.
    """
    if group.size == 1:
        return [own[i] for i in range(len(owners))]
    plain = {i: (facts, _forms(tensors)) for i, (facts, tensors) in own.items()}
    known: dict[int, Any] = {}
    for each in group.gather(plain):
        known |= each
    found = []
    for i, owner in enumerate(owners):
        facts, forms = known[i]
        mine = own[i][1] if i in own else {}
        tensors = {
            name: None if form is None else group.broadcast(_own(mine, name, form), owner)
            for name, form in forms.items()
        }
        found.append((facts, tensors))
    return found


def _forms(tensors: Tensors) -> dict[str, Form | None]:
    return {name: None if each is None else form_of(each) for name, each in tensors.items()}


def _own(mine: Tensors, name: str, form: Form) -> Tensor:
    found = mine.get(name)
    return empty(form) if found is None else found


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
    sharded = DTensor.from_local(
        bits, tensor.device_mesh, tensor.placements, run_check=False, **layout
    )
    return sharded.full_tensor().view(local.dtype)
