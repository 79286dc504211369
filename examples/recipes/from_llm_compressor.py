"""Come from llm-compressor and ModelOpt: read folders, translate a recipe."""

# --8<-- [start:imports]
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.checkpoint import transcode
from fp4pass.evaluation import token_windows

# --8<-- [end:imports]

# --8<-- [start:recipe]
# oneshot(model, dataset, recipe=GPTQModifier(
#     targets="Linear", scheme="NVFP4", ignore=["lm_head"]))
tokenizer = AutoTokenizer.from_pretrained("examples/tiny_lm")
model = AutoModelForCausalLM.from_pretrained("examples/tiny_lm", dtype="auto")
text = Path("examples/tiny_lm/calib.txt").read_text()
fp4pass.prepare(model, "gptq")
batches = token_windows(tokenizer, text, window=256, windows=8).split(4)
fp4pass.calibrate(model, batches, progress=False)
fp4pass.convert(model, "nvfp4", "gptq")
fp4pass.save(
    model, "out/compressed-tensors", tokenizer=tokenizer, overwrite=True
)
# --8<-- [end:recipe]

# --8<-- [start:read]
# Or a folder that one of them wrote.
loaded = fp4pass.load("out/compressed-tensors")
transcode("out/compressed-tensors", "out/modelopt", "modelopt", overwrite=True)
again = fp4pass.load("out/modelopt")
prompt = tokenizer("The function", return_tensors="pt")
same = torch.equal(loaded(**prompt).logits, again(**prompt).logits)
print(f"both folders give the same logits: {same}")
# --8<-- [end:read]
