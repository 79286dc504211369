"""Folders for vLLM, SGLang and transformers serve, and what they look for in them."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass

# --8<-- [start:save]
tokenizer = AutoTokenizer.from_pretrained("examples/tiny_lm")
model = AutoModelForCausalLM.from_pretrained("examples/tiny_lm", dtype="auto")
fp4pass.convert(model, "nvfp4a16", "sse")
fp4pass.save(model, "tiny-served", tokenizer=tokenizer)
# --8<-- [end:save]

# --8<-- [start:check]
config = json.loads(Path("tiny-served/config.json").read_text())["quantization_config"]
print(config["quant_method"], config["format"], "ignores", config["ignore"])
with safe_open("tiny-served/model.safetensors", "pt") as file:
    names = sorted(name for name in file.keys() if ".layers.0.self_attn.q_proj." in name)
print(*names, sep="\n")
# --8<-- [end:check]

# --8<-- [start:transformers]
served = AutoModelForCausalLM.from_pretrained("tiny-served", dtype="auto")
# --8<-- [end:transformers]
prompt = tokenizer("The function returns a", return_tensors="pt")
same = torch.equal(served(**prompt).logits, model(**prompt).logits)
print(f"stock transformers gives the same logits: {same}")
