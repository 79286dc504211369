"""Models in bfloat16 on a CPU that is slow in it: they compute in float32, and are as before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from evaluation.toys import Toy
from small_models import language_model, tokens
from torch import nn

import fp4pass
from fp4pass._compat import torch as compat
from fp4pass.evaluation import fast_dtype, output_errors
from fp4pass.quantization.observers import batches as computing


@pytest.fixture(params=[False, True], ids=["slow", "quick"])
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(computing, "cpu_has_bfloat16", lambda: request.param)
    return request.param


def dtypes_of_outputs(model: nn.Module) -> set[torch.dtype]:
    """What the linear layers return from here on."""
    found: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, args, output: found.add(output.dtype))
    return found


@pytest.mark.core
def test_tensors_keep_their_memory(quick: bool) -> None:
    model = language_model()
    before = {name: (t, t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    with pytest.raises(KeyError), fast_dtype(model, model):
        assert model.dtype == (torch.bfloat16 if quick else torch.float32)
        assert model.lm_head.weight is model.get_input_embeddings().weight
        raise KeyError
    for name, tensor in model.state_dict().items():
        mine, place, values = before[name]
        assert tensor.data_ptr() == place == mine.data_ptr() and torch.equal(tensor, values)


def test_what_is_measured_is_computed_in_float32(quick: bool) -> None:
    model, ids = language_model(), tokens()
    packed = fp4pass.convert(copy.deepcopy(model), "nvfp4", "sse", weight_only=True)
    options: Any = {"progress": False}
    if not quick:
        wide, wide_packed = copy.deepcopy(model).float(), copy.deepcopy(packed).float()
        wanted = fp4pass.evaluate(wide_packed, None, ids, wide, **options)
        errors = output_errors(wide_packed, wide, [ids], activations=True, **options)
    found = dtypes_of_outputs(model)
    result = fp4pass.evaluate(packed, None, ids, model, **options)
    measured = output_errors(packed, model, [ids], activations=True, **options)
    assert found == {torch.bfloat16 if quick else torch.float32}
    assert model.dtype == packed.dtype == torch.bfloat16
    if not quick:
        assert (result.perplexity, result.kl) == (wanted.perplexity, wanted.kl)
        assert measured == errors


@pytest.mark.core
def test_what_stays_in_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that may cast inside, what is compiled for one dtype, and what is float32."""
    monkeypatch.setattr(computing, "cpu_has_bfloat16", lambda: False)
    model = language_model()
    assert computing.is_slow(model) and not computing.is_slow(copy.deepcopy(model).float())
    for other in (Toy().bfloat16(), torch.compile(model), language_model().to("meta")):
        assert not computing.is_slow(other)


@pytest.mark.parametrize(
    ("machine", "used", "instructions", "fast"),
    [
        ("x86_64", "AVX512", True, True),
        ("x86_64", "AVX512", False, False),
        ("AMD64", "AVX2", False, False),
        # ATEN_CPU_CAPABILITY=avx2
        ("x86_64", "AVX2", True, False),
    ],
)
def test_x86_has_bfloat16_by_its_instructions(
    machine: str, used: str, instructions: bool, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: used)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    assert compat.cpu_has_bfloat16() is fast
