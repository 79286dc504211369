"""Mixtures of experts: found, observed, quantized and run, of every layout of their weights."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from expert_classes import class_of, owners, stack_names
from mixtures import MODELS, UNDECORATED, UNREAD, build, ids, logits, modules, twin
from swap import swap_experts
from torch import Tensor, nn

import fp4pass
from fp4pass.core.formats import get_format
from fp4pass.errors import CalibrationError, OptionError, ShapeError
from fp4pass.evaluation import output_errors
from fp4pass.kernels.rotate.naive import rotate_weight
from fp4pass.nn.experts import QuantizedExperts, QuantizedExpertStack, in_order
from fp4pass.nn.linear import StoredWeight, quantized_linear
from fp4pass.quantization.observers.observer import ExpertObserver, collect
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


# ---- global scales of each expert, or of parts of its rows --------------------------------------


def with_inputs(weight_only: bool = False) -> Any:
    model = build("qwen3_moe")
    if not weight_only:
        fp4pass.prepare(model, "naive")
        logits(model)
    return fp4pass.convert(model, "nvfp4", "naive", weight_only=weight_only)


def unlike(stack: QuantizedExpertStack, parts: int, inputs: bool) -> QuantizedExpertStack:
    """The stack, with numbers that another library would have chosen."""
    experts = len(stack.weight_packed)
    scale: Any = stack.weight_global_scale
    factors = torch.linspace(0.7, 1.9, experts * parts).view(experts, parts)
    stack.weight_global_scale = scale[:, None] * factors if parts > 1 else scale * factors[:, 0]
    if inputs:
        stack.input_global_scale = stack.input_global_scale * torch.linspace(0.4, 2.1, experts)
    return stack


def of_experts(stack: QuantizedExpertStack, x: Tensor, routing: Tensor) -> Tensor:
    """What a linear layer of each part of each expert computes with its own numbers."""
    out = torch.zeros(*routing.shape, stack.out_features)
    packed, bits, scale, inputs = stack.packed_weight
    scale = scale if scale.ndim == 2 else scale[:, None]
    rows = stack.out_features // scale.shape[1]
    for expert in range(len(packed)):
        pairs = torch.where(routing == expert)
        given = x[pairs[0]] if x.ndim == 2 else x[pairs]
        for part in range(scale.shape[1] if len(given) else 0):
            own = slice(part * rows, (part + 1) * rows)
            of_inputs = None if inputs is None else inputs[expert if len(inputs) > 1 else 0][None]
            number = scale[expert, part][None]
            weight = StoredWeight(packed[expert, own], bits[expert, own], number, of_inputs)
            y = quantized_linear(given, weight, None, stack.config)
            out[(*pairs, own)] = y
    return out


@pytest.mark.parametrize("weight_only", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("each", [False, True])
def test_an_expert_computes_with_its_own_numbers(weight_only: bool, parts: int, each: bool) -> None:
    stack = unlike(
        with_inputs(weight_only).get_submodule(f"{FIRST}.gate_up_proj"), parts, not weight_only
    )
    routing = torch.tensor([[0, 2], [4, 1], [3, 0], [5, -1]])
    x = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(0))
    x = x if each else x[:, 0]
    y = stack(x, routing)
    # But for the order of sums: a code that moved would show.
    assert y.shape == (4, 2, 64)
    assert torch.allclose(y, of_experts(stack, x, routing), rtol=1e-5, atol=1e-5)
    assert not y[3].any()


def test_gradients_are_those_of_the_dense_experts() -> None:
    model = with_inputs()
    for name in ("gate_up_proj", "down_proj"):
        unlike(model.get_submodule(f"{FIRST}.{name}"), 2, True)
    stack = model.get_submodule(f"{FIRST}.gate_up_proj")
    routing = torch.tensor([[0, 2], [4, 1], [3, 0]])
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    grad = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(1))
    (stack(x, routing) * grad).sum().backward()
    wanted = torch.einsum("tkn,tknh->th", grad, stack.weight[routing])
    assert torch.allclose(x.grad, wanted, atol=1e-5)


def test_scales_of_another_number_of_experts_are_refused() -> None:
    stack = with_inputs().get_submodule(f"{FIRST}.down_proj")
    stack.input_global_scale = torch.ones(3)
    with pytest.raises(ShapeError, match=r"x_global_scale: expected \[1\] or \[5\]"):
        stack(torch.randn(2, 2, 32), torch.zeros(2, 2, dtype=torch.int64))


# ---- without the decorator of transformers ------------------------------------------------------

undecorated = pytest.mark.parametrize("name", UNDECORATED)


def packed(name: str, **options: Any) -> Any:
    return converted(name, **{"rules": UNREAD.get(name, ()), **options})


def stacks(model: Any) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedExpertStack)}


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text"])
def test_it_generates_copies_and_computes_gradients(name: str) -> None:
    """Also one with the decorator, biases, and a gate of its own."""
    model = packed(name)
    reference = twin(build(name), model)
    options = {"max_new_tokens": 4, "do_sample": False, "min_new_tokens": 4}
    prompt = {"input_ids": ids(0, 2, 8), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    wanted = reference.generate(**prompt, **options)
    one = [logits(each, ids(0, 1, 1)) for each in (model, reference)]
    torch.testing.assert_close(*one, rtol=1e-5, atol=1e-6)
    assert torch.equal(model.generate(**prompt, **options), wanted)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(**prompt, **options, **static), wanted)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    for each in (copy.deepcopy(model), again, packed(name, method="naive")):
        each.load_state_dict(model.state_dict())
        assert torch.equal(logits(each), logits(model))
        assert any(isinstance(m, QuantizedExperts) for m in each.modules())
    grads = []
    for each in (model, reference):
        x = each.get_input_embeddings()(ids(0, 1, 9)).detach().requires_grad_()
        each(inputs_embeds=x).logits.square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3 * float(grads[1].abs().max()))


@pytest.mark.slow
@undecorated
def test_it_compiles_whole(name: str) -> None:
    model = packed(name, weight_only=False)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def run(x: torch.Tensor) -> torch.Tensor:
        # With a cache, torch 2.11 cannot trace what transformers makes for Step 3.7.
        return model(x, use_cache=False).logits

    for x in (ids(), ids(1, 3, 17)):
        with torch.no_grad():
            torch.testing.assert_close(run(x), logits(model, x), rtol=1e-4, atol=1e-4)


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers")
@undecorated
def test_it_is_quantized_while_it_is_read_and_made_dense_again(name: str, tmp_path: Path) -> None:
    from fp4pass.integrations import Fp4PassConfig

    original, model = build(name), packed(name)
    original.save_pretrained(tmp_path)
    config = Fp4PassConfig(rules=UNREAD.get(name, ()))
    read = (
        type(original)
        .from_pretrained(tmp_path, dtype=torch.float32, quantization_config=config)
        .eval()
    )
    assert torch.equal(logits(read), logits(model))
    for key, stack in stacks(model).items():
        assert torch.equal(modules(read)[key].weight_packed, stack.weight_packed)
    dense = read.dequantize() or read
    reference = twin(original, model)
    assert list(dense.state_dict()) == list(reference.state_dict())
    assert [type(m) for m in dense.modules()] == [type(m) for m in reference.modules()]
    for key, tensor in reference.state_dict().items():
        assert torch.equal(dense.state_dict()[key], tensor), key
    assert torch.equal(logits(dense), logits(reference))


@pytest.mark.quick(1)
@undecorated
def test_a_stack_beside_packed_ones_stays_dense(name: str, tmp_path: Path) -> None:
    """Also one that a child of the module of experts holds."""
    keys = list(zoo.stacks(build(name)))
    rules = [*UNREAD.get(name, ()), *((key, None) for key in keys[1::2])]
    model = packed(name, rules=rules)
    assert list(stacks(model)) == keys[::2]
    reference = twin(build(name), model)
    fp4pass.save(model, tmp_path / "q", layout="fp4pass")
    for each in (model, copy.deepcopy(model), fp4pass.load(tmp_path / "q")):
        assert torch.equal(logits(each), logits(reference))
        assert list(each.state_dict()) == list(model.state_dict())
    assert all(key in model.state_dict() for key in keys[1::2])


def test_inputs_that_are_of_no_expert_are_not_kept() -> None:
    """Of Llama 4 most are, for each expert has a copy of all tokens."""
    observer = ExpertObserver(("hessian",), 4, 64, second=False, keep=True)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([[4], [1], [4], [0], [4], [3]])
    observer.hook(torch.nn.Module(), (x, chosen, torch.ones(6, 1)), {})
    ((kept, experts),) = observer._inputs
    assert torch.equal(kept, x[[1, 3, 5]]) and experts.flatten().tolist() == [1, 0, 3]
