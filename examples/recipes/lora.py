"""Train LoRA adapters on packed weights."""

# --8<-- [start:imports]
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.integrations import lora_config

tokenizer = AutoTokenizer.from_pretrained("examples/tiny_lm")
model = AutoModelForCausalLM.from_pretrained("examples/tiny_lm", dtype=torch.float32)
# --8<-- [end:imports]

# --8<-- [start:train]
fp4pass.convert(model, "nvfp4a16", "sse")
model = get_peft_model(model, lora_config(model, r=8, lora_alpha=16))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
batch = tokenizer("fp4pass keeps the packed weights as they are.", return_tensors="pt")
losses = []
for _ in range(10):
    loss = model(**batch, labels=batch.input_ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
model.save_pretrained("out/adapter")
# --8<-- [end:train]

# --8<-- [start:load]
base = AutoModelForCausalLM.from_pretrained("examples/tiny_lm", dtype=torch.float32)
fp4pass.convert(base, "nvfp4a16", "sse")
config = lora_config(adapter="out/adapter")
loaded = PeftModel.from_pretrained(base, "out/adapter", config=config)
with torch.no_grad():
    same = bool(torch.equal(loaded(**batch).logits, model(**batch).logits))
print(f"the loaded adapter gives the same logits: {same}")
# --8<-- [end:load]
