"""Lower products for a CPU to C++ that Inductor compiles with the graph."""

from __future__ import annotations

import math
from typing import Any

import torch

from ... import ops
from ..._compat.inductor import CppCall, DenseProduct, lower_to_cpp
from ...core.formats import Format, get_format
from ...kernels.compute_fp8.naive import uses_fp8
from ...kernels.cpu.operators import FEW_ROWS, HEADER, TILE, serves, tables, threads_for
from ...kernels.linear.naive import ALONE, Around

# The C++ types of a dtype in Inductor's code, and in weights.h.
_TYPES = {torch.float32: ("float", "float"), torch.bfloat16: ("uint16_t", "fp4pass::BFloat16")}

# The parameters of both begin with pointers to the tensors that there are.
_WEIGHT = """{{
    static const float values[16] = {{{values}}};
    static const float steps[256] = {{{steps}}};
    const fp4pass::Weight weight = {{
        packed, scale, {global_scale}, values, steps, {n}, {k}, {block}, {multiplies}}};
"""

_FEW_ROWS = """
    fp4pass::product<{number}>(
        reinterpret_cast<const {number}*>(x), {rows}, weight,
        {bias}, reinterpret_cast<{number}*>(y), {threads});
}}
"""

# One function serves all sizes.
_DEQUANTIZE = """
    fp4pass::dequantize(weight, 0, n, reinterpret_cast<{number}*>(y), int(threads));
}}
"""


def lower_products() -> None:
    """Have Inductor make C++ of products whose sizes it knows."""
    lower_to_cpp(ops.linear, _linear)
    lower_to_cpp(ops.linear_group, _linear_group)


def _linear(*product: Any, **options: Any) -> list[CppCall | DenseProduct] | None:
    call = _call(*product, **options)
    return None if call is None else [call]


def _linear_group(
    x: Any, packed: Any, scale: Any, global_scale: Any, bias: Any, fmt: str, *options: Any
) -> list[CppCall | DenseProduct] | None:
    compute, around = (*options[:1], "input")[0], Around(*options[1:])
    columns = zip(packed, scale, global_scale, bias, strict=True)
    calls = [_call(x, *each, fmt, compute) for each in columns] if around == ALONE else []
    found = [call for call in calls if call is not None]
    return found if len(found) == len(packed) else None


def _call(
    x: Any, packed: Any, scale: Any, global_scale: Any, bias: Any, fmt: str, compute: str = "input"
) -> CppCall | DenseProduct | None:
    """Return the code of a product, or None for those that stay operators."""
    record = get_format(fmt)
    if None in x.size or not serves(x.dtype, record) or (bias and bias.dtype != x.dtype):
        return None
    n, k, rows = packed.size[0], x.size[-1], math.prod(x.size[:-1])
    fits = packed.size == (n, k // 2) and scale.size == (n, k // record.block)
    fits = fits and packed.dtype == scale.dtype == torch.uint8
    if global_scale:
        fits = fits and (global_scale.dtype, global_scale.size) == (torch.float32, (1,))
    if not fits or not rows or not k:
        return None
    type_, number = _TYPES[x.dtype]
    stored = _given({"packed": packed, "scale": scale, "global_scale": global_scale})
    if rows <= FEW_ROWS:
        # In the dtype of x, whatever `compute` says of many rows.
        given = _given({"x": x, **stored, "bias": bias})
        parameters = {name: _pointer(each) for name, each in given.items()}
        parameters["y"] = f"{type_}*"
        source = _source(parameters, _FEW_ROWS).format(
            **_constants(record, "global_scale" in given),
            **{"n": n, "k": k, "rows": rows, "number": number},
            bias=f"reinterpret_cast<const {number}*>(bias)" if "bias" in given else "nullptr",
            threads=threads_for(rows * n * k // 4),
        )
        inputs, size = tuple(given.values()), (*x.size[:-1], n)
        return CppCall(source, tuple(parameters.values()), inputs, size, x.dtype)
    if n * k > TILE or uses_fp8(compute, rows):
        return None
    parameters = {name: _pointer(each) for name, each in stored.items()}
    parameters |= {"y": f"{type_}*", "n": "int64_t", "k": "int64_t", "threads": "int64_t"}
    source = _source(parameters, _DEQUANTIZE).format(
        **_constants(record, "global_scale" in stored), n="n", k="k", number=number
    )
    kinds, inputs = tuple(parameters.values()), tuple(stored.values())
    dense = CppCall(source, kinds, inputs, (n, k), x.dtype, (n, k, threads_for(n * k)))
    return DenseProduct(x, dense, bias)


def _given(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in tensors.items() if each is not None}


def _pointer(tensor: Any) -> str:
    return f"const {'uint8_t' if tensor.dtype == torch.uint8 else _TYPES[tensor.dtype][0]}*"


def _source(parameters: dict[str, str], body: str) -> str:
    """Return what is to be formatted: the header, then a function with a weight and this body."""
    header = HEADER.read_text()
    listed = ", ".join(f"{kind} {name}" for name, kind in parameters.items())
    header = header.replace("{", "{{").replace("}", "}}")
    return f'{header}\nextern "C" void NAME({listed})\n{_WEIGHT}{body}'


def _constants(fmt: Format, has_number: bool) -> dict[str, Any]:
    """Return what stands for a format in C++."""
    values, steps, *_ = tables(fmt)
    return {
        "values": _numbers(values),
        "steps": _numbers(steps),
        "block": fmt.block,
        "multiplies": str(fmt.multiplies).lower(),
        "global_scale": "global_scale" if has_number else "nullptr",
    }


def _numbers(table: torch.Tensor) -> str:
    """Return the numbers of a table as C++ writes them, exactly."""
    return ", ".join("NAN" if math.isnan(x) else f"{x.hex()}f" for x in table.tolist())
