"""Batches: rows of token ids, and tokens that a model does not have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import assert_same_bits, language_model, tokens
from torch import nn

import fp4pass
from fp4pass.errors import CalibrationError


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
