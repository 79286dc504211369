"""What a quantized key-value cache costs in quality, and what it saves in memory.

    python -m eval.quality.kv_cache [--model DIR --calib FILE --text FILE] [--context N] [--json F]

A model is calibrated and converted once for each format of the cache, and once without. Each is
compared with the original, and with the same model that keeps its cache in float, window by window:
perplexity and KL with intervals. All keys and values of a window are read from the cache, also by
the first call. `--context` sets `max_position_embeddings`, for windows beyond those that the model
was trained for; rotary embeddings go on.

`--memory` measures a cache instead: a decoder with random weights, its prefill and steps in one
compiled graph, with transformers' own static cache and with ours. `--table PAGE` writes what is in
eval/results/kv-cache into a page.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import StaticCache

import fp4pass
from eval.pages.tables import (
    ROOT,
    code,
    number,
    origin,
    signed,
    table,
    with_interval,
    write_between,
)
from eval.quality import models as quality
from eval.quality.measuring import require_apart
from eval.record import Results, facts
from fp4pass._compat.transformers_cache import cache_given
from fp4pass.evaluation import token_windows
from fp4pass.integrations import quantized_cache
from fp4pass.nn.kv_cache import CACHE_FORMATS, SCALES

# Calibration is the same for all of them.
ANY = "fp8"


def main() -> None:
    args = parse_args()
    if args.table is not None:
        write_between(
            args.table, "eval/quality/kv_cache.py", tables(ROOT / "eval" / "results" / "kv-cache")
        )
        return
    transformers.logging.disable_progress_bar()
    about = {**facts(args.device, model=args.model)}
    if args.memory:
        measure_memory(args, about)
    else:
        measure_quality(args, about)


def parse_args() -> argparse.Namespace:
    parser = quality.make_parser(__doc__)
    parser.set_defaults(windows=32)
    parser.add_argument("--context", type=int, help="positions, beyond those of the config")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--fmt", default="nvfp4", help="of the weights")
    parser.add_argument("--method", default="sse")
    parser.add_argument("--memory", action="store_true", help="measure memory and steps instead")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the cache")
    parser.add_argument("--texts", type=int, default=8, help="texts in the cache")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8, help="key-value heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--table", type=Path, help="the page")
    names = ["float", *CACHE_FORMATS]
    parser.add_argument("--caches", type=lambda text: text.split(","), default=names)
    args = parser.parse_args()
    args.text = args.text or [quality.TINY / "eval.txt"]
    return args


def chosen(args: argparse.Namespace) -> list[str | None]:
    """The formats of a cache that are measured, None where it stays in float."""
    return [None if name == "float" else name for name in args.caches]


# ---- quality ----------------------------------------------------------------------------------


def measure_quality(args: argparse.Namespace, about: dict[str, Any]) -> None:
    for path in args.text:
        require_apart(args.calib, path)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model = model.to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    own = model.config.max_position_embeddings
    calib = token_windows(tokenizer, quality.read(args.calib), window=512, windows=args.samples)
    prepared = fp4pass.prepare(copy.deepcopy(model), args.method, kv_cache=ANY)
    fp4pass.calibrate(prepared, calib.split(args.batch_size), progress=False)
    plain = without_cache(model, calib, args)
    if args.context is not None:
        for each in (model, prepared, plain):
            each.config.max_position_embeddings = args.context
    about |= {
        "model": args.model.name,
        "dtype": args.dtype,
        "fmt": args.fmt,
        "method": args.method,
        "window": args.window,
        "positions": own,
        "calibration": {"file": args.calib.name, "windows": len(calib), "tokens": calib.numel()},
        "texts": [path.name for path in args.text],
    }
    results = Results(args.json, about, again=args.again, key=("cache", "text"))
    for path in args.text:
        floating = None
        for cache in chosen(args):
            converted = plain
            if cache is not None:
                converted = copy.deepcopy(prepared)
                fp4pass.convert(converted, args.fmt, weight_only=True, kv_cache=cache)
            found, beside = (
                fp4pass.evaluate(
                    converted,
                    tokenizer,
                    quality.read(path),
                    reference,
                    window=args.window,
                    windows=args.windows,
                    batch_size=args.batch_size,
                    progress=False,
                )
                for reference in (model, plain)
            )
            floating = floating or found
            row = {
                "cache": cache or "float",
                "text": path.name,
                "windows": found.windows,
                "tokens": found.tokens,
                **quality.measures(found),
                "kl_to_float_cache": quality.measures(beside)["kl"],
                "change": quality.changes(found.difference(floating)),
            }
            results.put(row)
            print(row["cache"], path.name, f"ppl {found.perplexity:.4f} KL {found.kl:.5f}", end=" ")
            print(f"to a float cache {beside.kl:.6f}", flush=True)


def without_cache(model: nn.Module, calib: torch.Tensor, args: argparse.Namespace) -> nn.Module:
    """The model converted alike, with its cache in float."""
    plain = fp4pass.prepare(copy.deepcopy(model), args.method)
    fp4pass.calibrate(plain, calib.split(args.batch_size), progress=False)
    return fp4pass.convert(plain, args.fmt, weight_only=True)


# ---- memory and time --------------------------------------------------------------------------


def measure_memory(args: argparse.Namespace, about: dict[str, Any]) -> None:
    """Bytes of the caches and of a step's peak, and the time of steps."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4 * args.heads,
        num_key_value_heads=args.heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.length,
        tie_word_embeddings=False,
    )
    dtype = getattr(torch, args.dtype)
    model = Qwen3ForCausalLM._from_config(config, dtype=dtype).to(args.device).eval()
    ids = torch.randint(1024, (args.texts, args.length), device=args.device)
    shape = ("length", "texts", "layers", "heads", "head_dim", "hidden", "dtype")
    about |= {name: getattr(args, name) for name in shape}
    results = Results(args.json, about, again=args.again, key=("cache",))
    prepared = fp4pass.prepare(copy.deepcopy(model), args.method, kv_cache=ANY)
    fp4pass.calibrate(prepared, [ids[:1, :512]], progress=False)
    expected = None
    for cache in chosen(args):
        converted = copy.deepcopy(prepared)
        fp4pass.convert(converted, weight_only=True, kv_cache=cache or ANY)
        row, logits = measure_cache(converted, cache, ids, args)
        expected = logits if expected is None else expected
        error = (logits - expected).norm() / expected.norm()
        row |= {"cache": cache or "float", "logits_error": error.item()}
        results.put(row)
        print(row, flush=True)


@torch.no_grad()
def measure_cache(
    model: Any, cache: str | None, ids: torch.Tensor, args: argparse.Namespace
) -> tuple[dict[str, Any], torch.Tensor]:
    """A row, and the logits of the last step; all but `steps` of the tokens are the prefill."""
    torch._dynamo.reset()
    on_gpu = ids.device.type == "cuda"
    kept: Any = (
        StaticCache(config=model.config, max_cache_len=args.length)
        if cache is None
        else quantized_cache(model, args.length)
    )
    fill = args.length - args.steps
    # Text by text would need a cache of each; in parts the prefill takes little memory.
    for part in ids[:, :fill].split(512, dim=1):
        model(part, logits_to_keep=1, **cache_given(model, kept))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers)
    eager = step(model, model, ids[:, fill : fill + 1], kept)
    mode = "reduce-overhead" if on_gpu else None
    compiled = torch.compile(model.forward, fullgraph=True, mode=mode)
    began = time.perf_counter()
    first = step(compiled, model, ids[:, fill : fill + 1], kept)
    compiling = time.perf_counter() - began
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds = []
    for _ in range(args.repeats):
        # A second call records the graph of a GPU, so it is not timed.
        for _ in range(3):
            step(compiled, model, ids[:, fill : fill + 1], kept)
        began = time.perf_counter()
        for _ in range(args.steps):
            last = step(compiled, model, ids[:, fill : fill + 1], kept)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / args.steps)
    row = {
        "cache_bytes": held,
        "scale_bytes": scale_bytes(model) if cache else 0,
        "step_seconds": seconds,
        "compile_seconds": compiling,
        # Of the last step, compiled against eager.
        "compiled_error": ((first - eager).norm() / eager.norm()).item(),
    }
    if on_gpu:
        row["step_peak_bytes"] = torch.cuda.max_memory_allocated() - before
        row["model_and_cache_bytes"] = before
    return row, last


def scale_bytes(model: nn.Module) -> int:
    return sum(each.nbytes for name, each in model.named_buffers() if name.endswith(SCALES))


# ---- page -------------------------------------------------------------------------------------


def tables(folder: Path) -> str:
    """The tables of all results in a folder."""
    lines: list[str] = []
    for path in sorted(folder.glob("quality-*.json")):
        found = json.loads(path.read_text())
        rows = [
            [
                code(row["cache"]),
                number(row["perplexity"]["value"]),
                with_interval(row["kl"], number),
                with_interval(row["change"]["kl"], signed)
                if row["kl_to_float_cache"]["value"]
                else "",
                number(row["kl_to_float_cache"]["value"])
                if row["kl_to_float_cache"]["value"]
                else "",
            ]
            for row in found["rows"]
        ]
        header = ["cache", "perplexity", "KL to the original", "change", "to a float cache"]
        first = found["rows"][0]
        about = f"{found['model']}, {first['windows']} windows of {found['window']:,} tokens"
        lines += [
            f"{about} of `{first['text']}`:",
            "",
            table(header, rows, left=1),
            "",
            *origin(found),
        ]
    for path in sorted(folder.glob("memory*.json")):
        found = json.loads(path.read_text())
        rows = [
            [
                code(row["cache"]),
                f"{row['cache_bytes'] / 2**20:,.0f}",
                f"{row['step_peak_bytes'] / 2**20:,.0f}",
                f"{1e3 * sorted(row['step_seconds'])[len(row['step_seconds']) // 2]:.2f}",
                f"{100 * row['logits_error']:.1f} %",
            ]
            for row in found["rows"]
        ]
        header = ["cache", "MiB", "MiB more in a step", "ms of a step", "error of the logits"]
        shape = f"{found['layers']} layers, {found['heads']} heads of {found['head_dim']}"
        size = f"{found['length']:,} tokens for {found['texts']} texts"
        about = f"A cache of {size} ({shape}, random weights)"
        lines += [f"{about}, compiled:", "", table(header, rows, left=1), "", *origin(found)]
    return "\n".join(lines)


def step(call: Callable[..., Any], model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """The float logits of one more token; the cache then goes back to where it was."""
    logits: torch.Tensor = call(ids, logits_to_keep=1, **cache_given(model, cache)).logits.float()
    for layer in cache.layers:
        layer.cumulative_length.sub_(ids.shape[1])
    return logits.clone()


if __name__ == "__main__":
    main()
