r"""Kernels on a GPU: the time of each, beside its floor, cuBLAS and what one could install.

    python -m eval.bench.kernels [--json FILE] [--rows GLOB] [--peer-seconds S] [--tiny]
    python -m eval.bench.kernels --plot docs/linear-time.png --table docs/performance.md

The layers of a FLUX transformer, at the rows of an image of 1,024 x 1,024 pixels:

    python -m eval.bench.kernels --rows '*/M=*' --tokens 4096 \
        --shapes 3072x3072 12288x3072 3072x12288 3072x15360 --json eval/results/diffusion.json

All go through the operators, as a converted model does. Search: the median of calls before each of
which L2 is emptied, as Triton's `do_bench` does, but for longer than the host needs for a call, so
that only the GPU is timed. The rest: one CUDA graph of at least 24 calls over rotated buffers, so
that L2 is cold too; the median over replays, divided by the calls; with pauses if a replay takes
over a millisecond, so that the clock is that of bursts. The output of every row is compared once
with the reference, or for peers with the dense product; a row that fails or is wrong holds the
reason instead of a time. Floors: bytes that must move at 4.3 TB/s, or multiplications at 790
TFLOP/s, which one H200 reaches.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eval import charts
from eval.bench import peers
from eval.bench.harness import (
    BYTES_PER_US,
    FLOPS_PER_US,
    Call,
    activations_like,
    cold_us,
    graph_us,
    number,
    parser_for,
    rotated,
    weight_like,
    write_table,
)
from eval.pages.tables import origin, table
from eval.record import Results, Row, facts
from fp4pass import ops
from fp4pass.core.formats import Format, get_format
from fp4pass.kernels.compute_fp8.naive import uses_fp8
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.quantize.naive import dynamic_global_scale_ref, norm_quantize_ref, quantize_ref
from fp4pass.kernels.search.reference import search_ref

Check = Callable[[Any], str | None]

SEARCHES = [(method, fmt) for fmt in ("nvfp4", "mxfp4") for method in ("naive", "sse", "hessian")]
SEARCH_SHAPES = [(2560, 9728), (4096, 14336)]
LINEAR_SHAPES = [(14336, 4096), (4096, 4096), (4096, 14336), (9728, 2560)]
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192]
QUANTIZED_TOKENS = [1, 16, 256, 2048, 8192]
SHOWN_TOKENS = [1, 16, 256, 2048]

# Ticks of the picture.
MICROSECONDS = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)

OURS, DENSE, CUBLAS = "fp4pass", "dequantize + cuBLAS", "cuBLAS bf16"


def main() -> None:
    parser = parser_for(__doc__, "kernels-h200.json")
    parser.add_argument("--rows", default="*", help="only rows whose name matches, as w4a16/*/M=1")
    parser.add_argument(
        "--shapes", nargs="+", type=shape_of, default=LINEAR_SHAPES, help="N x K of linears"
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="rows of inputs")
    parser.add_argument("--peer-seconds", type=float, default=150, help="for all peers' linears")
    parser.add_argument("--plot", type=Path, help="draw the file to this PNG")
    args = parser.parse_args()
    if args.plot:
        plot(json.loads(args.json[0].read_text())["rows"], args.plot)
    if write_table(args, "eval/bench/kernels.py", page) or args.plot:
        return
    bench = Bench(args)
    with torch.no_grad():
        for group in (searches, observing, activations, dequantization, linears, peer_linears):
            bench.run(group)


def shape_of(text: str) -> tuple[int, int]:
    n, k = text.split("x")
    return int(n), int(k)


class Bench:
    """The rows measured so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start = args, time.perf_counter()
        self.results = Results(args.json[0], facts(None, *peers.LIBRARIES), again=True)
        torch.manual_seed(0)

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def small(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape to measure: in a rehearsal at most 256 by 512."""
        return (min(shape[0], 256), min(shape[1], 512)) if self.args.tiny else shape

    def wants(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.args.rows)

    def run(self, group: Callable[[Any], None]) -> None:
        """Measure a group; one that cannot even be set up is a row with the reason."""
        try:
            group(self)
        except Exception as error:
            self.fail(group.__name__, "the benchmark", error)

    def fail(self, name: str, by: str, error: Exception) -> None:
        """Add a row that has a reason instead of a time."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.results.put({"row": name, "by": by, "us": None, "error": reason})
        print(f"{self.seconds():6.1f} s  {name:36} {by:24}  {reason}", flush=True)

    def measure(
        self,
        name: str,
        by: str,
        floor: float,
        make: Callable[[], Sequence[Call]],
        check: Check | None,
        clock: Callable[[Sequence[Call]], float] = graph_us,
    ) -> None:
        """Add a row: the time of the calls that `make` returns, if `check` accepts the first."""
        if not self.wants(name):
            return
        # Whatever a library raises is this row's result, and no reason to lose the other rows.
        try:
            calls = make()
            wrong = None if check is None else check(calls[0]())
            if wrong is not None:
                raise ArithmeticError(wrong)
            taken = clock(calls)
        except Exception as error:
            self.fail(name, by, error)
            return
        self.results.put({"row": name, "by": by, "us": taken, "floor_us": floor, "error": None})
        print(f"{self.seconds():6.1f} s  {name:36} {by:24} {taken:10.2f} us", flush=True)


# ---- checks -----------------------------------------------------------------------------------


def divisor_of(x: Tensor, fmt: Format) -> Tensor | None:
    return dynamic_global_scale_ref(x, fmt) if fmt.has_global_scale else None


def same_bits(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> str | None:
    """Return why packed codes and scales differ from the reference's."""
    differ = [(a != b).float().mean().item() for a, b in zip(found, wanted, strict=True)]
    return f"parts that differ from the reference {differ}" if any(differ) else None


def near(found: Tensor, wanted: Tensor) -> str | None:
    """Return why a product in bf16 is not the float64 one: one rounding, sums in float32."""
    error = (found.double() - wanted).abs()
    bound = wanted.abs() * 2.0**-7 + wanted.abs().max() * 2.0**-14
    worst = (error / bound).max().item()
    return None if worst <= 1 else f"{worst:.2f} of the bound"


def similar(found: Tensor, wanted: Tensor) -> str | None:
    """Return why a product with 4-bit weights is not the dense one."""
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    return None if error < 0.25 else f"a relative error of {error:.3f}"


# ---- cases ------------------------------------------------------------------------------------


def searches(bench: Bench) -> None:
    """Scale searches; the Hessian's with all its factorizations."""
    for full in SEARCH_SHAPES:
        names = [f"search/{o}/{f}/{full[0]}x{full[1]}" for o, f in SEARCHES]
        if not any(map(bench.wants, names)):
            continue
        rows, columns = bench.small(full)
        weight = weight_like((rows, columns))
        blocks = activations_like((min(4096, 8 * columns), columns)).float()
        blocks = blocks.view(len(blocks), -1, 32).transpose(0, 1)
        hessian = blocks.mT @ blocks
        for name, (objective, key) in zip(names, SEARCHES, strict=True):
            fmt = get_format(key)
            g = fmt.global_scale_for(weight.abs().amax().item())
            given = hessian if objective == "hessian" else None
            floor = weight.numel() * (2 + fmt.bits_per_weight(weight.shape) / 8) / BYTES_PER_US
            bench.measure(
                name,
                OURS,
                floor,
                lambda a=(weight, given, g, key, objective): [lambda: ops.search(*a)],
                lambda found, a=(weight, given, g, fmt, objective): optimal(found, *a),
                cold_us,
            )


def optimal(
    found: tuple[Tensor, Tensor],
    weight: Tensor,
    hessian: Tensor | None,
    g: float,
    fmt: Format,
    objective: str,
) -> str | None:
    """Return why some of the rows are not searched as the reference does, or as well."""
    rows = slice(None, None, max(1, len(weight) // 64))
    weight, found = weight[rows], (found[0][rows], found[1][rows])
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
    x = activations_like(shape)
    inputs = [x.clone() for _ in range(rotated(x.nbytes))]
    state = [
        torch.zeros(shape[1] // 32, 32, 32, device=x.device),
        torch.zeros(1, dtype=torch.int64, device=x.device),
        torch.zeros(1, device=x.device),
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
    theirs = [peers.torch_block_hessians(x) for x in inputs]
    bench.measure(name, "torch bmm bf16", floor, lambda: theirs, lambda found: check(found, 1e-2))


def activations(bench: Bench) -> None:
    """Activations to packed codes, alone and behind a norm."""
    shape, fmt = bench.small((8192, 4096)), get_format("nvfp4")
    x = activations_like(shape)
    inputs = [x.clone() for _ in range(rotated(x.nbytes))]
    some = slice(None, None, max(1, shape[0] // 256))
    divisor = divisor_of(x, fmt)
    floor = (x.nbytes + x.numel() * fmt.bits_per_weight(x.shape) / 8) / BYTES_PER_US
    wanted = quantize_ref(x[some], divisor, fmt)
    least = squared_error(*quantize_ref(x[some], divisor, fmt, "sse"), divisor, x[some], fmt)

    def equal(found: tuple[Tensor, Tensor]) -> str | None:
        return same_bits((found[0][some], found[1][some]), wanted)

    def nearly_least(found: tuple[Tensor, Tensor]) -> str | None:
        error = squared_error(found[0][some], found[1][some], divisor, x[some], fmt)
        return None if error <= 1.05 * least else f"{error / least:.3f} of the least error"

    def dynamic(x: Tensor, scales: str) -> tuple[Tensor, Tensor]:
        return ops.quantize(x, ops.dynamic_global_scale(x, "nvfp4"), "nvfp4", scales)

    for scales, check in (("naive", equal), ("sse", nearly_least)):
        end = "" if scales == "naive" else f"/{scales}"
        static = [lambda x=x, s=scales: ops.quantize(x, divisor, "nvfp4", s) for x in inputs]
        bench.measure(f"quantize/static/8192x4096{end}", OURS, floor, lambda s=static: s, check)
        found = [lambda x=x, s=scales: dynamic(x, s) for x in inputs]
        twice = floor + x.nbytes / BYTES_PER_US
        bench.measure(f"quantize/dynamic/8192x4096{end}", OURS, twice, lambda f=found: f, check)
    if "torchao" in peers.installed() and x.is_cuda:
        theirs = [peers.torchao_quantize(x) for x in inputs]
        bench.measure("quantize/static/8192x4096", "torchao nvfp4", floor, lambda: theirs, None)

    name = "rms_norm_quantize/8192x4096"
    gain = torch.rand(shape[1], device=x.device).add_(0.5).bfloat16()
    divisor = divisor_of(F.rms_norm(x, (shape[1],), gain, 1e-6), fmt)
    norm_wanted = norm_quantize_ref(x[some], None, gain, None, "rms", 1e-6, divisor, fmt)[1:]

    def few_flips(found: tuple[Tensor, Tensor]) -> str | None:
        # The sum of squares in another order moves a bf16 by an ulp now and then.
        parts = [(a[some] != b).float().mean() for a, b in zip(found[1:], norm_wanted, strict=True)]
        share = max(parts).item()
        return None if share <= 0.02 else f"{share:.3f} of the bytes differ from the reference's"

    given = (None, gain, None, "rms", 1e-6, divisor, "nvfp4")
    ours = [lambda x=x: ops.norm_quantize(x, *given) for x in inputs]
    bench.measure(name, OURS, floor, lambda: ours, few_flips)
    ours_sse = [lambda x=x: ops.norm_quantize(x, *given, "sse") for x in inputs]
    bench.measure(f"{name}/sse", OURS, floor, lambda: ours_sse, None)
    alone = [lambda x=x: F.rms_norm(x, (shape[1],), gain, 1e-6) for x in inputs]
    bench.measure(name, "torch, the norm alone", floor, lambda: alone, None)


def squared_error(packed: Tensor, scale: Tensor, divisor: Tensor, x: Tensor, fmt: Format) -> float:
    """Return the squared error of x [M, K] to what its codes and scale bits stand for."""
    dense = dequantize_ref(packed, scale, divisor, fmt, torch.float32)
    return (dense - x.float()).square().sum(dtype=torch.float64).item()


def dequantization(bench: Bench) -> None:
    """Packed codes back to bf16."""
    name, shape = "dequantize/4096x11008", bench.small((4096, 11008))
    if not bench.wants(name):
        return
    weight = weight_like(shape)
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
        self.nbytes = packed.nbytes + scale.nbytes
        copies = range(rotated(self.nbytes))
        self.copies = [(packed.clone(), scale.clone(), divisor) for _ in copies]
        self.dense = dequantize_ref(packed, scale, divisor, self.fmt, torch.float32)


def linear_floor(shape: tuple[int, int], tokens: int) -> float:
    """Return the time of the codes and scales of the weight, or of the products."""
    n, k = shape
    return max(n * k * 4.5 / 8 / BYTES_PER_US, 2 * tokens * n * k / FLOPS_PER_US)


def wanted_shapes(bench: Bench, kinds: Sequence[str]) -> Iterator[tuple[tuple[int, int], str]]:
    for shape in bench.args.shapes:
        size = f"{shape[0]}x{shape[1]}"
        if any(bench.wants(f"{kind}/{size}/M={m}") for kind in kinds for m in bench.args.tokens):
            yield shape, size


def inputs_for(columns: int, rows: Sequence[int]) -> Iterator[tuple[int, Tensor, slice]]:
    """Yield the input of every M, and which of its rows are compared."""
    x = activations_like((max(8192, *rows), columns))
    for tokens in rows:
        yield tokens, x[:tokens].clone(), slice(None, None, max(1, tokens // 64))


def linears(bench: Bench) -> None:
    """W4A16 and W4A4, the same by dequantizing first, and cuBLAS on the bf16 weight."""
    for full, size in wanted_shapes(bench, ("w4a16", "w4a4", "fp8")):
        shape = bench.small(full)
        weight = weight_like(shape)
        stored = Stored(weight, "nvfp4")
        fmt, copies = stored.fmt, stored.copies
        dense = peers.cublas(weight, rotated(weight.nbytes))
        exact = stored.dense.double().T
        for tokens, x, some in inputs_for(shape[1], bench.args.tokens):
            fused = [lambda c=c, x=x: ops.linear(x, *c, None, "nvfp4") for c in copies]
            forced = [
                lambda c=c, x=x: F.linear(x, ops.dequantize(*c, "nvfp4", x.dtype)) for c in copies
            ]
            rows: list[tuple[str, str, list[Call], Tensor]] = [
                ("w4a16", OURS, fused, x[some].double() @ exact),
                ("w4a16", DENSE, forced, x[some].double() @ exact),
                ("w4a16", CUBLAS, [lambda f=f, x=x: f(x) for f in dense], dot(x[some], weight)),
            ]
            if uses_fp8("fp8", tokens):
                fast = [lambda c=c, x=x: ops.linear(x, *c, None, "nvfp4", "fp8") for c in copies]
                rows.append(("fp8", OURS, fast, x[some].double() @ exact))
            if tokens in QUANTIZED_TOKENS or tokens not in TOKENS:
                divisor = divisor_of(x, fmt)
                rounded = dequantize_ref(
                    *quantize_ref(x[some], divisor, fmt), divisor, fmt, torch.float32
                )

                def quantized(c: Any, x: Tensor = x, divisor: Any = divisor) -> Tensor:
                    codes = ops.quantize(x, divisor, "nvfp4")
                    return ops.linear_quantized(x, *codes, divisor, *c, None, "nvfp4")

                calls = [lambda c=c, f=quantized: f(c) for c in copies]
                rows.append(("w4a4", OURS, calls, rounded.double() @ exact))
            for kind, by, calls, wanted in rows:
                bench.measure(
                    f"{kind}/{size}/M={tokens}",
                    by,
                    linear_floor(full, tokens),
                    lambda calls=calls: calls,
                    lambda y, wanted=wanted, s=some, c=similar if kind == "fp8" else near: c(
                        y[s], wanted
                    ),
                )


def dot(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


def peer_linears(bench: Bench) -> None:
    """Other libraries' 4-bit linears, until --peer-seconds are over."""
    there, begin = peers.installed(), bench.seconds()
    for by, (make, largest) in peers.LINEARS.items():
        if by.split()[0] not in there:
            continue
        for full, size in wanted_shapes(bench, ("w4a16",)):
            weight = weight_like(bench.small(full))
            made: list[peers.Linear] = []

            def calls(
                x: Tensor, weight: Tensor = weight, made: Any = made, make: Any = make
            ) -> list[Call]:
                # Made once, inside a row, so that a library that fails only loses its rows.
                if not made:
                    made.extend(make(weight, rotated(weight.numel() // 2)))
                return [lambda f=f: f(x) for f in made]

            for tokens, x, some in inputs_for(weight.shape[1], bench.args.tokens):
                if tokens > largest:
                    continue
                name = f"w4a16/{size}/M={tokens}"
                if bench.seconds() - begin > bench.args.peer_seconds:
                    if bench.wants(name):
                        spent = f"{bench.args.peer_seconds:.0f} s for other libraries are over"
                        bench.fail(name, by, TimeoutError(spent))
                    continue
                bench.measure(
                    name,
                    by,
                    linear_floor(full, tokens),
                    lambda x=x, calls=calls: calls(x),
                    lambda y, x=x, s=some, w=weight: similar(y[s], dot(x[s], w)),
                )


# ---- the page ---------------------------------------------------------------------------------


def index_rows(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Return rows by their name, then by whose they are."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["row"], {})[row["by"]] = row
    return found


def us(row: Row | None) -> float | None:
    return None if row is None else row["us"]


def best_peer(rows: dict[str, Row]) -> Row | None:
    """Return the fastest that is neither ours nor a product with the bf16 weight."""
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
            times = {
                "floor": linear_floor((n, k), m),
                CUBLAS: us(w4a16.get(CUBLAS)),
                "fp4pass W4A16": us(w4a16.get(OURS)),
                "fp4pass W4A4": us(found.get(f"w4a4/{n}x{k}/M={m}", {}).get(OURS)),
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


# Columns of the tables of linears: the title, the kind of row, and whose it is.
COLUMNS = (
    ("W4A16", "w4a16", OURS),
    ("W4A4", "w4a4", OURS),
    ('`compute="fp8"`', "fp8", OURS),
    (CUBLAS, "w4a16", CUBLAS),
)


def page(results: Row) -> str:
    """Return the tables of a file, in microseconds."""
    found = index_rows(results["rows"])
    cells = []
    for name, rows in found.items():
        if OURS in rows and "M=" not in name:
            floor, best = number(rows[OURS].get("floor_us")), named(best_peer(rows))
            cells.append([name.replace("/", " "), floor, timed(rows[OURS]), best])
    header = ["kernel, us", "floor", "fp4pass", "best of the others"]
    lines = [*origin(results), *([table(header, cells, left=1)] if cells else [])]
    sizes = [name.split("/")[1:] for name in found if "/M=" in name]
    measured = {int(rows.removeprefix("M=")) for _, rows in sizes}
    for n, k in map(shape_of, dict.fromkeys(size for size, _ in sizes)):
        cells = []
        for m in sorted({*SHOWN_TOKENS, *measured.difference(TOKENS)} & measured):
            rows = {kind: found.get(f"{kind}/{n}x{k}/M={m}", {}) for _, kind, _ in COLUMNS}
            times = [timed(rows[kind].get(by, {})) for _, kind, by in COLUMNS]
            floor, best = number(linear_floor((n, k), m)), named(best_peer(rows["w4a16"]))
            cells.append([str(m), floor, *times, best])
        titles = [title for title, _, _ in COLUMNS]
        header = [f"{n} x {k}, M", "floor", *titles, "best other 4-bit"]
        kept = [i for i in range(len(header)) if any(line[i] for line in cells)]
        shown = [[line[i] for i in kept] for line in cells]
        lines.append(table([header[i] for i in kept], shown, left=0))
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in results["rows"]:
        if row["error"]:
            reasons.setdefault((row["by"], row["error"]), []).append(row["row"])
    lines += ["Rows without a time:", ""] if reasons else []
    for (by, error), names in reasons.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        lines.append(f"- {by}, {', '.join(names[:2])}{more}: `{error.replace('`', '')}`")
    return "\n".join(lines) + "\n"


def timed(row: Row) -> str:
    return "failed" if row.get("error") else number(row.get("us"))


def named(row: Row | None) -> str:
    return "" if row is None else f"{number(row['us'])} {row['by']}"


if __name__ == "__main__":
    main()
