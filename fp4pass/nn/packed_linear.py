"""The base class of linear layers whose weight is kept as packed buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import is_sharded
from ..errors import DtypeError, ShapeError, StateError, TraceError, expected
from ..ops.checks import require_dense
from .packed_state import CAPTURE, PackedState


class PackedLinear(PackedState):
    """A linear layer whose weight is kept as packed buffers.

    A subclass computes `weight` from them when it is read, and `forward` from `checked_input`.
    """

    in_features: int  # K
    out_features: int  # N

    def checked_input(self, input: Tensor) -> Tensor:
        """Return a dense input [..., K] with values, cast by autocast as a linear layer's is."""
        if type(input) is not Tensor:
            self._require_own_tensor(input)
        if input.is_nested or input.layout is not torch.strided:
            require_dense(self._input_name, input)
        if not input.ndim or input.shape[-1] != self.in_features:
            wanted = f"shape [..., {self.in_features}]"
            raise ShapeError(expected(self._input_name, wanted, tuple(input.shape)))
        # Autocast leaves float64. Asking whether it is on for the meta device is an error.
        kind = input.device.type
        if kind == "meta":
            self._require_meta()
        if kind == "meta" or input.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
            return input
        return input.to(torch.get_autocast_dtype(kind))

    @property
    def _input_name(self) -> str:
        return f"The input of {type(self).__name__}"

    def _require_own_tensor(self, input: object) -> None:
        if not isinstance(input, Tensor):
            raise DtypeError(expected(self._input_name, "a tensor", type(input).__name__))
        if is_sharded(input):
            raise StateError(
                f"{expected(self._input_name, 'a tensor', 'a DTensor')} Split a converted model by "
                "fp4pass.parallelize(model, mesh), or by the styles of fp4pass.parallel."
            )

    def _require_meta(self) -> None:
        if not all(each.is_meta for each in self.packed().values()):
            wanted, got = "a tensor with values", "one on the meta device"
            ways_out = "Move it to the layer, or the layer by .to('meta')."
            raise DtypeError(f"{expected(self._input_name, wanted, got)} {ways_out}")


def code_bits(packed: Tensor) -> Tensor:
    """Return packed codes as uint8, a view. Raises StateError if FSDP has cast them."""
    if packed.dtype == torch.uint8:
        return packed
    if packed.itemsize > 1:
        raise StateError(
            "fully_shard of this torch casts packed codes by its MixedPrecisionPolicy. Leave "
            "param_dtype at None, or use torch 2.13."
        )
    return packed.view(torch.uint8)


def scale_bits(scale: Tensor, storage: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Return scales that are stored in a dtype as operators take them: bytes as uint8, a view."""
    if scale.dtype == torch.uint8:
        return scale
    if storage == torch.float32:
        if scale.dtype != storage:
            raise StateError(
                "fully_shard casts float32 scales by its MixedPrecisionPolicy. Leave param_dtype "
                "at None."
            )
        return scale
    if scale.itemsize > 1:
        # FSDP casts parameters to the dtype of a MixedPrecisionPolicy, which has these exactly.
        scale = scale.to(torch.float8_e4m3fn)
    if torch.jit.is_tracing():
        raise TraceError(
            "torch.jit.trace and torch.onnx.export(dynamo=False) cannot record the bits of block "
            f"scales in {scale.dtype}, a view in another dtype. {CAPTURE}"
        )
    return scale.view(torch.uint8)


def swap_class(
    module: nn.Module,
    cls: type[nn.Module],
    *,
    weight: nn.Parameter | None = None,
    buffers: Mapping[str, Tensor | None] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Change the class of a module in place: of a linear layer from dense to packed, or back."""
    # With `weight` or `buffers` the dense weight, packed buffers and packed attributes that it had
    # are removed; it gets `weight`, in the shape in which `cls` stores it, or `buffers`, of which
    # None registers an absent one. All else stays: bias, hooks, mode.
    parameters, old = module._parameters, type(module)
    if weight is not None or buffers is not None:
        parameters.pop("weight", None)
        if issubclass(old, PackedState):
            for name in old.packed_buffers:
                module._buffers.pop(name, None)
                parameters.pop(name, None)
            for name in old.packed_attributes:
                module.__dict__.pop(name, None)
    module.__class__ = cls
    if weight is not None:
        # In front of the bias, as in nn.Linear.
        rest = dict(parameters)
        parameters.clear()
        parameters.update(weight=weight, **rest)
    for name, tensor in (buffers or {}).items():
        module.register_buffer(name, tensor)
    module.__dict__.update(attributes or {})
