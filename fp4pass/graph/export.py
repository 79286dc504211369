"""Trace a whole model in one call, or write its graph in ATen operators alone.

The latter is for ONNX, TensorRT and ExecuTorch. Tables give the values of both codes of a byte and
of the scales; their products are the weights of a linear layer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ShapesCollection

from .._compat.torch import call_with_copies
from .._compat.transformers import HEADS, head_names
from .._compat.transformers_cache import CACHE, Decoder, has_plain_cache, is_decoder
from ..core.elements import element_table, scale_table
from ..core.formats import Format, get_format
from ..errors import OptionError, ShapeError, StateError, TraceError, expected

# Tokens in the cache of a decoder whose config allows more.
_LENGTH = 2048

# Errors of torch.export for models that it cannot trace, and of models while it does.
_FAILURES = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

# The arguments of the graph of a decoder.
_OF_DECODER = ("input_ids", "attention_mask")


def trace(
    model: nn.Module, example: Any, *, cache_length: int | None = None, plain: bool = False
) -> fx.GraphModule:
    """Return the graph of a whole model, made by torch.export with dynamic batch and length.

    `prepare`, `calibrate`, `smooth`, `convert` and `save` take it in place of the model, whose
    parameters it shares and whose names it keeps.

    The graph of a decoder-only model of transformers holds a static cache of keys and values, so
    that it generates: `graph(input_ids, attention_mask)` reads as many tokens from the cache as
    the mask is longer than the ids, and adds its own; without a mask it begins a text. It takes up
    to the rows of `example`, and gives no gradients.

    Args:
        model: Any module, in evaluation mode, its parameters on the devices where it runs.
        example: A batch as for `calibrate`, of two rows or more. Its values do not matter; what is
            no tensor is fixed.
        cache_length: The tokens that the cache holds, prompt included; 0 for no cache.
            By default what the model's config allows, up to 2048.
        plain: Write packed layers of a converted model as ATen operators alone, which decode the
            weights at each call. For ONNX, TensorRT and ExecuTorch, which lack fp4pass's operators.

    Returns:
        A graph module of ATen operators, in evaluation mode if the model is.

    Raises:
        TraceError: torch.export cannot trace the model, or `plain` an operator of a layer.
        ShapeError: The example has a batch of one.
        OptionError: cache_length is negative, or the model has no such cache.
        StateError: A decoder is in training mode.

    Example:
        >>> graph = fp4pass.convert(fp4pass.trace(model, (batches[0],)), method="sse")
        >>> graph(batches[0]).shape
        torch.Size([4, 32])
    """
    if not isinstance(model, nn.Module):
        raise OptionError(expected("model", "a torch.nn.Module", type(model).__name__))
    graph = _trace(model, example, cache_length)
    if plain:
        write_plain(graph)
    return graph


def trace_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """Return the graph of calls of one size, without a cache: in half the time of `trace`."""
    if "use_cache" in list(inspect.signature(model.forward).parameters)[len(args) :]:
        kwargs = {"use_cache": False, **kwargs}
    return _export(model, args, kwargs, Dim.STATIC, type(model).__name__)


def _trace(model: nn.Module, example: Any, cache_length: int | None) -> fx.GraphModule:
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example, Mapping):
        kwargs = dict(example)
    elif isinstance(example, tuple | list | Tensor):
        args = (example,) if isinstance(example, Tensor) else tuple(example)
    else:
        wanted = "a mapping, a tuple, a list or a tensor"
        raise OptionError(expected("example", wanted, type(example).__name__))
    if type(cache_length) not in (int, type(None)) or (cache_length or 0) < 0:
        raise OptionError(expected("cache_length", "a number of tokens or 0", cache_length))
    if cache_length != 0 and is_decoder(model):
        return _trace_decoder(model, _decoder_call(args, kwargs)[0], cache_length)
    if cache_length:
        raise OptionError(
            f"cache_length: {type(model).__name__} is no decoder-only model of transformers, so it "
            "has no cache. Leave it out."
        )
    parameters = inspect.signature(model.forward).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    # None, if some arguments have no names.
    names = names if len(names) >= len(args) else []
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    if "use_cache" in names:
        kwargs.setdefault("use_cache", False)
    for tensor in _tensors((args, kwargs)):
        if tensor.ndim and tensor.shape[0] == 1:
            raise ShapeError(
                f"example: expected at least 2 rows, got a tensor of {tuple(tensor.shape)}, whose "
                "batch torch.export would fix. Repeat its row."
            )
    graph = _export(model, args[len(names) :], kwargs, Dim.AUTO, type(model).__name__)
    fixed = {name: value for name, value in kwargs.items() if not list(_tensors(value))}

    return _called_through(functools.partial(_by_name, names, frozenset(kwargs), fixed), graph)


def _trace_decoder(model: Any, ids: Tensor, length: int | None) -> fx.GraphModule:
    """Return the graph of a model of transformers with its cache."""
    name = type(model).__name__
    if model.training:
        raise StateError(
            f"{name} is in training mode, where layers may skip the cache. Call model.eval() first."
        )
    if not has_plain_cache(model):
        raise OptionError(
            f"cache_length: {name} keeps other things of a text than keys and values. Trace it "
            "without a cache, cache_length=0."
        )
    if length is None:
        length = min(getattr(model.config, "max_position_embeddings", _LENGTH), _LENGTH)
    # torch.export fixes sizes that are 0, 1, equal or of the cache: one place stays empty.
    inputs = (ids.new_ones(2, 3), ids.new_ones(2, 7))
    decoder = Decoder(model, max(3, len(ids)), max(8, length, ids.shape[1]) + 1)
    with torch.no_grad():
        graph = _export(decoder, inputs, {}, Dim.DYNAMIC, name)
    _called_through(_fill_mask, graph)
    for rows, new, total in ((2, 3, 3), (1, 1, 5)):
        try:
            graph(ids.new_ones(rows, new), ids.new_ones(rows, total))
        except _FAILURES as error:
            raise _error(name, error) from error
    return graph


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Any, name: str
) -> fx.GraphModule:
    """Return the graph of a call, with a dimension of a kind for rows and columns of tensors."""
    shapes = ShapesCollection()
    for tensor in _tensors((args, kwargs)):
        shapes[tensor] = dict.fromkeys(range(min(2, tensor.ndim)), kind)
    try:
        dynamic = shapes.dynamic_shapes(model, args, kwargs)
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic, strict=False)
    except _FAILURES as error:
        raise _error(name, error) from error
    graph = program.module()
    assert isinstance(graph, fx.GraphModule)
    graph.meta[HEADS] = head_names(model)
    # It has no train() or eval(): what depends on them is fixed.
    for module in graph.modules():
        module.training = model.training
    return graph


def _called_through(before: Callable[..., Any], graph: fx.GraphModule) -> fx.GraphModule:
    """Have a graph, and its copies, called with what `before` makes of the arguments."""
    register = functools.partial(_register, before)
    register(graph)
    call_with_copies(graph, register)
    return graph


def _register(before: Callable[..., Any], module: nn.Module) -> None:
    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def _error(name: str, error: Exception) -> TraceError:
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    return TraceError(
        f"{name}: torch.export cannot trace it for every batch and length: {first}\nPass the model "
        "itself to fp4pass.prepare and fp4pass.convert, which need no graph, or the module of a "
        "torch.export of your own."
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _by_name(
    names: list[str],
    traced: frozenset[str],
    fixed: Mapping[str, Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Name the arguments before a graph is called, and add those that are no tensors."""
    named = {**fixed, **dict(zip(names, args, strict=False)), **kwargs}
    if named.keys() != traced:
        takes, got = (", ".join(sorted(each)) or "no names" for each in (traced, named))
        raise OptionError(
            f"The graph takes what its example had, {takes}, got {got}. Trace the model with such "
            "an example."
        )
    return args[len(names) :], named


def _fill_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a mask before the graph of a decoder where there is none, and check the sizes."""
    ids, mask = _decoder_call(args, kwargs)
    mask = torch.ones_like(ids) if mask is None else mask
    memory = module.get_buffer(f"{CACHE}.keys_0")
    rows, length = memory.shape[0], memory.shape[2] - 1
    if ids.shape[0] > rows or mask.shape[1] > length:
        raise ShapeError(
            f"The cache of the graph holds {rows} rows of {length} tokens, got {ids.shape[0]} of "
            f"{mask.shape[1]}. Trace it with an example of more rows, or a larger cache_length."
        )
    return (ids, mask), {}


def _decoder_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the ids and the mask of a call."""
    given = {**dict(zip(_OF_DECODER, args, strict=False)), **kwargs}
    if len(args) > 2 or not {"input_ids"} <= given.keys() <= set(_OF_DECODER):
        raise OptionError(
            f"The graph of a decoder takes input_ids and attention_mask, got {', '.join(given)}. "
            "With cache_length=0 it takes what the model does."
        )
    return given["input_ids"], given.get("attention_mask")


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
