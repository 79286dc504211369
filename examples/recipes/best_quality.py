"""Convert with the least error: later codes compensate for earlier ones."""

# --8<-- [start:start]
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.evaluation import token_windows

MODEL = "examples/tiny_lm"
tokenizer = AutoTokenizer.from_pretrained(MODEL)
reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
calib = Path("examples/tiny_lm/calib.txt").read_text()
held_out = Path("examples/tiny_lm/eval.txt").read_text()
batches = token_windows(tokenizer, calib, window=256, windows=16).split(8)


def kl(model):
    """Return how far the predictions moved, in nats per token."""
    return fp4pass.evaluate(
        model,
        tokenizer,
        held_out,
        reference=reference,
        window=256,
        windows=8,
        progress=False,
    ).kl


# --8<-- [end:start]

# --8<-- [start:naive]
naive = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
fp4pass.convert(naive, "nvfp4a16", "naive")
before = kl(naive)
# --8<-- [end:naive]

# --8<-- [start:best]
best = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
fp4pass.convert(best, "nvfp4a16", quality="best", data=batches)
after = kl(best)
print(f"KL: naive {before:.3f}, best {after:.3f}")
# --8<-- [end:best]
