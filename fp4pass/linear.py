"""The quantized linear layer: what it computes, and the module that does."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from . import ops
from .config import LinearConfig
from .core.quant_state import QuantState
from .input_cache import compute_once
from .packed_linear import PackedLinear, become, code_bits, scale_bits

# The compressed-tensors names of what replaces a parameter called `weight`.
PACKED, SCALE = "weight_packed", "weight_scale"
GLOBAL, INPUT_GLOBAL = "weight_global_scale", "input_global_scale"

# On a tensor: its copy on the device that the layers with it moved to.
_MOVED_TO = "_fp4pass_moved_to"

# What a reader calls them.
KINDS = {
    PACKED: "packed codes",
    SCALE: "block scales",
    GLOBAL: "global scales",
    INPUT_GLOBAL: "global scales of inputs",
}


class StoredWeight(NamedTuple):
    """The tensors of a packed weight and of its input, as a linear layer has them."""

    packed: Any  # uint8 [N, P], packed codes
    scale: Any  # uint8 [N, K / block], the bits of the block scales
    global_scale: Any  # float32 [1] as it is stored, or None
    input_global_scale: Any  # the same for the input


# Gives what a function returns, by the name of what that is.
Once = Callable[[str, Callable[[], Any]], Any]


def _compute(what: str, compute: Callable[[], Any]) -> Any:
    return compute()


def needs_dynamic_scale(weight: StoredWeight, config: LinearConfig) -> bool:
    """Return whether each input gets a global scale by its own amax."""
    has_scale = config.weight_only or weight.input_global_scale is not None
    return config.format.has_global_scale and not has_scale


def quantize_input(x: Any, weight: StoredWeight, config: LinearConfig) -> tuple[Any, Any, Any]:
    """Quantize an input [..., K], or a proxy of it in a graph, as a linear layer does.

    Return the packed codes [..., P] and scale bits [..., K / block], both uint8, and the global
    scale, which is that of calibration if there is one.
    """
    key, rotation = config.format.key, config.input_rotation
    global_scale = weight.input_global_scale
    if needs_dynamic_scale(weight, config):
        global_scale = ops.dynamic_global_scale(ops.rotate(x, rotation) if rotation else x, key)
    if rotation:
        packed, scale = ops.rotate_quantize(
            x, rotation, global_scale, key, config.activation_scales
        )
    else:
        packed, scale = ops.quantize(x, global_scale, key, config.activation_scales)
    return packed, scale, global_scale


def quantized_linear(
    x: Any, weight: StoredWeight, bias: Any, config: LinearConfig, once: Once = _compute
) -> Any:
    """Compute a linear layer with a packed weight: x W^T + bias, [..., N] in the dtype of x.

    This is the one definition: modules run it, and graph passes trace it with a proxy as x [...,
    K]. What layers that read x may share is computed through `once`, named "rotate" or "quantize".
    """
    stored = (weight.packed, weight.scale, weight.global_scale)
    key, rotation = config.format.key, config.input_rotation
    if config.weight_only:
        rotated = once("rotate", lambda: ops.rotate(x, rotation)) if rotation else x
        return ops.call(ops.linear, rotated, *stored, bias, key, config.compute)
    packed, scale, global_scale = once("quantize", lambda: quantize_input(x, weight, config))
    activations = (x, packed, scale, global_scale)
    return ops.call(
        ops.linear_quantized, *activations, *stored, bias, key, rotation, config.compute
    )


class PackedBlocks(PackedLinear):
    """What keeps packed blocks and their scales, in buffers with names of compressed-tensors."""

    packed_buffers = (PACKED, SCALE, GLOBAL, INPUT_GLOBAL)
    # Whether this process has a part (`fp4pass.parallel`).
    is_split: ClassVar[bool] = False

    config: LinearConfig
    weight_dtype: torch.dtype  # of the dense weight
    weight_packed: Tensor  # uint8 [N, P]
    weight_scale: Tensor  # [N, K / block] in the dtype of the scale
    # float32 [1]: 1 / global_scale, or global_scale itself where `config.multiplies`; None for
    # formats without one. That of the input is None unless calibrated.
    weight_global_scale: Tensor | None
    input_global_scale: Tensor | None

    @property
    def packed_weight(self) -> StoredWeight:
        """The buffers as the operators take them."""
        # Asking the module for each takes as long as a small product.
        known = self._buffers
        if PACKED not in known:
            known = {**known, **self._parameters}
        packed: Any = known[PACKED]
        scale: Any = known[SCALE]
        packed = packed if packed.dtype == torch.uint8 else code_bits(packed)
        scale = scale if scale.dtype == torch.uint8 else scale_bits(scale)
        return StoredWeight(packed, scale, known.get(GLOBAL), known.get(INPUT_GLOBAL))

    def weight_for(self, x: Tensor) -> StoredWeight:
        """Return the buffers to multiply an input by."""
        return self.packed_weight

    # FSDP2 of torch before 2.13 has packed tensors in another dtype than a state dict.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        dtypes = {PACKED: torch.uint8, SCALE: self.config.format.scale.storage}
        for name, dtype in dtypes.items():
            tensor = destination.get(prefix + name)
            if tensor is not None and tensor.dtype != dtype and tensor.itemsize == 1:
                destination[prefix + name] = tensor.view(dtype)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        views: dict[str, Any] = {}
        for name, own in self._parameters.items():
            given = state_dict.get(prefix + name)
            if name in self.packed_buffers and own is not None and isinstance(given, Tensor):
                is_cast = given.dtype != own.dtype and given.itemsize == own.itemsize
                views[prefix + name] = given.view(own.dtype) if is_cast else given
        whole = ChainMap(views, state_dict) if views else state_dict  # type: ignore[arg-type]
        super()._load_from_state_dict(whole, prefix, *args)


class QuantizedLinear(PackedBlocks):
    """A linear layer whose weight is packed blocks; its input may be quantized too.

    It is the object that was an nn.Linear (or transformers' Conv1D, then `transposed`), with its
    class swapped. Its buffers have the names of compressed-tensors.
    """

    packed_attributes: ClassVar[tuple[str, ...]] = ("config", "weight_dtype", "transposed")
    # Whether the bias is added to the product: a part of the columns has a part of the sum.
    adds_bias: ClassVar[bool] = True

    transposed: bool  # the dense weight is [K, N]
    bias: Tensor | None  # [N]

    @property
    def weight(self) -> Tensor:
        """The dense weight, dequantized to the dtype and shape that the layer had.

        Each access makes a new tensor: writing to it, as torch.nn.init does, changes no layer.
        """
        if self.config.is_rotated:
            stored = self.stored_weight(torch.float32)
            dense = self.config.restored(stored).to(self.weight_dtype)
        else:
            dense = self.stored_weight(self.weight_dtype)
        return dense.t() if self.transposed else dense

    def stored_weight(self, dtype: torch.dtype) -> Tensor:
        """Return what the codes stand for [N, K]: the weight as `LinearConfig.stored` has it."""
        packed, scale, global_scale, _ = self.packed_weight
        return ops.dequantize(packed, scale, global_scale, self.config.format.key, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + bias [..., N] for x [..., K], in x's dtype or in autocast's."""
        x, config = self.checked_input(input), self.config
        weight = self.weight_for(x)

        def once(what: str, compute: Callable[[], Any]) -> Any:
            if what == "rotate" and x.requires_grad and torch.is_grad_enabled():
                return compute()
            scale = weight.input_global_scale
            is_dynamic = needs_dynamic_scale(weight, config)
            key = (what, *config.input_key, is_dynamic, x.dtype)
            return compute_once(input, key, self, compute, scale)

        return quantized_linear(x, weight, self.bias if self.adds_bias else None, config, once)

    def extra_repr(self) -> str:
        """Return the sizes and how the layer is quantized, for print(model)."""
        folded = " folded" if self.config.folded else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.config.label}{folded}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Move the buffers; layers that share one global scale of inputs go on sharing it."""
        old = self.input_global_scale
        super()._apply(fn, recurse)
        new = self.input_global_scale
        if old is not None and new is not None and new is not old:
            # The tensor that was shared says where it went, as long as a layer still has it.
            twin: Tensor | None = getattr(old, _MOVED_TO, None)
            if twin is not None and _equal(twin, new):
                self.input_global_scale = twin
            else:
                setattr(old, _MOVED_TO, new)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Write a shared scale as one of its own: writers of files refuse shared tensors."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        name = prefix + INPUT_GLOBAL
        if name in destination and not keep_vars:
            destination[name] = destination[name].clone()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Copy into a scale that layers share only while it stays the same for all."""
        own, new = self.input_global_scale, state_dict.get(prefix + INPUT_GLOBAL)
        if own is not None and isinstance(new, Tensor) and not _equal(own, new):
            self.input_global_scale = own.clone()
        super()._load_from_state_dict(state_dict, prefix, *args)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are on one device, not meta, and equal."""
    return a.device == b.device and a.device.type != "meta" and torch.equal(a, b)


def stored_tensors(
    states: Sequence[QuantState], input_global_scale: float | None, stacked: bool = False
) -> dict[str, Tensor | None]:
    """Return the buffers of a quantized weight, by their compressed-tensors names.

    If `stacked`, those of the experts whose weights are given; else that of one.
    """
    fmt, device = states[0].format, states[0].qdata.device

    def stored(global_scales: list[float]) -> Tensor | None:
        if not global_scales or not fmt.has_global_scale:
            return None
        numbers = list(map(fmt.global_scale_of, global_scales))
        return torch.tensor(numbers, dtype=torch.float32, device=device)

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts) if stacked else parts[0]

    return {
        PACKED: joined([state.qdata for state in states]),
        SCALE: joined([state.scale for state in states]).view(fmt.scale.storage),
        GLOBAL: stored([state.global_scale for state in states]),
        INPUT_GLOBAL: stored([] if input_global_scale is None else [input_global_scale]),
    }


def replace_linear(
    module: nn.Module,
    tensors: Mapping[str, Tensor | None],
    config: LinearConfig,
    *,
    weight_dtype: torch.dtype,
    transposed: bool,
) -> None:
    """Turn an nn.Linear or Conv1D into a QuantizedLinear, in place: the same object after."""
    packed: Any = tensors[PACKED]
    attributes = {
        "config": config,
        "out_features": packed.shape[0],
        "in_features": config.format.columns(packed.shape[1]),
        "weight_dtype": weight_dtype,
        "transposed": transposed,
    }
    become(module, QuantizedLinear, buffers=tensors, attributes=attributes)
