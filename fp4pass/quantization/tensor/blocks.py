"""Tensors with one dimension that is a block: the record of them quantized, checks and search."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch import Tensor

from ... import ops
from ...core.elements import Element, element_table
from ...core.formats import Format, get_format
from ...core.packing import unpack_codes
from ...errors import DtypeError, NonFiniteError, OptionError, ShapeError, expected
from ...kernels.common.rounding import scale_values
from ...kernels.search.reference import search_ref
from ...kernels.statistics.naive import HESSIAN_BLOCK, weight_amax
from ...ops.checks import require_dense

# Elements of the inputs that are read together, in float64.
_CHUNK = 1 << 22


@dataclass(frozen=True, eq=False)
class QuantizedBlocks:
    """Quantized blocks of a tensor, one dimension of which is the block.

    Attributes:
        packed: the codes, uint8; in the shape of the tensor, with the bytes of a block along `dim`.
        scale: the bits of the block scales, uint8; in the shape of the tensor without `dim`.
        global_scale: the multiplier of all block scales; 1.0 for formats without one.
        format: what the codes and the scales mean, with the block size in force.
        dim: the dimension that is the block.

    Example:
        >>> blocks = fp4pass.functional.quantize_blocks(torch.randn(8, 4, 16))
        >>> torch.equal(blocks.dequantize(), blocks.values() * blocks.steps()[..., None])
        True
    """

    packed: Tensor
    scale: Tensor
    global_scale: float
    format: Format
    dim: int

    def steps(self) -> Tensor:
        """Return the factors of the values: scale times global scale, as float32.

        Example:
            >>> fp4pass.functional.quantize_blocks(torch.randn(8, 4, 16)).steps().shape
            torch.Size([8, 4])
        """
        return scale_values(self.scale, self.format.scale).mul_(self.global_scale)

    def values(self) -> Tensor:
        """Return the signed element values, as float32 in the shape of the tensor.

        Example:
            >>> fp4pass.functional.quantize_blocks(torch.randn(8, 4, 16)).values().abs().max()
            tensor(6.)
        """
        packed = self.packed.movedim(self.dim, -1)
        return element_values(packed, self.format.element).movedim(-1, self.dim)

    def dequantize(self) -> Tensor:
        """Return the tensor, values times steps, as float32.

        Example:
            >>> fp4pass.functional.quantize_blocks(torch.zeros(2, 16)).dequantize().unique()
            tensor([0.])
        """
        return self.values() * self.steps().unsqueeze(self.dim)


def require_float(caller: str, name: str, x: Tensor) -> None:
    """Raise unless it is a dense tensor with values, of a dtype that can be quantized."""
    if not isinstance(x, Tensor):
        wanted = "a torch.Tensor (torch.as_tensor makes one)"
        raise DtypeError(expected(f"{caller}: {name}", wanted, type(x).__name__))
    require_dense(f"{caller}: {name}", x)
    if x.is_meta:
        got = "a tensor on the meta device"
        raise DtypeError(expected(f"{caller}: {name}", "a dense tensor with values", got))
    if x.dtype not in ops.FLOATS:
        raise DtypeError(
            f"{caller}: expected {name} of float32, bfloat16, float16 or float64, got {x.dtype}. "
            "Cast it before the call."
        )


def read_blocks(caller: str, weight: Tensor, dim: int, fmt: Format) -> tuple[Tensor, Format, float]:
    """Check a weight: return a view [..., block], the format of this block and the amax."""
    require_float(caller, "weight", weight)
    shape = tuple(weight.shape)
    if not isinstance(dim, SupportsIndex) or not -weight.ndim <= dim < weight.ndim:
        raise ShapeError(f"{caller}: expected dim to be a dimension of {shape}, got dim={dim!r}.")
    if fmt.has_float_scale:
        raise OptionError(
            f"{caller}: expected a format of blocks, got {fmt.key}, which has a float32 scale for "
            f"{fmt.tile}. Call fp4pass.quantize(weight, {fmt.key!r})."
        )
    if shape[dim] not in fmt.blocks:
        raise ShapeError(
            f"{caller}: expected dimension {dim} of the weight to be a block of {fmt.name}, one of "
            f"{fmt.blocks}, got shape {shape}. Split a matrix [N, K] before the call: "
            f"weight.unflatten(-1, (-1, {fmt.block}))."
        )
    if not weight.numel():
        raise ShapeError(f"{caller}: expected a weight with elements, got shape {shape}.")
    amax = weight_amax(weight)
    if not math.isfinite(amax):
        raise NonFiniteError(
            f"{caller}: expected a weight of finite float32 numbers, got NaN, infinity or larger "
            "numbers. Repair or scale it before the call."
        )
    return weight.detach().movedim(dim, -1), get_format(fmt.name, shape[dim]), amax


def read_global_scale(
    caller: str, fmt: Format, given: float | Tensor | str | None, amax: float
) -> float:
    """Return a global scale as a number: `given` or, for "auto", what `amax` needs."""
    if isinstance(given, str) and given == "auto":
        return fmt.global_scale_for(amax)
    try:
        value = math.nan if given is None or isinstance(given, str | bool) else float(given)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    # Where it is a normal float32, and its products with useful block scales are finite.
    if not 2.0**-126 <= value <= 2.0**126:
        raise OptionError(
            f"{caller}: expected global_scale to be 'auto' or a number from 2^-126 to 2^126, got "
            f"{given!r}."
        )
    if value != 1.0 and not fmt.has_global_scale:
        raise OptionError(
            f"{caller}: {fmt.key} has no global scale, got global_scale={given!r}. Leave it out."
        )
    return value


def block_hessians(
    caller: str, blocks: Tensor, fmt: Format, inputs: Tensor | None, block_hessian: Tensor | None
) -> Tensor:
    """Return the Hessian of each of the J blocks of a row: float64 [J, block, block].

    It is given or the sum of a a^T over the tokens a of inputs [..., J * block], and divided by a
    power of two, which changes no comparison of errors.
    """
    if inputs is not None and block_hessian is not None:
        raise OptionError(f"{caller}: expected inputs or block_hessian, got both. Leave one out.")
    if block_hessian is not None:
        require_float(caller, "block_hessian", block_hessian)
        n = fmt.block
        if block_hessian.shape[1:] != (n, n) or not len(block_hessian):
            raise ShapeError(
                f"{caller}: expected block_hessian of shape [J, {n}, {n}], one for each of the J "
                f"blocks of a row, got {tuple(block_hessian.shape)}."
            )
        hessian = block_hessian.detach().to(blocks.device, torch.float64)
    elif inputs is not None:
        hessian = _observed_hessians(caller, fmt, inputs, blocks.device)
    else:
        raise OptionError(f"{caller}: expected inputs or block_hessian, got neither.")
    _require_rows(caller, blocks, len(hessian))
    largest = hessian.abs().amax((1, 2), keepdim=True)
    if not largest.isfinite().all():
        raise NonFiniteError(
            f"{caller}: expected finite inputs or block_hessian, got NaN or infinity."
        )
    if block_hessian is not None:
        _require_sums_of_squares(caller, hessian, largest)
    return hessian * torch.where(largest > 0, torch.frexp(largest).mantissa / largest, 1.0)


def _require_sums_of_squares(caller: str, hessian: Tensor, largest: Tensor) -> None:
    """Raise OptionError for Hessians [J, block, block] that are no sums of a a^T."""
    # The error of sums in float32 or bfloat16.
    off = largest.squeeze((1, 2)) * hessian.shape[-1] * 1e-2
    skewed = (hessian - hessian.mT).abs().amax((1, 2)) > off
    if skewed.any() or (torch.linalg.eigvalsh(hessian)[:, 0] < -off).any():
        got = "one that is not symmetric" if skewed.any() else "negative eigenvalues"
        wanted = "sums of a a^T over inputs a, which are symmetric and positive semidefinite"
        raise OptionError(expected(f"{caller}: block_hessian", wanted, got))


def _observed_hessians(caller: str, fmt: Format, inputs: Tensor, device: torch.device) -> Tensor:
    """Sum a a^T over the tokens a, for each block of a token."""
    require_float(caller, "inputs", inputs)
    if inputs.ndim < 2 or not inputs.numel() or inputs.shape[-1] % fmt.block:
        raise ShapeError(
            f"{caller}: expected inputs of shape [..., K], of at least one token and K a multiple "
            f"of {fmt.block} (the block of the weight), got {tuple(inputs.shape)}."
        )
    tokens = inputs.detach().flatten(0, -2)
    columns = inputs.shape[-1] // fmt.block
    size = (columns, fmt.block, fmt.block)
    hessian = torch.zeros(size, dtype=torch.float64, device=device)
    for chunk in tokens.split(max(1, _CHUNK // inputs.shape[-1])):
        blocks = chunk.to(device, torch.float64).view(len(chunk), columns, -1).transpose(0, 1)
        hessian.baddbmm_(blocks.mT, blocks)
    return hessian


def _require_rows(caller: str, blocks: Tensor, columns: int) -> None:
    """Raise ShapeError unless blocks [..., n] are rows of `columns` blocks, in that order."""
    outer = blocks.shape[:-1]
    # In an order such as [J, N, n] the Hessians would be those of other blocks.
    trailing = itertools.accumulate(reversed(outer), lambda a, b: a * b)
    if not outer or (outer[-1] % columns and columns not in trailing):
        raise ShapeError(
            f"{caller}: expected a weight of [N, {columns}] or [N * {columns}] blocks, as inputs "
            f"or block_hessian have {columns} blocks in a row, got {tuple(outer)}."
        )


def search_blocks(
    blocks: Tensor, hessian: Tensor | None, global_scale: float, fmt: Format, objective: str
) -> tuple[Tensor, Tensor]:
    """Quantize blocks [..., block]: return the codes [..., P] and the bits of the scales [...]."""
    columns = fmt.block if hessian is None else fmt.block * len(hessian)
    weight = blocks.reshape(-1, columns)
    if fmt.block <= HESSIAN_BLOCK:
        shaped = None if hessian is None else _as_statistics(hessian)
        packed, scale = ops.search(weight, shaped, global_scale, fmt.key, objective)
    else:
        # The operator takes block Hessians of 32 columns.
        packed, scale = search_ref(weight, hessian, global_scale, fmt, objective)
    return packed.view(*blocks.shape[:-1], -1), scale.view(blocks.shape[:-1])


def _as_statistics(hessian: Tensor) -> Tensor:
    """Return block Hessians [J, n, n] in blocks of 32: float32 [ceil(J * n / 32), 32, 32]."""
    n = hessian.shape[-1]
    side = HESSIAN_BLOCK // n
    groups = math.ceil(len(hessian) / side)
    out = hessian.new_zeros((groups, side, n, side, n), dtype=torch.float32)
    for i in range(side):
        part = hessian[i::side]
        out[: len(part), i, :, i] = part.float()
    return out.view(groups, HESSIAN_BLOCK, HESSIAN_BLOCK)


def element_values(packed: Tensor, element: Element) -> Tensor:
    """Return the signed values of packed codes [..., P]: float32 [..., n]."""
    codes = unpack_codes(packed, element.bits)
    table = element_table(element, packed.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)
