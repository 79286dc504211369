"""Write docs/peers.md and its pictures from results of eval/quality/peers.py.

    python -m eval.pages.peers [--results DIR] [--docs DIR]

Every number comes from a JSON of eval/results/peers-quality.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eval.pages.figures import draw_peers
from eval.pages.tables import (
    ROOT,
    listed,
    number,
    origin,
    parse_args,
    signed,
    table,
    unique,
    with_interval,
)
from eval.quality.peers import BASE, PEERS

Found = Mapping[str, Any]
Row = Mapping[str, Any]

INTRODUCTION = Path(__file__).with_name("peers_introduction.md")

KINDS = {"W4A16": "weights only", "W4A4": "inputs in 4 bits too"}


def main() -> None:
    """Write the page and its pictures."""
    args = parse_args(__doc__, ROOT / "eval" / "results" / "peers-quality")
    found = load(args.results)
    (args.docs / "peers.md").write_text(page(found), encoding="utf-8")
    for stem, each in found.items():
        draw_peers(each, args.docs / f"peers-{stem}.png")


def load(folder: Path) -> dict[str, Found]:
    """Return all results by the stem of their file, the largest model first.

    Raises:
        SystemExit: there are none.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise SystemExit(f"{folder}: there are no results.")
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in files}
    return dict(sorted(found.items(), key=lambda item: -item[1]["parameters"]))


def page(results: Mapping[str, Found]) -> str:
    """Return the whole page."""
    lines = [INTRODUCTION.read_text("utf-8").strip(), ""]
    for stem, found in results.items():
        lines += section(stem, found)
    return "\n".join(lines).rstrip() + "\n"


def section(stem: str, found: Found) -> Iterator[str]:
    """Return the lines of one model."""
    yield f"## {found['model']}"
    yield ""
    calibration = found["calibration"]
    yield (
        f"{found['parameters']:,} parameters, in float32; {calibration['windows']} windows of "
        f"{found['window']} tokens {of_file(calibration['file'])}. "
        f"All numbers are in [{stem}.json](../eval/results/peers-quality/{stem}.json)."
    )
    yield ""
    yield from origin(found)
    if "parts" in found:
        yield "in parts; `--there` measures weights that `eval/quality/peer_runs.py` wrote before:"
        yield ""
        yield from (f"    {each}" for each in found["parts"])
        yield ""
    yield f"![KL against seconds](peers-{stem}.png)"
    yield ""
    base = found["base"]
    finished = [row for row in found["rows"] if "failed" not in row]
    for fmt in unique(finished, "format"):
        rows = [row for row in finished if row["format"] == fmt]
        for text in found["texts"]:
            yield from of_format(rows, fmt, found["texts"][text]["file"], text, base)
        yield from better(rows, fmt, base)
    yield from failed(found)
    yield from not_run(found)


def of_file(name: str) -> str:
    """Return where calibration windows come from: a text, or token ids that the model wrote."""
    return "that the model wrote" if name.endswith(".pt") else f"of `{name}`"


def of_format(rows: list[Row], fmt: str, file: str, text: str, base: str = BASE) -> Iterator[str]:
    """Return the table of a format on one text, the least KL first."""
    yield f"`{fmt}`, `{file}`:"
    yield ""
    kinds = [kind for kind in KINDS if all(kind in row for row in rows)]
    header = ["library", "what"]
    for kind in kinds:
        header += [f"KL, {kind}", f"less {base}'s"]
    header += ["perplexity, W4A16", "CPU s", "MiB"]
    lines = []
    for row in sorted(rows, key=lambda row: row["W4A16"][text]["kl"]["value"]):
        cells = [row["library"], row["name"]]
        for kind in kinds:
            measured = row[kind][text]
            change = measured.get("change", {}).get("kl")
            cells.append(with_interval(measured["kl"], number))
            cells.append("" if change is None else with_interval(change, signed, bold=True))
        cells.append(number(row["W4A16"][text]["perplexity"]["value"]))
        cells += [cost(row), f"{row['peak_mb']:,.0f}"]
        lines.append(cells)
    yield table(header, lines, left=2)
    yield ""


def cost(row: Row) -> str:
    """Return seconds of the processor, or of a machine other than that of the file."""
    if "machine" in row:
        return f"{row['seconds']:,.0f} on {row['machine']}"
    return f"{row['cpu_seconds']:,.0f}"


def better(rows: list[Row], fmt: str, base: str = BASE) -> Iterator[str]:
    """Return where a peer has less KL than the base, a row of fp4pass."""
    found = [
        f"{row['library']}, {row['name']}: {text}, {KINDS[kind]}"
        for row in rows
        if row["library"] != "fp4pass"
        for kind in KINDS
        for text, measured in row.get(kind, {}).items()
        if "change" in measured and measured["change"]["kl"]["value"] < 0
    ]
    title = f"Less KL than `{base}` in {fmt}:"
    yield from listed(title, found, f"No other library has less KL than `{base}` in {fmt}.")
    yield ""


def failed(found: Found) -> Iterator[str]:
    """Return the runs that failed, with the reason that the library gave."""
    rows = [row for row in found["rows"] if "failed" in row]
    lines = [f"{row['library']}, {row['name']} ({row['format']}): {row['failed']}" for row in rows]
    if lines:
        yield from listed("Failed:", lines, "")
        yield ""


def not_run(found: Found) -> Iterator[str]:
    """Return the runs that this model lacks, of the formats that it has."""
    there = {(row["library"], row["run"]) for row in found["rows"]}
    formats = unique(found["rows"], "format")
    left: dict[tuple[str, str], list[str]] = {}
    for library, run, fmt, name in PEERS:
        if fmt in formats and (library, run) not in there:
            left.setdefault((library, fmt), []).append(name)
    lines = [f"{library} in {fmt}: {'; '.join(names)}" for (library, fmt), names in left.items()]
    yield from listed("Not run on this model:", lines, "All were run.")
    yield ""


if __name__ == "__main__":
    main()
