"""Sums over processes with the residual and the norm behind them: what is fused, and the bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from post_grad import calls, compiled, fresh
from torch import Tensor, fx

import fp4pass
from fp4pass import ops
from fp4pass.graph.inductor.reductions import fuse_reductions


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with fresh(), torch.no_grad():
        yield


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def counted(function: Any, *inputs: Tensor, near: float = 0.0) -> int:
    """How many calls are fused; the results are those before, or near to them."""
    counts: list[int] = []

    def change(graph: fx.Graph) -> None:
        counts.append(fuse_reductions(graph, lambda node: True))
        assert fuse_reductions(graph, lambda node: True) == 0
        assert calls(graph)["all_reduce_norm"] == counts[-1]

    found, expected = compiled(function, change)(*inputs), function(*inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=near, atol=near)
    return sum(counts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_is_fused_with_the_norm_behind_it(dtype: torch.dtype) -> None:
    x, residual = (torch.randn(2, 3, 64).to(dtype) for _ in range(2))
    weight = torch.rand(64).to(dtype)

    def both(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total = residual + ops.all_reduce(x, "", False)
        return total, norm(total, weight)

    def other_order(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return (norm(ops.all_reduce(x * 2, "", False) + residual, weight),)

    assert counted(both, x, residual) == counted(other_order, x, residual) == 1


def test_what_is_not_fused() -> None:
    x, residual = (torch.randn(2, 3, 64) for _ in range(2))
    weight = torch.rand(64)

    def read_twice(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        y = ops.all_reduce(x, "", False)
        return y, norm(residual + y, weight)

    def maximum(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return (norm(residual + ops.all_reduce(x, "", True), weight),)

    def no_residual(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return (norm(ops.all_reduce(x, "", False), weight),)

    def broadcast(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return (norm(residual[:1] + ops.all_reduce(x, "", False), weight),)

    for function in (read_twice, maximum, no_residual, broadcast):
        assert counted(function, x, residual) == 0


def test_the_layers_of_a_split_model(tmp_path: Path) -> None:
    """Both sums of each layer, but for the last: its norm is behind the last layer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "vocab_size": 96}
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, **sizes
    )
    model: Any = transformers.LlamaForCausalLM(config).eval()
    fp4pass.convert(model, "nvfp4a16", "naive", progress=False)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fp4pass.parallelize(model, dist.init_device_mesh("cpu", (1,)))
        ids = torch.randint(96, (1, 5))

        def logits(ids: Tensor) -> tuple[Tensor, ...]:
            return (model(ids).logits,)

        # Inductor's decompositions of all else round otherwise.
        assert counted(logits, ids, near=1e-5) == 4
    finally:
        dist.destroy_process_group()
