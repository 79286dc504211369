"""How fast whole models generate on a GPU: fp4pass beside bf16 and what one could install.

    python -m eval.bench.generate [--models NAME...] [--by NAME...] [--json FILE] [--warm | --tiny]
        [--no-prefill] [--limit SECONDS]
    python -m eval.bench.generate --plot docs/generation.png --table docs/performance.md
        [--beside FILE]

Models are built from their configs with heavy-tailed random weights in bf16. Each kind of weight
is measured in a process of its own, by the same steps:

- Decode: greedy, batch 1, 512 tokens in, 256 out, with a static cache. One step (the model, its
  cache and the choice of the token) is compiled with fullgraph=True and CUDA graphs
  (mode="reduce-overhead"); tokens a second are of all steps after the first three, by the wall
  clock, the host included. Median of several runs.
- Prefill: 8 x 2048 tokens into an empty static cache, logits of the last token only, compiled
  with fullgraph=True; median of several runs.
- Weights: bytes of all parameters and buffers, and of the linears of the decoder layers alone.

--warm fills the caches of torch.compile and Triton and measures nothing, so that several processes
can do it at a time. --profile prints where the GPU spends a decode step. --tiny is a rehearsal on
small models that also runs on a CPU. --no-prefill measures the decoding alone; what takes longer
than --limit has that for its result. --beside is the file of a run with other libraries: a table of
its own, and its rows in the picture.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

import fp4pass
from eval.bench.convert import QWEN3_4B, heavy_tailed
from eval.bench.peers import installed
from eval.pages.tables import origin, write_between
from fp4pass.reporting import charts

LLAMA3_8B: dict[str, Any] = {
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
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-4B": ("qwen3", QWEN3_4B),
    "Llama-3-8B": ("llama", LLAMA3_8B),
}
TINY: dict[str, Any] = {
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
PLAIN = "bf16"


def keep(model: nn.Module) -> None:
    """The model as it is."""


def nvfp4(model: nn.Module) -> None:
    fp4pass.convert(model, "nvfp4", "sse", weight_only=True)


def nvfp4_head(model: nn.Module) -> None:
    rules = [("lm_head", {"fmt": "nvfp4"})]
    fp4pass.convert(model, "nvfp4", "sse", weight_only=True, rules=rules)


def nvfp4_w4a4(model: nn.Module) -> None:
    """Activations too, with static scales from one batch."""
    fp4pass.prepare(model, "sse")
    ids = torch.randint(model.config.vocab_size, (1, 512), device=model.device)
    fp4pass.calibrate(model, [ids], progress=False)
    fp4pass.convert(model, "nvfp4", "sse")


def torchao_int4(model: nn.Module) -> None:
    """Its tile-packed int4 in groups of 64, of the linears of the decoder layers."""
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    config = Int4WeightOnlyConfig(group_size=64, int4_packing_format="tile_packed_to_4d")
    quantize_(model.model.layers, config)


def bitsandbytes_nf4(model: nn.Module) -> None:
    """Its NF4 in blocks of 64, of the linears of the decoder layers."""
    import bitsandbytes as bnb

    for layer in model.model.layers:
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                new = bnb.nn.Linear4bit(
                    linear.in_features,
                    linear.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                )
                new.weight = bnb.nn.Params4bit(linear.weight.data, quant_type="nf4", module=new)
                layer.set_submodule(name, new.to(linear.weight.device))


# By the name in the results: how weights are stored, and whether 4-bit inputs come with it.
KINDS: dict[str, Callable[[Any], None]] = {
    PLAIN: keep,
    "fp4pass nvfp4": nvfp4,
    "fp4pass nvfp4, lm_head too": nvfp4_head,
    "fp4pass nvfp4 W4A4": nvfp4_w4a4,
    "torchao int4": torchao_int4,
    "bitsandbytes nf4": bitsandbytes_nf4,
}


def main() -> None:
    args = parse_args()
    if args.one:
        print(json.dumps(measure(args)))
        return
    if args.table or args.plot:
        results = [json.loads(path.read_text()) for path in (args.json, args.beside) if path]
        if args.table:
            tables = "\n".join(map(table, results))
            write_between(args.table, "eval/bench/generate.py", tables)
        if args.plot:
            plot([timed for result in results for timed in against_bf16(result["rows"])], args.plot)
        return
    rows = []
    for name in args.models:
        for by in args.by:
            row = run_one(name, by, args)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            rows.append(row)
            if not args.warm:
                write(args.json, rows)


def run_one(name: str, by: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own, so that nothing of one kind is left for the next."""
    command = [sys.executable, "-m", "eval.bench.generate", "--one", by, "--models", name]
    flags = ("warm", "tiny", "profile", "no-prefill")
    command += [f"--{flag}" for flag in flags if getattr(args, flag.replace("-", "_"))]
    row: dict[str, Any] = {"model": name, "by": by}
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, timeout=args.limit
        )
    except subprocess.TimeoutExpired:
        return row | {"error": f"not done after {args.limit:.0f} s"}
    *log, last = done.stdout.strip().splitlines() or [""]
    print(*log, sep="\n", end="\n" if log else "")
    if done.returncode:
        return row | {"error": f"exit {done.returncode}: {last}"[:300]}
    return row | json.loads(last)


def write(target: Path, rows: list[dict[str, Any]]) -> None:
    result = {
        "command": shlex.join(["python", "eval/bench/generate.py", *sys.argv[1:]]),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
            "fp4pass": fp4pass.__version__,
            **installed(),
        },
        "models": {name: config for name, (_, config) in MODELS.items()},
        "tokens": {"in": PROMPT, "out": NEW, "prefill": PREFILL},
        "rows": rows,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One kind of weights of one model: how fast it is, and how large."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (name,), found = args.models, {}
    model = build(name, device, args.tiny)
    KINDS[args.one](model)
    gc.collect()
    found |= weight_bytes(model)
    prompt, new, prefill = (16, 8, (2, 32)) if args.tiny else (PROMPT, NEW, PREFILL)
    repeats = 1 if args.warm else 3
    with torch.no_grad():
        found |= decode(model, prompt, new, repeats, args.profile)
        if not args.no_prefill:
            torch.compiler.reset()
            found |= prefill_seconds(model, prefill, repeats)
    return found


def build(name: str, device: torch.device, tiny: bool) -> Any:
    """A model of a config in bf16; its matrices are Student's t with 5 degrees of freedom."""
    kind, config = MODELS[name]
    config = config | (TINY if tiny else {})
    generator = torch.Generator(device).manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(kind, **config)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(heavy_tailed(parameter, generator))
    return model.eval()


def weight_bytes(model: Any) -> dict[str, int]:
    def total(module: nn.Module) -> int:
        tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
        return sum(storage_bytes(tensor) for tensor in tensors.values())

    linears = [m for _, m in model.model.layers.named_modules() if hasattr(m, "in_features")]
    return {"weight_bytes": total(model), "linear_bytes": sum(map(total, linears))}


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, here; of one that wraps others (torchao), and of bitsandbytes' scales."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(storage_bytes(getattr(tensor, each)) for each in names)
    state = getattr(tensor, "quant_state", None)
    return tensor.nbytes + (0 if state is None else state.absmax.nbytes)


def decode(model: Any, prompt: int, new: int, repeats: int, profile: bool) -> dict[str, float]:
    """Tokens a second of greedy generation, one sequence."""
    config, device = model.config, model.device
    # The cache counts its tokens by itself; a profile adds some.
    cache = StaticCache(config=config, max_cache_len=prompt + new + 64)
    generator = torch.Generator(device).manual_seed(2)
    ids = torch.randint(config.vocab_size, (1, prompt), generator=generator, device=device)

    def step(token: Tensor, position: Tensor) -> Tensor:
        logits = model(
            token, past_key_values=cache, position_ids=position[None], cache_position=position
        ).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    positions = [torch.tensor([i], device=device) for i in range(prompt, prompt + new)]

    def generate() -> tuple[float, list[Tensor]]:
        cache.reset()
        start = torch.arange(prompt, device=device)
        token = step(ids, start)
        tokens = [token]
        for i, position in enumerate(positions[:-1]):
            if i == 3:
                synchronize()
                begin = time.perf_counter()
            torch.compiler.cudagraph_mark_step_begin()
            token = compiled(token, position).clone()
            tokens.append(token)
        synchronize()
        return (new - 4) / (time.perf_counter() - begin), tokens

    generate()
    rates, tokens = [], []
    for _ in range(repeats):
        rate, tokens = generate()
        rates.append(rate)
    if profile:
        print_profile(lambda: compiled(tokens[-1], positions[-1]))
    return {"decode_tokens_per_second": round(statistics.median(rates), 2)}


def print_profile(step: Callable[[], object]) -> None:
    """What the GPU did in a decode step, by kernel, in microseconds a step."""
    from torch.profiler import ProfilerActivity

    count = 20
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        step()
    synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begin = time.perf_counter()
        for _ in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            step()
        synchronize()
        wall = time.perf_counter() - begin
    rows = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)
    total = sum(row.device_time_total for row in rows)
    print(f"a step: {1e6 * wall / count:.0f} us by the clock, {total / count:.0f} us in kernels")
    for row in rows[:25]:
        each = row.device_time_total / count
        print(f"  {each:8.1f} us  {row.count / count:6.1f} x  {row.key[:90]}")


def prefill_seconds(model: Any, shape: tuple[int, int], repeats: int) -> dict[str, float]:
    """The time to read a batch of prompts."""
    device = model.device
    cache = StaticCache(config=model.config, max_cache_len=shape[1])
    generator = torch.Generator(device).manual_seed(3)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator, device=device)
    positions = torch.arange(shape[1], device=device)

    def run() -> Tensor:
        return model(
            ids,
            past_key_values=cache,
            position_ids=positions[None],
            cache_position=positions,
            logits_to_keep=1,
        ).logits.argmax(-1)

    compiled = torch.compile(run, fullgraph=True)
    times = []
    for _ in range(repeats + 1):
        cache.reset()
        synchronize()
        begin = time.perf_counter()
        compiled()
        synchronize()
        times.append(time.perf_counter() - begin)
    return {"prefill_seconds": round(statistics.median(times[1:]), 5)}


def table(result: dict[str, Any]) -> str:
    tokens = result["tokens"]
    lines = [
        *origin(result),
        f"Decode: {tokens['in']} tokens in, {tokens['out']} out, batch 1, one CUDA graph a step. "
        f"Prefill: {tokens['prefill'][0]} x {tokens['prefill'][1]} tokens. In brackets: times as "
        "fast as bf16, or the share of its bytes.",
        "",
        "| model | weights | decode, tokens/s | prefill, ms | weights, GB | linears, GB |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"| {row['model']} | {row['by']} | failed: {row['error']} | | | |")
            continue
        base = plain_row(result["rows"], row["model"])
        rate = row["decode_tokens_per_second"]
        cells = [f"{rate:.0f} ({rate / base['decode_tokens_per_second']:.2f})", "not measured"]
        if "prefill_seconds" in row:
            quotient = base["prefill_seconds"] / row["prefill_seconds"]
            cells[1] = f"{1e3 * row['prefill_seconds']:.0f} ({quotient:.2f})"
        for name in ("weight_bytes", "linear_bytes"):
            cells.append(f"{row[name] / 1e9:.2f} ({row[name] / base[name]:.3f})")
        lines.append(f"| {row['model']} | {row['by']} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def plain_row(rows: list[dict[str, Any]], model: str) -> dict[str, Any]:
    return next(row for row in rows if row["model"] == model and row["by"] == PLAIN)


def against_bf16(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with a time, each with how many times it is as fast as bf16 in the same run."""
    timed = [row for row in rows if "error" not in row]
    rate = "decode_tokens_per_second"
    return [row | {"ratio": row[rate] / plain_row(rows, row["model"])[rate]} for row in timed]


def plot(rows: list[dict[str, Any]], target: Path) -> None:
    """Draw tokens a second, a bar for each kind of weights: of two rows of a kind, the first."""
    panels = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own: dict[str, dict[str, Any]] = {}
        for row in rows:
            if row["model"] == model:
                own.setdefault(row["by"], row)
        names = sorted(own, key=list(KINDS).index)
        series = []
        for is_ours, color in ((True, 1), (False, charts.GRAY)):
            at = [i for i, name in enumerate(names) if ("fp4pass" in name) == is_ours]
            mine = [own[names[i]] for i in at]
            rates = [row["decode_tokens_per_second"] for row in mine]
            texts = [f"{r:.0f} ({row['ratio']:.2f} x)" for r, row in zip(rates, mine, strict=True)]
            series.append(charts.Bars(at, rates, color=color, texts=texts, horizontal=True))
        most = max(row["decode_tokens_per_second"] for row in own.values())
        x = charts.Scale("tokens a second, batch 1", low=0, high=1.3 * most)
        panels.append(charts.Panel(series, model, x, categories=names, width=5.5, height=3.2))
    charts.write_png([panels], target)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    weights = [by for by in KINDS if "W4A4" not in by]
    parser.add_argument("--by", nargs="+", choices=KINDS, default=weights)
    parser.add_argument("--json", type=Path, default=Path("eval/results/generate-h200.json"))
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--plot", type=Path)
    for flag in ("warm", "tiny", "profile", "no-prefill"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--limit", type=float, help="seconds of one model by one kind of weights")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
