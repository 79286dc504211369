"""What `quality="fast"`, "good" and "best" are worth on a model: KL against seconds.

    python -m eval.quality.qualities --model FOLDER --text FILE [FILE ...] --json FILE
    python -m eval.quality.qualities --json FILE --table docs/quality.md

Weights only, in nvfp4. The model writes 32,768 tokens once, which "good" and "best" calibrate on.
Of each text the first 200,000 characters are cut into windows, of which 16 are measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from eval.pages.tables import table, write_between
from eval.record import facts
from fp4pass.quality import QUALITIES

SCHEME, TOKENS, CHARACTERS = "nvfp4a16", 1 << 15, 200_000
OPTIONS = {"window": 512, "windows": 16, "progress": False}


def main() -> None:
    """Measure a model, or write the table of one that was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", default=[])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table:
        text = page(json.loads(args.json.read_text("utf-8")), args.json)
        write_between(args.table, "eval/quality/qualities.py", text)
        return
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = {path.stem: path.read_text("utf-8")[:CHARACTERS] for path in args.text}
    began = time.process_time()
    own = fp4pass.calibration.sample(model, tokenizer, tokens=TOKENS)
    found: dict[str, Any] = {
        **facts(args.device, model=args.model),
        "model": args.model.name,
        "scheme": SCHEME,
        "tokens": TOKENS,
        "windows": OPTIONS["windows"],
        "window": OPTIONS["window"],
        "sampling_cpu_seconds": time.process_time() - began,
        "rows": [],
    }
    runs: list[tuple[str, dict[str, Any]]] = [("naive", {"method": "naive"})]
    runs += [(name, {"quality": name, "data": own}) for name in QUALITIES]
    for name, options in runs:
        packed = copy.deepcopy(model)
        began = time.process_time()
        fp4pass.convert(packed, SCHEME, **options)
        row: dict[str, Any] = {"by": name, "cpu_seconds": time.process_time() - began, "texts": {}}
        for title, text in texts.items():
            here = fp4pass.evaluate(packed, tokenizer, text, model, **OPTIONS)
            low, high = here.intervals["kl"]
            row["texts"][title] = {"kl": here.kl, "low": low, "high": high}
        found["rows"].append(row)
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(name, row, flush=True)


def page(found: dict[str, Any], path: Path) -> str:
    """Return the table, and how it was measured."""
    titles = [*found["rows"][0]["texts"]]
    rows = [
        [
            f"`{row['by']}`" if row["by"] in QUALITIES else row["by"],
            *(f"{row['texts'][title]['kl']:.4f}" for title in titles),
            f"{row['cpu_seconds']:.0f}",
        ]
        for row in found["rows"]
    ]
    header = ["quality", *(f"KL, {title}" for title in titles), "CPU seconds"]
    return (
        f"{table(header, rows, left=1)}\n"
        f"{found['model']}, {found['scheme']}, KL in nats a token over {found['windows']} windows "
        f"of {found['window']} tokens.\n`good` and `best` calibrate on {found['tokens']:,} tokens "
        f"that the model wrote, which took {found['sampling_cpu_seconds']:.0f} CPU seconds\n"
        f"([JSON](../eval/results/qualities/{path.name}), with the command).\n"
    )


if __name__ == "__main__":
    main()
