"""The passes inside Inductor: what they change, what they leave alone, how they are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.nn import functional as F

import fp4pass
from fp4pass.graph.inductor import install as inductor
from fp4pass.graph.inductor.eager import keep_whole, run_eager_kernels
from fp4pass.graph.inductor.merge import share_calls

NAMES = tuple(inductor.PASSES)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    # Code from a cache is made without running a pass.
    torch.compiler.reset()
    with (
        config.patch(
            dict.fromkeys(NAMES) | {"fx_graph_cache": False, "emulate_precision_casts": False}
        ),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        inductor._casts.clear()
        yield
        inductor._casts.clear()


class Block(nn.Module):
    """A norm, an activation and a softmax before linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + y.softmax(-1) * x.square().mean(-1, keepdim=True).rsqrt()


class Recorder(CustomGraphPass):
    """A user's pass, which keeps the operators of what it saw."""

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.seen: list[list[str]] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append([str(node.target) for node in graph.nodes])

    def uuid(self) -> Any:
        return self.key


class Chain(CustomGraphPass):
    """A user's pass that runs others."""

    def __init__(self, others: tuple[Any, ...]) -> None:
        self.others = others

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.others:
            each(graph)

    def uuid(self) -> Any:
        return None


def compiled_graph(model: nn.Module, x: Tensor) -> fx.Graph:
    """The graph that Inductor is about to lower."""
    graphs = []

    class Last(Recorder):
        def __call__(self, graph: fx.Graph) -> None:
            graphs.append(graph)

    installed = filter(None, (config.post_grad_custom_post_pass, Last("last")))
    last = Chain(tuple(installed))
    with config.patch(post_grad_custom_post_pass=last), torch.no_grad():
        torch.compile(model, fullgraph=True)(x)
    assert len(graphs) == 1
    return graphs[0]


def marked(graph: fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if "should_fallback" in node.meta}


def test_composites_stay_whole_and_sums_are_left_to_aten() -> None:
    model = fp4pass.convert(Block(), method="sse")
    graph = compiled_graph(model, torch.randn(5, 64))
    names = {str(node.target) for node in graph.nodes}
    assert {f"fp4pass.{name}.default" for name in ("layer_norm", "gelu", "softmax")} <= names
    assert {"aten.mean.dim", "aten.rsqrt.default"} <= marked(graph)
    assert run_eager_kernels(graph) == 0
    assert keep_whole(graph) == 0


def heads(x: Tensor) -> Tensor:
    """Three tensors [B, H, T, D]."""
    return x.view(3, 2, 4, -1, 32)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = q @ k.transpose(-1, -2) * 0.2
    weights = weights.masked_fill(weights > 5, float("-inf"))
    return F.softmax(weights, -1, dtype=torch.float32).to(v.dtype) @ v


# What stands between linears, as functions of [B, K] floats.
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "written rms norm": lambda x: x * torch.rsqrt(x.float().square().mean(-1, True)).to(x.dtype),
    "softmax": lambda x: x.softmax(-1),
    "softmax in float32": lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu by hand": lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x.pow(3)))),
    "gated silu": lambda x: F.silu(x) * (x + 1),
    "softplus": F.softplus,
    "rotary": lambda x: (
        x * x.float().cos().to(x.dtype) + x.roll(1, -1) * x.float().sin().to(x.dtype)
    ),
    "sums": lambda x: x / x.exp().sum(-1, keepdim=True) - x.cumsum(-1) + x.var(-1, keepdim=True),
    "attention": lambda x: F.scaled_dot_product_attention(*heads(x), is_causal=True),
    "attention by hand": lambda x: attention(*heads(x)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("between", BETWEEN)
def test_what_stands_between_linears_has_the_bits_of_eager(
    between: str, dtype: torch.dtype
) -> None:
    fp4pass.convert(Block(), method="sse")

    x = (2 * torch.randn(240, 384, generator=torch.Generator().manual_seed(0))).to(dtype)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        # The passes leave graphs alone that quantize nothing.
        return BETWEEN[between](x), torch.ops.fp4pass.quantize(x, None, "mxfp4")[0]

    with torch.no_grad():
        assert torch.equal(torch.compile(both, fullgraph=True)(x)[0], both(x)[0])


def test_other_models_compile_as_before() -> None:
    fp4pass.convert(Block(), method="sse")
    for model in (Block(), fp4pass.convert(Block(), method="sse", weight_only=True)):
        graph = compiled_graph(model, torch.randn(5, 64))
        names = {str(node.target) for node in graph.nodes}
        assert not marked(graph) and "fp4pass.gelu.default" not in names
        torch.compiler.reset()


def test_autocast_keeps_its_own_rules() -> None:
    model, x = fp4pass.convert(Block(), method="sse"), torch.randn(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        graph = compiled_graph(model, x)
    assert "fp4pass.gelu.default" not in {str(node.target) for node in graph.nodes}


class Softmaxes(nn.Module):
    """Calls of softmax that an operator with a schema does not take, and some that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.softmax = nn.Linear(64, 64), nn.Softmax()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + x.softmax(dim=-1, dtype=torch.float64).float()
        torch.softmax(x, 0, out=torch.empty_like(x))
        x = F.softmax(x, 0, 3, torch.float64).float() + torch.softmax(x, -1)
        return x + self.softmax(x)


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_every_call_of_softmax_compiles() -> None:
    model = fp4pass.convert(Softmaxes(), method="sse")
    x = torch.randn(5, 64)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x))


def test_gradients_flow_through_operators_that_stay_whole() -> None:
    model, x = fp4pass.convert(Block(), method="sse"), torch.randn(5, 64, requires_grad=True)
    code = torch.compile(model, fullgraph=True)
    wanted = (x, model.norm.weight, model.norm.bias, model.down.bias)
    expected = torch.autograd.grad(model(x).square().sum(), wanted)
    got = torch.autograd.grad(code(x).square().sum(), wanted)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("weight_only", [True, False])
def test_only_quantized_inputs_have_inductor_cast(weight_only: bool) -> None:
    fp4pass.convert(Block(), method="sse", weight_only=weight_only)
    assert all(isinstance(getattr(config, name), inductor.Pass) for name in NAMES)
    casts = torch.cuda.is_available() and not weight_only
    assert config.emulate_precision_casts is casts


def test_passes_are_installed_once_and_after_those_of_the_user() -> None:
    mine = [Recorder(name) for name in NAMES]
    for name, each in zip(NAMES, mine, strict=True):
        setattr(config, name, each)
    model = fp4pass.convert(Block(), method="sse")
    installed = [getattr(config, name) for name in NAMES]
    fp4pass.convert(Block(), method="sse")
    assert [getattr(config, name) for name in NAMES] == installed
    with torch.no_grad():
        torch.compile(model)(torch.randn(5, 64))
    assert [len(each.seen) for each in mine] == [1] * len(NAMES)
    assert not any("fp4pass.gelu" in name for name in mine[0].seen[0])
    assert "fp4pass.gelu.default" in mine[-1].seen[0]


def test_uninstalling_leaves_what_a_user_installed() -> None:
    mine = Recorder("mine")
    setattr(config, NAMES[1], mine)
    inductor.install()
    inductor.uninstall()
    assert [getattr(config, name) for name in NAMES] == [None, mine, None]
    assert config.emulate_precision_casts is False
    inductor.uninstall()
    inductor.install()
    assert getattr(config, NAMES[1]).before == (mine,)


def test_uninstalling_under_a_pass_that_runs_ours_is_refused() -> None:
    inductor.install()
    ours = getattr(config, NAMES[0])
    later = Recorder("later")
    later.inner = ours  # type: ignore[attr-defined]
    setattr(config, NAMES[0], later)
    with pytest.raises(fp4pass.Fp4PassError, match=f"{NAMES[0]} holds a pass that runs those"):
        inductor.uninstall()
    assert isinstance(getattr(config, NAMES[1]), inductor.Pass)


def test_the_cache_key_follows_the_passes_before() -> None:
    def key(*before: Any, hook: str = NAMES[0]) -> Any:
        return inductor.Pass(hook, before).uuid()

    assert key() == key() != key(hook=NAMES[1])
    assert key(Recorder("a")) != key(Recorder("b")) != key()
    # A pass without a key, or a plain function: nothing may be cached.
    assert key(Recorder(None)) is None and key(print) is None


def test_a_changed_pass_meets_no_stale_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled, found in the cache, and compiled again when the source of a pass is another."""
    source = tmp_path / "passes.py"
    source.write_text("a")
    monkeypatch.setattr(inductor, "SOURCES", (str(source),))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    runs: list[str] = []

    def change(graph: fx.Graph) -> int:
        runs.append(source.read_text())
        return 0

    monkeypatch.setitem(inductor.PASSES, NAMES[1], (change,))
    model, x = fp4pass.convert(Block(), method="sse"), torch.randn(5, 64)

    def compile_again() -> None:
        torch.compiler.reset()
        with torch.no_grad():
            torch.compile(model, fullgraph=True)(x)

    with config.patch(fx_graph_cache=True):
        compile_again()
        compile_again()
        assert runs == ["a"]
        source.write_text("b")
        get_hash_for_files.cache_clear()
        compile_again()
        assert runs == ["a", "b"]
        # So does another choice of passes.
        monkeypatch.setitem(inductor.PASSES, NAMES[1], (change, share_calls))
        compile_again()
        assert runs == ["a", "b", "b"]
