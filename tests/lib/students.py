"""A language model that trains in milliseconds, and conversions of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4pass

VOCABULARY = 48


class Predictor(nn.Module):
    """Two linear layers, and a head, between an embedding and logits."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, 64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.lm_head = nn.Linear(64, vocabulary)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.lm_head(self.norm(x + self.down(nn.functional.gelu(self.up(x)))))


def windows(count: int = 24, length: int = 16, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count, length), generator=generator)


def pair(
    fmt: str = "nvfp4", method: Any = "naive", dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, Any]:
    """A converted model, and the original."""
    original = Predictor().to(dtype).eval()
    model = copy.deepcopy(original)
    fp4pass.prepare(model, method, **options)
    fp4pass.calibrate(model, [windows()], progress=False)
    return fp4pass.convert(model, fmt), original


def layers(model: nn.Module) -> dict[str, Any]:
    return {name: model.get_submodule(name) for name in ("up", "down")}


@contextmanager
def cut_off(original: nn.Module, calls: int) -> Iterator[None]:
    """Have an original be interrupted after so many calls."""
    left = [calls]

    def count(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    handle = original.register_forward_pre_hook(count)
    with pytest.raises(KeyboardInterrupt):
        yield
    handle.remove()
