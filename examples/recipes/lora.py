"""Train LoRA adapters on packed weights."""

# --8<-- [start:imports]
import copy

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass

tokenizer = AutoTokenizer.from_pretrained("examples/tiny_lm")
model = AutoModelForCausalLM.from_pretrained(
    "examples/tiny_lm", dtype=torch.float32
)
# --8<-- [end:imports]

# --8<-- [start:train]
fp4pass.convert(model, "nvfp4a16", "sse")
torch.manual_seed(0)
model = get_peft_model(
    model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
)
optimizer = torch.optim.AdamW(
    [p for p in model.parameters() if p.requires_grad], lr=2e-3
)
batch = tokenizer(
    "fp4pass keeps the packed weights as they are.", return_tensors="pt"
)
losses = []
for _ in range(10):
    loss = model(**batch, labels=batch.input_ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model.save_pretrained("out/adapter")
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
# --8<-- [end:train]

# --8<-- [start:load]
base = AutoModelForCausalLM.from_pretrained(
    "examples/tiny_lm", dtype=torch.float32
)
fp4pass.convert(base, "nvfp4a16", "sse")  # or fp4pass.load(dir)
loaded = PeftModel.from_pretrained(base, "out/adapter")
with torch.no_grad():
    logits = loaded(**batch).logits
    same = bool(torch.equal(logits, model(**batch).logits))
print(f"the loaded adapter gives the same logits: {same}")
# --8<-- [end:load]

# --8<-- [start:merge]
data = fp4pass.calibration.batches(
    "examples/tiny_lm/calib.txt",
    tokenizer,
    samples=32,
    seq_len=128,
    batch_size=4,
)
found = {}
for method in ("sse", "gptq"):
    found[method] = fp4pass.merge(copy.deepcopy(loaded), method, data=data)
    kept = 1 - found[method].kl_after / found[method].kl_without
    count = len(found[method].layers)
    print(f"{method}: {count} layers, {kept:.0%} of the adapter kept")
merged = found["gptq"].model  # a converted model, without PEFT
fp4pass.save(merged, "out/merged", tokenizer=tokenizer, overwrite=True)
# --8<-- [end:merge]

# --8<-- [start:dense]
fp4pass.dequantize(loaded)
dense = loaded.merge_and_unload()  # a dense model of transformers
with torch.no_grad():
    difference = (dense(**batch).logits - logits).abs().max().item()
print(f"merged, its logits are less than 1e-3 away: {difference < 1e-3}")
# --8<-- [end:dense]
