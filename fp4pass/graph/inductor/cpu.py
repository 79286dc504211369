"""Products of few rows in graphs for a CPU: C++ that Inductor compiles with the graph."""

from __future__ import annotations

import math
from typing import Any

import torch

from ... import ops
from ..._compat.inductor import CppCall, lower_to_cpp
from ...core.formats import get_format
from ...kernels.cpu.library import SOURCES, serves, tables, threads_for
from ...kernels.linear.cpu import FEW_ROWS

# What pointers to tensors of a dtype are in Inductor's code, and in few_rows.h.
_TYPES = {torch.float32: ("float", "float"), torch.bfloat16: ("uint16_t", "fp4pass::BFloat16")}

_FUNCTION = """{header}
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


def lower_few_rows() -> None:
    """Have Inductor make C++ of products of few rows, where it knows how many."""
    lower_to_cpp(ops.linear, _linear)
    lower_to_cpp(ops.linear_group, _linear_group)


# Few rows are multiplied in the dtype of x, whatever `compute` says of many.


def _linear(x: Any, *weight: Any, **_: Any) -> list[CppCall] | None:
    call = _call(x, *weight[:5])
    return None if call is None else [call]


def _linear_group(x: Any, *weights: Any, **_: Any) -> list[CppCall] | None:
    columns, fmt = weights[:4], weights[4]
    calls = [_call(x, *each) for each in zip(*columns, [fmt] * len(columns[0]), strict=True)]
    return None if None in calls else [call for call in calls if call is not None]


def _call(
    x: Any, packed: Any, scale: Any, global_scale: Any, bias: Any, fmt: str
) -> CppCall | None:
    """Return the call of a product of few rows, or None for other products."""
    record = get_format(fmt)
    if None in x.size or not serves(x.dtype, record) or (bias and bias.dtype != x.dtype):
        return None
    n, k, rows = packed.size[0], x.size[-1], math.prod(x.size[:-1])
    fits = packed.size == (n, k // 2) and scale.size == (n, k // record.block)
    fits = fits and packed.dtype == scale.dtype == torch.uint8
    fits = fits and (
        not global_scale or (global_scale.dtype, global_scale.size) == (torch.float32, (1,))
    )
    if not fits or not 0 < rows <= FEW_ROWS:
        return None
    type_, number = _TYPES[x.dtype]
    given = {
        "x": (f"const {type_}*", x),
        "packed": ("const uint8_t*", packed),
        "scale": ("const uint8_t*", scale),
        "global_scale": ("const float*", global_scale),
        "bias": (f"const {type_}*", bias),
    }
    given = {name: each for name, each in given.items() if each[1] is not None}
    parameters = {**{name: each[0] for name, each in given.items()}, "y": f"{type_}*"}
    values, steps, *_ = tables(record)
    source = _FUNCTION.format(
        header=SOURCES[0].read_text(),
        parameters=", ".join(f"{kind} {name}" for name, kind in parameters.items()),
        values=_numbers(values),
        steps=_numbers(steps),
        global_scale="global_scale" if "global_scale" in given else "nullptr",
        bias=f"reinterpret_cast<const {number}*>(bias)" if "bias" in given else "nullptr",
        multiplies=str(record.multiplies).lower(),
        threads=threads_for(rows * n * k // 4),
        **{"n": n, "k": k, "rows": rows, "block": record.block, "number": number},
    )
    inputs = tuple(each for _, each in given.values())
    return CppCall(source, tuple(parameters.values()), inputs, (*x.size[:-1], n))


def _numbers(table: torch.Tensor) -> str:
    """Return the numbers of a table as C++ writes them, exactly."""
    return ", ".join("NAN" if math.isnan(x) else f"{x.hex()}f" for x in table.tolist())
