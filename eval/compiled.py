"""How far torch.compile moves a converted language model, against how far 4 bits moved it.

    python eval/compiled.py --model examples/tiny_lm --text examples/tiny_lm/eval.txt --json OUT

Inductor sums in another order than eager, calls other exponentials, and keeps float32 where eager
rounds to the model's dtype. So the input of a quantizer may move by an ulp; where that crosses a
rounding boundary, the code moves by a step, and what follows with it. `how` is "inductor" for its
defaults, "casts" for its option emulate_precision_casts, and "fp4pass" for what `convert` sets up.
KL is in nats per token; format `none` compares the compiled float model with the eager one.
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
from torch._inductor import config as inductor_config
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.evaluation import token_windows
from fp4pass.graph import inductor


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
                fp4pass.calibrate(model, [ids], progress=False)
                fp4pass.convert(model, fmt, "sse", weight_only=weight_only)
            for how in args.how:
                row = {"dtype": dtype, "format": fmt or "none", "how": how}
                row["inputs"] = "float" if weight_only or fmt is None else "4 bit"
                rows.append(row | distances(original, model, ids, how))
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


SETTINGS = [(None, True), ("nvfp4", True), ("nvfp4", False), ("mxfp4", True), ("mxfp4", False)]


HOW: dict[str, dict[str, object]] = {
    "inductor": {**dict.fromkeys(inductor.PASSES), "emulate_precision_casts": False},
    "casts": {**dict.fromkeys(inductor.PASSES), "emulate_precision_casts": True},
    "fp4pass": {},
}


@torch.no_grad()
def distances(
    original: torch.nn.Module, model: torch.nn.Module, ids: torch.Tensor, how: str
) -> dict[str, float]:
    """KL between the original, the eager model and the compiled one."""
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    with inductor_config.patch(HOW[how]):
        logits = [m(ids, use_cache=False).logits for m in (original, model, compiled)]
    p, eager, code = (each.double().log_softmax(-1) for each in logits)
    return {
        "original_to_eager": round(kl(p, eager), 6),
        "original_to_compiled": round(kl(p, code), 6),
        "eager_to_compiled": round(kl(eager, code), 6),
    }


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return (p.exp() * (p - q)).sum(-1).mean().item()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a causal LM")
    parser.add_argument("--text", required=True)
    parser.add_argument("--windows", type=int, default=4, help="of 512 tokens")
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--how", nargs="+", choices=HOW, default=list(HOW))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
