"""What is found in a model, and why it is skipped: routers, adapters, other matrices."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mixtures
import pytest
import torch
from nn.test_input_cache import counted
from small_models import language_model, tokens
from torch import Tensor, nn

import fp4pass
import fp4pass.parity
from fp4pass.errors import RuleError, ShapeError, StateError
from fp4pass.nn.linear import QuantizedLinear
from fp4pass.quantization.scan import is_router


def reasons(model: nn.Module, **options: Any) -> dict[str, str]:
    model = fp4pass.convert(model, method="sse", **options)
    return {row.name: row.skip_reason for row in fp4pass.report(model).rows}


@pytest.mark.parametrize(
    "name, expected",
    [
        ("layers.0.mlp.gate", True),
        ("layers.0.mlp.gate.wg", True),
        ("router.proj", True),
        ("mlp.router.classifier", True),
        ("mlp.shared_expert_gate", True),
        ("mlp.gate_proj", False),
        ("gate.gate_proj", False),
        ("router_free.proj", False),
        ("", False),
    ],
)
def test_a_router_by_its_name(name: str, expected: bool) -> None:
    assert is_router(name) is expected


class Mixture(nn.Module):
    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.wg = nn.Linear(32, 6)
        self.up = nn.Linear(32, 64)
        if stacked:
            self.experts = nn.Module()
            self.experts.weight = nn.Parameter(torch.randn(6, 32, 64))
        else:
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))


class Deep(nn.Module):
    """A router of several layers beside experts, and a gated MLP that is none."""

    def __init__(self, name: str, outputs: int, told: bool) -> None:
        super().__init__()
        router = nn.Module()
        router.down_proj, router.mlp = nn.Linear(32, 64), nn.Sequential(nn.Linear(64, outputs))
        self.add_module(name, router)
        if told:
            self.get_submodule(name).top_k = 2
        self.mlp = nn.Sequential(nn.Linear(32, 6), nn.Linear(6, 32))
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))


@pytest.mark.parametrize(
    "name, outputs, told",
    [("gate", 16, False), ("router", 16, False), ("choice", 6, False), ("choice", 16, True)],
)
@pytest.mark.core
def test_all_of_a_router_stays_dense(name: str, outputs: int, told: bool) -> None:
    """By its name, by as many outputs as experts, or by how many experts it is told to choose."""
    found = reasons(Deep(name, outputs, told))
    assert (
        found[f"{name}.down_proj"]
        == found[f"{name}.mlp.0"]
        == "a router; add a rule to quantize it"
    )
    assert "router" not in found["mlp.0"] and not found["experts.5"]
    assert not reasons(Deep("other", 16, False))["other.down_proj"]


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.one = nn.Parameter(torch.ones(1, 32, 32))
        self.cls = nn.Parameter(torch.ones(1, 1, 32))
        self.filters = nn.Parameter(torch.ones(32, 1, 4))
        self.pointwise = nn.Conv1d(32, 64, 1)
        self.depthwise = nn.Conv1d(32, 32, 1, groups=32)
        self.wide = nn.Conv1d(32, 32, 3)
        self.attention = nn.MultiheadAttention(32, 2)
        self.rnn = nn.GRU(32, 32)
        self.extended = Extended(32, 32)


class Extended(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.more = nn.Parameter(torch.ones(32, 32))


@pytest.mark.core
def test_every_matrix_has_a_row() -> None:
    found = reasons(Loose())
    assert "dimensions, not the matrix of a linear layer" in found.pop("one")
    assert "convolution" in found.pop("pointwise")
    assert found.pop("extended.more") == "Extended uses it without a linear layer"
    assert set(found) == {
        *("linear", "extended", "attention.in_proj_weight", "attention.out_proj"),
        *("rnn.weight_ih_l0", "rnn.weight_hh_l0"),
    }


@pytest.mark.parametrize("weight", [None, nn.Parameter(torch.eye(32).to_sparse())])
def test_weights_that_are_no_matrix_of_numbers(weight: nn.Parameter | None) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].weight = weight
    reason = "it has no weight" if weight is None else "its weight is not dense (torch.sparse_coo)"
    assert reasons(model) == {"0": reason, "1": ""}


@pytest.mark.parametrize("shape", [(1, 32, 32), (32,)], ids=str)
@pytest.mark.core
def test_weights_that_are_no_matrix(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].weight = before = nn.Parameter(torch.ones(shape))
    reason = f"its weight has shape {shape}, not [N, K]"
    assert reasons(copy.deepcopy(model)) == {"0": reason, "1": ""}
    with pytest.raises(ShapeError, match="0: its weight has shape"):
        reasons(model, rules=[("0", {"fmt": "mxfp4"})])
    assert model[0].weight is before and type(model[1]) is nn.Linear
    assert fp4pass.parity.swap(model, "int8") == {"0": reason, "1": "int8"}


@pytest.mark.core
def test_a_conv1d_that_has_no_matrix_and_a_bias_of_another_size() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(nn.Linear(32, 32), conv1d(32, 64), conv1d(32, 64), nn.Linear(32, 32))
    model[0].bias = nn.Parameter(torch.ones(1))
    model[1].weight = nn.Parameter(torch.ones(1, 32, 64))
    assert reasons(model) == {
        "0": "its bias has shape (1,), not [N] = (32,)",
        "1": "its weight has shape (1, 32, 64), not [K, N]",
        "2": "",
        "3": "",
    }


class Falcon(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        hidden = input @ self.weight.T
        if self.bias is None:
            return hidden
        return hidden + self.bias


class Functional(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, bias=self.bias)


class Transposed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.bias, torch.matmul(x, self.weight.transpose(0, 1)))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias + self.bias


class Left(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ x + self.bias


class Unbiased(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Branches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.weight.T[0] > 0:
            return x @ self.weight.T + self.bias
        return x @ self.weight.T + self.bias


class Scored(Falcon):
    def score(self) -> Tensor:
        return self.weight.norm()


@pytest.mark.parametrize("cls", [Falcon, Functional, Transposed])
def test_a_subclass_that_multiplies_is_a_linear(cls: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(cls(32, 32), cls(32, 32, bias=cls is not Falcon)).eval()
    plain = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=cls is not Falcon)).eval()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(40, 32)
    for each in (model, plain):
        fp4pass.prepare(each)
        fp4pass.calibrate(each, [x], progress=False)
        fp4pass.convert(each, "nvfp4")
    assert type(model[0]) is QuantizedLinear
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cls", [Doubled, Left, Unbiased, Branches, Scored], ids=str)
def test_a_subclass_that_does_more_is_not(cls: type[nn.Linear]) -> None:
    found = reasons(nn.Sequential(cls(32, 32), nn.Linear(32, 32)))
    assert found == {"0": f"its class {cls.__name__} is more than an nn.Linear", "1": ""}


def test_without_a_bias_a_product_is_whole() -> None:
    assert not any(reasons(nn.Sequential(Unbiased(32, 32, bias=False))).values())


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.a(x)))


def adapted(kind: str = "LoraConfig", model: nn.Module | None = None, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(model or Two(), getattr(peft, kind)(**options))
    for parameter in model.parameters():
        # A new adapter computes nothing.
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("kind", ["LoraConfig", "VeraConfig"])
def test_adapters_stay_and_what_they_are_put_on_is_packed(kind: str) -> None:
    model = adapted(kind, r=16, target_modules=["a"], modules_to_save=["head"])
    before = {n: p.clone() for n, p in model.named_parameters() if p.requires_grad}
    found = reasons(model)
    packed = {name for name, reason in found.items() if not reason}
    below = "base_model.model."
    assert packed == {f"{below}a.base_layer", f"{below}head.original_module"}
    assert {found[name] for name in set(found) - packed} == {"an adapter"}
    after = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert list(after) == list(before)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_adapter_is_never_merged_into_a_packed_weight() -> None:
    model = adapted(r=4, target_modules=["a"])
    fp4pass.convert(model, method="sse", weight_only=True)
    assert isinstance(model.base_model.model.a.base_layer, QuantizedLinear)
    for call in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(StateError, match=r"fp4pass\.merge\(model"):
            call()
    merged = adapted(r=4, target_modules=["a"])
    merged.merge_adapter()
    fp4pass.convert(merged, method="sse", weight_only=True)
    with pytest.raises(StateError, match=r"rounded to 4 bits"):
        merged.unmerge_adapter()


@pytest.mark.parametrize("pattern", ["experts*", "*.weight"])
@pytest.mark.core
def test_a_rule_for_what_cannot_be_quantized_is_an_error(pattern: str) -> None:
    with pytest.raises(
        RuleError, match=r"matches only what cannot be quantized, as experts.weight"
    ):
        reasons(Mixture(stacked=True), rules=[(pattern, {"fmt": "mxfp4"})])
    assert reasons(Mixture(stacked=True), rules=[(pattern, None)])
    assert not reasons(Mixture(stacked=True), rules=[("*", {"fmt": "mxfp4"})])["up"]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_below_adapters_a_layer_is_what_it_is_without() -> None:
    """Scales that are shared, the input that is, and what is skipped."""
    bare = language_model(dtype=torch.float32)
    targets = ["q_proj", "k_proj", "up_proj", "lm_head"]
    model = adapted(model=copy.deepcopy(bare), r=4, target_modules=targets)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            # It adds nothing, so that all layers read what they read without.
            nn.init.zeros_(parameter)
    wanted = None
    for each in (bare, model):
        fp4pass.prepare(each, "naive")
        each(tokens())
        fp4pass.convert(each, "nvfp4")
        prefix = "base_model.model."
        found = {
            name.removeprefix(prefix).removesuffix(".base_layer"): module
            for name, module in each.named_modules()
            if isinstance(module, QuantizedLinear)
        }
        state = {n: {k: t.clone() for k, t in m.state_dict().items()} for n, m in found.items()}
        wanted = wanted or state
        assert state.keys() == wanted.keys() and not any("lm_head" in name for name in state)
        for name, tensors in wanted.items():
            same = state[name]
            assert tensors.keys() == same.keys()
            for key, tensor in tensors.items():
                assert torch.equal(tensor.view(torch.uint8), same[key].view(torch.uint8)), name
        q, k = (found[f"model.layers.0.self_attn.{each}_proj"] for each in "qk")
        assert q.input_global_scale is k.input_global_scale
        with counted() as seen:
            each(tokens())
        assert len(seen) == 4 * len(
            each.get_submodule("model.layers" if each is bare else "base_model.model.model.layers")
        )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_folder_has_no_adapters(tmp_path: Path) -> None:
    base = language_model(dtype=torch.float32)
    model = adapted(model=copy.deepcopy(base), r=4, target_modules=["q_proj"])
    fp4pass.convert(model, method="sse", weight_only=True)
    fp4pass.convert(base, method="sse", weight_only=True)
    fp4pass.save(base, tmp_path / "base")
    for each in (model, peft_of(base)):
        with pytest.raises(StateError, match=r"adapters of PEFT .*model.save_pretrained"):
            fp4pass.save(each, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def peft_of(base: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))


def test_a_router_below_an_adapter() -> None:
    model = adapted(model=Mixture(False), r=4, target_modules=["wg"])
    assert "a router" in reasons(model)["base_model.model.wg.base_layer"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("parameters", [["gate_up_proj"], ["gate_up_proj", "down_proj"]], ids=str)
@pytest.mark.parametrize("method", ["sse", "hessian"])
def test_experts_with_adapters_stay_dense_and_train(method: str, parameters: list[str]) -> None:
    peft = pytest.importorskip("peft")
    model = mixtures.build("qwen3_moe")
    targets = [f"mlp.experts.{name}" for name in parameters]
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=targets)
    model = peft.get_peft_model(model, config).eval()
    ids = mixtures.ids()
    if method == "hessian":
        fp4pass.prepare(model, method)
        fp4pass.calibrate(model, [ids], progress=False)
    fp4pass.convert(model, "nvfp4", method)
    rows = {row.name: row.skip_reason for row in fp4pass.report(model).rows}
    stacks = {name: reason for name, reason in rows.items() if name.endswith("_proj")}
    stacks = {name: reason for name, reason in stacks.items() if ".experts." in name}
    assert len(stacks) == 4 and all("target_parameters" in each for each in stacks.values())
    assert not rows["base_model.model.model.layers.0.self_attn.k_proj"]
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = dict(model.named_parameters())
    of_experts = [name for name in before if ".experts." in name and "lora_B" in name]
    assert of_experts and losses[-1] < losses[0]
    assert all(not torch.equal(after[name], before[name]) for name in of_experts)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_linear_layer_whose_weight_an_adapter_changes_stays_dense() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["k_proj.weight"])
    model = peft.get_peft_model(language_model(dtype=torch.float32), config)
    found = reasons(model)
    path = "base_model.model.model.layers.0.self_attn"
    assert "target_parameters" in found[f"{path}.k_proj.base_layer"]
    assert not found[f"{path}.v_proj"] and not found[f"{path}.q_proj.base_layer"]
    with torch.no_grad():
        assert model(input_ids=tokens()).logits.isfinite().all()
