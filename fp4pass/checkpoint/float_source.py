"""Read a folder in FP8 as the float model that it stands for: weight * scale, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.quant_state import QuantState
from ..errors import some
from ..nn.linear import INPUT_GLOBAL, PACKED, SCALE
from .layouts import CACHE_SCALES, PackedLayer, join
from .opening import is_packed, open_checkpoint
from .reader import CheckpointReader
from .source_files import opened


@dataclass(frozen=True)
class FloatSource:
    """A folder whose packed weights are all 8-bit floats.

    Attributes:
        reader: of the folder.
    """

    reader: CheckpointReader

    @property
    def sentence(self) -> str:
        """The line that says which layers are read, and how."""
        layers = self.reader.layers
        schemes = " and ".join(sorted({layer.scheme for layer in layers.values()}))
        left = [name for name in self.reader.plain() if name.endswith(CACHE_SCALES)]
        cache = f"; left out are scales of a key-value cache ({some(left)})" if left else ""
        return (
            f"{self.reader.folder}: {len(layers)} layers in {schemes} ({self.reader.layout.name}) "
            f"are read as weight * scale in float32{cache}"
        )

    def weights(self) -> dict[str, Fp8Weight]:
        """Return each packed weight, by the name that it has in a folder of the float model."""
        return {join(name, "weight"): Fp8Weight(self.reader, name) for name in self.reader.layers}

    def dense(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors of the folder, or what reads them, as those of the float model."""
        names = {name: self.reader.on_disk.get(name, name) for name in self.reader.plain()}
        dropped = {disk for name, disk in names.items() if name.endswith(CACHE_SCALES)}
        kept = set(names.values()) - dropped
        return {**{n: each for n, each in tensors.items() if n in kept}, **self.weights()}


class Fp8Weight:
    """A weight in FP8; indexed as a slice of safetensors, it is the dense weight in float32."""

    def __init__(self, reader: CheckpointReader, layer: str) -> None:
        self.reader, self.layer = reader, layer

    @property
    def record(self) -> PackedLayer:
        """The record of the layer."""
        return self.reader.layers[self.layer]

    @property
    def sources(self) -> list[Tensor]:
        """The codes, mapped from the file."""
        name = self.reader.names(self.layer)[PACKED]
        with opened(self.reader.files[name]) as file:
            return [file.get_tensor(self.reader.on_disk.get(name, name))]

    def states(self) -> list[QuantState]:
        """Return codes and scales, of one matrix. Raises CheckpointError for other numbers."""
        parts = self.reader.parts(self.layer, (PACKED, SCALE))
        qdata, scale = parts[PACKED], parts[SCALE]
        assert qdata is not None and scale is not None, "open_checkpoint requires both"
        dtype: torch.dtype = getattr(torch, self.record.weight_dtype)
        return [QuantState(qdata, scale, 1.0, self.record.fmt, self.record.shape, dtype)]

    def input_scales(self) -> tuple[float, ...]:
        """Return the one scale of inputs, () where each token has its own."""
        if not self.record.static_inputs:
            return ()
        scale = self.reader.parts(self.layer, (INPUT_GLOBAL,))[INPUT_GLOBAL]
        return () if scale is None else (scale.item(),)

    def get_shape(self) -> list[int]:
        """Return the shape of the dense weight."""
        return list(self.record.shape)

    def get_dtype(self) -> str:
        """Return the dtype of what indexing returns, as safetensors names it."""
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        return self.reader.dense(self.layer, torch.float32)[index]


def open_float_source(source: str) -> FloatSource | None:
    """Return a folder whose weights are 8-bit floats as a float model, None for any other."""
    folder = Path(source)
    if not folder.is_dir() or not is_packed(folder, known=True):
        return None
    reader = open_checkpoint(folder, any_blocks=True)
    # transformers knows no single layers where the float model has a stack.
    is_read = reader.layout.engines and not reader.said("whole")
    layers = reader.layers.values()
    if not is_read or not all(layer.fmt.element.native for layer in layers):
        return None
    return FloatSource(reader)
