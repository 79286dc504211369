"""Converted decoders compiled on a GPU: CUDA graphs, generation, AOTInductor, and the passes."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zoo
from compiled_quality import BUNDLED, divergences
from graph.test_argmax import rows_of_every_kind
from post_grad import fresh
from test_compiled_model import SETTINGS, Logits, converted, difference, package, tokens
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.export import Dim

import fp4pass
from fp4pass.graph.inductor import install

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    # Inductor begins a pool of memory with a graph of nothing.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]


# Inductor times tiles of sums, and keeps what was fastest in files that other processes write, too:
# compiled twice, a model may else add in two orders. (`deterministic` is lost at the first compile:
# Dynamo restores torch.use_deterministic_algorithms, which sets it.)
same_tiles = inductor_config.patch({"test_configs.force_filter_reduction_configs": True})


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    counters.clear()
    with fresh():
        yield


def tiny(weight_only: bool, calibrated: bool, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The bundled language model, converted to NVFP4."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=dtype)
    model.eval().cuda()
    if calibrated:
        fp4pass.prepare(model, "naive")
        fp4pass.calibrate(model, [ids(4, 128)], progress=False)
    return fp4pass.convert(model, "nvfp4", "naive", weight_only=weight_only)


def ids(batch: int, length: int) -> Tensor:
    return tokens(batch, length).cuda()


@torch.no_grad()
def forward(model: Callable[..., object], x: Tensor) -> Tensor:
    return model(x, use_cache=False).logits.float()


def divergence(reference: Tensor, logits: Tensor) -> float:
    p, q = (x.double().log_softmax(-1) for x in (reference, logits))
    return (p.exp() * (p - q)).sum(-1).mean().item()


@same_tiles
@pytest.mark.parametrize("setting", ["nvfp4-weights", "nvfp4-calibrated", "nvfp4-dynamic", "mxfp4"])
def test_cuda_graphs_replay_what_the_compiled_model_computes(setting: str) -> None:
    """Static and dynamic scales: the replays of other inputs have the bits of plain kernels."""
    model = converted("llama", *SETTINGS[setting]).cuda()
    inputs = [(ids(2, 17) + 7 * i) % zoo.VOCAB for i in range(4)]
    plain = torch.compile(model, fullgraph=True)
    expected = [forward(plain, x).clone() for x in inputs]
    torch.compiler.reset()
    graphed = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for x, logits in zip(inputs, expected, strict=True):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(forward(graphed, x), logits)
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = torch._inductor.cudagraph_trees.get_manager(0, create_if_none_exists=False)
    assert manager is not None and any(manager.roots.values())


@pytest.mark.parametrize("setting", ["nvfp4-weights", "nvfp4-calibrated", "nvfp4-dynamic"])
def test_generation_compiles_by_itself_and_writes_what_eager_writes(setting: str) -> None:
    """With a static cache transformers compiles the steps, in CUDA graphs."""
    _, weight_only, calibrated = SETTINGS[setting]
    # In bfloat16 compiled code rounds elsewhere, by which codes of inputs flip at every step.
    dtype, bound = (torch.bfloat16, 2e-3) if weight_only else (torch.float32, 2e-2)
    model = tiny(weight_only, calibrated, dtype)
    x = ids(1, 24)
    options = dict(output_logits=True, return_dict_in_generate=True)
    options |= dict(max_new_tokens=24, do_sample=False, eos_token_id=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(cudagraph|CUDA graph)")
        eager = model.generate(x, **options)
        assert not counters["stats"]["unique_graphs"]
        compiled = model.generate(x, cache_implementation="static", **options)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    (graph,) = fp4pass.compile_report().graphs
    # Attention in float32 is left as it is.
    layers = model.config.num_hidden_layers if weight_only else 0
    assert graph.changes["fuse_attention"] == graph.changes["fuse_rotary"] == layers
    assert graph.after.get("attention_span", 0) == weight_only
    # Until the texts part, which they may where two tokens are nearly equal.
    same = (eager.sequences == compiled.sequences).cumprod(-1).sum().item() - x.shape[1]
    assert same >= 8
    for a, b in zip(eager.logits[:same], compiled.logits[:same], strict=True):
        assert divergence(a.float(), b.float()) <= bound


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("weight_only", [True, False])
def test_a_package_for_the_gpu_gives_the_logits_of_eager(weight_only: bool, tmp_path: Path) -> None:
    model = Logits(converted("llama", weight_only=weight_only, calibrated=not weight_only)).cuda()
    # torch cannot load what a compiler makes that links its C++ library statically.
    with inductor_config.patch({"cpp.cxx": (None, shutil.which("g++", path="/usr/bin") or "g++")}):
        package(model, tmp_path, ids(2, 9), {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})
    inputs = [ids(2, 9), ids(3, 17)]
    # Sums in another order; with 4-bit inputs a code may flip by it.
    bound = 1e-5 if weight_only else 2e-2
    assert difference(tmp_path, model, inputs) <= bound


# Passes whose operators round where eager does, and Inductor does not.
ROUNDING = ("fuse_quantizers", "fuse_gates", "fuse_residuals", "fuse_norms")


@same_tiles
@pytest.mark.parametrize("setting", ["nvfp4-weights", "nvfp4-calibrated", "nvfp4-dynamic"])
def test_merging_calls_changes_no_bit(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted("llama", *SETTINGS[setting]).cuda()
    for batch, length in ((1, 1), (2, 40)):
        found = []
        for names in ((), ("share_calls", "group_linears")):
            torch.compiler.reset()
            with monkeypatch.context() as patch:
                patch.setenv(install.SWITCH, ",".join((*ROUNDING, *names)))
                found.append(forward(torch.compile(model, fullgraph=True), ids(batch, length)))
        assert torch.equal(*found)
    merged, plain, *_ = fp4pass.compile_report().graphs
    assert merged.changes["group_linears"] and "linear_group" not in str(plain.after)
    shared = merged.before.get("quantize", 0) - merged.after.get("quantize", 0)
    assert shared == (0 if setting == "nvfp4-weights" else 6)


@pytest.mark.parametrize("length", [1, 2, 40])
def test_what_surrounds_products_is_fused(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is as near to eager as what Inductor makes of it."""
    model, x = tiny(weight_only=True, calibrated=False), ids(1, length)
    eager = forward(model, x)
    found = forward(torch.compile(model, fullgraph=True), x)
    (graph,) = fp4pass.compile_report().graphs
    layers, few = model.config.num_hidden_layers, length <= 8
    # The head, and the products of the first norm, have no product in front of the norm.
    norms = 2 * layers - 1 if length == 1 and torch.cuda.get_device_capability() >= (8, 9) else 0
    assert graph.changes["fuse_residuals"] == norms
    assert graph.changes["fuse_norms"] == few * (2 * layers - norms)
    assert graph.changes["fuse_gates"] == few * layers
    torch.compiler.reset()
    with monkeypatch.context() as patch:
        patch.setenv(install.SWITCH, ",".join(ROUNDING))
        plain = forward(torch.compile(model, fullgraph=True), x)
    assert divergence(eager, found) <= divergence(eager, plain) + 2e-4


@torch.no_grad()
def test_inputs_of_fp8_products_are_rounded_where_they_are_computed() -> None:
    """It is as near to the original as eager is."""
    transformers = pytest.importorskip("transformers")
    original = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.bfloat16)
    model, x = tiny(weight_only=True, calibrated=False), ids(4, 256)
    fp4pass.set_compute(model, "fp8")
    expected = forward(original.eval().cuda(), x)
    eager = divergence(expected, forward(model, x))
    found, (code,) = run_and_get_code(lambda: forward(torch.compile(model, fullgraph=True), x))
    (graph,) = fp4pass.compile_report().graphs
    layers = model.config.num_hidden_layers
    assert graph.changes["round_rows"] == graph.after["linear_group"] == 7 * layers
    assert graph.after["norm_round"] == 2 * graph.after["activate_round"] == 2 * layers
    # Inductor rounds the outputs of attention.
    assert "torch.float8_e4m3fn" in code
    # Squares are added in another order, which moves codes of E4M3 either way.
    assert divergence(expected, found) <= 1.05 * eager and eager > 1e-3


@pytest.mark.parametrize(
    ("dtype", "rows", "size"),
    [
        pytest.param(torch.bfloat16, 10, 151936, id="parts of equal sizes"),
        pytest.param(torch.float16, 64, 50257, id="a shorter last part"),
        pytest.param(torch.float32, 10, 16411, id="parts without a number"),
    ],
)
@torch.no_grad()
def test_the_largest_of_a_long_row_is_the_one_of_torch(
    dtype: torch.dtype, rows: int, size: int
) -> None:
    layer = fp4pass.convert(nn.Linear(64, 32, device="cuda", dtype=dtype), "nvfp4a16", "naive")

    def choose(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        # Numbers of a kernel just before, and a graph with an operator of ours.
        y = x + layer(h)[:, :1]
        return y.float().argmax(-1, keepdim=True), y

    compiled = torch.compile(choose, fullgraph=True)
    every = rows_of_every_kind(size, max(rows, 10)).to("cuda", dtype)
    h = torch.zeros(rows, 64, device="cuda", dtype=dtype)
    for start in range(0, len(every), rows):
        x = every[start : start + rows]
        for _ in range(3):
            found, y = compiled(x, h)
            assert torch.equal(found, y.float().argmax(-1, keepdim=True))
            assert torch.equal(found.cpu(), x.cpu().argmax(-1, keepdim=True))
    (graph,) = fp4pass.compile_report().graphs
    assert graph.changes["split_argmax"] == 1


@pytest.mark.parametrize(("dtype", "fmt"), [(torch.float32, "mxfp4"), (torch.bfloat16, "nvfp4")])
def test_a_compiled_model_is_as_near_to_the_original_as_an_eager_one(
    dtype: torch.dtype, fmt: str
) -> None:
    pytest.importorskip("transformers")
    eager, code = divergences(BUNDLED, BUNDLED / "eval.txt", dtype, fmt, 64, "cuda")
    assert code == pytest.approx(eager, rel=0.02) and eager > 0.01
