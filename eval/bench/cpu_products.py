"""Products of packed weights on a CPU beside dense ones and llama.cpp's: rows for bench_cpu.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import ggml_products
import torch
from torch import Tensor, nn

import fp4pass
from eval.pages import tables
from fp4pass import ops

HIDDEN = (512, 2048)
FORMATS = ("nvfp4", "mxfp4")
# With so many linears of 2048 neither the dense nor the packed weights fit a core's cache.
DEPTH = 8

Sides = dict[str, Callable[[], Any]]


def measure(repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each width, dtype and number of tokens: the time of one linear of several."""
    for hidden in HIDDEN:
        for dtype in (torch.bfloat16, torch.float32):
            for tokens in (1, 2, 3, 4, 128, 2048):
                few = 1 if tokens > 16 else 8
                row = {"hidden": hidden, "dtype": str(dtype)[6:], "tokens": tokens}
                with torch.no_grad():
                    sides = products(hidden, dtype, tokens)
                    yield row | {"us": medians(sides, repeats * few, DEPTH)}
            with torch.no_grad():
                for fmt in FORMATS:
                    row = {"hidden": hidden, "dtype": str(dtype)[6:], "tokens": 128, "format": fmt}
                    yield row | {"us": medians(quantized(hidden, dtype, fmt), 8 * repeats, 1)}


def products(hidden: int, dtype: torch.dtype, tokens: int) -> Sides:
    """Chains of linears, weights only: dense, packed and ggml's, on one input."""
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden).to(dtype)
    dense = nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(DEPTH)))
    dense = dense.to(dtype)
    weights = [each.weight.detach() for each in dense]
    sides: Sides = dict(both("dense", dense, x))
    for fmt in FORMATS:
        model = nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(DEPTH)))
        model.load_state_dict(dense.state_dict())
        model = fp4pass.convert(model.to(dtype), fmt, "naive", weight_only=True)
        sides |= both(fmt, model, x)
    if ggml_products.version() is not None:
        for kind in ("bfloat16", "mxfp4"):
            name = f"ggml {kind}"
            sides[name] = ggml_products.chain(weights, x, kind, torch.get_num_threads())
    return sides


def both(name: str, model: nn.Module, x: Tensor) -> Sides:
    """A model in eager mode, and compiled."""
    torch.compiler.reset()
    compiled = torch.compile(model.forward, fullgraph=True, dynamic=False)
    compiled(x)
    return {name: lambda: model(x), f"{name} compiled": lambda: compiled(x)}


def quantized(hidden: int, dtype: torch.dtype, fmt: str) -> Sides:
    """The two halves of a linear with 4-bit inputs: rounding the input, and the product."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(hidden, hidden, bias=False, dtype=dtype))
    layer = fp4pass.convert(model, fmt, "naive")[0]
    packed, scale, number, _ = layer.packed_weight
    x = torch.randn(128, hidden).to(dtype)
    inputs = ops.quantize(x, number, fmt)
    stored = (packed, scale, number, None, fmt)
    return {
        "dense": lambda w=layer.weight: nn.functional.linear(x, w),
        "quantize": lambda: ops.quantize(x, number, fmt),
        "product": lambda: ops.linear_quantized(x, *inputs, number, *stored),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Times of products beside dense bfloat16 of the same tokens, and of rounding inputs."""
    whole = [row["us"] | row for row in rows if "format" not in row]
    dense = {(r["hidden"], r["tokens"]): r for r in whole if r["dtype"] == "bfloat16"}
    header = ["hidden", "tokens", "dtype", "dense bf16", "dense", *FORMATS]
    header += [f"{name} compiled" for name in ("dense bf16", *FORMATS)] + ["ggml mxfp4"]
    lines = []
    for row in whole:
        base = dense[row["hidden"], row["tokens"]]
        cells = [row["hidden"], row["tokens"], row["dtype"], tables.number(base["dense"])]
        cells += [_beside(row.get(name), base["dense"]) for name in ("dense", *FORMATS)]
        first = base.get("dense compiled")
        cells.append("" if first is None else tables.number(first))
        cells += [_beside(row.get(f"{name} compiled"), first) for name in FORMATS]
        cells.append(_beside(row.get("ggml mxfp4"), base["dense"]))
        lines.append(list(map(str, cells)))
    halves = [row["us"] | row for row in rows if "format" in row]
    second = [
        "hidden",
        "dtype",
        "format",
        "dense",
        "product",
        "rounding the input",
        "of the product",
    ]
    found = [
        [str(r["hidden"]), r["dtype"], r["format"]]
        + [tables.number(r[name]) for name in ("dense", "product", "quantize")]
        + [f"{r['quantize'] / r['product']:.2f}"]
        for r in halves
    ]
    return (
        "One linear of hidden x hidden, us, medians; in brackets: of dense bfloat16, eager or\n"
        "compiled.\n\n"
        + tables.table(header, lines, left=3)
        + "\n4-bit inputs, 128 tokens, us:\n\n"
        + tables.table(second, found, left=3)
    )


def _beside(value: float | None, base: float | None) -> str:
    return "" if value is None or base is None else f"{tables.number(value)} ({value / base:.2f})"


def medians(sides: Sides, repeats: int, count: int) -> dict[str, float]:
    """Microseconds of one of `count` equal parts of each side, by alternating repeats.

    With few repeats undisturbed by other work the least is as good: both are given.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 2):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if repeat >= 2:
                times[name].append(1e6 * (time.perf_counter() - start) / count)
    least = {f"{name}, least": round(min(each), 2) for name, each in times.items()}
    return {name: round(statistics.median(each), 2) for name, each in times.items()} | least
