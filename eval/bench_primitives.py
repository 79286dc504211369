"""How long one tensor takes to 8 or 4 bits and back on a GPU, beside bitsandbytes, in one run.

    python eval/bench_primitives.py [--output FILE] [--smoke]
    python eval/bench_primitives.py --plot DIR --table PAGE

A bfloat16 tensor of 4096 x 11008, in blocks of 64, by int8, nf4 and fp4. Of each: quantizing,
dequantizing to bfloat16, the mean absolute error of the round trip (also over the mean |x|), and
the bytes that an element takes, codes and absmax. Values are normal; errors are measured of
Student's t with 5 degrees of freedom too. int8 is int8_linear here, and there their default table,
whose values are denser towards 0.

Times are medians of calls before each of which L2 is emptied (eval/bench_kernels.py): of operators,
and of the functions that a user calls, ours with its search for NaN and a wait for that. What
is timed is first checked: codes, absmax and values of ours must be those of the reference, to the
bit; of theirs, the round trip must be near, and the shares of codes and values that are equal to
ours are written down (of fp4's zeros, their CUDA build swaps the codes 0 and 8). The floor is the
bytes that must move at 4.3 TB/s, which one H200 reaches.

The file is written after every row. --plot reads it and draws four PNG, --table writes a table into
a page; they need no GPU. --smoke is a rehearsal on a small tensor, on any device.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
import triton
from bench_kernels import BYTES_PER_US, cold_us, heavy_tailed
from tables import origin, write_between
from torch import Tensor

import fp4pass
from fp4pass.parity.codebook_reference import dequantize_codebook_ref, quantize_codebook_ref
from fp4pass.parity.codebooks import Codebook, get_codebook
from fp4pass.parity.operators import dequantize_codebook, quantize_codebook
from fp4pass.reporting import charts

Row = dict[str, Any]

SHAPE, BLOCK = (4096, 11008), 64
SCHEMES = {"int8": "int8_linear", "nf4": "nf4", "fp4": "fp4"}
OURS, CHECKED, THEIRS = "fp4pass", "fp4pass.quantize", "bitsandbytes"

# How many times as fast as bitsandbytes: what must be reached, and what is aimed at.
GOALS = {"quantize": (4.0, 10.0), "dequantize": (1.0, 1.5)}


def main() -> None:
    options = parse_args()
    if options.plot or options.table:
        results = json.loads(options.output.read_text())
        if options.plot:
            plot(results, options.plot)
        if options.table:
            write_between(options.table, "eval/bench_primitives.py", table(results))
        return
    bench = Bench(options)
    with torch.no_grad():
        for name, scheme in SCHEMES.items():
            bench.run(name, OURS, lambda s=scheme: ours(bench, get_codebook(s, BLOCK)))
            bench.run(name, CHECKED, lambda s=scheme: checked(bench, s))
            bench.run(name, THEIRS, lambda n=name: theirs(bench, n))
    if bench.device.type == "cuda":
        print(summary(bench.rows))


class Bench:
    """The rows measured so far, and the tensors they are measured on."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.output: Path = options.output
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rows: list[Row] = []
        self.start = time.perf_counter()
        torch.manual_seed(0)
        shape = (64, 512) if options.smoke else SHAPE
        self.x = torch.randn(shape, device=self.device).bfloat16()
        self.heavy = heavy_tailed(shape, self.device)

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def run(self, scheme: str, by: str, measure: Callable[[], Row]) -> None:
        """Add a row; whatever a library raises is its result, and loses no other row."""
        row: Row = {"scheme": scheme, "by": by, "error": None}
        try:
            row |= measure()
        except Exception as error:
            row["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.rows.append(row)
        print(f"{self.seconds():6.1f} s  {scheme:5} {by:17}  {described(row)}", flush=True)
        self.write()

    def write(self) -> None:
        gpu = self.device.type == "cuda"
        words = [os.path.relpath(w) if os.path.isabs(w) else w for w in sys.argv]
        result = {
            "command": shlex.join(["python", *words]),
            "machine": torch.cuda.get_device_name() if gpu else platform.machine(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "triton": triton.__version__,
                "fp4pass": fp4pass.__version__,
                **{k: v for k, v in peers.installed().items() if k == THEIRS},
            },
            "shape": list(self.x.shape),
            "dtype": "bfloat16",
            "block": BLOCK,
            "seconds": round(self.seconds(), 1),
            "rows": self.rows,
        }
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(result, indent=1) + "\n")


def described(row: Row) -> str:
    if row["error"]:
        return row["error"]
    same = "".join(f", {100 * row[key]:.4f} % {key}" for key in row if key.startswith("same"))
    return (
        f"quantize {row['quantize_us']:8.2f} us, dequantize {row['dequantize_us']:8.2f} us, "
        f"MAE {row['mae_normal']:.5f}, {row['bytes_per_element']:.4f} bytes{same}"
    )


def ours(bench: Bench, codebook: Codebook) -> Row:
    """The operators: kernels on a GPU."""

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_codebook(x, codebook.key)

    def dequantize(packed: Tensor, absmax: Tensor) -> Tensor:
        return dequantize_codebook(packed, absmax, codebook.key, bench.x.shape, bench.x.dtype)

    packed, absmax = quantize(bench.x)
    wanted = quantize_codebook_ref(bench.x, codebook)
    if not (torch.equal(packed, wanted[0]) and torch.equal(absmax, wanted[1])):
        raise ArithmeticError("codes or absmax are not those of the reference")
    dense = dequantize(packed, absmax)
    arguments = (codebook, bench.x.shape, bench.x.dtype)
    if not torch.equal(dense, dequantize_codebook_ref(packed, absmax, *arguments)):
        raise ArithmeticError("values are not those of the reference")
    return {
        "quantize_us": cold_us([lambda: quantize(bench.x)], bench.device),
        "dequantize_us": cold_us([lambda: dequantize(packed, absmax)], bench.device),
        "floor_us": (bench.x.nbytes + packed.nbytes + absmax.nbytes) / BYTES_PER_US,
        **qualities(bench, lambda x: dequantize(*quantize(x)), packed.nbytes + absmax.nbytes),
    }


def checked(bench: Bench, scheme: str) -> Row:
    """The functions that a user calls."""
    state = fp4pass.quantize(bench.x, scheme, BLOCK)

    def there_and_back(x: Tensor) -> Tensor:
        return fp4pass.dequantize(fp4pass.quantize(x, scheme, BLOCK))

    return {
        "quantize_us": cold_us([lambda: fp4pass.quantize(bench.x, scheme, BLOCK)], bench.device),
        "dequantize_us": cold_us([lambda: fp4pass.dequantize(state)], bench.device),
        **qualities(bench, there_and_back, state.nbytes),
    }


def theirs(bench: Bench, scheme: str) -> Row:
    """bitsandbytes, by the functions that a user calls."""
    import bitsandbytes.functional as bnb

    def quantize(x: Tensor) -> tuple[Tensor, Any]:
        if scheme == "int8":
            return bnb.quantize_blockwise(x, blocksize=BLOCK)
        return bnb.quantize_4bit(x, blocksize=BLOCK, quant_type=scheme)

    def dequantize(packed: Tensor, state: Any) -> Tensor:
        if scheme == "int8":
            return bnb.dequantize_blockwise(packed, state)
        return bnb.dequantize_4bit(packed, state)

    packed, state = quantize(bench.x)
    same: Row = {}
    if scheme != "int8":
        mine = fp4pass.quantize(bench.x, scheme, BLOCK)
        differ = differing_nibbles(packed.flatten(), mine.qdata) / bench.x.numel()
        equal = dequantize(packed, state) == fp4pass.dequantize(mine)
        same = {"same_codes": 1 - differ, "same_values": equal.double().mean().item()}
    return {
        "quantize_us": cold_us([lambda: quantize(bench.x)], bench.device),
        "dequantize_us": cold_us([lambda: dequantize(packed, state)], bench.device),
        **same,
        **qualities(bench, lambda x: dequantize(*quantize(x)), packed.nbytes + state.absmax.nbytes),
    }


def differing_nibbles(a: Tensor, b: Tensor) -> int:
    return sum(int(((a ^ b) & half != 0).sum()) for half in (0x0F, 0xF0))


def qualities(bench: Bench, there_and_back: Callable[[Tensor], Tensor], nbytes: int) -> Row:
    """Errors of the round trip, and bytes to an element. Raises if the error is no rounding's."""
    found: Row = {"bytes_per_element": nbytes / bench.x.numel()}
    for name, x in (("normal", bench.x), ("heavy_tailed", bench.heavy)):
        error = (there_and_back(x).float() - x.float()).abs().mean(dtype=torch.float64).item()
        found[f"mae_{name}"] = error
        found[f"error_{name}"] = error / x.float().abs().mean(dtype=torch.float64).item()
        if not found[f"error_{name}"] < 0.25:
            raise ArithmeticError(f"an error of {found[f'error_{name}']} of {name} values")
    return found


def by_scheme(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """The rows that have times, by scheme and then by whose they are."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if not row["error"]:
            found.setdefault(row["scheme"], {})[row["by"]] = row
    return found


def summary(rows: list[Row]) -> str:
    """How many times as fast as bitsandbytes each is, and whether that is enough."""
    lines = []
    for scheme, found in by_scheme(rows).items():
        if OURS not in found or THEIRS not in found:
            lines.append(f"{scheme}: nothing to compare")
            continue
        for what, (must, aim) in GOALS.items():
            ratio = found[THEIRS][f"{what}_us"] / found[OURS][f"{what}_us"]
            verdict = "as aimed at" if ratio >= aim else "enough" if ratio >= must else "TOO SLOW"
            share = found[OURS]["floor_us"] / found[OURS][f"{what}_us"]
            lines.append(
                f"{scheme:5} {what:10} {ratio:5.1f} x as fast ({must:g} x wanted, {aim:g} x aimed "
                f"at): {verdict}; {100 * share:.0f} % of the floor's speed"
            )
    return "\n".join(lines)


def table(results: dict[str, Any]) -> str:
    """Times, and in brackets how many times as fast as bitsandbytes, for a page."""
    lines = [
        *origin(results),
        "| scheme | by | quantize, us | dequantize, us | mean abs error of N(0, 1) | bytes |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for scheme, found in by_scheme(results["rows"]).items():
        for by, row in found.items():
            cells = []
            for what in GOALS:
                us = row[f"{what}_us"]
                ratio = f" ({found[THEIRS][f'{what}_us'] / us:.1f} x)" if THEIRS in found else ""
                cells.append(f"{us:.1f}{ratio if by != THEIRS else ''}")
            cells += [f"{row['mae_normal']:.5f}", f"{row['bytes_per_element']:.4f}"]
            lines.append(f"| {scheme} | {by} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


# Of each picture: its name, the entry of a row, what its axis says, and its numbers.
PICTURES = (
    ("quantize", "quantize_us", "quantize, microseconds", "{:.0f}"),
    ("dequantize", "dequantize_us", "dequantize, microseconds", "{:.0f}"),
    ("error", "mae_normal", "mean absolute error of x ~ N(0, 1)", "{:.4f}"),
    ("bytes", "bytes_per_element", "bytes per element", "{:.4f}"),
)


def plot(results: dict[str, Any], folder: Path) -> None:
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
        if name in GOALS:
            floors = [
                (i, found[s][OURS]["floor_us"]) for i, s in enumerate(schemes) if OURS in found[s]
            ]
            # A line below each pair of bars, interrupted between them.
            x = [i + end for i, _ in floors for end in (-0.4, 0.4, math.nan)]
            y = [floor for _, floor in floors for _ in range(3)]
            floor = {"label": "floor: bytes at 4.3 TB/s", "color": charts.BLACK, "line": "--"}
            series.append(charts.Points(x, y, marker="", **floor))
        panel = charts.Panel(series, title, names, charts.Scale(label), width=6.4, height=3.8)
        charts.write_png([[panel]], folder / f"primitives-{name}.png")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = Path(__file__).resolve().parent.parent
    output = root / "eval" / "results" / "primitives-h200.json"
    parser.add_argument("--output", type=Path, default=output, help="the JSON file")
    parser.add_argument("--smoke", action="store_true", help="a small tensor; any device")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the output file to here")
    parser.add_argument("--table", type=Path, metavar="PAGE", help="write its table into this page")
    return parser.parse_args()


if __name__ == "__main__":
    main()
