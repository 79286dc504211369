"""Options as type checkers and editors see them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from fp4pass import LinearConfig
from fp4pass.kernels.compute_fp8.naive import COMPUTES
from fp4pass.kernels.quantize.naive import ACTIVATION_SCALES
from fp4pass.methods.base import METHODS, MethodChoice
from fp4pass.nn.kv_cache import CACHE_FORMATS, CacheName
from fp4pass.record.config import OPTIONS, ActivationScales, Compute, LinearOptions, SchemeOptions
from fp4pass.record.schemes import QUALITIES, QualityName, Scheme, schemes

RIGHT = """
import torch
import fp4pass

model = torch.nn.Linear(32, 32)
rules: fp4pass.record.config.Rules = [("x", None), ("y", {"fmt": "mxfp4"})]
fp4pass.prepare(model, fp4pass.Gptq(), fmt="nvfp4", rotation=32, kv_cache="fp8")
fp4pass.convert(model, "nvfp4a16", "sse", rules=rules, weight_only=True, block=32)
fp4pass.allocate(model, bits=5.0, schemes=["nvfp4", "bf16"], compute="fp8")
fp4pass.quantize_checkpoint("a", "b", unreached="skip", quality="good")
fp4pass.save(fp4pass.load("b"), "c", layout="modelopt")
fp4pass.dequantize(fp4pass.quantize(torch.ones(2, 32), "nvfp4")).mean()
"""

WRONG = """
fp4pass.convert(3)
fp4pass.convert(model, nonsense=True)
fp4pass.convert(model, "nvpf4")
fp4pass.convert(model, method="ssd")
fp4pass.convert(model, quality="bets")
fp4pass.convert(model, activation_scales="sso")
fp4pass.prepare(model, block="16")
fp4pass.prepare(model, kv_cache="fp16")
fp4pass.allocate(model, bits=5.0, fmt="nvfp4")
fp4pass.allocate(model, bits=5.0, schemes=["nvfp5"])
fp4pass.quantize_checkpoint("a", "b", nonsense=True)
fp4pass.calibrate(model, [], progres=True)
fp4pass.save(model, "a", layout="model-opt")
fp4pass.load("a", device=0)
fp4pass.dequantize(torch.ones(2))
"""


def names_of(hint: Any) -> set[str]:
    """Return the strings of a Literal, or of a union with some."""
    return {
        name
        for each in get_args(hint)
        for name in ([each] if type(each) is str else names_of(each))
    }


def test_the_typed_options_are_those_of_a_layer() -> None:
    fields, typed = get_type_hints(LinearConfig), get_type_hints(SchemeOptions)
    assert typed.keys() | {"method"} == {each.name for each in OPTIONS}
    assert typed.keys() - get_type_hints(LinearOptions).keys() == {"fmt"}
    assert all(typed[name] == fields[name] for name in get_type_hints(LinearOptions))


def test_names_that_type_checkers_know_are_those_that_exist() -> None:
    assert names_of(Scheme) == {*schemes()} and names_of(CacheName) == {*CACHE_FORMATS}
    assert names_of(MethodChoice) == {*METHODS} and names_of(QualityName) == {*QUALITIES}
    assert get_args(ActivationScales) == ACTIVATION_SCALES and get_args(Compute) == COMPUTES


@pytest.mark.slow
def test_mypy_sees_every_option(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    path = tmp_path / "calls.py"
    path.write_text(RIGHT + WRONG)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(path)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    lines = {int(line.split(":")[1]) for line in found.stdout.splitlines() if ": error:" in line}
    first = RIGHT.count("\n") + 2
    assert lines == {*range(first, first + WRONG.count("\n") - 1)}, found.stdout
