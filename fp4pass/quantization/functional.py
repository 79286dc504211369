"""Quantize one tensor in any format, or one with a dimension that is a block."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..core.elements import Element, element_table
from ..core.formats import Format, get_format
from ..core.packing import unpack_codes
from ..core.quant_state import OtherRecord, QuantState, TensorRecord, load_state, other_record
from ..errors import DtypeError, NonFiniteError, OptionError, ShapeError, expected, unknown_name
from ..kernels.common.rounding import scale_values
from ..kernels.search.reference import OBJECTIVES, search_ref
from ..kernels.statistics.naive import HESSIAN_BLOCK, weight_amax
from ..methods import Method, Stats, resolve_method
from ..methods.base import MethodChoice
from ..methods.search import exact_global_scale, may_be_exact
from ..ops.checks import require_dense
from ..record.schemes import weight_format

__all__ = [
    "QuantState",
    "QuantizedBlocks",
    "error_metrics",
    "global_scale_for",
    "load_state",
    "quantize",
    "quantize_blocks",
]

# Elements of inputs or outputs that are computed together, in float64.
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
        """Return the factors of the values: scale times global scale, as float32."""
        return scale_values(self.scale, self.format.scale).mul_(self.global_scale)

    def values(self) -> Tensor:
        """Return the signed element values, as float32 in the shape of the tensor."""
        packed = self.packed.movedim(self.dim, -1)
        return element_values(packed, self.format.element).movedim(-1, self.dim)

    def dequantize(self) -> Tensor:
        """Return the tensor, values times steps, as float32."""
        return self.values() * self.steps().unsqueeze(self.dim)


def quantize_blocks(
    weight: Tensor,
    fmt: str = "nvfp4",
    objective: Literal["naive", "sse", "hessian"] = "sse",
    *,
    dim: int = -1,
    inputs: Tensor | None = None,
    block_hessian: Tensor | None = None,
    global_scale: float | Tensor | Literal["auto"] = "auto",
) -> QuantizedBlocks:
    """Quantize blocks with the scales that an objective asks for.

    Args:
        weight: a finite floating-point tensor, read as float32. For the objective "hessian" it is
            the rows of a layer: [N, J, block] or [N * J, block], or either with the block
            elsewhere, where a row has J blocks.
        fmt: a format, whose block size is that of `weight.shape[dim]`.
        objective: "naive" for the scale that the largest magnitude suggests, "sse" for the scale
            of least squared error, or "hessian" for the scale of least output error r^T H r, where
            r is the rounding error of a block; the last two out of all scales of the format.
        dim: the dimension that is the block.
        inputs: [..., J * block], the inputs of the layer, for the objective "hessian"; read a few
            tokens at a time and summed in float64.
        block_hessian: [J, block, block], the sum of a a^T over the inputs a, in place of `inputs`.
        global_scale: the multiplier of all block scales: a number from 2^-126 to 2^126, or "auto"
            for what `global_scale_for` returns.

    Returns:
        The quantized blocks. A block of zeros has the smallest scale.

    Raises:
        OptionError: an option is unknown or does not fit the format.
        ShapeError: the shape of a tensor does not fit the format or the other tensors.
        DtypeError: a tensor is not floating point.
        NonFiniteError: a tensor holds NaN or infinity, in float32.

    Source: docs/search.md.

    Example:
        >>> weight = torch.randn(8, 4, 16)
        >>> blocks = fp4pass.functional.quantize_blocks(weight)
        >>> blocks.dequantize().shape
        torch.Size([8, 4, 16])
    """
    caller = "quantize_blocks"
    if objective not in OBJECTIVES:
        raise unknown_name("Objective", objective, OBJECTIVES)
    blocks, found, amax = read_blocks(caller, weight, dim, get_format(fmt))
    # Rounded, as block scales are multiplied by it in float32.
    given = torch.tensor(read_global_scale(caller, found, global_scale, amax), dtype=torch.float32)
    hessian = None
    if objective == "hessian":
        hessian = _block_hessians(caller, blocks, found, inputs, block_hessian)
    elif inputs is not None or block_hessian is not None:
        raise OptionError(
            f"{caller}: expected no inputs and no block_hessian for objective={objective!r}. Leave "
            "them out, or choose objective='hessian'."
        )
    columns = found.block if hessian is None else found.block * len(hessian)
    rows = blocks.reshape(-1, columns)
    if found.block <= HESSIAN_BLOCK:
        shaped = None if hessian is None else _as_statistics(hessian)
        packed, scale = ops.search(rows, shaped, given.item(), found.key, objective)
    else:
        # The operator takes block Hessians of 32 columns.
        packed, scale = search_ref(rows, hessian, given.item(), found, objective)
    packed = packed.view(*blocks.shape[:-1], -1).movedim(-1, dim)
    return QuantizedBlocks(packed, scale.view(blocks.shape[:-1]), given.item(), found, dim)


def global_scale_for(weight: Tensor, fmt: str = "nvfp4") -> Tensor:
    """Return the global scale that "auto" stands for.

    Args:
        weight: a floating-point tensor.
        fmt: a format.

    Returns:
        float32 []: the smallest power of two with which the largest block scale times the largest
        element reaches every magnitude of the weight; 1 for formats without a global scale.

    Example:
        >>> fp4pass.functional.global_scale_for(torch.tensor([[1.0] * 16]))
        tensor(0.0005)
    """
    require_float("global_scale_for", "weight", weight)
    if not weight.numel():
        raise ShapeError(f"global_scale_for: expected a weight with elements, got {weight.shape}.")
    return torch.tensor(get_format(fmt).global_scale_for(weight_amax(weight)), device=weight.device)


def error_metrics(
    weight: Tensor, dequantized: Tensor, inputs: Tensor | None = None
) -> dict[str, float]:
    """Measure how far a dequantized weight and its outputs are from those of the dense weight.

    Norms are Frobenius norms, summed in float64, of float32 numbers, or of float64 ones if the
    weight is float64.

    Args:
        weight: [N, K], or in blocks, [N, J, block].
        dequantized: in the shape of the weight.
        inputs: [..., K], read a few tokens at a time.

    Returns:
        weight_error: |dequantized - weight|.
        weight_error_pct: in percent of |weight|; 0 or inf where that is 0.
        output_error: |inputs (dequantized - weight)^T|, with inputs only.
        output_error_pct: in percent of |inputs weight^T|, with inputs only.

    Raises:
        ShapeError: the shapes do not fit each other.
        DtypeError: a tensor is not floating point.

    Example:
        >>> weight = torch.randn(8, 64)
        >>> errors = fp4pass.functional.error_metrics(weight, weight, inputs=torch.randn(3, 64))
        >>> errors["output_error"]
        0.0
    """
    caller = "error_metrics"
    require_float(caller, "weight", weight)
    require_float(caller, "dequantized", dequantized)
    if weight.shape != dequantized.shape or weight.ndim < 2 or not weight.numel():
        raise ShapeError(
            f"{caller}: expected weight and dequantized of one shape, [N, K] or [N, J, block], got "
            f"{tuple(weight.shape)} and {tuple(dequantized.shape)}."
        )
    dtype = torch.promote_types(weight.dtype, torch.float32)
    dense = weight.detach().flatten(1).to(dtype)
    off = dequantized.detach().flatten(1).to(dense.device, dtype) - dense
    error, norm = _square(off) ** 0.5, _square(dense) ** 0.5
    metrics = {"weight_error": error, "weight_error_pct": _percent(error, norm)}
    if inputs is None:
        return metrics
    require_float(caller, "inputs", inputs)
    if inputs.shape[-1:] != dense.shape[1:] or not inputs.numel():
        raise ShapeError(
            f"{caller}: expected inputs of shape [..., {dense.shape[1]}], as the weight has that "
            f"many columns, got {tuple(inputs.shape)}."
        )
    error = norm = 0.0
    for chunk in _in_chunks(inputs, max(dense.shape)):
        tokens = chunk.to(dense.device, dtype)
        # Not the difference of two outputs, which would cancel.
        error += _square(tokens @ off.t())
        norm += _square(tokens @ dense.t())
    output = {"output_error": error**0.5, "output_error_pct": _percent(error**0.5, norm**0.5)}
    return metrics | output


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _percent(part: float, whole: float) -> float:
    if whole == 0.0:
        return math.inf if part else 0.0
    return 100 * part / whole


def require_float(caller: str, name: str, x: Tensor) -> None:
    """Raise DtypeError unless it is a dense tensor with values that can be quantized."""
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
            f"{fmt.blocks}, got shape {shape}. Split a matrix [N, K] before the call, "
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


def _block_hessians(
    caller: str, blocks: Tensor, fmt: Format, inputs: Tensor | None, block_hessian: Tensor | None
) -> Tensor:
    """Return the Hessian of each of the J blocks of a row: float64 [J, block, block].

    It is given or the sum of a a^T over the tokens a of inputs [..., J * block], and divided by a
    power of two, which changes no comparison of errors.
    """
    if (inputs is None) == (block_hessian is None):
        got = "neither" if inputs is None else "both. Leave one out"
        raise OptionError(f"{caller}: expected inputs or block_hessian, got {got}.")
    n = fmt.block
    if block_hessian is not None:
        require_float(caller, "block_hessian", block_hessian)
        if block_hessian.shape[1:] != (n, n) or not len(block_hessian):
            raise ShapeError(
                f"{caller}: expected block_hessian of shape [J, {n}, {n}], one for each of the J "
                f"blocks of a row, got {tuple(block_hessian.shape)}."
            )
        hessian = block_hessian.detach().to(blocks.device, torch.float64)
    elif inputs is not None:
        require_float(caller, "inputs", inputs)
        if inputs.ndim < 2 or not inputs.numel() or inputs.shape[-1] % n:
            raise ShapeError(
                f"{caller}: expected inputs of shape [..., K], of at least one token and K a "
                f"multiple of {n} (the block of the weight), got {tuple(inputs.shape)}."
            )
        columns = inputs.shape[-1] // n
        hessian = torch.zeros((columns, n, n), dtype=torch.float64, device=blocks.device)
        for chunk in _in_chunks(inputs, inputs.shape[-1]):
            tokens = chunk.to(hessian).view(len(chunk), columns, -1).transpose(0, 1)
            hessian.baddbmm_(tokens.mT, tokens)
    columns, outer = len(hessian), blocks.shape[:-1]
    # In an order such as [J, N, n] the Hessians would be those of other blocks.
    trailing = itertools.accumulate(reversed(outer), lambda a, b: a * b)
    if not outer or (outer[-1] % columns and columns not in trailing):
        raise ShapeError(
            f"{caller}: expected a weight of [N, {columns}] or [N * {columns}] blocks, as inputs "
            f"or block_hessian have {columns} blocks in a row, got {tuple(outer)}."
        )
    largest = hessian.abs().amax((1, 2), keepdim=True)
    if not largest.isfinite().all():
        raise NonFiniteError(
            f"{caller}: expected finite inputs or block_hessian, got NaN or infinity."
        )
    # Sums in float32 or bfloat16 are off by so much.
    off = largest.squeeze((1, 2)) * n * 1e-2
    is_skewed = ((hessian - hessian.mT).abs().amax((1, 2)) > off).any()
    if is_skewed or (torch.linalg.eigvalsh(hessian)[:, 0] < -off).any():
        wanted = "sums of a a^T over inputs a, symmetric and positive semidefinite"
        raise OptionError(expected(f"{caller}: block_hessian", wanted, "others"))
    return hessian * torch.where(largest > 0, torch.frexp(largest).mantissa / largest, 1.0)


def _in_chunks(inputs: Tensor, width: int) -> tuple[Tensor, ...]:
    """Return the tokens of inputs [..., K], a few at a time where each takes `width` numbers."""
    return inputs.detach().flatten(0, -2).split(max(1, _CHUNK // width))


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


def quantize(
    x: Tensor,
    scheme: str = "nvfp4",
    block_size: int | None = None,
    *,
    method: MethodChoice = "sse",
    global_scale: float | Literal["auto"] = "auto",
) -> QuantState | OtherRecord:
    """Quantize a tensor in blocks.

    Args:
        x: a finite tensor of any shape; float32, bfloat16, float16 or float64.
        scheme: a format such as "nvfp4", whose blocks run along the last dimension. A scheme for
            weights only, such as "nvfp4a16", is its format: a tensor has no inputs. After
            `import fp4pass.parity` also a codebook such as "nf4", whose blocks run over the
            flattened tensor. The last block may be shorter.
        block_size: elements that share a scale; None for the scheme's own block size.
        method: how block scales of a format are chosen, "naive" or "sse".
        global_scale: the multiplier of all block scales of a format, 2^-126 to 2^126, or "auto"
            for the smallest power of two with which the largest magnitude is within reach; of
            numbers that were quantized before, the next if "sse" keeps them only with that.

    Tiles of several rows, as of "fp8_block", are of the last two dimensions.

    Returns:
        A QuantState for a format, a `fp4pass.parity.CodebookState` for a codebook.

    Raises:
        OptionError: an option is unknown or does not fit the scheme.
        DtypeError: x is not floating point.
        ShapeError: x is empty.
        NonFiniteError: x holds NaN or infinity, in float32, or a number that is rounded to it.

    Example:
        >>> x = torch.randn(4, 64)
        >>> state = fp4pass.quantize(x, "nvfp4")
        >>> (fp4pass.dequantize(state) - x).norm() / x.norm() < 0.1
        tensor(True)
    """
    if isinstance(x, nn.Module | str | os.PathLike):
        raise OptionError(
            f"{expected('quantize: x', 'a torch.Tensor', type(x).__name__)} For a model, call "
            "fp4pass.convert(model); for a folder, fp4pass.quantize_checkpoint(source, directory)."
        )
    name, block = weight_format(scheme), "default" if block_size is None else block_size
    other = other_record(name)
    require_float("quantize", "x", x)
    if not x.numel():
        raise ShapeError(f"quantize: expected a tensor with elements, got shape {tuple(x.shape)}.")
    x = x.detach()
    if other is not None:
        return other.quantize(x, name, block, method, global_scale)
    fmt = get_format(name, block)
    chosen, options = without_statistics(method)
    amax = weight_amax(x)
    if not math.isfinite(amax):
        raise not_finite()
    factor = read_global_scale("quantize", fmt, global_scale, amax)
    leading, columns = x.shape[:-1], x.shape[-1] if x.ndim else 1
    # Matrices of a stack share no tile of several rows.
    height = x.shape[-2] if fmt.rows != 1 and x.ndim > 1 else x.numel() // columns
    padding = 0 if fmt.fits(columns) else -columns % fmt.block
    matrices = F.pad(x.reshape(-1, height, columns), (0, padding))
    if global_scale == "auto" and all(may_be_exact(each, fmt) for each in matrices):
        factor = exact_global_scale(list(matrices), fmt, factor)
    states = [chosen.quantize(each, Stats(), fmt, factor, options) for each in matrices]
    scale_rows: tuple[int, ...] = leading
    if fmt.rows != 1 and leading:
        scale_rows = (*leading[:-1], fmt.scale_rows(height))
    found = dataclasses.replace(
        states[0],
        qdata=torch.cat([state.qdata for state in states]).view(*leading, -1),
        scale=torch.cat([state.scale for state in states]).view(*scale_rows, -1),
        shape=tuple(x.shape),
    )
    # Rounding at most doubles a number, and values are computed in float32.
    wide = dataclasses.replace(found, dtype=torch.float32)
    if 2 * amax > torch.finfo(torch.float32).max and not dequantize(wide).isfinite().all():
        raise NonFiniteError(
            f"quantize: x reaches {amax:.3g}, which {fmt.key} rounds to what float32 cannot hold. "
            "Scale x before."
        )
    return found


def without_statistics(method: object) -> tuple[Method, Any]:
    """Return a method and its options. Raises OptionError for one that needs statistics."""
    chosen, options = resolve_method(method)
    if chosen.needs:
        raise OptionError(
            f"quantize: method {chosen.name!r} needs calibration statistics, which a single tensor "
            "does not have. Choose 'naive' or 'sse'."
        )
    return chosen, options


def not_finite() -> NonFiniteError:
    """Return the error for a tensor with NaN or infinity."""
    return NonFiniteError(
        "quantize: expected finite float32 numbers, got NaN or infinity. Repair or scale x before."
    )


def dequantize(state: TensorRecord) -> Tensor:
    """Return the dense tensor of what `quantize` returned (`fp4pass.dequantize`)."""
    if isinstance(state, OtherRecord):
        return state.dequantize()
    assert isinstance(state, QuantState)
    global_scale, fmt = None, state.format
    if state.global_scale != 1.0:
        # The multiplier itself, which need not have an exact reciprocal.
        global_scale = torch.tensor([state.global_scale], device=state.qdata.device)
        fmt = fmt.with_multiplier()
    rows = ops.dequantize(state.qdata, state.scale, global_scale, fmt.key, state.dtype)
    columns = state.shape[-1] if state.shape else 1
    return rows[..., :columns].reshape(state.shape).contiguous()
