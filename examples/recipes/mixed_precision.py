"""Different layers in different formats, by rules on their names."""

from transformers import AutoModelForCausalLM

import fp4pass

# --8<-- [start:rules]
model = AutoModelForCausalLM.from_pretrained("examples/tiny_lm", dtype="auto")
fp4pass.convert(
    model,
    "nvfp4a16",
    "sse",
    rules=[
        ("model.layers.0.*", None),  # the first layer stays as it is
        ("*.down_proj", {"fmt": "mxfp8_e4m3a16"}),  # 8 bits where errors cost most
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
with open("recipe.yaml", "w") as file:
    file.write(recipe)
arguments = fp4pass.Recipe.read("recipe.yaml").arguments()
model = AutoModelForCausalLM.from_pretrained("examples/tiny_lm", dtype="auto")
fp4pass.convert(model, **arguments)
fp4pass.save(model, "tiny-mixed")  # vLLM reads both formats in one folder
# --8<-- [end:recipe]
