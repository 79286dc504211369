"""Record packed layers, and split stacks of experts into layers: pure functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compat.transformers_experts import StackView
from ...config import LinearConfig
from ...core.formats import Format
from ...errors import CheckpointError, OptionError, UnreadError, expected
from ...linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE

# The parts of a QuantizedLinear.
BUFFERS = (PACKED, SCALE, GLOBAL, INPUT_GLOBAL)


@dataclass(frozen=True)
class PackedLayer:
    """The record of one packed weight, which fp4pass.json holds.

    Attributes:
        config: how the layer is quantized.
        weight_dtype: name of the dtype that the dense weight has.
        transposed: the dense weight is [K, N].
        shape: [N, K], or [E, N, K] for the stacked experts of a mixture.
        stored_shape: of the parameter that has stacked experts, where it is another one than
            `shape` or, transposed, [E, K, N].

    Example:
        >>> fp4pass.save(fp4pass.convert(model, "nvfp4a16", "sse"), "out")
        >>> layer = fp4pass.checkpoint.open_checkpoint("out").layers["2"]
        >>> layer.shape, layer.weight_dtype, layer.fmt.key
        ((32, 64), 'float32', 'nvfp4')
    """

    config: LinearConfig
    weight_dtype: str
    transposed: bool
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...] = ()

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape of the dense weight."""
        *experts, rows, columns = self.shape
        usual = (*experts, columns, rows) if self.transposed else self.shape
        return self.stored_shape or usual

    @property
    def dense_bytes(self) -> int:
        """The bytes of the dense weight."""
        itemsize: int = getattr(torch, self.weight_dtype).itemsize
        return math.prod(self.dense_shape) * itemsize

    def dense(self, stored: Tensor) -> Tensor:
        """Return what codes stand for, [N, K] or [E, N, K], as the dense weight has it."""
        if self.is_stacked:
            return self._view.parameter(stored)
        return stored.mT if self.transposed else stored

    def matrices(self, weight: Tensor) -> Tensor:
        """Return a dense weight as [N, K] or [E, N, K]."""
        if self.is_stacked:
            return self._view.of(weight)
        return weight.mT if self.transposed else weight

    @property
    def _view(self) -> StackView:
        return StackView(self.shape[0], self.transposed, self.dense_shape)

    @property
    def fmt(self) -> Format:
        """The format as files name it: their layout tells which way global scales go."""
        return self.config.format.with_multiplier(False)

    @property
    def is_stacked(self) -> bool:
        """Whether these are the experts of a mixture in one tensor."""
        return len(self.shape) == 3

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `from_dict` reads them."""
        shapes = {"shape": list(self.shape), "stored_shape": list(self.stored_shape)}
        return {**vars(self), "config": self.config.to_dict(), **shapes}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> PackedLayer:
        """Read what `to_dict` returned. Raises OptionError, TypeError or KeyError for all else."""
        config, shape = LinearConfig.from_dict(data["config"]), tuple(data["shape"])
        stored = tuple(data.get("stored_shape", ()))
        layer = PackedLayer(**{**data, "config": config, "shape": shape, "stored_shape": stored})
        dtype = getattr(torch, layer.weight_dtype, None)
        for what, wanted, got, fits in (
            ("shape", "two or three sizes above 0", shape, _is_weight(shape)),
            ("stored_shape", "none, or that of a stack", stored, _is_stored(stored, shape)),
            ("transposed", "True or False", layer.transposed, type(layer.transposed) is bool),
            ("weight_dtype", "a dtype", layer.weight_dtype, isinstance(dtype, torch.dtype)),
        ):
            if not fits:
                raise OptionError(expected(what, wanted, repr(got)))
        return layer


def _is_weight(shape: tuple[Any, ...]) -> bool:
    return len(shape) in (2, 3) and all(type(size) is int and size > 0 for size in shape)


def _is_stored(stored: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a parameter of a shape may have a stack: below each other, or with more."""
    if not stored:
        return True
    if len(shape) != 3 or not _is_weight(stored):
        return False
    whole = math.prod(stored) == math.prod(shape)
    return whole if len(stored) == 2 else sorted(stored[1:]) == sorted(shape[1:])


class Scheme(NamedTuple):
    """The scheme that a quantization_config declares for one layer.

    Attributes:
        fmt: name of the format.
        weight_only: the input stays in floating point.
        block: weights that share a scale, None if that is not declared.
        rotation: columns of the input that are rotated together at each call.

    Example:
        >>> fp4pass.checkpoint.Scheme("nvfp4", weight_only=True)
        Scheme(fmt='nvfp4', weight_only=True, block=None, rotation=0)
    """

    fmt: str
    weight_only: bool
    block: int | None = None
    rotation: int = 0


# Linear layers of one module that serving engines multiply by as one matrix (vLLM, SGLang).
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


def fused_problems(
    layers: Mapping[str, PackedLayer],
    dense: Collection[str],
    scales: Mapping[str, Mapping[str, float]] | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield the parents of layers that engines fuse though they differ, and how.

    `dense` are the names of other layers; `scales` the global scales of each, by their names.
    """
    names = dict.fromkeys((*layers, *dense))
    for name in names:
        parent, _, last = name.rpartition(".")
        for members in _FUSED:
            paths = {each: f"{parent}.{each}" for each in members}
            # Once, at the first of them that is there.
            if last != next((each for each, path in paths.items() if path in names), ""):
                continue
            schemes = {
                each: _scheme(layers.get(path), (scales or {}).get(path, {}))
                for each, path in paths.items()
                if path in names
            }
            if len(set(schemes.values())) > 1:
                yield parent, ", ".join(f"{each} {scheme}" for each, scheme in schemes.items())


def _scheme(layer: PackedLayer | None, scales: Mapping[str, float]) -> str:
    if layer is None:
        return "dense"
    numbers = "".join(f" and {name} {value:g}" for name, value in scales.items())
    return f"{layer.config.scheme}{numbers}"


def join(path: str, name: str) -> str:
    """Return the name of a tensor of the module at a path."""
    return f"{path}.{name}" if path else name


class Piece(NamedTuple):
    """A linear layer on disk: the rows of one expert of a stack, or all that a layer has."""

    name: str
    expert: int = 0
    start: int = 0
    stop: int = 0  # 0 for all that the layer has

    def of(self, part: str, tensor: Tensor, rows: int) -> Tensor:
        """Return the share of a buffer of a layer, whose experts have so many rows."""
        if not self.stop:
            return tensor
        if part not in (GLOBAL, INPUT_GLOBAL):
            return tensor[self.expert, self.start : self.stop].clone()
        # Of all experts, of each, or of each part of its rows.
        own = tensor if len(tensor) == 1 else tensor[self.expert : self.expert + 1]
        if own.ndim == 2:
            own = own[0].split(1)[self.start * own.shape[1] // rows]
        return own.clone()


def split_layer(pieces: Sequence[Piece], part: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name on disk and the share of a buffer of a layer, for each of its pieces."""
    rows = max(piece.stop for piece in pieces)
    for piece in pieces:
        yield piece.name, piece.of(part, tensor, rows)


def join_layers(
    name: str,
    pieces: Sequence[Piece],
    layers: Mapping[str, PackedLayer],
    whole: PackedLayer,
    state: Mapping[str, Tensor],
) -> tuple[PackedLayer, dict[str, Tensor]]:
    """Return the stack of which linear layers are the pieces, and its buffers.

    Args:
        name: of the stack.
        pieces: its layers.
        layers: how each of them is packed.
        whole: how the stack lies in the model; its config is that of the layers.
        state: their buffers, as a state dict has them.

    Raises:
        UnreadError: the layers are quantized in several ways.
        CheckpointError: what reads one input has several scales of it.
    """
    records = [layers[piece.name] for piece in pieces]
    # Which way a number goes may differ by expert, as some are powers of two by chance.
    multiplies = any(each.config.multiplies for each in records)
    configs = {dataclasses.replace(each.config, multiplies=multiplies) for each in records}
    if len(configs) > 1:
        raise UnreadError(
            f"{name}: expected experts that are quantized alike, got {len(configs)} schemes. Load "
            "the folder with the library that wrote it, or make it dense by fp4pass convert --to "
            "bf16."
        )
    whole = dataclasses.replace(whole, config=configs.pop())
    experts, rows, _ = whole.shape
    parts = len(pieces) // experts
    joined = {}
    for part in BUFFERS:
        found = [state.get(join(piece.name, part)) for piece in pieces]
        if part in (PACKED, SCALE):
            first = found[0]
            assert first is not None, "open_checkpoint requires both"
            stack = first.new_empty((experts, rows, first.shape[1]))
            for piece, own in zip(pieces, found, strict=True):
                stack[piece.expert, piece.start : piece.stop] = own  # type: ignore[assignment]
            joined[part] = stack
            continue
        table = torch.full((experts, parts), math.nan, dtype=torch.float32)
        for piece, record, own in zip(pieces, records, found, strict=True):
            if own is not None:
                # A divisor is a power of two where others multiply.
                own = own if record.config.multiplies == multiplies else 1 / own
                table[piece.expert, piece.start * parts // rows] = own.item()
        if part == INPUT_GLOBAL:
            scales = _input_scales(name, table, multiplies)
            joined |= {} if scales is None else {part: scales}
        elif whole.fmt.has_global_scale:
            joined[part] = table[:, 0].clone() if (table == table[:, :1]).all() else table
    return whole, {join(name, part): tensor for part, tensor in joined.items()}


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
            f"got two for expert {differ[0]}. fp4pass convert --to bf16 makes dense weights of the "
            "folder, which need none."
        )
    # The scale that multiplies most, or divides least, holds the largest inputs.
    known = table[~missing]
    largest = known.amax() if multiplies else known.amin()
    scales = torch.where(missing.all(1), largest, least)
    return scales[:1].clone() if bool((scales == scales[0]).all()) else scales
