"""One tensor to 8 or 4 bits and back on a GPU, beside bitsandbytes, in one run.

    python -m eval.bench.primitives [--json FILE] [--tiny]
    python -m eval.bench.primitives --plot DIR --table PAGE

A bfloat16 tensor of 4096 x 11008, in blocks of 64, by nf4 and fp4. Of each: quantizing,
dequantizing to bfloat16, the mean absolute error of the round trip (also over the mean |x|), and
the bytes that an element takes, codes and absmax. Values are normal; errors are measured of
Student's t with 5 degrees of freedom too.

Times are medians of calls before each of which L2 is emptied: of operators, and of the functions
that a user calls, ours with its search for NaN and a wait for that. Before it is timed, codes,
absmax and values of ours must be those of the reference, to the bit; of theirs, the round trip must
be near, and the shares of codes and values that are equal to ours are written down (of fp4's zeros,
their CUDA build swaps the codes 0 and 8). The floor is the bytes that must move at 4.3 TB/s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fp4pass
from eval import charts
from eval.bench.harness import BYTES_PER_US, cold_us, device, parser_for, weight_like, write_table
from eval.pages.tables import origin, table
from eval.record import Results, Row, facts
from fp4pass.parity.codebooks import (
    dequantize_codebook,
    dequantize_codebook_ref,
    get_codebook,
    quantize_codebook,
    quantize_codebook_ref,
)

SHAPE, BLOCK = (4096, 11008), 64
SCHEMES = ("nf4", "fp4")
OURS, CHECKED, THEIRS = "fp4pass", "fp4pass.quantize", "bitsandbytes"
TIMED = ("quantize", "dequantize")

# A tensor there, and back.
There = Callable[[Tensor], Any]
Back = Callable[[Any], Tensor]


def main() -> None:
    parser = parser_for(__doc__, "primitives-h200.json")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the file to here")
    args = parser.parse_args()
    if args.plot:
        plot(json.loads(args.json[0].read_text()), args.plot)
    if write_table(args, "eval/bench/primitives.py", page) or args.plot:
        return
    shape = (64, 512) if args.tiny else SHAPE
    torch.manual_seed(0)
    data = {"normal": torch.randn(shape, device=device()).bfloat16()}
    data["heavy_tailed"] = weight_like(shape)
    about = {**facts(None, THEIRS), "shape": list(shape), "dtype": "bfloat16", "block": BLOCK}
    results = Results(args.json[0], about, again=True)
    for scheme in SCHEMES:
        for by, measure in ((OURS, operators), (CHECKED, functions), (THEIRS, bitsandbytes)):
            row: Row = {"scheme": scheme, "by": by, "error": None}
            # Whatever a library raises is its result, and loses no other row.
            try:
                row |= measure(data, scheme)
            except Exception as error:
                row["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            results.put(row)
            print(row, flush=True)


def operators(data: dict[str, Tensor], scheme: str) -> Row:
    """Measure the operators: kernels on a GPU."""
    x, codebook = data["normal"], get_codebook(scheme, BLOCK)

    def there(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_codebook(x, codebook.key)

    def back(found: tuple[Tensor, Tensor]) -> Tensor:
        return dequantize_codebook(*found, codebook.key, x.shape, x.dtype)

    found, wanted = there(x), quantize_codebook_ref(x, codebook)
    if not all(map(torch.equal, found, wanted)):
        raise ArithmeticError("codes or absmax are not those of the reference")
    if not torch.equal(back(found), dequantize_codebook_ref(*found, codebook, x.shape, x.dtype)):
        raise ArithmeticError("values are not those of the reference")
    packed = sum(each.nbytes for each in found)
    floor = (x.nbytes + packed) / BYTES_PER_US
    return {"floor_us": floor, **measured(data, there, back, packed)}


def functions(data: dict[str, Tensor], scheme: str) -> Row:
    """Measure the functions that a user calls."""
    there = lambda x: fp4pass.quantize(x, scheme, BLOCK)  # noqa: E731
    return measured(data, there, fp4pass.dequantize, there(data["normal"]).nbytes)


def bitsandbytes(data: dict[str, Tensor], scheme: str) -> Row:
    """Measure bitsandbytes, by the functions that a user calls."""
    import bitsandbytes.functional as bnb

    def there(x: Tensor) -> tuple[Tensor, Any]:
        return bnb.quantize_4bit(x, blocksize=BLOCK, quant_type=scheme)

    def back(found: tuple[Tensor, Any]) -> Tensor:
        return bnb.dequantize_4bit(*found)

    x = data["normal"]
    packed, state = there(x)
    mine = fp4pass.quantize(x, scheme, BLOCK)
    differ = sum(int(((packed.flatten() ^ mine.qdata) & half != 0).sum()) for half in (15, 240))
    equal = back((packed, state)) == fp4pass.dequantize(mine)
    same = {"same_codes": 1 - differ / x.numel(), "same_values": equal.double().mean().item()}
    return {**same, **measured(data, there, back, packed.nbytes + state.absmax.nbytes)}


def measured(data: dict[str, Tensor], there: There, back: Back, nbytes: int) -> Row:
    """Return times, bytes to an element, and errors, which must be those of a rounding."""
    x = data["normal"]
    kept = there(x)
    found: Row = {"quantize_us": cold_us([lambda: there(x)])}
    found["dequantize_us"] = cold_us([lambda: back(kept)])
    found["bytes_per_element"] = nbytes / x.numel()
    for name, each in data.items():
        error = (back(there(each)).float() - each.float()).abs().mean(dtype=torch.float64).item()
        found[f"mae_{name}"] = error
        found[f"error_{name}"] = error / each.float().abs().mean(dtype=torch.float64).item()
        if not found[f"error_{name}"] < 0.25:
            raise ArithmeticError(f"an error of {found[f'error_{name}']} of {name} values")
    return found


def by_scheme(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Return the rows that have times, by scheme and then by whose they are."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if not row["error"] and row["scheme"] in SCHEMES:
            found.setdefault(row["scheme"], {})[row["by"]] = row
    return found


def page(results: Row) -> str:
    """Return times, and in brackets how many times as fast as bitsandbytes."""
    lines = []
    for scheme, found in by_scheme(results["rows"]).items():
        for by, row in found.items():
            cells = []
            for what in TIMED:
                us = row[f"{what}_us"]
                ratio = f" ({found[THEIRS][f'{what}_us'] / us:.1f} x)" if THEIRS in found else ""
                cells.append(f"{us:.1f}{ratio if by != THEIRS else ''}")
            cells += [f"{row['mae_normal']:.5f}", f"{row['bytes_per_element']:.4f}"]
            lines.append([scheme, by, *cells])
    header = [
        "scheme",
        "by",
        "quantize, us",
        "dequantize, us",
        "mean abs error of N(0, 1)",
        "bytes",
    ]
    return "\n".join([*origin(results), table(header, lines, left=2)])


# Of each picture: its name, the entry of a row, what its axis says, and its numbers.
PICTURES = (
    ("quantize", "quantize_us", "quantize, microseconds", "{:.0f}"),
    ("dequantize", "dequantize_us", "dequantize, microseconds", "{:.0f}"),
    ("error", "mae_normal", "mean absolute error of x ~ N(0, 1)", "{:.4f}"),
    ("bytes", "bytes_per_element", "bytes per element", "{:.4f}"),
)


def plot(results: Row, folder: Path) -> None:
    """Draw bars for each scheme, ours beside theirs: DIR/primitives-*.png."""
    found = by_scheme(results["rows"])
    schemes = [scheme for scheme in SCHEMES if scheme in found]
    folder.mkdir(parents=True, exist_ok=True)
    shape = " x ".join(map(str, results["shape"]))
    title = f"{shape} {results['dtype']}, blocks of {results['block']}, {results['machine']}"
    names = charts.Scale(ticks=dict(enumerate(schemes)))
    for name, entry, label, style in PICTURES:
        series: list[charts.Bars | charts.Points] = []
        for by, aside, color in ((OURS, -0.2, 1), (THEIRS, 0.2, 0)):
            at = [i for i, scheme in enumerate(schemes) if by in found[scheme]]
            heights = [found[schemes[i]][by][entry] for i in at]
            texts = [style.format(height) for height in heights]
            who = f"{by} {results['versions'].get(by, '')}"
            series.append(charts.Bars([i + aside for i in at], heights, who, color, 0.36, texts))
        if name in TIMED:
            floors = {i: found[s][OURS]["floor_us"] for i, s in enumerate(schemes)}
            # A line below each pair of bars, interrupted between them.
            x = [i + end for i in floors for end in (-0.4, 0.4, math.nan)]
            y = [floor for floor in floors.values() for _ in range(3)]
            floor = {"label": "floor: bytes at 4.3 TB/s", "color": charts.BLACK, "line": "--"}
            series.append(charts.Points(x, y, marker="", **floor))
        panel = charts.Panel(series, title, names, charts.Scale(label), width=6.4, height=3.8)
        charts.write_png([[panel]], folder / f"primitives-{name}.png")


if __name__ == "__main__":
    main()
