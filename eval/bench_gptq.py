"""How long `gptq` takes for one layer, its Hessian given, where the time goes, and for a model.

    python eval/bench_gptq.py [--json FILE] [--repeats N] [--shapes NxK ...] [--formats NAME ...]
    python eval/bench_gptq.py --model [--json FILE]
    python eval/bench_gptq.py --table PAGE --json LAYERS MODEL

On a GPU where there is one; --smoke is a rehearsal on small layers, on any device. Weights are
normal and the Hessian is that of correlated random tokens, as many as there are columns.

Total: the method with its defaults, from weight and Hessian to packed codes, the median of
`--repeats` calls after one that compiles. Stages, in runs of their own: factorization (damping,
the factor, coefficients of all blocks), alone (scales of each block by itself, which the order of
visits needs), visit and sweep (all blocks, once each; a sweep is a run with one less one without).
Events measure a GPU, and wait for the host where it is slower. Memory: the most that a call had
allocated beyond weight and Hessian, on a GPU.

--model: a model shaped as Qwen3-4B with random weights, calibrated with 128 x 2048 tokens and
converted by `gptq`: at once, where all its Hessians are held together, and with sequential=True,
where one layer's are and converting runs the layers. After a model of two such layers, which
compiles. Memory there: the most that was allocated at all.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from bench_convert import QWEN3_4B, build, make_batches
from bench_convert import TINY as TINY_MODEL
from measuring import command, machine, rounded
from tables import origin, write_between
from torch import Tensor

import fp4pass
from fp4pass.core.formats import Format, get_format
from fp4pass.kernels.search.gptq_reference import (
    ROWS,
    damp,
    each_alone,
    make_problem,
    solve,
)
from fp4pass.kernels.search.joint_reference import REFERENCE, Chooser, make_metric, normalize
from fp4pass.kernels.statistics.naive import diagonal_blocks, ieee_products
from fp4pass.methods import Gptq, Stats, resolve_method

SHAPES = ((4096, 14336), (14336, 4096), (2560, 9728))
SMALL = ((48, 96), (96, 64))
TOKENS, FEW_TOKENS = (32, 4, 2048), (2, 2, 32)
FLOWS = {"at once": False, "one layer at a time": True}


def main() -> None:
    options = parse_args()
    if options.table:
        both = [json.loads(path.read_text()) for path in options.json]
        write_between(options.table, "eval/bench_gptq.py", "\n".join(map(table, both)))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = machine(device.type)
    about["versions"] |= {"triton": triton.__version__, "cuda": torch.version.cuda}
    result: dict[str, Any] = {"command": command(None), "machine": about, "rows": []}
    print(f"{about['device']}, torch {about['versions']['torch']}\n")
    for row in whole_models(options, device) if options.model else layers(options, device):
        result["rows"].append(rounded(row))
        for path in options.json:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, nargs="+", default=[], help="written after each row")
    parser.add_argument("--table", type=Path, metavar="PAGE", help="measure nothing, write a table")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", type=shape, nargs="+", help="NxK, as 4096x14336")
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "mxfp4"])
    parser.add_argument("--model", action="store_true", help="a whole model instead of layers")
    parser.add_argument("--smoke", action="store_true", help="small layers, a small model")
    options = parser.parse_args()
    options.shapes = options.shapes or (SMALL if options.smoke else SHAPES)
    return options


def shape(text: str) -> tuple[int, int]:
    rows, columns = text.split("x")
    return int(rows), int(columns)


def layers(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each shape and format."""
    print("seconds               total  factors    alone    visit    sweep       MB")
    for rows, columns in options.shapes:
        weight, hessian = layer(rows, columns, device)
        for name in options.formats:
            row = {"shape": [rows, columns], "format": name}
            row |= measure(weight, hessian, get_format(name), options.repeats)
            print(line(row), flush=True)
            yield row
        del weight, hessian


def whole_models(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each way to calibrate."""
    config = TINY_MODEL if options.smoke else QWEN3_4B
    tokens = FEW_TOKENS if options.smoke else TOKENS
    batches = make_batches(config, device, *tokens)
    print("seconds              calibrate   convert     total        MB")
    for flow, sequential in FLOWS.items():
        converted_model(config | {"num_hidden_layers": 2}, batches[:1], device, sequential)
        row = {"flow": flow, "format": "nvfp4", "tokens": list(tokens)}
        row |= converted_model(config, batches, device, sequential)
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
        total = row["calibrate_seconds"] + row["convert_seconds"]
        seconds_of = f"{row['calibrate_seconds']:10.1f}{row['convert_seconds']:10.1f}{total:10.1f}"
        print(f"{flow:20}{seconds_of}{peak:>10}", flush=True)
        yield row


def converted_model(
    config: dict[str, Any], batches: list[Tensor], device: torch.device, sequential: bool
) -> dict[str, Any]:
    """The seconds that a new model of the config takes, and the memory."""
    gc.collect()
    model = build(config, device)
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()

    def calibrate() -> None:
        fp4pass.prepare(model, "gptq", sequential=sequential)
        fp4pass.calibrate(model, batches, progress=False)

    found: dict[str, Any] = {"calibrate_seconds": seconds(calibrate, device)}
    convert = partial(fp4pass.convert, model, "nvfp4", "gptq")
    found["convert_seconds"] = seconds(convert, device)
    found["linears"] = len(fp4pass.report(model).converted)
    found["peak_bytes"] = torch.cuda.max_memory_allocated() if gpu else None
    return found


def layer(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A weight [N, K] in bfloat16 and a Hessian [K, K]."""
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator, device=device) * 0.02
    tokens = torch.randn(columns, columns, generator=generator, device=device)
    # All columns have something in common, and each is a mix of its neighbours.
    tokens += tokens[:, :1] + tokens.roll(1, 1)
    with ieee_products():
        return weight.bfloat16(), tokens.mT @ tokens


def measure(weight: Tensor, hessian: Tensor, fmt: Format, repeats: int) -> dict[str, Any]:
    """The medians of the seconds that all and each stage take, and the memory."""
    method, options = resolve_method(Gptq())
    stats = Stats(tokens=len(hessian), hessian=hessian)
    global_scale = fmt.global_scale_for(weight.abs().max().item())

    def whole() -> None:
        method.function(weight, stats, fmt, global_scale, options)

    gpu = weight.device.type == "cuda"
    whole()
    before = torch.cuda.memory_allocated() if gpu else 0
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    total = [seconds(whole, weight.device) for _ in range(repeats)]
    peak = torch.cuda.max_memory_allocated() - before if gpu else None
    with ieee_products():
        runs = [stages(weight, hessian, fmt, global_scale) for _ in range(repeats + 1)][1:]
    return {
        "seconds": statistics.median(total),
        "stages": {key: statistics.median(run[key] for run in runs) for key in runs[0]},
        "peak_bytes": peak,
    }


def stages(weight: Tensor, hessian: Tensor, fmt: Format, global_scale: float) -> dict[str, float]:
    """The seconds of each stage of kernels/gptq_ref.py."""
    device, options, chooser = weight.device, Gptq(), chooser_for(weight)
    made: list[Any] = []

    def factorization() -> None:
        damped = damp(hessian, options.damping)
        blocks = make_metric(diagonal_blocks(damped, fmt.block))
        order = torch.arange(len(blocks.hessian), device=device)
        made.extend((blocks, make_problem(damped, order, fmt.block, True)))

    def alone() -> None:
        for rows in weight.split(ROWS):
            each_alone(rows, global_scale, made[0], fmt, chooser)

    def visits(sweeps: int) -> None:
        for rows in weight.split(ROWS):
            x, unit = normalize(rows.to(torch.float32), global_scale, fmt, 1)
            solve(x.t(), unit.t(), made[1], fmt, options.codes, None, sweeps, chooser)

    found = {"factorization": seconds(factorization, device), "alone": seconds(alone, device)}
    found["visit"] = seconds(lambda: visits(0), device)
    return found | {"sweep": seconds(lambda: visits(1), device) - found["visit"]}


def chooser_for(weight: Tensor) -> Chooser:
    """What the method runs on the weight's device."""
    if weight.device.type != "cuda":
        return REFERENCE
    from fp4pass.kernels.search.joint_triton import CHOOSER

    return CHOOSER


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """How long a call takes, until the device is done."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def table(result: dict[str, Any]) -> str:
    """The rows of a file for a page."""
    machine = result["machine"]
    lines = origin({**result, "machine": machine["device"], "versions": machine["versions"]})
    if "flow" in result["rows"][0]:
        lines += [
            "| flow | format | tokens | calibrate, s | convert, s | linears | most memory, GB |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for row in result["rows"]:
            tokens = " x ".join(map(str, row["tokens"]))
            times = f"{row['calibrate_seconds']:.1f} | {row['convert_seconds']:.1f}"
            memory = f"{row['peak_bytes'] / 1e9:.1f}" if row["peak_bytes"] else ""
            cells = f"{tokens} | {times} | {row['linears']} | {memory}"
            lines.append(f"| {row['flow']} | {row['format']} | {cells} |")
        return "\n".join([*lines, ""])
    stages = list(result["rows"][0]["stages"])
    lines += [
        f"| layer | format | seconds | {' | '.join(stages)} | extra memory, GB |",
        "| --- | --- | ---: |" + " ---: |" * (len(stages) + 1),
    ]
    for row in result["rows"]:
        size = " x ".join(map(str, row["shape"]))
        parts = " | ".join(f"{row['stages'][stage]:.3f}" for stage in stages)
        memory = f"{row['peak_bytes'] / 1e9:.1f}" if row["peak_bytes"] else ""
        lines.append(f"| {size} | {row['format']} | {row['seconds']:.3f} | {parts} | {memory} |")
    return "\n".join([*lines, ""])


def line(row: dict[str, Any]) -> str:
    size = "x".join(map(str, row["shape"]))
    parts = "".join(f"{part:9.3f}" for part in row["stages"].values())
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
    return f"{size:13} {row['format']:6}{row['seconds']:9.3f}{parts}{peak:>9}"


if __name__ == "__main__":
    main()
