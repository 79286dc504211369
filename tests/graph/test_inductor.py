"""How the passes are chained into Inductor, and what of the process that changes: nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from post_grad import compiled, fresh
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import fp4pass
from fp4pass.graph import inductor as install
from fp4pass.graph.inductor import compile_report, install_passes


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with fresh():
        yield


class Block(nn.Module):
    """A norm, an activation and a softmax before linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + y.softmax(-1) * x.square().mean(-1, keepdim=True).rsqrt()


def linears() -> nn.Module:
    """A model whose generated code has no kernels, so that no compiler is called."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))


class Recorder(CustomGraphPass):
    """A user's pass, which keeps the operators of what it saw."""

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.seen: list[list[str]] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append([str(node.target) for node in graph.nodes])

    def uuid(self) -> Any:
        return self.key


# torch 2.11 has no such passes.
AWARE: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)


class InferenceAware(AWARE or CustomGraphPass):  # type: ignore[misc]
    """A user's pass that is told whether there will be a backward."""

    def __init__(self) -> None:
        self.seen: list[bool | None] = []

    def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
        self.seen.append(is_inference)

    def uuid(self) -> Any:
        return "aware"


def settings() -> dict[str, dict[str, Any]]:
    """Every setting of the compiler but the hook of the passes."""
    found = {}
    for each in (config, dynamo_config, functorch_config):
        values = each.get_config_copy()
        values.pop("post_grad_custom_pre_pass", None)
        found[each.__name__] = values
    return found


@pytest.mark.slow
def test_another_model_compiles_to_the_same_code_and_results() -> None:
    """It keeps its code over prepare and convert, and compiled anew it gets the same."""
    other, x, before = Block(), torch.randn(5, 64), settings()

    def compile_other() -> tuple[Any, Tensor, list[str]]:
        code = torch.compile(other, fullgraph=True)
        result, texts = run_and_get_code(code, x)
        # All but the number of the graph.
        return code, result, [text.partition("\n")[2] for text in texts]

    with torch.no_grad():
        code, result, texts = compile_other()
        counters = torch._dynamo.utils.counters["stats"]
        count = counters["unique_graphs"]
        model = fp4pass.prepare(Block(), "sse")
        model(x)
        fp4pass.convert(model, "nvfp4", method="sse")
        assert torch.equal(code(x), result) and counters["unique_graphs"] == count
        torch.compiler.reset()
        _, again, new_texts = compile_other()
    assert settings() == before and config.post_grad_custom_pre_pass is not None
    assert new_texts == texts and len(texts[0]) > 1000
    assert torch.equal(again, result)
    assert not compile_report().graphs


def test_passes_are_installed_once_and_behind_those_of_the_user() -> None:
    mine = Recorder("mine")
    config.post_grad_custom_pre_pass = mine
    model = fp4pass.convert(Block(), "nvfp4", method="sse")
    installed = config.post_grad_custom_pre_pass
    fp4pass.convert(Block(), "nvfp4", method="sse")
    install_passes()
    assert config.post_grad_custom_pre_pass is installed and installed is not mine
    with torch.no_grad():
        compiled(model)(torch.randn(5, 64))
    assert len(mine.seen) == 1 and len(compile_report().graphs) == 1
    assert mine.seen[0].count("fp4pass.quantize.default") == 2


@pytest.mark.parametrize("grad", [False, True])
def test_every_kind_of_pass_of_a_user_still_runs(grad: bool) -> None:
    aware, seen = InferenceAware(), []
    config.post_grad_custom_pre_pass = (aware, seen.append)
    install_passes()
    with torch.set_grad_enabled(grad):
        compiled(linears())(torch.randn(5, 64))
    assert aware.seen == [not grad if AWARE else None] and len(seen) == 1


def test_the_cache_key_follows_all_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(*before: Any) -> Any:
        config.post_grad_custom_pre_pass = before or None
        install_passes()
        return config.post_grad_custom_pre_pass.uuid()

    assert key() == key() is not None
    assert key(Recorder("a")) == key(Recorder("a")) != key(Recorder("b")) != key()
    # A pass without a key, or a plain function: nothing may be cached.
    assert key(Recorder(None)) is None and key(print) is None
    old = key()
    with monkeypatch.context() as patch:
        patch.setattr(install, "PASSES", install.PASSES[:1])
        assert key() != old
    assert all(Path(each).is_file() for each in install.SOURCES)
    assert {"fusions.py", "pattern.py", "torch.py"} <= {path.name for path in install.SOURCES}
    # And of a pass whose source is another one.
    source = tmp_path / "passes.py"
    monkeypatch.setattr(install, "SOURCES", (source,))
    keys = []
    for text in "aab":
        source.write_text(text)
        install._digest.cache_clear()
        keys.append(key())
    install._digest.cache_clear()
    assert keys[0] == keys[1] != keys[2]


def test_passes_that_are_left_out_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    key, left_out = install.cache_key(), ("group_linears", "share_calls")
    passes = tuple(each for each in install.PASSES if each.__name__ not in left_out)
    monkeypatch.setattr(install, "PASSES", passes)
    assert install.cache_key() != key
    model = nn.ModuleList(nn.Linear(64, 96) for _ in "ab")
    fp4pass.convert(model, "mxfp4", "sse")
    with torch.no_grad():
        compiled(lambda x: model[0](x) + model[1](x))(torch.randn(5, 64))
    (graph,) = compile_report().graphs
    assert "group_linears" not in graph.changes and "fuse_gates" in graph.changes
    assert graph.before == graph.after


def test_arguments_of_operators_are_not_written_to_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor of torch 2.11 does it for those that it does not know, at a time of 2 ** depth."""
    from torch._inductor import exc, lowering

    def operator_str(target: Any, *arguments: Any) -> str:
        raise AssertionError(f"{target} is not known to Inductor")

    monkeypatch.setattr(exc.OperatorIssue, "operator_str", staticmethod(operator_str))
    known = [each for each in lowering.lowerings if str(each).startswith("fp4pass.")]
    for each in known:
        monkeypatch.delitem(lowering.lowerings, each)
    model, x = fp4pass.convert(linears(), "nvfp4", "sse"), torch.randn(5, 64)
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True)(x)
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)
    assert torch.ops.fp4pass.quantize.default in lowering.lowerings


def test_a_report_says_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    assert "No graph with fp4pass operators" in str(compile_report())
    model = nn.ModuleList(nn.Linear(64, 96) for _ in "ab")
    fp4pass.convert(model, "mxfp4", "sse")
    caplog.clear()
    with torch.no_grad(), caplog.at_level(logging.INFO, "fp4pass.graph.inductor"):
        compiled(lambda x: model[0](x) + model[1](x))(torch.randn(5, 64))
    calls = "linear_quantized 2 -> 0, linear_quantized_group 0 -> 1, quantize 2 -> 1"
    changes = "share_calls 1, group_linears 1"
    assert str(compile_report()) == f"graph 0: {calls} ({changes})"
    assert caplog.messages == [str(compile_report())]
