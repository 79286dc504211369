"""The tables and the picture of eval/quality/distillation.py, each number from eval/results.

python -m eval.pages.distillation --table docs/learning.md --docs docs
python -m eval.pages.distillation --table docs/calibration.md
python -m eval.pages.distillation --table docs/development/notes.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from eval.charts import Panel, Points, Scale, write_png
from eval.pages.tables import ROOT, table, write_between

RESULTS = ROOT / "eval" / "results" / "distillation"
TEXTS = ("WikiText-2", "documents", "code", "web", "chats")
SCRIPT = "eval/pages/distillation.py"

# Of calibration.md: the text that "best" is calibrated on, with the files of the runs.
CALIBRATED = [
    ("plain and conversations, half each", "(('plain', 0.5), ('chats', 0.5)) 32768", "text"),
    ("the same, 65,536 tokens", "(('plain', 0.5), ('chats', 0.5)) 65536", "text"),
    ("plain", "(('plain', 1.0),) 32768", "text"),
    ("conversations", "(('chats', 1.0),) 32768", "text"),
    ("packaged", "(('mix', 1.0),) 32768", "text"),
    ("packaged, without code", "(('no-code', 1.0),) 32768", "text"),
    ("plain and packaged", "(('plain', 0.5), ('mix', 0.5)) 32768", "text"),
    ("a third each", "(('plain', 0.33), ('chats', 0.33), ('mix', 0.34)) 32768", "text"),
    ("a third each, **now**", "(('plain', 0.33), ('chats', 0.33), ('mix', 0.34)) 32768", "long"),
]
# Of learning.md: scheme, start, what was trained, and the run with its file.
RUNS = [
    ("nvfp4a16", "best", "4M tokens", "h200-others", "floats"),
    ("nvfp4a16", "best", "4M, other seed", "h200-long", "4M.1"),
    ("nvfp4a16", "good", "4M", "h200-schemes", "good"),
    ("nvfp4", "best", "4M", "h200-schemes", "w4a4"),
    ("nvfp4", "best", "8M", "h200-long", "nvfp4.8M"),
    ("mxfp4a16", "best", "4M", "h200-schemes", "mx"),
]

# Of the notes: what differs, from 4M tokens at rate 0.01 in steps of 16k.
TRIED = [
    ("own text alone; rate 0.005", "h200-rates", "r5"),
    ("own text alone", "h200-rates", "r10"),
    ("own text alone; rate 0.02", "h200-rates", "r20"),
    ("own text alone; latents begin at the values of codes", "h200-rates", "share0"),
    ("the same; at the float weights, rate 0.005", "h200-rates", "share1"),
    ("the same as the first, with block scales (LSQ)", "h200-rates", "scales"),
    ("with packaged text, codes alone", "h200-others", "a"),
    ("the same, with norms, embedding and head: the default", "h200-others", "floats"),
    ("windows that continue packaged text", "h200-others", "prompted"),
    ("latents begin at random in their cells", "h200-others", "dither"),
    ("Adam's eps 3e-7, rate 0.02", "h200-others", "eps"),
    ("steps of 64k, rate 0.03", "h200-others", "64k"),
]


def main() -> None:
    """Write the table of a page, and the picture into a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--docs", type=Path)
    args = parser.parse_args()
    files = {path.stem: json.loads(path.read_text("utf-8")) for path in RESULTS.glob("*.json")}
    write_between(args.table, SCRIPT, TABLES[args.table.stem](files))
    if args.docs:
        draw(files, args.docs / "distillation.png")


def row(files: dict[str, Any], name: str, run: str) -> dict[str, Any]:
    """Return the row of a run."""
    return dict(next(each for each in files[name]["rows"] if each["run"] == run))


def results(files: dict[str, Any]) -> str:
    """Return the table of what training reaches."""
    naive = {each["run"].split()[1]: each["texts"] for each in files["naive-cpu"]["rows"]}
    header = ["scheme", "start", "trained on", *TEXTS, "of naive's", "codes changed", "s"]
    rows = []
    for scheme, start, what, name, run in RUNS:
        found = row(files, name, run)
        first, last = found["evaluations"][0]["texts"], found["evaluations"][-1]
        kls = [f"{first[t]['kl']:.4f} → {last['texts'][t]['kl']:.4f}" for t in TEXTS]
        shares = [last["texts"][t]["kl"] / naive[scheme][t]["kl"] for t in TEXTS[:2]]
        rows.append(
            [
                f"`{scheme}`",
                f"`{start}`",
                what,
                *kls,
                ", ".join(f"{share:.2f}" for share in shares),
                f"{100 * last['codes_changed']:.1f} %",
                f"{last['seconds']:.0f}",
            ]
        )
    about = files["h200-others"]
    return (
        f"{table(header, rows, left=3)}\n"
        f"KL in nats per token, SmolLM2-135M-Instruct, {about['windows']} windows of "
        f'{about["window"]} tokens of each text, none of them trained on. "Of naive\'s": the '
        "share of the KL of `naive` on WikiText-2 and documents, on a CPU. "
        f"{about['machine']}; the seconds are of training alone, with two runs at once in the 8M "
        "row and the other seed. Code and web are other files there.\n"
    )


def calibrated(files: dict[str, Any]) -> str:
    """Return the table of texts to calibrate on, means over seeds."""
    header = ["calibrated on", "seeds", *TEXTS, "plain"]
    rows = []
    for what, kinds, name in CALIBRATED:
        key = f"start nvfp4a16 best {kinds} "
        here = [e["texts"] for e in files[f"h200-{name}"]["rows"] if e["run"].startswith(key)]
        kls = [sum(each[text]["kl"] for each in here) / len(here) for text in (*TEXTS, "plain")]
        rows.append([what, str(len(here)), *(f"{kl:.4f}" for kl in kls)])
    about = files["h200-text"]
    own = row(files, "h200-text", f"start nvfp4a16 best {CALIBRATED[0][1]} 1")["texts"]
    seed = [f"{own[text]['kl']:.4f}" for text in TEXTS[:2]]
    return (
        f"{table(header, rows, left=1)}\n"
        "KL of `best` in nvfp4a16, SmolLM2-135M-Instruct, 32,768 tokens, "
        f"{about['windows']} windows of each text.\nCode and web are of packages that the packaged "
        "text has nothing of; chats and plain are other text of the\nmodel. The documents hold "
        "manuals of SQLite and PostgreSQL. The packaged text had other pages of these "
        "manuals,\nexcept in the last row, which has the text as it is now. With the seed of that "
        f"row, own text alone has\n{' and '.join(seed)} on WikiText-2 and documents. Code and web "
        "are other files there.\n"
    )


def tried(files: dict[str, Any]) -> str:
    """Return the table of what was tried."""
    header = ["4M tokens, 16k a step, rate 0.01, but", "codes changed", *TEXTS]
    rows = []
    for what, name, run in TRIED:
        found = row(files, name, run)
        last = found["evaluations"][-1]
        changes = [f"{100 * last['texts'][text]['change']:+.1f}" for text in TEXTS]
        ruined = f" (ruined, cut at {last['tokens'] / 2**20:.0f}M)" if "cut" in found else ""
        rows.append([what + ruined, f"{100 * last['codes_changed']:.1f} %", *changes])
    return f"{table(header, rows, left=1)}\n"


def draw(files: dict[str, Any], path: Path) -> None:
    """Draw KL by tokens, and KL by seconds."""
    found = row(files, "h200-others", "floats")
    tokens = [each["tokens"] / 2**20 for each in found["evaluations"]]
    left = Panel(
        [
            Points(
                tokens, [e["texts"][text]["kl"] for e in found["evaluations"]], text, i, line="-"
            )
            for i, text in enumerate(TEXTS)
        ],
        title="nvfp4a16, best, then distill",
        x=Scale("million tokens", low=0, grid=True),
        y=Scale("KL", low=0, grid=True),
    )
    series = []
    for i, (label, runs) in enumerate(
        {
            "nvfp4a16": [("h200-schemes", "good"), ("h200-others", "floats")],
            "mxfp4a16": [("h200-schemes", "mx")],
            "nvfp4 (W4A4)": [("h200-schemes", "w4a4"), ("h200-long", "nvfp4.8M")],
        }.items()
    ):
        for j, (name, run) in enumerate(runs):
            each = row(files, name, run)
            ends = (each["evaluations"][0], each["evaluations"][-1])
            began = each["start_seconds"]
            series.append(
                Points(
                    [began, began + ends[1]["seconds"]],
                    [end["texts"][TEXTS[0]]["kl"] for end in ends],
                    label="" if j else label,
                    color=i,
                    line="-",
                )
            )
    right = Panel(
        series,
        title=f"convert, and after distill: {TEXTS[0]}",
        x=Scale("seconds on an H200, without the writing of text", low=0, grid=True),
        y=Scale("KL", low=0, grid=True),
    )
    write_png([[left, right]], path, title="SmolLM2-135M-Instruct: KL to the original")


TABLES = {"learning": results, "calibration": calibrated, "notes": tried}

if __name__ == "__main__":
    main()
