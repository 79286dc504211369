"""The time that a conversion will take, by a trial of one layer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from mixtures import build as mixture
from mixtures import ids
from small_models import assert_same_bits, language_model, mlp, tokens
from torch import nn

import fp4pass
from fp4pass.core import clock
from fp4pass.engine import trial
from fp4pass.engine.trial import Trial, size_of, try_layer
from fp4pass.methods import Gptq
from fp4pass.quantization.plan import plan_layers
from fp4pass.record.config import LinearConfig
from fp4pass.record.state import get_state

BATCH = tokens(2)


def tried(model: nn.Module, batch: Any = BATCH, sequential: bool = False, **options: Any) -> Any:
    plan = plan_layers(model, LinearConfig(**options))
    return try_layer(model, plan, batch, sequential=sequential)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which whatever is timed takes a second."""
    count = itertools.count()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(count)))


@pytest.mark.core
@pytest.mark.usefixtures("ticks")
def test_the_layer_stands_for_all_by_its_weights() -> None:
    pytest.importorskip("transformers")
    # Four layers alike; a batch runs in the observed layers, and in what is around them.
    assert tried(language_model(), method="sse", batch=None) == Trial(4.0)
    assert tried(language_model(), method="hessian") == Trial(4.0, 4.0, BATCH.numel())


@pytest.mark.core
@pytest.mark.usefixtures("ticks")
def test_a_layer_behind_others_runs_once_for_each_step() -> None:
    pytest.importorskip("transformers")
    found = tried(language_model(), sequential=True, method="sse", weight_only=True)
    # In the float model, for what it sees, and for what it returns.
    assert found == Trial(4.0, 12.0, BATCH.numel())


def test_the_model_stays_as_it_is() -> None:
    pytest.importorskip("transformers")
    model, untouched = language_model(), language_model()
    hooks = [len(each._forward_pre_hooks) for each in model.modules()]
    assert tried(model, sequential=True, method=Gptq(target="cross", sweeps=0)).search > 0
    assert [len(each._forward_pre_hooks) for each in model.modules()] == hooks
    assert get_state(model) is None and not any("forward" in m.__dict__ for m in model.modules())
    assert_same_bits(model, untouched)


@pytest.mark.core
def test_models_of_any_kind() -> None:
    # A stack of experts; no stack at all; one that the batch does not fit.
    experts = mixture("mixtral")
    assert tried(experts, ids(1)).batch > 0
    assert tried(mlp().eval(), torch.ones(2, 64)).search > 0
    assert tried(mlp().eval(), torch.ones(2, 63)) is None
    assert fp4pass.convert(mlp().eval(), "mxfp4", "sse") is not None


def test_seconds_grow_with_the_tokens() -> None:
    assert Trial(3.0, 2.0, 100).seconds(350) == 10.0
    assert size_of({"input_ids": torch.ones(2, 8), "attention_mask": torch.ones(1)}) == 16


def test_a_gpu_is_timed_when_its_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[Trial] = []

    class Compiles:
        place = torch.device("cuda")

        def __init__(self, *args: Any) -> None:
            pass

        def time(self) -> Trial:
            tries.append(Trial(search=1.0 if tries else 99.0))
            return tries[-1]

    monkeypatch.setattr(trial, "_Try", Compiles)
    assert tried(mlp(), batch=None) == Trial(search=1.0) and len(tries) == 2
