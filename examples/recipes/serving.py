"""Folders for vLLM, SGLang and transformers serve, and what they look for in them."""

# --8<-- [start:imports]
import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass

# --8<-- [end:imports]

# --8<-- [start:save]
tokenizer = AutoTokenizer.from_pretrained("examples/tiny_lm")
model = AutoModelForCausalLM.from_pretrained("examples/tiny_lm", dtype="auto")
fp4pass.convert(model, "nvfp4a16", "sse")
fp4pass.save(model, "out/served", tokenizer=tokenizer, overwrite=True)
# --8<-- [end:save]

# --8<-- [start:check]
config = json.loads(Path("out/served/config.json").read_text())["quantization_config"]
print(config["quant_method"], config["format"], "ignores", config["ignore"])
with safe_open("out/served/model.safetensors", "pt") as file:
    names = sorted(name for name in file.keys() if ".layers.0.self_attn.q_proj." in name)
print(*names, sep="\n")
# --8<-- [end:check]

# --8<-- [start:transformers]
served = AutoModelForCausalLM.from_pretrained("out/served", dtype="auto")
prompt = tokenizer("The function returns a", return_tensors="pt")
same = torch.equal(served(**prompt).logits, model(**prompt).logits)
print(f"stock transformers gives the same logits: {same}")
# --8<-- [end:transformers]
