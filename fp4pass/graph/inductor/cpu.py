"""Lower products of few rows for a CPU to C++ that Inductor compiles with the graph."""

from __future__ import annotations

import math
from typing import Any

import torch

from ... import ops
from ..._compat.inductor import CppCall, lower_to_cpp
from ...core.formats import get_format
from ...kernels.cpu.operators import FEW_ROWS, HEADER, serves, tables, threads_for
from ...kernels.linear.naive import ALONE, Around

# The C++ types of a dtype in Inductor's code, and in few_rows.h.
_TYPES = {torch.float32: ("float", "float"), torch.bfloat16: ("uint16_t", "fp4pass::BFloat16")}

# The parameters are pointers to the tensors that there are.
_SOURCE = """
extern "C" void NAME({parameters})
{{
    static const float values[16] = {{{values}}};
    static const float steps[256] = {{{steps}}};
    const fp4pass::Weight weight = {{
        packed, scale, {global_scale}, values, steps, {n}, {k}, {block}, {multiplies}}};
    fp4pass::product<{number}>(
        reinterpret_cast<const {number}*>(x), {rows}, weight,
        {bias}, reinterpret_cast<{number}*>(y), {threads});
}}
"""


def lower_products() -> None:
    """Have Inductor make C++ of products of few rows whose sizes it knows."""
    lower_to_cpp(ops.linear, _linear)
    lower_to_cpp(ops.linear_group, _linear_group)


def _linear(*product: Any, **options: Any) -> list[CppCall] | None:
    call = _call(*product, **options)
    return None if call is None else [call]


def _linear_group(
    x: Any, packed: Any, scale: Any, global_scale: Any, bias: Any, fmt: str, *options: Any
) -> list[CppCall] | None:
    if Around(*options[1:]) != ALONE:
        return None
    columns = zip(packed, scale, global_scale, bias, strict=True)
    calls = [call for each in columns if (call := _call(x, *each, fmt)) is not None]
    return calls if len(calls) == len(packed) else None


def _call(
    x: Any, packed: Any, scale: Any, global_scale: Any, bias: Any, fmt: str, compute: str = "input"
) -> CppCall | None:
    """Return the code of a product, or None for those that stay operators."""
    # In the dtype of x, whatever `compute` says of many rows.
    record = get_format(fmt)
    if None in x.size or not serves(x.dtype, record) or (bias and bias.dtype != x.dtype):
        return None
    n, k, rows = packed.size[0], x.size[-1], math.prod(x.size[:-1])
    fits = packed.size == (n, k // 2) and scale.size == (n, k // record.block)
    fits = fits and packed.dtype == scale.dtype == torch.uint8
    if global_scale:
        fits = fits and (global_scale.dtype, global_scale.size) == (torch.float32, (1,))
    if not fits or not k or not 0 < rows <= FEW_ROWS:
        return None
    type_, number = _TYPES[x.dtype]
    tensors = {"x": x, "packed": packed, "scale": scale, "global_scale": global_scale, "bias": bias}
    given = {name: each for name, each in tensors.items() if each is not None}
    kinds = {
        name: f"const {'uint8_t' if each.dtype == torch.uint8 else _TYPES[each.dtype][0]}*"
        for name, each in given.items()
    }
    kinds["y"] = f"{type_}*"
    values, steps, *_ = tables(record)
    source = _SOURCE.format(
        parameters=", ".join(f"{kind} {name}" for name, kind in kinds.items()),
        **{"values": _numbers(values), "steps": _numbers(steps), "block": record.block},
        multiplies=str(record.multiplies).lower(),
        global_scale="global_scale" if "global_scale" in given else "nullptr",
        **{"n": n, "k": k, "rows": rows, "number": number},
        bias=f"reinterpret_cast<const {number}*>(bias)" if "bias" in given else "nullptr",
        threads=threads_for(rows * n * k // 4),
    )
    source, inputs = HEADER.read_text() + source, tuple(given.values())
    return CppCall(source, tuple(kinds.values()), inputs, (*x.size[:-1], n), x.dtype)


def _numbers(table: torch.Tensor) -> str:
    """Return the numbers of a table as C++ writes them, exactly."""
    return ", ".join("NAN" if math.isnan(x) else f"{x.hex()}f" for x in table.tolist())
