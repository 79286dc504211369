"""Layers with 8-bit weights on a GPU beside bfloat16, in one run.

    python -m eval.bench.fp8_layers [--json FILE] [--schemes fp8 fp8a16 ...] [--parts] [--tiny]
    python -m eval.bench.fp8_layers --json FILE [FILE] --table docs/performance.md

Each shape N x K and number of rows: one linear layer, its input's quantization included, in a CUDA
graph that goes around copies of the weight, so that L2 holds none. Before it is timed, the output
must be that of the reference in float64 within what sums in float32 and one rounding to bfloat16
allow; FP8 tensor cores keep fewer bits of a sum, which `allowed` says. `ratio` is the time of
bfloat16 over that of the scheme. `quantize_us` is the input's alone. --parts times the products
that torch has, without the input's quantization, and the dequantization of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.bench.harness import device, graph_us, parser_for, rotated, weight_like, write_table
from eval.pages.tables import origin, table
from eval.record import Results, Row, facts
from fp4pass import ops
from fp4pass._compat.torch import block_scaled_mm, scaled_mm
from fp4pass.nn.linear import StoredWeight, quantize_input, quantized_linear
from fp4pass.record.config import LinearConfig

SCHEMES = ("fp8", "fp8a16", "fp8_block", "fp8_blocka16", "mxfp8", "mxfp8a16")
SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096))
ROWS = (1, 2, 8, 16, 64, 256, 1024, 2048, 4096)

# Rows in the table.
SHOWN = (1, 8, 64, 256, 2048)
PLAIN = "bf16"

# Of the largest magnitude of an output: a rounding to bfloat16, and of sums on tensor cores.
ALLOWED = 2**-7


def main() -> None:
    parser = parser_for(__doc__, "fp8-layers.json")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, choices=SCHEMES)
    parser.add_argument("--parts", action="store_true", help="torch's products alone")
    args = parser.parse_args()
    if write_table(args, "eval/bench/fp8_layers.py", page):
        return
    shapes, rows = (SHAPES, ROWS) if not args.tiny else (((64, 96),), (1, 3))
    results = Results(args.json[0], facts(), again=True)
    for shape in shapes:
        for m in rows if not args.parts else (256, 2048, 4096):
            found = parts(shape, m) if args.parts else measure(shape, m, args.schemes)
            for row in found:
                results.put(row)
                print(row, flush=True)


def measure(shape: tuple[int, int], m: int, schemes: tuple[str, ...]) -> list[Row]:
    """Return a row for each scheme, with the time of bfloat16 measured between them."""
    n, k = shape
    dense = weight_like(shape)
    x = torch.randn(m, k, device=device()).bfloat16()
    of_dense = [dense.clone() for _ in range(rotated(dense.nbytes))]
    bf16 = graph_us([partial(F.linear, x, each) for each in of_dense])
    del of_dense
    found = []
    for scheme in schemes:
        config = LinearConfig(scheme, "naive")
        key = config.format.key
        packed, scale = ops.search(dense, None, 1.0, key, "naive")
        weight = StoredWeight(packed, scale, None, None)
        error = check(x, weight, config)
        copies = [
            StoredWeight(packed.clone(), scale.clone(), None, None)
            for _ in range(rotated(packed.nbytes))
        ]
        us = graph_us([partial(quantized_linear, x, each, None, config) for each in copies])
        row = {"scheme": scheme, "n": n, "k": k, "rows": m, "us": us, "bf16_us": bf16}
        row |= {"ratio": bf16 / us, "error": error}
        if not config.weight_only:
            row["quantize_us"] = graph_us([partial(quantize_input, x, weight, config)] * 2)
        found.append(row)
    return found


def page(result: Row) -> str:
    """Return the table of a file: of layers, or of parts."""
    if "part" in result["rows"][0]:
        names = list(dict.fromkeys(row["part"] for row in result["rows"]))
        timed = [{**row, "cell": f"{row['us']:.1f}", "by": row["part"]} for row in result["rows"]]
    else:
        names = [PLAIN, *SCHEMES]
        timed = [row | {"cell": f"{row['bf16_us']:.1f}", "by": PLAIN} for row in result["rows"]]
        timed += [
            row | {"cell": f"{row['us']:.1f} ({row['ratio']:.2f})", "by": row["scheme"]}
            for row in result["rows"]
        ]
    cells: dict[tuple[str, int], Row] = {}
    for row in timed:
        if row.get("rows") in SHOWN:
            shape = f"{row['n']} x {row['k']}"
            cells.setdefault((shape, row["rows"]), {})[row["by"]] = row["cell"]
    names = [name for name in names if any(name in each for each in cells.values())]
    lines = [
        [*map(str, place), *(each.get(name, "") for name in names)] for place, each in cells.items()
    ]
    return "\n".join([*origin(result), table(["us", "rows", *names], lines, left=1)])


def parts(shape: tuple[int, int], m: int) -> list[Row]:
    """Return the time of each product of torch, and of the dequantization of a weight."""
    n, k = shape
    weights = [weight_like(shape).to(torch.float8_e4m3fn) for _ in range(rotated(n * k))]
    x = torch.randn(m, k, device=device()).to(torch.float8_e4m3fn)
    of_rows = torch.rand(m, device=device()), torch.rand(n, device=device())
    of_blocks = (
        torch.rand(m, k // 128, device=device()),
        torch.rand(n // 128, k // 128).to(x.device),
    )
    bytes_of = torch.full((n, k // 32), 127, dtype=torch.uint8, device=x.device)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "rows, sums in float32": lambda w: scaled_mm(x, w, *of_rows, None, fast=False),
        "rows, sums of tensor cores": lambda w: scaled_mm(x, w, *of_rows, None),
        "blocks": lambda w: block_scaled_mm(x, w, *of_blocks),
        "dequantize mxfp8": lambda w: ops.dequantize(
            w.view(torch.uint8), bytes_of, None, "mxfp8", torch.bfloat16
        ),
    }
    found = []
    for part, call in calls.items():
        us = graph_us([partial(call, each) for each in weights])
        found.append({"part": part, "n": n, "k": k, "rows": m, "us": us})
    return found


def check(x: Tensor, weight: StoredWeight, config: LinearConfig) -> float:
    """Return the largest error over the largest output. Raises SystemExit for a wrong product."""
    key = config.format.key
    rows = x.double()
    if not config.weight_only:
        rows = ops.dequantize(*quantize_input(x, weight, config), key, torch.float64)
    some = min(len(x), 64)
    exact = rows[:some] @ ops.dequantize(*weight[:3], key, torch.float64).t()
    call: Callable[..., Tensor] = quantized_linear
    y = call(x, weight, None, config)[:some].double()
    error = float((y - exact).abs().max() / exact.abs().max())
    if not error <= ALLOWED:
        raise SystemExit(f"{config.scheme}: {tuple(x.shape)}: off by {error:.2g} of the largest.")
    return error


if __name__ == "__main__":
    with torch.no_grad():
        main()
