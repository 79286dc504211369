"""Memory of large logits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp4pass


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operator makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                self.bytes = max(self.bytes, each.nbytes)
        return made


@pytest.fixture
def large() -> nn.Module:
    """A tiny model with a vocabulary that is not: 40 kB of logits a token."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)
    return model


def test_large_logits_run_fewer_windows(large, monkeypatch):
    reference = copy.deepcopy(large)
    with torch.no_grad():
        reference.get_output_embeddings().weight.add_(0.1)
    ids = torch.randint(3, 20000, (3, 50))
    options = {"batch_size": 3, "progress": False}
    window = 50 * 20000 * 2
    monkeypatch.setattr("fp4pass.evaluation.measure._CHUNK", 4 * 20000)
    with Largest() as whole:
        wanted = fp4pass.evaluate(large, None, ids, reference, **options)
    monkeypatch.setattr("fp4pass.evaluation.measure._LARGEST", window + 1)
    with Largest() as bounded:
        found = fp4pass.evaluate(large, None, ids, reference, **options)
    assert whole.bytes == 3 * window and bounded.bytes == window
    assert found.perplexity == pytest.approx(wanted.perplexity, rel=1e-4)
    assert found.kl == pytest.approx(wanted.kl, rel=1e-3) and found.kl > 0
