"""A LoRA adapter merged into 4 bits: what "sse", "hessian" and "gptq" keep of it.

    python -m eval.quality.merging --model FOLDER --train TEXT --held-out TEXT --adapter DIR \\
        --json OUT
    python -m eval.quality.merging --json FILE --table docs/transformers.md

The model is converted by "sse", an adapter of rank 8 on all linear layers learns windows of TEXT,
and each method merges it into a copy. Hessians are of other windows of it. `--adapter` keeps the
adapter for another run.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from eval.pages.tables import percent, table, write_between
from eval.record import Results, facts

METHODS = ("naive", "sse", "hessian", "gptq")
RANK, ALPHA, RATE, WINDOW, BATCH = 8, 16, 1e-3, 256, 2


def main() -> None:
    """Measure, or write the table of what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--scheme", default="nvfp4a16")
    parser.add_argument("--train", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=1, help="windows of a step")
    parser.add_argument("--calibrate", type=int, default=32, help="windows for statistics")
    parser.add_argument("--judge", type=int, default=16, help="windows that are held out")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table:
        write_between(
            args.table, "eval/quality/merging.py", page(json.loads(args.json.read_text()))
        )
        return
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    learned = args.steps * args.rows
    text = windows(tokenizer, args.train, learned + args.calibrate)
    judged = windows(tokenizer, args.held_out, args.judge)
    fp4pass.convert(model, args.scheme, "sse")
    if not (args.adapter / "adapter_config.json").exists():
        train(copy.deepcopy(model), text[:learned].split(args.rows), args.adapter)
    about = {
        **facts("cpu", "peft", model=args.model),
        "model": args.model.name,
        "scheme": args.scheme,
        "steps": args.steps,
        "trained_tokens": learned * WINDOW,
    }
    results = Results(args.json, about)
    known = {row["method"] for row in results.rows}
    for method in [each for each in args.methods if each not in known]:
        tuned = peft.PeftModel.from_pretrained(copy.deepcopy(model), args.adapter).eval()
        losses = {}
        if method == args.methods[0]:
            losses["loss_adapter"] = loss(tuned, judged)
            with tuned.disable_adapter():
                losses["loss_base"] = loss(tuned, judged)
        began = time.perf_counter()
        data = text[learned:].split(BATCH)
        found = fp4pass.merge(tuned, method, data=data, held_out=judged, progress=False)
        print(found, flush=True)
        row = {name: value for name, value in found.to_dict().items() if name != "layers"}
        losses["loss"] = loss(found.model, judged)
        results.put(
            {
                "method": method,
                "layers": len(found.layers),
                **row,
                **losses,
                "seconds": round(time.perf_counter() - began, 1),
            }
        )


def windows(tokenizer: Any, path: Path, count: int) -> Tensor:
    """Return the first tokens of a text as windows, spread evenly over it."""
    ids = torch.tensor(tokenizer(path.read_text("utf-8"), verbose=False)["input_ids"])
    whole = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    return whole[torch.linspace(0, len(whole) - 1, count).long()]


def train(model: Any, batches: Any, folder: Path) -> None:
    """Train an adapter on dense weights of the same values, which is faster here, and keep it."""
    fp4pass.dequantize(model)
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    tuned = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=RATE)
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 10) * (1 - step / len(batches))
        found = tuned(input_ids=batch, labels=batch).loss
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {float(found.detach()):.3f}", flush=True)
    tuned.save_pretrained(folder)


@torch.no_grad()
def loss(model: nn.Module, ids: Tensor) -> float:
    """Return the mean loss of the next token."""
    found = [float(model(input_ids=each, labels=each).loss) for each in ids.split(BATCH)]
    return math.fsum(found) / len(found)


def page(found: Mapping[str, Any]) -> str:
    """Return the table: the KL of each method, and how much of the adapter is left."""
    first = found["rows"][0]
    rows = sorted(found["rows"], key=lambda row: METHODS.index(row["method"]))
    without = first["kl_without"]
    lines = [["not merged", "0", percent(1), percent(1), _loss(first["loss_adapter"])]]
    for row in rows:
        part = percent(1 - row["kl_after"] / without)
        name, kept = f'`"{row["method"]}"`', percent(row["kept"])
        lines.append([name, _kl(row["kl_after"]), part, kept, _loss(row["loss"])])
    lines.append(["no adapter", _kl(without), percent(0), percent(0), _loss(first["loss_base"])])
    header = ["merged by", "KL to base + adapter", "of the base's KL removed", "`kept`", "loss"]
    statistics = max(row["tokens"] for row in rows)
    return (
        f"{table(header, lines, left=1)}\n"
        f"{found['model']} in {found['scheme']} by `sse`; an adapter of rank {RANK} on its "
        f"{first['layers']} packed layers, after {found['steps']} steps.\nKL and loss on "
        f"{first['held_out_tokens']:,} held-out tokens, statistics of {statistics:,}:\n"
        f"`{found['command']}`\n"
    )


def _kl(value: float) -> str:
    return f"{value:.4f}"


def _loss(value: float) -> str:
    return f"{value:.3f}"


if __name__ == "__main__":
    main()
