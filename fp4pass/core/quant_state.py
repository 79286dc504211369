"""The record of a quantized tensor, and its file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from ..errors import CheckpointError, OptionError, ShapeError, expected, unknown_name
from .files import parse_json, path_of
from .fingerprint import dtype_name, fingerprint
from .formats import FORMATS, WHOLE, Format, get_format
from .machine import moved
from .packing import PACKINGS

# The metadata entry of a safetensors file that holds all of a record but its tensors, and in it the
# fingerprint of each tensor and the checksum of the rest. safetensors writes several entries in any
# order, so there is one.
_METADATA, _CHECKSUMS = "quant_state", "checksums"


_Record = TypeVar("_Record", bound="TensorRecord")


class TensorRecord(ABC):
    """The base of records of a quantized tensor: codes, scales, and the scheme that reads them."""

    qdata: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype

    # The fields of the scales and of the scheme.
    scale_field: ClassVar[str] = "scale"
    scheme_field: ClassVar[str] = "format"

    @property
    def scheme(self) -> Any:
        """The record of what codes and scales mean."""
        return getattr(self, self.scheme_field)

    @property
    @abstractmethod
    def packing(self) -> str:
        """The order of the codes in the bytes of `qdata`."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored: codes, scales, and a global scale."""
        scales: Tensor = getattr(self, self.scale_field)
        has_global_scale = getattr(self.scheme, "has_global_scale", False)
        return self.qdata.nbytes + scales.nbytes + 4 * has_global_scale

    @classmethod
    @abstractmethod
    def _read(
        cls: type[_Record], qdata: Tensor, scale: Tensor, facts: Mapping[str, Any]
    ) -> _Record:
        """Return the record of tensors of a file, and of the facts beside them."""

    def to(self: _Record, device: torch.device | str) -> _Record:
        """Return the same tensor on another device."""
        tensors = {name: moved(getattr(self, name), device) for name in ("qdata", self.scale_field)}
        return dataclasses.replace(self, **tensors)  # type: ignore[type-var]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tensor to a safetensors file, with its scheme in the file's metadata."""
        save_state(path, self)

    @classmethod
    def load(
        cls: type[_Record], path: str | os.PathLike[str], device: torch.device | str = "cpu"
    ) -> _Record:
        """Read a tensor from a file. Raises CheckpointError for one that holds another record."""
        state = load_state(path, device)
        if not isinstance(state, cls):
            raise CheckpointError(
                f"{os.fspath(path)}: expected a {cls.__name__}, got {state}. Read it with "
                f"{type(state).__name__}.load."
            )
        return state

    def __repr__(self) -> str:
        factor = getattr(self, "global_scale", 1.0)
        noted = "" if factor == 1.0 else f", global_scale={factor}"
        size = " x ".join(map(str, self.shape)) or "scalar"
        return (
            f"{type(self).__name__}({size} {dtype_name(self.dtype)} in {self.scheme.key}, "
            f"{self._tile}{noted}, {self.nbytes} bytes on {self.qdata.device})"
        )

    @property
    def _tile(self) -> str:
        return f"blocks of {self.scheme.block}"

    def _require_tensor(self, field: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raise ShapeError unless a tensor of the record has its shape and its dtype."""
        tensor: Tensor = getattr(self, field)
        name = type(self).__name__
        if not self.dtype.is_floating_point:
            raise OptionError(expected(f"{name}.dtype", "a floating-point dtype", self.dtype))
        if tensor.shape != shape or tensor.dtype != dtype:
            size = " x ".join(map(str, self.shape)) or "scalar"
            wanted = f"{shape} {dtype} for a {size} tensor in {self.scheme.key}"
            got = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ShapeError(expected(f"{name}.{field}", wanted, got))


@dataclass(frozen=True, eq=False, repr=False)
class QuantState(TensorRecord):
    """A tensor in a format: `value = element(code) * scale * global_scale`.

    Blocks run along the last dimension K, which is padded with zeros to whole blocks.

    Attributes:
        qdata: packed codes, uint8 [..., P].
        scale: bits of the block scales, uint8 [..., ceil(K / block)]; of formats with float32
            scales those of a matrix, or of each of a stack: [..., *format.scale_shape(N, K)].
        global_scale: the multiplier of all block scales; 1.0 for formats without one.
        format: what the codes and scales mean.
        shape: the shape of the dense tensor.
        dtype: the dtype of the dense tensor.

    Raises:
        ShapeError: the tensors do not fit each other.

    Example:
        >>> state = fp4pass.quantize(torch.randn(4, 64), "nvfp4")
        >>> state.save("weight.safetensors")
        >>> state = fp4pass.QuantState.load("weight.safetensors").to("cpu")
        >>> state.qdata.shape, state.scale.shape
        (torch.Size([4, 32]), torch.Size([4, 4]))
    """

    qdata: Tensor
    scale: Tensor
    global_scale: float
    format: Format
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not 0.0 < self.global_scale < math.inf:
            raise OptionError(
                expected("QuantState.global_scale", "a positive number", self.global_scale)
            )
        *leading, columns = self.shape or (1,)
        fmt = self.format
        if fmt.has_float_scale:
            self._require_tensor("qdata", self.shape or (1,), torch.uint8)
            outer = (*leading[:-1], *map(fmt.scale_rows, leading[-1:]))
            scales = (*outer, fmt.scale_columns(columns))
        else:
            blocks = -(-columns // fmt.block)
            packed = fmt.packed_columns(blocks * fmt.block)
            self._require_tensor("qdata", (*leading, packed), torch.uint8)
            scales = (*leading, blocks)
        self._require_tensor("scale", scales, fmt.scale.dtype)

    @property
    def packing(self) -> str:
        """The order of the codes in the bytes of `qdata`."""
        return PACKINGS[self.format.element.bits]

    @property
    def _tile(self) -> str:
        fmt = self.format
        return f"a scale for {fmt.tile}" if fmt.has_float_scale else super()._tile

    def rows(self, start: int, stop: int) -> QuantState:
        """Return some rows of a matrix, from the first of a tile on.

        Example:
            >>> fp4pass.quantize(torch.randn(4, 64), "fp8").rows(1, 3).scale.shape
            torch.Size([2, 1])
        """
        qdata, scale, fmt = self.qdata[start:stop], self.scale, self.format
        if fmt.rows != WHOLE:
            scale = scale[start // fmt.rows : -(-stop // fmt.rows)]
        return dataclasses.replace(
            self, qdata=qdata, scale=scale, shape=(len(qdata), self.shape[1])
        )

    @classmethod
    def _read(cls, qdata: Tensor, scale: Tensor, facts: Mapping[str, Any]) -> QuantState:
        """Return the record of tensors of a file, and of the facts beside them."""
        fmt, global_scale = get_format(facts["scheme"]), float(facts["global_scale"])
        return cls(qdata, scale, global_scale, fmt, facts["shape"], facts["dtype"])


class OtherRecord(TensorRecord):
    """The base of records of schemes that are no formats, which quantize by themselves."""

    @classmethod
    @abstractmethod
    def quantize(
        cls, x: Tensor, scheme: str, block: int | str, method: object, global_scale: float | str
    ) -> OtherRecord:
        """Quantize a checked tensor, as `fp4pass.quantize` does."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Return the dense tensor, as `fp4pass.dequantize` does."""


_IMPORT = "Import fp4pass.parity first for codebooks, such as nf4."

# By the names of their schemes; `import fp4pass.parity` adds the codebooks.
OTHER_RECORDS: dict[str, type[OtherRecord]] = {}


def other_record(scheme: str) -> type[OtherRecord] | None:
    """Return the class of a scheme's records, None for a format's. Raises OptionError."""
    base = str(scheme).partition(":")[0]
    if base in FORMATS or base in OTHER_RECORDS:
        return OTHER_RECORDS.get(base)
    error = unknown_name("Scheme", scheme, [*OTHER_RECORDS, *FORMATS])
    if OTHER_RECORDS:
        raise error
    raise OptionError(f"{error} {_IMPORT}")


def load_state(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> TensorRecord:
    """Read a quantized tensor from a file.

    Args:
        path: a file that the `save` of a record wrote.
        device: where to put the tensor.

    Returns:
        A QuantState for a tensor in a format; after `import fp4pass.parity`, a CodebookState for
        one in a codebook.

    Raises:
        CheckpointError: the file is missing, damaged in any bit, or was written by something else.

    Example:
        >>> state = fp4pass.quantize(torch.randn(4, 64), "mxfp4")
        >>> state.save("weight.safetensors")
        >>> loaded = fp4pass.quantization.functional.load_state("weight.safetensors")
        >>> torch.equal(loaded.qdata, state.qdata)
        True
    """
    return read_state(path)[0].to(device)


def read_state(path: str | os.PathLike[str]) -> tuple[TensorRecord, dict[str, Tensor]]:
    """Return the record of a file, and all tensors that are there, in memory of their own."""
    try:
        # Reading a mapped file beyond the end of one that is cut off meanwhile ends the process.
        data = path_of(path, "path").read_bytes()
        tensors = {name: tensor.clone() for name, tensor in load(data).items()}
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
        facts = parse_json(header["__metadata__"][_METADATA])
        shape, dtype = tuple(facts["shape"]), getattr(torch, facts["dtype"])
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"expected a floating-point dtype, got {facts['dtype']}")
        if not all(isinstance(size, int) and size > 0 for size in shape):
            raise ValueError(f"expected a shape of positive sizes, got {facts['shape']}")
        record: type[TensorRecord] = other_record(facts["scheme"]) or QuantState
        given = {**facts, "shape": shape, "dtype": dtype}
        state = record._read(tensors["qdata"], tensors["scale"], given)
        if _CHECKSUMS not in facts:
            raise ValueError("it has no checksums, and may be damaged")
        found, noted = _checksums(tensors, facts), facts[_CHECKSUMS]
        if damaged := [name for name in found if noted.get(name) != found[name]]:
            raise ValueError(f"it is damaged ({', '.join(damaged)}: another checksum)")
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
        way_out = "" if _IMPORT in str(error) else ". Save it again."
        raise CheckpointError(
            f"{os.fspath(path)}: expected a tensor that QuantState.save or CodebookState.save "
            f"wrote: {error}{way_out}"
        ) from error
    return state, tensors


def _checksums(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells the tensors of a file, and the facts beside them, from others."""
    sums = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    others = {key: value for key, value in facts.items() if key != _CHECKSUMS}
    return {**sums, _METADATA: hashlib.sha256(json.dumps(others).encode()).hexdigest()}


def save_state(
    path: str | os.PathLike[str], state: TensorRecord, beside: Mapping[str, Tensor] | None = None
) -> None:
    """Write what `load_state` makes the record of again, and other tensors beside it."""
    facts = {
        "scheme": state.scheme.key,
        "shape": list(state.shape),
        "dtype": dtype_name(state.dtype),
        "global_scale": getattr(state, "global_scale", 1.0),
        "packing": state.packing,
    }
    tensors = {"qdata": state.qdata, "scale": getattr(state, state.scale_field), **(beside or {})}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    file, record = path_of(path, "path"), {**facts, _CHECKSUMS: _checksums(tensors, facts)}
    try:
        save_file(tensors, file, metadata={_METADATA: json.dumps(record)})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be written: {error}. Choose another path.") from error
