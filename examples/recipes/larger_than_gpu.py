"""Convert a model larger than the GPU, or than memory, one layer at a time."""

# --8<-- [start:text]
from pathlib import Path

from transformers import AutoTokenizer

import fp4pass
from fp4pass.evaluation import token_windows

MODEL = "examples/tiny_lm"
tokenizer = AutoTokenizer.from_pretrained(MODEL)
text = Path("examples/tiny_lm/calib.txt").read_text()
batches = token_windows(tokenizer, text, window=256, windows=8).split(4)
# --8<-- [end:text]

# --8<-- [start:stream]
report = fp4pass.quantize_checkpoint(
    MODEL, "out/streamed", data=batches, overwrite=True
)
print(f"{len(report.converted)} layers")
# --8<-- [end:stream]

# --8<-- [start:load]
# GPUs first, then memory.
model = fp4pass.load("out/streamed", device_map="auto")
print(f"{model.get_memory_footprint() / 1e6:.1f} MB on {model.device}")
# --8<-- [end:load]
