"""Export a model's graph, convert and save it, and run it without its code."""

# --8<-- [start:load]
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import fp4pass

model = AutoModelForCausalLM.from_pretrained(
    "examples/tiny_lm", dtype=torch.float32
).eval()
ids = torch.randint(model.config.vocab_size, (2, 16))
# --8<-- [end:load]

# --8<-- [start:trace]
graph = fp4pass.trace(model, {"input_ids": ids}, cache_length=0)
fp4pass.prepare(graph)
fp4pass.calibrate(graph, [{"input_ids": ids}], progress=False)
fp4pass.convert(graph, "nvfp4a16")
products = [node for node in graph.graph.nodes if "fp4pass" in str(node.target)]
print(f"{len(products)} nodes of fp4pass in the graph")
# --8<-- [end:trace]


# --8<-- [start:export]
class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


packed = Logits(fp4pass.convert(model, "nvfp4a16", "sse"))
sizes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
program = torch.export.export(
    packed, (ids,), dynamic_shapes=sizes, strict=False
)
Path("out").mkdir(exist_ok=True)
torch.export.save(program, "out/tiny.pt2")
# --8<-- [end:export]

# --8<-- [start:run]
loaded = torch.export.load("out/tiny.pt2").module()
other = torch.randint(model.config.vocab_size, (3, 9))
same = torch.equal(loaded(other), packed(other))
print(f"the loaded program gives the same logits: {same}")
# --8<-- [end:run]
