"""The exponent of a power-of-two scale: that of amax, or of amax rounded up where that is as near.

    python eval/mx_exponent.py [--model DIR --calib FILE --text FILE] [--json OUT]

`naive` does the second, which other libraries call EVEN (OCP MX v1.0 has the first); this measures
both in mxfp4 on the same tokens, and what is different with its interval.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import quality
import torch
import transformers
from measuring import Results, command, machine, require_apart
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.core.formats import Format
from fp4pass.core.packing import pack_codes
from fp4pass.core.quant_state import QuantState
from fp4pass.evaluation import token_windows
from fp4pass.kernels.common.rounding import float_exponent, power_of_two, round_to_codes_
from fp4pass.methods import method


@dataclass(frozen=True)
class Floor:
    """Options of the method "floor": none."""


@method("floor", Floor)
def floor(
    weight: Tensor, stats: Any, fmt: Format, global_scale: float, options: Floor
) -> QuantState:
    """Take the exponent of amax, less that of the largest element."""
    blocks = weight.detach().float().reshape(len(weight), -1, fmt.block)
    exponent = float_exponent(blocks.abs().amax(2)) - math.frexp(fmt.element.max)[1] + 1
    exponent.clamp_(1 - fmt.scale.bias, fmt.scale.last - fmt.scale.bias)
    codes = round_to_codes_(blocks / power_of_two(exponent)[..., None], fmt.element)
    packed = pack_codes(codes.reshape(len(weight), -1), fmt.element.bits)
    scale = (exponent + fmt.scale.bias).to(torch.uint8)
    return QuantState(packed, scale, 1.0, fmt, tuple(weight.shape), weight.dtype)


def main() -> None:
    parser = quality.make_parser(__doc__)
    parser.set_defaults(windows=32)
    args = parser.parse_args()
    args.text = args.text or [quality.TINY / "eval.txt"]
    transformers.logging.disable_progress_bar()
    for path in args.text:
        require_apart(args.calib, path)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model = model.to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    calib = token_windows(
        tokenizer, quality.read(args.calib), window=args.window, windows=args.samples
    )
    prepared = fp4pass.prepare(copy.deepcopy(model), "naive")
    fp4pass.calibrate(prepared, calib.split(args.batch_size), progress=False)
    reference = quality.Remembered(model).eval()
    about = {
        "command": command(args.model),
        **machine(args.device),
        "model": args.model.name,
        "window": args.window,
        "windows": args.windows,
    }
    results = Results(args.json, about, again=args.again, key=("weight_only", "method"))
    for weight_only in (True, False):
        before: dict[str, Any] = {}
        for name in ("floor", "naive"):
            converted = copy.deepcopy(prepared)
            fp4pass.convert(converted, "mxfp4", name, weight_only=weight_only)
            found = quality.measure(converted, reference, tokenizer, args)
            texts = {
                text: quality.measures(here)
                | {"change": quality.changes(here.difference(before[text])) if before else None}
                for text, here in found.items()
            }
            before = before or found
            results.put({"weight_only": weight_only, "method": name, "texts": texts})
            for text, here in found.items():
                print(weight_only, name, text, f"ppl {here.perplexity:.4f} KL {here.kl:.5f}")


if __name__ == "__main__":
    main()
