"""Give layers different formats, by rules on their names."""

# --8<-- [start:imports]
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass

# --8<-- [end:imports]

# --8<-- [start:rules]
model = AutoModelForCausalLM.from_pretrained("examples/tiny_lm", dtype="auto")
fp4pass.convert(
    model,
    "nvfp4a16",
    "sse",
    rules=[
        ("model.layers.0.*", None),  # the first layer stays as it is
        # 8 bits where errors cost most.
        ("*.down_proj", {"fmt": "mxfp8a16"}),
        ("*.[qkv]_proj", {"fmt": "mxfp4a16", "rotation": 64}),
    ],
)
report = fp4pass.report(model)
print(report)
# --8<-- [end:rules]

# --8<-- [start:recipe]
recipe = """
fmt: nvfp4a16
method: sse
rules:
  - "model.layers.0.*": null
  - "*.down_proj": {fmt: mxfp4a16}
"""
Path("out").mkdir(exist_ok=True)
Path("out/recipe.yaml").write_text(recipe)
arguments = fp4pass.Recipe.read("out/recipe.yaml").arguments()
model = AutoModelForCausalLM.from_pretrained("examples/tiny_lm", dtype="auto")
fp4pass.convert(model, **arguments)
tokenizer = AutoTokenizer.from_pretrained("examples/tiny_lm")
# Both formats are read by vLLM.
fp4pass.save(model, "out/mixed", tokenizer=tokenizer, overwrite=True)
# --8<-- [end:recipe]
