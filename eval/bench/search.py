"""The scale search on a CPU: seconds for all linears of a model, and memory for one weight.

    python -m eval.bench.search [--model DIR] [--threads N] [--json FILE]

Time: the best of `--repeats` passes over all linears, one after the other, of each method, with the
Hessians of `--tokens` tokens of `--text`.

Memory: what the search of one weight adds to the memory of a process that holds the weight and
the Hessian, results included. Each figure comes from a process of its own, after a small search
that starts threads and libraries: the high-water mark of its resident set, which Linux keeps and
resets on request (/proc/self/clear_refs), less the resident set before.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

import fp4pass
from eval.bench.harness import parser_for
from eval.record import Results, Row, facts
from fp4pass.core.formats import FORMATS, get_format
from fp4pass.kernels.statistics.naive import weight_amax
from fp4pass.methods import METHODS, Stats

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny_lm"
LARGE = (16384, 4096)

Layer = tuple[torch.Tensor, Stats]


def main() -> None:
    parser = parser_for(__doc__, "search-cpu.json")
    parser.add_argument("--model", type=Path, default=TINY, help="a transformers model directory")
    parser.add_argument("--text", type=Path, default=TINY / "calib.txt", help="calibration text")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak:
        rows, columns, fmt, method = args.peak
        print(peak_bytes(int(rows), int(columns), fmt, method))
        return
    layers = load_layers(args)
    shapes = sorted({tuple(weight.shape) for weight, _ in layers}, key=math.prod)
    about: Row = {**facts("cpu"), "model": args.model.name, "linears": len(layers)}
    about |= {"weights": sum(weight.numel() for weight, _ in layers)}
    results = Results(args.json[0], about, again=True)
    cases = [(name, method) for name in FORMATS for method in METHODS]
    for name, method in cases:
        taken = best_seconds(layers, name, method, args.repeats)
        results.put({"format": name, "method": method, "seconds": taken})
        print(results.rows[-1], flush=True)
    for shape in (shapes[-1], LARGE):
        for name, method in cases:
            found = measure_peak(shape, name, method, args.threads)
            results.put({"shape": shape, "format": name, "method": method, "bytes": found})
            print(results.rows[-1], flush=True)


def load_layers(args: argparse.Namespace) -> list[Layer]:
    """Return the weight and the statistics of every linear that fp4pass would convert."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fp4pass.quantization.plan import plan_layers, with_statistics

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    # A few bytes to a token are enough for the tokens wanted.
    text = args.text.read_text()[: 16 * args.tokens]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.tokens]
    fp4pass.calibrate(fp4pass.prepare(model), [{"input_ids": ids}], progress=False)
    plan = with_statistics(plan_layers(model, fp4pass.LinearConfig()))
    return [(layer.module.weight.detach(), layer.stats) for layer in plan.layers]


def search(weight: torch.Tensor, stats: Stats, name: str, method: str) -> None:
    fmt, chosen = get_format(name), METHODS[method]
    global_scale = fmt.global_scale_for(weight_amax(weight))
    chosen.function(weight, stats, fmt, global_scale, chosen.options())


def best_seconds(layers: list[Layer], name: str, method: str, repeats: int) -> float:
    """Return the seconds of the quickest of some passes over all layers."""
    passes = []
    for _ in range(repeats):
        start = time.perf_counter()
        for weight, stats in layers:
            search(weight, stats, name, method)
        passes.append(time.perf_counter() - start)
    return min(passes)


def measure_peak(shape: tuple[int, ...], name: str, method: str, threads: int) -> int:
    """Return `peak_bytes` in a process of its own."""
    arguments = ["--threads", threads, "--peak", *shape, name, method]
    words = [sys.executable, "-m", "eval.bench.search", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


def peak_bytes(rows: int, columns: int, name: str, method: str) -> int:
    """Return the bytes that searching one weight of this shape adds to this process."""
    generator = torch.Generator().manual_seed(0)

    def stats(columns: int) -> Stats:
        # The Hessians of correlated random inputs.
        x = torch.randn(math.ceil(columns / 32), 32, 64, generator=generator)
        return Stats(x @ x.mT, 64, float(x.abs().max()))

    search(torch.randn(64, 64, generator=generator), stats(64), name, method)
    weight, given = torch.randn(rows, columns, generator=generator) * 0.02, stats(columns)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    search(weight, given, name, method)
    return status_bytes("VmHWM") - before


def status_bytes(key: str) -> int:
    """Return a size from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}; memory is measured on Linux only.")


if __name__ == "__main__":
    main()
