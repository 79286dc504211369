"""Steps of whole models on a GPU by sequences, context and tokens, beside what memory allows.

    python -m eval.bench.decode [--models NAME...] [--by NAME...] [--shapes SHAPE...] [--layers N]
        [--prefill] [--json FILE] [--limit SECONDS] [--tiny] [--together]
    python -m eval.bench.decode --plot docs/decode.png --table PAGE --json FILE [FILE...]

Models and kinds of weights are those of eval/bench/generate.py, each in a process of its own. A
shape is SEQUENCES x CONTEXT x TOKENS: a step reads a static cache of CONTEXT tokens a sequence, and
has TOKENS new ones of each, as where drafts are checked. The step (the model, its cache and the
choice of tokens) is one CUDA graph.

- Step: replays of that graph by the wall clock, the median of several runs. What Python does
  between steps is left out; eval.bench.generate has it.
- Floor: the bytes of the weights and of the keys and values that a step reads, at the bandwidth
  that the card is sold with. Of experts those that random routing is expected to reach.
- Compile: the first call of a step, with empty caches of Inductor unless they are warm.
- --prefill adds 8 x 2048 tokens into an empty cache, as in eval/bench/generate.py; behind
  `--shapes` alone nothing else is measured.

--layers leaves out all layers but the first: every row says how many it had. --together makes and
compiles a model for each shape at a time, and measures them one after another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from eval import charts
from eval.bench import turns
from eval.bench.floor import Shape, of_floor, step_bytes
from eval.bench.generate import (
    KINDS,
    MODELS,
    PLAIN,
    PREFILL,
    SMALL,
    prefill_seconds,
    print_profile,
    why_not,
)
from eval.bench.harness import (
    captured,
    parser_for,
    random_model,
    seconds,
    synchronize,
    warm,
    write_table,
)
from eval.pages.tables import origin, table
from eval.record import Results, Row, facts
from fp4pass._compat.transformers_cache import cache_given

SHAPES = ("1x512x1", "4x512x1", "16x512x1", "64x512x1", "1x8192x1", "1x32768x1")

# Steps of a run, runs, and steps before them.
STEPS, RUNS, WARM = 24, 3, 3


def main() -> None:
    args = parse_args()
    if args.one:
        measure(args)
        return
    if args.plot:
        plot([row for path in args.json for row in json.loads(path.read_text())["rows"]], args.plot)
    if write_table(args, "eval/bench/decode.py", page) or args.plot:
        return
    about = {**facts(None), "models": {name: MODELS[name][1] for name in args.models}}
    results = Results(args.json[0], about, again=True)
    apart = args.together and args.shapes
    shapes = [[shape] for shape in args.shapes] if apart else [args.shapes]
    cases = list(itertools.product(args.models, args.by, shapes))
    groups = [cases] if args.together else [[case] for case in cases]
    for group in groups:
        for row in run(group, args):
            print(row, flush=True)
            results.put(row)


def run(cases: list[tuple[str, str, list[str]]], args: argparse.Namespace) -> list[Row]:
    """Measure in processes of their own; what was measured before they were stopped counts."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.jsonl" for i in range(len(cases))]
        commands = []
        for file, (name, by, shapes) in zip(files, cases, strict=True):
            file.touch()
            words = [sys.executable, "-m", "eval.bench.decode", "--one", by, "--models", name]
            words += ["--shapes", *shapes, "--found", str(file)]
            words += [f"--{flag}" for flag in ("tiny", "prefill", "profile") if getattr(args, flag)]
            words += [] if args.layers is None else ["--layers", str(args.layers)]
            commands.append(words)
        codes, rows = turns.run(commands, args.limit), []
        for file, code, (name, by, _) in zip(files, codes, cases, strict=True):
            found = [json.loads(line) for line in file.read_text().splitlines()]
            found += [] if code == 0 else [{"error": why_not(code, args)}]
            rows += [{"model": name, "by": by} | row for row in found]
        return rows


def measure(args: argparse.Namespace) -> None:
    """Measure one kind of weights of one model."""
    kind, config = MODELS[args.models[0]]
    if args.tiny:
        small = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
        config = config | SMALL | (small if "num_experts" in config else {})
    if args.layers is not None:
        config = config | {"num_hidden_layers": args.layers}
    model = random_model(kind, config)
    if args.one == PLAIN and hasattr(model, "set_experts_implementation"):
        # What generates fastest without packed weights.
        model.set_experts_implementation("batched_mm")
    KINDS[args.one](model)
    layers = {"layers": model.config.num_hidden_layers}

    def note(row: Row) -> None:
        with args.found.open("a") as file:
            file.write(json.dumps(layers | row) + "\n")

    with torch.no_grad():
        for text in args.shapes:
            torch.compiler.reset()
            shape = shape_of("x".join(["2", "16", text.split("x")[2]]) if args.tiny else text)
            note(timed(model, shape, args.profile))
        if args.prefill:
            torch.compiler.reset()
            shape = (2, 32) if args.tiny else PREFILL
            note({"prefill": shape, "seconds": prefill_seconds(model, shape, 10)})


def timed(model: Any, shape: Shape, profile: bool = False) -> Row:
    """Return the time of a step and its floor, or why there is none."""
    batch, context, tokens = shape
    row: Row = {"batch": batch, "context": context, "tokens": tokens}
    weights, cached = step_bytes(model, shape)
    if torch.cuda.is_available() and cached > 0.8 * torch.cuda.mem_get_info()[0]:
        return row | {"error": f"a cache of {cached / 1e9:.0f} GB does not fit"}
    step, fill = compiled_step(model, shape)
    row["compile_seconds"] = seconds(step)
    turns.await_turn()
    step = captured(step)
    warm()
    for _ in range(WARM):
        step()
    times = []
    for _ in range(RUNS):
        fill()
        step()
        synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            step()
        synchronize()
        times.append((time.perf_counter() - begin) / STEPS)
    if profile:
        fill()
        print_profile(step, STEPS - 4)
    taken = statistics.median(times)
    row |= {"step_seconds": taken, "weight_bytes": weights, "cache_bytes": cached}
    return row | of_floor(weights + cached, taken)


def compiled_step(model: Any, shape: Shape) -> tuple[Callable[[], object], Callable[[], None]]:
    """Return a compiled step, and what puts its cache back to `context` tokens."""
    (batch, context, tokens), where = shape, model.device
    # One call compiles and three come before the capture.
    size = context + (STEPS + WARM + 4) * tokens
    cache = StaticCache(config=model.config, max_cache_len=size)
    generator = torch.Generator(where).manual_seed(2)
    sizes = (batch, 1 + tokens)
    ids = torch.randint(model.config.vocab_size, sizes, generator=generator, device=where)
    # The first tokens make the cache.
    given = cache_given(model, cache)
    model(ids[:, :1], **given)
    for layer in cache.layers:
        for each in (layer.keys, layer.values):
            each.normal_(generator=generator)
    positions = torch.arange(context, context + tokens, device=where)

    def step(tokens: Tensor, positions: Tensor) -> Tensor:
        place = {"position_ids": positions[None], "cache_position": positions}
        return model(tokens, **given, **place).logits.argmax(-1)

    def fill() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)

    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    fill()
    return partial(compiled, ids[:, 1:], positions), fill


def shape_of(text: str) -> Shape:
    batch, context, tokens = map(int, text.split("x"))
    return batch, context, tokens


# ---- the page ---------------------------------------------------------------------------------


def key_of(row: Row) -> tuple[Any, ...]:
    """Return what two kinds of weights are compared in."""
    names = ("model", "layers", "batch", "context", "tokens")
    return tuple(row.get(name) for name in names) + tuple(row.get("prefill", ()))


def page(result: Row) -> str:
    """Return the tables of a file: steps, and prompts."""
    rows = [row for row in result["rows"] if "error" not in row]
    base = {key_of(row): row for row in rows if row["by"] == PLAIN}
    one = {(r["by"], *key_of(r)[:4]): r for r in rows if r.get("tokens") == 1}
    steps, prompts = [], []
    for row in rows:
        plain = base.get(key_of(row))
        model = f"{row['model']}, {row['layers']} layers"
        if "prefill" in row:
            taken = row["seconds"]
            ratio = f" ({plain['seconds'] / taken:.2f})" if plain else ""
            prompts.append([model, row["by"], f"{1e3 * taken:.1f}{ratio}"])
            continue
        taken = row["step_seconds"]
        ratio = f" ({plain['step_seconds'] / taken:.2f})" if plain else ""
        rate = row["batch"] * row["tokens"] / taken
        single = one.get((row["by"], *key_of(row)[:4])) if row["tokens"] > 1 else None
        times = f" ({taken / single['step_seconds']:.2f} of 1)" if single else ""
        shape = f"{row['batch']} x {row['context']} x {row['tokens']}"
        share = f"{row['of_floor']:.0%}" if "of_floor" in row else ""
        cells = [f"{1e6 * taken:.0f}{times}", f"{rate:.0f}{ratio}", share]
        if row["by"] != PLAIN:
            steps.append([model, row["by"], shape, *cells])
    of_steps = ", and the time of a step of one token. Floor: weights and cache read once"
    what = f"In brackets: times as fast as bf16{of_steps if steps else ''}."
    parts = [*origin(result), what, ""]
    if steps:
        header = ["model", "weights", "sequences x context x tokens", "step, us", "tokens/s"]
        parts.append(table([*header, "of floor"], steps, left=3))
    if prompts:
        parts.append(table(["model", "weights", "prefill, ms"], prompts, left=2))
    failed = dict.fromkeys(f"{r['by']}: {r['error']}" for r in result["rows"] if "error" in r)
    if failed:
        parts.append(f"Without a row: {'; '.join(failed)}.\n")
    return "\n".join(parts)


def plot(rows: list[Row], target: Path) -> None:
    """Draw tokens a second against sequences, a line for each kind of weights."""
    rows = [row for row in rows if row.get("tokens") == 1 and "step_seconds" in row]
    panels = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        context = min(row["context"] for row in own)
        title = f"{model}, {own[0]['layers']} layers, context {context}"
        series = []
        for i, by in enumerate(dict.fromkeys(row["by"] for row in own)):
            mine = {r["batch"]: r for r in own if r["by"] == by and r["context"] == context}
            at = sorted(mine)
            rates = [n / mine[n]["step_seconds"] for n in at]
            color = charts.GRAY if by == PLAIN else i
            series.append(charts.Points(at, rates, label=by, line="-", color=color))
        batches = sorted({row["batch"] for row in own})
        x = charts.Scale("sequences", ticks={n: str(n) for n in batches}, log=True)
        y = charts.Scale("tokens a second", log=True, grid=True)
        panels.append(charts.Panel(series, title, x, y, width=7.5, height=3.8))
    charts.write_png([panels], target)


def parse_args() -> argparse.Namespace:
    parser = parser_for(__doc__, "decode-h200.json")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Qwen3-4B"])
    ours = [by for by in KINDS if by == PLAIN or by.endswith("lm_head too")]
    parser.add_argument("--by", nargs="+", choices=KINDS, default=ours)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--layers", type=int, help="of the model, in place of all")
    parser.add_argument("--plot", type=Path, help="draw the files to this PNG")
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--together", action="store_true", help="compile all at a time")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel")
    parser.add_argument("--limit", type=float, help="seconds of one model by one kind of weights")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.shapes and not args.prefill:
        parser.error("--shapes without a shape: give one, or --prefill")
    return args


if __name__ == "__main__":
    main()
