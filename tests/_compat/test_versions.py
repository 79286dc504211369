"""Other libraries are asked for what is needed: versions newer than the tested ones, and others."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fp4pass
from fp4pass import _compat
from fp4pass._compat import torch as compat
from fp4pass.errors import BuildError, Fp4PassError, VersionError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def untested() -> Iterator[None]:
    _compat._warn_newer.cache_clear()
    yield
    _compat._warn_newer.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    known = _compat.installed_version
    monkeypatch.setattr(
        _compat, "installed_version", lambda name: versions.get(name) or known(name)
    )


# ---- versions -----------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("installed", ["5.17", "5.24.3", "5.17.0.dev20260101+cpu", "5.24rc1"])
def test_tested_versions_say_nothing(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, transformers=installed)
    _compat.require("transformers")


@pytest.mark.core
@pytest.mark.parametrize("installed", ["5.25.0", "5.100", "6.0.0.dev1", "6.1+cpu"])
def test_a_newer_version_is_one_warning(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, transformers=installed)
    with pytest.warns(UserWarning, match=f"^transformers {re.escape(installed)} is newer than 5"):
        _compat.require("transformers")
    # Warnings are errors here.
    _compat.require("transformers")


@pytest.mark.core
def test_a_newer_torch_converts_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch="99.0.1")
    with pytest.warns(UserWarning, match=r"torch 99\.0\.1 is newer .*fp4pass doctor") as caught:
        for _ in range(2):
            fp4pass.convert(nn.Sequential(nn.Linear(64, 32)), "nvfp4a16", "sse")
    assert len(caught) == 1


@pytest.mark.core
@pytest.mark.parametrize("installed", ["5.16.9", "4.57.1", "5.16.0+cpu"])
def test_an_older_version_is_an_error(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, transformers=installed)
    with pytest.raises(VersionError) as caught:
        _compat.require("transformers")
    assert str(caught.value) == (
        f"transformers: expected version 5.17 or newer, got {installed}. "
        "Run pip install -U 'fp4pass[hf]'."
    )
    assert isinstance(caught.value, Fp4PassError) and isinstance(caught.value, ImportError)


@pytest.mark.core
def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_compat.LIBRARIES, "no-such-package", _compat.Tested("1.0", "2.0", "eval"))
    with pytest.raises(VersionError, match=r"got no installation.*'fp4pass\[eval\]'"):
        _compat.require("no-such-package")


@pytest.mark.core
def test_the_metadata_has_the_oldest_versions_and_no_cap() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8").partition("[project.scripts]")[0]
    _, _, listed = text.partition("dependencies = [")
    bounds: dict[str, set[str]] = {}
    for line in re.findall(r'"([a-z][^"]+)"', listed):
        each = Requirement(line)
        if each.name != "fp4pass":
            bounds.setdefault(each.name, set()).add(str(each.specifier))
    for name, tested in _compat.LIBRARIES.items():
        # The first is installed with transformers, which has its bounds.
        assert name == "huggingface_hub" or bounds[name] == {f">={tested.oldest}"}, name
    # A cap would keep fp4pass out of the environments of today.
    every = {each for some in bounds.values() for each in some}
    assert all(each.startswith(">=") and "," not in each for each in every)


# ---- private things -----------------------------------------------------------------------------


@pytest.mark.core
def test_the_cost_of_what_is_missing_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("torch._C._dynamo.eval_frame.set_code_exec_strategy")
    _compat._say_cost.cache_clear()
    with caplog.at_level(logging.WARNING, "fp4pass"):
        compat.runs_uncompiled(pretend)
        compat.runs_uncompiled(pretend)
    (line,) = caplog.messages
    assert "compiled again for each kind of mask" in line and "set_code_exec_strategy" in line
    _compat._say_cost.cache_clear()


@pytest.mark.core
def test_what_sees_operators_is_seen() -> None:
    x, seen = torch.zeros(1), []

    def look(each: Tensor) -> Tensor:
        seen.append(compat.intercepts_operators() and not compat.only_calls_kernel(each))
        return each.sum()

    torch.func.vmap(look)(x)
    torch.func.grad(look)(x)
    with TorchDispatchMode():
        seen.append(compat.intercepts_operators() and not compat.only_calls_kernel(x))
    assert seen == [True] * 3 and compat.only_calls_kernel(x)
    with forward_ad.dual_level():
        assert not compat.only_calls_kernel(x)
    negated = torch.zeros(1, dtype=torch.complex64).conj().imag
    others = (negated, torch._efficientzerotensor(1), x.clone().requires_grad_())
    assert not any(map(compat.only_calls_kernel, others))


@pytest.mark.core
def test_kernels_that_nothing_compiles_have_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch._inductor.cpp_builder

    monkeypatch.delattr(torch._inductor.cpp_builder, "CppTorchOptions")
    with pytest.raises(BuildError, match=r"could not be compiled .*CppTorchOptions"):
        compat.build_library(tmp_path / "a.cpp", tmp_path / "a.so")
