"""Other libraries are asked for what is needed: versions newer than the tested ones, and others."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn

import fp4pass
from fp4pass import _compat
from fp4pass._compat import torch as compat
from fp4pass.errors import BuildError, Fp4PassError, VersionError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def untested(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts as before their self-tests, and as they were again after a test."""
    for each in _compat.all_parts():
        monkeypatch.setattr(each, "problem", None)
        monkeypatch.setattr(each, "is_tested", False)
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


# ---- parts --------------------------------------------------------------------------------------


def named(name: str) -> _compat.Part:
    (found,) = [each for each in _compat.all_parts() if name in each.name]
    return found


# The name of a part, and where the private thing is that it needs.
GONE = {
    "short way past the dispatcher": "torch._C._len_torch_dispatch_stack",
    "passes of fp4pass": "torch._inductor.custom_graph_pass.CustomGraphPass",
    "hooks that torch.compile": "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "C++ for packed weights": "torch._inductor.lowering.make_fallback",
    "kernels in Gluon": "triton.experimental.gluon.nvidia.hopper.TensorDescriptor",
}


@pytest.mark.core
@pytest.mark.parametrize("name", GONE)
def test_a_private_thing_that_is_gone_is_said_once(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = named(name)
    compat._chained_pass.cache_clear()
    monkeypatch.delattr(GONE[name])
    with caplog.at_level(logging.WARNING, "fp4pass"):
        assert not found.works() and not found.works()
    compat._chained_pass.cache_clear()
    assert caplog.messages == [str(found)]
    missing = GONE[name].rpartition(".")[2]
    version = _compat.installed_version(found.library)
    assert missing in str(found) and f"off with {found.library} {version}" in str(found)
    assert str(found).endswith(found.cost)


@pytest.mark.parametrize("each", _compat.all_parts(), ids=lambda each: each.name[:30])
def test_every_part_works_here(each: _compat.Part) -> None:
    assert each.works(), str(each)


def lies(value: object) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


# What a part asks, with a wrong answer.
WRONG: dict[str, tuple[str, Any]] = {
    "short way past the dispatcher": ("torch._C._functorch.peek_interpreter_stack", lies(None)),
    "copies of an exported graph": ("torch.fx.GraphModule.__deepcopy__", lambda self, memo: self),
    "observers in a model": ("fp4pass._compat.torch._change_dictionaries", lies(None)),
    "passes of fp4pass": ("torch._inductor.fx_passes.post_grad.post_grad_passes", lies(None)),
}


@pytest.mark.core
@pytest.mark.parametrize("name", WRONG)
def test_a_private_thing_that_answers_wrongly_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch._inductor.compile_fx

    found, (where, lie) = named(name), WRONG[name]
    monkeypatch.setattr(where, lie)
    if name == "passes of fp4pass":
        monkeypatch.setattr(torch._inductor.compile_fx, "post_grad_passes", lie)
    with caplog.at_level(logging.WARNING, "fp4pass"):
        assert not found.works()
    (line,) = caplog.messages
    assert "AssertionError: a self-test expected" in line


@pytest.mark.core
def test_products_are_right_without_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fp4pass.convert(nn.Linear(64, 32), "nvfp4", "naive")
    x = torch.randn(4, 64)
    expected = model(x)
    monkeypatch.setattr(compat._sees_interception, "is_tested", False)
    monkeypatch.delattr("torch._C._functorch.peek_interpreter_stack")
    assert torch.equal(model(x), expected)
    assert not compat.only_calls_kernel(x) and compat.intercepts_operators()


@pytest.mark.core
def test_kernels_that_nothing_compiles_have_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch._inductor.cpp_builder

    monkeypatch.delattr(torch._inductor.cpp_builder, "CppTorchOptions")
    with pytest.raises(BuildError, match=r"could not be compiled .*CppTorchOptions"):
        compat.build_library(tmp_path / "a.cpp", tmp_path / "a.so")


@pytest.mark.core
def test_compiled_models_run_without_passes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pass that would see another graph than it expects sees none."""
    import torch._inductor.compile_fx
    from post_grad import compiled, fresh

    model = fp4pass.convert(nn.Sequential(nn.Linear(64, 32)), "nvfp4a16", "sse")
    x = torch.randn(5, 64)
    monkeypatch.setattr(torch._inductor.compile_fx, "post_grad_passes", lies(None))
    with fresh(), torch.no_grad(), caplog.at_level(logging.WARNING, "fp4pass"):
        fp4pass.graph.inductor.install_passes()
        assert torch.equal(compiled(model)(x), model(x))
        assert not fp4pass.compile_report().graphs
    (line,) = [each for each in caplog.messages if "off with" in each]
    assert line.startswith("the passes of fp4pass in torch.compile: off with torch")
