"""Packed layers as a folder has them: their records, names, and pieces; pure functions."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compat.transformers_experts import StackView
from ...core.formats import FORMATS, WHOLE, Format
from ...core.names import FUSED
from ...errors import CheckpointError, OptionError, UnreadError, expected
from ...nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from ...record.config import Inputs, LinearConfig

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
        static_inputs: inputs in FP8 have the one scale that is stored, and not one for each token.

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
    static_inputs: bool = False

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape of the dense weight."""
        *experts, rows, columns = self.shape
        usual = (*experts, columns, rows) if self.transposed else self.shape
        return self.stored_shape or usual

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

    def format_of(self, part: str) -> Format:
        """Return the format that a buffer is of: that of the input for its scale."""
        fmt = self.config.input_format if part == INPUT_GLOBAL else None
        return (fmt or self.fmt).with_multiplier(False)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the scales, as a QuantizedLinear has them."""
        *experts, rows, columns = self.shape
        return (*experts, *self.fmt.scale_shape(rows, columns))

    @property
    def has_input_scale(self) -> bool:
        """Whether inputs are quantized by a scale that is stored, if it is known at all."""
        fmt = self.config.input_format
        return fmt is not None and (fmt.has_global_scale or self.static_inputs)

    @property
    def scheme(self) -> str:
        """The name of the scheme, and whether inputs in FP8 have one scale."""
        static = " with one scale of inputs" if self.static_inputs else ""
        return f"{self.config.scheme}{static}"

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
        if len(shape) not in (2, 3) or not all(type(n) is int and n > 0 for n in shape):
            raise OptionError(expected("shape", "two or three sizes above 0", repr(shape)))
        if not isinstance(getattr(torch, layer.weight_dtype, None), torch.dtype):
            raise OptionError(expected("weight_dtype", "a dtype", repr(layer.weight_dtype)))
        return layer


class Scheme(NamedTuple):
    """The scheme that a quantization_config declares for one layer.

    Attributes:
        fmt: name of the format.
        weight_only: the input stays in floating point.
        block: weights that share a scale, None if that is not declared.
        rotation: columns of the input that are rotated together at each call.
        static_inputs: as `PackedLayer` has it.
        inputs: the format of inputs that are not in that of weights.

    Example:
        >>> fp4pass.checkpoint.Scheme("nvfp4", weight_only=True).fmt
        'nvfp4'
    """

    fmt: str
    weight_only: bool
    block: int | None = None
    rotation: int = 0
    static_inputs: bool = False
    inputs: Inputs | None = None


# The names that engines give to some of them.
_FUSED_NAMES = {"qkv_proj": FUSED[0], "gate_up_proj": FUSED[1]}


def fused_names(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the first of the layers that engines fuse, and their name for all (SGLang)."""
    known = {*names}
    for name in names:
        parent, _, last = name.rpartition(".")
        for fused, members in _FUSED_NAMES.items():
            if last == members[0] and all(join(parent, each) in known for each in members):
                yield name, join(parent, fused)


def fused_problems(
    layers: Mapping[str, PackedLayer],
    dense: Collection[str],
    scales: Mapping[str, Mapping[str, float]] | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield the parents of layers that engines fuse though they differ, and how."""
    # `dense` are the names of other layers; `scales` the global scales of each, by their names.
    names = dict.fromkeys((*layers, *dense))
    for name in names:
        parent, _, last = name.rpartition(".")
        for members in FUSED:
            paths = {each: f"{parent}.{each}" for each in members}
            # Once, at the first of them that is there.
            if last != next((each for each, path in paths.items() if path in names), ""):
                continue
            schemes = {}
            for each, path in ((each, path) for each, path in paths.items() if path in names):
                numbers = (scales or {}).get(path, {}).items()
                schemes[each] = layers[path].scheme if path in layers else "dense"
                schemes[each] += "".join(f" and {key} {value:g}" for key, value in numbers)
            if len(set(schemes.values())) > 1:
                yield parent, ", ".join(f"{each} {scheme}" for each, scheme in schemes.items())


def join(path: str, name: str) -> str:
    """Return the name of a tensor of the module at a path."""
    return f"{path}.{name}" if path else name


# The rank of a match of a target and a layer: by name, by pattern, by class, none.
_BY_NAME, _BY_PATTERN, _BY_CLASS, _NO_MATCH = range(4)

# Seconds of this process for one name, a thousand times what the patterns of others take.
_MOST_TIME = 0.02

_BELOW = r"(\..*)?$"


def matches(name: str, targets: Sequence[str]) -> bool:
    """Return whether a linear layer is among targets: names, patterns behind "re:", or Linear."""
    return distance(name, targets) < _NO_MATCH


def distance(name: str, targets: Sequence[str]) -> int:
    """Return how well targets match a layer; less is better."""
    if name in targets:
        return _BY_NAME
    for pattern in (target[3:] for target in targets if target.startswith("re:")):
        try:
            if _compiled(pattern).match(name, timeout=_MOST_TIME) is not None:
                return _BY_PATTERN
        except TimeoutError as error:
            wanted = f"one that matches {name!r} in {_MOST_TIME} s"
            raise OptionError(expected("pattern", wanted, repr(pattern))) from error
    return _BY_CLASS if "Linear" in targets else _NO_MATCH


@functools.lru_cache(maxsize=1 << 16)
def _compiled(pattern: str) -> Any:
    # Some patterns take exponential time, and Python's own `re` cannot be stopped. Imported here,
    # for that takes longer than any other import of fp4pass.
    import regex

    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise OptionError(f"{pattern!r} is no pattern: {error}.") from error


def below(path: str) -> str:
    """Return the pattern, as compressed-tensors has them, of a module and all below it."""
    return f"re:{re.escape(path)}{_BELOW}"


def is_plain(pattern: str) -> bool:
    """Return whether a pattern is a name, or one of `below`, which every layout can write."""
    return not pattern.startswith("re:") or pattern.endswith(_BELOW)


def as_globs(patterns: Iterable[str]) -> list[str]:
    """Return the plain ones of patterns as globs, which ModelOpt's readers match."""
    found = []
    for pattern in filter(is_plain, patterns):
        path = re.sub(r"\\(.)", r"\1", pattern.removeprefix("re:").removesuffix(_BELOW))
        found += [path, f"{path}.*"] if pattern.startswith("re:") else [pattern]
    return found


def from_globs(globs: Iterable[str]) -> list[str]:
    """Return globs as names and patterns, such as those of `below`."""
    found = []
    for each in globs:
        path = each.removesuffix(".*")
        if set(path) & set("*?"):
            text = re.escape(each).replace(r"\*", ".*").replace(r"\?", ".")
            found.append(f"re:{text}$")
        else:
            found.append(each if path == each else below(path))
    return found


class Piece(NamedTuple):
    """A linear layer on disk: the rows of one expert of a stack, or all that a layer has."""

    name: str
    expert: int = 0
    start: int = 0
    stop: int = 0  # 0 for all that the layer has

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
        if not piece.stop:
            share = tensor
        elif part == SCALE:
            share = tensor[piece.expert, piece.scales(fmt)].clone()
        elif part not in (GLOBAL, INPUT_GLOBAL):
            share = tensor[piece.expert, piece.start : piece.stop].clone()
        else:
            # Of all experts, of each, or of each part of its rows.
            share = tensor if len(tensor) == 1 else tensor[piece.expert : piece.expert + 1]
            if share.ndim == 2:
                share = share[0].split(1)[piece.start * share.shape[1] // rows]
            share = share.clone()
        yield piece.name, share


def join_layers(
    name: str,
    pieces: Sequence[Piece],
    layers: Mapping[str, PackedLayer],
    whole: PackedLayer,
    state: Mapping[str, Tensor],
) -> tuple[PackedLayer, dict[str, Tensor]]:
    """Return the record and the buffers of a stack whose pieces are linear layers on disk."""
    # whole: its record in the model, but for its config. state: the buffers of the layers; some may
    # be missing. Raises CheckpointError for layers that a stack cannot hold.
    records = [layers[piece.name] for piece in pieces]
    # Which way a number goes may differ by expert, as some are powers of two by chance.
    multiplies = any(each.config.multiplies for each in records)
    configs = {
        (dataclasses.replace(each.config, multiplies=multiplies), each.static_inputs)
        for each in records
    }
    if len(configs) > 1 or not has_whole_tiles(pieces, records[0].fmt):
        raise UnreadError(
            f"{name}: expected experts that are quantized alike, gate and up of each in tiles of "
            f"their own, got {len(configs)} schemes, and gate of "
            f"{pieces[0].stop - pieces[0].start} rows. Make the folder dense by fp4pass transcode "
            "--to bf16, or give it to fp4pass quantize."
        )
    config, is_static = configs.pop()
    if config.format.rows == WHOLE:
        # Gate and up have a scale each, and all rows of a layer the same.
        fmt = next(
            each.name
            for each in FORMATS.values()
            if each.rows == 1 and dataclasses.replace(config.format, name=each.name, rows=1) == each
        )
        config = dataclasses.replace(config, fmt=fmt, block=None)
    whole = dataclasses.replace(whole, config=config, static_inputs=is_static)
    experts, rows, _ = whole.shape
    parts, joined = len(pieces) // experts, {}
    for part in BUFFERS:
        found = [state.get(join(piece.name, part)) for piece in pieces]
        first = next((each for each in found if each is not None), None)
        if first is None or (part == GLOBAL and not whole.fmt.has_global_scale):
            continue
        if part in (PACKED, SCALE):
            shape = whole.scale_shape if part == SCALE else (experts, rows, first.shape[1])
            stack = first.new_empty(shape)
            for piece, own in zip(pieces, found, strict=True):
                where = piece.scales(whole.fmt) if part == SCALE else slice(piece.start, piece.stop)
                stack[piece.expert, where] = own  # type: ignore[assignment]
            joined[join(name, part)] = stack
            continue
        table = torch.full((experts, parts), math.nan, dtype=torch.float32)
        for piece, record, own in zip(pieces, records, found, strict=True):
            if own is not None:
                # A divisor is a power of two where others multiply.
                is_other = record.format_of(part).has_global_scale
                is_other &= record.config.multiplies != multiplies
                own = 1 / own if is_other else own
                table[piece.expert, piece.start * parts // rows] = own.item()
        if part == INPUT_GLOBAL:
            # Those of inputs in FP8 multiply everywhere.
            is_factor = multiplies or not whole.format_of(part).has_global_scale
            joined[join(name, part)] = _input_scales(name, table, is_factor)
        else:
            is_one = (table == table[:, :1]).all()
            joined[join(name, part)] = table[:, 0].clone() if is_one else table
    return whole, joined


def _input_scales(name: str, table: Tensor, multiplies: bool) -> Tensor:
    """Return the scales of inputs, [1] or [E], for those of parts [E, R]; NaN stands for none."""
    missing = table.isnan()
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
