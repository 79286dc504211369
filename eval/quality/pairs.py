"""Which of two sentences a model finds likelier: BLiMP's minimal pairs.

A file has a line of JSON for each pair, with "task", "good" and "bad". The accuracy is the share of
pairs whose good sentence is likelier, ties by half; the margin of a pair is how much likelier, in
nats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp4pass.evaluation import fast_dtype
from fp4pass.quantization.observers.batches import device_of

# Sentences that run at once.
BATCH = 64


def read_pairs(path: Path, every: int = 1) -> list[tuple[str, str]]:
    """Return each so-many-th pair of a file as (good, bad)."""
    lines = path.read_text("utf-8").splitlines()[::every]
    return [(pair["good"], pair["bad"]) for pair in map(json.loads, lines)]


@torch.no_grad()
def margins(model: nn.Module, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> Tensor:
    """Return how much likelier each good sentence is than the bad one, in nats: float64 [pairs]."""
    begins = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else 0
    sentences = [text for pair in pairs for text in pair]
    ids = [[begins, *tokenizer(text, add_special_tokens=False).input_ids] for text in sentences]
    found = torch.empty(len(ids), dtype=torch.float64)
    # Those of one length together need no padding.
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    groups: dict[int, list[int]] = {}
    for i in order:
        groups.setdefault(len(ids[i]), []).append(i)
    device = device_of(model) or torch.device("cpu")
    with fast_dtype(model):
        for members in groups.values():
            for part in torch.tensor(members).split(BATCH):
                batch = torch.tensor([ids[i] for i in part], device=device)
                logits = model(batch, use_cache=False).logits[:, :-1].float()
                scores = logits.log_softmax(-1).gather(2, batch[:, 1:, None]).squeeze(2)
                found[part] = scores.double().sum(1).cpu()
    return found[::2] - found[1::2]


def accuracy(found: Tensor) -> float:
    """Return the share of margins above zero, ties by half."""
    return float(((found > 0).double() + 0.5 * (found == 0).double()).mean())
