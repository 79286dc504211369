"""Functions on blocks: from a tensor one dimension of which is a block, to scales and values.

Every registered format has `<format>_naive`, `<format>_optimal` (least squared error),
`<format>_optimal_hessian` (least output error), the same three with `_triton` behind, and
`<format>_dequantize`. docs/tensors.md says how they relate to those of qwantize.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..core.formats import E2M1, E4M3, E8M0, FORMATS, UE4M4, UE5M3, Format, Scale, get_format
from ..core.quant_state import unpack_codes
from ..errors import DtypeError, OptionError, ShapeError
from ..kernels.common.rounding import scale_values
from ..methods.base import weight_amax
from ..ops import unserved
from .blocks import (
    block_hessians,
    element_values,
    read_blocks,
    read_global_scale,
    require_float,
    search_blocks,
)

_Function = TypeVar("_Function", bound=Callable[..., object])

# Elements of a tile of outputs, or of inputs, of compute_metrics.
_TILE = 1 << 22

_CHOICES = {
    "naive": ("naive", "the scale that its largest magnitude suggests"),
    "optimal": ("sse", "the scale of least squared error, of all {count} of {scale}"),
    "optimal_hessian": ("hessian", "the scale of least output error, of all {count} of {scale}"),
}

_DOC = """Quantize each block into {name} with {choice}.

W: float, finite; W.shape[dim] is the block: {blocks}.{inputs}
global_scale: {global_scale}.
packed: give bytes of codes in place of values.

Returns scales and quants, and their product if return_dequant. scales: float32, W.shape without
`dim`, what quants are multiplied by: block scale times global scale. quants: float32, W.shape,
signed values of {element}, at most {max:g}; or uint8, with the bytes of a block along `dim`, its
first code lowest. An all-zero block has the smallest scale.
Raises ShapeError, DtypeError, NonFiniteError or OptionError for arguments that do not fit{fails}.
Source: docs/search.md; the signature is that of qwantize.
"""

_INPUTS_DOC = """
X: the inputs of the layer, float [..., K], read a few tokens at a time; or H_blocks: float
[J, block, block], the sum of a a^T over those inputs a, for each of the J blocks of a row; of
both, H_blocks counts. W without its block is [N, J], or [N * J]. The output error is r^T H r, r
being what rounding leaves of a block."""

_GLOBAL_SCALE_DOC = """None for {default}; "auto" for the smallest power of two with which the
largest magnitude of W is within reach; or a number, or tensor of one, 2^-126 to 2^126"""


@dataclass(frozen=True)
class _Search:
    """One function: its name, the format in its default block, what it minimizes and where."""

    name: str
    form: Format
    objective: str
    needs_kernel: bool

    def __call__(
        self,
        W: Tensor,
        dim: int,
        return_dequant: bool,
        X: Tensor | None,
        H_blocks: Tensor | None,
        global_scale: float | Tensor | str | None,
        packed: bool,
    ) -> tuple[Tensor, ...]:
        x, fmt = read_blocks(self.name, W, dim, self.form)
        if self.needs_kernel:
            _require_kernel(self.name, W.device, fmt)
        given = default_global_scale(fmt) if global_scale is None else global_scale
        multiplier = read_global_scale(self.name, W, fmt, given)
        hessian = None
        if self.objective == "hessian":
            hessian = block_hessians(self.name, x, fmt, X, H_blocks)
        codes, bits = search_blocks(x, hessian, multiplier, fmt, self.objective)
        scales = scale_values(bits, fmt.scale).mul_(multiplier)
        if packed and not return_dequant:
            return scales, codes.movedim(-1, dim)
        values = element_values(codes, fmt.element)
        quants = (codes if packed else values).movedim(-1, dim)
        if not return_dequant:
            return scales, quants
        return scales, quants, (values * scales.unsqueeze(-1)).movedim(-1, dim)


def default_global_scale(fmt: Format) -> float:
    """What no global scale means: 1; for elements of 8 bits 1 / max, so that amax is the scale."""
    return 1 / fmt.element.max if fmt.has_global_scale and fmt.element.bits == 8 else 1.0


def _require_kernel(name: str, device: torch.device, fmt: Format) -> None:
    """Raise OptionError unless the Triton kernels run on the device and know the format."""
    reason = f"W is on {device}" if device.type != "cuda" else unserved(device, fmt)
    if reason is not None:
        raise OptionError(
            f"{name} runs on NVIDIA GPUs only, and here it cannot: {reason}. "
            f"{name.removesuffix('_triton')} finds the same on every device."
        )


def _quantizer(form: Format, ending: str, needs_kernel: bool) -> Callable[..., tuple[Tensor, ...]]:
    """The function `<format>_<ending>`, or that with `_triton` behind."""
    objective, choice = _CHOICES[ending]
    name = f"{form.name}_{ending}" + "_triton" * needs_kernel
    search = _Search(name, form, objective, needs_kernel)

    def by_itself(
        W: Tensor,
        dim: int = -1,
        return_dequant: bool = False,
        *,
        global_scale: float | Tensor | str | None = None,
        packed: bool = False,
    ) -> tuple[Tensor, ...]:
        return search(W, dim, return_dequant, None, None, global_scale, packed)

    def by_inputs(
        W: Tensor,
        dim: int = -1,
        return_dequant: bool = False,
        X: Tensor | None = None,
        H_blocks: Tensor | None = None,
        *,
        global_scale: float | Tensor | str | None = None,
        packed: bool = False,
    ) -> tuple[Tensor, ...]:
        return search(W, dim, return_dequant, X, H_blocks, global_scale, packed)

    doc = _DOC.format(
        name=form.name,
        choice=choice.format(count=len(form.scale.values), scale=form.scale.name.upper()),
        blocks=_either(sorted(form.blocks)),
        inputs=_INPUTS_DOC if objective == "hessian" else "",
        global_scale=_GLOBAL_SCALE_DOC.format(
            default="1" if default_global_scale(form) == 1.0 else f"1 / {form.element.max:g}"
        )
        if form.has_global_scale
        else 'None, "auto" or 1, which are the same, as the format has none',
        element=form.element.name.upper(),
        max=form.element.max,
        fails=";\nOptionError where there is no kernel for W" if needs_kernel else "",
    )
    return _named(by_inputs if objective == "hessian" else by_itself, name, doc)


def _dequantizer(form: Format) -> Callable[..., Tensor]:
    """The function `<format>_dequantize`."""
    name = f"{form.name}_dequantize"

    def dequantize(scales: Tensor, quants: Tensor, dim: int = -1) -> Tensor:
        if not -quants.ndim <= dim < quants.ndim:
            raise ShapeError(
                f"{name}: dim={dim} is not a dimension of quants {tuple(quants.shape)}."
            )
        outer = quants.movedim(dim, -1).shape[:-1]
        if scales.shape != outer:
            raise ShapeError(
                f"{name}: scales have shape {tuple(scales.shape)}, and quants without dimension "
                f"{dim} have {tuple(outer)}; the same is wanted."
            )
        if quants.dtype == torch.uint8:
            quants = element_values(quants.movedim(dim, -1), form.element).movedim(-1, dim)
        return quants * scales.unsqueeze(dim)

    doc = f"""The tensor that scales and quants of {form.name} stand for: their product.

scales: float, the shape of quants without `dim`, with the global scale in them; quants: values, or
packed codes if they are uint8. Returns the shape of the values.
Raises ShapeError if the shapes do not fit.
"""
    return _named(dequantize, name, doc)


def _either(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"


def _named(function: _Function, name: str, doc: str) -> _Function:
    """The function under its public name, by which it is pickled and shown."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


for _form in FORMATS.values():
    for _ending in _CHOICES:
        for _needs_kernel in (False, True):
            _function = _quantizer(_form, _ending, _needs_kernel)
            globals()[_function.__name__] = _function
    globals()[f"{_form.name}_dequantize"] = _dequantizer(_form)

if TYPE_CHECKING:
    # What the registry makes has no names that a type checker could see.
    def __getattr__(name: str) -> Callable[..., Any]: ...


def global_scale_for(W: Tensor, fmt: str = "nvfp4") -> Tensor:
    """The global scale that "auto" means: float32 [], 1 for a format without one.

    The smallest power of two with which the largest block scale times the largest element reaches
    every magnitude of W.
    """
    require_float("global_scale_for", "W", W)
    return torch.tensor(get_format(fmt).global_scale_for(weight_amax(W)), device=W.device)


def scale_bytes(
    scales: Tensor, fmt: str = "nvfp4", global_scale: float | Tensor | None = None
) -> Tensor:
    """The bytes under which a format stores scales that one of its functions returned.

    scales: float32, made with this global_scale. Returns uint8 of the same shape; E4M3 is read
    by `.view(torch.float8_e4m3fn)`.
    Raises OptionError for numbers that are no scales of the format times the global scale.
    """
    form = get_format(fmt)
    given = default_global_scale(form) if global_scale is None else global_scale
    multiplier = read_global_scale("scale_bytes", scales, form, given)
    table = _table(form.scale, scales.device) * multiplier
    byte = torch.searchsorted(table, scales.float().contiguous()).clamp_(max=len(table) - 1)
    strange = table[byte] != scales
    if strange.any():
        raise OptionError(
            f"scale_bytes: {scales[strange][0].item()} is no scale of {fmt} with a global scale of "
            f"{multiplier}. Give the global scale that the scales were made with."
        )
    return (byte + 1).to(torch.uint8)


def compute_metrics(W: Tensor, W_dq: Tensor, X: Tensor | None = None) -> dict[str, float]:
    """How far a dequantized weight is from the dense one, and its outputs from the dense one's.

    W, W_dq: [M, K], or in blocks, [M, J, block]; X: inputs [..., K], read a few at a time.
    Returns weight_error |W_dq - W| and weight_error_pct, that in percent of |W|; with X also
    output_error |X (W_dq - W)^T| and output_error_pct, in percent of |X W^T|. Frobenius norms,
    summed in float64, of float32 numbers, or of W's if that is float64; of nothing, 0 or inf.
    Raises ShapeError or DtypeError for tensors that do not go together.
    """
    for name, tensor in {"W": W, "W_dq": W_dq, **({} if X is None else {"X": X})}.items():
        require_float("compute_metrics", name, tensor)
    if W.shape != W_dq.shape or W.ndim < 2 or not W.numel():
        raise ShapeError(
            f"compute_metrics: W has shape {tuple(W.shape)} and W_dq {tuple(W_dq.shape)}; both are "
            "wanted as [M, K] or [M, J, block]."
        )
    dtype = torch.promote_types(W.dtype, torch.float32)
    dense = W.detach().flatten(1).to(dtype)
    off = W_dq.detach().flatten(1).to(dense.device, dtype) - dense
    error, norm = _square(off) ** 0.5, _square(dense) ** 0.5
    metrics = {"weight_error": error, "weight_error_pct": _percent(error, norm)}
    if X is None:
        return metrics
    if X.shape[-1:] != dense.shape[1:] or not X.numel():
        raise ShapeError(
            f"compute_metrics: X has shape {tuple(X.shape)}; [..., {dense.shape[1]}] is wanted, as "
            "W has that many columns."
        )
    error = norm = 0.0
    for chunk in X.detach().flatten(0, -2).split(max(1, _TILE // max(dense.shape))):
        tokens = chunk.to(dense.device, dtype)
        # Not the difference of two outputs, which would cancel.
        error += _square(tokens @ off.t())
        norm += _square(tokens @ dense.t())
    output = {"output_error": error**0.5, "output_error_pct": _percent(error**0.5, norm**0.5)}
    return metrics | output


def _square(x: Tensor) -> float:
    """The sum of squares, in float64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _percent(part: float, whole: float) -> float:
    if whole == 0.0:
        return math.inf if part else 0.0
    return 100 * part / whole


def fp4_unpack(input_data: Tensor) -> Tensor:
    """Twice the E2M1 values of packed codes, as integers: 0, 1, 2, 3, 4, 6, 8, 12 and negatives.

    input_data: uint8 [..., P], two codes a byte, the first one low. Returns int8 [..., 2 P].
    """
    codes = unpack_codes(input_data)
    doubled = torch.tensor(E2M1.values, device=codes.device).mul_(2).to(torch.int8)
    return doubled[codes.int()]


def _table(scale: Scale, device: torch.device | str) -> Tensor:
    return torch.tensor(scale.values, dtype=torch.float32, device=device)


def build_fp8_e4m3_scales(device: torch.device | str = "cpu") -> Tensor:
    """The positive values of E4M3, ascending: float32 [126], bytes 1 to 126."""
    return _table(E4M3, device)


def build_ue8m0_scales(device: torch.device | str = "cpu") -> Tensor:
    """The values of E8M0 that are written, ascending: float32 [254], bytes 1 to 254."""
    return _table(E8M0, device)


def build_ue4m4_scales(device: torch.device | str = "cpu") -> Tensor:
    """The positive values of UE4M4, ascending: float32 [254], bytes 1 to 254; 255 is NaN."""
    return _table(UE4M4, device)


def build_ue5m3_scales(device: torch.device | str = "cpu") -> Tensor:
    """The positive values of UE5M3, ascending: float32 [254], bytes 1 to 254; 255 is NaN."""
    return _table(UE5M3, device)


def scales_to_ue8m0_exponent(scales_f32: Tensor) -> Tensor:
    """The E8M0 byte of scales that are powers of two, their exponent plus 127: int32.

    scales_f32: float, 2^-126 to 2^127. Raises OptionError for any other number.
    """
    require_float("scales_to_ue8m0_exponent", "scales_f32", scales_f32)
    mantissa, exponent = torch.frexp(scales_f32.double())
    byte = exponent + 126
    strange = (mantissa != 0.5) | (byte < 1) | (byte > E8M0.last)
    if strange.any():
        raise OptionError(
            f"scales_to_ue8m0_exponent: {scales_f32[strange][0].item()} is no E8M0 scale; powers "
            "of two from 2^-126 to 2^127 are wanted."
        )
    return byte.to(torch.int32)


def snap_to_table(x: Tensor, sorted_table: Tensor) -> Tensor:
    """The entry of a table that is nearest to each number, in the dtype of x.

    sorted_table: [n] ascending. Entry i stands for byte i + 1, as in the tables above, and ties go
    to the even byte, so that with E4M3's it is the cast to it. NaN stays NaN.
    Raises ShapeError or OptionError for a table that is none, DtypeError for integers.
    """
    if not x.is_floating_point():
        raise DtypeError(f"snap_to_table: x is {x.dtype}; a floating point dtype is wanted.")
    if sorted_table.ndim != 1 or not len(sorted_table):
        raise ShapeError(
            f"snap_to_table: the table has shape {tuple(sorted_table.shape)}; [n] is wanted."
        )
    table = sorted_table.to(x.device, torch.float64)
    if not (table[1:] > table[:-1]).all():
        raise OptionError("snap_to_table: the table must ascend. Sort it before the call.")
    number = x.double().contiguous()
    middle = (table[1:] + table[:-1]) / 2
    index = torch.bucketize(number, middle)
    tied = number == torch.cat((middle, middle.new_full((1,), math.nan)))[index]
    nearest = table[index + (tied & (index % 2 == 0))].to(x.dtype)
    return torch.where(x.isnan(), x, nearest)


__all__ = [
    "build_fp8_e4m3_scales",
    "build_ue4m4_scales",
    "build_ue5m3_scales",
    "build_ue8m0_scales",
    "compute_metrics",
    "fp4_unpack",
    "global_scale_for",
    "scale_bytes",
    "scales_to_ue8m0_exponent",
    "snap_to_table",
]
__all__ += [
    f"{_form.name}_{_ending}{_triton}"
    for _form in FORMATS.values()
    for _ending in _CHOICES
    for _triton in ("", "_triton")
]
__all__ += [f"{_form.name}_dequantize" for _form in FORMATS.values()]
