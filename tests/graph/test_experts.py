"""The pass that makes one call of the experts of a mixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixtures import build
from post_grad import run_passes
from torch import Tensor

import fp4pass
from fp4pass import ops
from fp4pass.graph.inductor.fusions import on_gpu
from fp4pass.graph.inductor.products import fuse_experts
from fp4pass.nn import experts as experts_module

pytestmark = pytest.mark.usefixtures("fresh_graphs")
E, K, T, H, INNER = 5, 2, 7, 64, 32


def silu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def gelu_tanh(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def limited(both: Tensor, least: float = -0.7) -> Tensor:
    """GPT-OSS's."""
    gate, up = both[..., ::2].clamp(max=0.7), both[..., 1::2].clamp(least, 0.7)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def stack(n: int, k: int, fmt: str = "nvfp4") -> tuple[Tensor, Tensor, Tensor | None]:
    weight = torch.randn(E * n, k, generator=torch.Generator().manual_seed(n))
    packed, scale = ops.search(weight, None, 2.0**-8, fmt, "naive")
    stored = torch.full((E,), 256.0) if fmt == "nvfp4" else None
    return packed.view(E, n, -1), scale.view(E, n, -1), stored


FIRST, SECOND = stack(2 * INNER, H), stack(H, INNER)


def mixture(gate: Callable[[Tensor], Tensor] = silu, **changed: Any) -> Callable[..., Any]:
    """What a module of QuantizedExperts computes on a GPU, or something like it."""
    fmt, second = changed.get("fmt", "nvfp4"), changed.get("second", SECOND)

    def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Any:
        both = ops.experts_linear(x, ids, *FIRST, None, "nvfp4")
        h = gate(both)
        others = ids.flip(-1) if changed.get("flips") else ids
        y = ops.experts_linear(h, others, *second, None, fmt)
        terms = y * weights.unsqueeze(-1)
        out = terms.sum(changed.get("dim", 1), dtype=torch.float32).to(x.dtype)
        return (out, both) if changed.get("reads") else out

    return forward


def arguments(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, H, generator=generator).to(dtype)
    ids = torch.rand(T, E, generator=generator).topk(K, -1).indices
    return x, ids, torch.rand(T, K, generator=generator)


def run(
    forward: Callable[..., Any], args: tuple[Tensor, ...], eligible: Any = lambda node: True
) -> tuple[Any, list[int], Any]:
    return run_passes(forward, args, lambda graph: fuse_experts(graph, eligible))


@pytest.mark.quick(2)
@pytest.mark.core
@pytest.mark.parametrize("gate", [silu, gelu_tanh, limited])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_call(gate: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Whatever the dtype of the weights of experts; a second run changes nothing."""
    x, ids, weights = arguments()
    args = (x, ids, weights.to(dtype))
    found, counts, left = run(mixture(gate), args)
    assert counts == [1, 0] and left == {"experts_mixture": 1}
    expected = mixture(gate)(*args)
    assert found.dtype == torch.bfloat16
    limit = 0.02 * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=limit)


UNLIKE: dict[str, Callable[..., Any]] = {
    "a product that is read": mixture(reads=True),
    "other experts": mixture(flips=True),
    "another format": mixture(fmt="mxfp4", second=stack(H, INNER, "mxfp4")),
    "a sum of columns": mixture(dim=2),
    "an unknown gate": mixture(lambda both: both.chunk(2, -1)[0].tanh() * both.chunk(2, -1)[1]),
    "halves the other way around": mixture(lambda both: silu(both.roll(INNER, -1))),
    "up by itself": mixture(lambda both: F.silu(both.chunk(2, -1)[1]) * both.chunk(2, -1)[0]),
    "two limits": mixture(lambda both: limited(both, -0.5)),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("unlike", UNLIKE)
def test_what_is_not_a_mixture(unlike: str) -> None:
    found, counts, left = run(UNLIKE[unlike], arguments())
    assert counts == [0, 0] and left["experts_linear"] == 2
    expected = UNLIKE[unlike](*arguments())
    if unlike != "a product that is read":
        torch.testing.assert_close(
            found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item()
        )


def test_where_no_kernel_is() -> None:
    """On a CPU, and for other dtypes, products stay what they are."""
    assert run(mixture(), arguments(), on_gpu)[1] == [0, 0]
    assert run(mixture(), arguments(torch.float32))[1] == [0, 0]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of transformers, as they are traced for a GPU."""
    model = fp4pass.convert(build(name, dtype=torch.bfloat16), method="sse", weight_only=True)
    experts = model.model.layers[0].mlp.experts

    def on_a_gpu(y: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        return (y * weights.unsqueeze(-1)).sum(1, dtype=torch.float32).to(dtype)

    x, ids, weights = arguments()
    args = (x, ids % 4, weights.bfloat16())
    with torch.no_grad():
        expected = experts(*args)
    monkeypatch.setattr(experts_module, "weighted_sum", on_a_gpu)
    found, counts, left = run(experts, args)
    assert counts == [1, 0] and left == {"experts_mixture": 1}
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03 * expected.abs().max().item())
