"""Load a language model, calibrate, convert, compare, save and generate."""

# --8<-- [start:imports]
# Python's own manual: a text that is always there.
from pydoc_data.topics import topics

from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.evaluation import token_windows

# --8<-- [end:imports]

# --8<-- [start:model]
MODEL = "examples/tiny_lm"  # a folder, or an id of the hub
# --8<-- [end:model]

# --8<-- [start:load]
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
# --8<-- [end:load]

# --8<-- [start:data]
pages = list(topics.values())
text = "\n\n".join(pages[::2])  # text like that the model will see is better
batches = token_windows(tokenizer, text, window=256, windows=16).split(8)
# --8<-- [end:data]

# --8<-- [start:convert]
fp4pass.prepare(model)
fp4pass.calibrate(model, batches)
fp4pass.convert(model, "nvfp4a16")
# --8<-- [end:convert]

# --8<-- [start:report]
print(fp4pass.report(model))
# --8<-- [end:report]

# --8<-- [start:measure]
held_out = "\n\n".join(pages[1::2])
original = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
options = {"window": 256, "windows": 8, "progress": False}
before = fp4pass.evaluate(original, tokenizer, held_out, **options)
after = fp4pass.evaluate(
    model, tokenizer, held_out, reference=original, **options
)
print(f"perplexity {before.perplexity:.3f} -> {after.perplexity:.3f}")
print(f"KL to the original {after.kl:.4f} nats per token")
# --8<-- [end:measure]

# --8<-- [start:save]
fp4pass.save(model, "out/five-minutes", tokenizer=tokenizer, overwrite=True)
# --8<-- [end:save]

# --8<-- [start:generate]
loaded = fp4pass.load("out/five-minutes")
prompt = tokenizer("The function returns", return_tensors="pt")
ids = loaded.generate(**prompt, max_new_tokens=20, do_sample=False)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
# --8<-- [end:generate]
