"""How long the CPU scale search takes for all linears of a model, and how much memory.

    python -m eval.bench.search [--model DIR] [--threads N] [--json FILE]

Time: the best of `--repeats` passes over all linears, one after the other, of each method.
Hessians are those of `--tokens` tokens of `--text`, or of random inputs (`--random-hessian`).

Memory: what the search of one weight adds to the memory of a process that holds the weight and
the Hessian, results included. Each figure comes from a process of its own, after a small search
that starts threads and libraries: the high-water mark of its resident set, which Linux keeps and
resets on request (/proc/self/clear_refs), less the resident set before.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from fp4pass import __version__
from fp4pass.core.formats import FORMATS, get_format
from fp4pass.methods import METHODS, Stats
from fp4pass.ops.checks import weight_amax

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "tiny_lm"
LARGE = (16384, 4096)

Layer = tuple[str, torch.Tensor, Stats]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=TINY, help="a transformers model directory")
    parser.add_argument("--text", type=Path, default=TINY / "calib.txt", help="calibration text")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--random-hessian", action="store_true", help="do not run the model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        rows, columns, fmt, method = options.peak
        print(peak_bytes(int(rows), int(columns), fmt, method))
        return

    layers = load_layers(options)
    shapes = sorted({tuple(weight.shape) for _, weight, _ in layers}, key=math.prod)
    results = {
        "command": " ".join(["python", "eval/bench/search.py", *sys.argv[1:]]),
        "machine": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0))},
        "threads": options.threads,
        "versions": {
            "fp4pass": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "model": options.model.name,
        "linears": len(layers),
        "weights": sum(weight.numel() for _, weight, _ in layers),
        "shapes": shapes,
        "hessians": "random" if options.random_hessian else f"{options.tokens} tokens of text",
        "seconds": [],
        "peak": [],
    }
    print(f"{results['model']}: {len(layers)} linears, {results['weights']:,} weights")
    print(f"{results['machine']['cpu']}, {options.threads} threads, torch {torch.__version__}\n")
    print("format  method   seconds  M weights/s")
    for name in FORMATS:
        for method in METHODS:
            seconds = best_seconds(layers, name, method, options.repeats)
            results["seconds"].append({"format": name, "method": method, "seconds": seconds})
            speed = results["weights"] / seconds / 1e6
            print(f"{name:7} {method:8} {seconds:7.3f}  {speed:11.1f}")
    del layers
    print("\nlayer          format  method   peak MB beyond weight and Hessian")
    for shape in (shapes[-1], LARGE):
        for name in FORMATS:
            for method in METHODS:
                peak = measure_peak(shape, name, method, options.threads)
                found = {"shape": shape, "format": name, "method": method, "bytes": peak}
                results["peak"].append(found)
                size = f"{shape[0]} x {shape[1]}"
                print(f"{size:14} {name:7} {method:8} {peak / 1e6:7.1f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def load_layers(options: argparse.Namespace) -> list[Layer]:
    """The name, the weight and the statistics of every linear that fp4pass would convert."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import fp4pass
    from fp4pass.quantization.plan import plan_layers, with_statistics

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    if not options.random_hessian:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        # A few bytes to a token are enough for the tokens wanted.
        text = options.text.read_text()[: 16 * options.tokens]
        ids = tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens]
        fp4pass.prepare(model)
        fp4pass.calibrate(model, [{"input_ids": ids}], progress=False)
    plan = with_statistics(plan_layers(model, fp4pass.LinearConfig()))
    return [
        (
            layer.name,
            layer.module.weight.detach(),
            random_stats(layer.columns, options.tokens) if options.random_hessian else layer.stats,
        )
        for layer in plan.layers
    ]


def random_stats(columns: int, tokens: int) -> Stats:
    """The Hessians of correlated random inputs."""
    generator = torch.Generator().manual_seed(0)
    groups = math.ceil(columns / 32)
    x = torch.randn(groups, 32, tokens, generator=generator)
    x = x + torch.randn(groups, 1, tokens, generator=generator)
    return Stats(x @ x.mT, tokens, float(x.abs().max()))


def search(weight: torch.Tensor, stats: Stats, name: str, method: str) -> None:
    fmt, chosen = get_format(name), METHODS[method]
    global_scale = fmt.global_scale_for(weight_amax(weight))
    chosen.function(weight, stats, fmt, global_scale, chosen.options())


def best_seconds(layers: list[Layer], name: str, method: str, repeats: int) -> float:
    """The quickest of some passes over all layers."""
    passes = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _, weight, stats in layers:
            search(weight, stats, name, method)
        passes.append(time.perf_counter() - start)
    return min(passes)


def measure_peak(shape: tuple[int, ...], name: str, method: str, threads: int) -> int:
    """`peak_bytes` in a process of its own."""
    arguments = ["--threads", threads, "--peak", *shape, name, method]
    command = [sys.executable, "-m", "eval.bench.search", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


def peak_bytes(rows: int, columns: int, name: str, method: str) -> int:
    """What searching one weight of this shape adds to this process, in bytes."""
    generator = torch.Generator().manual_seed(0)
    search(torch.randn(64, 64, generator=generator), random_stats(64, 64), name, method)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    stats = random_stats(columns, 64)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    search(weight, stats, name, method)
    return status_bytes("VmHWM") - before


def status_bytes(key: str) -> int:
    """A size from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}; memory is measured on Linux only.")


def cpu_name() -> str:
    """The model of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
