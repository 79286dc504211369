"""Add a format and a method of your own, each by one entry."""

# --8<-- [start:imports]
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

import fp4pass
from fp4pass.core.elements import Element
from fp4pass.core.formats import E4M3, FORMATS, Format
from fp4pass.methods import method, search_scales

# --8<-- [end:imports]

# --8<-- [start:format]
E1M2 = Element.binary("e1m2", bits=4, mantissa_bits=2, min_exponent=0)
FORMATS["nv_e1m2"] = Format(
    "nv_e1m2", E1M2, E4M3, block=16, blocks=(16, 32), has_global_scale=True
)
# --8<-- [end:format]


# --8<-- [start:method]
@dataclass(frozen=True)
class Diagonal:
    """Weigh squared errors by the mean square of each input."""


@method("diagonal", Diagonal, needs=("block_hessian",))
def diagonal(weight, stats, fmt, global_scale, options):
    squares = stats.block_hessian.diagonal(dim1=1, dim2=2)
    return search_scales(
        weight, fmt, global_scale, "hessian", torch.diag_embed(squares)
    )


# --8<-- [end:method]

# --8<-- [start:use]
model = AutoModelForCausalLM.from_pretrained("examples/tiny_lm", dtype="auto")
fp4pass.prepare(model, "diagonal")
torch.manual_seed(0)
fp4pass.calibrate(model, torch.randint(2048, (4, 64)).split(2), progress=False)
fp4pass.convert(model, "nv_e1m2a16")
print(fp4pass.report(model))
# --8<-- [end:use]
