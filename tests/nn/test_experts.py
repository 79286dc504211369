"""Mixtures of experts: found, observed, quantized and run, of every layout of their weights."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_classes import class_of, owners, stack_names
from mixtures import MODELS, build, ids, logits, modules, twin
from swap import swap_experts
from torch import Tensor, nn

import fp4pass
from fp4pass.core.formats import get_format
from fp4pass.errors import CalibrationError, OptionError
from fp4pass.evaluation import output_errors
from fp4pass.kernels.rotate.naive import rotate_weight
from fp4pass.nn.experts import QuantizedExpertStack, in_order
from fp4pass.quantization.observers.observer import collect
from fp4pass.quantization.plan import plan_layers
from fp4pass.record.config import LinearConfig

pytest.importorskip("transformers")

every_model = pytest.mark.parametrize("name", MODELS)
ONLY_EXPERTS: list[Any] = [("*.experts.*", {}), ("*", None)]
FIRST = "model.layers.0.mlp.experts"


def converted(name: str = "qwen3_moe", **options: Any) -> Any:
    options = {"method": "sse", "weight_only": True, **options}
    model = build(name, dtype=options.pop("dtype", torch.float32))
    return fp4pass.convert(model, **options)


def stack_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """[E, N, K] of every stack."""
    found = {}
    for path, owner in owners(model).items():
        for key in stack_names(owner):
            found[f"{path}.{key}"] = tuple(class_of(owner).matrices(owner, key).shape)
    return found


# ---- the plan -----------------------------------------------------------------------------------


@every_model
def test_each_stack_is_a_row_and_no_router_is_quantized(name: str) -> None:
    model = build(name)
    shapes = stack_shapes(model)
    assert shapes and all(len(shape) == 3 for shape in shapes.values())
    rows = fp4pass.report(fp4pass.prepare(model)).rows
    found = {row.name: row for row in rows}
    assert {n: found[n].shape for n in shapes} == shapes
    assert not any(found[n].skip_reason for n in shapes)
    routers = [row for row in rows if "gate." in f"{row.name}." or "router" in row.name]
    parents = {path.rpartition(".")[0] for path in owners(model)}
    assert len(routers) >= len(parents) and all(
        "router" in row.skip_reason.lower() for row in routers
    )


@pytest.mark.core
def test_rules_are_of_stacks() -> None:
    rules = [(f"{FIRST}.down_proj", None), ("*.experts.gate*", {"fmt": "mxfp4"}), ("*_proj", {})]
    rows = {row.name: row for row in fp4pass.report(converted(rules=rules)).rows}
    assert rows[f"{FIRST}.down_proj"].skip_reason == f"rule ('{FIRST}.down_proj', None)"
    formats = {n: r.config.fmt for n, r in rows.items() if r.config and ".experts." in n}
    second = FIRST.replace("0", "1")
    assert formats == {
        f"{FIRST}.gate_up_proj": "mxfp4",
        f"{second}.gate_up_proj": "mxfp4",
        f"{second}.down_proj": "nvfp4",
    }


def test_a_width_that_no_block_divides_skips_its_stack(tmp_path: Any) -> None:
    model = build("qwen3_moe", moe_intermediate_size=24)
    original = copy.deepcopy(model)
    fp4pass.convert(model, method="sse", weight_only=True)
    rows = {row.name: row.skip_reason for row in fp4pass.report(model).rows}
    assert "24" in rows[f"{FIRST}.down_proj"] and not rows[f"{FIRST}.gate_up_proj"]
    assert torch.equal(logits(model), logits(twin(original, model)))
    for again in (copy.deepcopy(model), saved(model, tmp_path)):
        assert torch.equal(logits(again), logits(model))
    name = f"{FIRST}.down_proj"
    assert name in model.state_dict() and model.get_parameter(name).shape == (5, 64, 24)


def saved(model: Any, folder: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*has no place for stacks of experts")
        fp4pass.save(model, folder / "q", **options)
    return fp4pass.load(folder / "q")


def test_experts_of_other_processes_are_skipped() -> None:
    model = build("qwen3_moe")
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    rows = {r.name: r.skip_reason for r in fp4pass.report(fp4pass.prepare(model)).rows}
    for key in ("gate_up_proj", "down_proj"):
        assert rows[f"{FIRST}.{key}"].startswith("expert parallel: each process holds some")
        assert not rows[f"{FIRST}.{key}".replace("0", "1")]


def test_experts_that_do_not_say_how_they_compute_are_skipped() -> None:
    """A subclass may compute in another way, and so may what only has the name of a known class."""
    model = build("longcat_flash")
    owner = model.model.layers[0].mlp.experts
    for bases in ((type(owner),), (nn.Module,)):
        owner.__class__ = type(type(owner).__name__, bases, {"__module__": "elsewhere"})
        skipped = plan_layers(model, LinearConfig()).skipped
        reasons = {layer.name: layer.skip_reason for layer in skipped}
        for key in ("gate_up_proj", "down_proj"):
            reason = reasons[f"model.layers.0.mlp.experts.{key}"]
            assert reason.endswith("which does not say how it computes with them")
            assert f"model.layers.1.mlp.experts.{key}" not in reasons


# ---- calibration --------------------------------------------------------------------------------


def recorded(name: str, batches: list[Tensor]) -> tuple[Any, dict[str, list[tuple[Tensor, ...]]]]:
    """A model, and what each of its modules of experts was called with."""
    model = build(name)
    calls: dict[str, list[tuple[Tensor, ...]]] = {}
    for path, owner in owners(model).items():
        calls[path] = []

        def hook(_: Any, args: Any, kwargs: Any, own: list[Any] = calls[path]) -> None:
            own.append((*args, *kwargs.values())[:3])

        owner.register_forward_pre_hook(hook, with_kwargs=True)
    for x in batches:
        logits(model, x)
    return model, calls


def product(owner: Any, key: str, x: Tensor, expert: int) -> Tensor:
    bias = getattr(owner, f"{key}_bias", None)
    y = x @ class_of(owner).matrices(owner, key)[expert].t()
    return y if bias is None else y + bias[expert]


def block_sums(x: Tensor) -> Tensor:
    blocks = nn.functional.pad(x.double(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    return torch.einsum("tbi,tbj->bij", blocks, blocks)


@pytest.mark.quick(2)
@every_model
@torch.no_grad()
def test_statistics_are_those_of_a_loop(name: str) -> None:
    batches = [ids(1), ids(2, 3, 40), ids(3)]  # 280 tokens, and the prior takes 256
    model, calls = recorded(name, batches)
    prepared = fp4pass.prepare(build(name))
    fp4pass.calibrate(prepared, batches, progress=False)
    observed = modules(prepared)
    for path, owner in owners(model).items():
        kind = class_of(owner)
        called = [kind.called(owner, call) for call in calls[path]]
        hidden, chosen, weights = (torch.cat(each) for each in zip(*called, strict=True))
        shown = torch.cat([kind.shown(owner, call[0]) for call in called])[:256]
        stats = {key: collect([observed[f"{path}.{key}"]], "") for key in stack_names(owner)}
        largest = dict.fromkeys(stats, 0.0)
        experts = len(kind.matrices(owner, stack_names(owner)[0]))
        for expert in range(experts):
            token, place = torch.where(chosen == expert)
            inputs, priors = hidden, shown
            for i, stage in enumerate(kind.stages(owner)):
                if i:
                    before = kind.stages(owner)[i - 1]
                    inputs, priors = (
                        kind.activated(owner, *(product(owner, key, x, expert) for key in before))
                        for x in (inputs, priors)
                    )
                own = inputs[token]
                for key in stage:
                    found = stats[key]
                    assert torch.is_tensor(found.counts) and found.counts[expert] == len(token)
                    routing = weights[token, place].double().sum()
                    assert float(found.routing[expert]) == pytest.approx(float(routing), rel=1e-5)
                    close(found.block_hessian[expert], block_sums(own))
                    largest[key] = max(largest[key], float(own.abs().max()) if len(own) else 0.0)
                    if i:
                        close(found.prior_block_hessian[expert], block_sums(priors))
                        assert found.prior_counts[expert] == len(shown) == 256
                    else:
                        assert found.prior_counts is None
        for key, each in stats.items():
            assert each.input_amax == pytest.approx(largest[key], rel=1e-5)
            assert each.tokens == int((chosen < experts).sum())


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def routed(model: Any, experts: list[int]) -> Any:
    """Have the routers of a model of gpt-oss choose these experts for every token."""
    for layer in model.model.layers:
        with torch.no_grad():
            layer.mlp.router.weight.zero_()
            layer.mlp.router.bias.fill_(-50.0)
            layer.mlp.router.bias[experts] = 0.0
    return model


@pytest.mark.core
def test_an_expert_that_no_token_reached_is_finite_and_named() -> None:
    model = fp4pass.prepare(routed(build("gpt_oss"), [0, 2]))
    logits(model)
    fp4pass.convert(model, "nvfp4")
    assert logits(model).isfinite().all()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedExpertStack):
            assert module.weight.isfinite().all() and module.weight[1].any(), name
    for row in fp4pass.report(model).converted:
        if len(row.shape) == 3:
            assert row.unreached == (1, 3) and row.expert_tokens == (0, 0, 80)
            assert row.rare_routing == 0.0 and row.tokens == 160
    text = str(fp4pass.report(model))
    assert f"  {FIRST}.gate_up_proj: 1, 3" in text
    assert fp4pass.Report.from_dict(fp4pass.report(model).to_dict()) == fp4pass.report(model)


def test_a_stack_that_no_batch_reached() -> None:
    unseen = fp4pass.prepare(build("qwen3_moe"))
    with pytest.raises(CalibrationError, match="No batch was run"):
        fp4pass.convert(unseen)
    assert unseen.model.layers[0].mlp.experts.gate_up_proj.shape == (5, 64, 64)
    for unreached in ("sse", "skip"):
        model = build("qwen3_moe")
        model.model.layers[1].mlp.forward = lambda x: x
        fp4pass.prepare(model, unreached=unreached)
        logits(model)
        rows = {row.name: row for row in fp4pass.report(fp4pass.convert(model)).rows}
        first, second = (rows[f"{FIRST}.down_proj".replace("0", i)] for i in "01")
        assert first.config.method_name == "hessian" and first.unreached == ()
        if unreached == "skip":
            assert second.skip_reason == "calibration never reached it"
        else:
            assert second.config.method_name == "sse" and second.config.weight_only


def test_cross_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match=rf"^{FIRST}\.gate_up_proj: other tokens reach"):
        fp4pass.prepare(build("qwen3_moe"), fp4pass.Gptq(target="cross"), sequential=True)


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", ["hessian", "gptq"])
def test_layer_by_layer(method: str) -> None:
    options = {"weight_only": True, "rules": ONLY_EXPERTS}
    whole = fp4pass.prepare(build("qwen3_moe"), method, **options)
    parts = fp4pass.prepare(build("qwen3_moe"), method, sequential=True, **options)
    for model in (whole, parts):
        fp4pass.calibrate(model, [ids(1), ids(2)], progress=False)
        fp4pass.convert(model)
    rows = [fp4pass.report(model).converted for model in (whole, parts)]
    # The first layer sees the same in both.
    for a, b in zip(*rows, strict=True):
        if a.name.startswith(FIRST):
            key = a.name
            first, second = (modules(model)[key] for model in (whole, parts))
            assert torch.equal(first.weight_packed, second.weight_packed)
            assert a.expert_tokens == b.expert_tokens
    assert not torch.equal(logits(whole), logits(parts))


# ---- what is computed ---------------------------------------------------------------------------


@pytest.mark.quick(7)
@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_the_loop_does_with_dequantized_weights(
    name: str, dtype: torch.dtype
) -> None:
    model = converted(name, dtype=dtype)
    reference = twin(build(name, dtype), model)
    if dtype == torch.bfloat16 and name in ("gpt_oss", "nemotron_h"):
        # Theirs rounds a product before it adds the bias, or a sum only at its end.
        (experts, _), (theirs, _) = ([*owners(m).values(), None][:2] for m in (model, reference))
        x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        arguments = (x, torch.tensor([[0, 1], [2, 3], [1, 3]] * 3), torch.full((9, 2), 0.5))
        with torch.no_grad():
            found, expected = experts(*arguments).float(), theirs(*arguments).float()
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * float(expected.abs().max()))
    else:
        assert torch.equal(logits(model), logits(reference))


@every_model
def test_inputs_are_rounded_once_for_all_experts(name: str) -> None:
    reference = build(name)
    rules = [(key, {}) for key in stack_shapes(reference)] + [("*", None)]
    model = converted(name, method="naive", weight_only=False, rules=rules)
    swap_experts(reference, get_format("nvfp4"), False)
    assert torch.equal(logits(model), logits(reference))


def test_output_errors_of_stacks() -> None:
    original = build("gpt_oss")
    model = fp4pass.convert(copy.deepcopy(original), "nvfp4", method="naive", rules=ONLY_EXPERTS)
    found = output_errors(model, original, [ids()], progress=False)
    assert set(found) == set(stack_shapes(original))
    _, calls = recorded("gpt_oss", [ids()])
    owner = original.model.layers[0].mlp.experts.requires_grad_(False)
    rounded = modules(model)[f"{FIRST}.gate_up_proj"].weight
    ((hidden, chosen, _),) = calls[FIRST]
    sums = [0.0, 0.0]
    for expert in range(4):
        x = hidden[torch.where(chosen == expert)[0]]
        y = x @ owner.gate_up_proj[expert]
        sums[0] += float((y - x @ rounded[expert]).square().sum())
        sums[1] += float(y.square().sum())
    expected = (sums[0] / sums[1]) ** 0.5
    assert found[f"{FIRST}.gate_up_proj"] == pytest.approx(expected, rel=1e-4)
    whole = output_errors(model, original, [ids()], activations=True, progress=False)
    assert all(whole[name] > error for name, error in found.items())


# ---- it is a model like any other ---------------------------------------------------------------


def test_it_compiles_whole_and_exports() -> None:
    model = build("qwen3_moe", num_hidden_layers=1)
    fp4pass.convert(model, "nvfp4", method="sse", rules=ONLY_EXPERTS)
    experts = model.model.layers[0].mlp.experts
    options = {"fullgraph": True, "dynamic": True, "backend": "aot_eager"}
    args = (torch.randn(6, 64), torch.randint(0, 5, (6, 2)), torch.rand(6, 2))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(experts, **options)(*args), experts(*args))
        program = torch.export.export(experts, args, strict=False)
        torch.testing.assert_close(program.module()(*args), experts(*args))
    called = [str(node.target) for node in program.graph.nodes if "experts_linear" in str(node)]
    assert len(called) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_orders_of_the_sum_over_experts(dtype: torch.dtype) -> None:
    """A GPU adds the terms in float32 at once; the CPU as the loop over experts does."""
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(6, 3, 32, generator=generator).to(dtype)
    chosen = torch.tensor([[2, 0, 1], [0, 1, 2], [4, 3, 0], [1, 4, 2], [3, 2, 1], [0, 4, 3]])
    at_once = terms.sum(1, dtype=torch.float32).to(dtype)
    found = in_order(terms, chosen, dtype)
    bound = 4 * torch.finfo(dtype).eps * terms.abs().sum(1)
    assert ((found - at_once).abs() <= bound).all()
    total = torch.zeros(6, 32, dtype=dtype)
    for expert in range(5):
        for token, place in (chosen == expert).nonzero().tolist():
            total[token] += terms[token, place]
    assert torch.equal(found, total)


@pytest.mark.parametrize("how", ["at once", "rotated", "resumed"])
def test_a_stack_is_searched_at_once(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By one call, unless its weights are rotated or kept; the bits are those of each alone."""
    calls = []
    monkeypatch.setattr(
        fp4pass.ops, "search_stack", lambda *args: calls.append(args[1]) or search_stack(*args)
    )
    search_stack = torch.ops.fp4pass.search_stack.default
    model = build("qwen3_moe")
    stacks = {}
    for name in stack_shapes(model):
        weight = model.get_parameter(name).detach()
        weight *= 2.0 ** -torch.arange(len(weight)).view(-1, 1, 1)
        stacks[name] = weight.clone()
    rotation = {"rotation": 32} if how == "rotated" else {}
    resume = {"resume": tmp_path} if how == "resumed" else {}
    fp4pass.convert(model, method="sse", weight_only=True, **rotation, **resume)
    assert len(calls) == (len(stacks) if how == "at once" else 0)
    for name, weights in stacks.items():
        packed: Any = modules(model)[name]
        assert len(packed.weight_global_scale.unique()) > 1
        for i, weight in enumerate(weights):
            g = 1 / packed.weight_global_scale[i].item()
            stored = rotate_weight(weight, 32) if how == "rotated" else weight
            codes, scale = fp4pass.ops.search(stored, None, g, "nvfp4", "sse")
            assert torch.equal(codes, packed.weight_packed[i])
            assert torch.equal(scale, packed.weight_scale[i].view(torch.uint8))


GATE_UP = f"{FIRST}.gate_up_proj"


def test_each_expert_is_searched_by_its_own_statistics() -> None:
    """What is packed is what a search of the expert alone finds, and no other expert's."""
    model = fp4pass.prepare(build("qwen3_moe"))
    logits(model)
    stack: Any = modules(model)[GATE_UP]
    stats: Any = collect([stack], GATE_UP)
    weight = stack.weight.detach().clone()
    fp4pass.convert(model, weight_only=True)
    packed: Any = modules(model)[GATE_UP]
    differ = 0
    for i, matrix in enumerate(weight):
        g = 1 / packed.weight_global_scale[i].item()
        for j in range(len(weight)):
            hessian = stats.matrix(j, None).block_hessian
            codes, scale = fp4pass.ops.search(matrix, hessian, g, "nvfp4", "hessian")
            same = torch.equal(codes, packed.weight_packed[i])
            same &= torch.equal(scale, packed.weight_scale[i].view(torch.uint8))
            assert same or i != j
            differ += not same
    assert differ
