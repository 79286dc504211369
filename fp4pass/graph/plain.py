"""Write a graph in ATen operators alone, with packed weights.

For ONNX, TensorRT and ExecuTorch. Tables give the values of both codes of a byte and of the scales;
their products are the weights of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..core.elements import element_table, scale_table
from ..core.formats import Format, get_format
from ..errors import TraceError

_ATEN, _OURS = torch.ops.aten, torch.ops.fp4pass


class _Writer:
    """Writes nodes of ATen operators before one node of a graph."""

    def __init__(self, root: fx.GraphModule, node: fx.Node) -> None:
        self.root, self.node, self.call = root, node, root.graph.call_function

    def table(self, name: str, make: Callable[[], Tensor]) -> fx.Node:
        """Return a buffer of the graph, made once."""
        name = f"fp4pass_{name}"
        if name not in self.root._buffers:
            self.root.register_buffer(name, make())
        return self.root.graph.get_attr(name)

    def looked_up(self, table: fx.Node, index: fx.Node, shape: Sequence[int]) -> fx.Node:
        """Return the rows of a table [n, ...] at indices, in a shape."""
        flat = self.cast(self.call(_ATEN.view.default, (index, [-1])), torch.int64)
        rows = self.call(_ATEN.index_select.default, (table, 0, flat))
        return self.call(_ATEN.view.default, (rows, list(shape)))

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.call(_ATEN._to_copy.default, (x,), {"dtype": dtype})

    def dequantized(
        self, packed: fx.Node, scale: fx.Node, global_scale: fx.Node | None, key: str,
        dtype: torch.dtype,
    ) -> fx.Node:  # fmt: skip
        """Return the weight [N, K] of packed codes [N, K / 2] and scale bits [N, K / block]."""
        fmt: Format = get_format(key)
        if fmt.element.bits != 4:
            raise TraceError(
                f"{self.node}: expected codes of 4 bits in a graph of plain operators, got "
                f"{fmt.key}. Choose nvfp4a16 or mxfp4a16."
            )
        device = _value(packed).device
        rows, pairs = _value(packed).shape

        def pairs_of_codes() -> Tensor:
            """Return the values of the two codes of each byte, [256, 2]."""
            values, byte = element_table(fmt.element, device), torch.arange(256, device=device)
            return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)

        both = self.table(f"values_{fmt.element.name}", pairs_of_codes)
        shape = (rows, 2 * pairs // fmt.block, fmt.block)
        values = self.looked_up(both, packed, shape)
        name = f"scales_{fmt.scale.storage}".replace("torch.", "").replace(".", "_")
        table = self.table(name, lambda: scale_table(fmt.scale, device))
        step = self.looked_up(table, scale, (*shape[:2], 1))
        if global_scale is not None:
            apply = _ATEN.mul.Tensor if fmt.multiplies else _ATEN.div.Tensor
            step = self.call(apply, (step, global_scale))
        dense = self.call(_ATEN.mul.Tensor, (values, step))
        return self.cast(self.call(_ATEN.view.default, (dense, [rows, 2 * pairs])), dtype)


def _value(node: Any) -> Tensor:
    found: Tensor = node.meta["val"]
    return found


def _linear(out: _Writer, *args: Any) -> fx.Node:
    x, packed, scale, global_scale, bias, key = args[:6]
    dtype = _value(x).dtype
    weight = out.dequantized(packed, scale, global_scale, key, dtype)
    if bias is not None and _value(bias).dtype != dtype:
        bias = out.cast(bias, dtype)
    return out.call(_ATEN.linear.default, (x, weight, bias))


_WRITTEN: dict[Any, Callable[..., fx.Node]] = {
    _OURS.linear.default: _linear,
    _OURS.dequantize.default: lambda out, *args: out.dequantized(*args[:5]),
}


def write_plain(root: fx.GraphModule) -> int:
    """Replace the operators of fp4pass by ATen ones; return their number, or raise TraceError."""
    graph, count = root.graph, 0
    for node in list(graph.nodes):
        if node.op != "call_function" or getattr(node.target, "namespace", "") != "fp4pass":
            continue
        if node.target not in _WRITTEN:
            raise TraceError(
                f"{node}: {node.target} has no form in plain operators: only linear layers with "
                "float inputs do. Convert to nvfp4a16 or mxfp4a16, and leave experts out by "
                "rules=[('*.experts.*', None)], or trace without plain=True."
            )
        with graph.inserting_before(node):
            new = _WRITTEN[node.target](_Writer(root, node), *node.args, *node.kwargs.values())
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        count += 1
    # The graph holds scales as bytes, where it reads the bits of floats of 8 bits.
    for node in graph.find_nodes(op="call_function", target=_ATEN.view.dtype):
        source, dtype = node.args
        if dtype != torch.uint8 or source.op != "get_attr" or len(source.users) > 1:
            continue
        path, _, name = str(source.target).rpartition(".")
        owner = root.get_submodule(path)
        stored = owner.get_buffer(name)
        if stored.dtype.itemsize == 1:
            owner.register_buffer(name, stored.view(torch.uint8))
            source.meta = dict(node.meta)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph.lint()
    root.recompile()
    return count
