"""diffusers: models whose weights stay packed, or are packed, while from_pretrained loads them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import require
from .._version import __version__
from ..checkpoint.layouts import PackedLayer, join
from ..checkpoint.loading import empty_buffers, share_input_scales
from ..checkpoint.model_layers import finish
from ..checkpoint.reader import packed_problem
from ..core.fingerprint import dtype_name
from ..errors import CheckpointError, Fp4PassError, OptionError, some
from ..nn.experts import current_weight
from ..nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from ..quantization.replace import dequantize_model, store_packed
from ..record.config import LinearConfig
from ..record.rows import Row
from . import METHOD
from .as_read import PackedAsRead

require("diffusers")

from diffusers.quantizers import DiffusersQuantizer  # noqa: E402

# Errors of plain values that somebody has edited.
_FAULTS = (Fp4PassError, TypeError, ValueError, LookupError, AttributeError)


class DescribedLayers:
    """The packed layers that a config describes, in the skeleton of a model, on meta."""

    # declared: the quantization_config of a folder that diffusers wrote; on_disk: the names of its
    # tensors; is_float32: whether a weight stays in float32, whatever the dtype of the model.
    # Raises CheckpointError for a config that is damaged, or fits no model or folder.

    def __init__(
        self,
        model: nn.Module,
        declared: Mapping[str, Any],
        on_disk: Collection[str],
        is_float32: Callable[[str], bool],
    ) -> None:
        self._model = model
        self._modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
        self._shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        try:
            self._skipped = {
                str(why): list(names) for why, names in declared.get("skipped", {}).items()
            }
            self._recipe = {**declared.get("recipe", {})}
            self._layers = dict(self._described(declared, is_float32))
            if not self._layers:
                raise ValueError("schemes: expected at least one packed layer, got none")
        except _FAULTS as error:
            what = str(error) if isinstance(error, Fp4PassError) else f"{error!r:.300}"
            raise CheckpointError(
                "config.json: quantization_config is damaged, or says what fp4pass "
                f"{__version__} does not know: {what.rstrip('.')}. Copy the folder again, or "
                "update fp4pass."
            ) from error
        # The tensors that the folder must have, each with its layer and buffer.
        self._expected = dict[str, tuple[str, str]]()
        for name, layer in self._layers.items():
            parts = {PACKED, SCALE} | ({GLOBAL} if layer.fmt.has_global_scale else set())
            if join(name, INPUT_GLOBAL) in on_disk:
                parts.add(INPUT_GLOBAL)
            self._expected |= {join(name, part): (name, part) for part in parts}
            buffers = empty_buffers(layer, parts)
            store_packed(self._modules[name], buffers, layer.config)
            self._modules[name].weight_dtype = getattr(torch, layer.weight_dtype)
        self._require([name for name in self._expected if name not in on_disk])

    def _described(
        self, declared: Mapping[str, Any], is_float32: Callable[[str], bool]
    ) -> Iterator[tuple[str, PackedLayer]]:
        for scheme in declared["schemes"]:
            config = LinearConfig.from_dict(scheme["config"])
            static = bool(scheme["static_inputs"])
            for name in scheme["layers"]:
                module = self._modules.get(name)
                if not isinstance(module, nn.Linear):
                    kind = "nothing" if module is None else type(module).__name__
                    raise CheckpointError(
                        f"{name}: expected a linear layer, as the folder has, got {kind} in "
                        f"{type(self._model).__name__}"
                    )
                dtype = torch.float32 if is_float32(join(name, "weight")) else module.weight.dtype
                shape = tuple(module.weight.shape)
                yield name, PackedLayer(config, dtype_name(dtype), False, shape, (), static)

    def _require(self, missing: list[str]) -> None:
        if missing:
            raise CheckpointError(
                f"The folder lacks {some(sorted(missing))}, which its config.json describes. Copy "
                "it again."
            )

    def is_part(self, name: str) -> bool:
        """Return whether a tensor is one of these layers."""
        return name in self._expected

    def fill(self, name: str, tensor: Tensor, device: torch.device | str) -> None:
        """Put a tensor of the folder into its layer, as it is. Raises CheckpointError."""
        path, part = self._expected[name]
        wanted = self._modules[path].get_buffer(part)
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            raise CheckpointError(
                f"{name}: expected {tuple(wanted.shape)} {wanted.dtype}, got "
                f"{tuple(tensor.shape)} {tensor.dtype}. Copy the folder again."
            )
        if problem := packed_problem(part, tensor, self._layers[path]):
            raise CheckpointError(f"{name}: {problem}")
        self._modules[path]._buffers[part] = tensor.to(device)

    def finish(self) -> None:
        """Complete the model once all is loaded, as `load` does. Raises CheckpointError."""
        parts = self._expected.items()
        self._require([n for n, (path, p) in parts if self._modules[path].get_buffer(p).is_meta])
        share_input_scales(self._modules, self._layers)
        rows = [
            Row(name, layer.shape, layer.config, layer.fmt.bits_per_weight(layer.shape))
            for name, layer in self._layers.items()
        ]
        for reason, names in self._skipped.items():
            shapes = {name: self._shapes.get(self._weight(name), ()) for name in names}
            rows += [Row(name, shape, skip_reason=reason) for name, shape in shapes.items()]
        places = {name: i for i, name in enumerate(self._shapes)}
        rows.sort(key=lambda row: places.get(self._weight(row.name), len(places)))
        finish(self._model, self._recipe, rows)

    def _weight(self, name: str) -> str:
        """Return the name of the parameter of a row."""
        return name if name in self._shapes else join(name, "weight")


class DescribedConfig:
    """The quantization_config of a folder that `save_pretrained` of diffusers wrote."""

    def __init__(self, declared: Mapping[str, Any]) -> None:
        self.quant_method = METHOD
        self.declared = dict(declared)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them."""
        return dict(self.declared)


class PackedQuantizer(DiffusersQuantizer):
    """Loads packed folders as they are, and packs float ones, given a `Fp4PassConfig`."""

    # Those that its classes keep in float32 as float models, they keep packed too.
    use_keep_in_fp32_modules = True
    is_serializable = True
    # Products have a gradient for their input, so that adapters can be trained.
    is_trainable = True
    is_compileable = True

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
            self._described.finish()
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
