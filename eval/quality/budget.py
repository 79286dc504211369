"""Precision under a budget: what `fp4pass.allocate` chooses, beside uniform models of its size.

    python -m eval.quality.budget --model FOLDER --calib calib.txt --text eval.txt --json OUT
    python -m eval.quality.budget --json FILE ... --table docs/budget.md --picture docs/budget.png

Each choice is measured again, and with it the best uniform model of at most its bytes, on a text
that chose nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from eval.charts import Panel, Points, Scale, arrange, write_png
from eval.pages.tables import table, write_between
from eval.record import Results, facts
from fp4pass.lab import SCHEMES, Allocation
from fp4pass.lab.allocate import FLOAT, Candidate, cheapest, total
from fp4pass.record import scheme_fields

BITS, KLS = (4.75, 5.0, 5.5, 6.0), (0.01,)


def main() -> None:
    """Measure a model, or write the table and the picture of those that were measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--calib", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--method", default="sse")
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--bits", type=float, nargs="*", default=BITS)
    parser.add_argument("--kl", type=float, nargs="*", default=KLS)
    for name, value in (("windows", 8), ("held-out", 16), ("seq-len", 512), ("test", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, nargs="+", required=True)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    if args.table or args.picture:
        found = [json.loads(path.read_text("utf-8")) for path in args.json]
        if args.table:
            text = page(dict(zip(args.json, found, strict=True)))
            write_between(args.table, "eval/quality/budget.py", text)
        if args.picture:
            draw(found, args.picture)
        return
    run(args)


def run(args: argparse.Namespace) -> None:
    """Measure one model under all budgets."""
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    about = {
        **facts("cpu", model=args.model),
        "model": args.model.name,
        "method": args.method,
        "schemes": list(args.schemes),
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    results = Results(args.json[0], about, again=True)
    text = args.text.read_text("utf-8")
    test = fp4pass.evaluation.token_windows(tokenizer, text, window=args.seq_len, windows=args.test)
    budgets = [{"bits": each} for each in args.bits] + [{"kl": each} for each in args.kl]
    options: dict[str, Any] = {"windows": args.windows, "held_out": args.held_out}
    options |= {"data": args.calib.read_text("utf-8"), "tokenizer": tokenizer}
    options |= {"schemes": args.schemes, "method": args.method, "seq_len": args.seq_len}
    for budget in budgets:
        start = time.perf_counter()
        found = fp4pass.allocate(model, **budget, **options)
        seconds = round(time.perf_counter() - start, 1)
        plain = found.to_dict()
        results.about |= {"text": plain["text"], "curve": curve_of(found)}
        results.about["test_tokens"] = test.numel()
        results.about["groups"] = [
            {name: group[name] for name in ("layers", "weights", "costs")}
            for group in plain["groups"]
        ]
        more = tested(found, model, test, args.method)
        results.put({**row(found), "seconds": seconds, **more})


def curve_of(found: Allocation, points: int = 24) -> list[dict[str, float]]:
    """Return bits, bytes and predicted KL of the best choices by prediction, the smallest first."""
    costs = [group.costs for group in found.groups]
    weights = sum(group.weights for group in found.groups)
    sizes = [[cost.bytes for cost in each.values()] for each in costs]
    low, high = sum(map(min, sizes)), sum(map(max, sizes))
    best = {cheapest(costs, low + (high - low) * i / points, "bytes") for i in range(points + 1)}
    sums = sorted((total(costs, each) for each in best if each), key=lambda each: each.bytes)
    return [
        {"bits": 8 * each.bytes / weights, "bytes": each.bytes, "predicted": each.kl}
        for each in sums
    ]


def row(found: Allocation) -> dict[str, Any]:
    """Return what one choice is, and what was measured for it."""
    plain = found.to_dict()
    return {
        **plain["budget"],
        "chosen": plain["chosen"],
        "uniform": plain["uniform"],
        "is_uniform": found.is_uniform,
        "models": len(found.measured),
    }


def tested(found: Allocation, model: Any, test: Tensor, method: str) -> dict[str, Any]:
    """Return the KL of a choice and of the best uniform one on text that chose nothing."""

    def evaluated(each: Candidate) -> Any:
        rules = [
            (name, None if scheme == FLOAT else scheme_fields(scheme))
            for group, scheme in zip(found.groups, each.schemes, strict=True)
            for name in group.layers
        ]
        packed = fp4pass.convert(copy.deepcopy(model), method=method, rules=rules, progress=False)
        return fp4pass.evaluate(packed, None, test, model, progress=False)

    ours = evaluated(found.chosen)
    if found.uniform is None:
        return {"test_kl": ours.kl}
    if found.uniform.schemes == found.chosen.schemes:
        return {"test_kl": ours.kl, "test_kl_uniform": ours.kl}
    theirs = evaluated(found.uniform)
    difference = ours.difference(theirs).kl
    return {
        "test_kl": ours.kl,
        "test_kl_uniform": theirs.kl,
        "test_difference": [difference.value, difference.low, difference.high],
    }


def page(found: Mapping[Path, Mapping[str, Any]]) -> str:
    """Return the table of all models, and how each was measured."""
    lines, notes = [], []
    for path, each in found.items():
        for row in sorted(each["rows"], key=lambda row: ("kl" in row, row["chosen"]["bits"])):
            asked = f"{row['bits']:g} bits" if "bits" in row else f"KL {row['kl']:g}"
            chosen, uniform = row["chosen"], row["uniform"]
            line = [each["model"], asked, f"{chosen['bits']:.2f}", f"{chosen['predicted']:.4f}"]
            line += [f"{chosen['kl']:.4f}", f"{uniform['kl']:.4f}" if uniform else "-"]
            other = row.get("test_kl_uniform")
            line += [f"{row['test_kl']:.4f}", "-" if other is None else f"{other:.4f}"]
            line.append("-" if other is None else f"{row['test_kl'] / other:.2f}")
            lines.append(line)
        text = each["text"]
        notes.append(
            f"- {each['model']}: `{each['method']}`, {', '.join(each['schemes'])}; "
            f"{len(each['groups'])} groups on {text['measured']:,} tokens, models on "
            f"{text['held_out']:,} held out and {each['test_tokens']:,} of another text "
            f"([JSON](../eval/results/budget/{path.name}), with the command)."
        )
    header = ["model", "budget", "bits", "predicted", "held out", "uniform", "another text"]
    header += ["uniform there", "ratio"]
    return f"{table(header, lines, left=2)}\n" + "\n".join(notes) + "\n"


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw KL against bits for each model: the prediction, the choices, and uniform models."""
    write_png(arrange([curve(each) for each in found], 3), path, columns=min(len(found), 3))


def curve(found: Mapping[str, Any]) -> Panel:
    """Return the panel of one model."""
    points = [each for each in found["curve"] if each["predicted"] > 0]
    rows = found["rows"]

    def series(name: str, label: str, color: int) -> Points:
        each = [row[name] for row in rows if row[name]]
        return Points(
            [one["bits"] for one in each],
            [one["kl"] for one in each],
            label=label,
            color=color,
            y_ends=[(one.get("low") or one["kl"], one.get("high") or one["kl"]) for one in each],
        )

    line = Points(
        [each["bits"] for each in points],
        [each["predicted"] for each in points],
        label="predicted by the sum",
        color=0,
        marker="",
        line="-",
    )
    bits = [row[name]["bits"] for row in rows for name in ("chosen", "uniform") if row[name]]
    shown = [each["predicted"] for each in points if each["bits"] <= max(bits) + 0.5]
    return Panel(
        [
            line,
            series("uniform", "best uniform model, held out", 1),
            series("chosen", "chosen, held out", 2),
        ],
        title=found["model"],
        x=Scale("bits a weight", low=min(bits) - 0.2, high=max(bits) + 0.4, grid=True),
        y=Scale("KL, nats per token", low=min(shown) * 0.6, log=True, grid=True),
    )


if __name__ == "__main__":
    with torch.no_grad():
        main()
