"""Drafts that a packed model checks: eager, with its own cache, and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import fp4pass
from fp4pass.errors import OptionError
from fp4pass.integrations import compile_for_drafts

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*generation-related arguments")

SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 1}
SIZES |= {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 96, "pad_token_id": None, "eos_token_id": None}


def packed(kind: str = "Qwen3", seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    return fp4pass.convert(model, "nvfp4a16", "naive", progress=False)


def generate(model: Any, **options: Any) -> torch.Tensor:
    # Words that come again, so that the prompt has drafts.
    ids = torch.arange(5).repeat(3)[None] + 7
    options = {"max_new_tokens": 12, "do_sample": False} | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def drafted(how: str, compiled: bool = False) -> dict[str, Any]:
    """The prompt's drafts, those of the model itself, which are all right, or of another one."""
    if how == "prompt":
        return {"prompt_lookup_num_tokens": 4}
    draft = packed(seed=how == "other model")
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.assistant_confidence_threshold = 0.0
    return {
        "assistant_model": compile_for_drafts(draft, 64, backend="eager") if compiled else draft
    }


# The example of compile_for_drafts is the quick one.
@pytest.mark.slow
@pytest.mark.parametrize("how", ["prompt", "same model", "other model"])
def test_drafts_change_no_token(how: str) -> None:
    """Compiled or not, also in a second text, which finds the cache of the first."""
    model = packed()
    expected = generate(model)
    assert torch.equal(generate(model, **drafted(how)), expected)
    compile_for_drafts(model, 64, backend="eager")
    counters.clear()
    options = drafted(how, compiled=True)
    for _ in range(2):
        assert torch.equal(generate(model, **options), expected)
        before = counters["stats"]["unique_graphs"]
    # No more graphs than numbers of tokens, of both models.
    assert 0 < before <= 10
    assert torch.equal(generate(model), expected)


@pytest.mark.slow
def test_every_layer_of_tokens_is_taken_back() -> None:
    """A draft that is all wrong leaves the logits as they were without it."""
    model = compile_for_drafts(packed(), 64, backend="eager")
    options = {"output_logits": True, "return_dict_in_generate": True}
    plain = generate(model, **options)
    logits = [each.clone() for each in plain.logits]
    draft = drafted("other model")
    found = generate(model, **draft, **options)
    assert torch.equal(found.sequences, plain.sequences)
    for a, b in zip(found.logits, logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length: expected a positive integer, got 0"),
        ({"tokens": 9}, "tokens: expected an integer from 1 to 8, got 9"),
    ],
)
def test_numbers_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        compile_for_drafts(packed(), **{"length": 8} | options)


def test_models_that_do_not_fit() -> None:
    with pytest.raises(OptionError, match="expected a decoder of transformers, got Linear"):
        compile_for_drafts(torch.nn.Linear(2, 2), 8)
    window = packed("Mistral", sliding_window=8)
    with pytest.raises(OptionError, match="got StaticSlidingWindowLayer in MistralForCausalLM"):
        compile_for_drafts(window, 64)
    model = compile_for_drafts(packed(), 20, backend="eager")
    with pytest.raises(OptionError, match="plain cache, got Qwen3ForCausalLM"):
        compile_for_drafts(model, 20)
    with pytest.raises(OptionError, match="at most 20 tokens with its answer"):
        generate(model)
