"""Write docs/real-model.md and its picture from what eval/quality/real_model.py left behind.

    python -m eval.pages.real_model [--results DIR] [--docs DIR]

Every number comes from a JSON of eval/results/real-model.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from eval.charts import MARKERS, Panel, Points, Scale, write_png
from eval.pages.tables import ROOT, group_by, number, origin, parse_args, percent, table
from eval.quality.grids import GRIDS, Run

Found = Mapping[str, Any]
Row = Mapping[str, Any]

INTRODUCTION = Path(__file__).with_name("real_model_introduction.md")

# Rows of one kind differ in their seeds alone.
KIND = ("by", "scheme", "data", "tokens", "window")
SCHEMES = {
    "nvfp4a16": "NVFP4, weights only",
    "nvfp4": "NVFP4, weights and inputs",
    "mxfp4a16": "MXFP4, weights only",
    "mxfp4": "MXFP4, weights and inputs",
}
# Results of recovery.py, and what of them is shown.
TASKS = "recovery-"
IN_FP8 = "fp8-inputs-"
METRICS = (
    ("blimp_local", "acc"),
    ("next_local", "acc_norm"),
    ("wikitext_local", "word_perplexity"),
)


def main() -> None:
    """Write the page and its picture."""
    args = parse_args(__doc__, ROOT / "eval" / "results" / "real-model")
    read = {path.stem: json.loads(path.read_text("utf-8")) for path in args.results.glob("*.json")}
    found = {name: each for name, each in read.items() if not name.endswith("-cpu")}
    tasks = {name: found.pop(name) for name in list(found) if name.startswith(TASKS)}
    in_fp8 = [found.pop(name) for name in list(found) if name.startswith(IN_FP8)]
    found = dict(sorted(found.items(), key=lambda item: -item[1]["parameters"]))
    (args.docs / "real-model.md").write_text(page(found, in_fp8, tasks.values()), encoding="utf-8")
    draw(found, args.docs / "real-model.png")


def page(found: Mapping[str, Found], in_fp8: Iterable[Found], tasks: Iterable[Found]) -> str:
    """Return the page in Markdown."""
    parts = [INTRODUCTION.read_text("utf-8").strip(), "", "![KL by seconds](real-model.png)", ""]
    for each in found.values():
        parts += section(each)
    for each in in_fp8:
        parts += [f"## {each['model']}: inputs in FP8\n", by_inputs(each), *origin(each)]
    for each in tasks:
        parts += recovery(each)
    return "\n".join(parts).rstrip() + "\n"


def section(found: Found) -> Iterator[str]:
    """Yield all tables of one model."""
    original = found["original"]
    ends = [f"{name} {number(text['perplexity'])}" for name, text in original["texts"].items()]
    if "blimp" in original:
        ends.append(f"BLiMP {percent(original['blimp']['accuracy'])}")
    yield f"## {found['model']}\n"
    yield f"{found['parameters']:,} parameters. The original: perplexity {', '.join(ends)}.\n"
    yield "\n".join(origin(found))
    for title, name, lines, least in (
        ("recipes by name", "qualities", named, 1),
        ("weights only", "methods", main_table, 6),
        ("every scheme", "methods", by_scheme, len(GRIDS["methods"]) // 2),
        ("inputs in 4 bits", "inputs", inputs, 1),
    ):
        rows = of_grid(found, name)
        if len(rows) >= least:
            yield f"### {found['model']}: {title}\n"
            yield lines(found, rows)
    yield from calibration(found)


def of_grid(found: Found, name: str) -> list[Row]:
    """Return the rows of a grid, in its order."""
    rows = {tuple(row[key] for key in Run.KEY): row for row in found["rows"]}
    return [rows[run.key] for run in GRIDS[name] if run.key in rows]


def named(found: Found, rows: Sequence[Row]) -> str:
    """Return what the recipes with a name give and take."""
    texts = list(found["original"]["texts"])
    header = ["recipe", "scheme", *(f"KL, {name}" for name in texts)]
    header += [*(f"perplexity, {name}" for name in texts), "s", "GB"]
    lines = [
        [
            f"`{row['by']}`",
            f"`{row['scheme']}`",
            *(f"{row['texts'][name]['kl']:.4f}" for name in texts),
            *(number(row["texts"][name]["perplexity"]) for name in texts),
            f"{row['seconds']:.1f}",
            f"{row['memory_gb']:.1f}",
        ]
        for row in rows
    ]
    return table(header, lines, left=2)


def main_table(found: Found, rows: Sequence[Row]) -> str:
    """Return the table of the recipes with weights in nvfp4a16, means over the seeds."""
    texts = list(found["original"]["texts"])
    pairs = ["BLiMP", "margin"] if "blimp" in found["original"] else []
    header = ["recipe", *(f"KL, {name}" for name in texts), "to `naive`", "99.9 %", "top-1"]
    header += [*(f"perplexity, {name}" for name in texts), *pairs]
    groups = list(group_by([r for r in rows if r["scheme"] == "nvfp4a16"], *KIND).values())
    base = next(group for group in groups if group[0]["by"] == "naive")
    lines = []
    for group in groups:
        first = texts[0]
        line = [group[0]["by"], *(spread(group, "texts", name, "kl") for name in texts)]
        line.append("" if base is group else paired(group, base, first))
        line.append(f"{mean(group, 'texts', first, 'kl_999'):.2f}")
        line.append(f"{mean(group, 'texts', first, 'top1'):.3f}")
        line += [number(mean(group, "texts", name, "perplexity")) for name in texts]
        if pairs:
            line.append(percent(mean(group, "blimp", "accuracy")))
            line.append(f"{mean(group, 'blimp', 'margin_change'):.2f}")
        lines.append(line)
    return table(header, lines, left=1)


def by_scheme(found: Found, rows: Sequence[Row]) -> str:
    """Return KL on both texts of each recipe in each scheme."""
    return crossed(found, rows, "scheme", list(SCHEMES))


def by_inputs(found: Found) -> str:
    """Return KL of weights alone, and with inputs in FP8."""
    rows = of_grid(found, "fp8_inputs")
    return crossed(found, rows, "scheme", list(dict.fromkeys(row["scheme"] for row in rows)))


def inputs(found: Found, rows: Sequence[Row]) -> str:
    """Return KL by recipe, and by whether the model is smoothed and how inputs get their scales."""
    shown = []
    for row in rows:
        by, _, scales = row["by"].rpartition(", inputs ")
        kind = "smoothed, " if row["smoothing"] else ""
        name = f"{row['scheme']}: {by.removesuffix(', smoothed')}"
        shown.append({**row, "by": name, "kind": f"{kind}inputs `{scales}`"})
    return crossed(found, shown, "kind", list(dict.fromkeys(row["kind"] for row in shown)))


def calibration(found: Found) -> Iterator[str]:
    """Yield the tables of what a recipe calibrates on."""
    for title, key, name in (
        ("what it calibrates on", "data", "kinds"),
        ("how many tokens of its own", "tokens", "amounts"),
        ("windows of WikiText-2", "window", "windows"),
        ("how far the Hessian is trusted", "data", "shrinkage"),
    ):
        rows = of_grid(found, name)
        if len(rows) > len(GRIDS[name]) // 2:
            yield f"### {found['model']}: {title}\n"
            yield crossed(found, rows, key, list(dict.fromkeys(row[key] for row in rows)))


def crossed(found: Found, rows: Sequence[Row], key: str, columns: Sequence[Any]) -> str:
    """Return KL on both texts of each recipe, by the values of a key."""
    texts = list(found["original"]["texts"])
    shown = [f"{value:,}" if isinstance(value, int) else value for value in columns]
    lines = []
    for (by,), group in group_by(rows, "by").items():
        cells = []
        for value in columns:
            here = [row for row in group if row[key] == value]
            kls = [spread(here, "texts", name, "kl") for name in texts] if here else []
            cells.append("<br>".join(kls))
        lines.append([by, *cells])
    return f"KL on {', and below it on '.join(texts)}.\n\n{table(['', *shown], lines, left=1)}"


def recovery(found: Found) -> Iterator[str]:
    """Yield the table of tasks of lm-eval of one model."""
    metrics = [(name, key) for name, key in METRICS if name in found["original"]]
    header = ["", "scheme", *(f"{name}, {key}" for name, key in metrics), "other answers"]
    ends = [found["original"][name] for name, _ in metrics]
    shown = [
        f"{each[key]:.4f} ± {each[f'{key}_stderr']:.4f}"
        if f"{key}_stderr" in each
        else number(each[key])
        for each, (_, key) in zip(ends, metrics, strict=True)
    ]
    lines = [["the original", "", *shown, ""]]
    for (by, scheme), group in group_by(found["rows"], "by", "scheme").items():
        cells = []
        for name, key in metrics:
            middle = mean(group, "tasks", name, key)
            off = max(abs(each - middle) for each in values(group, "tasks", name, key))
            cells.append(
                f"{middle:.4f} ± {off:.4f}" if middle < 1 else f"{number(middle)} ± {off:.2g}"
            )
        changed = mean(group, "tasks", "blimp_local", "changed")
        lines.append([f"`{by}`", f"`{scheme}`", *cells, percent(changed)])
    yield f"## {found['model']}: tasks of lm-eval\n"
    yield (
        "The original has lm-eval's standard error. Recipes have the mean over three seeds of the "
        "calibration text, ± the largest distance of a\nseed from it. Other answers: the share of "
        "BLiMP's pairs whose answer differs from the original's.\n"
    )
    yield table(header, lines, left=2)
    yield "\n".join(origin(found))


def values(rows: Sequence[Row], *keys: str) -> list[float]:
    """Return a value of each row, by the keys that lead to it."""
    return [functools.reduce(lambda found, key: found[key], keys, row) for row in rows]


def mean(rows: Sequence[Row], *keys: str) -> float:
    """Return the mean of a value."""
    return statistics.mean(values(rows, *keys))


def spread(rows: Sequence[Row], *keys: str) -> str:
    """Return the mean of a value, and how far the seeds are from it."""
    middle = mean(rows, *keys)
    text = f"{middle:.4f}"
    if len(rows) == 1:
        return text
    return f"{text} ± {max(abs(each - middle) for each in values(rows, *keys)):.4f}"


def paired(rows: Sequence[Row], base: Sequence[Row], text: str) -> str:
    """Return the ratio of KL to that of other rows, with the interval over the same windows."""
    ours, others = (
        np.mean([row["texts"][text]["sums"] for row in group], axis=0)[:, 1]
        for group in (rows, base)
    )

    def ratio(a: Any, b: Any, axis: int) -> Any:
        return a.sum(axis) / b.sum(axis)

    found = stats.bootstrap(
        (ours, others), ratio, paired=True, vectorized=True, n_resamples=2000, rng=0
    ).confidence_interval
    value = ours.sum() / others.sum()
    return f"{value:.2f}<br>{found.low:.2f} to {found.high:.2f}"


def draw(found: Mapping[str, Found], path: Path) -> None:
    """Draw KL by seconds of the recipes with a name, a panel for each model and scheme."""
    panels = []
    for each in found.values():
        first = next(iter(each["original"]["texts"]))
        rows = of_grid(each, "qualities")
        for scheme in dict.fromkeys(row["scheme"] for row in rows):
            series = [
                Points(
                    [row["seconds"]],
                    [row["texts"][first]["kl"]],
                    label=row["by"],
                    color=i,
                    marker=MARKERS[i],
                )
                for i, row in enumerate(r for r in rows if r["scheme"] == scheme)
            ]
            panels.append(
                Panel(
                    series,
                    title=f"{each['model']}, {SCHEMES[scheme]}",
                    x=Scale("seconds", log=True, grid=True),
                    y=Scale(f"KL, {first}", low=0, grid=True),
                )
            )
    write_png([panels[i : i + 2] for i in range(0, len(panels), 2)], path, columns=3)


if __name__ == "__main__":
    main()
