"""The records of a quantized tensor, and their files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from ..errors import (
    CheckpointError,
    OptionError,
    ShapeError,
    expected,
    require_type,
)
from .codebooks import Codebook, get_scheme
from .devices import moved
from .fingerprint import fingerprint
from .formats import Format
from .packing import PACKINGS
from .paths import path_of

# The metadata entry of a safetensors file that holds all of a record but its tensors, and in it the
# fingerprint of each tensor and the checksum of the rest. safetensors writes several entries in any
# order, so there is one.
_METADATA, _CHECKSUMS = "quant_state", "checksums"


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a small safetensors file, in memory of their own."""
    # Reading a mapped file beyond the end of one that is cut off meanwhile ends the process.
    with open(path, "rb") as file:
        data = file.read()
    tensors = {name: tensor.clone() for name, tensor in load(data).items()}
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return tensors, header.get("__metadata__", {})


@dataclass(frozen=True, eq=False)
class QuantState:
    """A tensor in a format: `value = element(code) * scale * global_scale`.

    Blocks run along the last dimension K, which is padded with zeros to whole blocks.

    Attributes:
        qdata: packed codes, uint8 [..., P].
        scale: bits of the block scales, uint8 [..., ceil(K / block)].
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
        _require_facts(self, "format", Format)
        require_type("QuantState.global_scale", "a positive number", self.global_scale, float, int)
        if not 0.0 < self.global_scale < math.inf:
            raise OptionError(
                expected("QuantState.global_scale", "a positive number", self.global_scale)
            )
        *leading, columns = self.shape or (1,)
        blocks = -(-columns // self.format.block)
        packed = self.format.packed_columns(blocks * self.format.block)
        _require_tensor(self, self.format.key, "qdata", (*leading, packed), torch.uint8)
        _require_tensor(self, self.format.key, "scale", (*leading, blocks), torch.uint8)

    @property
    def packing(self) -> str:
        """The order of the codes in the bytes of `qdata`."""
        return PACKINGS[self.format.element.bits]

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, the block scales and the global scale."""
        return self.qdata.nbytes + self.scale.nbytes + 4 * self.format.has_global_scale

    def to(self, device: torch.device | str) -> QuantState:
        """Return the same tensor on another device."""
        return dataclasses.replace(
            self, qdata=moved(self.qdata, device), scale=moved(self.scale, device)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tensor to a safetensors file, with its format in the file's metadata."""
        save_state(path, self)

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> QuantState:
        """Read a tensor in a format. Raises CheckpointError for a file that holds none."""
        return _require_state(QuantState, path, load_state(path, device))

    def __repr__(self) -> str:
        factor = "" if self.global_scale == 1.0 else f", global_scale={self.global_scale}"
        return _text(self, self.format.key, self.format.block, factor)


@dataclass(frozen=True, eq=False)
class CodebookState:
    """A tensor in a codebook: `value = values[code] * absmax`.

    Blocks run over the flattened tensor of n elements; the last one may be shorter.

    Attributes:
        qdata: packed codes, uint8 [ceil(n * bits / 8)].
        absmax: the largest magnitude of each block, float32 [ceil(n / block)].
        codebook: the table of values.
        shape: the shape of the dense tensor.
        dtype: the dtype of the dense tensor.

    Raises:
        ShapeError: the tensors do not fit each other.

    Example:
        >>> state = fp4pass.quantize(torch.randn(4, 64), "nf4")
        >>> state.save("weight.safetensors")
        >>> state = fp4pass.CodebookState.load("weight.safetensors").to("cpu")
        >>> fp4pass.dequantize(state).shape
        torch.Size([4, 64])
    """

    qdata: Tensor
    absmax: Tensor
    codebook: Codebook
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        _require_facts(self, "codebook", Codebook)
        count, key = math.prod(self.shape), self.codebook.key
        _require_tensor(self, key, "qdata", (self.codebook.packed_bytes(count),), torch.uint8)
        _require_tensor(self, key, "absmax", (self.codebook.blocks_of(count),), torch.float32)

    @property
    def packing(self) -> str:
        """The order of the codes in the bytes of `qdata`."""
        return "2 codes a byte, the first high" if self.codebook.bits == 4 else "1 code a byte"

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and of absmax."""
        return self.qdata.nbytes + self.absmax.nbytes

    def to(self, device: torch.device | str) -> CodebookState:
        """Return the same tensor on another device."""
        return dataclasses.replace(
            self, qdata=moved(self.qdata, device), absmax=moved(self.absmax, device)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tensor to a safetensors file, with its codebook in the file's metadata."""
        save_state(path, self)

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> CodebookState:
        """Read a tensor in a codebook. Raises CheckpointError for a file that holds none."""
        return _require_state(CodebookState, path, load_state(path, device))

    def __repr__(self) -> str:
        return _text(self, self.codebook.key, self.codebook.block, "")


def load_state(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> QuantState | CodebookState:
    """Read a quantized tensor from a file.

    Args:
        path: a file that `QuantState.save` or `CodebookState.save` wrote.
        device: where to put the tensor.

    Returns:
        A QuantState for a tensor in a format, a CodebookState for one in a codebook.

    Raises:
        CheckpointError: the file is missing, damaged in any bit, or was written by something else.

    Example:
        >>> state = fp4pass.quantize(torch.randn(4, 64), "mxfp4")
        >>> state.save("weight.safetensors")
        >>> torch.equal(fp4pass.tensor.load_state("weight.safetensors").qdata, state.qdata)
        True
    """
    source = path_of(path, "path")
    try:
        tensors, metadata = read_file(source)
        facts = json.loads(metadata[_METADATA])
        qdata, scale = tensors["qdata"], tensors["scale"]
        scheme = get_scheme(facts["scheme"])
        shape, dtype = tuple(facts["shape"]), getattr(torch, facts["dtype"])
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"expected a floating-point dtype, got {facts['dtype']}")
        if not all(isinstance(size, int) and size > 0 for size in shape):
            raise ValueError(f"expected a shape of positive sizes, got {facts['shape']}")
        state: QuantState | CodebookState
        if isinstance(scheme, Codebook):
            state = CodebookState(qdata, scale, scheme, shape, dtype)
        else:
            global_scale = float(facts["global_scale"])
            state = QuantState(qdata, scale, global_scale, scheme, shape, dtype)
        _require_checksums(tensors, facts)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{os.fspath(path)}: expected a tensor that QuantState.save or CodebookState.save "
            f"wrote: {error}. Save it again."
        ) from error
    return state.to(device)


def _checksums(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells the tensors of a file, and the facts beside them, from others."""
    sums = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    others = {key: value for key, value in facts.items() if key != _CHECKSUMS}
    return {**sums, _METADATA: hashlib.sha256(json.dumps(others).encode()).hexdigest()}


def _require_checksums(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Raise ValueError for a file that is not, to the bit, what was written."""
    if _CHECKSUMS not in facts:
        raise ValueError("it has no checksums, and may be damaged")
    found, noted = _checksums(tensors, facts), facts[_CHECKSUMS]
    if found != noted:
        damaged = [name for name in found if name not in noted or found[name] != noted[name]]
        raise ValueError(f"it is damaged ({', '.join(damaged)}: another checksum)")


_State = TypeVar("_State", QuantState, CodebookState)


def _require_state(
    cls: type[_State], path: str | os.PathLike[str], state: QuantState | CodebookState
) -> _State:
    """Return the state if it is of the class that was asked for, else raise CheckpointError."""
    if not isinstance(state, cls):
        raise CheckpointError(
            f"{os.fspath(path)}: expected a {cls.__name__}, got {state}. Read it with "
            f"{type(state).__name__}.load."
        )
    return state


def save_state(
    path: str | os.PathLike[str],
    state: QuantState | CodebookState,
    beside: Mapping[str, Tensor] | None = None,
) -> None:
    """Write what `load_state` makes the record of again, and other tensors beside it."""
    if isinstance(state, QuantState):
        scheme, scale, global_scale = state.format.key, state.scale, state.global_scale
    else:
        scheme, scale, global_scale = state.codebook.key, state.absmax, 1.0
    facts = {
        "scheme": scheme,
        "shape": list(state.shape),
        "dtype": str(state.dtype).removeprefix("torch."),
        "global_scale": global_scale,
        "packing": state.packing,
    }
    tensors = {"qdata": state.qdata, "scale": scale, **(beside or {})}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    file, record = path_of(path, "path"), {**facts, _CHECKSUMS: _checksums(tensors, facts)}
    try:
        save_file(tensors, file, metadata={_METADATA: json.dumps(record)})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be written: {error}. Choose another path.") from error


def _require_facts(state: QuantState | CodebookState, scheme: str, kind: type) -> None:
    """Raise OptionError for a scheme, a shape or a dtype that is none."""
    name = type(state).__name__
    require_type(f"{name}.{scheme}", f"a {kind.__name__}", getattr(state, scheme), kind)
    require_type(f"{name}.shape", "a tuple of sizes", state.shape, tuple)
    for size in state.shape:
        require_type(f"{name}.shape", "a tuple of sizes", size, int)
    require_type(f"{name}.dtype", "a floating-point dtype", state.dtype, torch.dtype)
    if not state.dtype.is_floating_point:
        raise OptionError(expected(f"{name}.dtype", "a floating-point dtype", state.dtype))


def _require_tensor(
    state: QuantState | CodebookState,
    scheme: str,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Raise ShapeError unless a tensor of a record has its shape and its dtype."""
    tensor: Tensor = getattr(state, name)
    require_type(f"{type(state).__name__}.{name}", "a torch.Tensor", tensor, Tensor)
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ShapeError(
            f"{type(state).__name__}.{name}: expected {shape} {dtype} for a {_size(state)} tensor "
            f"in {scheme}, got {tuple(tensor.shape)} {tensor.dtype}."
        )


def _size(state: QuantState | CodebookState) -> str:
    return " x ".join(map(str, state.shape)) or "scalar"


def _text(state: QuantState | CodebookState, scheme: str, block: int, factor: str) -> str:
    dtype = str(state.dtype).removeprefix("torch.")
    return (
        f"{type(state).__name__}({_size(state)} {dtype} in {scheme}, blocks of {block}{factor}, "
        f"{state.nbytes} bytes on {state.qdata.device})"
    )
