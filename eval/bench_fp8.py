"""How long products on FP8 tensor cores take, beside bf16 and the products of few rows.

    python eval/bench_fp8.py [--output FILE]
    python eval/bench_fp8.py --table docs/performance.md

NVFP4 weights and bf16 inputs, whose rounding is part of the time; the medians of CUDA graphs over
rotated weights, as in bench_kernels.py. `w4a16` is compute="input", `fp8` is compute="fp8" at every
number of rows from 64 on, by the kernel that it says: "decoded" in the product, or "expanded"
first. The result is compared with the float32 product of the same operands: `error` is
|y - y'| / |y'|, the rounding to bf16 included. --table reads the output file and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_kernels import activations_like, graph_us, heavy_tailed
from measuring import machine
from tables import write_between

import fp4pass.kernels.fp8.triton as fp8
from fp4pass.core.formats import get_format
from fp4pass.core.packing import PackedWeight
from fp4pass.kernels.fp8.naive import expand_ref, quantize_rows_ref, uses_fp8
from fp4pass.kernels.linear.triton import linear_triton
from fp4pass.kernels.statistics.reference import ieee_products
from fp4pass.methods import search_scales

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ((14336, 4096), (4096, 4096), (4096, 14336), (9728, 2560))
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 8192)

# Rows from which FP8 is measured: below them `compute="fp8"` changes nothing.
FEWEST = 64

# Bytes of weights that calls go around, and rows whose result is compared with the reference.
ROTATED, COMPARED = 180e6, 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    output = ROOT / "eval" / "results" / "fp8-h200.json"
    parser.add_argument("--output", type=Path, default=output, help="the JSON file")
    parser.add_argument("--table", type=Path, help="a page to write the table into")
    args = parser.parse_args()
    if args.table:
        rows = json.loads(args.output.read_text())["rows"]
        write_between(args.table, "eval/bench_fp8.py", table(rows))
        return
    result: dict[str, Any] = {"command": "python eval/bench_fp8.py", **machine("cuda"), "rows": []}
    for n, k in SHAPES:
        for row in measure(n, k, torch.device("cuda")):
            result["rows"].append(row)
            args.output.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(row), flush=True)


def measure(n: int, k: int, device: torch.device) -> Any:
    """Yield a row for each number of rows of x."""
    fmt = get_format("nvfp4")
    dense = heavy_tailed((n, k), device)
    g = fmt.global_scale_for(dense.abs().max().item())
    state = search_scales(dense, fmt, g, "naive")
    stored = torch.tensor([fmt.global_scale_of(g)], device=device)
    copies = range(max(2, math.ceil(ROTATED / state.nbytes)))
    packed = [PackedWeight(state.qdata.clone(), state.scale.clone(), stored) for _ in copies]
    denses = [dense.clone() for _ in range(max(2, math.ceil(ROTATED / dense.nbytes)))]
    for m in ROWS:
        x = activations_like((m, k), device)
        product = partial(fp8.multiply_fp8, x, dtype=x.dtype, fmt=fmt)
        calls = {
            "bf16": [partial(F.linear, x, each) for each in denses],
            "w4a16": [partial(linear_triton, x, each, fmt) for each in packed],
        }
        row: dict[str, Any] = {"n": n, "k": k, "m": m, "how": None, "error": None}
        if m >= FEWEST:
            calls["fp8"] = [partial(product, each) for each in packed]
            row["how"] = "expanded" if fp8.expands(m, n) else "decoded"
        row |= {name: graph_us(each, device) for name, each in calls.items()}
        if FEWEST <= m <= COMPARED:
            values, factor = quantize_rows_ref(x)
            weight, factors = expand_ref(packed[0], fmt)
            with ieee_products():
                wanted = values.float() @ weight.float().t() * factor[:, None] * factors
            off = product(packed[0]).float() - wanted
            row["error"] = (off.norm() / wanted.norm()).item()
        yield row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: for each shape the times in microseconds, and what compute="fp8" then takes."""
    lines = ["| N x K | | " + " | ".join(map(str, ROWS)) + " |"]
    lines.append("| --- | --- | " + " | ".join("---:" for _ in ROWS) + " |")
    for n, k in dict.fromkeys((row["n"], row["k"]) for row in rows):
        own = {row["m"]: row for row in rows if (row["n"], row["k"]) == (n, k)}
        names = {"bf16": "cuBLAS bf16", "w4a16": '`compute="input"`', "fp8": "FP8 operands"}
        for name, title in names.items():
            cells = [_cell(own.get(m, {}).get(name)) for m in ROWS]
            lines.append(f"| {n} x {k} | {title} | " + " | ".join(cells) + " |")
        ratios = []
        for m in ROWS:
            row = own.get(m, {})
            taken = row.get("fp8" if uses_fp8("fp8", m, n) else "w4a16")
            ratios.append(f"**{row['bf16'] / taken:.2f}**" if taken else "-")
        title = '`compute="fp8"`, times as fast as bf16'
        lines.append(f"| {n} x {k} | {title} | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def _cell(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"


if __name__ == "__main__":
    main()
