"""How fast packed linears and converted language models run on a CPU, and what they hold.

    python -m eval.bench.cpu --model examples/tiny_lm --model FOLDER [--json FILE]
    python -m eval.bench.cpu --table docs/performance.md

Times are medians of alternating repeats: the original, the converted model and its compiled code
run in turn, so that what else the machine does falls on all. Products are measured alone first
(cpu_products.py), beside those of llama.cpp's library where libggml-python is installed. Memory:
the bytes of parameters and buffers before the first forward and after the last, and the most that
tensors took at once during a forward beyond them, from the profiler.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import operator
import os
import platform
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ggml_products
import torch
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

import fp4pass
from eval.bench import cpu_products
from eval.pages.tables import origin, write_between

SHAPES = ((1, 1), (1, 128), (8, 512))
SETTINGS = [(fmt, only) for fmt in ("nvfp4", "mxfp4") for only in (True, False)]
RESULTS = Path(__file__).resolve().parents[1] / "results" / "compiled-speed-cpu.json"


def main() -> None:
    args = parse_args()
    if args.table:
        write_between(args.table, "eval/bench/cpu.py", table(json.loads(args.json.read_text())))
        return
    if not args.model:
        raise SystemExit("Give --model FOLDER, or --table PAGE.")
    torch.set_num_threads(args.threads)
    transformers.logging.disable_progress_bar()
    products = []
    for row in cpu_products.measure(args.repeats):
        products.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    rows = []
    for folder, dtype in itertools.product(args.model, (torch.bfloat16, torch.float32)):
        original = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for fmt, weight_only in SETTINGS:
            for row in measure(original, fmt, weight_only, args.repeats):
                row = {"model": Path(folder).name, "dtype": str(dtype)[6:]} | row
                rows.append(row)
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv]
    result = {
        "command": shlex.join(["python", *words]),
        "machine": f"{args.threads} thread(s) of {cpu_name()}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "fp4pass": fp4pass.__version__,
            "ggml": ggml_products.version(),
        },
        "products": products,
        "rows": rows,
    }
    args.json.write_text(json.dumps(result, indent=2) + "\n")


@torch.no_grad()
def measure(original: nn.Module, fmt: str, weight_only: bool, repeats: int) -> list[dict[str, Any]]:
    """A row for each shape."""
    model = fp4pass.convert(copy.deepcopy(original), fmt, "naive", weight_only=weight_only)
    held = storage_bytes(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    kinds = {"original": original, "eager": model, "compiled": compiled}
    rows = []
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(2, original.config.vocab_size, shape, generator=generator)
        row: dict[str, Any] = {"format": fmt, "inputs": "float" if weight_only else "4 bit"}
        row |= {"shape": list(shape)}
        # Short forwards suffer most from what else the machine does.
        row |= medians(kinds, ids, repeats if shape == SHAPES[-1] else 8 * repeats)
        row["original_extra_bytes"] = extra_bytes(original, ids)
        row["eager_extra_bytes"] = extra_bytes(model, ids)
        rows.append(row)
    after = storage_bytes(model)
    sizes = {"original_bytes": storage_bytes(original), "bytes": held, "bytes_after": after}
    return [row | sizes for row in rows]


def run(model: Callable[..., Any], ids: Tensor) -> None:
    model(ids, use_cache=False)


def medians(kinds: dict[str, Any], ids: Tensor, repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for repeat in range(repeats + 2):
        for name, model in kinds.items():
            start = time.perf_counter()
            run(model, ids)
            if repeat >= 2:
                times[name].append(time.perf_counter() - start)
    return {f"{name}_ms": round(1e3 * statistics.median(t), 2) for name, t in times.items()}


def storage_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; those that share a storage count once."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def extra_bytes(model: nn.Module, ids: Tensor) -> int:
    """The most bytes of tensors at once during a forward, beyond those that were there before."""
    with warnings.catch_warnings():
        # It announces that it is not warmed up.
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            run(model, ids)
    changes = [event for event in found.profiler.kineto_results.events() if event.nbytes()]
    changes.sort(key=lambda event: event.start_ns())
    totals = itertools.accumulate(event.nbytes() for event in changes)
    return max(totals, default=0)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def table(result: dict[str, Any]) -> str:
    lines = [
        *origin(result),
        cpu_products.table(result["products"]),
        "Milliseconds of a forward. The faster original is that of the two dtypes. Weights are all",
        "parameters and buffers, after the forwards; extra is the most that an eager forward takes",
        "beyond them. In brackets: the original's. Compare times within a row: other work on the",
        "machine, which slows some rows by two, slows all of a row.",
        "",
        "| model | format | inputs | dtype | tokens | original | eager | compiled | compiled of "
        "eager | eager of the faster original | weights, MB | extra, MB |",
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    setting = operator.itemgetter("model", "format", "inputs")
    fastest: dict[Any, float] = {}
    for row in result["rows"]:
        key = (*setting(row), *row["shape"])
        fastest[key] = min(fastest.get(key, row["original_ms"]), row["original_ms"])
    for row in result["rows"]:
        best = fastest[(*setting(row), *row["shape"])]
        cells = [
            *(row["model"], row["format"], row["inputs"], row["dtype"]),
            " x ".join(map(str, row["shape"])),
            *(f"{row[name]:.4g}" for name in ("original_ms", "eager_ms", "compiled_ms")),
            f"{row['compiled_ms'] / row['eager_ms']:.2f}",
            f"{row['eager_ms'] / best:.2f}",
            f"{row['bytes_after'] / 1e6:.1f} ({row['original_bytes'] / 1e6:.1f})",
            f"{row['eager_extra_bytes'] / 1e6:.2f} ({row['original_extra_bytes'] / 1e6:.2f})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", help="folder of a causal LM; may be repeated")
    parser.add_argument("--repeats", type=int, default=7, help="of the largest forward")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, help="rewrite the table of this page")
    return parser.parse_args()


if __name__ == "__main__":
    main()
