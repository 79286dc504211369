"""A whole mixture of experts on one GPU: how long converting takes, its memory, and how it decodes.

    python -m eval.bench.mixture [--json FILE] [--tiny]
    python -m eval.bench.mixture --table docs/moe.md

The model is shaped as Qwen3-30B-A3B, built from its config with heavy-tailed random weights in
bf16, weights only in NVFP4. In one process: decoding in bf16 with transformers' compiled
`batched_mm`; calibration on 64 x 2048 random tokens and converting by `hessian`; decoding again;
then a fresh model converted by `sse`. Decoding is that of bench_generate.py, batch 1. Peak: the
most memory allocated during a call. --table reads the JSON file and measures nothing; --tiny is a
rehearsal that also runs on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
import triton
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import fp4pass
from eval.bench.convert import heavy_tailed, make_batches, seconds
from eval.bench.generate import decode, weight_bytes
from eval.pages.tables import origin, write_between
from eval.quality.measuring import command, machine

QWEN3_30B_A3B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
TINY = QWEN3_30B_A3B | {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}

# Tokens in and out of a generation; batches of calibration, and tokens in each.
PROMPT, NEW, CALIBRATION = 64, 128, (64, 2048)


def main() -> None:
    args = parse_args()
    if args.table:
        write_between(args.table, "eval/bench/mixture.py", table(json.loads(args.json.read_text())))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = TINY if args.tiny else QWEN3_30B_A3B
    prompt, new, (count, length) = (8, 8, (2, 32)) if args.tiny else (PROMPT, NEW, CALIBRATION)
    about = machine(device.type)
    about["versions"] |= {"triton": triton.__version__}
    result: dict[str, Any] = {
        "command": command(None),
        "machine": about["device"],
        "versions": about["versions"],
        "config": config,
        "tokens": {"in": prompt, "out": new, "calibration": [count, length]},
        "rows": [],
    }

    begin = time.perf_counter()

    def note(by: str, **found: Any) -> None:
        """Add what was found to the row of a kind of weights."""
        if not result["rows"] or result["rows"][-1]["by"] != by:
            result["rows"].append({"by": by})
        result["rows"][-1].update(found)
        told = "  ".join(f"{key} {value}" for key, value in found.items())
        print(f"{time.perf_counter() - begin:6.0f} s  {by}  {told}", flush=True)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")

    # The kernels compile for a layer before the clock runs.
    first = build(config | {"num_hidden_layers": 1}, device)
    run(first, make_batches(config, device, 1, 1, length), "hessian")
    run(build(config | {"num_hidden_layers": 1}, device), [], "sse")
    del first

    model = build(config, device)
    model.set_experts_implementation("batched_mm")
    note("bf16", weight_bytes=weight_bytes(model)["weight_bytes"])
    note("bf16", **decoding(model, prompt, new))
    model.set_experts_implementation("grouped_mm")
    note("hessian", **run(model, make_batches(config, device, count, 1, length), "hessian"))
    note("hessian", weight_bytes=weight_bytes(model)["weight_bytes"])
    note("hessian", **decoding(model, prompt, new))
    del model
    gc.collect()
    note("sse", **run(build(config, device), [], "sse"))


def build(config: dict[str, Any], device: torch.device) -> Any:
    """A model of the config in bf16, one parameter after the other."""
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**config), dtype=torch.bfloat16)
    rotary = empty.model.rotary_emb
    model = empty.to_empty(device=device)
    # Tables that are computed, not stored.
    model.model.rotary_emb = type(rotary)(config=model.config).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            for part in [parameter] if parameter.ndim < 3 else parameter:
                if part.ndim == 2:
                    part.copy_(heavy_tailed(part, generator))
    return model.eval()


def run(model: nn.Module, batches: list[torch.Tensor], method: str) -> dict[str, float]:
    """The seconds of calibrating and of converting, and the most memory of converting."""
    found: dict[str, float] = {}
    if batches:
        fp4pass.prepare(model, method, weight_only=True)
        calibrate = lambda: fp4pass.calibrate(model, batches, progress=False)  # noqa: E731
        found["calibrate_seconds"] = round(seconds(calibrate), 2)
    gc.collect()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    convert = lambda: fp4pass.convert(model, "nvfp4", method, weight_only=True)  # noqa: E731
    found["convert_seconds"] = round(seconds(convert), 2)
    if gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def decoding(model: Any, prompt: int, new: int) -> dict[str, float]:
    with torch.no_grad():
        found = decode(model, prompt, new, 3, False)
    # The memory of its CUDA graphs is not that of converting.
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def table(result: dict[str, Any]) -> str:
    tokens, rows = result["tokens"], result["rows"]
    base = rows[0]
    count, length = tokens["calibration"]
    lines = [
        *origin(result),
        f"Calibrated on {count} x {length} tokens. Decode: {tokens['in']} tokens in, "
        f"{tokens['out']} out, batch 1, one CUDA graph a step; bf16 with `batched_mm`.",
        "",
        "| weights | calibrate, s | convert, s | peak of convert, GB | weights, GB | tokens/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [
            "bf16" if row is base else f"NVFP4, `{row['by']}`",
            *(f"{row[key]:.1f}" if key in row else "" for key in ("calibrate_seconds",)),
            f"{row['convert_seconds']:.1f}" if "convert_seconds" in row else "",
            f"{row['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in row else "",
            f"{row['weight_bytes'] / 1e9:.1f}" if "weight_bytes" in row else "",
            _rate(row, base),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rate(row: dict[str, Any], base: dict[str, Any]) -> str:
    key = "decode_tokens_per_second"
    return f"{row[key]:.0f} ({row[key] / base[key]:.2f} x)" if key in row else ""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = Path(__file__).resolve().parents[1] / "results"
    parser.add_argument("--json", type=Path, default=results / "mixture-h200.json")
    parser.add_argument("--table", type=Path, help="rewrite the table of this page")
    parser.add_argument("--tiny", action="store_true", help="a small model; any device")
    return parser.parse_args()


if __name__ == "__main__":
    main()
