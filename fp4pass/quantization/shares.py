"""What several processes searched of one weight, brought together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.formats import get_format
from ..core.quant_state import QuantState
from ..distributed import Ranks, shared_tensors
from ..methods import Certificate, MethodResult
from .plan import LayerPlan

# What becomes of a matrix, or rows of it, and its squared errors, part by part.
Found = tuple[MethodResult, list[list[float]]]


def gathered(
    group: Ranks, weights: Sequence[LayerPlan], own: Mapping[int, list[Found]]
) -> dict[int, list[Found]]:
    """Return what was found of each weight, by its key; to its owner if nobody shares it.

    Args:
        group: the ranks, which all make the call.
        weights: a layer of each.
        own: what this rank found.
    """
    found = dict(own)
    shares = [
        (layer.weight_key, rank)
        for layer in weights
        if layer.is_shared
        for rank in dict.fromkeys(layer.searchers)
    ]
    sent = {i: _sent(own[key]) for i, (key, rank) in enumerate(shares) if rank == group.rank}
    received = shared_tensors(group, sent, [rank for _, rank in shares]) if shares else []
    found |= {key: [] for key, _ in shares}
    for (key, _), (facts, tensors) in zip(shares, received, strict=True):
        found[key] += _received(facts, tensors)
    return found


def _sent(parts: Sequence[Found]) -> tuple[list[Any], dict[str, Tensor | None]]:
    """Return the plain values and the tensors of what was found."""
    facts: list[Any] = []
    tensors: dict[str, Tensor | None] = {}
    for i, (result, squares) in enumerate(parts):
        state, proof = result.state, result.certificate
        facts.append((squares, state.global_scale, state.format.key, state.shape, state.dtype))
        tensors |= {f"{i}.qdata": state.qdata, f"{i}.scale": state.scale}
        tensors[f"{i}.loss"] = None if proof is None else proof.loss
        tensors[f"{i}.bound"] = None if proof is None else proof.bound
    return facts, tensors


def _received(facts: Sequence[Any], tensors: Mapping[str, Any]) -> list[Found]:
    """Return what `_sent` was given."""
    found: list[Found] = []
    for i, (squares, global_scale, key, shape, dtype) in enumerate(facts):
        packed = tensors[f"{i}.qdata"], tensors[f"{i}.scale"]
        state = QuantState(*packed, global_scale, get_format(key), shape, dtype)
        loss, bound = tensors[f"{i}.loss"], tensors[f"{i}.bound"]
        found.append(
            (MethodResult(state, None if loss is None else Certificate(loss, bound)), squares)
        )
    return found


def joined_rows(results: Sequence[MethodResult]) -> MethodResult:
    """Return what becomes of a matrix, given its rows."""
    states = [result.state for result in results]
    qdata, scale = (torch.cat([getattr(s, name) for s in states]) for name in ("qdata", "scale"))
    shape = (len(qdata), states[0].shape[1])
    return MethodResult(dataclasses.replace(states[0], qdata=qdata, scale=scale, shape=shape))


def state_rows(state: QuantState, start: int, count: int) -> QuantState:
    """Return some rows of a quantized matrix."""
    qdata, scale = (each[start : start + count] for each in (state.qdata, state.scale))
    shape = (len(qdata), state.shape[1])
    return dataclasses.replace(state, qdata=qdata, scale=scale, shape=shape)
