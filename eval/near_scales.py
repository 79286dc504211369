"""How much of the gain of the best activation scales a few candidates near the naive one have.

    python eval/near_scales.py [--model DIR] [--text FILE] [--windows N]

For the inputs of every linear of a causal language model, in float32: the squared error with the
best of some candidates, relative to that with naive scales, a mean over the linears; and the part
of the gain of all scales that this is. Candidates are steps from the naive scale, or those that the
kernels try (kernels/quantize/block_tiles.py).
"""

from __future__ import annotations

import math
from typing import Any

import quality
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp4pass.core.formats import Format, get_format
from fp4pass.evaluation import token_windows
from fp4pass.kernels.common.rounding import round_to_scale, round_to_values_, scale_values
from fp4pass.kernels.quantize.naive import quantize_ref

KERNEL = "kernels"
CANDIDATES: dict[str, tuple[tuple[int, ...] | str, ...]] = {
    "nvfp4": ((0, 5), (-1, 0, 5), KERNEL, (-1, 0, 4, 5), (-1, 0, 1, 4, 5)),
    "mxfp4": (KERNEL,),
}


def main() -> None:
    parser = quality.make_parser(__doc__)
    parser.set_defaults(windows=2)
    args = parser.parse_args()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    path = (args.text or [quality.TINY / "eval.txt"])[0]
    tokens = token_windows(tokenizer, quality.read(path), window=args.window, windows=args.windows)
    inputs = inputs_of(model, tokens)
    for name, sets in CANDIDATES.items():
        fmt = get_format(name)
        rows = [relative_errors(x, fmt, sets) for x in inputs]
        *near, best = (sum(column) / len(column) for column in zip(*rows, strict=True))
        for steps, error in zip(sets, near, strict=True):
            print(f"{name} {steps}: {error:.4f}, {(1 - error) / (1 - best):.0%} of the gain")
        print(f"{name} all scales: {best:.4f}")


@torch.no_grad()
def inputs_of(model: Any, tokens: Tensor) -> list[Tensor]:
    """What every linear but the output embedding is called with: [tokens, K] each."""
    found: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor]) -> None:
        found.append(args[0].flatten(0, -2))

    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    handles = [linear.register_forward_pre_hook(keep) for linear in linears]
    model(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def relative_errors(x: Tensor, fmt: Format, sets: tuple[tuple[int, ...] | str, ...]) -> list[float]:
    """The squared errors of x [M, K] with each set of candidates, and with all scales, by that with
    naive scales."""
    g = fmt.global_scale_for(x.abs().max().item())
    divisor = torch.tensor([1 / g]) if fmt.has_global_scale else None
    naive, best = (quantize_ref(x, divisor, fmt, scales)[1] for scales in ("naive", "sse"))
    base = naive.int()

    def errors(byte: Tensor) -> Tensor:
        step = scale_values(byte.clamp(1, fmt.scale.last), fmt.scale).mul_(g).unsqueeze(-1)
        blocks = x.unflatten(-1, (-1, fmt.block))
        return (blocks - round_to_values_(blocks / step, fmt.element) * step).square().sum(-1)

    def least(candidates: tuple[int, ...] | str) -> float:
        if candidates == KERNEL:
            options = kernel_candidates(x, base, g, fmt)
        else:
            options = [base + int(step) for step in candidates]
        return torch.stack([errors(each) for each in options]).amin(0).sum().item()

    whole = math.fsum(errors(base).flatten().tolist())
    near = [least(candidates) for candidates in sets]
    return [error / whole for error in (*near, errors(best.int()).sum().item())]


def kernel_candidates(x: Tensor, naive: Tensor, g: float, fmt: Format) -> list[Tensor]:
    """The bytes that the kernels try: the naive one, the one below it, and for nvfp4 that which
    maps amax to 4; there the one below only if amax still rounds to 6."""
    lower = naive - 1
    if fmt.scale.mantissa_bits == 0:
        return [naive, lower]
    quotient = x.unflatten(-1, (-1, fmt.block)).abs().amax(-1) / (fmt.element.max * g)
    fits = quotient < scale_values(lower.clamp(min=1), fmt.scale) * 1.15
    four = round_to_scale(quotient * (fmt.element.max / 4), fmt.scale)
    return [naive, torch.where(fits, lower, naive), four.int()]


if __name__ == "__main__":
    main()
