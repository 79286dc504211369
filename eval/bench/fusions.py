"""The time of a compiled decode step, with one more pass at a time.

    python -m eval.bench.fusions [--models NAME...] [--layers N] [--rows N...] [--columns NAME...]
        [--profile] [--json FILE] [--tiny]
    python -m eval.bench.fusions --table docs/graphs.md

Models have the sizes of those of eval/bench/generate.py, but N layers, and heavy-tailed random
weights in NVFP4, those of the head too. A step is the model, its static cache and the choice of the
token, in one CUDA graph, after 512 tokens. It is compiled anew for each column,
without the passes of the columns behind it. Times are microseconds of a
replay of that graph (`timed` of eval/bench/decode.py). The columns of a row compile at a time and
are measured one after another, each in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import tempfile
from pathlib import Path

import torch

from eval.bench import turns
from eval.bench.decode import timed
from eval.bench.generate import MODELS, SMALL, nvfp4_head
from eval.bench.harness import number, parser_for, random_model, write_table
from eval.pages.tables import origin, table
from eval.record import Results, Row, facts
from fp4pass.graph import inductor as install

# Each adds its passes to those of the columns before it.
COLUMNS: dict[str, tuple[str, ...]] = {
    "none of them": (),
    "fuse_gates": ("fuse_gates",),
    "fuse_norms": ("fuse_norms",),
    "fuse_residuals": ("fuse_residuals",),
    "split_argmax": ("split_argmax",),
    "join_counters": ("join_counters",),
}
# Tokens before the step.
POSITION = 512


def main() -> None:
    args = parse_args()
    if write_table(args, "eval/bench/fusions.py", page):
        return
    if args.one:
        measure(args)
        return
    results = Results(args.json[0], {**facts(), "layers": args.layers}, again=True)
    for name in args.models:
        for rows in args.rows:
            results.put({"model": name, "rows": rows} | run(name, rows, args))
            print(results.rows[-1], flush=True)


def run(name: str, rows: int, args: argparse.Namespace) -> Row:
    """Return the microseconds of each column, or why there are none."""
    words = [sys.executable, "-m", "eval.bench.fusions", "--models", name, "--rows", str(rows)]
    words += ["--layers", str(args.layers)]
    words += [f"--{flag}" for flag in ("tiny", "profile") if getattr(args, flag)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(i) for i in range(len(args.columns))]
        codes = turns.run(
            [
                [*words, "--one", column, "--found", str(file)]
                for column, file in zip(args.columns, files, strict=True)
            ],
            args.limit,
        )
        if any(codes) or None in codes:
            return {"error": f"the processes ended with {codes}"}
        times = [float(file.read_text()) for file in files]
        return dict(zip(args.columns, times, strict=True))


def measure(args: argparse.Namespace) -> None:
    """Measure one column of one row, and write its microseconds into a file."""
    (name,), (rows,) = args.models, args.rows
    names = list(COLUMNS)
    behind = names[names.index(args.one) + 1 :]
    left_out = set(itertools.chain.from_iterable(COLUMNS[each] for each in behind))
    install.PASSES = tuple(each for each in install.PASSES if each.__name__ not in left_out)
    kind, config = MODELS[name]
    config = config | {"num_hidden_layers": args.layers} | (SMALL if args.tiny else {})
    model = random_model(kind, config)
    nvfp4_head(model)
    gc.collect()
    with torch.no_grad():
        step = timed(model, (rows, 8 if args.tiny else POSITION, 1), args.profile)
    args.found.write_text(str(1e6 * step["step_seconds"]))


def page(result: Row) -> str:
    """Return the table of a file."""
    cells = []
    # A file has the columns that were there when it was measured.
    columns = list(dict.fromkeys(name for row in result["rows"] for name in row if name in COLUMNS))
    for row in result["rows"]:
        if "error" in row:
            cells.append([row["model"], str(row["rows"]), f"failed: {row['error']}"])
            cells[-1] += [""] * len(columns)
            continue
        changes = itertools.pairwise(columns)
        later = [f"{row[c]:.0f} ({row[c] - row[b]:+.1f})" for b, c in changes]
        gain = f"{1 - row[columns[-1]] / row[columns[0]]:.1%}"
        cells.append([row["model"], str(row["rows"]), number(row[columns[0]]), *later, gain])
    header = ["model", "rows", *columns, "saved"]
    what = f"Microseconds of a decode step of {result['layers']} layers; each column adds a pass."
    return "\n".join([*origin(result), what, "", table(header, cells, left=1)])


def parse_args() -> argparse.Namespace:
    parser = parser_for(__doc__, "fusions-h200.json")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--limit", type=float, help="seconds of a row")
    parser.add_argument("--one", choices=COLUMNS, help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
