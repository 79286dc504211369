"""The examples run as a user runs them, and print what their pages promise."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TINY_LM = ROOT / "examples" / "tiny_lm"

for package in ("transformers", "datasets", "lm_eval"):
    pytest.importorskip(package)


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """A script of the repository, with nothing to download from and little CPU."""
    # Each process that compiles beside it would import torch for one graph.
    few = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **few}
    return subprocess.run(
        [sys.executable, *map(str, args)], capture_output=True, text=True, cwd=ROOT, env=env
    )


def table(output: str) -> list[dict[str, str]]:
    """The rows of the quickstart's table, cells by their heading."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    header = next(line for line in lines if line[:2] == ["format", "inputs"])
    return [dict(zip(header, line, strict=True)) for line in lines if len(line) == len(header)][2:]


def number(cell: str) -> float:
    return float(cell.split()[0])


@pytest.mark.slow
def test_the_quickstart(tmp_path):
    """As README shows it; bars and the note on FP4 tensor cores are all that it logs."""
    done = run("examples/quickstart.py", "--save", tmp_path / "checkpoint")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr and "WARNING" not in done.stdout + done.stderr
    rows = table(done.stdout)
    made = [(row["format"], row["inputs"], row["method"]) for row in rows[1:]]
    inputs, methods = ("float", "4 bit"), ("naive", "sse", "hessian")
    assert made == list(itertools.product(("nvfp4", "mxfp4"), inputs, methods))
    for start in range(1, 13, 3):
        naive, sse, hessian = rows[start : start + 3]
        errors = [number(row["output err"]) for row in (naive, sse, hessian)]
        assert errors == sorted(errors, reverse=True) and len(set(errors)) == 3
        assert number(naive["KL"]) > number(hessian["KL"]) > 0
    # What no other CPU moves; the page shows the first half.
    page = table((ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8"))
    for shown, printed in zip(page, rows[:7], strict=True):
        for column in ("format", "inputs", "method", "bits", "MB", "weight err"):
            assert shown[column] == printed[column]
    same = re.search(r"torch.compile: one graph.* at ([\d.]+) % of \d+", done.stdout)
    assert same and float(same[1]) > 97
    pair = r"lm-eval: ([\d.]+) bits per byte .* fp4pass.evaluate: ([\d.]+)$"
    bits = re.search(pair, done.stdout, re.M)
    assert bits and float(bits[1]) == pytest.approx(float(bits[2]), rel=1e-3)
    assert "the same logits, bit by bit" in done.stdout
    assert (tmp_path / "checkpoint" / "config.json").exists()


def test_readme_installs_what_the_quickstart_needs():
    """And no test tools; its first command shows what it does, for it takes minutes."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first, second = re.findall(r"pip install (.*?)-c constraints.txt -e '\.\[(\w+)\]'", readme)
    assert first == ("", "quickstart") and second == ("-q ", "all")
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (packages,) = re.findall(r"^quickstart = \[(.*)\]$", extras, re.M)
    # Whoever loads a folder of a model of transformers needs both.
    assert re.findall(r'"([\w-]+)', packages) == ["transformers", "accelerate"]


# ---- training ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_mixture_trains(tmp_path):
    """Two layers of four experts, on one long document; a few short ones are held out."""
    texts = sorted((TINY_LM / "eval.txt").read_text("utf-8").split("\n<|doc|>\n"), key=len)
    short = [text for text in texts if len(text) > 3000][:4]
    rest = "\n".join(text for text in texts if text not in short)
    documents = [
        {"kind": "source", "name": str(i), "text": t} for i, t in enumerate([*short, rest])
    ]
    stored, out = tmp_path / "corpus.json", tmp_path / "moe"
    stored.write_text(json.dumps({"python": "3.0", "documents": documents}))
    sizes = "--vocab-size=300 --hidden-size=32 --moe-intermediate-size=32 --num-experts=4"
    sizes += " --num-hidden-layers=2 --num-attention-heads=2 --num-key-value-heads=1 --head-dim=16"
    # Seconds that one step does not fit into, after those that are timed.
    steps = "--steps=1000 --seconds=0.001 --batch=1 --lr=0.01 --warmup=5 --evaluate-every=25"
    flags = [*sizes.split(), *steps.split(), "--corpus", stored, "--out", out]
    done = run("examples/train_tiny_moe.py", *flags)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "training.json").read_text())
    first, last = report["curve"]
    assert report["steps"] == 50 and last["calib_loss"] < first["calib_loss"] < math.log(300)
    # Of the saved weights, in bfloat16.
    measured = report["results"]["calib"]["perplexity"]
    assert measured == pytest.approx(math.exp(last["calib_loss"]), rel=2e-3)
    assert report["train_documents"] == 1 and (out / "config.json").exists()


# ---- ahead of time ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_package_runs_in_another_process():
    done = run("examples/aot_inductor.py")
    assert done.returncode == 0, done.stderr
    assert "the package has 6." in done.stdout
    (error,) = re.findall(r"without transformers: within (\S+) of eager", done.stdout)
    assert float(error) < 1e-5
