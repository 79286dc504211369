"""Come from qwantize: its functions under their names, then whole models."""

# --8<-- [start:imports]
import torch

from fp4pass import functional
from fp4pass.parity import qwantize as F

# --8<-- [end:imports]

# --8<-- [start:compat]
torch.manual_seed(0)
weight, inputs = torch.randn(64, 128) * 0.02, torch.randn(512, 128)
blocks = weight.unflatten(-1, (-1, 16))
scales, quants, dequant = F.nvfp4_optimal_hessian(
    blocks, return_dequant=True, X=inputs
)
before = F.compute_metrics(blocks, dequant, inputs)
print({name: round(value, 4) for name, value in before.items()})
# --8<-- [end:compat]

# --8<-- [start:functional]
found = functional.quantize_blocks(blocks, "nvfp4", "hessian", inputs=inputs)
after = functional.error_metrics(blocks, found.dequantize(), inputs)
print({name: round(value, 4) for name, value in after.items()})
# --8<-- [end:functional]
