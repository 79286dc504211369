"""Linear layers of fp4pass beside the kernels that engines run on Hopper, in one process.

    python -m eval.bench.engines [--json FILE] [--ahead] [--rounds N] [--limit S] [--tiny]
    python -m eval.bench.engines --json FILE --table docs/performance.md

Humming is imported from humming-kernels and called as vLLM 0.33 calls it: its own choice of tiles
for the number of rows. Marlin is imported from vLLM. One that is not there is named with the reason
under `contenders`. All multiply the same codes and scales; a weight is repacked for each of them
before the clock starts. Before it is timed, an output must be that of float32 products with the
dequantized weight, on at most 64 rows: `error` is relative, in Frobenius norms. W4A8: inputs in
E4M3, a factor for each row, rounded within the time or, if `given`, before. The time: a CUDA graph
of at least 24 calls that goes around copies of the weight, so that L2 holds none
(eval/bench/harness.py); of several rounds over all of them, the median. --ahead compiles and
compares first, in a process for each shape and format: whoever breaks CUDA there is left out, as
nothing can be measured after it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.bench.harness import (
    Call,
    graph_us,
    number,
    parser_for,
    rotated,
    synchronize,
    warm,
    weight_like,
    write_table,
)
from eval.bench.kernels import LINEAR_SHAPES, Stored, inputs_for, shape_of
from eval.pages.tables import origin, table
from eval.record import Results, Row, facts
from fp4pass import ops
from fp4pass.kernels.compute_fp8.naive import quantize_rows_ref

TOKENS = (1, 4, 16, 64, 256, 2048)
FORMATS = ("nvfp4", "mxfp4")
OURS, HUMMING, MARLIN, CUBLAS = "fp4pass", "Humming", "Marlin", "cuBLAS bf16"
MODULES = {HUMMING: "humming", MARLIN: "vllm"}
MARLIN_UTILS = "vllm.model_executor.layers.quantization.utils"

# Relative errors that a right output may have: a rounding to bf16 and sums in another order, and of
# inputs in E4M3 ties that round to the other side.
ALLOWED = {"w4a16": 0.01, "w4a8": 0.02}

# A product of what is given for x.
Linear = Callable[..., Tensor]


@dataclass(frozen=True)
class Contender:
    """One whose products of a weight are timed."""

    by: str
    kind: str
    make: Callable[[Stored, Sequence[int]], list[Linear]]  # for every copy of a weight
    given: bool = False  # the product takes E4M3 rows and their factors


def main() -> None:
    parser = parser_for(__doc__, "engines-h200.json")
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=LINEAR_SHAPES, help="N x K")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="rows of inputs")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--by", nargs="+", choices=(OURS, *MODULES), default=(OURS, *MODULES))
    parser.add_argument("--rounds", type=int, default=2, help="0 compiles and compares only")
    parser.add_argument("--limit", type=float, default=200, help="seconds, then one round each")
    parser.add_argument("--ahead", action="store_true", help="compile in other processes first")
    args = parser.parse_args()
    if write_table(args, "eval/bench/engines.py", page):
        return
    start = time.perf_counter()
    args.broken = compile_ahead(args) if args.ahead else {}
    about = facts() | {"contenders": {name: found(module) for name, module in MODULES.items()}}
    results = Results(args.json[0], about, again=True)
    with torch.no_grad():
        for full in args.shapes:
            shape = (min(full[0], 128), min(full[1], 256)) if args.tiny else full
            for row in measure(shape, args, start):
                results.put(row)
                what = row["failed"] or f"{row['us'] or 0:9.2f} us, error {row['error']:.4f}"
                name = f"{row['kind']} {row['format']} {row['n']}x{row['k']} {row['rows']:5}"
                given = ", inputs given" if row["given"] else ""
                seconds = time.perf_counter() - start
                print(f"{seconds:6.1f} s  {name:32} {row['by'] + given:24} {what}", flush=True)


def compile_ahead(args: argparse.Namespace) -> dict[str, str]:
    """Compile all into the caches on disk, in processes; return who broke CUDA, and how."""
    broken: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for n, k in args.shapes:
            for fmt in args.formats:
                path = Path(folder, f"{n}-{k}-{fmt}.json")
                words = ["--rounds", "0", "--shapes", f"{n}x{k}", "--formats", fmt, "--by"]
                words += [*args.by, "--json", str(path), *(["--tiny"] if args.tiny else [])]
                words += ["--tokens", *map(str, args.tokens)]
                call = [sys.executable, "-m", "eval.bench.engines", *words]
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                running[path] = subprocess.Popen(call, env=environment, stdout=subprocess.DEVNULL)
        for path, each in running.items():
            each.wait()
            rows = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
            first = next((row for row in rows if "CUDA error" in (row["failed"] or "")), None)
            if first is not None:
                broken.setdefault(first["by"], first["failed"])
    return broken


def found(module: str) -> str:
    """Return the version of a contender's package and how it was built, or why it is not there."""
    try:
        package = import_module(module)
    except Exception as error:
        return f"absent: {reason(error)}"
    built = getattr(package, "__built__", None)
    return f"{module} {package.__version__}" + (f", {built}" if built else "")


def reason(error: Exception) -> str:
    """Return an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# ---- contenders -------------------------------------------------------------------------------


def ours(stored: Stored, tokens: Sequence[int]) -> list[Linear]:
    """The operator that converted layers call."""
    key = stored.fmt.key
    return [lambda x, c=c: ops.linear(x, *c, None, key) for c in stored.copies]


def ours_in_fp8(stored: Stored, tokens: Sequence[int], given: bool = False) -> list[Linear]:
    """The operators that layers in mxfp4a8 call."""
    options = (None, stored.fmt.key, 0, "input", "fp8")
    # Of a quantized input only the dtype is read.
    of_dtype = torch.empty(0, dtype=torch.bfloat16, device=stored.copies[0][0].device)

    def product(x: Tensor, codes: Tensor, factors: Tensor, weight: Sequence[Any]) -> Tensor:
        codes = codes.view(torch.uint8)
        return ops.linear_quantized(x, codes, factors, None, *weight, *options)

    if given:
        return [lambda x, by, c=c: product(of_dtype, x, by, c) for c in stored.copies]
    return [lambda x, c=c: product(x, *ops.quantize(x, None, "fp8"), c) for c in stored.copies]


def of_humming(
    stored: Stored, tokens: Sequence[int], fp8: bool = False, given: bool = False
) -> list[Linear]:
    """Humming's layer, with the tiles that it chooses for these rows."""
    from humming import dtypes
    from humming.config import InputQuantizationMode
    from humming.forward import humming_forward
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_and_transform_humming_tensors
    from humming.tune import get_heuristics_config

    packed, scale, divisor = stored.copies[0]
    is_nvfp4 = divisor is not None
    tensors = {"weight": packed.view(torch.int32)}
    tensors["weight_scale"] = scale.view(torch.float8_e4m3fn if is_nvfp4 else torch.float8_e8m0fnu)
    if is_nvfp4:
        tensors["weight_scale_2"] = 1 / divisor.float()
    weight_schema = HummingWeightSchema(
        b_dtype=dtypes.float4e2m1,
        bs_dtype=dtypes.float8e4m3 if is_nvfp4 else dtypes.float8e8m0,
        weight_scale_group_size=stored.fmt.block,
        weight_scale_type="group",
        weight_scale_2_type="tensor" if is_nvfp4 else None,
    )
    input_schema = HummingInputSchema(input_quant_mode=InputQuantizationMode.Disabled)
    if fp8:
        input_schema = HummingInputSchema(
            a_dtype=dtypes.float8e4m3,
            input_scale_dtype=dtypes.float32,
            input_quant_mode=InputQuantizationMode.DynamicToken,
        )
    n, k = packed.shape[0], 2 * packed.shape[1]
    config, made = prepare_and_transform_humming_tensors(
        tensors, n, k, weight_schema, input_schema,
        pad_n_to_multiple=256, pad_k_to_multiple=128, torch_dtype=torch.bfloat16,
        device=packed.device,
    )  # fmt: skip
    # All that it would compile are up to 138 kernels for a shape.
    tiles = [
        each
        for each in get_heuristics_config(config, gemm_type="dense")
        if any(each[0] < m <= each[1] for m in tokens)
    ]
    locks = torch.zeros(2048, dtype=torch.int32, device=packed.device)
    call = partial(
        humming_forward, config, locks=locks, tuning_config=tiles,
        compute_config={"gemm_type": "dense", "use_batch_invariant": False, "use_f16_accum": False},
    )  # fmt: skip
    copies = [{name: each.clone() for name, each in made.items()} for _ in stored.copies]
    if given:
        return [lambda x, factors, c=c: call(x, input_scale=factors, **c) for c in copies]
    return [lambda x, c=c: call(x, **c) for c in copies]


def of_marlin(stored: Stored, tokens: Sequence[int]) -> list[Linear]:
    """Marlin as vLLM prepares and calls it."""
    import_module("vllm")
    utils = import_module(f"{MARLIN_UTILS}.marlin_utils")
    fp4 = import_module(f"{MARLIN_UTILS}.marlin_utils_fp4")
    packed, scale, divisor = stored.copies[0]
    layer = torch.nn.Module()
    n, k = packed.shape[0], 2 * packed.shape[1]
    layer.output_size_per_partition, layer.input_size_per_partition = n, k
    layer.params_dtype = torch.bfloat16
    held = {"weight": packed, "weight_scale": scale}
    if divisor is not None:
        held["weight_scale"] = scale.view(torch.float8_e4m3fn)
        held["weight_global_scale"] = 1 / divisor.float()
    for name, each in held.items():
        setattr(layer, name, torch.nn.Parameter(each.clone(), requires_grad=False))
    fp4.prepare_fp4_layer_for_marlin(layer)
    room = utils.marlin_make_workspace_new(packed.device, 4)
    of_global = getattr(layer, "weight_global_scale", None)
    copies = [(layer.weight.clone(), layer.weight_scale.clone()) for _ in stored.copies]
    return [
        lambda x, c=c: fp4.apply_fp4_marlin_linear(x, *c, of_global, room, n, k) for c in copies
    ]


CONTENDERS = (
    Contender(OURS, "w4a16", ours),
    Contender(HUMMING, "w4a16", of_humming),
    Contender(MARLIN, "w4a16", of_marlin),
    Contender(OURS, "w4a8", ours_in_fp8),
    Contender(OURS, "w4a8", partial(ours_in_fp8, given=True), given=True),
    Contender(HUMMING, "w4a8", partial(of_humming, fp8=True)),
    Contender(HUMMING, "w4a8", partial(of_humming, fp8=True, given=True), given=True),
)

# ---- measuring --------------------------------------------------------------------------------


@dataclass
class Timed:
    """One to be timed at every number of rows, or why it cannot be."""

    row: Row
    linears: list[Linear]
    contender: Contender | None
    failed: str | None = None


def measure(shape: tuple[int, int], args: argparse.Namespace, start: float) -> Iterator[Row]:
    """Yield the rows of one shape."""
    weight = weight_like(shape)
    dense = [weight.clone() for _ in range(rotated(weight.nbytes))]
    base = {"kind": "bf16", "format": "bf16", "by": CUBLAS, "given": False}
    base |= {"bytes": weight.nbytes}
    everyone = [Timed(base, [partial(F.linear, weight=each) for each in dense], None)]
    wanted = {"bf16": weight.float()}
    for key in args.formats:
        stored = Stored(weight, key)
        wanted[key] = stored.dense
        everyone += [
            made(each, stored, args)
            for each in CONTENDERS
            if each.by in args.by and (key == "mxfp4" or each.kind == "w4a16")
        ]
    warm()
    for tokens, x, some in inputs_for(shape[1], args.tokens):
        cell = [one_of(each, tokens, x, some, wanted) for each in everyone]
        rounds = args.rounds if time.perf_counter() - start < args.limit else min(1, args.rounds)
        times: list[list[float]] = [[] for _ in cell]
        for _ in range(rounds):
            for (row, calls), taken in zip(cell, times, strict=True):
                if row["failed"] is None:
                    try:
                        taken.append(graph_us(calls))
                    except Exception as error:
                        row["failed"] = reason(error)
        for (row, _), taken in zip(cell, times, strict=True):
            us = statistics.median(taken) if taken and row["failed"] is None else None
            speed = None if us is None else row["bytes"] / us / 1e3
            where = {"n": shape[0], "k": shape[1], "rows": tokens}
            yield {**where, **row, "us": us, "gigabytes_per_second": speed, "rounds": len(taken)}


def made(contender: Contender, stored: Stored, args: argparse.Namespace) -> Timed:
    """Return the products of a contender with every copy of a weight."""
    row = {"kind": contender.kind, "format": stored.fmt.key, "by": contender.by}
    row |= {"given": contender.given, "bytes": stored.nbytes}
    if contender.by in args.broken:
        return Timed(row, [], contender, args.broken[contender.by])
    try:
        linears = contender.make(stored, args.tokens)
        synchronize()
    except Exception as error:
        return Timed(row, [], contender, reason(error))
    return Timed(row, linears, contender)


def one_of(
    timed: Timed, tokens: int, x: Tensor, some: slice, wanted: dict[str, Tensor]
) -> tuple[Row, list[Call]]:
    """Return the row of one at some rows, with the error of its output, and its calls."""
    row: Row = {**timed.row, "error": None, "failed": timed.failed}
    if timed.failed is not None:
        return row, []
    contender = timed.contender
    inputs: tuple[Tensor, ...] = (x,)
    read = x[some].float()
    if contender is not None and contender.kind == "w4a8":
        values, factors = quantize_rows_ref(x)
        read = values[some].float() * factors[some, None]
        inputs = (values, factors[:, None]) if contender.given else inputs
    calls: list[Call] = [partial(each, *inputs) for each in timed.linears]
    try:
        y = calls[0]()[some].float()
        product = read @ wanted[row["format"]].T
        row["error"] = ((y - product).norm() / product.norm()).item()
        allowed = ALLOWED.get(row["kind"], ALLOWED["w4a16"])
        if not row["error"] <= allowed:
            row["failed"] = f"wrong: a relative error of {row['error']:.4f}"
    except Exception as error:
        row["failed"] = reason(error)
    return row, calls


# ---- the page ---------------------------------------------------------------------------------

# Groups of columns: the title, the kind and the format, and whose.
GROUPS = (
    ("NVFP4", "w4a16", "nvfp4", (OURS, HUMMING, MARLIN)),
    ("MXFP4", "w4a16", "mxfp4", (OURS, HUMMING, MARLIN)),
    ("MXFP4, FP8 inputs", "w4a8", "mxfp4", (OURS, HUMMING)),
)


def index_rows(result: Row) -> dict[tuple[Any, ...], float]:
    """Return microseconds by shape, rows, kind, format and whose; inputs that are given are not."""
    return {
        (row["n"], row["k"], row["rows"], row["kind"], row["format"], row["by"]): row["us"]
        for row in result["rows"]
        if row["us"] is not None and not row["given"]
    }


def there(result: Row) -> tuple[str, ...]:
    """Return those that have times, in the order of the columns."""
    timed = {row["by"] for row in result["rows"] if row["us"] is not None}
    return tuple(name for name in (OURS, HUMMING, MARLIN) if name in timed)


def page(result: Row) -> str:
    """Return the table, and where fp4pass is behind."""
    times, names = index_rows(result), there(result)
    places = list(dict.fromkeys((row["n"], row["k"], row["rows"]) for row in result["rows"]))
    header = ["N x K", "rows", "bf16"]
    columns = []
    for title, kind, fmt, by in GROUPS:
        by = tuple(name for name in by if name in names)
        columns.append((kind, fmt, by))
        header += [f"{title}: {name}" for name in by]
    lines = []
    for n, k, rows in places:
        cells = [f"{n} x {k}", str(rows), number(times.get((n, k, rows, "bf16", "bf16", CUBLAS)))]
        for kind, fmt, by in columns:
            found = [times.get((n, k, rows, kind, fmt, name)) for name in by]
            least = min((us for us in found if us is not None), default=None)
            cells += [f"**{number(us)}**" if us == least else number(us) for us in found]
        lines.append(cells)
    contenders = "; ".join(f"{name}: {how}" for name, how in result["contenders"].items())
    text = [*origin(result), f"{contenders}.", "", table(header, lines, left=1)]
    text += [f"- {each}" for each in verdicts(times, places)]
    failed = {(row["by"], row["failed"]) for row in result["rows"] if row["failed"]}
    text += [f"- Not timed: {by}: `{why.replace('`', '')}`" for by, why in sorted(failed)]
    return "\n".join(text) + "\n"


def verdicts(times: dict[tuple[Any, ...], float], places: Sequence[Any]) -> Iterator[str]:
    """Yield for each group at how many places fp4pass is fastest, and how far behind elsewhere."""
    for title, kind, fmt, by in GROUPS:
        ahead, behind, compared = [], [], 0
        for n, k, rows in places:
            mine = times.get((n, k, rows, kind, fmt, OURS))
            others = [times.get((n, k, rows, kind, fmt, name)) for name in by if name != OURS]
            known = [us for us in others if us is not None]
            if mine is None or not known:
                continue
            compared += 1
            ratio = mine / min(known)
            (ahead if ratio <= 1 else behind).append((ratio, f"{n} x {k}, {rows} rows"))
        if compared:
            best = 1 / min(ahead)[0] if ahead else None
            worst = max(behind) if behind else None
            won = f" (up to {best:.2f} times as fast)" if best else ""
            lost = (
                f"; the most behind: {worst[0]:.2f} times the time at {worst[1]}" if worst else ""
            )
            yield f"{title}: fp4pass is the fastest at {len(ahead)} of {compared}{won}{lost}."


if __name__ == "__main__":
    main()
