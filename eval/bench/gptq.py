"""`gptq` for one layer, its Hessian given: how long it takes and where the time goes; and a model.

    python -m eval.bench.gptq [--json FILE] [--repeats N] [--shapes NxK ...] [--formats NAME ...]
    python -m eval.bench.gptq --model [--json FILE]
    python -m eval.bench.gptq --table PAGE --json LAYERS MODEL

Weights are normal and the Hessian is that of correlated random tokens, as many as there are
columns. Total: the method with its defaults, from weight and Hessian to packed codes, the median of
`--repeats` calls after one that compiles. Stages, in runs of their own: factorization (damping, the
factor, coefficients of all blocks), alone (scales of each block by itself, which the order of
visits needs), visit and sweep (all blocks, once each; a sweep is a run with one less one without).
Memory: the most that a call had allocated beyond weight and Hessian, on a GPU.

--model: a model shaped as Qwen3-4B with random weights, calibrated with 128 x 2048 tokens and
converted by `gptq`: at once, where all its Hessians are held together, and with sequential=True,
where one layer's are and converting runs the layers. After a model of two such layers, which
compiles. Memory there: the most that was allocated at all.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fp4pass
from eval.bench.harness import (
    QWEN3_4B,
    TINY,
    device,
    parser_for,
    peak_bytes,
    random_model,
    seconds,
    token_batches,
    write_table,
)
from eval.pages.tables import origin, table
from eval.record import Results, Row, facts
from fp4pass.core.formats import Format, get_format
from fp4pass.kernels.search.joint_reference import (
    REFERENCE,
    ROWS,
    Chooser,
    cost_alone,
    damp,
    make_metric,
    make_problem,
    normalize,
    rows_together,
    solve,
)
from fp4pass.kernels.statistics.naive import diagonal_blocks, ieee_products
from fp4pass.methods import Gptq, Stats, resolve_method

SHAPES = ((4096, 14336), (14336, 4096), (2560, 9728))
SMALL = ((48, 96), (96, 64))
TOKENS, FEW_TOKENS = (32, 4, 2048), (2, 2, 32)
FLOWS = {"at once": False, "one layer at a time": True}


def main() -> None:
    parser = parser_for(__doc__, "gptq-h200.json")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", type=shape, nargs="+", help="NxK, as 4096x14336")
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "mxfp4"])
    parser.add_argument("--model", action="store_true", help="a whole model instead of layers")
    args = parser.parse_args()
    if write_table(args, "eval/bench/gptq.py", page):
        return
    results = Results(args.json[0], facts(), again=True)
    for row in whole_models(args.tiny) if args.model else layers(args):
        results.put(row)
        print(row, flush=True)


def shape(text: str) -> tuple[int, int]:
    rows, columns = text.split("x")
    return int(rows), int(columns)


def layers(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each shape and format."""
    for rows, columns in args.shapes or (SMALL if args.tiny else SHAPES):
        weight, hessian = layer(rows, columns)
        for name in args.formats:
            found = measure(weight, hessian, get_format(name), args.repeats)
            yield {"shape": [rows, columns], "format": name, **found}
        del weight, hessian


def whole_models(tiny: bool) -> Iterator[Row]:
    """Yield a row for each way to calibrate."""
    config = QWEN3_4B | (TINY if tiny else {})
    tokens = FEW_TOKENS if tiny else TOKENS
    batches = token_batches(config["vocab_size"], *tokens)
    for flow, sequential in FLOWS.items():
        converted_model(config | {"num_hidden_layers": 2}, batches[:1], sequential)
        row = {"flow": flow, "format": "nvfp4", "tokens": list(tokens)}
        yield row | converted_model(config, batches, sequential)


def converted_model(config: Row, batches: list[Tensor], sequential: bool) -> Row:
    """Return the seconds that a new model of the config takes, and the memory."""
    gc.collect()
    model = random_model("qwen3", config)
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()

    def calibrate() -> None:
        fp4pass.prepare(model, "gptq", sequential=sequential)
        fp4pass.calibrate(model, batches, progress=False)

    found: Row = {"calibrate_seconds": seconds(calibrate)}
    convert = partial(fp4pass.convert, model, "nvfp4", "gptq", progress=False)
    found["convert_seconds"] = seconds(convert)
    found["linears"] = len(fp4pass.report(model).converted)
    found["peak_bytes"] = torch.cuda.max_memory_allocated() if gpu else None
    return found


def layer(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return a weight [N, K] in bfloat16 and a Hessian [K, K]."""
    where = device()
    generator = torch.Generator(where).manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator, device=where) * 0.02
    tokens = torch.randn(columns, columns, generator=generator, device=where)
    # All columns have something in common, and each is a mix of its neighbours.
    tokens += tokens[:, :1] + tokens.roll(1, 1)
    with ieee_products():
        return weight.bfloat16(), tokens.mT @ tokens


def measure(weight: Tensor, hessian: Tensor, fmt: Format, repeats: int) -> Row:
    """Return the medians of the seconds that all and each stage take, and the memory."""
    method, options = resolve_method(Gptq())
    stats = Stats(tokens=len(hessian), hessian=hessian)
    global_scale = fmt.global_scale_for(weight.abs().max().item())
    whole = partial(method.function, weight, stats, fmt, global_scale, options)
    whole()
    peak = peak_bytes(whole)
    total = [seconds(whole) for _ in range(repeats)]
    with ieee_products():
        runs = [stages(weight, hessian, fmt, global_scale) for _ in range(repeats + 1)][1:]
    parts = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return {"seconds": statistics.median(total), "stages": parts, "peak_bytes": peak}


def stages(weight: Tensor, hessian: Tensor, fmt: Format, global_scale: float) -> dict[str, float]:
    """Return the seconds of each stage."""
    options, chooser, made = Gptq(), chooser_for(weight), list[Any]()

    def factorization() -> None:
        damped = damp(hessian, options.damping, options.shrinkage, fmt.block)
        blocks = make_metric(diagonal_blocks(damped, fmt.block))
        order = torch.arange(len(blocks.hessian), device=weight.device)
        made.extend((blocks, make_problem(damped, order, fmt.block, True)))

    def alone() -> None:
        for rows in weight.split(ROWS):
            cost_alone(rows, global_scale, made[0], fmt, chooser)

    def visits(sweeps: int) -> None:
        for rows in weight.split(rows_together(weight.shape[1])):
            x, unit = normalize(rows.to(torch.float32), global_scale, fmt, 1)
            solve(x.t(), unit.t(), made[1], fmt, sweeps, chooser)

    found = {"factorization": seconds(factorization), "alone": seconds(alone)}
    found["visit"] = seconds(lambda: visits(0))
    return found | {"sweep": seconds(lambda: visits(1)) - found["visit"]}


def chooser_for(weight: Tensor) -> Chooser:
    """Return what the method runs on the weight's device."""
    if weight.device.type != "cuda":
        return REFERENCE
    from fp4pass.kernels.search.joint_triton import CHOOSER

    return CHOOSER


def page(result: Row) -> str:
    """Return the table of a file: of layers, or of models."""
    rows = result["rows"]
    memory = [f"{row['peak_bytes'] / 1e9:.1f}" if row["peak_bytes"] else "" for row in rows]
    cells = []
    if "flow" in rows[0]:
        header = ["flow", "format", "tokens", "calibrate, s", "convert, s", "linears"]
        for row in rows:
            times = [f"{row[key]:.1f}" for key in ("calibrate_seconds", "convert_seconds")]
            tokens = " x ".join(map(str, row["tokens"]))
            cells.append([row["flow"], row["format"], tokens, *times, str(row["linears"])])
    else:
        header = ["layer", "format", "seconds", *rows[0]["stages"]]
        for row in rows:
            times = [f"{taken:.3f}" for taken in (row["seconds"], *row["stages"].values())]
            cells.append([" x ".join(map(str, row["shape"])), row["format"], *times])
    lines = [[*line, most] for line, most in zip(cells, memory, strict=True)]
    return "\n".join([*origin(result), table([*header, "most memory, GB"], lines, left=2)])


if __name__ == "__main__":
    main()
