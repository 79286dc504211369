"""From llm-compressor and ModelOpt: read their folders, and what a recipe becomes."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.checkpoint import transcode
from fp4pass.evaluation import token_windows

# --8<-- [start:recipe]
# oneshot(model, dataset, recipe=GPTQModifier(targets="Linear", scheme="NVFP4", ignore=["lm_head"]))
tokenizer = AutoTokenizer.from_pretrained("examples/tiny_lm")
model = AutoModelForCausalLM.from_pretrained("examples/tiny_lm", dtype="auto")
text = Path("examples/tiny_lm/calib.txt").read_text()
fp4pass.prepare(model, "gptq")
batches = token_windows(tokenizer, text, window=256, windows=8).split(4)
fp4pass.calibrate(model, batches, progress=False)
fp4pass.convert(model, "nvfp4", "gptq")
fp4pass.save(model, "tiny-ct", tokenizer=tokenizer)  # save_pretrained(..., save_compressed=True)
# --8<-- [end:recipe]

# --8<-- [start:read]
loaded = fp4pass.load("tiny-ct")  # or a folder that llm-compressor or ModelOpt wrote
transcode("tiny-ct", "tiny-modelopt", "modelopt")  # from one layout to the other, bits kept
again = fp4pass.load("tiny-modelopt")
# --8<-- [end:read]
prompt = tokenizer("The function", return_tensors="pt")
same = torch.equal(loaded(**prompt).logits, again(**prompt).logits)
print(f"both folders give the same logits: {same}")
