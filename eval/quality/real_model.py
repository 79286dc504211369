"""Measure any recipe on a model that people know: KL, tails, tasks, seconds and memory.

    python -m eval.quality.real_model --model FOLDER --grid NAME --json OUT \
        --text WikiText-2=FILE --text documents=FILE --calib wiki=FILE --calib documents=FILE \
        [--pairs BLIMP.jsonl] [--device cuda]

A grid of grids.py is a list of runs, each a scheme, a recipe, and what it calibrates on: text that
the model writes ("own": half of it conversations; "plain": none; "chats": all), a file of `--calib`
or "mixed", a part of each. A text is measured in 16 windows of 512 tokens, spread evenly over its
first 200,000 characters; what is behind these is left to calibrate on. A seed decides what the
model writes and which windows of a file are taken. Sums of each window stay with each row, so that
any two rows are compared on the same tokens. What is in OUT already is not measured again.

`--workers N` shares the runs among N processes on one device, for many more rows in the same time.
Their seconds and memory mean nothing and are not kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from eval.quality.grids import GRIDS, Run
from eval.quality.models import Remembered
from eval.quality.pairs import accuracy, margins, read_pairs
from eval.record import Results, Row, command, facts
from fp4pass.evaluation import Evaluation, token_windows
from fp4pass.evaluation.intervals import SUMS

CHARACTERS, WINDOW, WINDOWS = 200_000, 512, 16
SCORED: dict[str, Any] = {"window": WINDOW, "windows": WINDOWS, "progress": False, "batch_size": 4}

# What a model writes, by the share of conversations in it.
WRITTEN = {"own": 0.5, "plain": 0.0, "chats": 1.0}

Texts = dict[str, str]


class Stand:
    """A model, what it is measured on, and what it may be calibrated on."""

    def __init__(
        self,
        folder: Path,
        texts: Texts,
        calib: Texts,
        pairs: Path | None,
        device: str,
        written: Path | None = None,
    ):
        """Load the model, and measure it as it is.

        Args:
            folder: of a causal language model.
            texts: to measure on, by name.
            calib: to calibrate on, by name.
            pairs: minimal pairs; None for none.
            device: where everything runs.
            written: a folder that keeps what the model writes; None for a temporary one.
        """
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        self.model = loaded.eval().to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.texts, self.calib, self.device = texts, calib, device
        self.reference = Remembered(self.model).eval()
        self.pairs = read_pairs(pairs) if pairs else []
        self.margins = margins(self.model, self.tokenizer, self.pairs) if pairs else None
        self.windows = cache(self._windows)
        self._temporary = tempfile.TemporaryDirectory()
        self.written = written or Path(self._temporary.name)

    def _windows(self, kind: str, seed: int, window: int, tokens: int) -> Tensor:
        """Return windows of tokens to calibrate on, [at most tokens / window, window]."""
        count = tokens // window
        if kind in WRITTEN:
            # In pieces: a text of twice the tokens begins with the shorter one.
            piece = max(1, (1 << 15) // window)
            pieces = range(-(-count // piece))
            return torch.cat([self._piece(kind, seed, window, i) for i in pieces])[:count]
        if kind == "mixed":
            kinds = ["own", *self.calib]
            share = -(-count // len(kinds)) * window
            each = [self.windows(kind, seed, window, share) for kind in kinds]
            together = torch.cat(each)
            generator = torch.Generator().manual_seed(seed)
            return together[torch.randperm(len(together), generator=generator)[:count]]
        found = token_windows(self.tokenizer, self.calib[kind], window=window)
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
        return found[order[:count]]

    def _piece(self, kind: str, seed: int, window: int, index: int) -> Tensor:
        """Return what the model writes, once for all processes, [32,768 / window, window]."""
        path = self.written / f"{kind}-{seed}-{window}-{index}.pt"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                text = fp4pass.calibration.sample(
                    self.model,
                    self.tokenizer,
                    tokens=max(1, (1 << 15) // window) * window,
                    seq_len=window,
                    chat_share=WRITTEN[kind],
                    seed=1000 * seed + index,
                    progress=False,
                )
                torch.save(text, path)
        return torch.load(path)

    def convert(self, run: Run) -> tuple[nn.Module, Row]:
        """Return a converted copy, and what that took."""
        data = self.windows(run.data, run.seed, run.window, run.tokens) if run.tokens else None
        packed = copy.deepcopy(self.model)
        with Measured(self.device) as took:
            if run.smoothing:
                fp4pass.smooth(packed, run.smoothing, data=data, progress=False)
            fp4pass.convert(packed, run.scheme, data=data, progress=False, **run.arguments())
        return packed, {"calibrated_on": 0 if data is None else data.numel(), **took.row}

    def measure(self, packed: nn.Module) -> Row:
        """Return what a model is worth on the texts and the pairs."""
        found: Row = {"texts": {}}
        for name, text in self.texts.items():
            here = fp4pass.evaluate(packed, self.tokenizer, text, self.reference, **SCORED)
            found["texts"][name] = scores(here)
        if self.margins is not None:
            own = margins(packed, self.tokenizer, self.pairs)
            change = (own - self.margins).square().mean().sqrt()
            found["blimp"] = {"accuracy": accuracy(own), "margin_change": float(change)}
        return found


class Measured:
    """Seconds and memory of what runs inside: of the processor, or of the GPU."""

    def __init__(self, device: str):
        self.cuda = torch.device(device).type == "cuda"
        self.row: Row = {}

    def __enter__(self) -> Measured:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            # Linux: the most memory counts from here.
            Path("/proc/self/clear_refs").write_text("5")
        self.began = time.perf_counter() if self.cuda else time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            seconds, most = time.perf_counter() - self.began, torch.cuda.max_memory_allocated()
        else:
            seconds, most = time.process_time() - self.began, peak_memory()
        self.row = {"seconds": seconds, "memory_gb": most / 1e9}


def peak_memory() -> int:
    """Return the most bytes of memory that this process had since it was last asked to count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def scores(found: Evaluation) -> Row:
    """Return the measures of an evaluation, and its sums of each window."""
    assert found.sums is not None
    columns = [SUMS.index(name) for name in ("tokens", "kl", "nll")]
    low, high = found.intervals["kl"]
    return {
        "kl": found.kl,
        "low": low,
        "high": high,
        "kl_999": found.kl_999,
        "top1": found.top1,
        "perplexity": found.perplexity,
        "sums": found.sums[:, columns].tolist(),
    }


def main() -> None:
    """Measure what is missing in a file of results."""
    args = parse_args()
    read = {name: path.read_text("utf-8") for name, path in args.text}
    texts = {name: text[:CHARACTERS] for name, text in read.items()}
    calib = {name: left(path, dict(args.text)) for name, path in args.calib}
    if args.workers > 1:
        shared_out(args)
        return
    stand = Stand(args.model, texts, calib, args.pairs, args.device, args.written)
    about = {
        **facts(args.device, model=args.model),
        "model": args.model.name,
        "parameters": stand.model.num_parameters(),
        "window": WINDOW,
        "windows": WINDOWS,
        "pairs": len(stand.pairs),
        "original": stand.measure(stand.model),
    }
    if args.claims is None:
        results = Results(args.json, about, key=Run.KEY)
        for run in missing(args.grid, args.json):
            results.put(measured(stand, run))
        return
    for index, run in enumerate(missing(args.grid, args.json)):
        if claimed(args.claims / str(index)):
            row = {**measured(stand, run), "seconds": None, "memory_gb": None}
            Results(args.json.with_suffix(f".part{index}.json"), about).put(row)


def measured(stand: Stand, run: Run) -> Row:
    """Return the row of a run."""
    packed, took = stand.convert(run)
    row = {**run.row(), **took, **stand.measure(packed)}
    print(line(row), flush=True)
    return row


def missing(grids: Sequence[str], path: Path) -> list[Run]:
    """Return the runs of some grids that a file has not, each once."""
    rows = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    there = {tuple(row[name] for name in Run.KEY) for row in rows}
    runs = {run.key: run for name in grids for run in GRIDS[name]}
    return [run for key, run in runs.items() if key not in there]


def claimed(path: Path) -> bool:
    """Return whether no other worker has made this file."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def shared_out(args: argparse.Namespace) -> None:
    """Measure in several processes, and put what each measured into one file."""
    together(args)
    with tempfile.TemporaryDirectory() as temporary:
        own = ["--workers", "1", "--claims", temporary, "--written", str(args.written or temporary)]
        words = [sys.executable, "-m", "eval.quality.real_model", *sys.argv[1:], *own]
        started = [subprocess.Popen(words) for _ in range(args.workers)]
        codes = [each.wait() for each in started]
    together(args)
    if any(codes):
        raise SystemExit(f"Workers ended with {codes}.")


def together(args: argparse.Namespace) -> None:
    """Put the rows of all workers into one file."""
    for path in sorted(args.json.parent.glob(f"{args.json.stem}.part*.json")):
        about = json.loads(path.read_text("utf-8"))
        rows = about.pop("rows")
        results = Results(args.json, {**about, "command": command(args.model)}, key=Run.KEY)
        for row in rows:
            results.put(row)
        path.unlink()


def left(path: Path, measured: dict[str, Path]) -> str:
    """Return what of a file is not measured."""
    text = path.read_text("utf-8")
    return text[CHARACTERS:] if path in measured.values() else text


def line(row: Row) -> str:
    """Return a row for whoever waits."""
    cells = [f"{row['scheme']:9} {row['by']:28} {row['data']:9} {row['tokens']:7} {row['seed']}"]
    cells += [f"{name} {found['kl']:.4f}" for name, found in row["texts"].items()]
    if "blimp" in row:
        cells.append(f"BLiMP {row['blimp']['accuracy']:.4f} {row['blimp']['margin_change']:.2f}")
    if row["seconds"] is not None:
        cells.append(f"{row['seconds']:.0f} s")
    return "  ".join(cells)


def named(text: str) -> tuple[str, Path]:
    """Return the two sides of NAME=FILE."""
    name, _, path = text.partition("=")
    return name, Path(path)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=named, action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--calib", type=named, action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--pairs", type=Path, help="BLiMP's minimal pairs")
    parser.add_argument("--grid", choices=GRIDS, action="append", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, metavar="N")
    parser.add_argument("--written", type=Path, help="keep what the model writes in this folder")
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
