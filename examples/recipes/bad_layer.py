"""Find the layer that hurts, see why, and mend it."""

# --8<-- [start:start]
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.evaluation import output_errors, token_windows
from fp4pass.reporting import write_report

MODEL = "examples/tiny_lm"
tokenizer = AutoTokenizer.from_pretrained(MODEL)
text = Path("examples/tiny_lm/calib.txt").read_text()
batches = token_windows(tokenizer, text, window=256, windows=4).split(4)


@torch.no_grad()
def original():
    """Make a weight of each block large, its input small; outputs stay."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto").eval()
    mlp = model.model.layers[2].mlp
    mlp.down_proj.weight[:, ::16] *= 32
    mlp.up_proj.weight[::16] /= 32
    return model


# --8<-- [end:start]

# --8<-- [start:find]
reference, model = original(), original()
fp4pass.convert(model, "nvfp4a16", "sse")
errors = output_errors(model, reference, batches, progress=False)
for name in sorted(errors, key=errors.get, reverse=True)[:3]:
    print(f"{errors[name]:6.1%}  {name}")
worst = max(errors, key=errors.get)
# --8<-- [end:find]

# --8<-- [start:page]
Path("out").mkdir(exist_ok=True)
write_report(
    model,
    "out/report.html",
    reference=reference,
    overwrite=True,
    progress=False,
)
# --8<-- [end:page]

# --8<-- [start:mend]
mended = fp4pass.prepare(original())
fp4pass.calibrate(mended, batches, progress=False)
rules = [(worst, {"fmt": "mxfp8a16"})]
fp4pass.convert(mended, "nvfp4a16", rules=rules)
after = output_errors(mended, reference, batches, progress=False)
print(f"{worst}: {errors[worst]:.1%} -> {after[worst]:.1%}")
# --8<-- [end:mend]
