"""What compute="fp8" costs: KL and perplexity beside products in the dtype of the input.

    python -m eval.quality.compute [--model DIR --calib FILE --text FILE --text FILE] --json OUT
    python -m eval.quality.compute --table docs/quality.md --text OUT [--text OUT ...]

Each format, with floating-point and with 4-bit inputs, is converted once by `hessian` and measured
both ways on the same windows: numbers of eval/quality/models.py, and the paired difference between
the two. --table writes a table of the files between its marks in a page.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import fp4pass
from eval.pages.tables import write_between
from eval.quality.models import compared, make_parser, measure, opened, read
from eval.record import facts
from fp4pass.evaluation import token_windows

METHOD, FORMATS = "hessian", ("nvfp4", "mxfp4")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--table", type=Path, help="the page; files follow as --text")
    args = parser.parse_args()
    if args.table:
        found = [json.loads(path.read_text()) for path in args.text]
        write_between(args.table, "eval/quality/compute.py", table(found))
        return
    args.text = args.text or [args.model / "eval.txt"]
    model, tokenizer = opened(args)
    calib = token_windows(tokenizer, read(args.calib), window=args.window, windows=args.samples)
    originals = measure(model, None, tokenizer, args)
    result: dict[str, Any] = {
        **facts(args.device, model=args.model),
        "model": args.model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "window": args.window,
        "calibration": {"file": args.calib.name, "tokens": calib.numel()},
        "method": METHOD,
        "original": {name: found.perplexity for name, found in originals.items()},
        "rows": [],
    }
    prepared = fp4pass.prepare(copy.deepcopy(model), METHOD)
    fp4pass.calibrate(prepared, calib.split(args.batch_size), progress=False)
    for fmt in FORMATS:
        for weight_only in (True, False):
            converted = copy.deepcopy(prepared)
            fp4pass.convert(converted, fmt, METHOD, weight_only=weight_only)
            before: dict[str, Any] = {}
            for compute in ("input", "fp8"):
                fp4pass.set_compute(converted, compute)
                kept = [row for row in fp4pass.report(converted).converted if row.note]
                found = measure(converted, model, tokenizer, args)
                row: dict[str, Any] = {"fmt": fmt, "weight_only": weight_only, "compute": compute}
                row["not_fp8"] = len(kept)
                simpler = {name: {"input": each} for name, each in before.items()}
                row["texts"] = {
                    name: compared(here, originals[name], simpler.get(name, {}))
                    for name, here in found.items()
                }
                before = found
                result["rows"].append(row)
                print(json.dumps(row)[:160], flush=True)
                if args.json:
                    args.json.write_text(json.dumps(result, indent=1) + "\n")


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: a row for each model, text, format and input."""
    lines = [
        "| model | text | weights, inputs | KL, `input` | KL, `fp8` | perplexity, both |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for result in results:
        for plain, fp8 in zip(result["rows"][::2], result["rows"][1::2], strict=True):
            for text, before in plain["texts"].items():
                after = fp8["texts"][text]
                inputs = "float" if plain["weight_only"] else "4 bit"
                perplexity = [f"{each['perplexity']['value']:.3f}" for each in (before, after)]
                cells = [result["model"], text, f"{plain['fmt']}, {inputs}"]
                cells += [_interval(before["kl"]), _interval(after["kl"]), ", ".join(perplexity)]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _interval(found: dict[str, float]) -> str:
    return f"{found['value']:.4f} ({found['low']:.4f} to {found['high']:.4f})"


if __name__ == "__main__":
    main()
