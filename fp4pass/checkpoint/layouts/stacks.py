"""Split stacks of experts into the layers that lie on disk, and join these: pure functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.formats import FORMATS, WHOLE, Format
from ...errors import CheckpointError, UnreadError
from ...nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from .layer import BUFFERS, PackedLayer, join


class Piece(NamedTuple):
    """A linear layer on disk: the rows of one expert of a stack, or all that a layer has."""

    name: str
    expert: int = 0
    start: int = 0
    stop: int = 0  # 0 for all that the layer has

    def of(self, part: str, tensor: Tensor, rows: int, fmt: Format) -> Tensor:
        """Return the share of a buffer of a layer, whose experts have so many rows."""
        if not self.stop:
            return tensor
        if part == SCALE:
            return tensor[self.expert, self.scales(fmt)].clone()
        if part not in (GLOBAL, INPUT_GLOBAL):
            return tensor[self.expert, self.start : self.stop].clone()
        # Of all experts, of each, or of each part of its rows.
        own = tensor if len(tensor) == 1 else tensor[self.expert : self.expert + 1]
        if own.ndim == 2:
            own = own[0].split(1)[self.start * own.shape[1] // rows]
        return own.clone()

    def scales(self, fmt: Format) -> slice:
        """Return which rows of the scales of an expert these rows have."""
        if fmt.rows == WHOLE:
            return slice(0, 1)
        return slice(self.start // fmt.rows, -(-self.stop // fmt.rows))


def has_whole_tiles(pieces: Sequence[Piece], fmt: Format) -> bool:
    """Return whether no scale of a stack would be shared by two of its pieces in part."""
    return fmt.rows == WHOLE or all(piece.start % fmt.rows == 0 for piece in pieces)


def split_layer(
    pieces: Sequence[Piece], part: str, tensor: Tensor, fmt: Format
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name on disk and the share of a buffer of a layer, for each of its pieces."""
    rows = max(piece.stop for piece in pieces)
    for piece in pieces:
        yield piece.name, piece.of(part, tensor, rows, fmt)


def joined_record(
    name: str, pieces: Sequence[Piece], layers: Mapping[str, PackedLayer], whole: PackedLayer
) -> PackedLayer:
    """Return how a stack is packed whose pieces are linear layers.

    whole: how it lies in the model, but for its config. Raises UnreadError for layers that are
    quantized in several ways, or share tiles.
    """
    records = [layers[piece.name] for piece in pieces]
    if not has_whole_tiles(pieces, records[0].fmt):
        raise UnreadError(
            f"{name}: expected gate and up of whole tiles of {records[0].fmt.rows} rows, which one "
            f"stack can hold, got {pieces[0].stop - pieces[0].start} rows. Make it dense by "
            "fp4pass transcode --to bf16, or give it to fp4pass quantize."
        )
    # Which way a number goes may differ by expert, as some are powers of two by chance.
    multiplies = any(each.config.multiplies for each in records)
    configs = {
        (dataclasses.replace(each.config, multiplies=multiplies), each.static_inputs)
        for each in records
    }
    if len(configs) > 1:
        raise UnreadError(
            f"{name}: expected experts that are quantized alike, got {len(configs)} schemes. Load "
            "the folder with the library that wrote it, or make it dense by fp4pass transcode --to "
            "bf16."
        )
    config, is_static = configs.pop()
    if config.format.rows == WHOLE:
        # Gate and up have a scale each, and all rows of a layer the same.
        by_rows = (each for each in FORMATS.values() if each.rows == 1)
        fmt = next(
            each.name
            for each in by_rows
            if dataclasses.replace(config.format, name=each.name, rows=1) == each
        )
        config = dataclasses.replace(config, fmt=fmt, block=None)
    return dataclasses.replace(whole, config=config, static_inputs=is_static)


def join_layers(
    name: str,
    pieces: Sequence[Piece],
    layers: Mapping[str, PackedLayer],
    whole: PackedLayer,
    state: Mapping[str, Tensor],
) -> tuple[PackedLayer, dict[str, Tensor]]:
    """Return what `joined_record` does, and the buffers of the stack, by those of its pieces."""
    whole = joined_record(name, pieces, layers, whole)
    joined = {}
    for part in BUFFERS:
        found = [state.get(join(piece.name, part)) for piece in pieces]
        tensor = join_part(name, pieces, layers, whole, part, found)
        if tensor is not None:
            joined[join(name, part)] = tensor
    return whole, joined


def join_part(
    name: str,
    pieces: Sequence[Piece],
    layers: Mapping[str, PackedLayer],
    whole: PackedLayer,
    part: str,
    found: Sequence[Tensor | None],
) -> Tensor | None:
    """Return one buffer of a stack, given those of its pieces; None for one that it lacks.

    whole: as `joined_record` returns it. Raises CheckpointError for several scales of one input.
    """
    experts, rows, _ = whole.shape
    parts = len(pieces) // experts
    if part in (PACKED, SCALE):
        first = found[0]
        assert first is not None, "open_checkpoint requires both"
        shape = whole.scale_shape if part == SCALE else (experts, rows, first.shape[1])
        stack = first.new_empty(shape)
        for piece, own in zip(pieces, found, strict=True):
            where = slice(piece.start, piece.stop)
            where = piece.scales(whole.fmt) if part == SCALE else where
            stack[piece.expert, where] = own  # type: ignore[assignment]
        return stack
    records = [layers[piece.name] for piece in pieces]
    multiplies = any(each.config.multiplies for each in records)
    table = torch.full((experts, parts), math.nan, dtype=torch.float32)
    for piece, record, own in zip(pieces, records, found, strict=True):
        if own is not None:
            # A divisor is a power of two where others multiply.
            own = own if record.config.multiplies == multiplies else 1 / own
            table[piece.expert, piece.start * parts // rows] = own.item()
    if part == INPUT_GLOBAL:
        # Those of inputs in FP8 multiply everywhere.
        return _input_scales(name, table, multiplies or not whole.fmt.has_global_scale)
    if not whole.fmt.has_global_scale:
        return None
    return table[:, 0].clone() if (table == table[:, :1]).all() else table


def _input_scales(name: str, table: Tensor, multiplies: bool) -> Tensor | None:
    """Return the scales of inputs, [1] for all experts or [E], for those of parts [E, R].

    NaN stands for none. Raises CheckpointError for parts of an expert that differ.
    """
    missing = table.isnan()
    if missing.all():
        return None
    least, most = table.nan_to_num(math.inf).amin(1), table.nan_to_num(-math.inf).amax(1)
    if differ := ((least < most) & ~missing.all(1)).nonzero().flatten().tolist():
        raise CheckpointError(
            f"{name}: expected one global scale of the input for gate and up, which read the same, "
            f"got two for expert {differ[0]}. fp4pass transcode --to bf16 makes dense weights of "
            "the folder, which need none."
        )
    # The scale that multiplies most, or divides least, holds the largest inputs.
    known = table[~missing]
    largest = known.amax() if multiplies else known.amin()
    scales = torch.where(missing.all(1), largest, least)
    return scales[:1].clone() if bool((scales == scales[0]).all()) else scales
