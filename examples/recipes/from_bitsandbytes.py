"""Come from bitsandbytes: its formats to the bit, its layers by name."""

# --8<-- [start:imports]
import torch
from torch import nn

import fp4pass
import fp4pass.parity
from fp4pass.parity.bitsandbytes import dequantize_4bit, quantize_4bit

torch.manual_seed(0)
# --8<-- [end:imports]

# --8<-- [start:tensors]
weight = torch.randn(64, 128)
packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
back = dequantize_4bit(packed, state)
error = float((back - weight).norm() / weight.norm())
print(f"weight error of nf4: {error:.2%}")
# --8<-- [end:tensors]

# --8<-- [start:layers]
layer = fp4pass.parity.Linear4bit.from_linear(
    nn.Linear(128, 64), quant_type="nf4"
)

model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))
swapped = fp4pass.parity.swap(model, "nf4")
print(swapped)
# --8<-- [end:layers]

# --8<-- [start:convert]
model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64)).eval()
fp4pass.convert(model, "nvfp4a16", "sse")  # serving engines read this one
nvfp4 = fp4pass.dequantize(fp4pass.quantize(weight, "nvfp4"))
error = float((nvfp4 - weight).norm() / weight.norm())
print(f"weight error of nvfp4: {error:.2%}")
# --8<-- [end:convert]
