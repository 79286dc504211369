"""A tiny model and tokenizer of single characters."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 40


class Tokens:
    """A tokenizer of one token a character; id 0 is bos if it has one."""

    def __init__(self, bos: int | None = 0) -> None:
        self.bos_token_id = bos

    def __call__(self, documents: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(c) - 96 for c in document] for document in documents]}

    def batch_decode(self, rows: list[list[int]], **_: object) -> list[str]:
        return ["".join(chr(i + 96) for i in row if i) for row in rows]


class Toy(nn.Module):
    """Logits of a token from that token alone, which is causal enough."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)
        self.unused = nn.Linear(32, 32)
        self.head = nn.Linear(32, vocabulary)

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids)
        return SimpleNamespace(logits=self.head(x + self.down(F.relu(self.up(x)))))
