"""Write the table of recipes by name in docs/quality.md from results of eval/quality/real_model.py.

python -m eval.pages.qualities --table docs/quality.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from eval.pages.tables import ROOT, number, table, write_between
from eval.quality.grids import GRIDS, Run

RESULTS = ROOT / "eval" / "results" / "real-model"
SCHEMES = ("nvfp4a16", "nvfp4")


def main() -> None:
    """Write the table into a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", type=Path, required=True)
    write_between(parser.parse_args().table, "eval/pages/qualities.py", text())


def text() -> str:
    """Return the table and where its numbers come from."""
    gpu, cpu = (read(name) for name in ("smollm2.json", "smollm2-cpu.json"))
    header = ["quality", "scheme", *(f"KL, {name}" for name in gpu["original"]["texts"])]
    rows = []
    for run in GRIDS["qualities"]:
        if run.scheme in SCHEMES:
            here = [found["by"].get(run.key) for found in (gpu, cpu)]
            kls = [f"{each['kl']:.3f}" for each in here[0]["texts"].values()]
            seconds = [number(row["seconds"]) if row else "-" for row in here]
            rows.append([f"`{run.options['quality']}`", f"`{run.scheme}`", *kls, *seconds])
    return (
        f"{table([*header, 'H100, s', 'CPU, s'], rows, left=2)}\n"
        f"SmolLM2-135M-Instruct, KL in nats per token of the model that the GPU converted. `good` "
        f"and `best` calibrate on 32,768\ntokens written by the model; the seconds exclude "
        f"the writing. CPU: one thread of {cpu['machine'].partition(' of ')[2]}.\n"
        f"[All recipes](real-model.md); JSON: [GPU](../eval/results/real-model/smollm2.json), "
        f"[CPU](../eval/results/real-model/smollm2-cpu.json).\n"
    )


def read(name: str) -> dict[str, Any]:
    """Return a file of results, with its rows by their key."""
    found = json.loads((RESULTS / name).read_text("utf-8"))
    found["by"] = {tuple(row[key] for key in Run.KEY): row for row in found["rows"]}
    return dict(found)


if __name__ == "__main__":
    main()
