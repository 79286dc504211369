"""How long a decode step takes on a GPU, by kind of weight, batch and context, and where it goes.

    python eval/bench_decode.py [--models NAME...] [--kinds NAME...] [--batches N...]
        [--contexts N...] [--new N] [--layers N] [--profile] [--json FILE]
    python eval/bench_decode.py --table docs/performance.md [--json FILE]

As bench_generate.py has it: random weights, a static cache, a step (the model, its cache and the
choice of the token) compiled with fullgraph=True and CUDA graphs. Each kind runs in a process of
its own; they compile at the same time and measure one after the other, and end with the process
that started them. --layers takes fewer layers than the models have, for trials. --table writes what
the file has into a page.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from bench_generate import MODELS, build, synchronize
from tables import origin, write_between
from torch import Tensor
from torch.profiler import ProfilerActivity
from transformers import StaticCache

import fp4pass
from fp4pass._compat import inductor as compat
from fp4pass.graph.inductor import install
from fp4pass.graph.inductor.attention import fuse_attention
from fp4pass.graph.inductor.rotary import fuse_rotary

# A prompt is read in pieces of so many tokens.
PIECE = 512


def dense(model: Any) -> None:
    """The model as it is."""


def dense_fused(model: Any) -> None:
    """The model as it is, compiled with the passes that fuse attention and what is before it."""
    from torch._inductor import config

    def run(graph: Any) -> None:
        fuse_attention(graph)
        fuse_rotary(graph)

    config.post_grad_custom_pre_pass = run


def convert(
    fmt: str, model: Any, head: bool = False, without: tuple[str, ...] = (), early: bool = True
) -> None:
    """Weights only; maybe the output embedding too; maybe without some passes or early launches."""
    rules = [("lm_head", {"fmt": fmt})] if head else []
    fp4pass.convert(model, fmt, "naive", weight_only=True, rules=rules)
    passes = (each for each in install.PASSES if each.__name__ not in without)
    install.PASSES = (*passes, *[launch_in_turn] * (not early))


def launch_in_turn(graph: Any) -> int:
    """Have Inductor's kernels launched in their turn; the name is in the key of its cache."""
    compat._can_start_early = lambda *_: False
    return 0


BEFORE = ("fuse_attention", "fuse_rotary")
AROUND = ("fuse_gates", "fuse_norms")
KINDS: dict[str, Callable[[Any], None]] = {
    "bf16": dense,
    "bf16, attention fused": dense_fused,
    "nvfp4, linears alone": partial(convert, "nvfp4", without=BEFORE + AROUND, early=False),
    "nvfp4, attention too": partial(convert, "nvfp4", without=AROUND, early=False),
    "nvfp4, launched in turn": partial(convert, "nvfp4", early=False),
    "nvfp4": partial(convert, "nvfp4"),
    "nvfp4, lm_head too": partial(convert, "nvfp4", head=True),
    "mxfp4": partial(convert, "mxfp4"),
    "mxfp4, lm_head too": partial(convert, "mxfp4", head=True),
}


def main() -> None:
    args = parse_args()
    if args.one:
        measure(args)
        return
    if args.table:
        text = table(json.loads(args.json.read_text()))
        write_between(args.table, "eval/bench_decode.py", text)
        return
    # Rows are kept as they come, for a run that is cut short.
    found = args.json.with_suffix(".rows")
    found.parent.mkdir(parents=True, exist_ok=True)
    found.write_text("")
    for name in args.models:
        one = [sys.executable, __file__, *sys.argv[1:], "--models", name, "--one"]
        running = {kind: subprocess.Popen([*one, kind]) for kind in args.kinds}
        failed = [kind for kind, each in running.items() if each.wait()]
        if failed:
            print(f"{name}, failed: {', '.join(failed)}", flush=True)
        write(args, [json.loads(line) for line in found.read_text().splitlines()])
    found.unlink()


def end_with(parent: int) -> None:
    """End this process as soon as the one that started it has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    result = {
        "command": shlex.join(["python", "eval/bench_decode.py", *sys.argv[1:]]),
        "machine": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
            "fp4pass": fp4pass.__version__,
        },
        "rows": rows,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Print a row for each batch and context."""
    end_with(os.getppid())
    (name,) = args.models
    if args.layers:
        MODELS[name][1]["num_hidden_layers"] = args.layers
    model = build(name, torch.device("cuda"), tiny=False)
    KINDS[args.one](model)
    for batch in args.batches:
        for context in args.contexts:
            row = {"model": name, "kind": args.one, "layers": model.config.num_hidden_layers}
            row |= {"batch": batch, "context": context}
            row |= decode(model, batch, context, args)
            print({key: value for key, value in row.items() if key != "kernels"}, flush=True)
            with args.json.with_suffix(".rows").open("ab", buffering=0) as found:
                found.write(json.dumps(row).encode() + b"\n")


def decode(model: Any, batch: int, context: int, args: argparse.Namespace) -> dict[str, Any]:
    """Time the steps behind a prompt."""
    torch.compiler.reset()
    config, device, new = model.config, model.device, args.new
    cache = StaticCache(config=config, max_cache_len=context + new + 64)
    generator = torch.Generator(device).manual_seed(2)
    ids = torch.randint(config.vocab_size, (batch, context), generator=generator, device=device)

    def step(token: Tensor, position: Tensor) -> Tensor:
        logits = model(
            token,
            past_key_values=cache,
            position_ids=position[None],
            cache_position=position,
            logits_to_keep=1,
        ).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)

    def read_prompt() -> Tensor:
        cache.reset()
        for start in range(0, context, PIECE):
            piece = ids[:, start : start + PIECE]
            token = step(piece, torch.arange(start, start + piece.shape[1], device=device))
        return token

    def generate(count: int) -> list[float]:
        token = read_prompt()
        positions = [torch.tensor([context + i], device=device) for i in range(count)]
        times = []
        synchronize()
        for position in positions:
            times.append(time.perf_counter())
            torch.compiler.cudagraph_mark_step_begin()
            token = compiled(token, position).clone()
        synchronize()
        return [*times, time.perf_counter()]

    begin = time.perf_counter()
    generate(1)
    seconds = time.perf_counter() - begin
    generate(3)
    agreeing = agreement(step, compiled, read_prompt, context)
    kernels = {}
    if args.profile:
        # The first profile of a process takes seconds.
        profile(synchronize, 1)
    with open("/tmp/fp4pass-bench.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # All steps but the first four, by the clock, the host included.
        runs = [generate(new) for _ in range(args.repeats)]
        steps = [(run[-1] - run[4]) / (len(run) - 5) for run in runs]
        if args.profile:
            position = torch.tensor([context + new], device=device)
            kernels = {"kernels": profile(lambda: compiled(ids[:, :1], position), 20)}
    each = statistics.median(steps)
    return {
        "step_ms": round(1e3 * each, 4),
        "runs_ms": [round(1e3 * run, 4) for run in steps],
        "tokens_per_second": round(batch / each, 1),
        "first_call_seconds": round(seconds, 1),
        "tokens_as_eager": agreeing,
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        **kernels,
    }


def agreement(
    step: Callable[..., Tensor],
    compiled: Callable[..., Tensor],
    read_prompt: Callable[[], Tensor],
    context: int,
) -> float:
    """Return how many of 16 steps choose the token that eager chooses there; SystemExit if few."""
    chosen = [read_prompt()]
    positions = [torch.tensor([context + i], device=chosen[0].device) for i in range(16)]
    for position in positions:
        torch.compiler.cudagraph_mark_step_begin()
        chosen.append(compiled(chosen[-1], position).clone())
    read_prompt()
    same = [
        step(token, position) == after
        for token, after, position in zip(chosen, chosen[1:], positions, strict=False)
    ]
    share = torch.cat(same).float().mean().item()
    # Of random weights the largest logits are near each other; by chance nothing is the same.
    if share < 0.5:
        raise SystemExit(f"expected eager's tokens, got {share:.0%} of them")
    return share


def profile(step: Callable[[], object], count: int) -> list[tuple[float, float, str]]:
    """Microseconds and launches a step of each kernel, the longest first."""
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        step()
    synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            step()
        synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)
    return [
        (round(row.device_time_total / count, 2), row.count / count, row.key[:120]) for row in rows
    ]


# Parts of a step, by what is in the names of their kernels.
PARTS: dict[str, tuple[str, ...]] = {
    "linears of the layers": ("nvjet", "splitKreduce", "few_rows", "add_parts", "gemv"),
    "attention": ("sdpa", "fmha", "lean_reduction", "attention_kernel", "attention_span", "splits"),
    "norms of heads, rotary embedding, cache": ("rotary_write",),
}
ONCE, REST = "lm_head, dense or packed", "what Inductor makes, copies of k and v too"


def parts_of(kernels: list[list[Any]]) -> dict[str, float]:
    """Microseconds of each part of a step, from its profile."""
    found = dict.fromkeys((*PARTS, ONCE, REST), 0.0)
    for us, count, name in kernels:
        part = REST
        if not name.startswith("triton_"):
            part = next((p for p, words in PARTS.items() if any(w in name for w in words)), REST)
        linears = next(iter(PARTS))
        found[ONCE if part == linears and count == 1 else part] += us
    return found


def table(result: dict[str, Any]) -> str:
    """Tables of the steps, and of where their time goes."""
    lines = [
        *origin(result),
        "| model | layers | kind | batch | context | ms a step | of bf16 | tokens/s |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    profiled = []
    for row in result["rows"]:
        same = ("model", "layers", "batch", "context")
        base = [
            each["step_ms"]
            for each in result["rows"]
            if each["kind"] == "bf16" and all(each[key] == row[key] for key in same)
        ]
        ratio = f"{base[0] / row['step_ms']:.2f} x" if base else ""
        cells = [row["model"], row["layers"], row["kind"], row["batch"], row["context"]]
        cells += [f"{row['step_ms']:.3f}", ratio, f"{row['tokens_per_second']:.0f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
        if "kernels" in row and base:
            profiled.append(row)
    if profiled:
        parts = [parts_of(row["kernels"]) for row in profiled]
        lines += ["", f"| us in kernels | {' | '.join(row['kind'] for row in profiled)} |"]
        lines.append(f"| --- |{' ---: |' * len(profiled)}")
        for part in parts[0]:
            lines.append(f"| {part} | {' | '.join(f'{each[part]:.0f}' for each in parts)} |")
        sums = [sum(each.values()) for each in parts]
        lines.append(f"| sum | {' | '.join(f'{each:.0f}' for each in sums)} |")
    return "\n".join([*lines, ""])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512])
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, help="instead of those of the model")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("eval/results/decode-h200.json"))
    parser.add_argument("--table", type=Path, help="the page to write")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
