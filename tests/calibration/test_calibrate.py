"""fp4pass.calibrate and quantize_checkpoint on data that is no batches yet."""

from __future__ import annotations

from typing import Any

import pytest
from calibration.readers import TURNS, tokenizer
from small_models import assert_same_bits, language_model, tokens

import fp4pass
from fp4pass.calibration import batches
from fp4pass.errors import OptionError
from fp4pass.record.state import get_state

pytest.importorskip("transformers")

TEXTS = ["how to sort a list of words"] * 40

# Two layers are enough, and quick.
FEW = [("*.down_proj", None), ("*.self_attn.*", None), ("model.layers.[!01].*", None)]


def calibrated(data: Any, reader: Any = None, **options: Any) -> Any:
    model = fp4pass.prepare(language_model(), "hessian", rules=FEW, **options)
    return fp4pass.calibrate(model, data, tokenizer=reader, progress=False)


def calibration(model: Any) -> dict[str, Any]:
    """What the checkpoint says of the data, once it is converted."""
    return dict(get_state(model).recipe["calibration"])


def test_texts_are_the_same_as_their_batches() -> None:
    """The tokenizer is that of the folder that the model came from."""
    model = calibrated(TEXTS)
    made = batches(TEXTS, tokenizer())
    assert calibration(model) == calibration(calibrated(made))
    assert_same_bits(fp4pass.convert(model, "nvfp4"), fp4pass.convert(calibrated(made), "nvfp4"))
    assert calibration(model)["tokens"] == sum(batch.numel() for batch in made)


@pytest.mark.quick(1)
@pytest.mark.parametrize("sequential", [False, True])
def test_padding_of_chats_enters_no_statistic(sequential: bool) -> None:
    chats = [TURNS * 12, TURNS * 9]
    padded = calibrated(chats, tokenizer(), sequential=sequential)
    (one,), (other,) = (batches([chat], tokenizer()) for chat in chats)
    assert one.shape != other.shape
    apart = calibrated([one, other], sequential=sequential)
    seen = one.numel() + other.numel()
    first, second = (fp4pass.report(fp4pass.convert(model, "nvfp4")) for model in (padded, apart))
    assert calibration(padded)["tokens"] == calibration(apart)["tokens"] == seen
    assert len(first.converted) == 4
    for mine, theirs in zip(first.converted, second.converted, strict=True):
        assert mine.tokens == theirs.tokens == seen
        assert mine.output_error == pytest.approx(theirs.output_error, rel=0.02)


def test_without_data_there_is_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def mixture(model: Any, tokenizer: Any, **options: Any) -> Any:
        asked.append((model, tokenizer))
        return tokens(3, 16)

    monkeypatch.setattr("fp4pass.calibration.to_batches.mixture", mixture)
    reader = tokenizer()
    model = calibrated(None, reader)
    assert asked == [(model, reader)]
    assert calibration(model) == calibration(calibrated([tokens(3, 16)]))


def test_a_model_that_came_from_no_folder_needs_a_tokenizer() -> None:
    model = language_model()
    model.config._name_or_path = model.name_or_path = ""
    fp4pass.prepare(model)
    with pytest.raises(OptionError, match=r"none lies in a folder .*\. Pass tokenizer="):
        fp4pass.calibrate(model, TEXTS, progress=False)
    fp4pass.calibrate(model, TEXTS, tokenizer=tokenizer(), progress=False)
