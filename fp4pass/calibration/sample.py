"""Text that a model writes itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS = 32


def sample(
    model: Any,
    tokenizer: Any = None,
    *,
    tokens: int = 1 << 15,
    seq_len: int = 512,
    seed: int = 0,
    progress: bool = True,
) -> Tensor:
    """Return windows [n, seq_len] of tokens, sampled at temperature 1 from the start token."""
    config = model.config.get_text_config()
    start = config.bos_token_id or 0
    found = []
    generator = torch.Generator().manual_seed(seed)
    for count in [_ROWS] * (tokens // seq_len // _ROWS) + [tokens // seq_len % _ROWS]:
        if not count:
            continue
        ids, cache = torch.full((count, 1), start), None
        with torch.no_grad():
            while ids.shape[1] < seq_len:
                output = model(ids[:, -1:], past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                shares = output.logits[:, -1].float().softmax(-1).cpu()
                ids = torch.cat([ids, torch.multinomial(shares, 1, generator=generator)], 1)
        found.append(ids)
    return torch.cat(found)
