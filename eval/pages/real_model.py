"""Write docs/real-model.md and its picture from what eval/quality/real_model.py left behind.

    python -m eval.pages.real_model [--results DIR] [--docs DIR]

Every number comes from a JSON of eval/results/real-model.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from eval.pages.tables import ROOT, group_by, number, origin, parse_args, percent, table
from fp4pass.reporting.charts import MARKERS, Panel, Points, Scale, write_png

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
TOKENS, WINDOW, OWN = 1 << 15, 512, ("own", "none")
# What other rows are compared with.
BASE = "hessian"
CALIBRATED = ("hessian", "gptq", "cross")


def main() -> None:
    """Write the page and its picture."""
    args = parse_args(__doc__, ROOT / "eval" / "results" / "real-model")
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in args.results.glob("*.json")}
    found = dict(sorted(found.items(), key=lambda item: -item[1]["parameters"]))
    (args.docs / "real-model.md").write_text(page(found), encoding="utf-8")
    draw(found, args.docs / "real-model.png")


def page(found: Mapping[str, Found]) -> str:
    """Return the page in Markdown."""
    parts = [INTRODUCTION.read_text("utf-8").strip(), "", "![KL by seconds](real-model.png)", ""]
    for each in found.values():
        parts += section(each)
    return "\n".join(parts).rstrip() + "\n"


def section(found: Found) -> Iterator[str]:
    """Yield all tables of one model."""
    original = found["original"]
    ends = [f"{name} {number(text['perplexity'])}" for name, text in original["texts"].items()]
    if "blimp" in original:
        ends.append(f"BLiMP {percent(original['blimp']['accuracy'])}")
    yield f"## {found['model']}\n"
    yield f"{found['parameters']:,} parameters. The original: {', '.join(ends)}.\n"
    yield "\n".join(origin(found))
    rows = found["rows"]
    for scheme, title in SCHEMES.items():
        here = [
            row
            for row in rows
            if row["scheme"] == scheme
            and row["data"] in OWN
            and row["window"] == WINDOW
            and row["tokens"] in (0, TOKENS)
            and " shrinkage " not in row["by"]
            and " damping " not in row["by"]
        ]
        if here:
            yield f"### {found['model']}: {title}\n"
            yield main_table(found, here)
    yield from calibration(found)


def main_table(found: Found, rows: Sequence[Row]) -> str:
    """Return the table of the recipes of one scheme, means over the seeds."""
    texts = list(found["original"]["texts"])
    pairs = ["BLiMP", "margin"] if "blimp" in found["original"] else []
    header = ["recipe", *(f"KL, {name}" for name in texts), f"to `{BASE}`", "99.9 %", "top-1"]
    header += [*(f"perplexity, {name}" for name in texts), *pairs, "s", "GB"]
    groups = list(group_by(rows, *KIND).values())
    base = next((g for g in groups if g[0]["by"] == BASE), None)
    lines = []
    for group in groups:
        first = texts[0]
        line = [f"`{group[0]['by']}`" if "=" in group[0]["by"] else group[0]["by"]]
        line += [spread(group, "texts", name, "kl") for name in texts]
        line.append("" if base is None or base is group else paired(group, base, first))
        line.append(f"{mean(group, 'texts', first, 'kl_999'):.2f}")
        line.append(f"{mean(group, 'texts', first, 'top1'):.3f}")
        line += [number(mean(group, "texts", name, "perplexity")) for name in texts]
        if pairs:
            line.append(percent(mean(group, "blimp", "accuracy")))
            line.append(f"{mean(group, 'blimp', 'margin_change'):.2f}")
        line.append(f"{mean(group, 'seconds'):.0f}")
        line.append(f"{mean(group, 'memory_gb'):.1f}")
        lines.append(line)
    return table(header, lines, left=1)


def calibration(found: Found) -> Iterator[str]:
    """Yield the tables of what a recipe calibrates on."""
    own = [row for row in found["rows"] if row["scheme"] == "nvfp4a16"]
    plain = [row for row in own if row["by"] in CALIBRATED]
    tables = {
        "what it calibrates on": ("data", [r for r in plain if at(r, tokens=TOKENS)]),
        "how many tokens of its own": ("tokens", [r for r in plain if at(r, data="own")]),
        "windows of WikiText": ("window", [r for r in plain if at(r, data="wiki")]),
    }
    for title, (key, rows) in tables.items():
        if len({row[key] for row in rows}) > 1:
            yield f"### {found['model']}: {title}\n"
            yield crossed(found, rows, key)
    trusted = [r for r in own if " shrinkage " in r["by"] or " damping " in r["by"]]
    if trusted:
        yield f"### {found['model']}: how far the Hessian is trusted\n"
        yield crossed(found, trusted, "data")


def at(row: Row, **wanted: Any) -> bool:
    """Return whether a row has values, and the default of the others."""
    usual = {"window": WINDOW} if wanted.get("data") != "wiki" else {"tokens": TOKENS}
    return all(row[key] == value for key, value in {**usual, **wanted}.items())


def crossed(found: Found, rows: Sequence[Row], key: str) -> str:
    """Return KL on both texts of each recipe, by the values of a key."""
    texts = list(found["original"]["texts"])
    values = sorted({row[key] for row in rows}, key=str if key == "data" else int)
    shown = [f"{value:,}" if isinstance(value, int) else value for value in values]
    lines = []
    for (by,), group in group_by(rows, "by").items():
        cells = []
        for value in values:
            here = [row for row in group if row[key] == value]
            kls = [spread(here, "texts", name, "kl") for name in texts]
            cells.append(" / ".join(kls) if here else "")
        lines.append([by, *cells])
    return f"KL on {' / '.join(texts)}.\n\n{table(['', *shown], lines, left=1)}"


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
    """Draw KL by seconds: a row of panels for each model, weights only and with inputs."""
    grid = []
    for each in found.values():
        first = next(iter(each["original"]["texts"]))
        line = []
        for scheme in ("nvfp4a16", "nvfp4"):
            rows = [r for r in each["rows"] if r["scheme"] == scheme and r["data"] in OWN]
            rows = [r for r in rows if r["window"] == WINDOW and r["tokens"] in (0, TOKENS)]
            groups = group_by(rows, "by")
            series = [
                Points(
                    [mean(group, "seconds")],
                    [mean(group, "texts", first, "kl")],
                    label=by,
                    color=i,
                    marker=MARKERS[i // 6 % len(MARKERS)],
                )
                for i, ((by,), group) in enumerate(groups.items())
                if " shrinkage " not in by and " damping " not in by
            ]
            line.append(
                Panel(
                    series,
                    title=f"{each['model']}, {SCHEMES[scheme]}",
                    x=Scale("seconds", log=True, grid=True),
                    y=Scale(f"KL, {first}", low=0, grid=True),
                )
            )
        grid.append(line)
    write_png(grid, path, columns=4)


if __name__ == "__main__":
    main()
