"""Passes that have compiled code round where eager does on a CPU (docs/graphs.md)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ..match import target_name

SOFTMAX = torch.ops.fp4pass.softmax.default

# Decomposed by Inductor into steps that round otherwise than the kernel does. By what Dynamo
# calls, or the name of the method: the operator that is that kernel and stays whole.
WHOLE: dict[Any, Any] = {
    F.layer_norm: torch.ops.fp4pass.layer_norm.default,
    F.gelu: torch.ops.fp4pass.gelu.default,
    F.softmax: SOFTMAX,
    torch.softmax: SOFTMAX,
    "softmax": SOFTMAX,
}


def quantizes(graph: fx.Graph) -> bool:
    """Whether a graph quantizes activations: only there does an ulp decide a code."""
    return any(target_name(node) == "fp4pass::quantize" for node in graph.nodes)


def keep_whole(graph: fx.Graph) -> int:
    """Keep Inductor from decomposing the operators of WHOLE on a CPU."""
    if not quantizes(graph):
        return 0
    if torch.is_autocast_enabled("cpu") or any("autocast" in str(n.target) for n in graph.nodes):
        # Autocast has rules for the functions that it does not have for these operators.
        return 0
    changed = 0
    for node in graph.nodes:
        if node.op in ("call_function", "call_method") and node.target in WHOLE and on_cpu(node):
            if "out" in node.kwargs:
                continue
            if WHOLE[node.target] is SOFTMAX and not isinstance(_softmax_dim(node), int):
                continue
            node.op, node.target = "call_function", WHOLE[node.target]
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "_stacklevel"}
            changed += 1
    return changed


def _softmax_dim(node: fx.Node) -> Any:
    """The dimension of a softmax; None where it is left out, or hidden in an unusual call."""
    if len(node.args) > 2 and node.target is F.softmax:
        # It has a private argument in the third place.
        return None
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")


def run_eager_kernels(graph: fx.Graph) -> int:
    """Have ATen compute on a CPU what Inductor would in another order or by other functions.

    A step of a decomposed operator is left to Inductor: ATen's kernel for the step need not round
    as the kernel of the operator does.
    """
    changed = 0
    for node in graph.nodes if quantizes(graph) else ():
        whole = str(node.target) == str(node.meta.get("original_aten", node.target))
        if target_name(node).startswith("aten::") and whole and on_cpu(node) and not alias(node):
            changed += "should_fallback" not in node.meta
            node.meta["should_fallback"] = True
            _name_numbers(node)
    return changed


def _name_numbers(node: fx.Node) -> None:
    """Call the overload for numbers, where a number stands for the second tensor.

    It is the same kernel. AOTInductor passes tensors only where the schema says tensor.
    """
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    if len(node.args) > 1 and isinstance(node.args[1], int | float):
        if node.target is getattr(packet, "Tensor", None) and hasattr(packet, "Scalar"):
            node.target = packet.Scalar


def alias(node: fx.Node) -> bool:
    """Whether an operator returns or changes the memory of its input."""
    schema = node.target._schema  # type: ignore[union-attr]
    return schema.is_mutable or any(each.alias_info for each in schema.returns)


def on_cpu(node: fx.Node) -> bool:
    """Whether a node gives a floating point tensor on the CPU."""
    value = node.meta.get("val", node.meta.get("example_value"))
    return isinstance(value, Tensor) and value.is_floating_point() and value.device.type == "cpu"
