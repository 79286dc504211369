"""trace: a whole model is one graph, which is quantized and generates as the live model does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import load_file
from small_models import assert_same_bits, bits, language_model, tokens
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fp4pass
from fp4pass.errors import OptionError, ShapeError, StateError, TraceError
from fp4pass.quantization.observers.observer import Observer

ops = torch.ops.fp4pass


def calls(graph: fx.GraphModule, target: object) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=target))


def generated(graph: nn.Module, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    """Greedy, as `generate` with min_new_tokens: one token each, without the end of text."""
    new, sequence = ids, ids
    for _ in range(count):
        logits = graph(new, mask).logits[:, -1].float()
        logits[:, 1] = -torch.inf
        new = logits.argmax(-1, keepdim=True)
        sequence, mask = torch.cat([sequence, new], 1), F.pad(mask, (0, 1), value=1)
    return sequence


@pytest.fixture(scope="module")
def traced() -> Any:
    """The graph of the bundled model, to be copied."""
    return fp4pass.trace(language_model(), tokens(4, 8))


class Converted:
    """The bundled model, live and as a graph, both calibrated with Hessians."""

    def __init__(self, graph: Any) -> None:
        self.live, self.graph = language_model(), graph
        for model in (self.live, self.graph):
            fp4pass.prepare(model, "hessian")
            self.observers = [m for m in model.modules() if isinstance(m, Observer)]
            # The second batch has another size.
            batches = [{"input_ids": tokens(4, 48)}, {"input_ids": tokens(2, 96)}]
            fp4pass.calibrate(model, batches, progress=False)
            fp4pass.convert(model, "nvfp4", "hessian")


@pytest.fixture(scope="module")
def converted(traced: Any) -> Converted:
    return Converted(copy.deepcopy(traced))


@pytest.mark.slow
def test_a_graph_and_a_live_model_give_the_same_bytes(converted: Converted, tmp_path: Path) -> None:
    live, graph = converted.live, converted.graph
    found, expected = graph.state_dict(), live.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(bits(found[name]), bits(tensor)), name
    assert fp4pass.report(graph) == fp4pass.report(live)
    # An observer for each input, and a quantization.
    assert len(converted.observers) == calls(graph, ops.quantize.default) == 4 * 4
    assert calls(graph, ops.linear_quantized.default) == 4 * 7
    for name, model in (("live", live), ("graph", graph)):
        fp4pass.save(model, tmp_path / name)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("live", "graph")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(bits(files[0][name]), bits(files[1][name])) for name in files[0])


@pytest.mark.slow
@torch.no_grad()
def test_the_graph_generates(converted: Converted) -> None:
    live, graph = converted.live, converted.graph
    for ids in (tokens(4, 48), tokens(1, 1), tokens(2, 100)):
        expected = live(ids).logits
        for got in (graph(ids), graph(input_ids=ids), graph(ids, torch.ones_like(ids))):
            assert torch.equal(got.logits, expected)
    ids, mask = tokens(3, 20), torch.ones(3, 20, dtype=torch.long)
    # Padding on the left.
    mask[0, :7] = mask[1, :2] = 0
    ids = ids * mask
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "eos_token_id": 1}
    expected = live.generate(ids, attention_mask=mask, **options)
    assert torch.equal(generated(graph, ids, mask, 12), expected)
    # From a copy, and again: what the cache held before does not matter.
    assert torch.equal(generated(copy.deepcopy(graph), ids, mask, 12), expected)
    assert torch.equal(generated(graph, ids, mask, 12), expected)


def test_the_graph_has_no_gradients_and_its_cache_no_history(converted: Converted) -> None:
    for _ in range(2):
        assert not converted.graph(tokens(2, 8)).logits.requires_grad
    assert all(buffer.is_leaf for buffer in converted.graph.buffers())
    assert not any("cache" in name for name in converted.graph.state_dict())


def test_sizes_that_do_not_fit_the_cache(converted: Converted) -> None:
    graph = converted.graph
    with torch.no_grad():
        assert graph(tokens(4, 512)).logits.shape[:2] == (4, 512)
    for ids in (tokens(5, 8), tokens(2, 513)):
        with pytest.raises(ShapeError, match=r"4 rows of 512 tokens, got \d+ of \d+\..*cache_len"):
            graph(ids)
    with pytest.raises(OptionError, match="got input_ids, labels"):
        graph(input_ids=tokens(2, 8), labels=tokens(2, 8))


def test_a_graph_loads_what_was_saved(traced: Any, converted: Converted, tmp_path: Path) -> None:
    fp4pass.save(converted.graph, tmp_path / "q")
    loaded: Any = fp4pass.load(tmp_path / "q", model=copy.deepcopy(traced))
    assert_same_bits(loaded, converted.graph)
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, converted.graph(tokens()).logits)


CASES = {case.name: case for case in zoo.CASES}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gpt2", "llama_tied", "qwen3_moe", "gpt_oss"])
@torch.no_grad()
def test_decoders_generate(name: str) -> None:
    pytest.importorskip("transformers")
    model = CASES[name].build()
    graph: Any = fp4pass.trace(model, {"input_ids": tokens(4, 8) % 96}, cache_length=40)
    # Up to the last row and token of the cache, behind sliding windows of 16.
    for size in ((4, 40), (2, 21), (3, 2), (1, 1)):
        ids = tokens(*size) % 96
        mask = torch.ones_like(ids)
        torch.testing.assert_close(graph(ids).logits, model(ids, attention_mask=mask).logits)
    ids = tokens(2, 28) % 94 + 2
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(generated(graph, ids, torch.ones_like(ids), 12), expected)
    assert graph.state_dict().keys() == model.state_dict().keys()


class Two(nn.Module):
    """Two inputs, one of them by name only, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor, y: dict[str, Tensor], scale: float = 1.0, *, z: Any = None) -> Any:
        total = self.a(x) + scale * self.b(y["y"])
        return {"total": total if z is None else total + z}


def test_any_module_with_any_arguments() -> None:
    torch.manual_seed(0)
    model = Two().eval()

    def batch(rows: int, length: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        x, y = torch.randn(2, rows, length, 64)
        return x, {"y": y}, torch.randn(rows, length, 1)

    x, y, z = batch(2, 3)
    graph = fp4pass.trace(model, {"x": x, "y": y, "z": z, "scale": 0.5})
    positional = fp4pass.trace(model, (x, y, 0.5))
    fp4pass.convert(graph, "nvfp4", method="naive")
    live = fp4pass.convert(copy.deepcopy(model), "nvfp4", method="naive")
    for size in ((2, 3), (5, 1), (1, 7)):
        x, y, z = batch(*size)
        expected = live(x, y, 0.5, z=z)["total"]
        for each in (graph, copy.deepcopy(graph)):
            assert torch.equal(each(x, y, z=z)["total"], expected)
        assert torch.equal(positional(x, y=y)["total"], model(x, y, 0.5)["total"])
    with pytest.raises(OptionError, match="takes what its example had, scale, x, y, z, got scale"):
        graph(x, y)
    assert not graph.training and fp4pass.trace(model.train(), batch(2, 3)[:2]).training


def test_a_tensor_is_an_example() -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32)).eval()
    graph = fp4pass.trace(model, torch.randn(2, 3, 64))
    x = torch.randn(4, 9, 64)
    assert torch.equal(graph(x), model(x)) and torch.equal(graph(input=x), model(x))
    assert dict(graph.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert graph.get_parameter("0.weight") is model[0].weight


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x[..., :32]


def test_errors() -> None:
    x = torch.randn(2, 3, 64)
    with pytest.raises(TraceError, match=r"(?s)Branch: torch.export cannot.*fp4pass\.prepare"):
        fp4pass.trace(Branch(), x)
    linear = nn.Linear(64, 32)
    with pytest.raises(TraceError, match=r"Linear: torch\.export cannot"):
        fp4pass.trace(linear, torch.randn(2, 63))
    with pytest.raises(ShapeError, match=r"2 rows, got a tensor of \(1, 3, 64\)"):
        fp4pass.trace(linear, x[:1])
    with pytest.raises(
        OptionError, match="expected a mapping, a tuple, a list or a tensor, got str"
    ):
        fp4pass.trace(linear, "x")
    for length in (-1, True, 2.0):
        with pytest.raises(OptionError, match="cache_length: expected a number"):
            fp4pass.trace(linear, x, cache_length=length)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="Linear is no decoder-only model"):
        fp4pass.trace(linear, x, cache_length=8)


def test_errors_of_decoders() -> None:
    pytest.importorskip("transformers")
    model = CASES["llama"].build()
    with pytest.raises(OptionError, match=r"got input_ids, labels\. With cache_length=0"):
        fp4pass.trace(model, {"input_ids": tokens(2, 8), "labels": tokens(2, 8)})
    with pytest.raises(StateError, match=r"LlamaForCausalLM is in training mode.*model\.eval"):
        fp4pass.trace(model.train(), tokens(2, 8))
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 16}
    sizes |= {"vocab_size": 96, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 2}
    sizes |= {"hidden_size_per_layer_input": 16, "laurel_rank": 8, "num_key_value_heads": 1}
    options = {"num_attention_heads": 2, "activation_sparsity_pattern": [0.0] * 4}
    config = Gemma3nTextConfig(**sizes, **options)
    shared = Gemma3nForCausalLM(config).eval()
    with pytest.raises(OptionError, match="other things of a text than keys and values"):
        fp4pass.trace(shared, tokens(2, 8) % 96)
