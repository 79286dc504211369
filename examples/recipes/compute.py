"""Quantize inputs to 4 bits, and multiply many rows on FP8 tensor cores."""

# --8<-- [start:load]
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.evaluation import token_windows

MODEL = "examples/tiny_lm"
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
text = Path("examples/tiny_lm/calib.txt").read_text()
batches = token_windows(tokenizer, text, window=256, windows=16).split(8)
# --8<-- [end:load]

# --8<-- [start:inputs]
fp4pass.prepare(model)
# Also finds the global scales of inputs.
fp4pass.calibrate(model, batches, progress=False)
# Weights and inputs in 4 bits.
fp4pass.convert(model, "nvfp4", activation_scales="sse")
fp4pass.save(model, "out/w4a4", tokenizer=tokenizer, overwrite=True)
w4a4 = fp4pass.report(model).converted[0].config
print(f"{w4a4.fmt}, weights only: {w4a4.weight_only}", end=", ")
print(f"input scales: {w4a4.activation_scales}")
# --8<-- [end:inputs]

# --8<-- [start:fp8]
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
fp4pass.convert(model, "nvfp4a16", "sse")
fp4pass.set_compute(model, "fp8")  # "input" takes it back
# --8<-- [end:fp8]

# --8<-- [start:measure]
torch.manual_seed(0)
ids = torch.randint(model.config.vocab_size, (2, 64))
with torch.no_grad():
    fp8 = model(ids).logits
    plain = fp4pass.set_compute(model, "input")(ids).logits
changed = float((fp8 - plain).norm() / plain.norm())
print(f"fp8 products change the logits by {changed:.1%} of their norm")
# --8<-- [end:measure]
