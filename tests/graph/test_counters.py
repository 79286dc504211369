"""The pass for the counters of a static cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from post_grad import compiled, fresh
from torch import Tensor, fx

from fp4pass.graph.inductor.attention import fuse_attention
from fp4pass.graph.inductor.counters import join_counters
from fp4pass.graph.inductor.fusions import on_gpu
from fp4pass.graph.inductor.rotary import fuse_rotary


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with fresh(), torch.no_grad():
        yield


def run(
    function: Callable[..., Any], args: tuple[Any, ...], eligible: Any = lambda node: True
) -> tuple[Any, list[int], Counter[str]]:
    """What the compiled function returns, what two runs of the pass did, and the calls left."""
    counts: list[int] = []
    left: Counter[str] = Counter()

    def change(graph: fx.Graph) -> None:
        fuse_attention(graph, lambda node: True)
        fuse_rotary(graph, lambda node: True)
        counts.extend(join_counters(graph, eligible) for _ in range(2))
        graph.eliminate_dead_code()
        graph.lint()
        left.update(str(node.target) for node in graph.nodes if node.op == "call_function")

    torch._dynamo.reset()
    return compiled(function, change)(*args), counts, left


def counters(*values: int) -> list[Tensor]:
    return [torch.tensor(value) for value in values]


def count(each: list[Tensor], number: int = 1) -> None:
    for counter in each:
        counter.add_(number)


def test_counters_that_only_count_are_one_call() -> None:
    given = counters(3, 5, 8)
    _, counts, left = run(lambda each: count(each), (given,))
    assert counts == [2, 0] and given == counters(4, 6, 9)
    assert left["aten._foreach_add.Scalar"] == 1 and not left["aten.add.Tensor"]


def test_other_numbers_and_results_that_are_read_stay_apart() -> None:
    given = counters(3, 5, 8)

    def function(each: list[Tensor]) -> Tensor:
        count(each[:1], 2)
        count(each[1:])
        return each[2] * 2

    found, counts, _ = run(function, (given,))
    assert counts == [0, 0] and found == 18 and given == counters(5, 6, 9)


def test_a_place_that_is_returned_is_no_view_of_the_counter() -> None:
    given = counters(3, 5)

    def function(each: list[Tensor]) -> list[Tensor]:
        places = [torch.arange(1) + counter for counter in each]
        count(each)
        return places

    found, counts, _ = run(function, (given,))
    assert counts == [1, 0] and found == [torch.tensor([3]), torch.tensor([5])]
    assert given == counters(4, 6)


def test_on_a_cpu_nothing_changes() -> None:
    assert run(lambda each: count(each), (counters(3, 5),), on_gpu)[1] == [0, 0]


def test_steps_of_a_model_read_and_count_in_place() -> None:
    """Two steps write where the steps of the eager model do, and count as they do."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=64,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    caches = [transformers.StaticCache(config=config, max_cache_len=16) for _ in "ab"]
    for cache in caches:
        model(torch.arange(5)[None], past_key_values=cache)

    def step(cache: Any) -> Callable[[Tensor], Tensor]:
        return lambda token: model(token, past_key_values=cache).logits

    token = torch.tensor([[7]])
    found, counts, left = run(step(caches[0]), (token,))
    expected = step(caches[1])(token)
    assert counts == [5, 0] and left["aten._foreach_add.Scalar"] == 1
    assert (found - expected).float().norm() <= 0.02 * expected.float().norm()
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert one.get_seq_length() == other.get_seq_length() == 6
        assert torch.allclose(one.keys, other.keys, rtol=0.02, atol=0.02)
        assert one.keys[:, :, 5].any() and not one.keys[:, :, 6:].any()
