"""What 4 bits cost a causal language model: one row per format, setting and method.

    python eval/perplexity.py --model DIR --calib FILE --text FILE [--text FILE ...] --json OUT

Perplexity in windows that do not overlap, each scored on all but its first token; KL is
KL(original || converted) in nats per token, top-1 how often both find the same token likeliest.
Output error is |y - y'| / |y|, a mean over the linears, on inputs from the first text: `weights` of
the weights alone, `layer` of what the converted layer does, its quantized inputs included.
A text is plain; a line `<|doc|>` separates documents. Calibration takes windows spread evenly over
`--calib`. With `--json OUT` the table goes to OUT with the suffix .md as well.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.evaluate import output_errors, token_windows


def main() -> None:
    args = parse_args()
    transformers.logging.disable_progress_bar()
    dtype = "auto" if args.dtype == "auto" else getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def cut(path: Path, windows: int | None) -> Tensor:
        return token_windows(tokenizer, read(path), window=args.window, windows=windows)

    calib = cut(args.calib, args.samples)
    texts = {path.stem: cut(path, args.windows) for path in args.text}
    held_out = cut(args.text[0], args.error_windows)

    prepared = fp4pass.prepare(copy.deepcopy(model), "hessian")
    began = time.perf_counter()
    fp4pass.calibrate(prepared, calib.split(args.batch_size))
    calibration_seconds = time.perf_counter() - began

    def measure(converted: nn.Module, reference: nn.Module | None) -> dict[str, Any]:
        return {
            name: fp4pass.evaluate(
                converted,
                tokenizer,
                ids,
                reference,
                batch_size=args.batch_size,
                progress=False,
            ).to_dict()
            for name, ids in texts.items()
        }

    settings = [(f, w, m) for f in args.formats for w in (True, False) for m in args.methods]
    rows = [{"format": "original", "texts": measure(model, None)}]
    for fmt, weight_only, method in tqdm(settings, desc="formats x methods", unit="row"):
        converted = copy.deepcopy(prepared)
        began = time.perf_counter()
        fp4pass.convert(converted, fmt, method, weight_only=weight_only)
        row: dict[str, Any] = {
            "format": fmt,
            "weight_only": weight_only,
            "method": method,
            "convert_seconds": time.perf_counter() - began,
            **summary(fp4pass.report(converted)),
        }
        for key, activations in (("output_error", False), ("layer_error", True)):
            errors = output_errors(
                converted,
                model,
                held_out.split(args.batch_size),
                activations=activations,
                progress=False,
            )
            row[key] = sum(errors.values()) / len(errors)
        row["texts"] = measure(converted, model)
        rows.append(row)

    result = {
        "command": command(args),
        "device": device_name(args.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "fp4pass": fp4pass.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model": args.model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "window": args.window,
        "calibration": {
            "text": args.calib.name,
            "windows": len(calib),
            "tokens": calib.numel(),
            "seconds": calibration_seconds,
        },
        "texts": {
            path.stem: {
                "file": path.name,
                "windows": len(texts[path.stem]),
                "windows_of_the_file": len(cut(path, None)),
            }
            for path in args.text
        },
        "output_error_tokens": held_out.numel(),
        "rows": rows,
    }
    text = table(rows)
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rounded(result), indent=1) + "\n")
        args.json.with_suffix(".md").write_text(page(result, text))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = {"type": lambda text: text.split(","), "metavar": "A,B"}
    parser.add_argument("--model", type=Path, required=True, help="folder of a causal LM")
    parser.add_argument("--calib", type=Path, required=True, help="text to calibrate on")
    parser.add_argument("--text", type=Path, required=True, action="append", help="to measure on")
    parser.add_argument("--formats", default=["nvfp4", "mxfp4"], **names)
    parser.add_argument("--methods", default=["naive", "sse", "hessian"], **names)
    parser.add_argument("--samples", type=int, default=128, help="windows to calibrate on")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, help="of each text, evenly spread; all if absent")
    parser.add_argument("--error-windows", type=int, default=8, help="for the output errors")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", default="auto", help="the model's own if absent")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="where results go, and the table beside them")
    return parser.parse_args()


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def summary(report: fp4pass.Report) -> dict[str, float]:
    """Bits per weight over the converted linears, and the mean of their weight errors."""
    sizes = [math.prod(row.shape) for row in report.converted]
    bits = sum(row.bits * size for row, size in zip(report.converted, sizes, strict=True))
    errors = [row.weight_error or 0.0 for row in report.converted]
    return {"bits": bits / sum(sizes), "weight_error": sum(errors) / len(errors)}


def table(rows: list[dict[str, Any]]) -> str:
    """Aligned, and Markdown too."""
    texts = list(rows[0]["texts"])
    header = ["format", "inputs", "method", "bits", "weight err", "out err weights", "layer"]
    for name in texts:
        header += [f"{name} ppl", "change", "KL", "top-1"]
    lines = [[*header, "convert"]]
    for row in rows:
        line = [row["format"], *["-"] * 6]
        if "method" in row:
            line = [row["format"], "float" if row["weight_only"] else "4 bit", row["method"]]
            line += [f"{row['bits']:.2f}"]
            line += [percent(row[k]) for k in ("weight_error", "output_error", "layer_error")]
        for name in texts:
            result, original = row["texts"][name], rows[0]["texts"][name]
            line += [f"{result['perplexity']:.4f}"]
            if "method" in row:
                change = result["perplexity"] / original["perplexity"] - 1
                line += [f"{100 * change:+.2f} %", f"{result['kl']:.5f}", percent(result["top1"])]
            else:
                line += ["-"] * 3
        lines.append([*line, f"{row['convert_seconds']:.1f} s" if "method" in row else "-"])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    aligned = [[c.rjust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in aligned)


def percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def page(result: dict[str, Any], text: str) -> str:
    calibration, versions = result["calibration"], result["versions"]
    measured = ", ".join(
        f"{t['windows']} of the {t['windows_of_the_file']} windows of {t['file']}"
        for t in result["texts"].values()
    )
    return f"""# {result["model"]}

Written by

    {result["command"]}

In {result["dtype"]} on {result["device"]} with torch.set_num_threads({result["threads"]});
{", ".join(f"{name} {version}" for name, version in versions.items())}.
Calibrated on {calibration["windows"]} windows of {result["window"]} tokens of {calibration["text"]}
in {calibration["seconds"]:.0f} s. Measured on {measured}, evenly spread;
output errors on {result["output_error_tokens"]} tokens of the first.

{text}

KL is KL(original || converted) in nats per token. `out err weights` is the relative output error
of the weights alone, `layer` that of the converted layer, its quantized inputs included; both are
means over the linears, on inputs taken from the original model.
"""


def command(args: argparse.Namespace) -> str:
    """How to run this again, without what only this machine knows."""
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv]
    words = [args.model.name if word == str(args.model) else word for word in words]
    return shlex.join(["python", *words])


def device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def rounded(value: Any) -> Any:
    """Six significant digits: more is noise."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
