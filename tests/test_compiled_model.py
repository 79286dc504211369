"""Converted decoders as they are served: compiled, generating, and packaged by AOTInductor."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.export import Dim

import fp4pass

pytest.importorskip("transformers")

DECODERS = {case.name: case for case in zoo.CASES if case.name in ("llama", "gemma3", "gpt2")}
# Format, weight_only, calibrated (else activations get the scale of their call).
SETTINGS = {
    "nvfp4-weights": ("nvfp4", True, False),
    "nvfp4-calibrated": ("nvfp4", False, True),
    "nvfp4-dynamic": ("nvfp4", False, False),
    "mxfp4-weights": ("mxfp4", True, False),
    "mxfp4": ("mxfp4", False, False),
}


def tokens(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(2, zoo.VOCAB, (batch, length), generator=generator)


def converted(
    name: str, fmt: str = "nvfp4", weight_only: bool = False, calibrated: bool = False
) -> nn.Module:
    model = DECODERS[name].build()
    if calibrated:
        fp4pass.prepare(model, "naive")
        fp4pass.calibrate(model, [tokens(2, 16)], progress=False)
    return fp4pass.convert(model, fmt, "naive", weight_only=weight_only)


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


PROMPTS = ((1, 5), (1, 11), (3, 7))


def generate(model: nn.Module, shape: tuple[int, int], **options: object) -> Tensor:
    ids = tokens(*shape)
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "setting"), [("forward", "nvfp4-calibrated"), ("automatic", "nvfp4-weights")]
)
def test_generation_with_a_static_cache_writes_what_eager_writes(how: str, setting: str) -> None:
    model = converted("llama", *SETTINGS[setting])
    expected = [generate(model, shape) for shape in PROMPTS]
    options: dict[str, object] = {"cache_implementation": "static"}
    if how == "forward":
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    else:
        # What transformers does by itself on a GPU; on a CPU it has to be told.
        from transformers import CompileConfig

        config = CompileConfig(backend="eager", mode=None, fullgraph=True)
        config._compile_all_devices = True
        options["compile_config"] = config
    torch._dynamo.utils.counters.clear()
    for shape, ids in zip(PROMPTS, expected, strict=True):
        assert torch.equal(generate(model, shape, **options), ids)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]


class Logits(nn.Module):
    """A decoder as a function of one tensor, for torch.export."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


# A process that serves the package: neither transformers nor the model's code.
SERVE = """
import sys
import torch
import fp4pass
package = torch._inductor.aoti_load_package(sys.argv[1] + "/model.pt2")
inputs = torch.load(sys.argv[1] + "/tensors.pt")
assert "transformers" not in sys.modules
torch.save([package(x) for x in inputs], sys.argv[1] + "/tensors.pt")
"""


def package(model: nn.Module, folder: Path, example: Tensor, shapes: object) -> None:
    with torch.no_grad():
        exported = torch.export.export(model, (example,), dynamic_shapes=(shapes,), strict=False)
        path = str(folder / "model.pt2")
        torch._inductor.aoti_compile_and_package(exported, package_path=path)


def difference(folder: Path, model: nn.Module, inputs: list[Tensor]) -> float:
    """The largest difference of the package's results to eager, of the largest result."""
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    torch.save(inputs, folder / "tensors.pt")
    command = [sys.executable, "-c", SERVE, str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "cwd": Path(__file__).parents[1], "env": env}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    found = torch.load(folder / "tensors.pt")
    pairs = zip(found, expected, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("weight_only", [True, False])
def test_a_packaged_decoder_gives_the_logits_of_eager(weight_only: bool, tmp_path: Path) -> None:
    model = Logits(converted("llama", weight_only=weight_only, calibrated=not weight_only))
    package(model, tmp_path, tokens(2, 9), {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})
    inputs = [tokens(*shape) for shape in ((2, 9), (3, 17))]
    # Sums are in another order: of at most 96 products, in two layers. With 4-bit inputs a code may
    # flip by it.
    bound = 2 * 96 * torch.finfo(torch.float32).eps if weight_only else 2e-2
    assert difference(tmp_path, model, inputs) <= bound


def test_weights_stay_packed_when_they_are_used() -> None:
    """Eager or compiled: what a model holds after a forward is what it held before."""
    model = converted("llama", weight_only=True)
    before = sizes(model)
    for code in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        logits(code, tokens(2, 9))
        assert sizes(model) == before


def sizes(model: nn.Module) -> dict[str, int]:
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: tensor.untyped_storage().nbytes() for name, tensor in tensors}
