"""The table and the chart of other libraries in README, each number from eval/results.

python -m eval.pages.readme --table README.md --docs docs
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eval.bench import engines
from eval.bench.harness import number
from eval.charts import MARKERS, Panel, Points, Scale, write_png
from eval.pages.tables import ROOT, table, unique, write_between

RESULTS = ROOT / "eval" / "results"
QUALITY = "peers-quality/smollm2.json"
# Ours beside bf16, and the libraries of an older run.
SPEED, OTHERS = "generate-h200.json", "generate-peers-h200.json"
# One layer beside the kernels of engines.
ENGINES, LAYER = "engines-h200.json", (14336, 4096)

# The rows: library, weights, what chose them, the run in the results on quality, and its name in
# those on speed, which does not depend on who chose the codes.
ROWS = [
    ("fp4pass", "nvfp4", '`quality="best"`', "nvfp4 best", "fp4pass nvfp4"),
    ("fp4pass", "nvfp4", '`quality="good"`', "nvfp4 good", "fp4pass nvfp4"),
    ("fp4pass", "nvfp4", '`quality="fast"`, no data', "nvfp4 fast", "fp4pass nvfp4"),
    ("auto-round", "nvfp4", "200 iterations", "NVFP4 200 2", None),
    ("llm-compressor", "nvfp4", "GPTQ, expanded mse", "NVFP4A16 gptq nvfp4_expanded_mse", None),
    ("llm-compressor", "nvfp4", "GPTQ", "NVFP4A16 gptq default", None),
    ("llm-compressor", "nvfp4", "round to nearest", "NVFP4A16 rtn default", None),
    ("ModelOpt", "nvfp4", "default scales", "NVFP4_DEFAULT_CFG", None),
    ("torchao", "nvfp4", "round to nearest", "NVFP4", None),
    ("torchao", "int4", "groups of 64", None, "torchao int4"),
    ("bitsandbytes", "nf4", "blocks of 64", "nf4", "bitsandbytes nf4"),
]
SHAPES = ("Qwen3-4B", "Llama-3-8B")
# The distribution of a library that has another name.
PACKAGES = {"llm-compressor": "llmcompressor", "ModelOpt": "nvidia-modelopt"}


def main() -> None:
    """Write the table into a page, and the chart into a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--docs", type=Path)
    args = parser.parse_args()
    write_between(args.table, "eval/pages/readme.py", f"{text()}{of_engines()}")
    if args.docs:
        draw(args.docs / "comparison.png")


def text() -> str:
    """Return the table and where its numbers come from."""
    quality, speed, others = (
        json.loads((RESULTS / name).read_text("utf-8")) for name in (QUALITY, SPEED, OTHERS)
    )
    by = {(row["library"], row["run"]): row for row in quality["rows"]}
    of_others, of_both = (
        {(r["by"], r["model"]): r["decode_tokens_per_second"] for r in rows}
        for rows in (others["rows"], others["rows"] + speed["rows"])
    )
    texts = quality["texts"]
    rows = [["(original)", "bf16", "", *["0"] * len(texts), "", *fast("bf16", of_both)]]
    versions = {}
    for library, weights, how, run, timed in ROWS:
        package = PACKAGES.get(library, library)
        found = by[package, run] if run else {}
        kls = [found["W4A16"][name]["kl"]["value"] for name in texts] if found else []
        shown = [f"{kl:.3f}" for kl in kls] or ["-"] * len(texts)
        seconds = f"{found['cpu_seconds']:,.0f}" if found else "-"
        rows.append([library, weights, how, *shown, seconds, *fast(timed, of_both)])
        if found and library != "fp4pass":
            versions[library] = found["versions"][package]
    header = ["library", "weights", "by", *(f"KL, {name}" for name in texts), "CPU s"]
    header += [f"{shape}, tokens/s" for shape in SHAPES]
    windows = next(iter(texts.values()))["windows"]
    return (
        f"{table(header, rows, left=3)}\n"
        f"KL to the original: SmolLM2-135M-Instruct, weights only, {windows} windows of "
        f"{quality['window']} tokens of each text. All methods\nthat calibrate read the same "
        f"{quality['calibration']['tokens']:,} tokens, written by the model. auto-round tuned "
        f"with float inputs, in batches of 2 windows.\n[JSON](eval/results/{QUALITY}); "
        f"[more of each](docs/peers.md);\n"
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}.\n"
        f"Tokens/s: random weights of these shapes, compiled, batch 1, on one {speed['machine']}\n"
        f"([JSON](eval/results/{SPEED})); torchao and bitsandbytes on another one, where bf16\n"
        f"reached {' and '.join(fast('bf16', of_others))} ([JSON](eval/results/{OTHERS})). A dash "
        "means not measured.\n"
    )


def of_engines() -> str:
    """Return the table of one layer beside the kernels of engines."""
    result = json.loads((RESULTS / ENGINES).read_text("utf-8"))
    times, names = engines.index_rows(result), engines.there(result)
    every = list(dict.fromkeys(row["rows"] for row in result["rows"]))
    lines = [["bf16", engines.CUBLAS, "bf16", "bf16"]]
    for title, kind, fmt, by in engines.GROUPS:
        lines += [[title, name, kind, fmt] for name in by if name in names]
    cells = [
        [title, name, *(number(times.get((*LAYER, m, kind, fmt, name))) for m in every)]
        for title, name, kind, fmt in lines
    ]
    header = ["weights", "by", *(f"{m} row{'s' * (m > 1)}, us" for m in every)]
    of_each = "; ".join(f"{name}: {how}" for name, how in result["contenders"].items())
    size = " x ".join(map(str, LAYER))
    return (
        f"\nOne linear layer of {size} beside what vLLM runs on Hopper, on one "
        f"{result['machine']}:\n\n{table(header, cells, left=2)}\n"
        f"{of_each}.\n[More shapes](docs/performance.md#beside-humming-and-marlin), "
        f"[JSON](eval/results/{ENGINES}).\n"
    )


def fast(name: str | None, tokens: dict[tuple[str, str], float]) -> list[str]:
    """Return tokens a second for each shape."""
    return [f"{tokens[name, shape]:.0f}" if name else "-" for shape in SHAPES]


def draw(path: Path) -> None:
    """Draw KL on the first text by seconds of every run, a series for each library."""
    found = json.loads((RESULTS / QUALITY).read_text("utf-8"))
    first = next(iter(found["texts"]))
    finished = [row for row in found["rows"] if "failed" not in row]
    names = {package: name for name, package in PACKAGES.items()}
    series = []
    for which, library in enumerate(unique(finished, "library")):
        rows = sorted(
            (row for row in finished if row["library"] == library),
            key=lambda row: row["cpu_seconds"],
        )
        series.append(
            Points(
                [row["cpu_seconds"] for row in rows],
                [row["W4A16"][first]["kl"]["value"] for row in rows],
                label=names.get(library, library),
                color=which,
                marker=MARKERS[which],
                line="-" if library == "fp4pass" else "",
            )
        )
    panel = Panel(
        series,
        title=f"SmolLM2-135M-Instruct, weights in 4 bits: KL to the original, {first}",
        x=Scale("CPU seconds to quantize", log=True, grid=True),
        y=Scale("KL, nats per token", low=0, grid=True),
        width=7,
        height=3.4,
    )
    write_png([[panel]], path, columns=3)


if __name__ == "__main__":
    main()
