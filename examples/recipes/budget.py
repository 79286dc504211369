"""Choose the scheme of each layer under a budget, by measuring."""

# --8<-- [start:imports]
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.reporting import write_report

# --8<-- [end:imports]

# --8<-- [start:allocate]
model = AutoModelForCausalLM.from_pretrained("examples/tiny_lm", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("examples/tiny_lm")
text = Path("examples/tiny_lm/calib.txt").read_text()
found = fp4pass.allocate(
    model,
    bits=5.0,
    schemes=("nvfp4a16", "mxfp8a16"),
    data=text,
    tokenizer=tokenizer,
    seq_len=256,
)
print(found)
# --8<-- [end:allocate]

# --8<-- [start:convert]
fp4pass.convert(model, **found.recipe.arguments())
fp4pass.save(model, "out/budget", tokenizer=tokenizer, overwrite=True)
write_report("out/budget", "out/budget.html", overwrite=True)
# --8<-- [end:convert]
