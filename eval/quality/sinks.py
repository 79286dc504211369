"""Which tokens make a Hessian: the share of each layer's input energy that a few of them have.

    python -m eval.quality.sinks --model FOLDER --windows IDS.pt --json OUT
    python -m eval.quality.sinks --json FILE --table docs/calibration.md

IDS is token ids [n, length]. The energy of a layer is the trace of its Hessian, the sum of |x|^2
over tokens. Given are the shares of the first tokens of windows, of the special tokens of the
tokenizer, and of the thousandth of all tokens with the largest |x|.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.pages.tables import group_by, mean, percent, table, write_between
from eval.record import Results, facts

SHARES = ("first", "special", "largest")
BATCH = 4


def main() -> None:
    """Measure a model, or write the table of one that was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--windows", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table:
        found = json.loads(args.json.read_text("utf-8"))
        write_between(args.table, "eval/quality/sinks.py", page(found))
        return
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    special = AutoTokenizer.from_pretrained(args.model).all_special_ids
    ids = torch.load(args.windows).long()
    about = {
        **facts("cpu", model=args.model),
        "model": args.model.name,
        "tokens": ids.numel(),
        "share_first": 1 / ids.shape[1],
        "share_special": float(torch.isin(ids, torch.tensor(special)).double().mean()),
    }
    results = Results(args.json, about, again=True)
    for name, squares in energies(model, ids).items():
        results.put({"layer": name, **shares(squares, ids, special)})


@torch.no_grad()
def energies(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Return |x|^2 of the inputs of each linear, float64 [n, length]."""
    found: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            found.setdefault(name, []).append(args[0].double().square().sum(-1))

        return hook

    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    handles = [m.register_forward_pre_hook(watch(name)) for name, m in linears]
    for batch in ids.split(BATCH):
        model(batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def shares(squares: Tensor, ids: Tensor, special: list[int]) -> dict[str, float]:
    """Return the shares of the energy [n, length] of one layer."""
    total = squares.sum()
    largest = squares.flatten().topk(max(1, squares.numel() // 1000)).values
    parts = (squares[:, 0], squares[torch.isin(ids, torch.tensor(special))], largest)
    return {name: float(part.sum() / total) for name, part in zip(SHARES, parts, strict=True)}


def page(found: Mapping[str, Any]) -> str:
    """Return the table: means over the layers of a kind, and the largest of them."""
    rows = [{**row, "kind": row["layer"].rpartition(".")[2]} for row in found["rows"]]
    lines = []
    for (kind,), group in group_by(rows, "kind").items():
        line = [f"`{kind}`"]
        for share in SHARES:
            most = max(row[share] for row in group)
            line.append(f"{percent(mean(row[share] for row in group))} ({percent(most)})")
        lines.append(line)
    header = ["input of", "first tokens", "special tokens", "the largest thousandth"]
    first, special = (percent(found[f"share_{name}"]) for name in SHARES[:2])
    return (
        f"{table(header, lines, left=1)}\n"
        f"{found['model']}, {found['tokens']:,} tokens that it wrote: the share of "
        r"$\lvert x \rvert^2$, a mean "
        f"over the layers (and the maximum).\n{first} of the tokens are the first of a window, "
        f"{special} are special.\n"
    )


if __name__ == "__main__":
    main()
