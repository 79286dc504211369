"""How long every kernel takes on a GPU, beside its floor, cuBLAS and what one could install.

    python eval/bench_kernels.py [--output FILE] [--rows GLOB] [--peer-seconds S] [--smoke]
    python eval/bench_kernels.py --plot docs/linear-time.png --table docs/performance.md

All go through the operators, as a converted model does. Search: the median of calls before each of
which L2 is emptied, as Triton's `do_bench` does, but for longer than the host needs for a call, so
that only the GPU is timed (unless an operator waits for it). The rest: one CUDA graph of at least
24 calls over rotated buffers, 180 MB or more of them and two at least, so that L2 is cold too; the
median over replays, divided by the calls; with pauses if a replay takes over a millisecond, so that
the clock is that of bursts. The output of every row is compared once with the
reference, or for peers with the dense product; a row that fails or is wrong holds the reason
instead of a time. The file is written after every group of rows.

Floors: bytes that must move at 4.3 TB/s, or multiplications at 790 TFLOP/s, which one H200 reaches.
--plot and --table read the output file and measure nothing. --smoke is a rehearsal on small shapes.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import peers
import torch
import torch.nn.functional as F
import triton
from tables import origin, write_between
from torch import Tensor

from fp4pass import __version__, ops
from fp4pass.core.formats import Format, get_format
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.quantize.naive import (
    dynamic_global_scale_ref,
    norm_quantize_ref,
    quantize_ref,
)
from fp4pass.kernels.search.reference import search_ref
from fp4pass.reporting import charts

Call = Callable[[], Any]
Check = Callable[[Any], str | None]
Row = dict[str, Any]

BYTES_PER_US = 4.3e6
FLOPS_PER_US = 790e6

# What empties L2 before a cold call, for 0.25 ms: long enough for the host to enqueue the call.
FLUSHED_BYTES, COLD_CALLS = 1 << 30, 100

# Graphs that take so long are replayed in bursts with pauses before them: long rows are bound by
# the clock, which falls with heat, also the heat of the row before.
HOT_US, BURST, REST_SECONDS = 1000, 8, 0.1

# More than three times the L2 cache of an H200, 60 MB.
ROTATED_BYTES = 180_000_000

SEARCHES = [
    ("naive", "nvfp4"),
    ("sse", "nvfp4"),
    ("hessian", "nvfp4"),
    ("naive", "mxfp4"),
    ("sse", "mxfp4"),
    ("hessian", "mxfp4"),
]
SEARCH_SHAPES = [(2560, 9728), (4096, 14336)]
LINEAR_SHAPES = [(14336, 4096), (4096, 4096), (4096, 14336), (9728, 2560)]
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192]
QUANTIZED_TOKENS = [1, 16, 256, 2048, 8192]

# Microseconds to stay under and to aim at, from issue 3; of linears in the order of LINEAR_SHAPES.
GOALS: dict[str, tuple[float, float]] = {
    "search/sse/nvfp4/2560x9728": (85, 55),
    "search/hessian/nvfp4/2560x9728": (800, 300),
    "search/sse/mxfp4/2560x9728": (60, 30),
    "observe/4096x9728": (28, 21),
    "quantize/static/8192x4096": (28, 23),
    "quantize/dynamic/8192x4096": (50, 40),
    "rms_norm_quantize/8192x4096": (42, 28),
    "dequantize/4096x11008": (34, 30),
}
LINEAR_GOALS = {
    ("w4a16", 1): ((17.5, 7.9, 17), (12, 6, 12)),
    ("w4a16", 4): ((18, 8, 18), (13, 6, 13)),
    ("w4a16", 16): ((20, 9.2, 20), (14, 7, 14)),
    ("w4a16", 64): ((35, 13.5, 35), (24, 10, 24)),
    ("w4a16", 256): ((74, 28, 79), (52, 20, 52)),
    ("w4a16", 2048): ((385, 103, 385), (345, 95, 315)),
    ("w4a4", 2048): ((395, 115, 390), (360, 100, 335)),
}
for (_kind, _tokens), _goals in LINEAR_GOALS.items():
    for (_n, _k), _must, _go in zip(LINEAR_SHAPES, *_goals, strict=False):
        GOALS[f"{_kind}/{_n}x{_k}/M={_tokens}"] = (_must, _go)

# What rows that end so may take, of the time of naive scales, which the same run measures before.
SEARCHED, SEARCHED_SHARE = "/sse", 1.5

# Ticks of the picture.
MICROSECONDS = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)

OURS, DENSE, CUBLAS = "fp4pass", "dequantize + cuBLAS", "cuBLAS bf16"


def main() -> None:
    options = parse_args()
    if options.plot or options.table:
        results = json.loads(options.output.read_text())
        if options.plot:
            plot(results["rows"], options.plot)
        if options.table:
            write_between(options.table, "eval/bench_kernels.py", tables(results))
        return
    bench = Bench(options)
    with torch.no_grad():
        for group in (searches, observing, activations, dequantization, linears, peer_linears):
            bench.run(group)
    failed = [row for row in bench.rows if row["error"]]
    print(f"{len(bench.rows)} rows, {len(failed)} without a time, {bench.seconds():.0f} s")


class Bench:
    """The rows measured so far, and what is common to all of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rows: list[Row] = []
        self.start = time.perf_counter()
        torch.manual_seed(0)

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def small(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape to measure: in a rehearsal at most 256 by 512."""
        return tuple(map(min, shape, (256, 512))) if self.options.smoke else shape

    def wants(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.options.rows)

    def run(self, group: Callable[[Bench], None]) -> None:
        """Measure a group; one that cannot even be set up is a row with the reason."""
        try:
            group(self)
        except Exception as error:
            self.fail(group.__name__, "the benchmark", error)
        self.write()

    def fail(self, name: str, by: str, error: Exception) -> None:
        """Add a row that has a reason instead of a time."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.rows.append({"row": name, "by": by, "us": None, "error": reason})
        print(f"{self.seconds():6.1f} s  {name:36} {by:24}  {reason}", flush=True)

    def measure(
        self,
        name: str,
        by: str,
        floor: float,
        make: Callable[[], Sequence[Call]],
        check: Check,
        *,
        how: str = "graph",
    ) -> None:
        """Add a row: the time of the calls that `make` returns, if `check` accepts the first."""
        if not self.wants(name):
            return
        # Whatever a library raises is this row's result, and no reason to lose the other rows.
        try:
            calls = make()
            wrong = check(calls[0]())
            if wrong is not None:
                raise ArithmeticError(wrong)
            time_us = TIMERS[how](calls, self.device)
        except Exception as error:
            self.fail(name, by, error)
            return
        row = {"row": name, "by": by, "us": time_us, "how": how, "floor_us": floor, "error": None}
        if by == OURS:
            row["must_us"], row["go_for_us"] = self.goals(name)
        self.rows.append(row)
        print(f"{self.seconds():6.1f} s  {name:36} {by:24} {time_us:10.2f} us", flush=True)

    def goals(self, name: str) -> tuple[float | None, float | None]:
        """Microseconds to stay under and to aim at, if any, of a row of ours."""
        if name.endswith(SEARCHED):
            naive = us(index_rows(self.rows).get(name.removesuffix(SEARCHED), {}).get(OURS))
            return (None if naive is None else SEARCHED_SHARE * naive), None
        return GOALS.get(name, (None, None))

    def write(self) -> None:
        gpu = self.device.type == "cuda"
        result = {
            "command": shlex.join(
                ["python", *(os.path.relpath(w) if os.path.isabs(w) else w for w in sys.argv)]
            ),
            "machine": torch.cuda.get_device_name() if gpu else platform.machine(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "triton": triton.__version__,
                "fp4pass": __version__,
                **peers.installed(),
            },
            "seconds": round(self.seconds(), 1),
            "rows": self.rows,
        }
        self.options.output.parent.mkdir(parents=True, exist_ok=True)
        self.options.output.write_text(json.dumps(result, indent=1) + "\n")


def cold_us(calls: Sequence[Call], device: torch.device) -> float:
    """The median time of a call with an empty L2, in microseconds."""
    if device.type != "cuda":
        return wall_us(calls)
    flush = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)
    times = []
    for _ in range(3):
        calls[0]()
    for _ in range(COLD_CALLS):
        flush.zero_()
        times.append(tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)))
        times[-1][0].record()
        calls[0]()
        times[-1][1].record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(begin.elapsed_time(end) for begin, end in times)


def graph_us(calls: Sequence[Call], device: torch.device) -> float:
    """The median time of a call in one CUDA graph that goes around `calls`, in microseconds."""
    if device.type != "cuda":
        return wall_us(calls)
    count = max(24, len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            calls[i % len(calls)]()
    first = replay_us(graph)
    times = []
    for i in range(min(40, max(7, round(1e5 / first)))):
        if first > HOT_US and i % BURST == 0:
            time.sleep(REST_SECONDS)
        times.append(replay_us(graph))
    return statistics.median(times) / count


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end)


def wall_us(calls: Sequence[Call]) -> float:
    """The time of one call without a GPU, for a rehearsal."""
    begin = time.perf_counter()
    calls[0]()
    return 1e6 * (time.perf_counter() - begin)


TIMERS = {"cold": cold_us, "graph": graph_us}


def heavy_tailed(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Weights: Student's t with 5 degrees of freedom, times 0.02, in bf16."""
    chi2 = torch.zeros(shape, device=device)
    for _ in range(5):
        chi2 += torch.randn(shape, device=device).square_()
    return (torch.randn(shape, device=device) * (chi2 / 5).rsqrt_() * 0.02).bfloat16()


def activations_like(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Inputs in bf16: low rank plus noise, correlated neighbours, log-normal channel scales."""
    tokens, columns = shape
    rank = min(64, columns)
    mixed = torch.randn(tokens, rank, device=device) @ torch.randn(rank, columns, device=device)
    x = torch.randn(shape, device=device) + mixed / rank**0.5
    x += 0.5 * x.roll(1, dims=1)
    return (x * torch.randn(columns, device=device).mul_(0.7).exp_()).bfloat16()


def rotated(total: int) -> int:
    """How many buffers of `total` bytes to go around."""
    return max(2, math.ceil(ROTATED_BYTES / total)) if torch.cuda.is_available() else 2


def nbytes(*tensors: Tensor | None) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


def divisor_of(x: Tensor, fmt: Format) -> Tensor | None:
    return dynamic_global_scale_ref(x, fmt) if fmt.has_global_scale else None


def same_bits(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> str | None:
    """Why packed codes and scales differ from the reference's."""
    differ = [(a != b).float().mean().item() for a, b in zip(found, wanted, strict=True)]
    return f"parts that differ from the reference {differ}" if any(differ) else None


def near(found: Tensor, wanted: Tensor) -> str | None:
    """Why a product in bf16 is not the float64 one: one rounding, and sums over K in float32."""
    error = (found.double() - wanted).abs()
    bound = wanted.abs() * 2.0**-7 + wanted.abs().max() * 2.0**-14
    worst = (error / bound).max().item()
    return None if worst <= 1 else f"{worst:.2f} of the bound"


def similar(found: Tensor, wanted: Tensor) -> str | None:
    """Why a product with 4-bit weights is not the dense one."""
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    return None if error < 0.25 else f"a relative error of {error:.3f}"


def unchecked(found: object) -> None:
    """Accept an output that has a layout of its own, or is the reference itself."""


def searches(bench: Bench) -> None:
    """Scale searches; the Hessian's with all its factorizations."""
    for full in SEARCH_SHAPES:
        names = [f"search/{o}/{f}/{full[0]}x{full[1]}" for o, f in SEARCHES]
        if not any(map(bench.wants, names)):
            continue
        rows, columns = bench.small(full)
        weight = heavy_tailed((rows, columns), bench.device)
        tokens = activations_like((min(4096, 8 * columns), columns), bench.device).float()
        blocks = tokens.view(len(tokens), -1, 32).transpose(0, 1)
        hessian = blocks.mT @ blocks
        for name, (objective, key) in zip(names, SEARCHES, strict=True):
            fmt = get_format(key)
            g = fmt.global_scale_for(weight.abs().amax().item())
            given = hessian if objective == "hessian" else None
            floor = weight.numel() * (2 + fmt.bits_per_weight / 8) / BYTES_PER_US
            bench.measure(
                name,
                OURS,
                floor,
                lambda a=(weight, given, g, key, objective): [lambda: ops.search(*a)],
                lambda found, a=(weight, given, g, fmt, objective): optimal(found, *a),
                how="cold",
            )


def optimal(
    found: tuple[Tensor, Tensor],
    weight: Tensor,
    hessian: Tensor | None,
    g: float,
    fmt: Format,
    objective: str,
) -> str | None:
    """Why some of the rows are not searched as the reference does, or as well in float64."""
    step = max(1, len(weight) // 64)
    rows = slice(None, None, step)
    weight = weight[rows]
    found = (found[0][rows], found[1][rows])
    wanted = search_ref(weight, hessian, g, fmt, objective)
    if objective == "naive" or same_bits(found, wanted) is None:
        return same_bits(found, wanted)
    divisor = torch.tensor([1 / g], device=weight.device) if fmt.has_global_scale else None
    errors = []
    for packed, scale in (found, wanted):
        values = dequantize_ref(packed, scale, divisor, fmt, torch.float32)
        r = (weight.double() - values.double()).unflatten(1, (-1, fmt.block))
        if hessian is None:
            errors.append(r.square().sum(-1))
            continue
        full = hessian.double()
        diagonal = [full[:, i : i + fmt.block, i : i + fmt.block] for i in range(0, 32, fmt.block)]
        metric = torch.stack(diagonal, dim=1).flatten(0, 1)
        errors.append((torch.einsum("rjn,jnm->rjm", r, metric) * r).sum(-1))
    excess = (errors[0] / errors[1].clamp(min=1e-300)).max().item() - 1
    return None if excess <= 1e-5 else f"an error {excess:.2e} above the reference's"


def observing(bench: Bench) -> None:
    """Block Hessians, with the count and the amax that the operator keeps."""
    name = "observe/4096x9728"
    if not bench.wants(name):
        return
    shape = bench.small((4096, 9728))
    x = activations_like(shape, bench.device)
    inputs = [x.clone() for _ in range(rotated(x.nbytes))]
    groups = shape[1] // 32
    state = [
        torch.zeros(groups, 32, 32, device=bench.device),
        torch.zeros(1, dtype=torch.int64, device=bench.device),
        torch.zeros(1, device=bench.device),
    ]
    blocks = x.double().view(shape[0], -1, 32)[:, :8].transpose(0, 1)
    wanted = blocks.mT @ blocks
    diagonal = wanted.diagonal(dim1=1, dim2=2).sqrt()
    bound = diagonal.unsqueeze(2) * diagonal.unsqueeze(1)

    def check(found: Tensor | None, limit: float) -> str | None:
        got = state[0] if found is None else found
        worst = ((got[:8].double() - wanted).abs() / bound).max().item()
        return None if worst <= limit else f"{worst:.2e} of sqrt(H_ii H_jj)"

    floor = (x.nbytes + state[0].nbytes) / BYTES_PER_US
    ours = [lambda x=x: ops.observe(x, *state) for x in inputs]
    bench.measure(name, OURS, floor, lambda: ours, lambda found: check(found, 1e-3))
    bench.measure(
        name,
        "torch bmm bf16",
        floor,
        lambda: [peers.torch_block_hessians(x) for x in inputs],
        lambda found: check(found, 1e-2),
    )


def activations(bench: Bench) -> None:
    """Activations to packed codes, alone and behind a norm."""
    shape = bench.small((8192, 4096))
    fmt = get_format("nvfp4")
    x = activations_like(shape, bench.device)
    inputs = [x.clone() for _ in range(rotated(x.nbytes))]
    divisor = divisor_of(x, fmt)
    some = slice(None, None, max(1, shape[0] // 256))
    wanted = quantize_ref(x[some], divisor, fmt)
    written = x.numel() * fmt.bits_per_weight / 8
    floor = (x.nbytes + written) / BYTES_PER_US

    def check(found: tuple[Tensor, Tensor]) -> str | None:
        return same_bits((found[0][some], found[1][some]), wanted)

    def dynamic(x: Tensor, scales: str = "naive") -> tuple[Tensor, Tensor]:
        return ops.quantize(x, ops.dynamic_global_scale(x, "nvfp4"), "nvfp4", scales)

    name = "quantize/static/8192x4096"
    ours = [lambda x=x: ops.quantize(x, divisor, "nvfp4") for x in inputs]
    bench.measure(name, OURS, floor, lambda: ours, check)
    there = peers.installed()
    for library, make in (
        ("gemlite", peers.gemlite_quantize),
        ("torchao", peers.torchao_quantize),
    ):
        if library in there and bench.device.type == "cuda":
            bench.measure(
                name,
                f"{library} nvfp4",
                floor,
                lambda make=make: [make(x) for x in inputs],
                unchecked,
            )
    bench.measure(
        "quantize/dynamic/8192x4096",
        OURS,
        floor + x.nbytes / BYTES_PER_US,
        lambda: [lambda x=x: dynamic(x) for x in inputs],
        check,
    )
    searched = squared_error(*quantize_ref(x[some], divisor, fmt, "sse"), divisor, x[some], fmt)

    def near(found: tuple[Tensor, Tensor]) -> str | None:
        error = squared_error(found[0][some], found[1][some], divisor, x[some], fmt)
        return None if error <= 1.05 * searched else f"{error / searched:.3f} of the least error"

    ours = [lambda x=x: ops.quantize(x, divisor, "nvfp4", "sse") for x in inputs]
    bench.measure(f"{name}/sse", OURS, floor, lambda: ours, near)
    bench.measure(
        "quantize/dynamic/8192x4096/sse",
        OURS,
        floor + x.nbytes / BYTES_PER_US,
        lambda: [lambda x=x: dynamic(x, "sse") for x in inputs],
        near,
    )

    name = "rms_norm_quantize/8192x4096"
    gain = torch.rand(shape[1], device=bench.device).add_(0.5).bfloat16()
    norm_divisor = divisor_of(F.rms_norm(x, (shape[1],), gain, 1e-6), fmt)
    norm_options = (None, gain, None, "rms", 1e-6, norm_divisor)
    norm_wanted = norm_quantize_ref(x[some], *norm_options, fmt)[1:]

    def few_flips(found: tuple[Tensor, ...]) -> str | None:
        # The sum of squares in another order moves a bf16 by an ulp now and then.
        parts = [(a[some] != b).float().mean() for a, b in zip(found[1:], norm_wanted, strict=True)]
        share = max(parts).item()
        return None if share <= 0.02 else f"{share:.3f} of the bytes differ from the reference's"

    rms_norm = torch.ops.fp4pass.norm_quantize
    bench.measure(
        name,
        OURS,
        floor,
        lambda: [lambda x=x: rms_norm(x, *norm_options, "nvfp4") for x in inputs],
        few_flips,
    )
    bench.measure(
        f"{name}/sse",
        OURS,
        floor,
        lambda: [lambda x=x: rms_norm(x, *norm_options, "nvfp4", "sse") for x in inputs],
        unchecked,
    )
    bench.measure(
        name,
        "torch, the norm alone",
        floor,
        lambda: [lambda x=x: F.rms_norm(x, (shape[1],), gain, 1e-6) for x in inputs],
        unchecked,
    )


def squared_error(packed: Tensor, scale: Tensor, divisor: Tensor, x: Tensor, fmt: Format) -> float:
    """Of x [M, K] to what its codes and scale bits stand for."""
    dense = dequantize_ref(packed, scale, divisor, fmt, torch.float32)
    return (dense - x.float()).square().sum(dtype=torch.float64).item()


def dequantization(bench: Bench) -> None:
    name, shape = "dequantize/4096x11008", bench.small((4096, 11008))
    if not bench.wants(name):
        return
    weight = heavy_tailed(shape, bench.device)
    stored = Stored(weight, "nvfp4")
    floor = (stored.nbytes + weight.nbytes) / BYTES_PER_US

    def check(found: Tensor) -> str | None:
        wanted = dequantize_ref(*stored.copies[0], stored.fmt, torch.bfloat16)
        return same_bits((found,), (wanted,))

    ours = [lambda c=c: ops.dequantize(*c, "nvfp4", torch.bfloat16) for c in stored.copies]
    bench.measure(name, OURS, floor, lambda: ours, check)
    if "bitsandbytes" in peers.installed():
        bench.measure(
            name,
            "bitsandbytes nf4",
            floor,
            lambda: [peers.bitsandbytes_dequantize(weight) for _ in stored.copies],
            lambda found: similar(found, weight.double()),
        )


class Stored:
    """A quantized weight and copies of it to go around: (packed, scale, global divisor) each."""

    def __init__(self, weight: Tensor, key: str) -> None:
        self.fmt = get_format(key)
        divisor = divisor_of(weight, self.fmt)
        # How well it is quantized changes no time; this search needs no kernel to be right.
        packed, scale = quantize_ref(weight, divisor, self.fmt)
        self.nbytes = nbytes(packed, scale)
        self.copies = [
            (packed.clone(), scale.clone(), divisor) for _ in range(rotated(self.nbytes))
        ]
        self.dense = dequantize_ref(packed, scale, divisor, self.fmt, torch.float32)


def linear_floor(shape: tuple[int, int], tokens: int) -> float:
    """Codes and scales of the weight, or the products; not the activations."""
    n, k = shape
    return max(n * k * 4.5 / 8 / BYTES_PER_US, 2 * tokens * n * k / FLOPS_PER_US)


def wanted_shapes(bench: Bench, kinds: Sequence[str]) -> Iterator[tuple[tuple[int, int], str]]:
    for shape in LINEAR_SHAPES:
        size = f"{shape[0]}x{shape[1]}"
        if any(bench.wants(f"{kind}/{size}/M={m}") for kind in kinds for m in TOKENS):
            yield shape, size


def inputs_for(bench: Bench, columns: int) -> Iterator[tuple[int, Tensor, slice]]:
    """The input of every M, and which of its rows are compared."""
    x = activations_like((8192, columns), bench.device)
    for tokens in TOKENS:
        yield tokens, x[:tokens].clone(), slice(None, None, max(1, tokens // 64))


def linears(bench: Bench) -> None:
    """W4A16 and W4A4, the same by dequantizing first, and cuBLAS on the bf16 weight."""
    for full, size in wanted_shapes(bench, ("w4a16", "w4a4")):
        shape = bench.small(full)
        weight = heavy_tailed(shape, bench.device)
        stored = Stored(weight, "nvfp4")
        dense = peers.cublas(weight, rotated(weight.nbytes))
        exact = stored.dense.double().T
        for tokens, x, some in inputs_for(bench, shape[1]):
            x_divisor = divisor_of(x, stored.fmt)
            x_packed, x_scale = quantize_ref(x[some], x_divisor, stored.fmt)
            rounded = dequantize_ref(x_packed, x_scale, x_divisor, stored.fmt, torch.float32)

            def fused(c: tuple[Tensor, Tensor, Tensor | None], x: Tensor = x) -> Tensor:
                return ops.linear(x, *c, None, "nvfp4")

            def forced(c: tuple[Tensor, Tensor, Tensor | None], x: Tensor = x) -> Tensor:
                return F.linear(x, ops.dequantize(*c, "nvfp4", x.dtype))

            def quantized(
                c: tuple[Tensor, Tensor, Tensor | None],
                x: Tensor = x,
                divisor: Tensor | None = x_divisor,
            ) -> Tensor:
                packed, scale = ops.quantize(x, divisor, "nvfp4")
                return ops.linear_quantized(x, packed, scale, divisor, *c, None, "nvfp4")

            rows: list[tuple[str, str, list[Call], Tensor]] = [
                ("w4a16", OURS, calls_of(fused, stored.copies), x[some].double() @ exact),
                ("w4a16", DENSE, calls_of(forced, stored.copies), x[some].double() @ exact),
                ("w4a16", CUBLAS, calls_of(lambda f, x=x: f(x), dense), dot(x[some], weight)),
            ]
            if tokens in QUANTIZED_TOKENS:
                wanted = rounded.double() @ exact
                rows.append(("w4a4", OURS, calls_of(quantized, stored.copies), wanted))
            for kind, by, calls, wanted in rows:
                bench.measure(
                    f"{kind}/{size}/M={tokens}",
                    by,
                    linear_floor(full, tokens),
                    lambda calls=calls: calls,
                    lambda found, wanted=wanted, some=some: near(found[some], wanted),
                )
        bench.write()


def dot(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


def calls_of(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Call]:
    return [lambda a=a: function(a) for a in arguments]


def peer_linears(bench: Bench) -> None:
    """Other libraries' 4-bit linears, until --peer-seconds are over."""
    there = peers.installed()
    begin = bench.seconds()
    for by, (make, largest) in peers.LINEARS.items():
        if by.split()[0] not in there:
            continue
        for full, size in wanted_shapes(bench, ("w4a16",)):
            shape = bench.small(full)
            weight = heavy_tailed(shape, bench.device)
            copies = rotated(weight.numel() // 2)
            made: list[peers.Linear] = []

            def layers(
                weight: Tensor = weight,
                copies: int = copies,
                made: list[peers.Linear] = made,
                make: Callable[[Tensor, int], list[peers.Linear]] = make,
            ) -> list[peers.Linear]:
                # Made once, inside a row, so that a library that fails only loses its rows.
                if not made:
                    made.extend(make(weight, copies))
                return made

            for tokens, x, some in inputs_for(bench, shape[1]):
                if tokens > largest:
                    continue
                name, floor = f"w4a16/{size}/M={tokens}", linear_floor(full, tokens)
                if bench.seconds() - begin > bench.options.peer_seconds:
                    if bench.wants(name):
                        spent = f"{bench.options.peer_seconds:.0f} s for other libraries are over"
                        bench.fail(name, by, TimeoutError(spent))
                    continue
                bench.measure(
                    name,
                    by,
                    floor,
                    lambda x=x, layers=layers: calls_of(lambda f: f(x), layers()),
                    lambda y, x=x, s=some, w=weight: similar(y[s], dot(x[s], w)),
                )
            bench.write()


def index_rows(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Rows by their name, then by whose they are."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["row"], {})[row["by"]] = row
    return found


def us(row: Row | None) -> float | None:
    return None if row is None else row["us"]


def best_peer(rows: dict[str, Row]) -> Row | None:
    """The fastest that is neither ours nor a product with the bf16 weight."""
    timed = [r for by, r in rows.items() if by not in (OURS, DENSE, CUBLAS) and r["us"] is not None]
    return min(timed, key=lambda row: row["us"], default=None)


def plot(rows: Sequence[Row], target: Path) -> None:
    """Draw the time against M for each shape, on logarithmic axes."""
    found = index_rows(rows)
    libraries = [name for name in peers.LIBRARIES if any(name in row["by"] for row in rows)]
    styles: dict[str, Row] = {
        "floor": {"color": charts.GRAY, "line": "--", "marker": ""},
        CUBLAS: {"color": charts.BLACK, "marker": "s"},
        "fp4pass W4A16": {"color": 1},
        "fp4pass W4A4": {"color": 4},
        "bitsandbytes 4 bit": {"color": 0},
        "torchao int4": {"color": 2},
        "gemlite 4 bit": {"color": 3},
    }
    texts = {n: f"{n // 1000}k" if n >= 1000 else str(n) for n in (*TOKENS, *MICROSECONDS)}
    ticks = [{n: texts[n] for n in each} for each in (TOKENS, MICROSECONDS)]
    tokens = charts.Scale("M, rows of the input", ticks=ticks[0], log=True)
    time_us = charts.Scale("microseconds", 1.7, 4000, ticks=ticks[1], log=True, grid=True)
    panels = []
    for n, k in LINEAR_SHAPES:
        lines: dict[str, list[tuple[int, float]]] = {label: [] for label in styles}
        for m in TOKENS:
            w4a16 = found.get(f"w4a16/{n}x{k}/M={m}", {})
            w4a4 = found.get(f"w4a4/{n}x{k}/M={m}", {})
            times = {
                "floor": linear_floor((n, k), m),
                CUBLAS: us(w4a16.get(CUBLAS)),
                "fp4pass W4A16": us(w4a16.get(OURS)),
                "fp4pass W4A4": us(w4a4.get(OURS)),
            }
            for library in libraries:
                label = next(label for label in styles if label.startswith(library))
                times[label] = us(best_peer({b: r for b, r in w4a16.items() if library in b}))
            for label, each in times.items():
                if each is not None:
                    lines[label].append((m, each))
        series = [
            charts.Points(*zip(*points, strict=True), label=label, **{"line": "-"} | styles[label])
            for label, points in lines.items()
            if points
        ]
        title = f"N = {n}, K = {k}"
        panels.append(charts.Panel(series, title, tokens, time_us, width=5.5, height=3.8))
    charts.write_png(charts.arrange(panels, 2), target, columns=4)


def tables(results: dict[str, Any]) -> str:
    found = index_rows(results["rows"])
    lines = [
        *origin(results),
        "Microseconds. *Must* and *goal* are those the kernels were written for; bold is within.",
        "",
        "| kernel | floor | must | goal | fp4pass | best of the others |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, rows in found.items():
        if name.startswith(("w4a16", "w4a4")) or OURS not in rows:
            continue
        ours = rows[OURS]
        numbers = (ours.get(key) for key in ("floor_us", "must_us", "go_for_us"))
        cells = [name.replace("/", " "), *map(number, numbers)]
        cells += [reached(ours), named(best_peer(rows))]
        lines.append(f"| {' | '.join(cells)} |")
    for n, k in LINEAR_SHAPES:
        lines += [
            "",
            f"Linear, N = {n}, K = {k}:",
            "",
            "| M | floor | must | goal | W4A16 | dequantize + cuBLAS | cuBLAS bf16 "
            "| best other 4-bit | W4A4 |",
            "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |",
        ]
        for m in TOKENS:
            rows = found.get(f"w4a16/{n}x{k}/M={m}", {})
            w4a4 = found.get(f"w4a4/{n}x{k}/M={m}", {}).get(OURS)
            ours = rows.get(OURS, {})
            must, go_for = GOALS.get(f"w4a16/{n}x{k}/M={m}", (None, None))
            cells = [str(m), number(linear_floor((n, k), m)), number(must), number(go_for)]
            cells += [reached(ours), number(us(rows.get(DENSE)))]
            cells += [number(us(rows.get(CUBLAS))), named(best_peer(rows)), reached(w4a4 or {})]
            lines.append(f"| {' | '.join(cells)} |")
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in results["rows"]:
        if row["error"]:
            reasons.setdefault((row["by"], row["error"]), []).append(row["row"])
    if reasons:
        lines += ["", "Rows without a time:", ""]
        for (by, error), names in reasons.items():
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            lines.append(f"- {by}, {', '.join(names[:2])}{more}: `{error.replace('`', '')}`")
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def reached(row: Row) -> str:
    """Our time, bold if it is within what it must be."""
    if row.get("us") is None:
        return "failed" if row else ""
    within = row.get("must_us") is not None and row["us"] <= row["must_us"]
    return f"**{number(row['us'])}**" if within else number(row["us"])


def named(row: Row | None) -> str:
    return "" if row is None else f"{number(row['us'])} {row['by']}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = Path(__file__).resolve().parent.parent
    output = root / "eval" / "results" / "kernels-h200.json"
    parser.add_argument("--output", type=Path, default=output, help="the JSON file")
    parser.add_argument("--rows", default="*", help="only rows whose name matches, as w4a16/*/M=1")
    parser.add_argument("--peer-seconds", type=float, default=150, help="for all peers' linears")
    parser.add_argument("--smoke", action="store_true", help="small shapes; any device")
    parser.add_argument("--plot", type=Path, help="draw the output file to this PNG")
    parser.add_argument("--table", type=Path, help="rewrite the tables of this page from it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
