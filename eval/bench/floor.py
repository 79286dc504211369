"""The least time of a decode step: what it reads, at the bandwidth of the card."""

from __future__ import annotations

from typing import Any

import torch

from eval.bench.harness import storage_bytes
from eval.record import Row

# Sequences, tokens before the step, new tokens of each sequence.
Shape = tuple[int, int, int]

# Bytes a second, by a word of the card's name.
BANDWIDTHS = {"H100": 3.35e12, "H200": 4.8e12, "A100": 2.04e12}


def step_bytes(model: Any, shape: Shape) -> tuple[float, float]:
    """Return the bytes of weights and of keys and values that a step reads."""
    batch, context, tokens = shape
    config = model.config
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    own = {id(each) for each in embedding.parameters()} - {id(each) for each in head.parameters()}
    experts: set[int] = set()
    for module in model.modules():
        if "Experts" in type(module).__name__:
            experts |= {id(each) for each in (*module.parameters(), *module.buffers())}
    share = reached(config, batch * tokens)
    each = {id(t): t for t in (*model.parameters(), *model.buffers())}
    weights = sum(
        storage_bytes(tensor) * (share if key in experts else 1.0)
        for key, tensor in each.items()
        if key not in own
    )
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * width * 2
    return weights, float(batch * (context + tokens) * token)


def reached(config: Any, tokens: int) -> float:
    """Return the share of experts that random routing is expected to reach."""
    count = getattr(config, "num_experts", None)
    return 1.0 if count is None else 1 - (1 - config.num_experts_per_tok / count) ** tokens


def of_floor(read: float, taken: float) -> Row:
    """Return the share of what memory allows, on a card whose bandwidth is known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    bandwidth = next((each for word, each in BANDWIDTHS.items() if word in name), None)
    return {} if bandwidth is None else {"of_floor": read / bandwidth / taken}
