"""Convert a mixture: stacks are layers, experts have their own statistics."""

# --8<-- [start:model]
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fp4pass

torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=512,
    hidden_size=64,
    moe_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
model = Qwen3MoeForCausalLM(config).eval()
batches = torch.randint(512, (8, 64)).split(4)
# --8<-- [end:model]

# --8<-- [start:convert]
fp4pass.prepare(model)
fp4pass.calibrate(model, batches, progress=False)
# Stock transformers reads experts in mxfp4; vLLM, SGLang and fp4pass read both.
fp4pass.convert(model, "nvfp4a16", rules=[("*.experts.*", {"fmt": "mxfp4a16"})])
for row in fp4pass.report(model).converted:
    if row.expert_tokens:
        print(
            row.name,
            row.shape,
            "fewest, median and most tokens:",
            row.expert_tokens,
        )
# --8<-- [end:convert]

# --8<-- [start:skipped]
skipped = fp4pass.report(model).skipped
for row in skipped:
    print(row.name, "stays dense:", row.skip_reason)
fp4pass.save(model, "out/mixture", overwrite=True)
# --8<-- [end:skipped]
