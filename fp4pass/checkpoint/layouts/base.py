"""What a checkpoint layout is, and the registry of layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._version import __version__
from ...config import LinearConfig
from ...core.formats import get_format
from ...errors import CheckpointError, OptionError, UnreadError, expected, some, unknown_name
from ...kv_cache import SCALES
from ...linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from .layer import PackedLayer, Scheme

# The file of weights that other libraries look for.
WEIGHTS = "model.safetensors"

# What a QuantizedLinear holds.
BUFFERS = (PACKED, SCALE, GLOBAL, INPUT_GLOBAL)

# The safetensors names of what the scales of a format are stored in.
_DTYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}

# The shape and the safetensors dtype of each tensor of a folder, by its name.
Shapes = Mapping[str, tuple[tuple[int, ...], str]]


class Layout:
    """How packed weights lie in a folder, and what declares them.

    To add a layout, pass a subclass to `register_layout`. Its attributes are enough for folders
    that fp4pass writes; `config` says what config.json declares, and `scheme` reads that back from
    folders of other libraries.

    Attributes:
        name: what users call it, and its quant_method unless `detect` says otherwise.
        parts: the name of each buffer of a QuantizedLinear, beside that of its module; without
            one for `input_global_scale` inputs stay in floating point.
        formats: keys of the formats that it holds.
        multiplies: global scales are stored as multipliers [] rather than as divisors [1].
        writable: users can have it written.
        engines: serving engines read it, and fuse some of its layers.
        fallback: name of the layout that is written for layers that this one cannot hold.
        weights: the file of weights, if one is enough.
        side_files: the files that it has beside config.json.
        dtype: what its readers compute in, "" for the dtype of the model.
        unread: last parts of the names of tensors that fp4pass cannot apply.
        cache_scales: ends of the names of scales of a quantized key-value cache.
        cache_formats: the formats of a key-value cache that it has a place for.
        cache_names: ends of the names of its scales, by those of the buffers in a model; of what
            differs.

    Example:
        >>> layout = fp4pass.checkpoint.LAYOUTS["modelopt"]
        >>> layout.name, layout.formats
        ('modelopt', ('nvfp4',))
    """

    name: ClassVar[str]
    parts: ClassVar[Mapping[str, str]] = dict(zip(BUFFERS, BUFFERS, strict=True))
    formats: ClassVar[tuple[str, ...]] = ()
    multiplies: ClassVar[bool] = False
    writable: ClassVar[bool] = True
    engines: ClassVar[bool] = True
    fallback: ClassVar[str] = ""
    weights: ClassVar[str] = WEIGHTS
    side_files: ClassVar[tuple[str, ...]] = ()
    dtype: ClassVar[str] = "bfloat16"
    unread: ClassVar[tuple[str, ...]] = ()
    cache_scales: ClassVar[tuple[str, ...]] = (
        *(f".{name}" for name in SCALES),
        ".k_proj.output_scale",
        ".v_proj.output_scale",
    )
    cache_formats: ClassVar[tuple[str, ...]] = ()
    cache_names: ClassVar[Mapping[str, str]] = {}

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config that declares packed layers.

        Args:
            layers: the packed layers, by their names.
            ignore: names and patterns of the layers that stay dense.
        """
        return {"quant_method": self.name, "version": __version__}

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return what a quantization_config declares of one layer.

        Args:
            name: of the layer.
            declared: what `config` returns, or what another library wrote.

        Raises:
            CheckpointError: it declares nothing that fp4pass reads.
        """
        raise CheckpointError(
            f"{name}: fp4pass.json, which says how it is packed, is missing, or of another version "
            "of fp4pass. Copy the folder again, or write it with this version."
        )

    def group(self, name: str, declared: Mapping[str, Any]) -> str:
        """Return what a quantization_config calls the scheme of a layer, "" if it does not say."""
        return ""

    def cache_config(self, cache: str | None) -> dict[str, Any]:
        """Return what the quantization_config says of a key-value cache, by its format.

        Raises:
            CheckpointError: this layout has no place for it.
        """
        if cache is not None and cache not in self.cache_formats:
            held = f"{self.name} holds {' and '.join(self.cache_formats) or 'none'}"
            raise CheckpointError(
                f"kv_cache={cache!r}: {held}. Choose layout='compressed-tensors', or convert the "
                "model without kv_cache=."
            )
        return {}

    def cache_format(self, declared: Mapping[str, Any]) -> str | None:
        """Return the format of a key-value cache that a quantization_config declares, if any."""
        return None

    def cache_scale(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """Return the name on disk of a scale of a key-value cache, and what is written there."""
        return name, torch.atleast_1d(tensor)

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether a quantization_config declares this layout."""
        return declared.get("quant_method") == self.name

    def files(
        self, layers: Mapping[str, PackedLayer], ignore: Sequence[str], cache: str | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return the JSON of each of `side_files`, by its name.

        Arguments are as for `config`; cache: the format of the key-value cache.
        """
        return {}

    def ignored(self, declared: Mapping[str, Any]) -> list[str] | None:
        """Return what a quantization_config says stays dense, None if it says nothing."""
        ignore = declared.get("ignore")
        return None if ignore is None else list(ignore)

    def tensor_name(self, layer: str, part: str) -> str:
        """Return the name on disk of a buffer of a layer."""
        return join(layer, self.parts[part])

    def dense_name(self, layer: str) -> str:
        """Return the name on disk that the dense weight of a layer has in a float model."""
        return join(layer, "weight")

    def encode(self, part: str, tensor: Tensor, multiplies: bool = False) -> Tensor:
        """Return a buffer of a layer as it is stored.

        Args:
            part: the name of the buffer in a QuantizedLinear.
            tensor: the buffer.
            multiplies: `LinearConfig.multiplies` of the layer.
        """
        if part not in (GLOBAL, INPUT_GLOBAL):
            return tensor
        tensor = tensor if self.multiplies == multiplies else 1 / tensor
        return tensor.reshape(()) if self.multiplies else tensor

    def decode(self, part: str, tensor: Tensor, multiplies: bool = False) -> Tensor:
        """Invert `encode`; this is exact where `multiplies` is what `in_memory` gives."""
        if part not in (GLOBAL, INPUT_GLOBAL):
            return tensor
        return torch.atleast_1d(tensor if self.multiplies == multiplies else 1 / tensor)

    def in_memory(self, config: LinearConfig, global_scales: Iterable[Tensor]) -> LinearConfig:
        """Return the config of a loaded layer, by the global scales that are stored for it.

        A multiplier that is no power of two has no exact reciprocal: it stays a multiplier.
        """
        exact = all(bool((torch.frexp(each).mantissa == 0.5).all()) for each in global_scales)
        return dataclasses.replace(config, multiplies=self.multiplies and not exact)

    def problem(self, layer: PackedLayer) -> str:
        """Return what this layout has no place for in a layer, "" if it holds the layer."""
        if layer.is_stacked:
            return "stacked experts"
        problem = self.config_problem(layer.config)
        return f"{layer.fmt.key}, transposed" if layer.transposed and not problem else problem

    def config_problem(self, config: LinearConfig) -> str:
        """Return what this layout has no place for in a config, "" if it holds such layers."""
        key = config.format.with_multiplier(False).key
        if config.is_rotated:
            return f"{key} with rotated weights"
        if config.format.has_global_scale and not config.weight_only:
            if INPUT_GLOBAL not in self.parts:
                return f"{key} with 4-bit inputs"
        return "" if key in self.formats else key

    def holds(self, layers: Mapping[str, PackedLayer]) -> bool:
        """Return whether this layout has a place for all of these layers."""
        return not any(map(self.problem, layers.values()))

    def require(self, layers: Mapping[str, PackedLayer]) -> None:
        """Raise CheckpointError for the first layer that this layout has no place for."""
        for name, layer in layers.items():
            if problem := self.problem(layer):
                raise CheckpointError(
                    f"{name}: {self.name} has no place for {problem}; it holds "
                    f"{' and '.join(self.formats)}. Choose another layout "
                    f"({', '.join(writable_layouts())}), or convert the model to what it holds."
                )

    def for_layers(self, layers: Mapping[str, PackedLayer]) -> Layout:
        """Return this layout if it holds the layers, or its fallback. Raises CheckpointError."""
        if self.fallback and not self.holds(layers):
            return LAYOUTS[self.fallback]
        self.require(layers)
        return self

    def read(
        self, declared: Mapping[str, Any], shapes: Shapes, dtype: str
    ) -> dict[str, PackedLayer]:
        """Return the packed layers of a folder that another library may have written.

        Args:
            declared: its quantization_config.
            shapes: of all its tensors.
            dtype: of the dense model.

        Raises:
            CheckpointError: what cannot be read.
        """
        packed, scale = self.parts[PACKED], self.parts[SCALE]
        layers, unread = {}, dict[str, UnreadError]()
        for name, (shape, kind) in shapes.items():
            layer, _, last = name.rpartition(".")
            if last in self.unread:
                raise UnreadError(
                    f"{name}: a scale of inputs (AWQ, SVDQuant), which fp4pass does not apply. "
                    "Load this checkpoint with the library that wrote it."
                )
            if last != packed or kind != "U8":
                continue
            if join(layer, scale) not in shapes:
                raise CheckpointError(f"{name} has no {scale} beside it. Copy the folder again.")
            blocks = shapes[join(layer, scale)][0][-1]
            try:
                config = self._read_config(layer, declared, 2 * shape[-1], blocks)
            except UnreadError as error:
                unread[layer] = error
                continue
            layers[layer] = PackedLayer(config, dtype, False, (shape[0], 2 * shape[-1]))
        if unread:
            group, (first, *_) = self.group(next(iter(unread)), declared), unread.values()
            count = f"{len(unread)} layers are so: {some(list(unread))}"
            raise UnreadError(f"{f'{group}: ' if group else ''}{first} {count}.") from first
        return layers

    def _read_config(
        self, layer: str, declared: Mapping[str, Any], columns: int, blocks: int
    ) -> LinearConfig:
        """Return the config of one layer, whose scale has `blocks` columns."""
        found = self.scheme(layer, declared)
        if found.block is not None and found.block * blocks != columns:
            raise CheckpointError(
                f"{layer}.{self.parts[SCALE]}: expected {columns // found.block} columns, for "
                f"{columns} columns of weights in blocks of {found.block}, as the config says, got "
                f"{blocks}. The config is not that of these weights."
            )
        try:
            fmt = get_format(found.fmt, columns // max(blocks, 1))
            config = LinearConfig(
                fmt.name, None, found.weight_only, fmt.block, rotation=found.rotation
            )
        except OptionError as error:
            raise CheckpointError(f"{layer}: {error}") from error
        return config

    def expected(self, layer: PackedLayer) -> dict[str, tuple[tuple[tuple[int, ...], ...], str]]:
        """Return the shapes that each stored buffer of a layer may have, and its dtype."""
        fmt, (*rows, columns) = layer.fmt, layer.shape
        found: dict[str, tuple[tuple[tuple[int, ...], ...], str]] = {
            PACKED: (((*rows, fmt.packed_columns(columns)),), "U8"),
            SCALE: (((*rows, columns // fmt.block),), _DTYPES[fmt.scale.storage]),
        }
        if fmt.has_global_scale:
            one: tuple[tuple[int, ...], ...] = ((), (1,))
            each = layer.shape[:1] if layer.is_stacked else ()
            # Of the parts of an expert's rows, as gate and up.
            parts = ((*each, 2), (*each, 3)) if layer.is_stacked else ()
            found[GLOBAL] = ((each, *parts) if layer.is_stacked else one, "F32")
            found[INPUT_GLOBAL] = ((*one, each) if layer.is_stacked else one, "F32")
        return found


LAYOUTS: dict[str, Layout] = {}


def register_layout(cls: type[Layout]) -> type[Layout]:
    """Make a layout known by its name to everything that reads and writes; a class decorator.

    Example:
        >>> class Plain(fp4pass.checkpoint.Layout):
        ...     name = "plain"
        >>> fp4pass.checkpoint.register_layout(Plain) is Plain
        True
    """
    if not (isinstance(cls, type) and issubclass(cls, Layout)):
        raise OptionError(expected("register_layout: cls", "a subclass of Layout", repr(cls)))
    LAYOUTS[cls.name] = cls()
    return cls


def writable_layouts() -> tuple[str, ...]:
    """Return the names of the layouts that users can have written."""
    return tuple(name for name, layout in LAYOUTS.items() if layout.writable)


def get_layout(name: str) -> Layout:
    """Return a layout to write, by its name. Raises OptionError for an unknown one."""
    if name not in writable_layouts():
        raise unknown_name("layout: Layout", name, writable_layouts())
    return LAYOUTS[name]


def layout_of(declared: Mapping[str, Any], folder: Path) -> Layout:
    """Return the layout that a folder's quantization_config declares. Raises CheckpointError."""
    for layout in LAYOUTS.values():
        if layout.detect(declared):
            return layout
    raise UnreadError(
        f"{folder}: quant_method: expected that of {', '.join(LAYOUTS)}, got "
        f"{declared.get('quant_method')!r}. Load the folder with the library that wrote it."
    )


def side_files() -> tuple[str, ...]:
    """Return the names of the files that some layout has beside config.json."""
    return tuple(name for layout in LAYOUTS.values() for name in layout.side_files)


def join(path: str, name: str) -> str:
    """Return the name of a tensor of the module at a path."""
    return f"{path}.{name}" if path else name
