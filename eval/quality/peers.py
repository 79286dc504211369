"""What other libraries make of the same model: quality, time and memory beside fp4pass's.

    python -m eval.quality.peers --model DIR --calib FILE --text FILE [--work DIR] [--json OUT]

Each library gets an environment of its own in `--work`, from PyPI. peer_runs.py quantizes the model
in it, on the same windows for all, and leaves dequantized weights, which are measured here:
perplexity and KL with intervals, and what is different from fp4pass's `gptq` on the same tokens.
"W4A4" quantizes inputs to NVFP4 in one way for all, as serving engines do: naive scales, and a
global scale from the largest inputs of the original on the calibration windows.
What is in OUT already is not run again.
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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from eval.quality import models as quality
from eval.quality.measuring import require_apart
from eval.quality.peer_runs import SCALED
from eval.record import Results, facts
from fp4pass import ops
from fp4pass.core.formats import FORMATS
from fp4pass.evaluation import token_windows

RUNS = Path(__file__).with_name("peer_runs.py")

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
    "fp4pass": (),
}

# The row that the others are compared with, in each format.
BASE = "gptq"

# The library, what peer_runs.py takes, the format, and what the page says.
PEERS = (
    ("fp4pass", "nvfp4 naive", "nvfp4", "naive"),
    ("fp4pass", "nvfp4 sse", "nvfp4", "sse"),
    ("fp4pass", "nvfp4 hessian", "nvfp4", "hessian"),
    ("fp4pass", "nvfp4 gptq", "nvfp4", BASE),
    ("fp4pass", "nvfp4 cross", "nvfp4", "gptq, cross target"),
    ("llmcompressor", "NVFP4A16 rtn default", "nvfp4", "RTN"),
    ("llmcompressor", "NVFP4A16 rtn nvfp4_expanded_mse", "nvfp4", "RTN, expanded mse"),
    ("llmcompressor", "NVFP4A16 gptq default", "nvfp4", "GPTQ"),
    ("llmcompressor", "NVFP4A16 gptq nvfp4_expanded_mse", "nvfp4", "GPTQ, expanded mse"),
    ("llmcompressor", "NVFP4A16 awq default", "nvfp4", "AWQ"),
    ("nvidia-modelopt", "NVFP4_DEFAULT_CFG", "nvfp4", "default"),
    ("nvidia-modelopt", "NVFP4_FOUR_OVER_SIX_CFG", "nvfp4", "four over six"),
    ("nvidia-modelopt", "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG", "nvfp4", "mse sweep"),
    ("nvidia-modelopt", "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG", "nvfp4", "local Hessian"),
    ("nvidia-modelopt", "NVFP4_AWQ_LITE_CFG", "nvfp4", "AWQ lite"),
    ("auto-round", "NVFP4 0", "nvfp4", "0 iterations"),
    ("auto-round", "NVFP4 50", "nvfp4", "50 iterations"),
    ("auto-round", "NVFP4 200 2", "nvfp4", "200 iterations of 2 windows"),
    ("auto-round", "NVFP4 200", "nvfp4", "200 iterations"),
    ("auto-round", "NVFP4 1000", "nvfp4", "1000 iterations"),
    ("fp4pass", "mxfp4 naive", "mxfp4", "naive"),
    ("fp4pass", "mxfp4 sse", "mxfp4", "sse"),
    ("fp4pass", "mxfp4 hessian", "mxfp4", "hessian"),
    ("fp4pass", "mxfp4 gptq", "mxfp4", BASE),
    ("llmcompressor", "MXFP4A16 rtn default", "mxfp4", "RTN"),
    ("llmcompressor", "MXFP4A16 gptq default", "mxfp4", "GPTQ"),
    ("nvidia-modelopt", "MXFP4_DEFAULT_CFG", "mxfp4", "default"),
    ("auto-round", "MXFP4 0", "mxfp4", "0 iterations"),
)


def main() -> None:
    parser = quality.make_parser(__doc__)
    parser.set_defaults(windows=32)
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="kept")
    parser.add_argument("--fmt", help="one format alone")
    parser.add_argument("--only", action="append", help="runs with this in their name")
    parser.add_argument("--weights-only", action="store_true", help="leave W4A4 out")
    parser.add_argument("--there", action="store_true", help="measure only what has run already")
    args = parser.parse_args()
    args.text = args.text or [quality.TINY / "eval.txt"]
    transformers.logging.disable_progress_bar()
    for path in args.text:
        require_apart(args.calib, path)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = quality.read(args.calib)
    calib = token_windows(tokenizer, text, window=args.window, windows=args.samples)
    reference = quality.Remembered(model).eval()
    about = {
        **facts(args.device, model=args.model),
        "model": args.model.name,
        "parameters": model.num_parameters(),
        "window": args.window,
        "calibration": {"file": args.calib.name, "windows": len(calib), "tokens": calib.numel()},
        "texts": {path.stem: {"file": path.name, "windows": args.windows} for path in args.text},
        "confidence": 0.95,
    }
    results = Results(args.json, about, again=args.again, key=("format", "library", "run"))
    there = {tuple(row[name] for name in results.key) for row in results.rows}
    inputs = {} if args.weights_only else input_scales(model, calib, args.batch_size)
    base: dict[tuple[str, bool], Any] = {}
    # What the others are compared with comes first.
    for library, run, fmt, name in sorted(PEERS, key=lambda peer: peer[3] != BASE):
        if args.fmt not in (None, fmt):
            continue
        wanted = args.only is None or any(each in f"{library} {run}" for each in args.only)
        folder = args.work / args.model.name / library / run.replace(" ", "_")
        is_base = name == BASE
        done = (fmt, library, run) in there
        if not is_base and (done or not wanted):
            continue
        if not (folder / "run.json").is_file():
            if args.there:
                continue
            run_peer(library, run, args, calib, folder)
        row = {"format": fmt, "library": library, "run": run, "name": name}
        row |= json.loads((folder / "run.json").read_text())
        weights = load_file(folder / "weights.safetensors")
        for weight_only in [True] if args.weights_only else [True, False]:
            quantized = with_weights(model, weights)
            if not weight_only:
                quantize_inputs(quantized, weights, inputs, fmt)
            found = quality.measure(quantized, reference, tokenizer, args)
            if is_base:
                base[fmt, weight_only] = found
            beside = base.get((fmt, weight_only))
            row["W4A16" if weight_only else "W4A4"] = {
                text: quality.measures(here)
                | (
                    {"change": quality.changes(here.difference(beside[text]))}
                    if beside and not is_base
                    else {}
                )
                for text, here in found.items()
            }
            kl = ", ".join(f"{text} {here.kl:.5f}" for text, here in found.items())
            print(fmt, library, run, "W4A16" if weight_only else "W4A4", kl, flush=True)
        if not done:
            results.put(row)


def run_peer(library: str, run: str, args: argparse.Namespace, calib: Tensor, folder: Path) -> None:
    """Quantize by a library in its environment, with one thread."""
    windows = args.work / f"{args.model.name}-{len(calib)}.safetensors"
    args.work.mkdir(parents=True, exist_ok=True)
    save_file({"ids": calib.contiguous()}, windows)
    places = ["--model", args.model, "--windows", windows, "--out", folder]
    alone = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [environment(library, args.work), RUNS, library, run, *places],
        check=True,
        env={**os.environ, **alone},
    )


def environment(library: str, work: Path) -> Path:
    """The Python that has a library, installed if it is not there."""
    if not REQUIREMENTS[library]:
        return Path(sys.executable)
    folder = work / "environments" / library
    python = folder / "bin" / "python"
    if not python.is_file():
        venv.create(folder, with_pip=True)
        install = [python, "-m", "pip", "install", "-q", *REQUIREMENTS[library]]
        subprocess.run(install, check=True)
    return python


def with_weights(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A copy of a model with other weights, its output embedding as it was."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if name in weights:
                scale = weights.get(f"{name.removesuffix('.weight')}.{SCALED}")
                weight = weights[name] if scale is None else weights[name] * scale
                parameter.copy_(weight)
    return found


def input_scales(model: nn.Module, calib: Tensor, batch_size: int) -> dict[str, Tensor]:
    """The stored global scale [1] of the inputs of each linear layer, in nvfp4."""
    prepared = fp4pass.prepare(copy.deepcopy(model), "naive")
    fp4pass.calibrate(prepared, calib.split(batch_size), progress=False)
    fp4pass.convert(prepared)
    return {
        name: module.input_global_scale
        for name, module in prepared.named_modules()
        if getattr(module, "input_global_scale", None) is not None
    }


def quantize_inputs(
    model: nn.Module, weights: dict[str, Tensor], scales: dict[str, Tensor], fmt: str
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
        factor = weights.get(f"{name}.{SCALED}")
        stored = scale if FORMATS[fmt].has_global_scale else None
        model.get_submodule(name).register_forward_pre_hook(rounding(stored, factor))


if __name__ == "__main__":
    main()
