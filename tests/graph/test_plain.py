"""Graphs in ATen operators alone: the same logits, weights that stay packed, and onnxruntime."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import build
from small_models import TINY, bits, mlp, tokens
from torch import fx

import fp4pass
from fp4pass.errors import TraceError
from fp4pass.graph.export import write_plain

pytest.importorskip("transformers")
ROOT = TINY.parents[1]


def ours(graph: fx.GraphModule) -> list[fx.Node]:
    return [
        node
        for node in graph.graph.nodes
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "fp4pass"
    ]


@pytest.mark.quick(2)
@pytest.mark.core
@pytest.mark.parametrize(
    ("fmt", "options"), [("nvfp4a16", {}), ("mxfp4a16", {}), ("mxfp4a16", {"block": 16})], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_those_of_packed_layers(
    fmt: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = mlp().to(dtype).eval()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    fp4pass.convert(model, fmt, "sse", **options)
    graph = fp4pass.trace(model, (x,), plain=True)
    assert not ours(graph) and write_plain(graph) == 0
    with torch.no_grad():
        wanted, found = model(x[:3]), graph(x[:3])
    # The weights are equal; sums of float32 are in another order.
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    # The bytes of the model are those of the graph, beside the tables.
    state, held = model.state_dict(), graph.state_dict()
    assert {n for n in held if not n.startswith("fp4pass_")} == set(state)
    assert all(torch.equal(bits(held[name]), bits(tensor)) for name, tensor in state.items())
    assert {t.dtype for n, t in held.items() if n.endswith("weight_scale")} == {torch.uint8}
    assert state["0.weight_scale"].dtype == model[0].config.format.scale.storage


def test_what_has_no_plain_form() -> None:
    x = torch.randn(4, 64)
    with pytest.raises(TraceError, match=r"fp4pass.quantize.* has no form in plain operators"):
        fp4pass.trace(fp4pass.convert(mlp(), "mxfp4", "naive"), (x,), plain=True)
    with pytest.raises(TraceError, match=r"fp4pass.rotate.* has no form in plain operators"):
        fp4pass.trace(fp4pass.convert(mlp(), "nvfp4a16", "naive", rotation=32), (x,), plain=True)
    with pytest.raises(TraceError, match=r"expected codes of 4 bits.* Choose nvfp4a16 or mxfp4a16"):
        fp4pass.trace(fp4pass.convert(mlp(), "mxfp8", "naive", weight_only=True), (x,), plain=True)
    mixture = fp4pass.convert(build("qwen3_moe", torch.float32), "mxfp4a16", "naive")
    ids = tokens(2, 8) % mixture.config.vocab_size
    with pytest.raises(TraceError, match=r"experts_linear.* leave experts out by rules="):
        fp4pass.trace(mixture, {"input_ids": ids}, cache_length=0, plain=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fmt", ["nvfp4a16", "mxfp4a16"])
def test_onnxruntime_gives_the_logits(
    fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script of the recipe, and what its file holds."""
    onnx = pytest.importorskip("onnx")
    for name in ("onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    made = runpy.run_path(str(ROOT / "examples" / "onnx_export.py"), {"FORMAT": fmt})
    assert made["difference"] < 1e-4
    kinds: dict[int, list[str]] = {}
    model = onnx.load(made["path"])
    for each in model.graph.initializer:
        kinds.setdefault(each.data_type, []).append(each.name)
    packed = kinds[onnx.TensorProto.UINT8]
    assert len(packed) == 2 * 28
    assert {name.rpartition(".")[2] for name in packed} == {"weight_packed", "weight_scale"}
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
