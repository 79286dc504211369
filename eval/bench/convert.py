"""Observing and converting a whole model: how long it takes, and how much memory it adds.

    python -m eval.bench.convert [--json FILE] [--profile N] [--tiny]
    python -m eval.bench.convert --table docs/performance.md

The model is shaped as Qwen3-4B, with heavy-tailed random weights in bf16. Observing: calibration
batches through the prepared model, against the same batches through the model as it was; the
medians of alternating repeats. Converting: wall time of `fp4pass.convert`, each on a model of its
own, after converting a model of one such layer. Memory: the most that convert had allocated beyond
what was allocated before, beside the largest weight. --profile prints the functions in which the
host spent most, in passes of their own.
"""

from __future__ import annotations

import copy
import cProfile
import gc
import pstats
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fp4pass
from eval.bench.harness import (
    QWEN3_4B,
    TINY,
    Call,
    alternating,
    parser_for,
    peak_bytes,
    random_model,
    seconds,
    token_batches,
    write_table,
)
from eval.pages.tables import origin, table
from eval.record import Results, Row, facts

SETTINGS = [(method, only) for method in ("sse", "hessian") for only in (True, False)]


def main() -> None:
    parser = parser_for(__doc__, "convert-h200.json")
    parser.add_argument("--repeats", type=int, default=5, help="of all batches, when observing")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="print N functions")
    args = parser.parse_args()
    if write_table(args, "eval/bench/convert.py", page):
        return
    config = QWEN3_4B | (TINY if args.tiny else {})
    batches = token_batches(config["vocab_size"], *((2, 2, 32) if args.tiny else (4, 4, 1024)))
    layer = random_model("qwen3", config | {"num_hidden_layers": 1})
    for setting in SETTINGS:
        converter(calibrated(layer, batches), *setting)()
    del layer
    model = random_model("qwen3", config)
    observing = observe_seconds(model, batches, args.repeats)
    if args.profile:
        again = fp4pass.prepare(copy.deepcopy(model), "hessian")
        print_profile(lambda: fp4pass.calibrate(again, batches, progress=False), args.profile)
    tokens = [len(batches), *batches[0].shape]
    about = {**facts(), "config": config, "tokens": tokens, "observing": observing}
    print(observing, flush=True)
    results = Results(args.json[0], about, again=True)
    for method, weight_only in SETTINGS:
        row = {"method": method, "weight_only": weight_only}
        row |= convert_cost(calibrated(model, batches), method, weight_only)
        results.put(row)
        print(row, flush=True)
        if args.profile:
            again = calibrated(model, batches)
            print_profile(converter(again, method, weight_only), args.profile)


def calibrated(model: nn.Module, batches: list[Tensor]) -> nn.Module:
    """Return a copy of the model that has seen one batch."""
    prepared = fp4pass.prepare(copy.deepcopy(model), "hessian")
    return fp4pass.calibrate(prepared, batches[:1], progress=False)


def observe_seconds(plain: nn.Module, batches: list[Tensor], repeats: int) -> Row:
    """Return the seconds of the batches through a model without observers and with them."""

    def runs(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                for batch in batches:
                    model(batch, use_cache=False)

        return run

    calls = {"plain": runs(plain), "observed": runs(calibrated(plain, batches))}
    times = alternating(calls, repeats)
    found: Row = {f"{name}_seconds": taken for name, taken in times.items()}
    return found | {"overhead_percent": 100 * (times["observed"] / times["plain"] - 1)}


def converter(model: nn.Module, method: str, weight_only: bool) -> Call:
    return lambda: fp4pass.convert(model, "nvfp4", method, weight_only=weight_only, progress=False)


def convert_cost(model: nn.Module, method: str, weight_only: bool) -> Row:
    """Return the wall time of converting a calibrated model, and the memory it takes meanwhile."""
    linears = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    largest = max(m.weight.nbytes for m in linears)
    gc.collect()
    taken: list[float] = []
    extra = peak_bytes(lambda: taken.append(seconds(converter(model, method, weight_only))))
    found: Row = {"linears": len(linears), "largest_weight_bytes": largest, "seconds": taken[0]}
    return found if extra is None else found | {"extra_bytes": extra}


def print_profile(function: Call, count: int) -> None:
    """Print the functions in which the host spends most of a call."""
    profiler = cProfile.Profile()
    profiler.runcall(function)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(count)


def page(result: Row) -> str:
    """Return the table of the page."""
    observing, (count, rows, length) = result["observing"], result["tokens"]
    cells = [
        [
            f"{row['method']}, {'W4A16' if row['weight_only'] else 'W4A4'}",
            f"{row['seconds']:.3f}",
            f"{row['extra_bytes'] / 1e6:.1f}" if "extra_bytes" in row else "",
            f"{row['largest_weight_bytes'] / 1e6:.1f}",
        ]
        for row in result["rows"]
    ]
    header = ["convert", "seconds", "most extra memory, MB", "largest weight, MB"]
    lines = [
        *origin(result),
        f"{count} batches of {rows} x {length} tokens take {observing['plain_seconds']:.3f} s, and "
        f"{observing['observed_seconds']:.3f} s with observers: "
        f"{observing['overhead_percent']:+.1f} %.",
        "",
        table(header, cells, left=1),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
