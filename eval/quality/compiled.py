"""How far torch.compile moves a converted language model, against how far 4 bits moved it.

    python -m eval.quality.compiled --model examples/tiny_lm --text examples/tiny_lm/eval.txt --json OUT

Inductor sums in another order than eager, calls other exponentials, and keeps float32 where eager
rounds to the model's dtype. So the input of a quantizer may move by an ulp; where that crosses a
rounding boundary, the code moves by a step, and what follows with it. The compiled model is another
model then, and no worse: `ratio` is its KL to the original over that of the eager one, `error` the
standard error of the ratio over windows. KL is in nats per token; format `none` compares the
compiled float model with the eager one.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import shlex
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.evaluation import token_windows

# Format (None: not converted), and whether inputs stay in float.
SETTINGS = [(None, True), ("nvfp4", True), ("nvfp4", False), ("mxfp4", True), ("mxfp4", False)]


def main() -> None:
    args = parse_args()
    transformers.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = Path(args.text).read_text(encoding="utf-8")
    ids = token_windows(tokenizer, text, windows=args.windows).to(args.device)
    rows = []
    for dtype in args.dtypes:
        load = AutoModelForCausalLM.from_pretrained
        original = load(args.model, dtype=getattr(torch, dtype)).eval().to(args.device)
        for fmt, weight_only in SETTINGS:
            model = copy.deepcopy(original)
            if fmt is not None:
                fp4pass.prepare(model, "sse")
                fp4pass.calibrate(model, [ids[:4]], progress=False)
                fp4pass.convert(model, fmt, "sse", weight_only=weight_only)
            row = {"dtype": dtype, "format": fmt or "none"}
            row["inputs"] = "float" if weight_only or fmt is None else "4 bit"
            rows.append(row | distances(original, model, ids))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if args.json:
        result = {
            "command": shlex.join(
                ["python", *(Path(w).name if os.path.isabs(w) else w for w in sys.argv)]
            ),
            "machine": torch.cuda.get_device_name() if ids.is_cuda else platform.machine(),
            "threads": torch.get_num_threads(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "fp4pass": fp4pass.__version__,
            },
            "windows": list(ids.shape),
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")


@torch.no_grad()
def distances(
    original: torch.nn.Module, model: torch.nn.Module, ids: torch.Tensor
) -> dict[str, float]:
    """KL between the original, the eager model and the compiled one."""
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    found = []
    for window in ids.split(1):
        logits = [m(window, use_cache=False).logits for m in (original, model, compiled)]
        p, eager, code = (each.double().log_softmax(-1) for each in logits)
        found.append([kl(p, eager), kl(p, code), kl(eager, code)])
    each = torch.tensor(found, dtype=torch.float64)
    mean = each.mean(0).tolist()
    names = ("original_to_eager", "original_to_compiled", "eager_to_compiled")
    result = {name: round(value, 6) for name, value in zip(names, mean, strict=True)}
    if mean[0]:
        error = (each[:, 1] - each[:, 0]).std() / len(each) ** 0.5
        result |= {"ratio": round(mean[1] / mean[0], 4), "error": round(float(error) / mean[0], 4)}
    return result


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return (p.exp() * (p - q)).sum(-1).mean().item()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a causal LM")
    parser.add_argument("--text", required=True)
    parser.add_argument("--windows", type=int, default=64, help="of 512 tokens")
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
