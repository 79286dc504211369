"""Whole models that generate on a GPU: fp4pass beside bf16 and what one could install.

    python -m eval.bench.generate [--models NAME...] [--by NAME...] [--json FILE] [--warm | --tiny]
        [--no-prefill] [--limit SECONDS] [--gpus N | --together]
    python -m eval.bench.generate --plot docs/generation.png --table PAGE --json FILE [FILE...]

Models have heavy-tailed random weights in bf16. Each kind of weight is measured in processes of
its own, one a GPU: with --gpus N the model is split by fp4pass.parallelize over N.

- Decode: greedy, batch 1, 512 tokens in, 256 out, with a static cache. One step (the model, its
  cache and the choice of the token) is compiled with fullgraph=True and CUDA graphs
  (mode="reduce-overhead"); tokens a second are of all steps after the first three, by the wall
  clock, the host included. Median of several runs. Compile: the first call of a step.
- Prefill: 8 x 2048 tokens into an empty static cache, logits of the last token only, compiled
  with fullgraph=True; median of several runs.
- Weights: bytes of all parameters and buffers, and of the linears of the decoder layers alone.

--together makes and compiles all models at a time, for which memory must suffice, and measures
them one after another. --warm fills the caches of torch.compile and Triton and measures nothing.
--profile prints where the GPU spends a decode step. What takes longer than --limit has that for its
result. A page shows a table for each file, a picture the rows of all, of the kinds of --by.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import StaticCache

import fp4pass
from eval import charts
from eval.bench import turns
from eval.bench.floor import of_floor, step_bytes
from eval.bench.harness import (
    QWEN3_4B,
    QWEN3_30B_A3B,
    Call,
    parser_for,
    random_model,
    seconds,
    storage_bytes,
    synchronize,
    token_batches,
    weight_bytes,
    write_table,
)
from eval.bench.peers import LIBRARIES
from eval.pages.tables import origin, table
from eval.record import Results, Row, facts
from fp4pass._compat.transformers_cache import cache_given

LLAMA3_8B: Row = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
MODELS: dict[str, tuple[str, Row]] = {
    "Qwen3-4B": ("qwen3", QWEN3_4B),
    "Llama-3-8B": ("llama", LLAMA3_8B),
    "Qwen3-30B-A3B": ("qwen3_moe", QWEN3_30B_A3B),
}
SMALL: Row = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
}

# Tokens in, tokens out; sequences and tokens of the prefill.
PROMPT, NEW, PREFILL = 512, 256, (8, 2048)
PLAIN, RATE = "bf16", "decode_tokens_per_second"
# What a process writes into its folder.
FOUND = "found.json"


def nvfp4(model: nn.Module) -> None:
    fp4pass.convert(model, "nvfp4a16", "sse", progress=False)


def nvfp4_head(model: nn.Module) -> None:
    rules = [("lm_head", {"fmt": "nvfp4"})]
    fp4pass.convert(model, "nvfp4a16", "sse", rules=rules, progress=False)


def nvfp4_w4a4(model: nn.Module) -> None:
    """Quantize activations too, with static scales from one batch."""
    fp4pass.prepare(model, "sse")
    fp4pass.calibrate(model, token_batches(model.config.vocab_size, 1, 1, 512), progress=False)
    fp4pass.convert(model, "nvfp4", "sse", progress=False)


def nvfp4_fp8(model: nn.Module) -> None:
    """Multiply many rows on FP8 tensor cores."""
    nvfp4_head(model)
    fp4pass.set_compute(model, "fp8")


def torchao_int4(model: Any) -> None:
    """Quantize the linears of the decoder layers to tile-packed int4 in groups of 64."""
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    config = Int4WeightOnlyConfig(group_size=64, int4_packing_format="tile_packed_to_4d")
    quantize_(model.model.layers, config)


def bitsandbytes_nf4(model: Any) -> None:
    """Quantize the linears of the decoder layers to NF4 in blocks of 64."""
    import bitsandbytes as bnb

    for layer in model.model.layers:
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                sizes = (linear.in_features, linear.out_features)
                options = {"bias": False, "compute_dtype": torch.bfloat16, "quant_type": "nf4"}
                new = bnb.nn.Linear4bit(*sizes, **options)
                new.weight = bnb.nn.Params4bit(linear.weight.data, quant_type="nf4", module=new)
                layer.set_submodule(name, new.to(linear.weight.device))


# By the name in the results: how weights are stored, and whether 4-bit inputs come with it.
KINDS: dict[str, Callable[[Any], None]] = {
    PLAIN: lambda model: None,
    "fp4pass nvfp4": nvfp4,
    "fp4pass nvfp4, lm_head too": nvfp4_head,
    "fp4pass nvfp4, lm_head too, fp8": nvfp4_fp8,
    "fp4pass nvfp4 W4A4": nvfp4_w4a4,
    "torchao int4": torchao_int4,
    "bitsandbytes nf4": bitsandbytes_nf4,
}


def main() -> None:
    args = parse_args()
    if args.one:
        measure(args)
        return
    if args.plot:
        read = [json.loads(path.read_text())["rows"] for path in args.json]
        rows = [timed for rows in read for timed in against_bf16(rows)]
        plot([row for row in rows if row["by"] in args.by], args.plot)
    if write_table(args, "eval/bench/generate.py", page) or args.plot:
        return
    tokens = {"in": PROMPT, "out": NEW, "prefill": PREFILL}
    about = {**facts(None, *LIBRARIES), "models": {name: MODELS[name][1] for name in args.models}}
    path = None if args.warm else args.json[0]
    results = Results(path, {**about, "tokens": tokens}, again=True)
    cases = list(itertools.product(args.models, args.by))
    all_found = run_together(cases, args) if args.together else (run(*c, args) for c in cases)
    for (name, by), found in zip(cases, all_found, strict=True):
        row = {"model": name, "by": by, "gpus": args.gpus} | found
        print(row, flush=True)
        results.put(row)


def words_of(name: str, by: str, args: argparse.Namespace) -> list[str]:
    """Return the command of a process that measures."""
    words = [sys.executable, "-m", "eval.bench.generate", "--one", by, "--models", name]
    flags = ("warm", "tiny", "profile", "no-prefill")
    return words + [f"--{flag}" for flag in flags if getattr(args, flag.replace("-", "_"))]


def run_together(cases: list[tuple[str, str]], args: argparse.Namespace) -> list[Row]:
    """Measure each case in a process of its own; all get ready at a time."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / str(i) for i in range(len(cases))]
        commands = []
        for own, case in zip(folders, cases, strict=True):
            own.mkdir()
            commands.append([*words_of(*case, args), "--folder", str(own)])
        codes = turns.run(commands, args.limit)
        return [
            json.loads((own / FOUND).read_text()) if code == 0 else {"error": why_not(code, args)}
            for own, code in zip(folders, codes, strict=True)
        ]


def why_not(code: int | None, args: argparse.Namespace) -> str:
    if code is None:
        return f"not done after {args.limit:.0f} s"
    return f"the process ended with {code}"


def run(name: str, by: str, args: argparse.Namespace) -> Row:
    """Measure in processes of their own, so that nothing of one kind is left for the next."""
    words = words_of(name, by, args)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(args.gpus):
            env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(args.gpus)}
            processes.append(subprocess.Popen([*words, "--folder", folder], env=env))
        try:
            codes = [each.wait(args.limit) for each in processes]
        except subprocess.TimeoutExpired:
            for each in processes:
                each.kill()
            return {"error": why_not(None, args)}
        if any(codes):
            return {"error": why_not(next(filter(None, codes)), args)}
        found: Row = json.loads((Path(folder) / FOUND).read_text())
        return found


def measure(args: argparse.Namespace) -> None:
    """Measure one kind of weights of one model, as one of the processes of its row."""
    rank, size = (int(os.environ.get(name, one)) for name, one in (("RANK", 0), ("WORLD_SIZE", 1)))
    where = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if size > 1:
        store = dist.FileStore(str(args.folder / "store"), size)
        backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    kind, config = MODELS[args.models[0]]
    model = random_model(kind, config | (SMALL if args.tiny else {}), where)
    KINDS[args.one](model)
    if size > 1:
        fp4pass.parallelize(model, dist.init_device_mesh(where.type, (size,)))
    gc.collect()
    linears = [m for _, m in model.model.layers.named_modules() if hasattr(m, "in_features")]
    tensors = [t for m in linears for t in (*m.parameters(), *m.buffers())]
    found: Row = {"weight_bytes": weight_bytes(model)}
    found["linear_bytes"] = sum(map(storage_bytes, {id(t): t for t in tensors}.values()))
    prompt, new, prefill = (16, 8, (2, 32)) if args.tiny else (PROMPT, NEW, PREFILL)
    repeats = 1 if args.warm else 3
    with torch.no_grad():
        found |= decode(model, prompt, new, repeats, args.profile)
        if not args.no_prefill:
            torch.compiler.reset()
            found["prefill_seconds"] = prefill_seconds(model, prefill, repeats)
    if rank == 0:
        (args.folder / FOUND).write_text(json.dumps(found))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def decode(model: Any, prompt: int, new: int, repeats: int, profile: bool = False) -> Row:
    """Return the tokens a second of greedy generation, their floor, and the time to compile."""
    config, where = model.config, model.device
    # The cache counts its tokens by itself; a profile adds some.
    cache = StaticCache(config=config, max_cache_len=prompt + new + 64)
    generator = torch.Generator(where).manual_seed(2)
    ids = torch.randint(config.vocab_size, (1, prompt), generator=generator, device=where)

    given = cache_given(model, cache)

    def step(token: Tensor, position: Tensor) -> Tensor:
        logits = model(token, **given, position_ids=position[None], cache_position=position).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    positions = [torch.tensor([i], device=where) for i in range(prompt, prompt + new)]

    def generate() -> tuple[float, Tensor]:
        cache.reset()
        token = step(ids, torch.arange(prompt, device=where))
        for i, position in enumerate(positions[:-1]):
            if i == 3:
                synchronize()
                begin = time.perf_counter()
            torch.compiler.cudagraph_mark_step_begin()
            token = compiled(token, position).clone()
        synchronize()
        return (new - 4) / (time.perf_counter() - begin), token

    token = step(ids, torch.arange(prompt, device=where))
    compiling = seconds(lambda: compiled(token, positions[0]))
    generate()
    turns.await_turn()
    runs = [generate() for _ in range(repeats)]
    if profile:
        print_profile(lambda: compiled(runs[-1][1], positions[-1]))
    rate = statistics.median(rate for rate, _ in runs)
    read = sum(step_bytes(model, (1, prompt + new // 2, 1)))
    return {RATE: rate, "compile_seconds": compiling} | of_floor(read, 1 / rate)


def print_profile(step: Call, count: int = 20) -> None:
    """Print what the GPU did in a decode step, by kernel, in microseconds a step."""
    from torch.profiler import ProfilerActivity

    def steps(number: int) -> None:
        for _ in range(number):
            torch.compiler.cudagraph_mark_step_begin()
            step()

    steps(3)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        wall = seconds(lambda: steps(count))
    rows = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)
    total = sum(row.device_time_total for row in rows)
    print(f"a step: {1e6 * wall / count:.0f} us by the clock, {total / count:.0f} us in kernels")
    for row in rows[:25]:
        each = row.device_time_total / count
        print(f"  {each:8.1f} us  {row.count / count:6.1f} x  {row.key[:90]}")


def prefill_seconds(model: Any, shape: tuple[int, int], repeats: int) -> float:
    """Return the time to read a batch of prompts."""
    where = model.device
    cache = StaticCache(config=model.config, max_cache_len=shape[1])
    generator = torch.Generator(where).manual_seed(3)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator, device=where)
    positions = torch.arange(shape[1], device=where)
    given = {**cache_given(model, cache), "position_ids": positions[None]}
    given |= {"cache_position": positions, "logits_to_keep": 1}
    compiled = torch.compile(lambda: model(ids, **given).logits.argmax(-1), fullgraph=True)
    compiled()
    turns.await_turn()
    times = []
    for _ in range(repeats):
        cache.reset()
        times.append(seconds(compiled))
    return statistics.median(times)


def page(result: Row) -> str:
    """Return the table of a file."""
    tokens, cells = result["tokens"], []
    for row in result["rows"]:
        by = row["by"] + (f", {row['gpus']} GPUs" if row.get("gpus", 1) > 1 else "")
        if "error" in row:
            cells.append([row["model"], by, f"failed: {row['error']}", *[""] * 3])
            continue
        base = plain_row(result["rows"], row["model"])
        prefill = ""
        if "prefill_seconds" in row:
            quotient = base["prefill_seconds"] / row["prefill_seconds"]
            prefill = f"{1e3 * row['prefill_seconds']:.0f} ({quotient:.2f})"
        size = f"{row['weight_bytes'] / 1e9:.2f} ({row['weight_bytes'] / base['weight_bytes']:.3f})"
        rate = f"{row[RATE]:.0f} ({row[RATE] / base[RATE]:.2f})"
        share = f"{row['of_floor']:.0%}" if "of_floor" in row else ""
        cells.append([row["model"], by, rate, share, prefill, size])
    header = ["model", "weights", "decode, tokens/s", "of floor", "prefill, ms"]
    header += ["weights, GB"]
    what = (
        f"Decode: {tokens['in']} tokens in, {tokens['out']} out, batch 1, one CUDA graph a step. "
    )
    if any("prefill_seconds" in row for row in result["rows"]):
        what += f"Prefill: {tokens['prefill'][0]} x {tokens['prefill'][1]} tokens. "
    if any("of_floor" in row for row in result["rows"]):
        what += "Floor: weights and cache read once. "
    what += "In brackets: times as fast as bf16, or the share of its bytes."
    # Columns that no row of the file has are left out.
    columns = [each for each in zip(header, *cells, strict=True) if any(each[1:])]
    header, *cells = map(list, zip(*columns, strict=True))
    return "\n".join([*origin(result), what, "", table(header, cells, left=2)])


def plain_row(rows: list[Row], model: str) -> Row:
    return next(row for row in rows if row["model"] == model and row["by"] == PLAIN)


def against_bf16(rows: list[Row]) -> list[Row]:
    """Return the rows with a time, each with its speed beside bf16 in the same run."""
    timed = [row for row in rows if "error" not in row]
    return [row | {"ratio": row[RATE] / plain_row(rows, row["model"])[RATE]} for row in timed]


def plot(rows: list[Row], target: Path) -> None:
    """Draw tokens a second, a bar for each kind of weights: of two rows of a kind, the first."""
    panels = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own: dict[str, Row] = {}
        for row in rows:
            if row["model"] == model:
                own.setdefault(row["by"], row)
        names = sorted(own, key=list(KINDS).index)
        series = []
        for is_ours, color in ((True, 1), (False, charts.GRAY)):
            at = [i for i, name in enumerate(names) if ("fp4pass" in name) == is_ours]
            mine = [own[names[i]] for i in at]
            rates = [row[RATE] for row in mine]
            texts = [f"{r:.0f} ({row['ratio']:.2f} x)" for r, row in zip(rates, mine, strict=True)]
            series.append(charts.Bars(at, rates, color=color, texts=texts, horizontal=True))
        most = max(row[RATE] for row in own.values())
        x = charts.Scale("tokens a second, batch 1", low=0, high=1.3 * most)
        panels.append(charts.Panel(series, model, x, categories=names, width=5.5, height=3.2))
    charts.write_png([panels], target)


def parse_args() -> argparse.Namespace:
    parser = parser_for(__doc__, "generate-h200.json")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Qwen3-4B", "Llama-3-8B"])
    weights = [by for by in KINDS if "W4A4" not in by and "fp8" not in by]
    parser.add_argument("--by", nargs="+", choices=KINDS, default=weights)
    parser.add_argument("--gpus", type=int, default=1, help="over which each model is split")
    parser.add_argument("--plot", type=Path, help="draw the files to this PNG")
    for flag in ("warm", "profile", "no-prefill", "together"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--limit", type=float, help="seconds of one model by one kind of weights")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.together and args.gpus > 1:
        parser.error("--together measures models of one GPU: leave out --gpus")
    return args


if __name__ == "__main__":
    main()
