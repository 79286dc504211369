"""The weights of a language model in 4 bits by fp4pass and by other libraries, side by side.

    python -m eval.quality.peer_weights --by NAME [NAME ...] --json FILE [--model DIR]

All quantize the linear layers of one float32 model but its head, weights only, by the functions of
eval/quality/peer_runs.py, and are measured on the same tokens as `fp4pass.evaluate` does. Those
that calibrate get the same windows. A library has to be installed beside fp4pass; in environments
of their own, eval/quality/peers.py runs them. A run adds its rows to the file.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from eval.quality.models import TINY, read
from eval.quality.peer_runs import LIBRARIES, with_weights
from eval.record import facts
from fp4pass.evaluation import token_windows

WINDOW = 512

# The library, the format of the weights, and what peer_runs.py takes. auto-round tunes with inputs
# in 4 bits, as its scheme has them.
PEERS = {
    "fp4pass fast": ("fp4pass", "nvfp4", "nvfp4 fast"),
    "fp4pass good": ("fp4pass", "nvfp4", "nvfp4 good"),
    "fp4pass best": ("fp4pass", "nvfp4", "nvfp4 best"),
    "fp4pass best, own text": ("fp4pass", "nvfp4", "nvfp4 best own"),
    "bitsandbytes nf4": ("bitsandbytes", "nf4", "nf4"),
    "bitsandbytes fp4": ("bitsandbytes", "fp4", "fp4"),
    "torchao": ("torchao", "nvfp4", "NVFP4"),
    "ModelOpt": ("nvidia-modelopt", "nvfp4", "NVFP4_DEFAULT_CFG"),
    "llm-compressor": ("llmcompressor", "nvfp4", "NVFP4A16 rtn default"),
    "llm-compressor GPTQ": ("llmcompressor", "nvfp4", "NVFP4A16 gptq default"),
    "auto-round, 0 iterations": ("auto-round", "nvfp4", "NVFP4 0"),
    "auto-round, 200 iterations": ("auto-round", "nvfp4", "NVFP4 200 8 W4A4"),
}


def main() -> None:
    """Measure what is named, and write the file after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=TINY, help="folder of a causal LM")
    parser.add_argument("--by", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--samples", type=int, default=64, help="windows to calibrate on")
    parser.add_argument("--windows", type=int, default=32, help="windows to measure")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    calib = token_windows(tokenizer, read(TINY / "calib.txt"), window=WINDOW, windows=args.samples)
    text = read(TINY / "eval.txt")
    options = {"window": WINDOW, "windows": args.windows, "progress": False}
    original = fp4pass.evaluate(model, tokenizer, text, **options)
    found = {
        **facts("cpu", model=args.model),
        "model": args.model.name,
        "dtype": "float32",
        "calibration_windows": args.samples,
        "windows": args.windows,
        "window": WINDOW,
        "original": {"perplexity": original.perplexity},
        "rows": [],
    }
    if args.json.exists():
        stored = json.loads(args.json.read_text("utf-8"))
        if stored["model"] != args.model.name:
            raise SystemExit(
                f"{args.json}: expected rows of {args.model.name}, got rows of {stored['model']}. "
                "Give another file."
            )
        found |= {"command": stored["command"], "rows": stored["rows"]}
    for name in args.by:
        package, fmt, run = PEERS[name]
        torch.manual_seed(0)
        began = time.perf_counter()
        weights = LIBRARIES[package](run, copy.deepcopy(model), tokenizer, calib)
        seconds = time.perf_counter() - began
        quantized = with_weights(copy.deepcopy(model), weights())
        here = fp4pass.evaluate(quantized, tokenizer, text, model, **options)
        low, high = here.intervals["kl"]
        row = {
            "by": name,
            "version": importlib.metadata.version(package),
            "format": fmt,
            "perplexity": here.perplexity,
            "kl": {"value": here.kl, "low": low, "high": high},
            "seconds": seconds,
        }
        found["rows"] = [each for each in found["rows"] if each["by"] != name] + [row]
        order = list(PEERS)
        found["rows"].sort(key=lambda each: order.index(each["by"]))
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: KL {here.kl:.4f}, perplexity {here.perplexity:.3f}, {seconds:.0f} s")


if __name__ == "__main__":
    main()
