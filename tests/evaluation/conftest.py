"""The models that tests of the evaluation share."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation.toys import Toy

import fp4pass
from fp4pass.evaluation import token_windows

TINY_LM = Path(__file__).parents[2] / "examples" / "tiny_lm"


@pytest.fixture
def toy() -> Toy:
    torch.manual_seed(0)
    return Toy().eval()


@pytest.fixture(scope="session")
def held_out() -> str:
    """The text that the bundled model was not trained on."""
    return (TINY_LM / "eval.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def tiny(held_out: str) -> Any:
    """The bundled model, a 4-bit copy of it, its tokenizer, and 6 held-out windows of 64."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_LM)
    converted = fp4pass.convert(copy.deepcopy(model), "mxfp4", "naive")
    return model, converted, tokenizer, token_windows(tokenizer, held_out, window=64, windows=6)
