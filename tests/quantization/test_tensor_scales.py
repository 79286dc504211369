"""One scale for layers that engines fuse, where a format has a scale for a tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import TINY, language_model
from torch import Tensor, nn

import fp4pass
from fp4pass.core.formats import FORMATS
from fp4pass.kernels.search.float_scales import search_float_scales

FMT = FORMATS["fp8_tensor"]


class Block(nn.Module):
    """Layers that read one input; engines fuse the first three."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, rows, size in (("q", 64, 1.0), ("k", 32, 1.7), ("v", 32, 0.3), ("o", 64, 2.9)):
            layer = nn.Linear(64, rows)
            nn.init.normal_(layer.weight, std=size)
            self.add_module(f"{name}_proj", layer)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.children()], -1)


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(96, 64, generator=generator) * torch.logspace(-1, 1, 64)


def converted(method: Any, scheme: str = "fp8_tensora16", **options: Any) -> Any:
    return fp4pass.convert(
        Block().eval(), scheme, method, data=[inputs()], progress=False, **options
    )


def scales(block: Any) -> dict[str, float]:
    return {name: float(layer.weight_scale) for name, layer in block.named_children()}


@pytest.mark.parametrize("method", ["naive", "sse", "hessian", "gptq"])
def test_it_is_that_of_the_layers_as_one_matrix(method: str) -> None:
    found, block = converted(method), Block()
    whole = torch.cat([block.get_submodule(f"{name}_proj").weight for name in "qkv"])
    hessian = None
    if method in ("hessian", "gptq"):
        x = inputs()
        full = x.t() @ x
        hessian = torch.stack([full[i : i + 32, i : i + 32] for i in (0, 32)])
    objective = "hessian" if method == "gptq" else method
    codes, scale = search_float_scales(whole.detach(), hessian, FMT, objective)
    own = scales(found)
    assert own["q_proj"] == own["k_proj"] == own["v_proj"] == float(scale)
    assert own["o_proj"] != own["q_proj"]
    if method != "gptq":
        packed = torch.cat([found.get_submodule(f"{name}_proj").weight_packed for name in "qkv"])
        assert torch.equal(packed, codes)


def test_other_formats_and_rules_choose_their_own() -> None:
    rules: Any = [("v_proj", {"fmt": "fp8"}), ("k_proj", None)]
    own = converted("sse", rules=rules)
    alone = fp4pass.convert(nn.ModuleDict({"x": Block().q_proj}), "fp8_tensora16", "sse")
    assert float(own.q_proj.weight_scale) == float(alone["x"].weight_scale)


def test_methods_that_differ_take_the_largest_magnitude() -> None:
    own = scales(converted("sse", rules=[("v_proj", {"method": "naive"})]))
    assert own["q_proj"] == own["k_proj"] == own["v_proj"]
    assert own["q_proj"] == scales(converted("naive"))["q_proj"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("sequential", [False, True])
def test_streamed_and_layer_by_layer(sequential: bool, tmp_path: Path) -> None:
    ids = [torch.arange(64).view(2, 32)]
    method = "hessian" if sequential else "sse"
    given: Any = {"data": ids} if sequential else {}
    fp4pass.quantize_checkpoint(
        TINY, tmp_path / "q", "fp8_tensora16", method, progress=False, **given
    )
    streamed = fp4pass.load(tmp_path / "q", progress=False)
    model = language_model()
    if sequential:
        fp4pass.prepare(model, method, fmt="fp8_tensora16", sequential=True)
        fp4pass.calibrate(model, ids, progress=False)
        fp4pass.convert(model, progress=False)
    else:
        fp4pass.convert(model, "fp8_tensora16", method, progress=False)
    for name, module in model.named_modules():
        if name.endswith(("self_attn", "mlp")):
            groups = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
            for group in groups[name.endswith("mlp") :][:1]:
                own = {float(module.get_submodule(each).weight_scale) for each in group}
                assert len(own) == 1
        if hasattr(module, "weight_packed"):
            other = streamed.get_submodule(name)
            assert torch.equal(module.weight_packed, other.weight_packed)
            assert torch.equal(module.weight_scale, other.weight_scale)
