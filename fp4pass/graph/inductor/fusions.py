"""The table of fusions: a pattern, a check, and the operator that replaces both nodes.

To fuse something else with its quantizer, write the operator (ops/activations.py), its formula here
as the nodes that Inductor makes of it, and an entry of FUSIONS.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ... import ops
from .fuse import Fusion, apply_fusions, is_like
from .pattern import Bound, Either, Narrow, Var, Wide, add, call, mul

aten = torch.ops.aten

X, UP, WEIGHT, BIAS, EPS, DIMS = map(Var, ("x", "up", "weight", "bias", "eps", "dims"))
WIDE = Wide(X)


def rms_norm() -> Any:
    """Llama's RMSNorm, which rounds before it multiplies by the weight."""
    square = Either((call(aten.pow.Tensor_Scalar, WIDE, 2), mul(WIDE, WIDE)))
    mean = call(aten.mean.dim, square, DIMS, True)
    return mul(Narrow(mul(WIDE, call(aten.rsqrt.default, add(mean, EPS)))), WEIGHT)


def _layer_norm(weight: bool, bias: bool) -> Any:
    """F.layer_norm, with a weight and a bias or without."""
    both = call(aten.var_mean.correction, WIDE, DIMS)
    variance, mean = (call(operator.getitem, both, i) for i in range(2))
    inverse = call(aten.rsqrt.default, add(variance, EPS))
    result = mul(call(aten.sub.Tensor, WIDE, mean), inverse)
    if weight:
        result = mul(result, Either((WEIGHT, Wide(WEIGHT))))
    if bias:
        result = add(result, Either((BIAS, Wide(BIAS))))
    return Narrow(result)


def _silu() -> Any:
    by_exp = call(
        aten.div.Tensor, WIDE, add(call(aten.exp.default, call(aten.neg.default, WIDE)), 1)
    )
    by_sigmoid = mul(WIDE, call(aten.sigmoid.default, WIDE))
    return Narrow(Either((by_exp, by_sigmoid)))


def _gelu() -> Any:
    erf = call(aten.erf.default, mul(WIDE, 0.7071067811865476))
    return Narrow(mul(mul(WIDE, 0.5), add(erf, 1)))


def _gelu_by_tanh(x: Any, cube: Any) -> Any:
    inner = mul(add(x, mul(cube, 0.044715)), 0.7978845608028654)
    return mul(mul(x, 0.5), add(call(aten.tanh.default, inner), 1))


def _is_norm(source: fx.Node, bound: Bound) -> bool:
    """Return whether a norm is one of the last dimension, with parameters of its size."""
    shape = source.meta["val"].shape
    if list(bound["dims"]) not in ([-1], [len(shape) - 1]) or not isinstance(bound["eps"], float):
        return False
    parameters = [bound[name] for name in ("weight", "bias") if name in bound]
    return is_like(bound["x"], source, shape) and all(
        is_like(each, source, shape[-1:]) for each in parameters
    )


def _is_activation(source: fx.Node, bound: Bound) -> bool:
    """Return whether the input, and the factor beside it, have the shape of the result."""
    shape = source.meta["val"].shape
    return all(is_like(bound[name], source, shape) for name in ("x", "up") if name in bound)


# By the names that `activate_quantize` takes.
ACTIVATIONS = {
    "silu": _silu(),
    "gelu": _gelu(),
    "gelu_tanh": Narrow(_gelu_by_tanh(WIDE, mul(mul(WIDE, WIDE), WIDE))),
    # GPT-2's, which rounds after every step.
    "gelu_new": _gelu_by_tanh(X, call(aten.pow.Tensor_Scalar, X, 3)),
}

FUSIONS = (
    Fusion(
        rms_norm(),
        _is_norm,
        ops.rms_norm_quantize,
        operands=(WEIGHT, EPS),
        of_sum=ops.add_rms_norm_quantize,
    ),
    *(
        Fusion(
            _layer_norm(weight, bias),
            _is_norm,
            ops.layer_norm_quantize,
            operands=(WEIGHT, BIAS, EPS),
            of_sum=ops.add_layer_norm_quantize,
        )
        for weight in (True, False)
        for bias in (True, False)
    ),
    *(
        Fusion(pattern, _is_activation, ops.activate_quantize, operands=(UP, name))
        for name, activation in ACTIVATIONS.items()
        for pattern in (mul(activation, UP), activation)
    ),
)


def on_gpu(node: fx.Node) -> bool:
    """Return whether a node gives a tensor on an NVIDIA GPU."""
    return node.meta["val"].device.type == "cuda"


def fuse_quantizers(graph: fx.Graph, eligible: Callable[[fx.Node], bool] = on_gpu) -> int:
    """Fuse norms and activations with the quantizers that alone read them, and count these."""
    return apply_fusions(graph, FUSIONS, eligible)
