"""An nn.Linear that can keep codes and scales in the place of its weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import OptionError, ShapeError, StateError
from ..graph.match import is_conv1d
from ..linear import QuantizedLinear, is_autocast, moved_bits

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
Layer = TypeVar("Layer", bound="StoredLinear")


class StoredLinear(nn.Linear, ABC):
    """An nn.Linear whose weight becomes buffers of codes and scales when it is quantized.

    Before that it is an nn.Linear, to be trained or loaded; a state dict with codes quantizes it.
    After it, the buffers are all that is kept: they move with the module and are never cast, and
    `weight` is computed from them when it is asked for, in `weight_dtype`, and cannot be set.
    """

    is_quantized: bool = False
    weight_dtype: torch.dtype

    @abstractmethod
    def _layout(self) -> Layout:
        """The shapes and dtypes of the buffers."""

    @abstractmethod
    def _encode(self, weight: Tensor) -> dict[str, Tensor]:
        """The buffers of a weight [N, K]."""

    @abstractmethod
    def _decode(self, dtype: torch.dtype) -> Tensor:
        """The dense weight [N, K]."""

    @abstractmethod
    def _multiply(self, x: Tensor) -> Tensor:
        """x [..., K] by the stored weight, plus bias."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The parameter, or the dense weight [N, K] of the codes."""
        if self.is_quantized:
            return self._decode(self.weight_dtype)
        # As nn.Module does; there is none while nn.Linear makes one.
        weight: Any = nn.Module.__getattr__(self, "weight")
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., K] float. Returns [..., N] in its dtype, or autocast's where that is on."""
        if not self.is_quantized:
            return super().forward(input)
        if input.shape[-1] != self.in_features:
            raise ShapeError(
                f"The input of a linear has shape {tuple(input.shape)}; [..., {self.in_features}] "
                "is wanted."
            )
        if is_autocast(input.device) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(input.device.type))
        return self._multiply(input)

    def _quantize(self) -> None:
        """Replace the weight by its codes. Raises StateError or NonFiniteError."""
        if self.is_quantized:
            raise StateError("The layer is quantized already. Make a new one from a float weight.")
        weight = self.weight
        if weight.is_meta:
            raise StateError(
                "The weight is on the meta device, without values. Load the weights first, or a "
                "state dict of a quantized layer."
            )
        # Inference tensors could neither be saved for a gradient nor be written to later.
        with torch.inference_mode(False), torch.no_grad():
            self._hold(self._encode(weight.detach()))

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Have these buffers in the place of the weight."""
        self.weight_dtype = self.weight.dtype
        del self._parameters["weight"]
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.is_quantized = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredLinear:
        """Let the stored bits move, but never be cast: fn sees them as uint8."""
        stored = dict(self._buffers)
        moved = {
            name: moved_bits(tensor, fn) for name, tensor in stored.items() if tensor is not None
        }
        self._buffers.clear()
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(stored)
        self._buffers.update(moved)
        if self.is_quantized:
            # The dense weight is cast all the same, when it is asked for.
            self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Become quantized where the state dict is; refuse codes of another kind."""
        layout = self._layout()
        given = {n: state_dict[prefix + n] for n in layout if prefix + n in state_dict}
        if given:
            problem = self._problem(given)
            if problem:
                where = prefix.removesuffix(".") or "the layer"
                error_msgs.append(f"{where} ({self.extra_repr()}) cannot hold it: {problem}.")
                return
            if not self.is_quantized:
                device = self.weight.device
                self._hold(
                    {n: torch.empty(s, dtype=t, device=device) for n, (s, t) in layout.items()}
                )
        arguments = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _problem(self, given: Mapping[str, Tensor]) -> str:
        """Why buffers of a state dict are not those of this layer, or ""."""
        for name, (shape, dtype) in self._layout().items():
            if name not in given:
                return f"the state dict has {', '.join(given)} without {name}"
            if given[name].shape != shape or given[name].dtype != dtype:
                return (
                    f"{name} is {tuple(given[name].shape)} {given[name].dtype}, not {shape} {dtype}"
                )
        return ""

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, which cannot read float8 tensors back: all buffers as their bits."""
        bits = {n: None if t is None else t.view(torch.uint8) for n, t in self._buffers.items()}
        return {**self.__dict__, "_buffers": bits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.is_quantized:
            for name, (_, dtype) in self._layout().items():
                self._buffers[name] = self.get_buffer(name).view(dtype)

    def take(self: Layer, linear: nn.Module) -> Layer:
        """Have the parameters of another linear, which are not copied, and return self."""
        weight = linear.weight
        assert isinstance(weight, Tensor)
        if is_conv1d(linear):
            weight = weight.detach().t()
        parameter = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
        self._parameters.update(weight=parameter, bias=linear._parameters.get("bias"))
        return self.train(linear.training)


def sizes_of(linear: nn.Module) -> tuple[int, int, bool]:
    """in_features, out_features and whether there is a bias, of a linear or transformers' Conv1D.

    Raises OptionError for any other module.
    """
    weight = getattr(linear, "weight", None)
    known = isinstance(linear, nn.Linear | QuantizedLinear) or is_conv1d(linear)
    if not known or not isinstance(weight, Tensor) or weight.ndim != 2:
        raise OptionError(f"{type(linear).__name__} is no linear; an nn.Linear is wanted.")
    rows, columns = weight.shape[::-1] if is_conv1d(linear) else weight.shape
    return columns, rows, linear.bias is not None
