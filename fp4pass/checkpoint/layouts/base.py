"""Define a layout, and read the layers of a folder in one; register and find layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..._version import __version__
from ...core.formats import Format, get_format
from ...errors import (
    CheckpointError,
    OptionError,
    UnreadError,
    as_option,
    expected,
    some,
    unknown_name,
)
from ...nn.kv_cache import CACHE_FORMATS, SCALES
from ...nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from ...record.config import LinearConfig
from ..source_files import Shapes
from .layer import BUFFERS, PackedLayer, Scheme, from_globs, join

# The file of weights that other libraries look for.
WEIGHTS = "model.safetensors"

# The ends of the names of scales of a quantized key-value cache.
CACHE_SCALES = (*(f".{each}" for each in SCALES), ".k_proj.output_scale", ".v_proj.output_scale")

# Last parts of the names of scales of inputs (AWQ, SVDQuant).
_NOT_APPLIED = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")


@dataclass(frozen=True)
class CacheLayout:
    """The scales of a quantized key-value cache in a folder, and what declares their format."""

    # The `kv_cache_scheme` of each format: None where readers are to keep the cache in floating
    # point, {} where nothing is declared.
    schemes: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    # The ends of the names of scales, by those of the buffers in a model; of what differs.
    names: Mapping[str, str] = field(default_factory=dict)
    shape: tuple[int, ...] = (1,)  # of a scale
    algorithms: Mapping[str, str] = field(default_factory=dict)  # by `kv_cache_quant_algo`

    def config(self, fmt: str | None, layout: str) -> dict[str, Any]:
        """Return what declares a cache in a format. Raises CheckpointError where nothing can."""
        if fmt is not None and fmt not in self.schemes:
            held = f"{layout} holds {' and '.join(self.schemes) or 'none'}"
            raise CheckpointError(
                f"{as_option('kv_cache', fmt)}: {held}. Choose "
                f"{as_option('layout', 'compressed-tensors')}, or leave the cache in float."
            )
        scheme = {} if fmt is None else self.schemes[fmt]
        return {} if scheme == {} else {"kv_cache_scheme": scheme and dict(scheme)}

    def format(self, declared: Mapping[str, Any]) -> str | None:
        """Return the format that a quantization_config declares, if any."""
        declared = declared.get("quantization", declared)
        if (named := declared.get("kv_cache_quant_algo")) is not None:
            return next((fmt for fmt, each in self.algorithms.items() if each == named), None)
        scheme = declared.get("kv_cache_scheme") or {}
        if not isinstance(scheme, Mapping):
            what = "the scheme of a key-value cache, or null"
            raise TypeError(expected("kv_cache_scheme", what, repr(scheme)))
        known = ((fmt, each) for fmt, each in self.schemes.items() if each)
        return next((fmt for fmt, each in known if each.items() <= scheme.items()), None)

    def stored(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """Return a scale with its name as a folder has them."""
        path, _, last = name.rpartition(".")
        tensor = tensor.reshape(()) if self.shape == () else torch.atleast_1d(tensor)
        return join(path, self.names.get(last, last)), tensor


class Layout:
    """The tensors of packed weights in a folder, and the config that declares them.

    `to_stored` and `from_stored` turn the state dict of packed layers into the tensors of a folder
    and back; the attributes tell them how. `config` makes the entry in config.json, `detect` knows
    it again, and `scheme` reads it. To add a layout, pass a subclass to `register_layout`.

    Attributes:
        name: what users call it, and its quant_method unless `detect` says otherwise.
        parts: the name of each buffer of a QuantizedLinear, beside that of its module; without
            one for `input_global_scale` inputs stay in floating point.
        native_parts: those that differ for codes that are numbers of a dtype of torch, as FP8.
        formats: keys of the formats that it holds.
        inputs: other formats that inputs of weights in a format may have.
        multiplies: global scales are stored as multipliers [] rather than as divisors [1].
        stacks: it holds stacks of experts alone, which a model has as [E, K, N]. A part is a
            suffix of the name of the parameter, and codes are [E, N, K / block, bytes].
        engines: serving engines read it, from the file `WEIGHTS` and in bfloat16. Else buffers are
            stored as they are, and fp4pass.json alone declares them.
        is_written: `save` and `transcode` write it, too.
        fallback: name of the layout that is written for layers that this one cannot hold.
        dtypes: names of safetensors for the dtypes of parts, of what differs from codes in U8 and
            scales in the dtype of the format.
        side_files: the files that it has beside config.json.
        dense_keys: where a quantization_config lists what stays dense, the first that does.
        has_globs: it lists these as globs.
        cache: how it has a quantized key-value cache.

    Example:
        >>> layout = fp4pass.checkpoint.LAYOUTS["modelopt"]
        >>> layout.name, layout.formats[0]
        ('modelopt', 'nvfp4')
    """

    name: ClassVar[str]
    parts: ClassVar[Mapping[str, str]] = dict(zip(BUFFERS, BUFFERS, strict=True))
    native_parts: ClassVar[Mapping[str, str]] = {}
    formats: ClassVar[tuple[str, ...]] = ()
    inputs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    multiplies: ClassVar[bool] = False
    stacks: ClassVar[bool] = False
    engines: ClassVar[bool] = True
    is_written: ClassVar[bool] = True
    fallback: ClassVar[str] = ""
    dtypes: ClassVar[Mapping[str, str]] = {}
    side_files: ClassVar[tuple[str, ...]] = ()
    dense_keys: ClassVar[tuple[str, ...]] = ("ignore",)
    has_globs: ClassVar[bool] = False
    cache: ClassVar[CacheLayout] = CacheLayout()

    @property
    def weights(self) -> str:
        """The file of weights, if one is enough; others must not take ours for theirs."""
        return WEIGHTS if self.engines else f"{self.name}.safetensors"

    @property
    def dtype(self) -> str:
        """The dtype that its readers compute in, "" for that of the model."""
        return "bfloat16" if self.engines else ""

    def to_stored(
        self,
        state: Mapping[str, Tensor],
        layers: Mapping[str, PackedLayer],
        has_cache: bool = False,
    ) -> dict[str, Tensor]:
        """Return the tensors of a folder, by their names.

        Args:
            state: tensors of a state dict, by their names; buffers of a QuantizedLinear are stored
                in the layout, others as they are.
            layers: the packed layers among them.
            has_cache: scales of a key-value cache are declared, and stored in the layout.
        """
        found = {}
        for name, tensor in state.items():
            path, _, last = name.rpartition(".")
            if path in layers and last in self.parts:
                name = self.tensor_name(path, last, layers[path].fmt)
                tensor = self.encode(last, tensor, layers[path])
            elif has_cache and last in SCALES:
                name, tensor = self.cache.stored(name, tensor)
            found[name] = tensor
        return found

    def from_stored(
        self, tensors: Mapping[str, Tensor], layers: Mapping[str, PackedLayer]
    ) -> dict[str, Tensor]:
        """Return the state dict of which `to_stored` made tensors, by their names.

        Exact for global scales where `multiplies` of a layer is as `open_checkpoint` says.
        """
        parts = {
            self.tensor_name(name, part, layer.fmt): (name, part)
            for name, layer in layers.items()
            for part in self.parts
        }
        found = {}
        for stored, tensor in tensors.items():
            if stored not in parts:
                found[stored] = tensor
                continue
            name, part = parts[stored]
            found[join(name, part)] = self.decode(part, tensor, layers[name])
        return found

    def tensor_name(self, layer: str, part: str, fmt: Format) -> str:
        """Return the name on disk of a buffer of a layer in a format."""
        name = self.parts[part]
        if self.engines and fmt.element.native is not None:
            name = self.native_parts.get(part, name)
        return layer + name if self.stacks else join(layer, name)

    def encode(self, part: str, tensor: Tensor, layer: PackedLayer) -> Tensor:
        """Return a buffer of a layer as it is stored."""
        fmt = layer.fmt
        if not self.engines:
            return tensor
        if part == PACKED and self.stacks:
            return tensor.unflatten(-1, (-1, fmt.packed_columns(fmt.block)))
        if part == PACKED:
            native = fmt.element.native
            return tensor if native is None else tensor.view(native)
        if part == SCALE:
            return tensor.reshape(self.scale_shapes(layer)[0]) if fmt.has_float_scale else tensor
        if layer.format_of(part).has_global_scale and self.multiplies != layer.config.multiplies:
            tensor = 1 / tensor
        return tensor.reshape(()) if self.multiplies else tensor

    def decode(self, part: str, tensor: Tensor, layer: PackedLayer) -> Tensor:
        """Return a buffer of a layer of what is stored: the inverse of `encode`."""
        if not self.engines:
            return tensor
        if part == PACKED:
            return tensor.flatten(-2) if self.stacks else tensor.view(torch.uint8)
        if part == SCALE:
            is_float = layer.fmt.has_float_scale
            return tensor.float().reshape(layer.scale_shape) if is_float else tensor
        if layer.format_of(part).has_global_scale and self.multiplies != layer.config.multiplies:
            tensor = 1 / tensor
        # Others may have it in bfloat16.
        return torch.atleast_1d(tensor.float())

    def scale_shapes(self, layer: PackedLayer) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scales of a layer may have on disk, the written one first."""
        return (layer.scale_shape,)

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config that declares packed layers.

        Args:
            layers: the packed layers, by their names.
            ignore: names and patterns of the layers that stay dense.
        """
        return {"quant_method": self.name, "version": __version__}

    def files(
        self, layers: Mapping[str, PackedLayer], ignore: Sequence[str], cache: str | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return the JSON of each of `side_files`, by its name."""
        # Arguments are as for `config`; cache: the format of the key-value cache.
        return {}

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether a quantization_config declares this layout."""
        return declared.get("quant_method") == self.name

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

    def ignored(self, declared: Mapping[str, Any]) -> list[str] | None:
        """Return what a quantization_config says stays dense, None if it says nothing."""
        declared = declared.get("quantization", declared)
        found = [declared[key] for key in self.dense_keys if declared.get(key) is not None]
        names = next(filter(None, found), ())
        return (from_globs(names) if self.has_globs else list(names)) if found else None

    def require_applied(self, declared: Mapping[str, Any], shapes: Shapes) -> None:
        """Raise CheckpointError for what a folder has and fp4pass does not apply."""
        for name in shapes:
            if name.rpartition(".")[2] in _NOT_APPLIED:
                raise UnreadError(
                    f"{name}: a scale of inputs (AWQ, SVDQuant), which fp4pass does not apply. "
                    "Load this checkpoint with the library that wrote it."
                )

    def config_problem(self, config: LinearConfig) -> str:
        """Return what this layout has no place for in a config, "" if it holds such layers."""
        key = config.format.with_multiplier(False).key
        if config.is_rotated:
            return f"{key} with rotated weights"
        if config.input_format is not None and config.input_format.has_global_scale:
            if INPUT_GLOBAL not in self.parts:
                return f"{key} with 4-bit inputs"
        if config.inputs is not None:
            return "" if config.inputs in self.inputs.get(key, ()) else config.scheme
        return "" if key in self.formats else key

    def problem(self, layer: PackedLayer) -> str:
        """Return what this layout has no place for in a layer, "" if it holds the layer."""
        if not self.engines:
            return ""
        if not self.stacks and layer.is_stacked:
            return "stacked experts"
        if self.stacks and not (
            layer.is_stacked and layer.transposed and layer.config.input_format is None
        ):
            return "anything but experts as [E, K, N] with inputs in float. Skip others with a rule"
        problem = self.config_problem(layer.config)
        is_turned = layer.transposed and not self.stacks
        return problem or (f"{layer.fmt.key}, transposed" if is_turned else "")

    def require(self, layers: Mapping[str, PackedLayer]) -> None:
        """Raise CheckpointError for the first layer that this layout has no place for."""
        for name, layer in layers.items():
            if problem := self.problem(layer):
                raise CheckpointError(
                    f"{name}: {self.name} has no place for {problem}; it holds "
                    f"{' and '.join(self.formats)}. Choose another layout, or convert the model to "
                    "what it holds."
                )


LAYOUTS: dict[str, Layout] = {}

# The names of those that `save` writes, as type checkers know them.
LayoutName = Literal["compressed-tensors", "compressed-tensors-hadamard", "modelopt", "gpt-oss"]


def register_layout(cls: type[Layout]) -> type[Layout]:
    """Make a layout known by its name to everything that reads and writes; a class decorator.

    Example:
        >>> class Plain(fp4pass.checkpoint.Layout):
        ...     name = "plain"
        >>> fp4pass.checkpoint.register_layout(Plain) is Plain
        True
    """
    LAYOUTS[cls.name] = cls()
    return cls


def written_layouts() -> list[str]:
    """Return the names of the layouts that can be written."""
    return [name for name, layout in LAYOUTS.items() if layout.is_written]


def get_layout(name: str) -> Layout:
    """Return a layout to write, by its name. Raises OptionError for any other name."""
    if name not in written_layouts():
        raise unknown_name("layout: Layout", name, written_layouts())
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


@register_layout
class Own(Layout):
    """The buffers under their own names; only fp4pass.json says what they are."""

    # Under the usual file name transformers would load the folder with random weights.

    name = "fp4pass"
    engines = False
    cache = CacheLayout({fmt: {} for fmt in CACHE_FORMATS})


# The safetensors names of what the scales of a format are stored in.
_DTYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.float32: "F32"}

# Those of codes that are numbers of torch, and of scales that are any float.
_NATIVE = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_FLOATS = ("F32", "BF16", "F16", "F8_E8M0")


def read_layers(
    layout: Layout, declared: Mapping[str, Any], shapes: Shapes, dtype: str
) -> dict[str, PackedLayer]:
    """Return the packed layers of a folder by what it declares. Raises CheckpointError."""
    layout.require_applied(declared, shapes)
    layers, unread = {}, dict[str, UnreadError]()
    for name, (_, kind) in shapes.items():
        if (layer := _layer_of(layout, name, kind)) is None:
            continue
        try:
            found = layout.scheme(layer, declared)
        except UnreadError as error:
            unread[layer] = error
            continue
        fmt = get_format(found.fmt)
        # Others are not read, and `require_all_read` says so.
        if name == layout.tensor_name(layer, PACKED, fmt) and kind == _codes_dtype(layout, fmt):
            layers[layer] = _read_layer(layout, layer, name, found, shapes, dtype)
    if unread:
        first = next(iter(unread.values()))
        raise UnreadError(f"{first} {len(unread)} layers are so: {some([*unread])}.") from first
    return layers


def _layer_of(layout: Layout, name: str, kind: str) -> str | None:
    """Return the layer whose codes a tensor may be by its name and dtype, None for others."""
    usual = layout.parts[PACKED]
    if layout.stacks:
        return name.removesuffix(usual) if name.endswith(usual) else None
    layer, _, last = name.rpartition(".")
    is_native = kind in _NATIVE.values() and last == layout.native_parts.get(PACKED, usual)
    is_native &= any(get_format(each).element.native is not None for each in layout.formats)
    is_bytes = kind == layout.dtypes.get(PACKED, "U8") and last == usual
    return layer if is_native or is_bytes else None


def _read_layer(
    layout: Layout, layer: str, codes: str, found: Scheme, shapes: Shapes, dtype: str
) -> PackedLayer:
    """Return the record of a layer. Raises CheckpointError for tensors of another scheme."""
    fmt, (shape, _) = get_format(found.fmt), shapes[codes]
    scale = layout.tensor_name(layer, SCALE, fmt)
    if scale not in shapes:
        raise CheckpointError(f"{codes} has no {scale} beside it. Copy the folder again.")
    rows, columns = shape[:1], fmt.columns(shape[-1])
    if layout.stacks:
        if len(shape) != 4:
            what = "shape [experts, N, K / 32, 16]"
            raise CheckpointError(expected(codes, what, list(shape)))
        rows, columns = shape[:2], shape[2] * fmt.block
    block: int | str = "default"
    if not fmt.has_float_scale:
        blocks = shape[2] if layout.stacks else shapes[scale][0][-1]
        if found.block is not None and found.block * blocks != columns:
            raise CheckpointError(
                f"{scale}: expected {columns // found.block} columns, for {columns} columns of "
                f"weights in blocks of {found.block}, as the config says, got {blocks}. The config "
                "is not that of these weights."
            )
        block = columns // max(blocks, 1)
    try:
        fmt = get_format(found.fmt, block)
        config = LinearConfig(
            fmt.name,
            None,
            found.weight_only,
            fmt.block,
            rotation=found.rotation,
            inputs=found.inputs,
        )
    except OptionError as error:
        raise CheckpointError(f"{layer}: {error}") from error
    shape = (*rows, columns)
    return PackedLayer(config, dtype, layout.stacks, shape, static_inputs=found.static_inputs)


def _codes_dtype(layout: Layout, fmt: Format) -> str:
    native = fmt.element.native
    return layout.dtypes.get(PACKED, "U8") if native is None else _NATIVE[native]


# By kind: the dtypes and the shapes that a tensor may have, the usual ones first.
Expected = tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]


def expected_shapes(layout: Layout, layer: PackedLayer) -> dict[str, Expected]:
    """Return the shapes and dtypes that each stored buffer of a layer may have."""
    fmt, (*rows, columns) = layer.fmt, layer.shape
    codes = (*rows, fmt.packed_columns(columns))
    if layout.stacks:
        codes = (*layer.scale_shape, fmt.packed_columns(fmt.block))
    kinds = (layout.dtypes.get(SCALE, _DTYPES[fmt.scale.storage]),)
    found: dict[str, Expected] = {PACKED: ((codes,), ("U8",)), SCALE: ((layer.scale_shape,), kinds)}
    if layout.engines:
        found = {
            PACKED: ((codes,), (_codes_dtype(layout, fmt),)),
            SCALE: (layout.scale_shapes(layer), _FLOATS if fmt.has_float_scale else kinds),
        }
    one: tuple[tuple[int, ...], ...] = ((), (1,))
    each = layer.shape[:1]
    inputs = (*one, each) if layer.is_stacked else one
    if fmt.has_global_scale:
        # Of all rows of an expert, or of its parts, as gate and up.
        of_stack = (each, (*each, 2), (*each, 3))
        found[GLOBAL] = (of_stack if layer.is_stacked else one, ("F32",))
        found[INPUT_GLOBAL] = (inputs, ("F32",))
    if layer.static_inputs:
        found[INPUT_GLOBAL] = (inputs, _FLOATS)
    return found
