"""Products on FP8 tensor cores, beside bf16 and the products of few rows.

    python -m eval.bench.fp8 [--json FILE]
    python -m eval.bench.fp8 --table docs/performance.md

NVFP4 weights and bf16 inputs, whose rounding is part of the time; the medians of CUDA graphs over
rotated weights. `w4a16` is compute="input", `fp8` is compute="fp8" at every number of rows from 64
on, by the kernel that it says: "decoded" in the product, or "expanded" first. The result is
compared with the float32 product of the same operands: `error` is |y - y'| / |y'|, the rounding to
bf16 included.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

import fp4pass.kernels.fp8.triton as fp8
from eval.bench.harness import (
    activations_like,
    graph_us,
    number,
    parser_for,
    rotated,
    weight_like,
    write_table,
)
from eval.pages.tables import origin, table
from eval.record import Results, Row, facts
from fp4pass.core.formats import get_format
from fp4pass.kernels.fp8.reference import expand_ref, quantize_rows_ref, uses_fp8
from fp4pass.kernels.linear.triton import linear_triton
from fp4pass.kernels.statistics.reference import ieee_products
from fp4pass.methods import search_scales

SHAPES = ((14336, 4096), (4096, 4096), (4096, 14336), (9728, 2560))
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 8192)

# Rows from which FP8 is measured, and up to which a result is compared with the reference.
FEWEST, COMPARED = 64, 1024


def main() -> None:
    args = parser_for(__doc__, "fp8-h200.json").parse_args()
    if write_table(args, "eval/bench/fp8.py", page):
        return
    results = Results(args.json[0], facts("cuda"), again=True)
    for n, k in SHAPES:
        for row in measure(n, k):
            results.put(row)
            print(row, flush=True)


def measure(n: int, k: int) -> Iterator[Row]:
    """Yield a row for each number of rows of x."""
    fmt, dense = get_format("nvfp4"), weight_like((n, k))
    g = fmt.global_scale_for(dense.abs().max().item())
    state = search_scales(dense, fmt, g, "naive")
    stored = torch.tensor([fmt.global_scale_of(g)], device=dense.device)
    copies = range(rotated(state.nbytes))
    packed = [fp8.Packed(state.qdata.clone(), state.scale.clone(), stored) for _ in copies]
    denses = [dense.clone() for _ in range(rotated(dense.nbytes))]
    for m in ROWS:
        x = activations_like((m, k))
        product = partial(fp8.multiply_fp8, x, bias=None, dtype=x.dtype, fmt=fmt)
        calls = {
            "bf16": [partial(F.linear, x, each) for each in denses],
            "w4a16": [partial(linear_triton, x, *each, None, fmt) for each in packed],
        }
        row: Row = {"n": n, "k": k, "m": m, "how": None, "error": None}
        if m >= FEWEST:
            calls["fp8"] = [partial(product, each) for each in packed]
            row["how"] = "expanded" if fp8.expands(m, n) else "decoded"
        row |= {name: graph_us(each) for name, each in calls.items()}
        if FEWEST <= m <= COMPARED:
            values, factor = quantize_rows_ref(x)
            weight, factors = expand_ref(*packed[0], fmt)
            with ieee_products():
                wanted = values.float() @ weight.float().t() * factor[:, None] * factors
            off = product(packed[0]).float() - wanted
            row["error"] = (off.norm() / wanted.norm()).item()
        yield row


def page(results: Row) -> str:
    """Return the times of each shape in microseconds, and what compute="fp8" then takes."""
    rows, lines = results["rows"], []
    for n, k in dict.fromkeys((row["n"], row["k"]) for row in rows):
        own = {row["m"]: row for row in rows if (row["n"], row["k"]) == (n, k)}
        names = {"bf16": "cuBLAS bf16", "w4a16": '`compute="input"`', "fp8": "FP8 operands"}
        for name, title in names.items():
            times = [number(own.get(m, {}).get(name)) for m in ROWS]
            lines.append([f"{n} x {k}", title, *times])
        ratios = []
        for m in ROWS:
            taken = own.get(m, {}).get("fp8" if uses_fp8("fp8", m, n) else "w4a16")
            ratios.append(f"**{own[m]['bf16'] / taken:.2f}**" if taken else "")
        lines.append([f"{n} x {k}", '`compute="fp8"`, times as fast as bf16', *ratios])
    made = table(["N x K", "us, by rows", *map(str, ROWS)], lines, left=2)
    return "\n".join([*origin(results), made])


if __name__ == "__main__":
    main()
