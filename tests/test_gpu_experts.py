"""Whole mixtures of experts on a GPU: the codes of the CPU, compiled, generated, saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import MODELS, UNREAD, build, ids, logits
from torch import Tensor

import fp4pass
from fp4pass.nn.experts import QuantizedExpertStack

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    # Inductor's advice, and what it says of transformers' softmax of routers and complex rotations.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex"),
]
every_model = pytest.mark.parametrize("name", MODELS)


def stacks(model: Any) -> dict[str, QuantizedExpertStack]:
    modules = model.named_modules()
    return {name: m for name, m in modules if isinstance(m, QuantizedExpertStack)}


@every_model
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_the_codes_are_those_of_the_cpu(name: str, fmt: str) -> None:
    cpu = fp4pass.convert(build(name, torch.bfloat16), fmt, "sse", weight_only=True)
    gpu = fp4pass.convert(build(name, torch.bfloat16).cuda(), fmt, "sse", weight_only=True)
    assert stacks(cpu) and stacks(cpu).keys() == stacks(gpu).keys()
    for key, stack in stacks(gpu).items():
        for ours, theirs in zip(stacks(cpu)[key].packed_weight, stack.packed_weight, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs.cpu()), key


@every_model
@pytest.mark.parametrize("weight_only", [True, False])
def test_calibrated_compiled_and_saved(name: str, weight_only: bool, tmp_path: Path) -> None:
    model = fp4pass.prepare(build(name).cuda(), rules=UNREAD.get(name, ()))
    fp4pass.calibrate(model, [ids(1).cuda(), ids(2).cuda()], progress=False)
    fp4pass.convert(model, weight_only=weight_only)
    x = ids().cuda()
    eager = logits(model, x)
    assert eager.isfinite().all()

    def step(x: Tensor) -> Tensor:
        return model(x, use_cache=False).logits

    with torch.no_grad():
        compiled = torch.compile(step, fullgraph=True, dynamic=False)(x)
    if weight_only:
        torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-3)
    else:
        # Codes of inputs flip where Inductor rounds elsewhere (docs/graphs.md).
        assert (compiled - eager).norm() < 0.2 * eager.norm()
    text = model.generate(x[:1, :8], min_new_tokens=8, max_new_tokens=8, do_sample=False)
    assert text.shape == (1, 16)
    fp4pass.save(model, tmp_path / "q", layout="fp4pass")
    assert torch.equal(logits(fp4pass.load(tmp_path / "q").cuda(), x), eager)
