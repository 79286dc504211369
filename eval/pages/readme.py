"""The table of other libraries in README: quality and speed, each number from eval/results.

python -m eval.pages.readme --table README.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from eval.pages.tables import ROOT, number, table, write_between

RESULTS = ROOT / "eval" / "results"
QUALITY, SPEED = "peer-weights-cpu.json", "generate-peers-h200.json"

# The rows: library, weights, what chose them, its name in the results on quality, and in those on
# speed, which does not depend on who chose the codes.
ROWS = [
    (
        "fp4pass",
        "nvfp4",
        '`quality="best"`, text of its own',
        "fp4pass best, own text",
        "fp4pass nvfp4",
    ),
    ("fp4pass", "nvfp4", '`quality="best"`', "fp4pass best", "fp4pass nvfp4"),
    ("fp4pass", "nvfp4", '`quality="good"`', "fp4pass good", "fp4pass nvfp4"),
    ("fp4pass", "nvfp4", '`quality="fast"`, no data', "fp4pass fast", "fp4pass nvfp4"),
    ("llm-compressor", "nvfp4", "GPTQ", "llm-compressor GPTQ", None),
    ("llm-compressor", "nvfp4", "round to nearest", "llm-compressor", None),
    (
        "auto-round",
        "nvfp4",
        "200 iterations, tuned for 4-bit inputs",
        "auto-round, 200 iterations",
        None,
    ),
    ("ModelOpt", "nvfp4", "default scales", "ModelOpt", None),
    ("torchao", "nvfp4", "round to nearest", "torchao", None),
    ("torchao", "int4", "groups of 64", None, "torchao int4"),
    ("bitsandbytes", "nf4", "blocks of 64", "bitsandbytes nf4", "bitsandbytes nf4"),
]
SHAPES = ("Qwen3-4B", "Llama-3-8B")


def main() -> None:
    """Write the table into a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", type=Path, required=True)
    write_between(parser.parse_args().table, "eval/pages/readme.py", text())


def text() -> str:
    """Return the table and where its numbers come from."""
    quality, speed = (json.loads((RESULTS / name).read_text("utf-8")) for name in (QUALITY, SPEED))
    by = {row["by"]: row for row in quality["rows"]}
    tokens = {(r["by"], r["model"]): r["decode_tokens_per_second"] for r in speed["rows"]}
    original = number(quality["original"]["perplexity"])
    rows = [["(original)", "bf16", "", "0", original, *fast("bf16", tokens)]]
    for library, weights, how, name, timed in ROWS:
        found = by.get(name, {})
        kl = f"{found['kl']['value']:.4f}" if found else "-"
        perplexity = number(found["perplexity"]) if found else "-"
        rows.append([library, weights, how, kl, perplexity, *fast(timed, tokens)])
    header = ["library", "weights", "by", "KL", "perplexity", *(f"{s}, tokens/s" for s in SHAPES)]
    versions = dict(row for row in map(version, by.values()) if row[0] != "fp4pass")
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        f"{table(header, rows, left=3)}\n"
        f"KL to the original and perplexity: {quality['model']} of this repository, weights only, "
        f"{quality['windows']} windows of\n{quality['window']} tokens that nobody calibrated on. "
        "Rows that calibrate read one text, but for the row that names its own.\n"
        f"[JSON](eval/results/{QUALITY});\n{named}.\n"
        f"Tokens/s: random weights of these shapes, compiled, batch 1, on one {speed['machine']}\n"
        f"([JSON](eval/results/{SPEED})). A dash means not measured.\n"
    )


def fast(name: str | None, tokens: dict[Any, float]) -> list[str]:
    """Return tokens a second for each shape."""
    return [f"{tokens[name, shape]:.0f}" if name else "-" for shape in SHAPES]


def version(row: dict[str, Any]) -> tuple[str, str]:
    """Return the library of a row and its version."""
    return row["by"].split(",")[0].split(" ")[0], row["version"]


if __name__ == "__main__":
    main()
