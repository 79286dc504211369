"""Layers with 8-bit weights on a GPU beside bfloat16, in one run.

    python -m eval.bench.fp8_layers [--json FILE] [--schemes fp8 fp8a16 ...] [--tiny]

Each shape N x K and number of rows: one linear layer, its input's quantization included, in a CUDA
graph that goes around copies of the weight, so that L2 holds none. Before it is timed, the output
must be that of the reference in float64 within what sums in float32 and one rounding to bfloat16
allow; FP8 tensor cores keep fewer bits of a sum, which `allowed` says. `ratio` is the time of
bfloat16 over that of the scheme. Parts: `quantize` is the input's alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.bench.harness import device, graph_us, parser_for, rotated, weight_like
from eval.record import Results, Row, facts
from fp4pass import ops
from fp4pass.config import LinearConfig
from fp4pass.linear import StoredWeight, quantize_input, quantized_linear

SCHEMES = ("fp8", "fp8a16", "fp8_block", "fp8_blocka16", "mxfp8", "mxfp8a16")
SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096))
ROWS = (1, 2, 8, 16, 64, 256, 1024, 2048, 4096)

# Of the largest magnitude of an output: a rounding to bfloat16, and of sums on tensor cores.
ALLOWED = 2**-7


def main() -> None:
    parser = parser_for(__doc__, "fp8-layers.json")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, choices=SCHEMES)
    args = parser.parse_args()
    shapes, rows = (SHAPES, ROWS) if not args.tiny else (((64, 96),), (1, 3))
    results = Results(args.json[0], facts(), again=True)
    for shape in shapes:
        for m in rows:
            for row in measure(shape, m, args.schemes):
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
