"""How fast a model generates on several GPUs by tensor parallelism, beside one.

    python -m eval.bench.parallel [--gpus N...] [--by NAME...] [--json FILE] [--tiny]
    python -m eval.bench.parallel --table docs/performance.md

A model of Llama-3-8B's shape with random weights is converted in every process and split by
fp4pass.parallelize. Decode, prefill and bytes of weights are those of bench_generate.py, by the
first process; the bytes are what it has of the weights. Each row is measured in processes of its
own, one a GPU. --tiny is a rehearsal on a small model with Gloo that also runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fp4pass
from eval.bench.generate import (
    KINDS,
    NEW,
    PREFILL,
    PROMPT,
    build,
    decode,
    prefill_seconds,
    weight_bytes,
)
from eval.pages.tables import origin, write_between
from eval.quality.measuring import Results, command, machine

MODEL = "Llama-3-8B"
DEFAULT = ("fp4pass nvfp4", "fp4pass nvfp4 W4A4")


def main() -> None:
    args = parse_args()
    if args.table:
        text = table(json.loads(args.json.read_text()))
        write_between(args.table, "eval/bench/parallel.py", text)
        return
    if args.one:
        measure(args)
        return
    about = machine("cuda" if torch.cuda.is_available() else "cpu")
    tokens = {"in": PROMPT, "out": NEW, "prefill": list(PREFILL)}
    facts = {"command": command(None), "machine": about["device"], "versions": about["versions"]}
    results = Results(args.json, {**facts, "tokens": tokens}, again=True, key=("by", "gpus"))
    for by in args.by:
        for count in args.gpus:
            row = {"model": MODEL, "by": by, "gpus": count, **run(by, count, args.tiny)}
            results.put(row)
            print(json.dumps(row), flush=True)


def run(by: str, count: int, tiny: bool) -> dict[str, Any]:
    """What the first of so many processes measured."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "eval.bench.parallel", "--one", by, "--folder", folder]
        words += ["--tiny"] if tiny else []
        processes = []
        for rank in range(count):
            env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(count)}
            processes.append(subprocess.Popen(words, env=env))
        codes = [each.wait() for each in processes]
        if any(codes):
            raise SystemExit(f"{by} on {count}: the processes ended with {codes}")
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found


def measure(args: argparse.Namespace) -> None:
    """One process of a row."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.FileStore(str(args.folder / "store"), size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    model = build(MODEL, device, args.tiny)
    KINDS[args.one](model)
    if size > 1:
        fp4pass.parallelize(model, dist.init_device_mesh(device.type, (size,)))
    prompt, new, prefill = (16, 8, (2, 32)) if args.tiny else (PROMPT, NEW, PREFILL)
    found: dict[str, float] = dict(weight_bytes(model))
    with torch.no_grad():
        found |= decode(model, prompt, new, 3, False)
        torch.compiler.reset()
        found |= prefill_seconds(model, prefill, 3)
    if rank == 0:
        (args.folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    rows = result["rows"]
    lines = [
        *origin(result),
        "",
        "| weights | GPUs | tokens/s | prefill, s | weights on each, GB |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        base = next(each for each in rows if each["by"] == row["by"])
        rate = row["decode_tokens_per_second"]
        lines.append(
            f"| {row['by']} | {row['gpus']} | {rate:.0f} "
            f"({rate / base['decode_tokens_per_second']:.2f} x) | "
            f"{row['prefill_seconds']:.3f} | {row['weight_bytes'] / 1e9:.2f} |"
        )
    return "\n".join(lines) + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = Path(__file__).resolve().parents[1] / "results"
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--by", nargs="+", default=list(DEFAULT), choices=list(KINDS))
    parser.add_argument("--json", type=Path, default=results / "parallel-h200.json")
    parser.add_argument("--table", type=Path, help="rewrite the table of this page")
    parser.add_argument("--tiny", action="store_true", help="a small model; any device")
    parser.add_argument("--one", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
