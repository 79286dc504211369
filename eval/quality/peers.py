"""Compare other libraries on the same model: quality, time and memory beside fp4pass's.

    python -m eval.quality.peers --model DIR --text FILE [--calib FILE] [--work DIR] [--json OUT]

Each library gets an environment of its own in `--environments`, from PyPI. peer_runs.py quantizes
the model in it, on the same windows for all, and leaves a dense model in a folder of `--work`. That
is measured here: perplexity and KL with intervals, and how it differs from the row of `--base` on
the same tokens. Windows are cut from the text of `--calib`, or are token ids [windows, tokens] of
torch.save; without it the model writes them. "W4A4" quantizes inputs in one way for all, as serving
engines do: naive scales, and in nvfp4 a global scale from the largest inputs of the original on the
calibration windows. What is in OUT already is not run again. A run that fails is a row with why.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from eval.quality import models as quality
from eval.quality.measuring import require_apart
from eval.quality.peer_runs import MULTIPLIERS, SCALED
from eval.record import Results, facts
from fp4pass import ops
from fp4pass.core.formats import FORMATS
from fp4pass.evaluation import Evaluation, token_windows

ROOT = Path(__file__).resolve().parents[2]
RUNS = "eval.quality.peer_runs"

# What pip installs for each library.
REQUIREMENTS = {
    "llmcompressor": ("torch==2.13.0", "llmcompressor==0.14.0.1"),
    "nvidia-modelopt": (
        "torch==2.13.0",
        "nvidia-modelopt==0.47.0",
        "transformers==5.23.0",
        *("requests", "datasets==5.2.0", "accelerate==1.15.0"),
    ),
    "auto-round": ("torch==2.13.0", "transformers==5.23.0", "auto-round==0.16.1"),
    "torchao": ("torch==2.13.0", "transformers==5.23.0", "torchao==0.18.0"),
    "bitsandbytes": ("torch==2.13.0", "transformers==5.23.0", "bitsandbytes==0.50.2"),
    "fp4pass": (),
}

# The row of fp4pass that the others are compared with, unless `--base` names another.
BASE = "gptq"

# The library, what peer_runs.py takes, the format, and what the page says.
PEERS = (
    ("fp4pass", "nvfp4 naive", "nvfp4", "naive"),
    ("fp4pass", "nvfp4 sse", "nvfp4", "sse"),
    ("fp4pass", "nvfp4 hessian", "nvfp4", "hessian"),
    ("fp4pass", "nvfp4 gptq", "nvfp4", BASE),
    ("fp4pass", "nvfp4 cross", "nvfp4", "gptq, cross target"),
    ("fp4pass", "nvfp4 fast", "nvfp4", "fast"),
    ("fp4pass", "nvfp4 good", "nvfp4", "good"),
    ("fp4pass", "nvfp4 best", "nvfp4", "best"),
    ("llmcompressor", "NVFP4A16 rtn default", "nvfp4", "RTN"),
    ("llmcompressor", "NVFP4A16 rtn nvfp4_expanded_mse", "nvfp4", "RTN, expanded mse"),
    ("llmcompressor", "NVFP4A16 rtn nvfp4_expanded_imatrix", "nvfp4", "RTN, expanded imatrix"),
    ("llmcompressor", "NVFP4A16 gptq default", "nvfp4", "GPTQ"),
    ("llmcompressor", "NVFP4A16 gptq nvfp4_expanded_mse", "nvfp4", "GPTQ, expanded mse"),
    ("llmcompressor", "NVFP4A16 gptq nvfp4_expanded_imatrix", "nvfp4", "GPTQ, expanded imatrix"),
    ("llmcompressor", "NVFP4A16 awq default", "nvfp4", "AWQ"),
    ("nvidia-modelopt", "NVFP4_DEFAULT_CFG", "nvfp4", "default"),
    ("nvidia-modelopt", "NVFP4_FOUR_OVER_SIX_CFG", "nvfp4", "four over six"),
    ("nvidia-modelopt", "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG", "nvfp4", "mse sweep"),
    ("nvidia-modelopt", "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG", "nvfp4", "local Hessian"),
    ("nvidia-modelopt", "NVFP4_AWQ_LITE_CFG", "nvfp4", "AWQ lite"),
    ("nvidia-modelopt", "gptq", "nvfp4", "GPTQ"),
    ("auto-round", "NVFP4 0", "nvfp4", "0 iterations"),
    ("auto-round", "NVFP4 200 2", "nvfp4", "200 iterations of 2 windows"),
    ("auto-round", "NVFP4 200 8", "nvfp4", "200 iterations"),
    ("auto-round", "NVFP4 50 8 W4A4", "nvfp4", "50 iterations, 4-bit inputs"),
    ("auto-round", "NVFP4 200 2 W4A4", "nvfp4", "200 iterations of 2 windows, 4-bit inputs"),
    ("auto-round", "NVFP4 200 8 W4A4", "nvfp4", "200 iterations, 4-bit inputs"),
    ("auto-round", "NVFP4 1000 8 W4A4", "nvfp4", "1000 iterations, 4-bit inputs"),
    ("torchao", "NVFP4", "nvfp4", "RTN"),
    ("bitsandbytes", "nf4", "nf4", "nf4"),
    ("fp4pass", "mxfp4 naive", "mxfp4", "naive"),
    ("fp4pass", "mxfp4 sse", "mxfp4", "sse"),
    ("fp4pass", "mxfp4 hessian", "mxfp4", "hessian"),
    ("fp4pass", "mxfp4 gptq", "mxfp4", BASE),
    ("llmcompressor", "MXFP4A16 rtn default", "mxfp4", "RTN"),
    ("llmcompressor", "MXFP4A16 gptq default", "mxfp4", "GPTQ"),
    ("nvidia-modelopt", "MXFP4_DEFAULT_CFG", "mxfp4", "default"),
    ("auto-round", "MXFP4 0", "mxfp4", "0 iterations"),
)

# What a row has of run.json; a machine where it is not the one of the file.
COST = ("seconds", "cpu_seconds", "peak_mb", "loaded_mb", "threads", "versions", "machine")

# Whether weights alone are quantized.
KINDS = {"W4A16": True, "W4A4": False}


def main() -> None:
    """Run what is missing, and measure it."""
    args = parse_args()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = calibration(args, model, tokenizer)
    torch.save(ids, args.work / "ids.pt")
    measuring = Measuring(args, model, tokenizer, ids)
    results = Results(
        args.json, about(args, model, ids), again=args.again, key=("format", "library", "run")
    )
    there = {tuple(row[name] for name in results.key) for row in results.rows}
    # What the others are compared with comes first, in each format.
    for library, run, fmt, name in sorted(PEERS, key=lambda peer: peer[3] != args.base):
        wanted = args.only is None or any(each in f"{library} {run}" for each in args.only)
        done = (fmt, library, run) in there
        is_base = library == "fp4pass" and name == args.base
        if args.fmt not in (None, fmt) or (not is_base and (done or not wanted)):
            continue
        row = {"format": fmt, "library": library, "run": run, "name": name}
        folder = args.work / f"{library}-{run.replace(' ', '-')}"
        if not (folder / "run.json").is_file():
            if args.there:
                continue
            failed = run_peer(library, run, args, folder)
            if failed:
                results.put(row | {"failed": failed})
                continue
        cost = json.loads((folder / "run.json").read_text())
        row |= {name: cost[name] for name in COST if name in cost}
        row |= measuring.measured(folder, fmt, is_base)
        if not done:
            results.put(row)
        print(fmt, library, run, *kl_of(row), flush=True)


def parse_args() -> argparse.Namespace:
    """Return the options."""
    parser = quality.make_parser(__doc__)
    parser.set_defaults(windows=32, calib=None)
    parser.add_argument("--characters", type=int, help="of each text, from its beginning")
    parser.add_argument("--base", default=BASE, help="the row of fp4pass to compare with")
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="kept, of one model")
    parser.add_argument("--environments", type=Path, help="kept, of all models")
    parser.add_argument("--fmt", help="one format alone")
    parser.add_argument("--only", action="append", help="runs with this in their name")
    parser.add_argument("--weights-only", action="store_true", help="leave W4A4 out")
    parser.add_argument("--there", action="store_true", help="measure only what has run already")
    args = parser.parse_args()
    args.text = args.text or [quality.TINY / "eval.txt"]
    args.environments = args.environments or args.work / "environments"
    args.work.mkdir(parents=True, exist_ok=True)
    names = [name for library, _, _, name in PEERS if library == "fp4pass"]
    if args.base not in names:
        parser.error(f"--base: expected one of {', '.join(names)}, got {args.base}")
    return args


def calibration(args: argparse.Namespace, model: Any, tokenizer: Any) -> Tensor:
    """Return the token ids [windows, tokens] that all calibrate on."""
    if args.calib is None:
        own = args.work / "own.pt"
        if not own.is_file():
            tokens = args.samples * args.window
            ids = fp4pass.calibration.sample(model, tokenizer, tokens=tokens, seq_len=args.window)
            torch.save(ids, own)
        args.calib = own
    if args.calib.suffix == ".pt":
        ids = torch.load(args.calib)
        if ids.shape[1] != args.window:
            raise SystemExit(
                f"{args.calib}: expected windows of {args.window} tokens, got {ids.shape[1]}. "
                "Give --window."
            )
        return ids
    for path in args.text:
        require_apart(args.calib, path)
    text = quality.read(args.calib)
    return token_windows(tokenizer, text, window=args.window, windows=args.samples)


def about(args: argparse.Namespace, model: Any, ids: Tensor) -> dict[str, Any]:
    """Return the facts of these results."""
    beginning = {} if args.characters is None else {"characters": args.characters}
    return {
        **facts(args.device, model=args.model),
        "model": args.model.name,
        "parameters": model.num_parameters(),
        "window": args.window,
        "calibration": {"file": args.calib.name, "windows": len(ids), "tokens": ids.numel()},
        "texts": {
            path.stem: {"file": path.name, "windows": args.windows, **beginning}
            for path in args.text
        },
        "confidence": 0.95,
        "base": args.base,
    }


class Measuring:
    """Measures dense models beside their original, and beside the row of the base."""

    def __init__(self, args: argparse.Namespace, model: Any, tokenizer: Any, ids: Tensor):
        self.args, self.model, self.tokenizer = args, model, tokenizer
        self.reference = quality.Remembered(model).eval()
        self.kinds = {k: w for k, w in KINDS.items() if w or not args.weights_only}
        self.inputs = {} if args.weights_only else input_scales(model, ids, args.batch_size)
        self.texts = {path.stem: quality.read(path)[: args.characters] for path in args.text}
        self.base: dict[tuple[str, str], dict[str, Evaluation]] = {}

    def measured(self, folder: Path, fmt: str, is_base: bool) -> dict[str, Any]:
        """Return what each kind of inputs gives on each text, and how the base differs."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        factors = folder / MULTIPLIERS
        found: dict[str, Any] = {}
        for kind, weight_only in self.kinds.items():
            if not weight_only and fmt not in FORMATS:
                continue
            if not weight_only:
                multipliers = load_file(factors) if factors.is_file() else {}
                quantize_inputs(model, multipliers, self.inputs, fmt)
            here = {title: self.evaluated(model, text) for title, text in self.texts.items()}
            if is_base:
                self.base[fmt, kind] = here
            found[kind] = {title: quality.measures(each) for title, each in here.items()}
            beside = {} if is_base else self.base.get((fmt, kind), self.base.get(("nvfp4", kind)))
            for title, other in (beside or {}).items():
                found[kind][title]["change"] = quality.changes(here[title].difference(other))
        return found

    def evaluated(self, model: nn.Module, text: str) -> Evaluation:
        """Return the measures of a model on a text."""
        options = {"window": self.args.window, "windows": self.args.windows, "progress": False}
        batch_size = self.args.batch_size
        return fp4pass.evaluate(
            model, self.tokenizer, text, self.reference, batch_size=batch_size, **options
        )


def kl_of(row: dict[str, Any]) -> list[str]:
    """Return the KL of a row for whoever waits."""
    return [
        f"{kind}, {title}: {measured['kl']['value']:.5f}"
        for kind in KINDS
        for title, measured in row.get(kind, {}).items()
    ]


def run_peer(library: str, run: str, args: argparse.Namespace, folder: Path) -> str | None:
    """Quantize by a library in its environment, with one thread; return why it failed."""
    folder.mkdir(parents=True, exist_ok=True)
    places = ["--model", args.model, "--ids", args.work / "ids.pt", "--out", folder]
    alone = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    log = folder / "log.txt"
    try:
        python = environment(library, args.environments)
        with log.open("w") as file:
            subprocess.run(
                [python, "-m", RUNS, library, run, *places],
                check=True,
                env={**os.environ, **alone},
                stdout=file,
                stderr=file,
            )
    except subprocess.CalledProcessError as error:
        lines = log.read_text().strip().splitlines() if log.is_file() else []
        return lines[-1] if lines else f"pip: exit status {error.returncode}"
    return None


def environment(library: str, folder: Path) -> Path:
    """The Python that has a library, installed if it is not there."""
    if not REQUIREMENTS[library]:
        return Path(sys.executable)
    python = folder / library / "bin" / "python"
    if not python.is_file():
        venv.create(folder / library, with_pip=True)
        install = [python, "-m", "pip", "install", "-q", *REQUIREMENTS[library]]
        subprocess.run(install, check=True)
    return python


def input_scales(model: nn.Module, calib: Tensor, batch_size: int) -> dict[str, Tensor]:
    """The stored global scale [1] of the inputs of each linear layer, in nvfp4."""
    prepared = fp4pass.prepare(copy.deepcopy(model), "naive")
    fp4pass.calibrate(prepared, calib.split(batch_size), progress=False)
    fp4pass.convert(prepared, "nvfp4", progress=False)
    return {
        name: module.input_global_scale
        for name, module in prepared.named_modules()
        if getattr(module, "input_global_scale", None) is not None
    }


def quantize_inputs(
    model: nn.Module, multipliers: dict[str, Tensor], scales: dict[str, Tensor], fmt: str
) -> None:
    """Have each layer round its input; one that is multiplied first has a scale for each call."""

    def rounding(scale: Tensor | None, factor: Tensor | None) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = args[0] if factor is None else args[0] * factor
            by = scale if factor is None or scale is None else ops.dynamic_global_scale(x, fmt)
            packed, bits = ops.quantize(x, by, fmt, "naive")
            found = ops.dequantize(packed, bits, by, fmt, x.dtype)
            return (found if factor is None else found / factor,)

        return hook

    for name, scale in scales.items():
        factor = multipliers.get(f"{name}.{SCALED}")
        stored = scale if FORMATS[fmt].has_global_scale else None
        model.get_submodule(name).register_forward_pre_hook(rounding(stored, factor))


if __name__ == "__main__":
    main()
