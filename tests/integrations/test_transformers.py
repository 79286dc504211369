"""Models quantized while they are loaded equal those loaded and then converted, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from small_models import assert_same_bits
from torch import Tensor

import fp4pass
from fp4pass.errors import (
    CheckpointError,
    NonFiniteError,
    OptionError,
    RuleError,
    ShapeError,
    StateError,
)
from fp4pass.nn.experts import QUANTIZED, QuantizedExpertStack
from fp4pass.record.state import get_state

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import fp4pass.integrations.transformers
from fp4pass.integrations import Fp4PassConfig
from fp4pass.integrations.as_read import PackedAsRead
from fp4pass.record.config import OPTIONS

# PEFT asks transformers in a way that transformers warns of.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")

CASES = {case.name: case for case in zoo.CASES}
MODELS = ["llama_tied", "qwen3_moe", "mamba2", "bert", "t5"]
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "mxfp4": {"fmt": "mxfp4", "method": "naive", "dtype": torch.bfloat16},
    "4 bit inputs": {"weight_only": False, "device_map": "auto"},
    "block 32": {"block": 32, "device_map": "cpu", "dtype": torch.bfloat16},
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Progress bars of transformers off."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of the zoo, written when it is first asked for."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            CASES[name].build().save_pretrained(folders[name])
        return folders[name]

    return folder


def load(folder: Path, name: str = "llama", config: Any = None, **kwargs: Any) -> Any:
    import transformers

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(
        folder, quantization_config=config, **kwargs
    )


def both(folder: Path, **settings: Any) -> tuple[Any, Any]:
    """The model converted after it was loaded, and the one quantized while it was."""
    loading = {k: settings.pop(k) for k in ("dtype", "device_map") if k in settings}
    config = Fp4PassConfig(**settings)
    converted = fp4pass.convert(load(folder, **loading), **config.recipe.arguments())
    return converted, load(folder, config=config, **loading)


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(2, zoo.VOCAB, (2, 12), generator=torch.Generator().manual_seed(seed))


# A setting for each kind of model, and each setting for one.
EQUAL = {
    ("llama", "default"): "siblings that share a scale",
    ("llama", "mxfp4"): "no global scale",
    ("llama_tied", "4 bit inputs"): "a head that is tied on the skeleton",
    ("gpt2", "block 32"): "Conv1D",
    ("qwen3_moe", "default"): "stacked experts and routers",
    ("gpt_oss", "4 bit inputs"): "stacks that are transposed, with biases",
    ("phi3", "mxfp4"): "fused q, k, v and gate, up",
    ("mamba2", "4 bit inputs"): "a weight that is read without a call",
    ("bert", "block 32"): "biases, and a tied decoder",
    ("t5", "default"): "a layer in another dtype",
    ("vit", "4 bit inputs"): "no embedding of tokens",
}


@pytest.mark.quick(2)
@pytest.mark.parametrize(("name", "settings"), EQUAL)
def test_it_equals_load_then_convert(
    folder_of: Callable[[str], Path], name: str, settings: str
) -> None:
    require_equal(folder_of(name), name, **SETTINGS[settings])


def require_equal(folder: Path, name: str, **settings: Any) -> None:
    converted, loaded = both(folder, **settings)
    assert_same_bits(converted, loaded)
    assert fp4pass.report(loaded) == fp4pass.report(converted)
    assert get_state(loaded) == get_state(converted)
    assert loaded.config.to_dict().get("quantization_config") == converted.config.to_dict().get(
        "quantization_config"
    )
    classes = [[type(m).__name__ for m in each.modules()] for each in (converted, loaded)]
    assert classes[0] == classes[1]
    if name == "vit" and "dtype" in settings:
        return  # Its images are float32.
    case = CASES[name]
    assert torch.equal(case.run(loaded, 0), case.run(converted, 0))
    if case.generate is not None:
        assert torch.equal(case.generate(loaded), case.generate(converted))


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_packed_on_its_way(
    folder_of: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    convert = PackedAsRead._convert

    def spy(self: PackedAsRead, layers: Any) -> None:
        calls.append([layer.name for layer in layers])
        convert(self, layers)

    monkeypatch.setattr(PackedAsRead, "_convert", spy)
    model = load(folder_of(name), config=Fp4PassConfig())
    *on_the_way, after = calls
    assert after == []
    packed = sorted(name for group in on_the_way for name in group)
    assert packed == sorted(row.name for row in fp4pass.report(model).converted)
    # Only siblings wait for each other.
    assert all(len({name.rpartition(".")[0] for name in group}) == 1 for group in on_the_way)


RULES: list[tuple[str, list[Any]]] = [
    ("llama", [("*.down_proj", None)]),
    ("llama", [("*.k_proj", {"fmt": "mxfp4a16"}), ("*.up_proj", {"method": "naive"})]),
    # Taken after loading, with the embedding that it was tied to.
    ("llama_tied", [("lm_head", {"weight_only": False})]),
    ("qwen3_moe", [("*.mlp.gate.weight", None), ("*.layers.0.*", {"fmt": "mxfp4a16"})]),
    ("bert", [("cls.predictions.decoder", {}), ("*.query", {"block": 32})]),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("name", "rules"), RULES, ids=str)
def test_rules_hold(folder_of: Callable[[str], Path], name: str, rules: list[Any]) -> None:
    converted, loaded = both(folder_of(name), rules=rules)
    assert_same_bits(converted, loaded)
    assert fp4pass.report(loaded) == fp4pass.report(converted)
    assert torch.equal(CASES[name].run(loaded, 0), CASES[name].run(converted, 0))


def test_what_stays_in_float32_is_packed_from_float32(folder_of: Callable[[str], Path]) -> None:
    """T5 keeps a linear in float32 when it is loaded in float16."""
    converted, loaded = both(folder_of("t5"), dtype=torch.float16)
    kept = [m for m in loaded.modules() if getattr(m, "weight_dtype", None) == torch.float32]
    assert kept
    assert_same_bits(converted, loaded)
    assert fp4pass.report(loaded) == fp4pass.report(converted)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_dequantize_gives_a_dense_model(
    folder_of: Callable[[str], Path], tmp_path: Path, name: str, dtype: Any
) -> None:
    model = load(folder_of(name), config=Fp4PassConfig())
    expected = CASES[name].run(model, 0)
    weights = {
        n if isinstance(m, QuantizedExpertStack) else f"{n}.weight": m.weight
        for n, m in model.named_modules()
        if isinstance(m, QUANTIZED)
    }
    if name == "llama":
        # From then on config.dtype is a string.
        model.save_pretrained(tmp_path / "q")
    dense = model.dequantize(dtype)
    float_model = CASES[name].build()
    assert [type(m) for m in dense.modules()] == [type(m) for m in float_model.modules()]
    assert list(dense.state_dict()) == list(float_model.state_dict())
    for layer, weight in weights.items():
        assert torch.equal(dense.get_parameter(layer).to(weight.dtype), weight)
    assert dense.dtype == (dtype or torch.float32)
    if name == "gpt_oss":
        # What transformers chooses has no float64.
        dense.set_experts_implementation("eager")
    torch.testing.assert_close(
        CASES[name].run(dense, 0).to(expected.dtype), expected, rtol=1e-4, atol=1e-4
    )
    with pytest.raises(StateError, match="neither prepared nor converted"):
        fp4pass.report(dense)
    dense.save_pretrained(tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.core
def test_options_are_checked_when_they_are_given() -> None:
    with pytest.raises(OptionError, match=r"needs calibration data.*'sse'.*fp4pass.prepare"):
        Fp4PassConfig(method="hessian")
    with pytest.raises(OptionError, match="needs calibration data"):
        Fp4PassConfig(rules=[("*", {"method": "hessian"})])
    with pytest.raises(OptionError, match="Did you mean 'nvfp4'"):
        Fp4PassConfig("nvfp")
    with pytest.raises(RuleError, match="a list of"):
        Fp4PassConfig(rules="lm_head")


# An option without a value here is a test that is missing.
VALUES: dict[str, Any] = {
    "fmt": "mxfp4",
    "method": fp4pass.Naive(),
    "weight_only": False,
    "block": 32,
    "inputs": "fp8",
    "activation_scales": "sse",
    "input_range": "headroom",
    "rotation": 64,
    "unreached": "skip",
    "expert_prior": 4.0,
    "compute": "fp8",
}


@pytest.mark.core
@pytest.mark.parametrize("name", [option.name for option in OPTIONS])
def test_every_option_is_taken_and_comes_back(name: str) -> None:
    config, default = Fp4PassConfig(**{name: VALUES[name]}), Fp4PassConfig()
    assert getattr(config.recipe.config, name) == VALUES[name]
    assert getattr(default.recipe.config, name) != VALUES[name]
    for data in (config.to_dict(), json.loads(config.to_json_string())):
        assert Fp4PassConfig.from_dict(data).recipe == config.recipe
    # A folder may name only what is not the default.
    some = {"quant_method": "fp4pass", name: config.to_dict()[name]}
    assert Fp4PassConfig.from_dict(some).recipe == config.recipe


def test_the_config_is_plain_values_and_back(folder_of: Callable[[str], Path]) -> None:
    rules = [("*.o_proj", {"fmt": "nvfp4a16"}), ("*.down_proj", None)]
    config = Fp4PassConfig(fmt="mxfp4", method=fp4pass.Naive(), rules=rules)
    data = json.loads(config.to_json_string())
    assert data["quant_method"] == "fp4pass"
    assert Fp4PassConfig.from_dict(data).recipe == config.recipe
    assert Fp4PassConfig.from_dict({"quant_method": "fp4pass"}).recipe == Fp4PassConfig().recipe
    first = load(folder_of("llama"), config=config)
    assert_same_bits(first, load(folder_of("llama"), config=data))
    with pytest.raises(OptionError, match=r"quantization_config: .*'weights_only'.*'weight_only'"):
        Fp4PassConfig.from_dict({"quant_method": "fp4pass", "weights_only": True})


def changed(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint with other tensors."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


UP = "model.layers.1.mlp.up_proj.weight"


def test_a_weight_that_is_not_finite_is_an_error(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[UP][3, 5] = float("nan")

    folder = changed(folder_of("llama"), tmp_path / "nan", spoil)
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.up_proj: .*NaN"):
        load(folder, config=Fp4PassConfig())
    rules = [(UP.removesuffix(".weight"), None)]
    converted, loaded = both(folder, rules=rules)
    assert fp4pass.report(loaded) == fp4pass.report(converted)


def test_widths_that_do_not_fit_are_rows_or_errors(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(**{**zoo._DECODER, "intermediate_size": 72}, head_dim=16)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    converted, loaded = both(tmp_path / "m")
    assert fp4pass.report(loaded) == fp4pass.report(converted)
    assert "in_features=72 is not a multiple of 16" in fp4pass.report(loaded).skipped[0].skip_reason
    assert_same_bits(converted, loaded)
    rules = [("model.layers.0.mlp.down_proj", {})]
    with pytest.raises(ShapeError, match="in_features=72"):
        load(tmp_path / "m", config=Fp4PassConfig(rules=rules))


def test_weights_that_are_not_in_the_checkpoint_stay_dense_unless_a_rule_takes_them(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = changed(folder_of("llama"), tmp_path / "m", lambda tensors: tensors.__delitem__(UP))
    model = load(folder, config=Fp4PassConfig())
    whole = load(folder_of("llama"), config=Fp4PassConfig())
    name = UP.removesuffix(".weight")
    reasons = {row.name: row.skip_reason for row in fp4pass.report(model).skipped}
    assert (
        reasons[name] == "its source has no weight for it, so it is new; add a rule to quantize it"
    )
    assert type(model.get_submodule(name)) is torch.nn.Linear
    assert len(fp4pass.report(model).converted) == len(fp4pass.report(whole).converted) - 1
    assert model(tokens()).logits.isfinite().all()
    taken = load(folder, config=Fp4PassConfig(rules=[(name, {"fmt": "mxfp4"})]))
    assert taken.get_submodule(name).config.fmt == "mxfp4"
    down = [m.model.layers[1].mlp.down_proj for m in (model, whole)]
    assert torch.equal(down[0].weight_packed, down[1].weight_packed)


def test_weights_of_another_shape_are_an_error_or_made_anew(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    def shorten(tensors: dict[str, Tensor]) -> None:
        tensors[UP] = tensors[UP][:64].contiguous()

    folder = changed(folder_of("llama"), tmp_path / "m", shorten)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(folder, config=Fp4PassConfig())
    model = load(folder, config=Fp4PassConfig(), ignore_mismatched_sizes=True)
    assert model.model.layers[1].mlp.up_proj.weight.shape == (96, 64)
    assert model.model.layers[1].mlp.gate_proj.weight_packed.shape == (96, 32)
    assert model(tokens()).logits.isfinite().all()


def test_checkpoints_that_are_quantized_are_refused(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    fp4pass.save(load(folder_of("llama"), config=Fp4PassConfig()), tmp_path / "public")
    with pytest.raises(ValueError, match="quantized with CompressedTensorsConfig"):
        load(tmp_path / "public", config=Fp4PassConfig())
    fp4pass.save(load(folder_of("llama"), config=Fp4PassConfig(block=32)), tmp_path / "own")
    with pytest.raises(CheckpointError, match=r"fp4pass\.load"):
        load(tmp_path / "own")
