"""Models on a GPU: calibrated, compiled, in CUDA graphs, generating; passes, and mixtures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zoo
from compiled_quality import BUNDLED, divergences
from graph.test_argmax import rows_of_every_kind
from mixtures import MODELS, UNREAD, build
from mixtures import ids as expert_ids
from mixtures import logits as experts_logits
from post_grad import fresh
from small_models import language_model
from small_models import tokens as words
from test_compiled_model import SETTINGS, converted, tokens
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import fp4pass
from fp4pass import ops
from fp4pass.graph import inductor as install
from fp4pass.nn.experts import QuantizedExpertStack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    # Inductor's advice to use tf32, which the rotary embedding's float32 product must not.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    # What it says of transformers' softmax of routers and complex rotations.
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex"),
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


# Passes whose operators round where eager does, and Inductor does not.
ROUNDING = ("fuse_quantizers", "fuse_gates", "fuse_residuals", "fuse_norms")


def without(*names: str) -> tuple[object, ...]:
    """The passes but some."""
    return tuple(each for each in install.PASSES if each.__name__ not in names)


@same_tiles
@pytest.mark.parametrize("setting", ["nvfp4-weights", "nvfp4-calibrated", "nvfp4-dynamic"])
def test_merging_calls_changes_no_bit(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted("llama", *SETTINGS[setting]).cuda()
    for batch, length in ((1, 1), (2, 40)):
        found = []
        for names in ((), ("share_calls", "group_linears")):
            torch.compiler.reset()
            with monkeypatch.context() as patch:
                patch.setattr(install, "PASSES", without(*ROUNDING, *names))
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
        patch.setattr(install, "PASSES", without(*ROUNDING))
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


def heavy_tailed(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=generator)
    return (normal / (torch.rand(rows, columns, generator=generator) + 0.1)).bfloat16()


@pytest.mark.parametrize("weight_only", [True, False])
def test_a_model_on_the_gpu(weight_only: bool, tmp_path: Path) -> None:
    model, ids = language_model().cuda(), words(4, 256).cuda()
    with torch.no_grad():
        reference = model(ids).logits.float()
    fp4pass.prepare(model)
    fp4pass.calibrate(model, [ids], progress=False)
    fp4pass.convert(model, "nvfp4", weight_only=weight_only)
    rows = fp4pass.report(model).converted
    assert len(rows) == 28 and all(row.tokens == 1024 for row in rows)
    with torch.no_grad():
        eager = model(ids).logits.float()
        error = (eager - reference).norm() / reference.norm()
        assert 0.0 < error < 0.5
        compiled = torch.compile(model, fullgraph=True)(ids).logits.float()
    assert divergence(reference, compiled) <= 1.1 * divergence(reference, eager)
    if weight_only:
        # Codes of inputs flip where Inductor rounds elsewhere (docs/graphs.md).
        assert divergence(eager, compiled) <= 0.1 * divergence(reference, eager)
    text = model.generate(ids[:1, :8], max_new_tokens=8, do_sample=False)
    assert text.shape == (1, 16)
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q").cuda()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits.float(), eager)


@pytest.fixture
def sums_in_float16() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    yield
    torch.backends.cuda.matmul.allow_fp16_accumulation = False


def hessian_error(found: Tensor, exact: Tensor) -> float:
    lengths = exact.diagonal().sqrt()
    return ((found.double() - exact) / lengths / lengths[:, None]).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whole_hessians_of_16_bits_are_float32_sums_without_a_copy(
    dtype: torch.dtype, sums_in_float16: None
) -> None:
    x = heavy_tailed(8192, 1024, seed=3).clamp(-100, 100).to(dtype).cuda()
    found = [torch.zeros(*shape, device="cuda") for shape in ((1024, 1024), (1,), (1,))]
    hessian, amax, count = found[0], found[1], found[2].long()
    ops.observe_full(x, hessian, count, amax)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.observe_full(x.view(2, 4096, 1024), hessian, count, amax)
    # In float32 the tokens take 32 MiB.
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    assert count.item() == 2 * len(x) and amax.item() == x.abs().max().item()
    # All terms of the diagonal are positive: sums that round towards zero show there.
    assert hessian_error(hessian, 2 * x.double().mT @ x.double()) < 5e-6
    ops.observe_full(x[:0], hessian, count, amax)
    ops.observe_full(torch.full_like(x[:1], torch.nan), hessian, count, amax)
    assert count.item() == 2 * len(x) + 1 and amax.isnan().all()


every_model = pytest.mark.parametrize("name", MODELS)


def stacks(model: nn.Module) -> dict[str, QuantizedExpertStack]:
    modules = model.named_modules()
    return {name: m for name, m in modules if isinstance(m, QuantizedExpertStack)}


@every_model
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_the_codes_are_those_of_the_cpu(name: str, fmt: str) -> None:
    cpu = fp4pass.convert(build(name, torch.bfloat16), fmt, "sse", weight_only=True)
    gpu = fp4pass.convert(build(name, torch.bfloat16).cuda(), fmt, "sse", weight_only=True)
    assert stacks(cpu) and stacks(cpu).keys() == stacks(gpu).keys()
    for key, stack in stacks(gpu).items():
        for ours, theirs in zip(stacks(cpu)[key].packed_weight, stack.packed_weight, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs.cpu()), key


@every_model
@pytest.mark.parametrize("weight_only", [True, False])
def test_calibrated_compiled_and_saved(name: str, weight_only: bool, tmp_path: Path) -> None:
    model = fp4pass.prepare(build(name).cuda(), rules=UNREAD.get(name, ()))
    fp4pass.calibrate(model, [expert_ids(1).cuda(), expert_ids(2).cuda()], progress=False)
    fp4pass.convert(model, weight_only=weight_only)
    x = expert_ids().cuda()
    eager = experts_logits(model, x)
    assert eager.isfinite().all()

    def step(x: Tensor) -> Tensor:
        return model(x, use_cache=False).logits

    with torch.no_grad():
        compiled = torch.compile(step, fullgraph=True, dynamic=False)(x)
    if weight_only:
        torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-3)
    else:
        # Codes of inputs flip where Inductor rounds elsewhere (docs/graphs.md).
        assert (compiled - eager).norm() < 0.2 * eager.norm()
    text = model.generate(x[:1, :8], min_new_tokens=8, max_new_tokens=8, do_sample=False)
    assert text.shape == (1, 16)
    fp4pass.save(model, tmp_path / "q", layout="fp4pass")
    assert torch.equal(experts_logits(fp4pass.load(tmp_path / "q").cuda(), x), eager)
