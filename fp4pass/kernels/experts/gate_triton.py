"""The gate between the products of experts, computed on the sums of the first."""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantize.triton import activate


@triton.jit
def gated(y, BN: tl.constexpr, BM: tl.constexpr, GATE: tl.constexpr):
    """Return the gate [BN / 2, BM] of float32 sums, in eights of gates and of their factors."""
    y = tl.permute(tl.reshape(y, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
    gate, up = tl.split(tl.reshape(y, (BN // 2, BM, 2)))
    if GATE.limit is not None:
        gate = tl.minimum(gate, GATE.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, GATE.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -GATE.limit, propagate_nan=tl.PropagateNan.ALL)
    ACTIVATION: tl.constexpr = GATE.activation
    active = activate((gate * GATE.slope,), ACTIVATION, tl.float32)[0]
    return active * (1.0 / GATE.slope) * (up + GATE.shift)
