"""Write a converted model as ONNX, its weights packed, and run it with onnxruntime."""

# --8<-- [start:plain]
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import fp4pass

FORMAT = globals().get("FORMAT", "nvfp4a16")
folder = "examples/tiny_lm"
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model.eval()
fp4pass.convert(model, FORMAT, "sse")
ids = torch.randint(model.config.vocab_size, (2, 16))
graph = fp4pass.trace(model, {"input_ids": ids}, cache_length=0, plain=True)
# --8<-- [end:plain]


# --8<-- [start:export]
class Logits(torch.nn.Module):
    def __init__(self, graph):
        super().__init__()
        self.model, self.training = graph, False

    def forward(self, ids):
        return self.model(input_ids=ids).logits


sizes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
names = {"input_names": ["ids"], "output_names": ["logits"]}
options = {"dynamo": True, "dynamic_shapes": sizes, "optimize": False, **names}
program = torch.onnx.export(Logits(graph), (ids,), **options)
Path("out").mkdir(exist_ok=True)
path = f"out/{FORMAT}.onnx"
program.save(path)
# --8<-- [end:export]

# --8<-- [start:run]
import onnxruntime  # noqa: E402

session = onnxruntime.InferenceSession(path)
other = torch.randint(model.config.vocab_size, (3, 9))
(logits,) = session.run(None, {"ids": other.numpy()})
with torch.no_grad():
    difference = (torch.from_numpy(logits) - model(other).logits).abs().max()
size = Path(path).stat().st_size / 1e6
print(f"{size:.1f} MB, logits differ by {difference:.0e} at most")
# --8<-- [end:run]
