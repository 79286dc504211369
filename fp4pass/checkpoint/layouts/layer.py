"""Record packed layers, and tell which of them engines fuse: pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compat.transformers_experts import StackView
from ...core.formats import Format
from ...core.names import FUSED
from ...errors import OptionError, expected
from ...nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from ...record.config import LinearConfig

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
        tile: the rows and columns that share a scale on disk, where they are others than those of
            the format; such a weight is only made dense.

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
    tile: tuple[int, ...] = ()

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
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the scales, as a QuantizedLinear has them."""
        *experts, rows, columns = self.shape
        if self.tile:
            return tuple(-(-size // own) for size, own in zip(self.shape, self.tile, strict=True))
        return (*experts, *self.fmt.scale_shape(rows, columns))

    @property
    def has_input_scale(self) -> bool:
        """Whether inputs are quantized by a scale that is stored, if it is known at all."""
        return not self.config.weight_only and (self.fmt.has_global_scale or self.static_inputs)

    @property
    def scheme(self) -> str:
        """The name of the scheme, and whether inputs in FP8 have one scale."""
        blocks = f" in blocks of {' x '.join(map(str, self.tile))}" if self.tile else ""
        static = " with one scale of inputs" if self.static_inputs else ""
        return f"{self.config.scheme}{blocks}{static}"

    @property
    def is_stacked(self) -> bool:
        """Whether these are the experts of a mixture in one tensor."""
        return len(self.shape) == 3

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `from_dict` reads them."""
        shapes = {"shape": list(self.shape), "stored_shape": list(self.stored_shape)}
        facts = {key: value for key, value in vars(self).items() if key != "tile"}
        return {**facts, "config": self.config.to_dict(), **shapes}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> PackedLayer:
        """Read what `to_dict` returned. Raises OptionError, TypeError or KeyError for all else."""
        config, shape = LinearConfig.from_dict(data["config"]), tuple(data["shape"])
        stored = tuple(data.get("stored_shape", ()))
        layer = PackedLayer(**{**data, "config": config, "shape": shape, "stored_shape": stored})
        if len(shape) not in (2, 3) or not _are_sizes(shape):
            raise OptionError(expected("shape", "two or three sizes above 0", repr(shape)))
        if not isinstance(getattr(torch, layer.weight_dtype, None), torch.dtype):
            raise OptionError(expected("weight_dtype", "a dtype", repr(layer.weight_dtype)))
        return layer


def _are_sizes(value: Any) -> bool:
    is_list = isinstance(value, list | tuple)
    return is_list and all(type(size) is int and size > 0 for size in value)


def is_tile(value: Any) -> bool:
    """Return whether a value of a config is the rows and columns of a block."""
    return _are_sizes(value) and len(value) == 2


class Scheme(NamedTuple):
    """The scheme that a quantization_config declares for one layer.

    Attributes:
        fmt: name of the format.
        weight_only: the input stays in floating point.
        block: weights that share a scale, None if that is not declared.
        rotation: columns of the input that are rotated together at each call.
        static_inputs: as `PackedLayer` has it.
        tile: as `PackedLayer` has it.

    Example:
        >>> fp4pass.checkpoint.Scheme("nvfp4", weight_only=True).fmt
        'nvfp4'
    """

    fmt: str
    weight_only: bool
    block: int | None = None
    rotation: int = 0
    static_inputs: bool = False
    tile: tuple[int, ...] = ()


# The names that engines give to some of them.
_FUSED_NAMES = {"qkv_proj": FUSED[0], "gate_up_proj": FUSED[1]}


def fused_names(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the first of the layers that engines fuse, and the name that they give to all.

    SGLang looks for this name in a config that names layers; vLLM takes it, too.
    """
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
    """Yield the parents of layers that engines fuse though they differ, and how.

    `dense` are the names of other layers; `scales` the global scales of each, by their names.
    """
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
