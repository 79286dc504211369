"""A model that was edited so that its config does not make it is refused before it is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import assert_same_bits, language_model
from torch import nn

import fp4pass
from fp4pass.errors import CheckpointError

pytest.importorskip("transformers")


def converted(model: Any) -> Any:
    return fp4pass.convert(model, "nvfp4", "naive", weight_only=True)


def drop_layer(model: Any) -> None:
    del model.model.layers[1]


def add_layer(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))


def replace_embedding(model: Any) -> None:
    model.set_input_embeddings(nn.Embedding(10, model.config.hidden_size, dtype=torch.bfloat16))
    model.tie_weights()


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "edit, named",
    [
        (drop_layer, r"model\.layers\.3\.\S+ \(256, 256\) is not in the model"),
        (add_layer, r"model\.layers\.4\.\S+ is beyond it"),
        (replace_embedding, r"model\.embed_tokens\.weight \(2048, 256\) is \(10, 256\)"),
    ],
)
def test_an_edited_model_is_refused_before_it_is_written(
    edit: Callable[[Any], None], named: str, tmp_path: Path
) -> None:
    model = language_model()
    edit(model)
    model = converted(model)
    for save in (fp4pass.save, lambda m, folder: m.save_pretrained(folder)):
        with pytest.raises(CheckpointError, match=named) as caught:
            save(model, tmp_path / "q")
        assert "Set the fields of model.config" in str(caught.value)
        assert not [*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("*.json")]
    fp4pass.save(model, tmp_path / "own", layout="fp4pass")
    again = language_model()
    edit(again)
    assert_same_bits(fp4pass.load(tmp_path / "own", model=again), model)


def test_a_head_that_was_untied_is_refused(tmp_path: Path) -> None:
    """Whoever loads the folder would tie it again."""
    model = language_model()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    model = converted(model)
    what = r"lm_head\.weight is not model\.embed_tokens\.weight, to which it is tied"
    with pytest.raises(CheckpointError, match=what):
        fp4pass.save(model, tmp_path / "q")
    model.config.tie_word_embeddings = False
    fp4pass.save(model, tmp_path / "q")
    assert torch.equal(fp4pass.load(tmp_path / "q").lm_head.weight, model.lm_head.weight)


def test_a_head_of_the_user_is_no_edit(tmp_path: Path) -> None:
    def built() -> Any:
        model = language_model()
        model.v_head = nn.Linear(model.config.hidden_size, 1, dtype=torch.bfloat16)
        model.resize_token_embeddings(2050)
        return model

    model = converted(built())
    fp4pass.save(model, tmp_path / "q")
    assert_same_bits(fp4pass.load(tmp_path / "q", model=built()), model)
