"""transformers' server and its continuous batches, of converted models and of packed folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_quality import BUNDLED
from torch import nn

import fp4pass
from fp4pass.errors import OptionError

transformers = pytest.importorskip("transformers")

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [40] * 9]
DEVICE = "cpu"


def converted(**options: Any) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    return fp4pass.convert(model.eval().to(DEVICE), "nvfp4", "naive", **options)


def batched(model: Any) -> list[list[int]]:
    """What continuous batches write behind the prompts."""
    config = transformers.GenerationConfig(
        max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    found = model.generate_batch(
        PROMPTS,
        generation_config=config,
        continuous_batching_config=pages,
        progress_bar=False,
    )
    assert not any(each.error for each in found.values())
    return [found[name].generated_tokens for name in sorted(found)]


def alone(model: Any) -> list[list[int]]:
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    device = model.device
    each = (model.generate(torch.tensor([ids], device=device), **options)[0] for ids in PROMPTS)
    return [text[len(ids) :].tolist() for ids, text in zip(PROMPTS, each, strict=True)]


@pytest.mark.slow
def test_requests_that_run_together_get_what_each_gets_alone() -> None:
    model = converted(weight_only=True)
    assert batched(model) == alone(model)


def test_the_server_keeps_a_folder_packed(tmp_path: Path) -> None:
    from fp4pass._compat.transformers_serving import manager_with
    from fp4pass.integrations.serving import load_packed

    model = converted(weight_only=True)
    fp4pass.save(model, tmp_path / "packed")
    manager = manager_with(load_packed)(device=DEVICE)
    served = manager._load_model(f"{tmp_path / 'packed'}@main")
    assert str(fp4pass.report(served)) == str(fp4pass.report(model))
    assert alone(served) == alone(model)
    assert manager._load_model(f"{BUNDLED}@main").dtype == torch.bfloat16
    manager = manager_with(load_packed)(device=DEVICE, dtype="float16")
    with pytest.raises(OptionError, match="--dtype float32"):
        manager._load_model(f"{tmp_path / 'packed'}@main")
