"""Compile a converted language model ahead of time and run it without its code.

    python examples/aot_inductor.py [--model FOLDER] [--package model.pt2] [--device cuda]

Compiling needs a C++ compiler (g++) that does not link its C++ library statically. `fp4pass doctor`
says if it does. A process that runs the package needs torch, and fp4pass for the operators: `import
fp4pass` before `torch._inductor.aoti_load_package`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import AutoModelForCausalLM

import fp4pass

# Runs the package in a process that knows nothing of the model.
SERVE = """
import sys
import torch
import fp4pass
model = torch._inductor.aoti_load_package(sys.argv[1])
ids, expected = torch.load(sys.argv[2])
assert "transformers" not in sys.modules
error = float((model(ids) - expected).abs().max() / expected.abs().max())
print(f"another process, without transformers: within {error:.1e} of eager's largest logit")
"""


class Logits(nn.Module):
    """Compute the logits of a model as a function of one tensor [B, T]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def export(model: nn.Module, vocabulary: int) -> torch.export.ExportedProgram:
    """Return the graph of a model of logits, for every batch and every length."""
    device = next(model.parameters()).device
    example = torch.randint(vocabulary, (2, 16), device=device)
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    return torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=Path(__file__).parent / "tiny_lm")
    parser.add_argument("--package", help="keep the package here; its name ends in .pt2")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    model.to(args.device)
    vocabulary = model.config.vocab_size
    # With 4-bit inputs a code may flip, for compiled code sums in another order.
    model = Logits(fp4pass.convert(model, "nvfp4a16", "sse"))

    # --8<-- [start:package]
    exported = export(model, vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        target = args.package or str(Path(folder) / "model.pt2")
        compile_and_package = torch._inductor.aoti_compile_and_package
        package = compile_and_package(exported, package_path=target)
        # --8<-- [end:package]
        size = Path(package).stat().st_size / 1e6
        print(f"the package has {size:.1f} MB, weights packed")

        other = torch.randint(vocabulary, (3, 33), device=args.device)
        tensors = Path(folder) / "tensors.pt"
        torch.save((other, model(other)), tensors)
        served = subprocess.run([sys.executable, "-c", SERVE, package, str(tensors)])
        if served.returncode < 0:
            sys.exit("The process that loaded the package crashed: `fp4pass doctor` may say why.")
        served.check_returncode()


if __name__ == "__main__":
    main()
