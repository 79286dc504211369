"""A whole mixture of experts on one GPU: how long converting takes, its memory, and how it decodes.

    python -m eval.bench.mixture [--json FILE] [--tiny]
    python -m eval.bench.mixture --table docs/moe.md

The model is shaped as Qwen3-30B-A3B, with heavy-tailed random weights in bf16, weights only in
NVFP4. In one process: decoding in bf16 with transformers' compiled `batched_mm`; calibration on
64 x 2048 random tokens and converting by `hessian`; decoding again; then a fresh model converted by
`sse`. Decoding is that of eval/bench/generate.py, batch 1. Peak: the most memory that converting
allocates, the model included.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

import fp4pass
from eval.bench.generate import RATE, decode
from eval.bench.harness import (
    QWEN3_30B_A3B,
    TINY,
    parser_for,
    random_model,
    seconds,
    token_batches,
    weight_bytes,
    write_table,
)
from eval.pages.tables import origin, table
from eval.record import Results, Row, facts

SMALL = TINY | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}

# Tokens in and out of a generation; batches of calibration, and tokens in each.
PROMPT, NEW, CALIBRATION = 64, 128, (64, 2048)


def main() -> None:
    args = parser_for(__doc__, "mixture-h200.json").parse_args()
    if write_table(args, "eval/bench/mixture.py", page):
        return
    config = QWEN3_30B_A3B | (SMALL if args.tiny else {})
    prompt, new, (count, length) = (8, 8, (2, 32)) if args.tiny else (PROMPT, NEW, CALIBRATION)
    tokens = {"in": prompt, "out": new, "calibration": [count, length]}
    results = Results(args.json[0], {**facts(), "config": config, "tokens": tokens}, again=True)
    vocabulary = config["vocab_size"]

    def note(by: str, **found: Any) -> None:
        results.put({"by": by, **found})
        print(results.rows[-1], flush=True)

    # The kernels compile for a layer before the clock runs.
    for method, batches in (("hessian", token_batches(vocabulary, 1, 1, length)), ("sse", [])):
        run(random_model("qwen3_moe", config | {"num_hidden_layers": 1}), batches, method)
    model = random_model("qwen3_moe", config)
    model.set_experts_implementation("batched_mm")
    note("bf16", weight_bytes=weight_bytes(model), **decoding(model, prompt, new))
    model.set_experts_implementation("grouped_mm")
    found = run(model, token_batches(vocabulary, count, 1, length), "hessian")
    note("hessian", **found, weight_bytes=weight_bytes(model), **decoding(model, prompt, new))
    del model
    gc.collect()
    note("sse", **run(random_model("qwen3_moe", config), [], "sse"))


def run(model: Any, batches: list[Tensor], method: str) -> Row:
    """Return the seconds of calibrating and of converting, and the most memory of converting."""
    found: Row = {}
    if batches:
        fp4pass.prepare(model, method, weight_only=True)
        found["calibrate_seconds"] = seconds(
            lambda: fp4pass.calibrate(model, batches, progress=False)
        )
    gc.collect()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    found["convert_seconds"] = seconds(
        lambda: fp4pass.convert(model, "nvfp4a16", method, progress=False)
    )
    return found | ({"peak_bytes": torch.cuda.max_memory_allocated()} if gpu else {})


def decoding(model: Any, prompt: int, new: int) -> Row:
    with torch.no_grad():
        rate = decode(model, prompt, new, 3)
    # The memory of its CUDA graphs is not that of converting.
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {RATE: rate}


def page(result: Row) -> str:
    """Return the table of the page."""
    tokens, base, cells = result["tokens"], result["rows"][0], []
    for row in result["rows"]:
        rate = f"{row[RATE]:.0f} ({row[RATE] / base[RATE]:.2f} x)" if RATE in row else ""
        times = [f"{row[k]:.1f}" if k in row else "" for k in ("calibrate_seconds",)]
        times.append(f"{row['convert_seconds']:.1f}" if "convert_seconds" in row else "")
        sizes = [f"{row[k] / 1e9:.1f}" if k in row else "" for k in ("peak_bytes", "weight_bytes")]
        by = "bf16" if row is base else f"NVFP4, `{row['by']}`"
        cells.append([by, *times, *sizes, rate])
    header = ["weights", "calibrate, s", "convert, s", "peak of convert, GB", "weights, GB"]
    count, length = tokens["calibration"]
    lines = [
        *origin(result),
        f"Calibrated on {count} x {length} tokens. Decode: {tokens['in']} tokens in, "
        f"{tokens['out']} out, batch 1, one CUDA graph a step; bf16 with `batched_mm`.",
        "",
        table([*header, "tokens/s"], cells, left=1),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
