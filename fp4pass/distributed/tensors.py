"""Tensors that one rank has and all are to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .ranks import Ranks

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
