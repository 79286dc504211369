"""Adapters of PEFT on converted models: PEFT's own configs, and no import of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mixtures
import pytest
import torch
import zoo
from safetensors.torch import load_file
from torch import Tensor, nn

import fp4pass
from fp4pass import _compat
from fp4pass.errors import OptionError, StateError, VersionError
from fp4pass.integrations import Fp4PassConfig
from fp4pass.nn.linear import QuantizedLinear

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LoraConfig, PeftModel, get_peft_model = peft.LoraConfig, peft.PeftModel, peft.get_peft_model

# PEFT asks transformers in ways that transformers warns of.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`(is_)?gradient_checkpointing.* is dep:FutureWarning"
)

CASES = {case.name: case for case in zoo.CASES}
ATTENTION = ["q_proj", "v_proj"]


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(2, zoo.VOCAB, (2, 12), generator=torch.Generator().manual_seed(seed))


def converted(name: str = "llama", weight_only: bool = True, rules: Any = ()) -> Any:
    """A converted model; with 4-bit inputs it is calibrated."""
    model = CASES[name].build()
    if not weight_only:
        fp4pass.prepare(model, "sse")
        fp4pass.calibrate(model, [tokens(seed) for seed in range(3)], progress=False)
    return fp4pass.convert(model, method="sse", weight_only=weight_only, rules=rules)


def kinds(model: nn.Module) -> dict[str, str]:
    """The classes of the adapters in a model, by the names of their layers."""
    found = model.named_modules()
    return {name: type(module).__name__ for name, module in found if hasattr(module, "lora_A")}


def train(model: Any, steps: int = 20) -> list[float]:
    """Losses of learning one batch by heart."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def assert_same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert set(a) == set(b)
    for name, tensor in a.items():
        assert torch.equal(tensor.view(torch.uint8), b[name].view(torch.uint8)), name


@pytest.mark.quick(1)
@pytest.mark.parametrize("weight_only", [True, False])
def test_adapters_train_and_the_base_stays(tmp_path: Path, weight_only: bool) -> None:
    base = converted(weight_only=weight_only)
    fp4pass.save(base, tmp_path / "base")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    expected = logits(base)
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_dropout=0.05, target_modules="all-linear")
    model = get_peft_model(base, config)
    adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(adapters) == 2 * len(fp4pass.report(base).converted)
    assert all("lora_" in name for name in adapters)
    # B starts at zero.
    assert torch.equal(logits(model), expected)
    losses = train(model.train())
    model.eval()
    assert losses[-1] < 0.7 * losses[0]
    trained = logits(model)
    assert not torch.allclose(trained, expected, atol=1e-2)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "adapter")
    names = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert names == {name.replace(".default", "") for name in adapters}
    again = PeftModel.from_pretrained(fp4pass.load(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(logits(again.eval()), trained)
    unloaded = model.unload()
    assert torch.equal(logits(unloaded), expected)
    assert_same_tensors(unloaded.state_dict(), before)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_are_put_in_and_taken_out(name: str) -> None:
    model = converted(name)
    case = CASES[name]
    expected = case.run(model, 0)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    config = LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")
    adapted = get_peft_model(model, config)
    changed = case.run(adapted, 0)
    assert not torch.allclose(changed, expected, atol=1e-2)
    # By hand: the adapters as a change of the dense weights.
    dense = CASES[name].build()
    for layer, linear in linears.items():
        change = adapted.base_model.model.get_submodule(layer).get_delta_weight("default")
        weight = linear.weight + (change.t() if linear.transposed else change)
        dense.get_submodule(layer).weight.data = weight.detach()
    torch.testing.assert_close(changed, case.run(dense, 0), rtol=1e-3, atol=1e-3)
    with adapted.disable_adapter():
        assert torch.equal(case.run(adapted, 0), expected)
    assert torch.equal(case.run(adapted, 0), changed)
    adapted.add_adapter("second", LoraConfig(r=4, target_modules="all-linear"))
    adapted.set_adapter("second")
    assert torch.equal(case.run(adapted, 0), expected)


def test_all_linear_is_packed_layers_dense_ones_and_no_head() -> None:
    rules = [("*.mlp.*", None), ("lm_head", {})]
    model = converted(rules=rules)
    assert isinstance(model.lm_head, QuantizedLinear)
    found = kinds(get_peft_model(model, LoraConfig(target_modules="all-linear")))
    assert len(found) == 14 and not any("lm_head" in name for name in found)
    packed = {name for name, kind in found.items() if kind == "LoraQuantizedLinear"}
    assert packed == {name for name in found if ".self_attn." in name}
    assert {found[name] for name in found.keys() - packed} == {"Linear"}
    # As PEFT has it for a model that is dense.
    dense = get_peft_model(CASES["llama"].build(), LoraConfig(target_modules="all-linear"))
    assert kinds(dense).keys() == found.keys()


def test_all_linear_of_a_mixture_is_no_stack() -> None:
    model = mixtures.build("qwen2_moe")
    fp4pass.convert(model, method="sse", weight_only=True)
    linears = [n for n, each in model.named_modules() if isinstance(each, QuantizedLinear)]
    assert any("shared_expert.gate_proj" in name for name in linears)
    found = kinds(get_peft_model(model, LoraConfig(target_modules="all-linear")))
    packed = {name for name, kind in found.items() if kind == "LoraQuantizedLinear"}
    assert packed == {f"base_model.model.{name}" for name in linears}
    assert not any(name.endswith("experts") for name in found)


def test_experts_by_their_names_are_refused() -> None:
    """PEFT takes these names for stacks, whose weight is packed."""
    model = mixtures.build("qwen3_moe")
    fp4pass.convert(model, method="sse", weight_only=True)
    config = LoraConfig(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    with pytest.raises(OptionError, match=r"target_parameters=\['down_proj', 'gate_up_proj'\]"):
        get_peft_model(model, config)
    assert not kinds(model)


def test_adapters_are_put_on_whole_layers() -> None:
    model: Any = fp4pass.convert(nn.Sequential(nn.Linear(32, 32)), "nvfp4", method="sse")
    # As a process has it that keeps a part.
    model[0].is_split = True
    with pytest.raises(StateError, match="expected a whole layer, got one that is split"):
        get_peft_model(model, LoraConfig(target_modules="all-linear"))


def test_one_layer_is_not_merged_until_the_model_is_dense() -> None:
    for name in ("llama", "gpt2"):
        model = converted(name)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        adapted = get_peft_model(model, config)
        expected = CASES[name].run(adapted, 0)
        refused = r"cannot be merged.*fp4pass\.merge\(model\).*fp4pass\.dequantize\(model\)"
        for merge in (adapted.merge_adapter, adapted.merge_and_unload):
            with pytest.raises(StateError, match=refused):
                merge()
        assert torch.equal(CASES[name].run(adapted, 0), expected)
        fp4pass.dequantize(adapted)
        assert {n for n, p in adapted.named_parameters() if p.requires_grad} == {
            n for n, _ in adapted.named_parameters() if "lora_" in n
        }
        torch.testing.assert_close(CASES[name].run(adapted, 0), expected, rtol=1e-4, atol=1e-4)
        merged = adapted.merge_and_unload()
        assert [type(m) for m in merged.modules()] == [
            type(m) for m in CASES[name].build().modules()
        ]
        torch.testing.assert_close(CASES[name].run(merged, 0), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"init_lora_weights": "loftq", "loftq_config": {}},
        {"target_parameters": ["q_proj.weight"]},
    ],
    ids=str,
)
def test_variants_that_need_the_dense_weight_are_refused(options: dict[str, Any]) -> None:
    name = next(iter(options))
    if "loftq_config" in options:
        options = {**options, "loftq_config": peft.LoftQConfig()}
    model = converted()
    config = LoraConfig(target_modules=ATTENTION, **options)
    with pytest.raises(OptionError, match=f"{name}=.*does not work on converted layers"):
        get_peft_model(model, config)
    # Nothing was put into it.
    assert not kinds(model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=ATTENTION))
    with pytest.raises(OptionError, match=f"{name}=.*does not work on converted layers"):
        adapted.add_adapter("second", config)


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig"])
def test_other_adapters_are_refused_on_packed_layers(kind: str) -> None:
    options: dict[str, Any] = {"feedforward_modules": []} if kind == "IA3Config" else {}
    for targets in (ATTENTION, "all-linear"):
        model = converted()
        config = getattr(peft, kind)(target_modules=targets, **options)
        with pytest.raises(OptionError, match=rf"{kind}: .*packed layers \(model\.layers"):
            get_peft_model(model, config)
        assert not any(
            isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer) for m in model.modules()
        )
    mixed = converted(rules=[("*.mlp.*", None)])
    options["target_modules"] = ["up_proj", "down_proj"]
    adapted = get_peft_model(mixed, getattr(peft, kind)(**options))
    assert torch.isfinite(logits(adapted)).all()


def test_a_packed_layer_cannot_be_trained_whole() -> None:
    model = converted(rules=[("lm_head", {})])
    config = LoraConfig(target_modules=ATTENTION, modules_to_save=["lm_head"])
    with pytest.raises(OptionError, match=r"modules_to_save=\['lm_head'\].*\('lm_head', None\)"):
        get_peft_model(model, config)
    adapted = get_peft_model(converted(), config)
    trained = {n for n, p in adapted.named_parameters() if p.requires_grad and "lora_" not in n}
    assert trained == {"base_model.model.lm_head.modules_to_save.default.weight"}


@pytest.mark.usefixtures("adapters_of_transformers")
def test_transformers_own_adapters_and_trainer(tmp_path: Path) -> None:
    from transformers.trainer_utils import validate_quantization_for_training

    CASES["llama"].build().save_pretrained(tmp_path / "float")
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "float", quantization_config=Fp4PassConfig())
    with pytest.raises(ValueError, match="purely quantized"):
        validate_quantization_for_training(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.add_adapter(LoraConfig(r=4, target_modules="all-linear"))
    validate_quantization_for_training(model)
    options = transformers.TrainingArguments(
        tmp_path / "out",
        max_steps=6,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    trainer = transformers.Trainer(model, options, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    after = {name.replace(".base_layer", ""): t for name, t in model.state_dict().items()}
    assert_same_tensors({name: after[name] for name in before}, before)
    model.disable_adapters()
    again = fp4pass.convert(CASES["llama"].build(), method="sse", weight_only=True)
    assert torch.equal(logits(model.eval()), logits(again))
    model.enable_adapters()
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    again.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(logits(again.eval()), expected)


def test_it_is_prepared_for_training_as_other_quantized_models_are() -> None:
    how = {"use_reentrant": False}
    model = peft.prepare_model_for_kbit_training(converted(), gradient_checkpointing_kwargs=how)
    assert model.is_gradient_checkpointing
    assert not any(p.requires_grad for p in model.parameters())
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    losses = train(adapted.train(), 5)
    assert losses[-1] < losses[0]
    # What is not quantized is prepared in PEFT's other way.
    dense = peft.prepare_model_for_kbit_training(CASES["llama"].build())
    assert not dense.is_gradient_checkpointing


def test_other_models_are_left_to_peft() -> None:
    """In one process with converted ones."""
    converted()
    plain = get_peft_model(CASES["llama"].build(), LoraConfig(target_modules="all-linear"))
    assert set(kinds(plain).values()) == {"Linear"} and len(kinds(plain)) == 14
    config = plain.peft_config["default"]
    assert config._custom_modules is None
    with pytest.raises(ValueError, match=r"Target modules .* not found"):
        get_peft_model(converted(), LoraConfig(target_modules=["nowhere"]))


@pytest.mark.slow
@pytest.mark.parametrize("first", ["fp4pass", "peft"])
def test_neither_has_to_be_imported_first(first: str) -> None:
    imports = {"fp4pass": "import fp4pass", "peft": "from peft import LoraConfig, get_peft_model"}
    order = sorted(imports, key=lambda name: name != first)
    script = f"""
import sys, torch
{imports[order[0]]}
assert ("peft" in sys.modules) == ({first!r} == "peft")
{imports[order[1]]}
assert not any(getattr(each, "name", "").startswith("peft") for each in sys.meta_path)
assert "exec_module" not in vars(sys.modules["peft.tuners.tuners_utils"].__loader__)
model = fp4pass.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), method="sse")
print(type(get_peft_model(model, LoraConfig(target_modules="all-linear")).base_model.model[0]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "LoraQuantizedLinear" in done.stdout, done.stderr


def test_another_peft_is_refused_where_it_meets_packed_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = _compat.installed_version
    versions = {"peft": "0.19.1"}
    monkeypatch.setattr(_compat, "installed_version", lambda name: versions.get(name) or find(name))
    for module in ("fp4pass.integrations.peft", "fp4pass._compat.peft"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delattr(_compat, "peft", raising=False)
    with pytest.raises(VersionError, match=r"peft: expected.*got 0\.19\.1.*'fp4pass\[peft\]'"):
        get_peft_model(converted(), LoraConfig(target_modules=ATTENTION))
    get_peft_model(CASES["llama"].build(), LoraConfig(target_modules=ATTENTION))
