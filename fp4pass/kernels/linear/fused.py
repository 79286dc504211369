"""Products and the gate behind them, in one launch for few rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...core.formats import Format
from ..common.tiles import LAUNCH, as_words, cdiv, overlapping
from .fused_triton import gate_kernel
from .reference import linear_gated_ref
from .tiling import TERMS
from .triton import group_tiles, linear_group_triton, multiply_few

# Columns of a program that multiplies what is there: measured on an H200.
_BLOCK = 1024


def linear_gated_triton(
    x: Tensor,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    activation: str,
    fmt: Format,
    compute: str = "input",
) -> Tensor:
    """Return the activation of one product times another (`linear_gated_ref`)."""
    weights = (packed, scale, global_scale, bias)
    if x.dtype not in TERMS:
        return linear_gated_ref(x, *weights, activation, fmt, compute)
    if len(packed) == 2:
        codes, scales, numbers, biases = weights
    else:
        codes, scales, numbers, biases = (_halves(each[0]) for each in weights)
    halves = (codes, scales, numbers, biases)
    # Programs read the codes and scales of both from one address each, which has to be aligned.
    aligned = all(each.data_ptr() % 16 == 0 for each in (*codes, *scales))
    tiles = group_tiles(x, x.dtype, *halves, fmt) if aligned else None
    # The kernel in Gluon has no gate.
    if tiles is not None and not tiles.in_gluon:
        out = x.new_empty((*x.shape[:-1], codes[0].shape[0]))
        # Launched early, the programs of the next product would not be spread evenly.
        tiles = replace(tiles, releases=False)
        few = (*halves, [out], x.dtype, fmt, tiles, activation)
        multiply_few(as_words(x), None, None, *few)
        return out
    products = linear_group_triton(x, *weights, fmt, compute)
    gate, up = products if len(products) == 2 else products[0].chunk(2, -1)
    return _multiply_gate(gate, up, activation)


def _halves(each: Any) -> Sequence[Any]:
    """Return the halves of the rows of a tensor; a global scale is that of both."""
    return (each, each) if each is None or each.numel() == 1 else each.chunk(2)


def _multiply_gate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return the activation of a gate [..., N] times its factor, both in rows of N or 2 N."""
    out = gate.new_empty(gate.shape)
    n = gate.shape[-1]
    if rows := gate.numel() // max(n, 1):
        gate_kernel[(rows, cdiv(n, _BLOCK))](
            gate, up, out, n, gate.reshape(rows, n).stride(0), up.reshape(rows, n).stride(0),
            ACTIVATION=activation, BLOCK=_BLOCK, **LAUNCH, **overlapping(gate.device, False),
        )  # fmt: skip
    return out
