"""What distillation is worth: KL and perplexity before and after, by format, inputs and tokens.

    python eval/distill.py [--model DIR --calib FILE --text FILE --text FILE] [--json OUT]
    python eval/distill.py --table docs/quality.md --json OUT

Each row is converted with `Gptq(target="cross", damping=0.5)`, sequentially, trained by
`fp4pass.distill` as it is by default on all of `--calib`, and measured before and after on the same
windows of each text beside the original; then, for one of them, on fewer tokens of `--calib`. What
is in OUT already is not measured again. --table writes a table of it between its marks in a page.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import command, machine
from quality import compared, make_parser, measure, measures, opened, read
from tables import write_between
from torch import nn

import fp4pass
from fp4pass.evaluation import token_windows
from fp4pass.methods import Gptq

METHOD = Gptq(target="cross", damping=0.5)

# Format, whether inputs stay in floating point, the scales of inputs.
CASES = (
    ("nvfp4", True, "naive"),
    ("nvfp4", False, "naive"),
    ("nvfp4", False, "sse"),
    ("mxfp4", True, "naive"),
    ("mxfp4", False, "naive"),
)

# Windows to train on, for the first two cases; all where there are fewer.
SWEEP = (16, 64)


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(windows=32)
    parser.add_argument("--table", type=Path, help="the page, to which --json is written")
    args = parser.parse_args()
    if args.table:
        write_between(args.table, "eval/distill.py", table(json.loads(args.json.read_text())))
        return
    args.text = args.text or [args.model / "eval.txt"]
    model, tokenizer = opened(args, torch.float32)
    model.to(args.device)
    everything = token_windows(tokenizer, read(args.calib), window=args.window)
    originals = measure(model, None, tokenizer, args)
    result: dict[str, Any] = {
        "command": command(args.model),
        **machine(args.device),
        "model": args.model.name,
        "dtype": "float32",
        "window": args.window,
        "calibration": {"file": args.calib.name, "windows": args.samples},
        "original": {name: measures(found) for name, found in originals.items()},
        "rows": [],
    }
    if args.json and args.json.exists():
        result["rows"] = json.loads(args.json.read_text())["rows"]
    done = {tuple(row["key"]) for row in result["rows"]}
    for case in CASES:
        wanted = [None, *(SWEEP if case in CASES[:2] else ())]
        start = None
        for windows in wanted:
            key = (*case, windows)
            if key in done:
                continue
            if start is None:
                start = converted(model, everything, case, args)
            chosen = everything
            if windows is not None:
                chosen = everything[torch.arange(windows) * len(everything) // windows]
            result["rows"].append(row_of(start, model, chosen, key, originals, tokenizer, args))
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result["rows"][-1])[:400], flush=True)


def converted(model: nn.Module, windows: torch.Tensor, case: Sequence[Any], args: Any) -> nn.Module:
    """The start: error feedback for the errors of the layers before."""
    fmt, weight_only, scales = case
    prepared = fp4pass.prepare(copy.deepcopy(model), METHOD, sequential=True)
    count = min(args.samples, len(windows))
    calib = windows[torch.arange(count) * len(windows) // count]
    fp4pass.calibrate(prepared, calib.split(args.batch_size), progress=False)
    options = {"weight_only": weight_only, "activation_scales": scales}
    return fp4pass.convert(prepared, fmt, METHOD, **options)


def row_of(
    start: nn.Module,
    original: nn.Module,
    windows: torch.Tensor,
    key: Sequence[Any],
    originals: dict[str, Any],
    tokenizer: Any,
    args: Any,
) -> dict[str, Any]:
    """A model before and after."""
    before = measure(start, original, tokenizer, args)
    student = copy.deepcopy(start)
    is_cuda = torch.device(args.device).type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    found = fp4pass.distill(student, original, windows, progress=False)
    seconds = time.perf_counter() - began
    memory = torch.cuda.max_memory_allocated() if is_cuda else None
    after = measure(student, original, tokenizer, args)
    return {
        "key": list(key),
        "seconds": seconds,
        "memory": memory,
        "distilled": found.to_dict(),
        "texts": {
            name: {
                "before": compared(before[name], originals[name], {}),
                "after": compared(each, originals[name], {"start": before[name]}),
            }
            for name, each in after.items()
        },
    }


def table(result: dict[str, Any]) -> str:
    """Markdown: rows by case, then by tokens."""
    versions = ", ".join(f"{name} {each}" for name, each in result["versions"].items())
    texts = list(result["original"])
    head = ["weights, inputs", "trained on"]
    for text in texts:
        head += [f"KL, {text}", "perplexity", "of the original"]
    head += ["tokens read", "seconds", "GB"]
    lines = [
        f"{result['device']}; {versions}.",
        "",
        f"    {result['command']}",
        "",
        f"| {' | '.join(head)} |",
        f"| --- | {' | '.join(['---:'] * (len(head) - 1))} |",
    ]
    for row in result["rows"]:
        fmt, weight_only, scales, _ = row["key"]
        inputs = "float" if weight_only else f"4 bit, {scales}"
        facts = row["distilled"]
        cells = [f"{fmt}, {inputs}", f"{facts['distinct_tokens']:,}"]
        for text in texts:
            before, after = (row["texts"][text][each] for each in ("before", "after"))
            cells.append(f"{before['kl']['value']:.4f} to **{after['kl']['value']:.4f}**")
            both = [each["perplexity"]["value"] for each in (before, after)]
            cells.append(f"{both[0]:.4g} to {both[1]:.4g}")
            ratios = [each["change"]["perplexity_ratio"]["value"] for each in (before, after)]
            cells.append(" to ".join(f"{100 * (each - 1):+.2f} %" for each in ratios))
        memory = "" if row["memory"] is None else f"{row['memory'] / 1e9:.1f}"
        cells += [f"{facts['tokens']:,}", f"{row['seconds']:.0f}", memory]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
