"""The class that a converted linear gets, and what a stored weight looks like in a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .core.formats import Format, get_format
from .core.quant_state import QuantState
from .errors import ShapeError
from .input_cache import compute_once
from .kernels.rotate.reference import rotate_weight

# The compressed-tensors names of what replaces a parameter called `weight`.
PACKED, SCALE, GLOBAL, INPUT_GLOBAL = (
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "input_global_scale",
)

# What a reader calls them.
KINDS = {
    PACKED: "packed codes",
    SCALE: "block scales",
    GLOBAL: "global scales",
    INPUT_GLOBAL: "global scales of inputs",
}

# What a converted linear has beside its buffers, and a linear has not.
ATTRIBUTES = (
    "format_key",
    "weight_only",
    "activation_scales",
    "rotation",
    "folded",
    "output_rotation",
    "weight_dtype",
    "transposed",
)


@dataclass(frozen=True)
class Usage:
    """How a stored weight is used: its format's key, whether inputs stay in float, how the scales
    of their blocks are chosen if they do not, and how many columns are rotated together, 0 for
    none: inputs x D meet what is stored, which stands for W D (kernels/rotate). folded:
    inputs come rotated, from linears whose rows are rotated too, by output_rotation."""

    format_key: str
    weight_only: bool
    activation_scales: str = "naive"
    rotation: int = 0
    folded: bool = False
    output_rotation: int = 0

    @property
    def input_rotation(self) -> int:
        """The columns of inputs that the linear itself rotates together."""
        return 0 if self.folded else self.rotation

    def stored(self, weight: Tensor) -> Tensor:
        """A weight [N, K] as it is to be stored: in float32 if its rows or columns are rotated."""
        if self.output_rotation:
            weight = rotate_weight(weight.t(), self.output_rotation).t()
        return rotate_weight(weight, self.rotation) if self.rotation else weight

    def restored(self, stored: Tensor) -> Tensor:
        """The weight [N, K] that a stored one stands for, in float32."""
        rotate = torch.ops.fp4pass.rotate
        if self.rotation:
            stored = rotate(stored, self.rotation)
        if self.output_rotation:
            stored = rotate(stored.t(), self.output_rotation).t()
        return stored


class QuantizedLinear(nn.Module):
    """A linear whose weight is packed blocks: y = x W^T + bias, with x quantized too unless
    `weight_only`, with scales of blocks as `activation_scales` has them; both rotated before
    unless `rotation` is 0.

    It is the object that was an nn.Linear (or transformers' Conv1D, then `transposed`), with its
    class swapped. Buffers, as compressed-tensors stores them: `weight_packed` uint8 [N, P],
    `weight_scale` [N, K / block] in the scale's own dtype, `weight_global_scale` and, if
    calibrated, `input_global_scale`: float32 [1], each 1 / global scale, None for formats without.
    """

    in_features: int
    out_features: int
    format_key: str
    weight_only: bool
    activation_scales: str
    rotation: int
    folded: bool
    output_rotation: int
    transposed: bool
    weight_dtype: torch.dtype
    weight_packed: Tensor
    weight_scale: Tensor
    weight_global_scale: Tensor | None
    input_global_scale: Tensor | None
    bias: Tensor | None

    @property
    def format(self) -> Format:
        return get_format(self.format_key)

    @property
    def usage(self) -> Usage:
        return Usage(**{each.name: getattr(self, each.name) for each in dataclasses.fields(Usage)})

    @property
    def input_rotation(self) -> int:
        return 0 if self.folded else self.rotation

    @property
    def weight(self) -> Tensor:
        """The dense weight, dequantized to the dtype and shape that the layer had. Read-only."""
        if self.rotation or self.output_rotation:
            stored = self.stored_weight(torch.float32)
            dense = self.usage.restored(stored).to(self.weight_dtype)
        else:
            dense = self.stored_weight(self.weight_dtype)
        return dense.t() if self.transposed else dense

    def stored_weight(self, dtype: torch.dtype) -> Tensor:
        """What the codes stand for [N, K]: the weight as `Usage.stored` has it."""
        scale = self.weight_scale.view(torch.uint8)
        rest = (self.weight_global_scale, self.format_key, dtype)
        stored: Tensor = torch.ops.fp4pass.dequantize(self.weight_packed, scale, *rest)
        return stored

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., K] float. Returns [..., N] in its dtype, or autocast's where that is on."""
        if input.shape[-1] != self.in_features:
            raise ShapeError(
                f"The input of a linear has shape {tuple(input.shape)}; [..., {self.in_features}] "
                "is wanted."
            )
        x = _autocast(input)
        weight = (self.weight_packed, self.weight_scale.view(torch.uint8), self.weight_global_scale)
        rotation = self.input_rotation
        if self.weight_only:
            if rotation:
                x = self._rotate_once(input, x)
            return torch.ops.fp4pass.linear(x, *weight, self.bias, self.format_key)
        packed, scale, divisor = self._quantize_once(input, x)
        return torch.ops.fp4pass.linear_quantized(
            x, packed, scale, divisor, *weight, self.bias, self.format_key, rotation
        )

    def _quantize_once(self, input: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """`quantize_input(x)`, once for all layers that read `input`: x before autocast's cast."""
        is_dynamic = self.input_global_scale is None and self.weight_global_scale is not None
        how = (self.format_key, self.activation_scales, self.input_rotation, is_dynamic, x.dtype)
        return compute_once(
            input, how, self, lambda: self.quantize_input(x), also=self.input_global_scale
        )

    def _rotate_once(self, input: Tensor, x: Tensor) -> Tensor:
        """x rotated, once for all layers that read `input`."""
        rotation = self.input_rotation

        def rotate() -> Tensor:
            rotated: Tensor = torch.ops.fp4pass.rotate(x, rotation)
            return rotated

        if x.requires_grad and torch.is_grad_enabled():
            return rotate()
        return compute_once(input, ("rotate", rotation, x.dtype), self, rotate)

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The codes, scale bits and global divisor of x, rotated before if weights are."""
        ops, key, rotation = torch.ops.fp4pass, self.format_key, self.input_rotation
        divisor = self.input_global_scale
        if divisor is None and self.weight_global_scale is not None:
            divisor = ops.global_divisor(ops.rotate(x, rotation) if rotation else x, key)
        if rotation:
            quantized = ops.rotate_quantize(x, rotation, divisor, key, self.activation_scales)
        else:
            quantized = ops.quantize(x, divisor, key, self.activation_scales)
        return *quantized, divisor

    def extra_repr(self) -> str:
        activations = f"quantized input, {self.activation_scales} scales"
        activations = "weight_only" if self.weight_only else activations
        if self.rotation:
            activations += f", rotation {self.rotation}{' folded' if self.folded else ''}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.format_key}, {activations}"
        )

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, which cannot read float8 tensors back: the scale as its bits."""
        scale = {SCALE: self.weight_scale.view(torch.uint8)}
        return {**self.__dict__, "_buffers": {**self._buffers, **scale}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.weight_scale = self.weight_scale.view(self.format.scale.storage)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Let the stored bits move, but never be cast: fn sees them as uint8."""
        names = (PACKED, SCALE, GLOBAL, INPUT_GLOBAL)
        tensors = {n: each for n in names if (each := self._buffers.get(n)) is not None}
        moved = {}
        for name, tensor in tensors.items():
            moved[name] = moved_bits(tensor, fn)
        if INPUT_GLOBAL in moved:
            moved[INPUT_GLOBAL] = _stay_shared(tensors[INPUT_GLOBAL], moved[INPUT_GLOBAL])
        self._buffers.update(dict.fromkeys(moved))
        try:
            super()._apply(fn, recurse)
        except BaseException:
            self._buffers.update(tensors)
            raise
        self._buffers.update(moved)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """A scale that linears share is not written as one: what writes files would ask how."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        name = prefix + INPUT_GLOBAL
        if name in destination and not keep_vars:
            destination[name] = destination[name].clone()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """A scale that linears share is copied into only while it stays the same for all."""
        own, new = self.input_global_scale, state_dict.get(prefix + INPUT_GLOBAL)
        if own is not None and isinstance(new, Tensor) and not _equal(own, new):
            self.input_global_scale = own.clone()
        super()._load_from_state_dict(state_dict, prefix, *args)


def moved_bits(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """The same bits where fn, as given to Module._apply, takes them."""
    bits = tensor.view(torch.uint8)
    new = fn(bits)
    # `.type(dtype)` casts integers too.
    new = new if new.dtype == bits.dtype else bits.to(new.device)
    return tensor if new is bits else new.view(tensor.dtype)


# Where a scale that linears share went, while any of them still has the old one.
_MOVED = WeakTensorKeyDictionary()


def _stay_shared(old: Tensor, new: Tensor) -> Tensor:
    """What became of a scale: the tensor that the other linears which share it have by now."""
    twin = _MOVED.get(old)
    if new is old or (twin is not None and _equal(twin, new)):
        return old if new is old else twin
    _MOVED[old] = new
    return new


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are on one device, not meta, and equal."""
    return a.device == b.device and a.device.type != "meta" and torch.equal(a, b)


def is_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device; asking for that of meta is an error."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def _autocast(x: Tensor) -> Tensor:
    """x as autocast would pass it to a linear."""
    if is_autocast(x.device) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def stored_tensors(state: QuantState, input_global_scale: float | None) -> dict[str, Tensor | None]:
    """The buffers of a quantized weight, by their compressed-tensors names."""
    fmt, device = state.format, state.qdata.device

    def divisor(global_scale: float | None) -> Tensor | None:
        if global_scale is None or not fmt.has_global_scale:
            return None
        return torch.tensor([1.0 / global_scale], dtype=torch.float32, device=device)

    return {
        PACKED: state.qdata,
        SCALE: state.scale.view(fmt.scale.storage),
        GLOBAL: divisor(state.global_scale),
        INPUT_GLOBAL: divisor(input_global_scale),
    }


def become_quantized(
    module: nn.Module,
    tensors: Mapping[str, Tensor | None],
    usage: Usage,
    *,
    weight_dtype: torch.dtype,
    transposed: bool,
) -> None:
    """Turn an nn.Linear or Conv1D into a QuantizedLinear, in place: the same object after."""
    packed = tensors[PACKED]
    assert packed is not None
    del module.weight
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    module.__class__ = QuantizedLinear
    assert isinstance(module, QuantizedLinear)
    for name, value in dataclasses.asdict(usage).items():
        setattr(module, name, value)
    module.out_features = packed.shape[0]
    module.in_features = module.format.columns(packed.shape[1])
    module.weight_dtype = weight_dtype
    module.transposed = transposed
