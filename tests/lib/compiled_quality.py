"""How far a converted language model is from the original, eager and compiled."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

import fp4pass
from fp4pass.evaluation import token_windows

BUNDLED = Path(__file__).parents[2] / "examples" / "tiny_lm"


def log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits.double().log_softmax(-1)


@torch.no_grad()
def divergences(
    folder: Path, text: Path, dtype: torch.dtype, fmt: str, windows: int, device: str = "cpu"
) -> tuple[float, float]:
    """KL to the original, in nats per token, of the eager model with 4-bit inputs and of the
    compiled one."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = token_windows(tokenizer, text.read_text(encoding="utf-8"), windows=windows).to(device)
    original = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    original.eval().to(device)
    model = fp4pass.prepare(copy.deepcopy(original), "naive")
    fp4pass.calibrate(model, [ids[:4]], progress=False)
    fp4pass.convert(model, fmt, "naive")
    code = torch.compile(model, fullgraph=True)
    eager = compiled = 0.0
    for chunk in ids.split(4):
        reference = log_probs(original, chunk)
        for_both = [
            (reference.exp() * (reference - log_probs(each, chunk))).sum().item()
            for each in (model, code)
        ]
        eager, compiled = eager + for_both[0], compiled + for_both[1]
    return eager / ids.numel(), compiled / ids.numel()
