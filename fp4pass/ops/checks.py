"""Check the arguments of operators: functions of the arguments that they name."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.formats import Format
from ..core.packing import PackedInput, PackedWeight
from ..errors import DtypeError, NonFiniteError, OptionError, ShapeError, expected, unknown_name
from ..kernels.compute_fp8.naive import COMPUTES
from ..kernels.quantize.naive import ACTIVATION_SCALES
from ..kernels.rotate.naive import ROTATIONS
from ..kernels.search.reference import OBJECTIVES
from ..kernels.statistics.naive import HESSIAN_BLOCK, weight_amax

# The dtypes that can be quantized.
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def require_dense(what: str, x: Tensor) -> None:
    """Raise DtypeError for a sparse or a nested tensor."""
    if x.is_nested or x.layout is not torch.strided:
        got = "a nested tensor" if x.is_nested else f"{x.layout}"
        ways_out = "Call to_padded_tensor(0.0)" if x.is_nested else "Call to_dense()"
        raise DtypeError(f"{expected(what, 'a dense tensor', got)} {ways_out} before.")


def require_float(x: Tensor) -> None:
    """Raise DtypeError unless x can be quantized."""
    if x.dtype not in FLOATS:
        raise DtypeError(
            "The input of a quantized linear layer: expected float32, bfloat16, float16 or "
            f"float64, got {x.dtype}. Cast it before the call."
        )


def require_quantizable(x: Tensor, fmt: Format, scale_method: str) -> None:
    """Raise unless x can be quantized to blocks whose scales are chosen so."""
    if scale_method not in ACTIVATION_SCALES:
        raise unknown_name("Activation scales", scale_method, ACTIVATION_SCALES)
    require_float(x)
    if fmt.has_float_scale and scale_method != "naive":
        raise OptionError(
            f"Activation scales {scale_method!r}: expected 'naive', as scales of {fmt.key} are "
            "float32 numbers."
        )
    if x.ndim == 0 or not fmt.fits(x.shape[-1]):
        raise ShapeError(
            f"The tensor to quantize: expected a last dimension that is a multiple of {fmt.block}, "
            f"the block of {fmt.key}, got shape {tuple(x.shape)}. Pad it before the call."
        )


def require_compute(compute: str) -> None:
    """Raise OptionError for an unknown `compute`."""
    if compute not in COMPUTES:
        raise unknown_name("compute", compute, COMPUTES)


def require_rotation(x: Tensor, rotation: int) -> None:
    """Raise OptionError or ShapeError unless x can be rotated."""
    if rotation not in ROTATIONS[1:]:
        known = ", ".join(map(str, ROTATIONS[1:]))
        raise OptionError(f"rotation: expected one of {known}, got {rotation}.")
    if x.ndim == 0 or x.shape[-1] % rotation:
        raise ShapeError(
            f"The input to rotate: expected a last dimension that is a multiple of {rotation}, "
            f"got shape {tuple(x.shape)}."
        )


def weight_problem(weight: Tensor, fmt: Format) -> str | None:
    """Return why a tensor cannot be a weight in this format, or None."""
    if weight.dtype not in FLOATS:
        return f"its weight is {weight.dtype}, not float32, bfloat16, float16 or float64"
    if weight.ndim != 2:
        return f"its weight has shape {tuple(weight.shape)}, not [N, K]"
    if not weight.numel():
        return f"its weight has shape {tuple(weight.shape)}, which is empty"
    if not fmt.fits(weight.shape[1]):
        return (
            f"in_features={weight.shape[1]} is not a multiple of {fmt.block} "
            f"(the block of {fmt.key})"
        )
    return None


def require_block_scales(fmt: Format) -> None:
    """Raise OptionError for formats whose scales are not bytes of blocks."""
    if fmt.has_float_scale:
        raise OptionError(
            f"{fmt.key}: expected 8-bit block scales, got float32 ones. Choose method 'naive', "
            "'sse' or 'hessian' with its default options."
        )


def require_weight(weight: Tensor, fmt: Format) -> None:
    """Raise ShapeError, DtypeError or NonFiniteError for a weight that cannot be quantized."""
    problem = weight_problem(weight, fmt)
    if problem is not None:
        kind = ShapeError if weight.dtype in FLOATS else DtypeError
        raise kind(f"The weight cannot be quantized: {problem}.")
    if not math.isfinite(weight_amax(weight)):
        raise NonFiniteError("The weight holds NaN or infinity. Repair it before it is quantized.")


def require_objective(objective: str, hessian: Tensor | None) -> None:
    """Raise unless an objective is known, and has the Hessian that it reads."""
    if objective not in OBJECTIVES:
        raise unknown_name("Objective", objective, OBJECTIVES)
    if objective == "hessian" and hessian is None:
        raise ShapeError("The block Hessian: expected a tensor for objective 'hessian', got None.")


def require_hessian(weight: Tensor, hessian: Tensor | None) -> None:
    """Raise unless a Hessian is that of the columns of a weight, and finite."""
    _require_finite("The Hessian", hessian, (weight.shape[-1],) * 2)


def require_block_hessian(weight: Tensor, hessian: Tensor | None) -> None:
    """Raise unless block Hessians are those of the columns of a weight, and finite."""
    _require_finite("The block Hessian", hessian, _blocks_of(weight))


def _blocks_of(x: Tensor) -> tuple[int, int, int]:
    return math.ceil(x.shape[-1] / HESSIAN_BLOCK), HESSIAN_BLOCK, HESSIAN_BLOCK


def _require_finite(name: str, hessian: Tensor | None, shape: tuple[int, ...]) -> None:
    if hessian is None:
        return
    if hessian.shape != shape:
        raise ShapeError(expected(name, f"shape {shape}, by the columns", tuple(hessian.shape)))
    if not hessian.isfinite().all():
        problem = expected(name, "finite numbers", "NaN or infinity")
        raise NonFiniteError(f"{problem} Calibrate on finite inputs.")


def require_observed(x: Tensor, hessian: Tensor, visible: Tensor | None) -> None:
    """Raise unless a Hessian is that of the columns of x, and `visible` a boolean for each row."""
    shape = (x.shape[-1],) * 2 if hessian.ndim == 2 else _blocks_of(x)
    # Without block Hessians, only an amax is kept.
    if len(hessian) and hessian.shape != shape:
        got = tuple(hessian.shape)
        raise ShapeError(expected("The Hessian", f"{shape} for {x.shape[-1]} columns", got))
    tokens = x.shape[:-1].numel()
    if visible is not None and (visible.dtype, visible.shape) != (torch.bool, (tokens,)):
        raise ShapeError(expected("visible", f"a boolean for each of {tokens} tokens", visible))


def require_pairs(x: Tensor, ids: Tensor) -> None:
    """Raise unless there is a row for each token or pair of `ids` [T, k]."""
    if ids.dtype != torch.int64:
        raise DtypeError(expected("ids", "int64, the experts of each token", ids.dtype))
    if ids.ndim != 2 or x.ndim not in (2, 3) or x.shape[:-1] != ids.shape[: x.ndim - 1]:
        got = f"{list(x.shape)} and {list(ids.shape)}"
        raise ShapeError(expected("x and ids", "[T, K] or [T, k, K], and [T, k]", got))


def require_pairs_of_codes(x_rows: PackedInput, ids: Tensor, weight: PackedWeight) -> None:
    """Raise unless there are codes for each token or pair, and a scale for all experts or each."""
    require_pairs(x_rows.packed, ids)
    given, experts = x_rows.global_scale, weight.packed.shape[0]
    if given is not None and given.shape not in ((1,), (experts,)):
        raise ShapeError(expected("x_global_scale", f"[1] or [{experts}]", list(given.shape)))


def require_stack(x: Tensor, weight: PackedWeight, fmt: Format) -> None:
    """Raise ShapeError unless these are the weights of experts, [E, N, K], for x [..., K]."""
    if weight.packed.ndim != 3:
        got = list(weight.packed.shape)
        raise ShapeError(expected("packed", "[E, N, P], the codes of E experts", got))
    experts, rows, packed = weight.packed.shape
    columns = fmt.columns(packed)
    shapes = ((experts, *fmt.scale_shape(rows, columns)), (experts,), (experts, rows))
    for name, given, wanted in zip(weight._fields[1:], weight[1:], shapes, strict=True):
        if given is not None and given.shape != wanted:
            raise ShapeError(expected(name, str(list(wanted)), list(given.shape)))
    if x.shape[-1] != columns:
        got = list(x.shape)
        raise ShapeError(expected("x", f"{columns} columns, those of the weights", got))
