"""LoRA adapters merged into packed weights: what changes, what stays, and what it costs."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import fp4pass
from fp4pass.errors import CalibrationError, OptionError, StateError
from fp4pass.lab import Merged
from fp4pass.methods import Stats, resolve_method
from fp4pass.nn.linear import PACKED, SCALE, QuantizedLinear

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LoraConfig, PeftModel, get_peft_model = peft.LoraConfig, peft.PeftModel, peft.get_peft_model

# PEFT asks transformers in ways that transformers warns of.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`(is_)?gradient_checkpointing.* is dep:FutureWarning"
)

CASES = {case.name: case for case in zoo.CASES}
TOUCHED = ["q_proj", "up_proj"]


def tokens(seed: int = 0, rows: int = 2) -> Tensor:
    return torch.randint(2, zoo.VOCAB, (rows, 12), generator=torch.Generator().manual_seed(seed))


DATA = [tokens(seed) for seed in range(8)]


def converted(name: str = "llama", fmt: str = "nvfp4a16", **options: Any) -> Any:
    return fp4pass.convert(CASES[name].build(), fmt, "sse", **options)


def adapted(model: Any, targets: Any = TOUCHED, size: float = 1.0, **options: Any) -> Any:
    """With adapters of random numbers, B times `size`."""
    torch.manual_seed(0)
    options = {"r": 4, "init_lora_weights": False, "target_modules": targets, **options}
    tuned = get_peft_model(model, LoraConfig(**options)).eval()
    for name, parameter in tuned.named_parameters():
        if ".lora_B." in name:
            parameter.data *= size
    return tuned


def dense_weight(layer: QuantizedLinear) -> Tensor:
    return layer.from_parameter(layer.weight_as(torch.float32))


def global_scale_of(layer: QuantizedLinear) -> float:
    return 1 / float(layer.weight_global_scale)


def layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The packed layers by their names in the model itself."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            found[name.removeprefix("base_model.model.").replace(".base_layer", "")] = module
    return found


def wanted(tuned: Any) -> dict[str, Tensor]:
    """The sums W + scale B A in float32, made by PEFT's own product."""
    found = {}
    for name, module in tuned.named_modules():
        if hasattr(module, "lora_A") and isinstance(module.base_layer, QuantizedLinear):
            total = dense_weight(module.base_layer)
            for adapter in set(module.active_adapters) & set(module.lora_A):
                change = module.get_delta_weight(adapter)
                total = total + (change.mT if module.fan_in_fan_out else change)
            found[name.removeprefix("base_model.model.")] = total.detach()
    return found


def bits(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {name: tensor.contiguous().view(torch.uint8).clone() for name, tensor in state.items()}


def kl(model: Any, reference: Any) -> float:
    p, q = reference.log_softmax(-1).double(), model.log_softmax(-1).double()
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", ["sse", "gptq"])
def test_only_touched_layers_change(method: str) -> None:
    model = converted()
    before = bits(model)
    tuned = adapted(model)
    with torch.no_grad():
        expected = torch.cat([tuned(x).logits for x in DATA[6:]])
    weights = wanted(tuned)
    found = fp4pass.merge(tuned, method, data=DATA[:6], held_out=DATA[6:], progress=False)
    assert isinstance(found, Merged) and found.model is model
    assert not any(type(each).__module__.startswith("peft.") for each in model.modules())
    after = bits(model)
    assert after.keys() == before.keys()
    changed = {n.rpartition(".")[0] for n in after if not torch.equal(after[n], before[n])}
    assert changed == set(found.layers) | set(found.rescaled)
    assert set(found.layers) == weights.keys() and set(found.layers.values()) == {method}
    for name, weight in weights.items():
        error = (dense_weight(layers(model)[name]) - weight).norm() / weight.norm()
        assert error < 0.15, name
    with torch.no_grad():
        logits = torch.cat([model(x).logits for x in DATA[6:]])
    assert found.kl_after == pytest.approx(kl(logits, expected), rel=1e-3)
    assert found.held_out_tokens == 48
    assert found.kl_after < found.kl_without and found.kept > 0.9
    rows = {row.name: row for row in fp4pass.report(model).rows}
    for name in found.layers:
        assert rows[name].config.method_name == method and rows[name].weight_error < 0.2
        assert (rows[name].output_error is None) == (method == "sse")
    assert rows["model.layers.0.self_attn.v_proj"].config.method_name == "sse"


def test_sse_is_the_method_on_the_sum() -> None:
    tuned = adapted(converted())
    weights = wanted(tuned)
    found = fp4pass.merge(tuned, "sse")
    assert found.kl_after is None and found.tokens == found.held_out_tokens == 0
    assert "the loss is not measured" in str(found)
    method, options = resolve_method("sse")
    for name, layer in layers(found.model).items():
        if name not in weights:
            continue
        fmt, scale = layer.config.format, global_scale_of(layer)
        result: Any = method.function(weights[name], Stats(), fmt, scale, options)
        assert torch.equal(result.qdata, getattr(layer, PACKED))
        assert torch.equal(result.scale, layer._buffers[SCALE].view(torch.uint8))


def test_statistics_are_those_of_base_and_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = adapted(converted())
    module = sys.modules["fp4pass.lab.merge"]
    kept: list[Any] = []
    true = module.qn.pack_layer
    monkeypatch.setattr(module.qn, "pack_layer", lambda plan: kept.append(plan) or true(plan))
    last = tuned.base_model.model.model.layers[1].mlp.up_proj.base_layer
    seen: list[Tensor] = []
    handle = last.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for batch in DATA[:6]:
            tuned(batch)
    handle.remove()
    fp4pass.merge(tuned, "gptq", data=DATA[:6], held_out=DATA[6:])
    x = torch.cat(seen).double()
    (hessian,) = (each.stats.hessian for each in kept if each.name.endswith("1.mlp.up_proj"))
    # Sums of float32.
    assert (hessian[0].double() - x.T @ x).norm() < 1e-5 * (x.T @ x).norm()
    # Nothing of it stays.
    assert not any(module._forward_pre_hooks for module in tuned.modules())


def test_what_engines_fuse_keeps_one_global_scale() -> None:
    model = converted()
    before = copy.deepcopy(layers(model))
    found = fp4pass.merge(adapted(model, ["k_proj", "down_proj"], 40.0), "sse")
    after = layers(model)
    for i in range(2):
        path = f"model.layers.{i}.self_attn"
        group = [after[f"{path}.{name}_proj"] for name in "qkvo"]
        (scale,) = {global_scale_of(each) for each in group}
        factor = scale / global_scale_of(before[f"{path}.q_proj"])
        assert factor > 1 and factor == 2 ** round(torch.tensor(factor).log2().item())
        for name in ("q_proj", "v_proj", "o_proj"):
            old, new = before[f"{path}.{name}"], after[f"{path}.{name}"]
            assert f"{path}.{name}" in set(found.rescaled) - found.layers.keys()
            # Codes stay, and values as far as E4M3 has a block scale divided by the factor.
            assert torch.equal(getattr(new, PACKED), getattr(old, PACKED))
            torch.testing.assert_close(new.weight, old.weight, rtol=0.1, atol=1e-3)
        # Nothing else reads what down_proj reads.
        assert f"model.layers.{i}.mlp.gate_proj" not in found.rescaled


@pytest.mark.parametrize("size", [0.01, 100.0])
def test_what_engines_fuse_keeps_one_scale_of_tensors(size: float) -> None:
    model = converted(fmt="fp8_tensora16")
    before = {name: float(each.weight_scale) for name, each in layers(model).items()}
    dense = {name: dense_weight(each) for name, each in layers(model).items()}
    found = fp4pass.merge(adapted(model, ["q_proj", "o_proj"], size=size), "sse", progress=False)
    path = "model.layers.0.self_attn"
    scales = {name: float(each.weight_scale) for name, each in layers(model).items()}
    (own,) = {scales[f"{path}.{name}_proj"] for name in "qkv"}
    factor = own / before[f"{path}.q_proj"]
    assert factor in [2.0**k for k in range(12)] and (factor > 8 or size < 100)
    if factor > 1:
        assert f"{path}.k_proj" in found.rescaled
    # Only the smallest codes lose a bit.
    for name in "kv":
        full = f"{path}.{name}_proj"
        error = (dense_weight(layers(model)[full]) - dense[full]).abs().max()
        assert error <= own * 2**-10 * 1.01


def test_several_adapters() -> None:
    model = converted()
    tuned = adapted(model)
    for name, target in (("second", "q_proj"), ("third", "o_proj")):
        config = LoraConfig(r=2, lora_alpha=6, target_modules=[target], init_lora_weights=False)
        tuned.add_adapter(name, config)
    tuned.base_model.set_adapter(["default", "second"])
    weights = wanted(tuned)
    found = fp4pass.merge(tuned, "sse")
    assert found.adapters == ("default", "second")
    assert {name.rpartition(".")[2] for name in found.layers} == set(TOUCHED)
    for name in found.layers:
        error = (layers(model)[name].weight - weights[name]).norm() / weights[name].norm()
        assert error < 0.12


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_other_kinds_of_layers(name: str) -> None:
    """A weight stored as [K, N], and biases that adapters have."""
    model = converted(name)
    options: dict[str, Any] = {"lora_bias": True} if name == "bert" else {}
    targets = {"gpt2": ["c_attn", "c_proj"], "bert": ["query", "output.dense"]}[name]
    tuned = adapted(model, targets, **options)
    expected, weights = CASES[name].run(tuned, 0), wanted(tuned)
    biases = {n: each.bias.detach().clone() for n, each in layers(model).items()}
    found = fp4pass.merge(tuned, "sse", data=None)
    for path, layer in layers(found.model).items():
        moved = not torch.equal(layer.bias, biases[path])
        assert moved == (bool(options) and path in weights), path
        if path in weights:
            error = (dense_weight(layer) - weights[path]).norm() / weights[path].norm()
            assert error < 0.12
    output = CASES[name].run(found.model, 0)
    assert (output - expected).norm() < 0.3 * expected.norm()


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("fmt", "layout", "options"),
    [
        ("nvfp4a16", "compressed-tensors", {}),
        ("nvfp4a16", "modelopt", {}),
        ("mxfp4a16", "compressed-tensors", {"rotation": 32}),
        ("nvfp4a16", "compressed-tensors-hadamard", {"rotation": 32}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The folder has no tokenizer:UserWarning")
def test_it_is_an_ordinary_model(
    tmp_path: Path, fmt: str, layout: str, options: dict[str, Any]
) -> None:
    model = converted(fmt=fmt, **options)
    tuned = adapted(model, "all-linear")
    weights = wanted(tuned)
    found = fp4pass.merge(tuned, "sse", data=DATA)
    for name, layer in layers(model).items():
        assert (dense_weight(layer) - weights[name]).norm() < 0.2 * weights[name].norm()
    fp4pass.save(found.model, tmp_path / "out", layout=layout)
    again = fp4pass.load(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    # JSON has no tuples.
    (stored,) = json.loads((tmp_path / "out" / "fp4pass.json").read_text())["recipe"]["merged"]
    assert stored == found.to_dict()
    # And once more, on what was loaded.
    twice = fp4pass.merge(adapted(again, size=0.5), "sse").model
    assert len(fp4pass.report(twice).converted) == 14
    fp4pass.save(twice, tmp_path / "twice", layout=layout)
    recipe = json.loads((tmp_path / "twice" / "fp4pass.json").read_text())["recipe"]
    assert len(recipe["merged"]) == 2


@pytest.mark.usefixtures("adapters_of_transformers")
@pytest.mark.filterwarnings("ignore:The folder has no tokenizer:UserWarning")
def test_adapters_that_transformers_holds(tmp_path: Path) -> None:
    model = converted()
    config = LoraConfig(r=4, target_modules=TOUCHED, init_lora_weights=False)
    model.add_adapter(config)
    found = fp4pass.merge(model, "sse", data=DATA)
    assert found.model is model and len(found.layers) == 4
    assert not model._hf_peft_config_loaded and not hasattr(model, "peft_config")
    # The whole model is saved again, and not an adapter.
    model.save_pretrained(tmp_path / "out")
    with torch.no_grad():
        again = fp4pass.load(tmp_path / "out")(tokens()).logits
        assert torch.equal(again, model(tokens()).logits)


def test_quantized_inputs_keep_their_scales() -> None:
    model = fp4pass.convert(CASES["llama"].build(), "nvfp4", "sse", data=DATA)
    before = {name: each.input_global_scale for name, each in layers(model).items()}
    found = fp4pass.merge(adapted(model), "hessian", data=DATA)
    assert found.kl_after < found.kl_without
    for name, each in layers(model).items():
        assert torch.equal(each.input_global_scale, before[name])


def test_dense_layers_and_trained_copies_go_along() -> None:
    model = converted(rules=[("*.mlp.*", None)])
    tuned = adapted(model, [*TOUCHED], modules_to_save=["lm_head"])
    for name, parameter in tuned.named_parameters():
        if "modules_to_save" in name:
            parameter.data += 0.1
    with torch.no_grad():
        expected = tuned(tokens()).logits
    found = fp4pass.merge(tuned, "gptq", data=DATA)
    assert all("q_proj" in name for name in found.layers)
    with torch.no_grad():
        logits = found.model(tokens()).logits
    assert kl(logits, expected) < found.kl_without
    assert type(found.model.lm_head) is nn.Linear


def test_small_changes_need_data() -> None:
    """Less than half a step: rounding to nearest gives the codes of before."""
    tuned = adapted(converted(), "all-linear", 0.05)
    before = bits(tuned)
    with pytest.raises(StateError, match=r"expected data= or tokenizer=, got neither.*rounds away"):
        fp4pass.merge(tuned)
    after = bits(tuned)
    assert all(torch.equal(after[name], before[name]) for name in before)
    found = fp4pass.merge(copy.deepcopy(tuned), "sse", data=DATA)
    assert found.kept < 0.2 and found.kl_after > 0.5 * found.kl_without
    assert set(fp4pass.merge(tuned, data=DATA).layers.values()) == {"gptq"}


@pytest.mark.slow
def test_the_model_writes_its_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = pytest.importorskip("transformers")
    tiny = Path(__file__).parents[2] / "examples" / "tiny_lm"
    tokenizer = auto.AutoTokenizer.from_pretrained(tiny)
    model = auto.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    tuned = adapted(fp4pass.convert(model, "nvfp4a16", "sse"), ["q_proj"], 0.2)
    data = fp4pass.calibration.sample(tuned.base_model.model, tokenizer, tokens=1024, seq_len=64)
    found = fp4pass.merge(copy.deepcopy(tuned), "gptq", data=data)
    assert found.tokens == 14 * 64 and found.held_out_tokens == 2 * 64
    assert found.kl_after < found.kl_without
    monkeypatch.setattr(fp4pass.calibration, "batches", lambda *_, **__: list(data[:4].split(1)))
    found = fp4pass.merge(tuned, "sse", tokenizer=tokenizer)
    assert found.tokens == 0 and found.held_out_tokens == 4 * 64


def test_what_cannot_be_merged_is_refused() -> None:
    plain = CASES["llama"].build()
    with pytest.raises(StateError, match="not converted as a whole"):
        fp4pass.merge(adapted(plain))
    with pytest.raises(StateError, match="expected adapters of PEFT on packed layers"):
        fp4pass.merge(converted())
    dora = get_peft_model(CASES["llama"].build(), LoraConfig(target_modules=TOUCHED, use_dora=True))
    fp4pass.convert(dora, "nvfp4a16", "sse")
    with pytest.raises(StateError, match=r"q_proj: .*variant of LoRA that reads the dense weight"):
        fp4pass.merge(dora, "sse")
    with pytest.warns(peft.utils.warning.PeftWarning, match="has no bias"):
        biased = adapted(converted(), lora_bias=True)
    with pytest.raises(StateError, match=r"has a bias \(lora_bias\), and the layer has none"):
        fp4pass.merge(biased, "sse")
    tuned = adapted(converted())
    with pytest.raises(OptionError, match="compares with a float model"):
        fp4pass.merge(tuned, fp4pass.Gptq(target="cross"), data=DATA)
    with pytest.raises(OptionError, match="gptw"):
        fp4pass.merge(tuned, "gptw", data=DATA)
    with pytest.raises(OptionError, match="tokenizer"):
        fp4pass.merge(tuned, "hessian")
    with tuned.disable_adapter(), pytest.raises(StateError, match="disabled"):
        fp4pass.merge(tuned, "sse")
    zero = get_peft_model(converted(), LoraConfig(target_modules=TOUCHED))
    with pytest.raises(StateError, match="they are disabled, or add zero"):
        fp4pass.merge(zero, "sse")
    # Nothing has happened to it.
    assert len(fp4pass.merge(tuned, "hessian", data=DATA).layers) == 4


@pytest.mark.parametrize("unreached", ["error", "sse"])
def test_a_layer_that_no_data_reaches(unreached: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.other = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.read(x)

    inputs = [torch.randn(4, 32) for _ in range(4)]
    model = fp4pass.convert(Two(), "nvfp4a16", "sse", unreached=unreached)
    tuned = adapted(model, ["read", "other"])
    before = bits(tuned)
    if unreached == "sse":
        found = fp4pass.merge(tuned, "gptq", data=inputs)
        # A model without logits.
        assert found.layers == {"read": "gptq", "other": "sse"} and found.kl_after is None
        return
    with pytest.raises(CalibrationError, match="other: no batch reached it"):
        fp4pass.merge(tuned, "gptq", data=inputs)
    assert all(torch.equal(a, before[n]) for n, a in bits(tuned).items())
    assert not any(module._forward_pre_hooks for module in tuned.modules())
