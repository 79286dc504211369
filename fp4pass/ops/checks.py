"""Check the arguments of operators: functions of the arguments that they name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import Parameter, Signature
from typing import Any

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


def _check(names: str, require: Callable[..., None], *given: Any) -> Callable[..., None]:
    """Return a check of the arguments that `names` lists, behind what is given."""
    check: Any = partial(require, *given)
    kind = Parameter.POSITIONAL_OR_KEYWORD
    check.__signature__ = Signature([Parameter(name, kind) for name in names.split()])
    return check


def _one_of(what: str, known: Iterable[str], value: str) -> None:
    if value not in known:
        raise unknown_name(what, value, known)


require_compute = _check("compute", _one_of, "compute", COMPUTES)
require_objective = _check("objective", _one_of, "Objective", OBJECTIVES)


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


def _hessian(blocks: bool, owner: str, finite: bool, of: Tensor, hessian: Tensor | None) -> None:
    """Raise unless a Hessian, whole or of blocks, is that of a weight or an input."""
    if hessian is None:
        return
    columns = of.shape[-1]
    expected: tuple[int, ...] = (columns, columns)
    if blocks:
        expected = (math.ceil(columns / HESSIAN_BLOCK), HESSIAN_BLOCK, HESSIAN_BLOCK)
    name = "block Hessian" if blocks else "Hessian"
    if hessian.shape != expected:
        raise ShapeError(
            f"The {name}: expected shape {expected} for {owner} of {columns} columns, got "
            f"{tuple(hessian.shape)}."
        )
    if finite and not hessian.isfinite().all():
        raise NonFiniteError(
            f"The {name}: expected finite numbers, got NaN or infinity. Calibrate on finite inputs."
        )


require_block_hessian = _check("weight hessian", _hessian, True, "a weight", True)
require_hessian = _check("weight hessian", _hessian, False, "a weight", True)
require_observed_columns = _check("x hessian", _hessian, False, "inputs", False)


def require_hessian_of_objective(objective: str, hessian: Tensor | None) -> None:
    """Raise ShapeError if an objective reads a Hessian that is not there."""
    if objective == "hessian" and hessian is None:
        raise ShapeError("The block Hessian: expected a tensor for objective 'hessian', got None.")


def require_searched_stack(weight: Tensor, global_scales: Sequence[float], objective: str) -> None:
    """Raise unless these are the weights of experts and their global scales, and no Hessian is."""
    if objective == "hessian":
        raise OptionError("objective: 'hessian' is not for stacks. Call `search` for each weight.")
    if weight.ndim != 3 or len(weight) != len(global_scales):
        raise ShapeError(
            f"weight: expected [{len(global_scales)}, N, K], one for each global scale, got "
            f"{_of(weight)}."
        )


def require_observed_blocks(x: Tensor, hessian: Tensor) -> None:
    """Raise ShapeError unless block Hessians [J, 32, 32], if any are kept, are those of x."""
    groups = math.ceil(x.shape[-1] / HESSIAN_BLOCK)
    if len(hessian) not in (0, groups):
        raise ShapeError(
            f"The block Hessian: expected {groups} blocks of {HESSIAN_BLOCK} for inputs of "
            f"{x.shape[-1]} columns, got {len(hessian)}."
        )


def require_visible(x: Tensor, visible: Tensor | None) -> None:
    """Raise ShapeError unless `visible`, if it is given, is a boolean for each token of x."""
    if visible is not None and (
        visible.dtype != torch.bool or visible.shape != (x.shape[:-1].numel(),)
    ):
        raise ShapeError(
            f"visible: expected a boolean for each of {x.shape[:-1].numel()} tokens, got "
            f"{_of(visible)}."
        )


def _pairs(name: str, x: Tensor | PackedInput, ids: Tensor) -> None:
    """Raise unless there is a row for each token or pair of `ids` [T, k]."""
    x = x.packed if isinstance(x, PackedInput) else x
    if ids.dtype != torch.int64:
        raise DtypeError(f"ids: expected int64, the experts of each token, got {ids.dtype}.")
    if ids.ndim != 2:
        raise ShapeError(f"ids: expected [T, k], k experts for each token, got {_of(ids)}.")
    if x.ndim not in (2, 3) or x.shape[:-1] != ids.shape[: x.ndim - 1]:
        tokens, k = ids.shape
        raise ShapeError(
            f"{name}: expected [{tokens}, K] or [{tokens}, {k}, K] for ids [{tokens}, {k}], got "
            f"{_of(x)}."
        )


require_pairs = _check("x ids", _pairs, "x")
require_pairs_of_codes = _check("x_rows ids", _pairs, "x_packed")


def require_expert_scales(global_scale: Tensor, fmt: Format) -> None:
    """Raise ShapeError unless these are the global scales of experts, [E]."""
    if global_scale.ndim != 1 or not fmt.has_global_scale:
        raise ShapeError(
            f"global_scale: expected [E], one for each expert, in a format that has them, got "
            f"{_of(global_scale)} for {fmt.key}."
        )


def require_scales_of_pairs(x_rows: PackedInput, weight: PackedWeight) -> None:
    """Raise ShapeError unless inputs have a global scale for all experts, or for each."""
    given, experts = x_rows.global_scale, weight.packed.shape[:1]
    if given is not None and given.shape not in ((1,), experts):
        raise ShapeError(
            f"x_global_scale: expected [1] or [{experts[0]}], of all experts or of each, got "
            f"{_of(given)}."
        )


def require_stack(x: Tensor, weight: PackedWeight, fmt: Format) -> None:
    """Raise ShapeError unless these are the weights of experts, [E, N, K], for x [..., K]."""
    packed = weight.packed
    if packed.ndim != 3:
        raise ShapeError(f"packed: expected [E, N, P], the codes of E experts, got {_of(packed)}.")
    experts, rows, bytes_ = packed.shape
    columns = fmt.columns(bytes_)
    shapes = ((experts, *fmt.scale_shape(rows, columns)), (experts,), (experts, rows))
    for name, given, wanted in zip(weight._fields[1:], weight[1:], shapes, strict=True):
        if given is not None and given.shape != wanted:
            raise ShapeError(
                f"{name}: expected {list(wanted)} for packed {_of(packed)} in {fmt.key}, got "
                f"{_of(given)}."
            )
    if x.shape[-1] != columns:
        raise ShapeError(f"x: expected {columns} columns, those of the weights, got {_of(x)}.")


def _of(tensor: Tensor) -> str:
    return str(list(tensor.shape))
