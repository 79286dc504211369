"""Packed layers that the config of a model describes alone, as diffusers writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.diffusers import declare
from .._version import __version__
from ..core.fingerprint import dtype_name
from ..errors import (
    CheckpointError,
    Fp4PassError,
    OptionError,
    StateError,
    expected,
    some,
)
from ..nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE, QuantizedLinear
from ..quantization.replace import store_packed
from ..record.config import LinearConfig
from ..record.rows import Row
from ..record.state import ModelState, get_state, has_adapters
from .layouts import BUFFERS, PackedLayer, join
from .model_layers import describe_layers, require_no_others
from .reader import packed_problem
from .save_method import SaveMethod

# The `quant_method` of folders that diffusers writes.
METHOD = "fp4pass"

# Errors of plain values that somebody has edited.
_FAULTS = (Fp4PassError, TypeError, ValueError, LookupError, AttributeError)


def config_of_layers(layers: Mapping[str, PackedLayer], state: ModelState) -> dict[str, Any]:
    """Return the quantization_config that describes the packed layers of a model."""
    schemes: dict[str, dict[str, Any]] = {}
    for name, layer in layers.items():
        record = {"config": layer.config.to_dict(), "static_inputs": layer.static_inputs}
        key = json.dumps(record, sort_keys=True)
        schemes.setdefault(key, {**record, "layers": []})["layers"].append(name)
    skipped: dict[str, list[str]] = {}
    for row in state.report.skipped:
        skipped.setdefault(row.skip_reason, []).append(row.name)
    return {
        "quant_method": METHOD,
        "version": __version__,
        "schemes": list(schemes.values()),
        "skipped": skipped,
        "recipe": dict(state.recipe),
    }


class DescribedLayers:
    """The packed layers that a config describes, in the skeleton of a model, on meta.

    Args:
        model: the skeleton.
        declared: what `config_of_layers` returned.
        on_disk: the names of the tensors of the folder.
        is_float32: whether a weight stays in float32, whatever the dtype of the model.

    Raises:
        CheckpointError: the config is damaged, or does not fit the model or the folder.
    """

    def __init__(
        self,
        model: nn.Module,
        declared: Mapping[str, Any],
        on_disk: Collection[str],
        is_float32: Callable[[str], bool],
    ) -> None:
        self._model, self._declared = model, declared
        self._shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        try:
            for key in ("skipped", "recipe"):
                if not isinstance(found := declared.get(key, {}), Mapping):
                    raise OptionError(expected(key, "a mapping", found))
            self._layers = dict(self._described(is_float32))
            if not self._layers:
                raise ValueError("schemes: expected at least one packed layer, got none")
        except _FAULTS as error:
            what = str(error) if isinstance(error, Fp4PassError) else f"{error!r:.300}"
            raise CheckpointError(
                "config.json: quantization_config is damaged, or says what fp4pass "
                f"{__version__} does not know: {what.rstrip('.')}. Copy the folder again, or "
                "update fp4pass."
            ) from error
        self._expected = dict[str, tuple[str, str]]()
        for name, layer in self._layers.items():
            self._place(name, layer, on_disk)

    def _described(self, is_float32: Callable[[str], bool]) -> Iterator[tuple[str, PackedLayer]]:
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for scheme in self._declared["schemes"]:
            config = LinearConfig.from_dict(scheme["config"])
            static = bool(scheme["static_inputs"])
            for name in scheme["layers"]:
                module = modules.get(name)
                if not isinstance(module, nn.Linear):
                    kind = "nothing" if module is None else type(module).__name__
                    raise CheckpointError(
                        f"{name}: expected a linear layer, as the folder has, got {kind} in "
                        f"{type(self._model).__name__}"
                    )
                dtype = torch.float32 if is_float32(join(name, "weight")) else module.weight.dtype
                shape = tuple(module.weight.shape)
                yield name, PackedLayer(config, dtype_name(dtype), False, shape, (), static)

    def _place(self, name: str, layer: PackedLayer, on_disk: Collection[str]) -> None:
        """Give a layer its buffers on meta."""
        (rows, columns), fmt = layer.shape, layer.fmt
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            PACKED: ((rows, fmt.packed_columns(columns)), torch.uint8),
            SCALE: (layer.scale_shape, fmt.scale.storage),
        }
        if fmt.has_global_scale:
            shapes[GLOBAL] = (1,), torch.float32
        if join(name, INPUT_GLOBAL) in on_disk:
            shapes[INPUT_GLOBAL] = (1,), torch.float32
        missing = [join(name, part) for part in shapes if join(name, part) not in on_disk]
        if missing:
            raise CheckpointError(
                f"The folder lacks {some(missing)}, which its config.json describes. Copy it again."
            )
        meta: dict[str, Tensor | None] = dict.fromkeys(BUFFERS)
        for part, (shape, dtype) in shapes.items():
            meta[part] = torch.empty(shape, dtype=dtype, device="meta")
            self._expected[join(name, part)] = name, part
        module = self._model.get_submodule(name)
        store_packed(module, meta, layer.config)
        assert isinstance(module, QuantizedLinear)
        module.weight_dtype = getattr(torch, layer.weight_dtype)

    def is_part(self, name: str) -> bool:
        """Return whether a tensor is one of these layers."""
        return name in self._expected

    def fill(self, name: str, tensor: Tensor, device: torch.device | str) -> None:
        """Put a tensor of the folder into its layer, as it is. Raises CheckpointError."""
        path, part = self._expected[name]
        module = self._model.get_submodule(path)
        wanted = module.get_buffer(part)
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            raise CheckpointError(
                f"{name}: expected {tuple(wanted.shape)} {wanted.dtype}, got "
                f"{tuple(tensor.shape)} {tensor.dtype}. Copy the folder again."
            )
        if problem := packed_problem(part, tensor, self._layers[path]):
            raise CheckpointError(f"{name}: {problem}")
        module._buffers[part] = tensor.to(device)

    def finish(self) -> tuple[Mapping[str, Any], list[Row]]:
        """Return the recipe and the rows of the model once all is loaded. Raises CheckpointError.

        Layers of one module share equal scales of inputs, as after `convert`.
        """
        empty = [
            name
            for name, (path, part) in self._expected.items()
            if self._model.get_submodule(path).get_buffer(part).is_meta
        ]
        if empty:
            raise CheckpointError(f"The folder lacks {some(empty)}. Copy it again.")
        shared: dict[tuple[object, ...], Tensor] = {}
        rows = []
        for name, layer in self._layers.items():
            buffers = self._model.get_submodule(name)._buffers
            scale = buffers.get(INPUT_GLOBAL)
            if scale is not None:
                key = (name.rpartition(".")[0], layer.fmt.key, float(scale), scale.device)
                buffers[INPUT_GLOBAL] = shared.setdefault(key, scale)
            bits = layer.fmt.bits_per_weight(layer.shape)
            rows.append(Row(name, layer.shape, layer.config, bits))
        for reason, names in self._declared.get("skipped", {}).items():
            shapes = {name: self._shapes.get(self._weight(name), ()) for name in names}
            rows += [Row(name, shape, skip_reason=reason) for name, shape in shapes.items()]
        places = {name: i for i, name in enumerate(self._shapes)}
        rows.sort(key=lambda row: places.get(self._weight(row.name), len(places)))
        return self._declared.get("recipe", {}), rows

    def _weight(self, name: str) -> str:
        """Return the name of the parameter of a row."""
        return name if name in self._shapes else join(name, "weight")


def _problem(layers: Mapping[str, PackedLayer]) -> str:
    """Return which layer `config_of_layers` has no place for, or ""."""
    for name, layer in layers.items():
        if layer.is_stacked or layer.transposed:
            return f"{name}: the config has no place for stacks of experts and transposed weights."
    return ""


def declare_layers(root: nn.Module, state: ModelState) -> None:
    """Have the config of a model of diffusers describe what is packed."""
    layers = describe_layers(root, state)
    declare(root, config_of_layers(layers, state))
    root.__dict__["save_pretrained"] = SaveMethod(root, _check, _problem(layers))


def _check(root: Any, reason: str, *, use_flashpack: bool = False, **options: Any) -> None:
    """Raise an error unless `save_pretrained` of a model of diffusers can write it.

    Raises:
        CheckpointError: the config has no place for a layer, or the model has changed.
        StateError: the model has adapters.
        OptionError: the file would not hold packed weights.
    """
    state = get_state(root)
    if state is not None:
        if reason:
            raise CheckpointError(f"{reason} Save the model with fp4pass.save(model, dir) instead.")
        if has_adapters(root):
            raise StateError(
                "The model has adapters of PEFT around packed layers, and nothing reads a folder "
                "of both. Save the adapters by model.save_lora_adapter(...), and the packed model "
                "before they are put on."
            )
        if use_flashpack:
            wanted = "False: it casts packed weights"
            raise OptionError(expected("use_flashpack", wanted, True))
        layers = describe_layers(root, state)
        require_no_others(root, {root.get_submodule(name) for name in layers})
