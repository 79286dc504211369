"""Use several GPUs: each process calibrates on its share, and holds its part.

torchrun --nproc-per-node 2 examples/recipes/several_gpus.py
"""

# --8<-- [start:start]
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.evaluation import token_windows

MODEL = "examples/tiny_lm"
if "RANK" not in os.environ:
    print(
        "Start with: torchrun --nproc-per-node 2 "
        "examples/recipes/several_gpus.py",
        file=sys.stderr,
    )
    sys.exit(2)
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
tokenizer = AutoTokenizer.from_pretrained(MODEL)
text = Path("examples/tiny_lm/calib.txt").read_text()
windows = token_windows(tokenizer, text, window=256, windows=8)
# --8<-- [end:start]

# --8<-- [start:quantize]
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
fp4pass.prepare(model)
fp4pass.calibrate(model, windows.split(4)[rank::world], progress=False)
fp4pass.convert(model, "nvfp4a16")  # searches are divided
# The first process writes.
fp4pass.save(model, "out/ranks", tokenizer=tokenizer, overwrite=True)
# --8<-- [end:quantize]

# --8<-- [start:run]
model = fp4pass.load("out/ranks")
mesh = dist.init_device_mesh(device, (world,))
ids = tokenizer("The function returns", return_tensors="pt").input_ids.to(
    device
)
with torch.no_grad():
    whole = model.to(device)(ids).logits
    # This process keeps its part of each layer.
    fp4pass.parallelize(model.cpu(), mesh)
    logits = model(ids).logits
difference = float((logits - whole).abs().max() / whole.abs().max())
if rank == 0:
    print(f"{world} processes: logits within {difference:.1e} of one process's")
assert difference < 0.02
dist.destroy_process_group()
# --8<-- [end:run]
