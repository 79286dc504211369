"""Tensors one dimension of which is a block: what the functions on them read, check and search."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from .. import ops
from ..core.formats import Element, Format, element_table, get_format
from ..core.quant_state import unpack_codes
from ..errors import DtypeError, NonFiniteError, OptionError, ShapeError
from ..kernels.search.reference import search_ref
from ..kernels.statistics.reference import HESSIAN_BLOCK
from ..methods.base import weight_amax

# Elements of X that are read together, in float64.
_CHUNK = 1 << 22


def read_blocks(caller: str, W: Tensor, dim: int, form: Format) -> tuple[Tensor, Format]:
    """W with its block last, a view, and the format with blocks of that size.

    Raises ShapeError, DtypeError or NonFiniteError for a tensor that cannot be quantized.
    """
    shape = tuple(W.shape)
    require_float(caller, "W", W)
    if not -W.ndim <= dim < W.ndim:
        raise ShapeError(f"{caller}: dim={dim} is not a dimension of W, which has shape {shape}.")
    if shape[dim] not in form.blocks:
        raise ShapeError(
            f"{caller}: W has shape {shape}, and its dimension {dim} is the block; {form.blocks} "
            f"are those of {form.name}. Split a matrix [N, K] before the call: "
            f"W.unflatten(-1, (-1, {form.block}))."
        )
    if not W.numel():
        raise ShapeError(f"{caller}: W has shape {shape}, which is empty.")
    if not math.isfinite(weight_amax(W)):
        raise NonFiniteError(
            f"{caller}: W holds NaN, infinity or numbers beyond float32. Repair it before the call."
        )
    return W.detach().movedim(dim, -1), get_format(form.name, shape[dim])


def require_float(caller: str, name: str, x: Tensor) -> None:
    """Raise DtypeError unless x is of a dtype that can be quantized."""
    if x.dtype not in ops.FLOATS:
        raise DtypeError(
            f"{caller}: {name} is {x.dtype}; float32, bfloat16, float16 or float64 is wanted. "
            "Cast it before the call."
        )


def read_global_scale(caller: str, W: Tensor, fmt: Format, given: float | Tensor | str) -> float:
    """A global scale as a float32 number: that of `W` for "auto", else the one given.

    Raises OptionError for what cannot be one, and for a format that has none.
    """
    if isinstance(given, str):
        if given != "auto":
            raise OptionError(
                f"{caller}: global_scale={given!r}; None, 'auto' or a number is wanted."
            )
        return fmt.global_scale_for(weight_amax(W))
    if isinstance(given, Tensor) and given.numel() != 1:
        raise ShapeError(
            f"{caller}: global_scale has shape {tuple(given.shape)}; one number is wanted, which "
            "holds for all of W."
        )
    value = float(torch.tensor(float(given), dtype=torch.float32))
    # Where it is a normal float32, and the scales times it are finite where they are of use.
    if not 2.0**-126 <= value <= 2.0**126:
        raise OptionError(f"{caller}: global_scale={value}; 2^-126 to 2^126 is wanted.")
    if not fmt.has_global_scale and value != 1.0:
        raise OptionError(
            f"{caller}: {fmt.name} has no global scale. Leave global_scale={value} away."
        )
    return value


def block_hessians(
    caller: str, x: Tensor, fmt: Format, X: Tensor | None, H_blocks: Tensor | None
) -> Tensor:
    """The Hessian of every block of a row: float64 [J, n, n], of the device of x [..., n].

    H_blocks: [J, n, n], or X: [..., J * n], of which it is the sum of a a^T over the tokens a; of
    both, H_blocks. Each is divided by a power of two, which changes no comparison.
    """
    if H_blocks is not None:
        hessian = _given_hessians(caller, fmt, H_blocks).to(x.device, torch.float64)
    elif X is not None:
        hessian = _observed_hessians(caller, fmt, X, x.device)
    else:
        raise OptionError(f"{caller}: it needs the inputs X or their H_blocks; both are None.")
    _require_rows(caller, x, len(hessian))
    largest = hessian.abs().amax((1, 2), keepdim=True)
    if not largest.isfinite().all():
        raise NonFiniteError(f"{caller}: X or H_blocks holds NaN or infinity.")
    return hessian * torch.where(largest > 0, torch.frexp(largest).mantissa / largest, 1.0)


def _given_hessians(caller: str, fmt: Format, H_blocks: Tensor) -> Tensor:
    require_float(caller, "H_blocks", H_blocks)
    n = fmt.block
    if H_blocks.ndim != 3 or tuple(H_blocks.shape[1:]) != (n, n) or not len(H_blocks):
        raise ShapeError(
            f"{caller}: H_blocks has shape {tuple(H_blocks.shape)}; [J, {n}, {n}] is wanted, one "
            "for each of the J blocks of a row."
        )
    return H_blocks.detach()


def _observed_hessians(caller: str, fmt: Format, X: Tensor, device: torch.device) -> Tensor:
    require_float(caller, "X", X)
    if X.ndim < 2 or not X.numel() or X.shape[-1] % fmt.block:
        raise ShapeError(
            f"{caller}: X has shape {tuple(X.shape)}; [..., K] is wanted, of at least one token "
            f"and K a multiple of {fmt.block}, the block of W."
        )
    tokens = X.detach().flatten(0, -2)
    columns = X.shape[-1] // fmt.block
    size = (columns, fmt.block, fmt.block)
    hessian = torch.zeros(size, dtype=torch.float64, device=device)
    for chunk in tokens.split(max(1, _CHUNK // X.shape[-1])):
        blocks = chunk.to(device, torch.float64).view(len(chunk), columns, -1).transpose(0, 1)
        hessian.baddbmm_(blocks.mT, blocks)
    return hessian


def _require_rows(caller: str, x: Tensor, columns: int) -> None:
    """Raise ShapeError unless the blocks x [..., n] are rows of `columns` blocks, in that order."""
    outer = x.shape[:-1]
    # In an order such as [J, N, n] the Hessians would be those of other blocks.
    trailing = itertools.accumulate(reversed(outer), lambda a, b: a * b)
    if not outer or (outer[-1] % columns and columns not in trailing):
        raise ShapeError(
            f"{caller}: X or H_blocks stands for {columns} blocks in a row, but without its block "
            f"W has shape {tuple(outer)}; [N, {columns}] is wanted, or [N * {columns}]."
        )


def search_blocks(
    x: Tensor, hessian: Tensor | None, global_scale: float, fmt: Format, objective: str
) -> tuple[Tensor, Tensor]:
    """Quantize blocks x [..., n]: packed codes [..., P] uint8 and scale bits [...] uint8.

    hessian: that of `block_hessians` for "hessian", else None.
    """
    columns = fmt.block if hessian is None else fmt.block * len(hessian)
    weight = x.reshape(-1, columns)
    if fmt.block <= HESSIAN_BLOCK:
        shaped = None if hessian is None else _as_statistics(hessian)
        packed, scale = ops.search(weight, shaped, global_scale, fmt.key, objective)
    else:
        # Block Hessians of the operators have 32 columns.
        packed, scale = search_ref(weight, hessian, global_scale, fmt, objective)
    return packed.view(*x.shape[:-1], -1), scale.view(x.shape[:-1])


def _as_statistics(hessian: Tensor) -> Tensor:
    """Block Hessians [J, n, n] as calibration keeps them: float32 [ceil(J * n / 32), 32, 32]."""
    n = hessian.shape[-1]
    side = HESSIAN_BLOCK // n
    groups = math.ceil(len(hessian) / side)
    out = hessian.new_zeros((groups, side, n, side, n), dtype=torch.float32)
    for i in range(side):
        part = hessian[i::side]
        out[: len(part), i, :, i] = part.float()
    return out.view(groups, HESSIAN_BLOCK, HESSIAN_BLOCK)


def element_values(packed: Tensor, element: Element) -> Tensor:
    """The signed values of packed codes [..., P]: float32 [..., n], -0.0 for the code of it."""
    codes = unpack_codes(packed, element.bits)
    table = element_table(element, packed.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)
