"""How long observing and converting a whole model take, and how much memory converting adds.

    python -m eval.bench.convert [--json FILE] [--profile N] [--tiny]
    python -m eval.bench.convert --table docs/performance.md

The model is shaped as Qwen3-4B, built from its config with heavy-tailed random weights in bf16.

Observing: calibration batches through the prepared model, against the same batches through the
model as it was; the medians of alternating repeats. Converting: wall time of `fp4pass.convert`,
waiting for the GPU, each on a model of its own, after converting a model of one such layer. Memory:
the most that convert had allocated beyond what was allocated before, beside the largest weight.
--profile prints the functions in which the host spent most of observing and of each conversion, in
passes of their own.
--table reads the JSON file and measures nothing; --tiny is a rehearsal that also runs on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import gc
import json
import platform
import pstats
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

import fp4pass
from eval.pages.tables import origin, write_between

QWEN3_4B: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
TINY = QWEN3_4B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}

SETTINGS = [(method, only) for method in ("sse", "hessian") for only in (True, False)]


def main() -> None:
    args = parse_args()
    if args.table:
        result = json.loads(args.json.read_text())
        write_between(args.table, "eval/bench/convert.py", table(result))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = TINY if args.tiny else QWEN3_4B
    batches = make_batches(config, device, *((2, 2, 32) if args.tiny else (4, 4, 1024)))

    layer = build(config | {"num_hidden_layers": 1}, device)
    for method, weight_only in SETTINGS:
        converter(calibrated(layer, batches), method, weight_only)()
    del layer

    model = build(config, device)
    observing = observe_seconds(model, batches, args.repeats)
    if args.profile:
        again = fp4pass.prepare(copy.deepcopy(model), "hessian")
        print_profile(lambda: fp4pass.calibrate(again, batches, progress=False), args.profile)
        del again
    print("  ".join(f"{key} {value}" for key, value in observing.items()), flush=True)
    rows = []
    for method, weight_only in SETTINGS:
        row = {"method": method, "weight_only": weight_only}
        row |= convert_cost(calibrated(model, batches), method, weight_only)
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if args.profile:
            again = calibrated(model, batches)
            print_profile(converter(again, method, weight_only), args.profile)
    result = {
        "command": shlex.join(["python", "eval/bench/convert.py", *sys.argv[1:]]),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
            "fp4pass": fp4pass.__version__,
        },
        "config": config,
        "tokens": [len(batches), *batches[0].shape],
        "observing": observing,
        "converting": rows,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=2) + "\n")


def build(config: dict[str, Any], device: torch.device) -> nn.Module:
    """A model of the config in bf16; its matrices are Student's t with 5 degrees of freedom."""
    generator = torch.Generator(device).manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**config), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(heavy_tailed(parameter, generator))
    return model.eval()


def heavy_tailed(like: Tensor, generator: torch.Generator) -> Tensor:
    def normal() -> Tensor:
        return torch.randn(like.shape, generator=generator, device=like.device)

    chi2 = normal().square_()
    for _ in range(4):
        chi2 += normal().square_()
    return normal().mul_(0.02).mul_(chi2.div_(5).rsqrt_())


def make_batches(
    config: dict[str, Any], device: torch.device, count: int, rows: int, length: int
) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    shape = (rows, length)
    top = config["vocab_size"]
    return [torch.randint(top, shape, generator=generator, device=device) for _ in range(count)]


def calibrated(model: nn.Module, batches: list[Tensor]) -> nn.Module:
    """A copy of the model that has seen one batch."""
    prepared = fp4pass.prepare(copy.deepcopy(model), "hessian")
    return fp4pass.calibrate(prepared, batches[:1], progress=False)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(function: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def observe_seconds(plain: nn.Module, batches: list[Tensor], repeats: int) -> dict[str, float]:
    """The time of the batches through a model without observers and with them."""
    observed = calibrated(plain, batches)

    def run(model: nn.Module) -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch, use_cache=False)

    run(plain)
    times: dict[str, list[float]] = {"plain": [], "observed": []}
    for _ in range(repeats):
        times["plain"].append(seconds(lambda: run(plain)))
        times["observed"].append(seconds(lambda: run(observed)))
    medians = {name: statistics.median(values) for name, values in times.items()}
    overhead = 100 * (medians["observed"] / medians["plain"] - 1)
    found = {f"{name}_seconds": round(value, 4) for name, value in medians.items()}
    return found | {"overhead_percent": round(overhead, 2)}


def converter(model: nn.Module, method: str, weight_only: bool) -> Callable[[], object]:
    return lambda: fp4pass.convert(model, "nvfp4", method, weight_only=weight_only)


def convert_cost(model: nn.Module, method: str, weight_only: bool) -> dict[str, float]:
    """The wall time of converting a calibrated model, and the memory it takes meanwhile."""
    linears = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    largest = max(m.weight.nbytes for m in linears)
    found: dict[str, float] = {"linears": len(linears), "largest_weight_bytes": largest}
    gc.collect()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    found["seconds"] = round(seconds(converter(model, method, weight_only)), 4)
    if gpu:
        found["extra_bytes"] = torch.cuda.max_memory_allocated() - before
    return found


def print_profile(function: Callable[[], object], count: int) -> None:
    """The functions in which the host spends most of a call."""
    profiler = cProfile.Profile()
    profiler.runcall(function)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(count)


def table(result: dict[str, Any]) -> str:
    observing = result["observing"]
    count, rows, length = result["tokens"]
    lines = [
        *origin(result),
        f"{count} batches of {rows} x {length} tokens take {observing['plain_seconds']:.3f} s, and "
        f"{observing['observed_seconds']:.3f} s with observers: "
        f"{observing['overhead_percent']:+.1f} %.",
        "",
        "| convert | seconds | most extra memory, MB | largest weight, MB |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in result["converting"]:
        kind = f"{row['method']}, {'W4A16' if row['weight_only'] else 'W4A4'}"
        extra = f"{row['extra_bytes'] / 1e6:.1f}" if "extra_bytes" in row else ""
        largest = f"{row['largest_weight_bytes'] / 1e6:.1f}"
        lines.append(f"| {kind} | {row['seconds']:.3f} | {extra} | {largest} |")
    return "\n".join(lines) + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = Path(__file__).resolve().parents[1] / "results"
    parser.add_argument("--json", type=Path, default=results / "convert-h200.json")
    parser.add_argument("--repeats", type=int, default=5, help="of all batches, when observing")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="print N functions")
    parser.add_argument("--table", type=Path, help="rewrite the table of this page")
    parser.add_argument("--tiny", action="store_true", help="a small model; any device")
    return parser.parse_args()


if __name__ == "__main__":
    main()
