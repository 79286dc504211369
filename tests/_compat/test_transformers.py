"""Private things of transformers and PEFT: the cache by any name, and what is said without them."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from typing import Any

import pytest
import torch
from small_models import language_model

from fp4pass import _compat
from fp4pass._compat import transformers as compat
from fp4pass._compat import transformers_cache, transformers_loading
from fp4pass.errors import VersionError

transformers = pytest.importorskip("transformers")


# ---- caches -------------------------------------------------------------------------------------


@pytest.mark.core
def test_the_argument_for_a_cache_is_asked_for() -> None:
    def new(x: Any, cache: Any = None) -> None: ...
    def old(x: Any, past_key_values: Any = None) -> None: ...
    def around(*args: Any, **kwargs: Any) -> None: ...

    names = [transformers_cache.cache_argument(each) for each in (new, old, around)]
    assert names == ["cache", "past_key_values", None]
    model = language_model()
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.long), **transformers_cache.cache_given(model, cache))
    assert cache.get_seq_length() == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_no_class_has_another_argument_for_a_cache() -> None:
    """A name that is missed would be silent: hidden tokens would count with static caches."""
    from transformers.models.auto import modeling_auto

    others = {}
    for name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        cls = getattr(transformers, name, None)
        if cls is None or transformers_cache.cache_argument(cls.forward) is not None:
            continue
        named = [
            each.name
            for each in inspect.signature(cls.forward).parameters.values()
            if "Cache" in str(each.annotation) and each.name not in transformers_cache._NAMES
        ]
        # Of states, and not of keys and values, before transformers 5.24.
        if named and named != ["cache_params"]:
            others[name] = named
    assert not others


@pytest.mark.core
def test_a_cache_is_refused_where_generate_makes_it_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A packed cache would be left out in silence."""
    transformers_cache.generated_name.cache_clear()
    monkeypatch.delattr(transformers.GenerationMixin, transformers_cache.PREPARE)
    with pytest.raises(VersionError, match=r"transformers .* `generate` makes no .*pip install"):
        transformers_cache.generate_with(language_model(), lambda model, length: None)
    transformers_cache.generated_name.cache_clear()


# ---- weights ------------------------------------------------------------------------------------


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> _compat.Part:
    monkeypatch.setattr(compat._says_of_weights, "problem", None)
    monkeypatch.setattr(compat._says_of_weights, "is_tested", False)
    return compat._says_of_weights


@pytest.mark.core
@pytest.mark.parametrize("change", ["gone", "wrong"])
def test_a_class_that_says_other_things_of_its_weights_is_named(
    change: str,
    untested: _compat.Part,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = language_model()
    if change == "gone":
        monkeypatch.delattr(transformers.PreTrainedModel, "_get_dtype_plan")
    else:
        monkeypatch.setattr(transformers.PreTrainedModel, "_get_dtype_plan", lambda *args: {})
    with caplog.at_level(logging.WARNING, "fp4pass"):
        assert compat.tied_weights(model) and compat.whole_modules(model)
    assert caplog.messages == [str(untested)]
    assert "compare a saved model with its source" in str(untested)


@pytest.mark.core
def test_tensors_that_are_read_past_the_hook_are_an_error() -> None:
    with pytest.raises(VersionError, match="loads tensors past convert_and_load_state_dict"):
        with transformers_loading.other_tensors(lambda tensors: tensors):
            pass


@pytest.mark.core
def test_a_model_that_was_not_filled_is_an_error() -> None:
    model = language_model()
    transformers_loading.require_filled(model)
    filled: list[int] = []
    transformers_loading.when_loaded(model, lambda: filled.append(1), lambda name: False, ())
    with pytest.raises(VersionError, match="does not call _adjust_missing_and_unexpected_keys"):
        transformers_loading.require_filled(model)


@pytest.mark.core
def test_a_private_name_of_peft_that_is_gone_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    importlib.import_module("fp4pass._compat.peft")
    monkeypatch.delitem(sys.modules, "fp4pass._compat.peft")
    monkeypatch.delattr("peft.utils.constants.SEQ_CLS_HEAD_NAMES")
    newest = _compat.LIBRARIES["peft"].newest
    with pytest.raises(VersionError, match=rf"SEQ_CLS_HEAD_NAMES.*pip install 'peft=={newest}"):
        importlib.import_module("fp4pass._compat.peft")
