"""A language model in 4 bits: load, calibrate, convert, compare, save, load, write."""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.evaluation import token_windows

# --8<-- [start:load]
MODEL = "examples/tiny_lm"  # or an id of the hub, such as "Qwen/Qwen3-0.6B"
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")  # to compare with
# --8<-- [end:load]

# --8<-- [start:convert]
text = Path("examples/tiny_lm/calib.txt").read_text()  # text like that the model will see
batches = token_windows(tokenizer, text, window=256, windows=16).split(8)
fp4pass.prepare(model)
fp4pass.calibrate(model, batches)
fp4pass.convert(model, "nvfp4a16")
print(fp4pass.report(model))
# --8<-- [end:convert]

# --8<-- [start:measure]
held_out = Path("examples/tiny_lm/eval.txt").read_text()
found = fp4pass.evaluate(
    model, tokenizer, held_out, reference=reference, window=256, windows=8, progress=False
)
print(f"perplexity {found.perplexity:.3f}, KL to the original {found.kl:.4f} nats per token")
# --8<-- [end:measure]

# --8<-- [start:save]
fp4pass.save(model, "tiny-nvfp4", tokenizer=tokenizer)
loaded = fp4pass.load("tiny-nvfp4")
prompt = tokenizer("The function returns", return_tensors="pt")
ids = loaded.generate(**prompt, max_new_tokens=20, do_sample=False)
print(tokenizer.decode(ids[0]))
# --8<-- [end:save]
