"""diffusers: models whose weights stay packed, or are packed, while from_pretrained loads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._compat.diffusers import require_diffusers
from ..checkpoint.finish import finish
from ..checkpoint.in_config import DescribedLayers
from ..errors import CheckpointError, OptionError, some
from ..nn.experts import current_weight
from ..quantization.restore import dequantize_model
from .as_read import PackedAsRead
from .choosing import METHOD

require_diffusers()

from diffusers.quantizers import DiffusersQuantizer  # noqa: E402


class DescribedConfig:
    """The quantization_config of a folder that `save_pretrained` of diffusers wrote.

    Attributes:
        declared: what the folder declares.
    """

    def __init__(self, declared: Mapping[str, Any]) -> None:
        self.quant_method = METHOD
        self.declared = dict(declared)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them."""
        return dict(self.declared)


class PackedQuantizer(DiffusersQuantizer):
    """Loads packed folders as they are, and packs float ones, given a `Fp4PassConfig`, as it reads.

    diffusers documents the methods that it calls, those with an underscore too.
    """

    # Those that its classes keep in float32 as float models, they keep packed too.
    use_keep_in_fp32_modules = True

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # from_single_file does not say it.
        self.pre_quantized = isinstance(quantization_config, DescribedConfig)
        self._on_disk: frozenset[str] = frozenset()
        self._described: DescribedLayers | None = None
        self._weights: PackedAsRead | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise OptionError for a device map with a disk."""
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise OptionError(
                "device_map: packed weights stay in memory, got 'disk' for a part of the model. "
                "Give each part a device, or leave device_map out."
            )

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: Any) -> list[str]:
        """Remember the names of the tensors of the folder."""
        self._on_disk = frozenset(loaded_keys)
        return loaded_keys

    def _process_model_before_weight_loading(
        self, model: Any, keep_in_fp32_modules: Any = (), **kwargs: Any
    ) -> None:
        """Give the skeleton its packed layers, or plan which weights are packed as they come."""
        if not self.pre_quantized:
            # diffusers casts before it passes a tensor on.
            self._weights = PackedAsRead(model, self.quantization_config.recipe, lambda layer: True)
            return
        kept = set(keep_in_fp32_modules or ())

        def is_float32(name: str) -> bool:
            return not kept.isdisjoint(name.split("."))

        declared = self.quantization_config.to_dict()
        # The skeleton is made within a context that has no memory.
        with torch.device("cpu"):
            self._described = DescribedLayers(model, declared, self._on_disk, is_float32)

    def check_if_quantized_param(
        self, model: Any, param_value: Tensor, param_name: str, state_dict: Any, **kwargs: Any
    ) -> bool:
        """Return whether a tensor of the folder is passed to `create_quantized_param`."""
        if self._described is not None:
            return self._described.is_part(param_name)
        return self._weights is not None and self._weights.takes(param_name)

    def create_quantized_param(
        self,
        model: Any,
        param_value: Tensor,
        param_name: str,
        target_device: Any,
        state_dict: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Put a tensor of the folder into its layer, packed as it is or to be packed."""
        if self._described is not None:
            # Not `param_value`, which is cast to the dtype of the model.
            self._described.fill(param_name, state_dict[param_name], target_device)
        elif self._weights is not None:
            self._weights.take(param_name, param_value.to(target_device))

    @property
    def supports_parallel_loading(self) -> bool:
        """False: layers that share a scale are packed together."""
        return self.pre_quantized

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Finish the model as `convert` does."""
        if self._described is not None:
            recipe, rows = self._described.finish()
            finish(model, recipe, rows)
        elif self._weights is not None:
            weights = {each.name: current_weight(each.module) for each in self._weights.remaining()}
            empty = [name for name, each in weights.items() if each is None or each.is_meta]
            if empty:
                raise CheckpointError(
                    f"The folder has no weights of {some(empty)}, which cannot be packed. Give "
                    "from_pretrained the whole folder of the float model."
                )
            self._weights.complete(model)
        self._described = self._weights = None
        # Of others it refuses casts; packed buffers are never cast.
        del model.is_quantized
        return model

    def dequantize(self, model: Any) -> Any:
        """Make every packed layer dense again, with its rounded weight."""
        return dequantize_model(model)

    @property
    def is_serializable(self) -> bool:
        """True: save_pretrained works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: products have a gradient for their input, so that adapters can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: torch.compile works."""
        return True
