"""Batches that are rows: of token ids, which are taken, and of a dataset, which no model runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import assert_same_bits, language_model, tokens
from torch import nn
from torch.utils.data import DataLoader

import fp4pass
from fp4pass.errors import CalibrationError

ROWS = {"input_ids": [list(range(4, 20))] * 2, "attention_mask": [[1] * 16] * 2}


@pytest.mark.parametrize(
    ("columns", "kind", "message"),
    [
        ({"pixel_values": [[0.5]] * 2}, None, r"got pixel_values \(a list\), no tensor"),
        ({"text": ["a", "b"]}, None, r"got text \(a str\), no tensor"),
        (ROWS, "torch", r"got input_ids \[16\], a single example"),
    ],
)
def test_rows_of_a_loader_are_no_batches(columns: Any, kind: str | None, message: str) -> None:
    """A data set itself is read by its columns; what a loader yields is batches."""
    datasets = pytest.importorskip("datasets")

    rows = datasets.Dataset.from_dict(columns).with_format(kind)
    loader = DataLoader(rows, batch_size=None, collate_fn=lambda row: row)
    model = fp4pass.prepare(language_model())
    with pytest.raises(CalibrationError, match=rf"A batch: .*{message}.*DataLoader\(") as caught:
        fp4pass.calibrate(model, loader, progress=False)
    assert caught.value.__cause__ is not None


@pytest.mark.core
def test_an_error_of_the_model_stays_its_own() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, input_ids: Any) -> Any:
            raise ValueError("not today")

    model = fp4pass.prepare(Picky().eval())
    with pytest.raises(ValueError, match="not today"):
        fp4pass.calibrate(model, [{"input_ids": torch.zeros(2, 4)}], progress=False)


@pytest.mark.core
@pytest.mark.parametrize("as_batches", [list, iter], ids=["list", "iterator"])
def test_tokens_that_a_model_does_not_have(as_batches: Any) -> None:
    model, ids = language_model(), torch.zeros(2, 8, dtype=torch.long)
    size = model.config.vocab_size
    for wrong, got in ((ids + size, str(size)), (ids - 1, "-1"), (ids[:0], r"\[0, 8\]")):
        for batch in (wrong, {"input_ids": wrong, "attention_mask": torch.ones_like(wrong)}):
            prepared = fp4pass.prepare(copy.deepcopy(model))
            with pytest.raises(CalibrationError, match=f"batch 1: expected tokens.*got {got}"):
                fp4pass.calibrate(prepared, as_batches([ids, batch]), progress=False)
    with pytest.raises(CalibrationError, match=rf"text: window 1: .*got {size}\. Give tokens"):
        fp4pass.evaluate(model, None, torch.cat([ids[:1], ids[:1] + size]), window=8)


@pytest.mark.parametrize("sequential", [False, True])
def test_token_ids_without_a_batch_dimension_are_one_row(sequential: bool) -> None:
    rows = [*tokens(2, 48), *tokens(1, 20)]
    models = [
        fp4pass.calibrate(
            fp4pass.prepare(language_model(), sequential=sequential), data, progress=False
        )
        for data in (rows, [row[None] for row in rows])
    ]
    first, second = map(fp4pass.convert, models)
    assert_same_bits(first, second)
