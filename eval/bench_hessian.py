"""How long summing whole Hessians takes, and how far from the sums in float64 they are.

    python eval/bench_hessian.py [--json FILE] [--smoke]
    python eval/bench_hessian.py --table PAGE

`observe_full` adds 8192 tokens in a 16-bit dtype to a Hessian [K, K]; beside it the same tokens in
float32, which are multiplied in IEEE float32. Time: the median of events around a call, after one
to warm up. Errors, after CALLS calls with other tokens each: |H - H'| / sqrt(H_ii H_jj), H' in
float64, the largest and the root of the mean square; and the mean of (H - H') / H' on the diagonal,
whose terms are all positive, so that sums which round towards zero show there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_kernels import activations_like
from measuring import command, machine
from tables import origin, write_between
from torch import Tensor

from fp4pass import ops

COLUMNS, TOKENS, CALLS, REPEATS = (2048, 4096, 9728, 14336), 8192, 4, 9
DTYPES = (torch.bfloat16, torch.float16)


def main() -> None:
    options = parse_args()
    if options.table:
        found = json.loads(options.json.read_text())
        write_between(options.table, "eval/bench_hessian.py", table(found))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {"command": command(None), "machine": machine(device.type)}
    result |= {"tokens": TOKENS, "calls": CALLS, "rows": []}
    for columns in (64,) if options.smoke else COLUMNS:
        for dtype in DTYPES:
            for row in measure(256 if options.smoke else TOKENS, columns, dtype, device):
                result["rows"].append(row)
                print(row, flush=True)
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(
    tokens: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Iterator[dict[str, Any]]:
    """A row for products in float32 and one for those of the dtype."""
    torch.manual_seed(0)
    shape = (tokens, columns)
    batches = [activations_like(shape, device).to(dtype) for _ in range(CALLS)]
    exact = torch.zeros(columns, columns, dtype=torch.float64, device=device)
    for batch in batches:
        exact.addmm_(batch.double().mT, batch.double())
    for products in (torch.float32, dtype):
        given = [batch.to(products) for batch in batches]
        hessian = torch.zeros(columns, columns, device=device)
        rest = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, device=device)
        for batch in given:
            ops.observe_full(batch, hessian, *rest)
        row = {"columns": columns, "dtype": name(dtype), "products": name(products)}
        row |= errors(hessian, exact)
        yield row | {"us": time_us(given[0], hessian, rest)}


def errors(hessian: Tensor, exact: Tensor) -> dict[str, float]:
    """The largest and the mean error, and the mean of that on the diagonal."""
    diagonal = exact.diagonal()
    lengths = diagonal.sqrt()
    error = (hessian.double() - exact).div_(lengths).div_(lengths[:, None])
    found = {
        "largest": error.abs().max(),
        "rms": error.square().mean().sqrt(),
        "diagonal": error.diagonal().mean(),
    }
    return {key: float(f"{value.item():.3e}") for key, value in found.items()}


def time_us(x: Tensor, hessian: Tensor, rest: tuple[Tensor, Tensor]) -> float | None:
    """The median time of a call, in microseconds."""
    if x.device.type != "cuda":
        return None
    times = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        ops.observe_full(x, hessian, *rest)
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return round(statistics.median(times[1:]), 1)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def table(result: dict[str, Any]) -> str:
    about = result["machine"]
    lines = [
        *origin({**result, "machine": about["device"], "versions": about["versions"]}),
        "| K | dtype | float32, ms | 16 bits, ms | | error, float32 | error, 16 bits |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    rows = result["rows"]
    for slow, fast in zip(rows[::2], rows[1::2], strict=True):
        cells = [str(fast["columns"]), fast["dtype"]]
        cells += [f"{each['us'] / 1e3:.2f}" for each in (slow, fast)]
        cells.append(f"{slow['us'] / fast['us']:.1f} x")
        cells += [f"{each['largest']:.1e}" for each in (slow, fast)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = Path(__file__).resolve().parent / "results"
    parser.add_argument("--json", type=Path, default=results / "hessian-h200.json")
    parser.add_argument("--table", type=Path, metavar="PAGE", help="measure nothing")
    parser.add_argument("--smoke", action="store_true", help="small shapes, any device")
    return parser.parse_args()


if __name__ == "__main__":
    main()
