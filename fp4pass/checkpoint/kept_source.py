"""Have a float model know the FP8 codes of the folder that its weights are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.transformers_loading import names_in_model
from ..core.quant_state import QuantState
from ..errors import UnreadError
from ..nn.experts import ExpertStack, stacks_of
from ..nn.linear import INPUT_GLOBAL, PACKED, SCALE
from ..quantization.plan import KeptWeight, keep_weight
from .float_source import FloatSource, Fp8Weight
from .layouts import PackedLayer, Piece, join, join_part, joined_record
from .model_layers import stored_shape
from .reader import CheckpointReader, packed_problem
from .split_stacks import stacks_in


def keep_weights(model: Any, source: FloatSource) -> None:
    """Have the linear layers and stacks of a model know the codes that their weights are made of.

    Args:
        model: of transformers, loaded from the folder.
        source: the folder.
    """
    if any(layer.tile for layer in source.reader.layers.values()):
        return
    weights, modules = source.weights(), dict(model.named_modules())
    for disk, name in names_in_model(model, weights).items():
        module = modules.get(name.removesuffix(".weight"))
        if type(module) is nn.Linear:
            keep_weight(module, "weight", _of_linear(weights[disk]))
    stacks = stacks_in(model, source.reader.layers)
    for path, owner in modules.items():
        for key, stack in stacks_of(owner).items() if stacks else ():
            if pieces := stacks.get(join(path, key)):
                kept = _of_stack(source.reader, join(path, key), pieces, stack)
                keep_weight(stack.holder, stack.last, kept)


def _of_linear(weight: Fp8Weight) -> KeptWeight:
    key = weight.record.fmt.key
    return KeptWeight(key, key, weight.states, weight.input_scales)


def _of_stack(
    reader: CheckpointReader, name: str, pieces: Sequence[Piece], stack: ExpertStack
) -> KeptWeight:
    """Return what a stack is made of; one of tensor scales has a scale for each row."""
    records = {piece.name: reader.layers[piece.name] for piece in pieces}
    first, shape = records[pieces[0].name], tuple(stack.dense.shape)
    whole = dataclasses.replace(
        first,
        shape=shape,
        transposed=stack.view.transposed,
        stored_shape=stored_shape(stack.view, shape),
    )
    try:
        whole, problem = joined_record(name, pieces, records, whole), ""
    except UnreadError as error:
        problem = str(error).partition(". ")[0].removeprefix(f"{name}: ")
    found = _StackInPieces(reader, name, pieces, records, whole)
    return KeptWeight(first.fmt.key, whole.fmt.key, found.states, found.input_scales, problem)


@dataclass(frozen=True)
class _StackInPieces:
    """A stack whose pieces lie in a folder.

    Attributes:
        reader: of the folder.
        name: of the stack.
        pieces: its layers.
        records: of its layers.
        whole: the record of the stack.
    """

    reader: CheckpointReader
    name: str
    pieces: Sequence[Piece]
    records: Mapping[str, PackedLayer]
    whole: PackedLayer

    def states(self) -> list[QuantState]:
        """Return codes and scales of each expert. Raises CheckpointError as the reader does."""
        parts = [self.reader.parts(piece.name, (PACKED, SCALE)) for piece in self.pieces]
        codes, scales = (self._joined(part, [each[part] for each in parts]) for part in _CODES)
        assert codes is not None and scales is not None, "open_checkpoint requires both"
        dtype: torch.dtype = getattr(torch, self.whole.weight_dtype)
        fmt, (_, *shape) = self.whole.fmt, self.whole.shape
        bits = scales.view(fmt.scale.dtype)
        return [
            QuantState(own, scale, 1.0, fmt, tuple(shape), dtype)
            for own, scale in zip(codes, bits, strict=True)
        ]

    def input_scales(self) -> tuple[float, ...]:
        """Return the scales of inputs, one or one for each expert, () where tokens have theirs."""
        if not self.whole.static_inputs:
            return ()
        found = [self._input_scale(piece.name) for piece in self.pieces]
        joined = self._joined(INPUT_GLOBAL, found)
        return () if joined is None else tuple(joined.tolist())

    def _input_scale(self, layer: str) -> Tensor | None:
        """Return the scale of the input of a piece, None if calibration never reached it."""
        name = self.reader.names(layer).get(INPUT_GLOBAL)
        for _, tensor in self.reader.tensors([name] if name else []):
            if not packed_problem(INPUT_GLOBAL, tensor, self.records[layer]):
                return self.reader.parts(layer, (INPUT_GLOBAL,))[INPUT_GLOBAL]
        return None

    def _joined(self, part: str, found: Sequence[Tensor | None]) -> Tensor | None:
        return join_part(self.name, self.pieces, self.records, self.whole, part, found)


_CODES: Collection[str] = (PACKED, SCALE)
