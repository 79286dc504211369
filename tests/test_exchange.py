"""Checkpoints of other libraries, and ours in their layouts: the same bits on every way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass.errors import CheckpointError, OptionError
from fp4pass.exchange import transcode
from fp4pass.experts import read_experts
from fp4pass.formats import element_table, get_format
from fp4pass.kernels.rounding_ref import round_to_codes_
from fp4pass.modules import QuantizedLinear
from fp4pass.packing import pack_codes, unpack_codes
from fp4pass.stored import open_stored

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore:.*pkg_resources|.*treespec:FutureWarning")

TINY = Path(__file__).parents[1] / "examples" / "tiny_lm"


def language_model(path: Path = TINY) -> Any:
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(path, dtype=torch.bfloat16).eval()


def tokens(count: int = 2, length: int = 48) -> Tensor:
    return torch.randint(1, 2000, (count, length), generator=torch.Generator().manual_seed(0))


def converted(fmt: str = "nvfp4", weight_only: bool = True, **options: Any) -> Any:
    model = language_model()
    if not weight_only:
        fp4pass.prepare(model, "naive")
        fp4pass.calibrate(model, [tokens()], progress=False)
    return fp4pass.convert(model, fmt, "naive", weight_only=weight_only, **options)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(tokens()).logits


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def assert_same_bits(a: nn.Module, b: nn.Module) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert set(first) == set(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and tensor.shape == second[name].shape, name
        assert torch.equal(bits(tensor), bits(second[name])), name


def linears(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


@pytest.mark.parametrize("weight_only", [True, False])
def test_the_modelopt_layout_tensor_by_tensor(tmp_path: Path, weight_only: bool) -> None:
    model = converted(weight_only=weight_only)
    fp4pass.save(model, tmp_path / "q", layout="modelopt")
    stored = load_file(tmp_path / "q" / "model.safetensors")
    seen = set()
    for name, linear in linears(model).items():
        parts = {part: stored[f"{name}.{part}"] for part in ("weight", "weight_scale")}
        second = stored[f"{name}.weight_scale_2"]
        rows, columns = linear.out_features, linear.in_features
        assert parts["weight"].dtype == torch.uint8
        assert parts["weight"].shape == (rows, columns // 2)
        assert parts["weight_scale"].dtype == torch.float8_e4m3fn
        assert parts["weight_scale"].shape == (rows, columns // 16)
        assert second.dtype == torch.float32 and second.shape == () and 0 < second < 1
        # What ModelOpt dequantizes: code * (weight_scale * weight_scale_2).
        step = (parts["weight_scale"].float() * second).repeat_interleave(16, 1)
        grid = torch.tensor(foreign.GRID + [-value for value in foreign.GRID])
        values = grid[unpack_codes(parts["weight"]).int()]
        assert torch.equal((values * step).bfloat16(), linear.weight)
        seen |= {f"{name}.{part}" for part in (*parts, "weight_scale_2")}
        if not weight_only:
            scale = stored[f"{name}.input_scale"]
            assert scale.shape == () and torch.equal(1 / scale, linear.input_global_scale[0])
            seen.add(f"{name}.input_scale")
    assert not any(t.dtype == torch.uint8 for n, t in stored.items() if n not in seen)
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    facts = json.loads((tmp_path / "q" / "hf_quant_config.json").read_text())["quantization"]
    algorithm = "W4A16_NVFP4" if weight_only else "NVFP4"
    assert config["quant_method"] == "modelopt" and config["quant_algo"] == algorithm
    assert facts["quant_algo"] == algorithm and facts["kv_cache_quant_algo"] is None
    assert config["ignore"] == facts["exclude_modules"] == ["lm_head"]
    assert facts["group_size"] == 16
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"] and group["weights"]["group_size"] == 16
    assert ("input_activations" in group) is not weight_only
    loaded = fp4pass.load(tmp_path / "q")
    assert_same_bits(model, loaded)
    assert torch.equal(logits(loaded), logits(model))


def test_compressed_tensors_reads_our_modelopt_layout_as_our_own(tmp_path: Path) -> None:
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter

    model = converted(weight_only=False)
    fp4pass.save(model, tmp_path / "m", layout="modelopt")
    fp4pass.save(model, tmp_path / "c")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    names = [rf"re:.*{name.rpartition('.')[2]}$" for name in linears(model)]
    converter = ModelOptNvfp4Converter(targets=sorted(set(names)))
    found = converter.process(tensors)
    wanted = load_file(tmp_path / "c" / "model.safetensors")
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(bits(found[name]), bits(tensor)), name


@pytest.mark.parametrize("weight_only", [True, False])
def test_there_and_back_are_the_same_bytes(tmp_path: Path, weight_only: bool) -> None:
    fp4pass.save(converted(weight_only=weight_only), tmp_path / "c")
    transcode(tmp_path / "c", tmp_path / "m", "modelopt")
    transcode(tmp_path / "m", tmp_path / "c2", "compressed-tensors")
    transcode(tmp_path / "c2", tmp_path / "m2", "modelopt")
    for a, b in (("c", "c2"), ("m", "m2")):
        names = sorted(path.name for path in (tmp_path / a).iterdir())
        assert names == sorted(path.name for path in (tmp_path / b).iterdir())
        for name in names:
            assert (tmp_path / a / name).read_bytes() == (tmp_path / b / name).read_bytes(), name
    assert_same_bits(fp4pass.load(tmp_path / "m"), fp4pass.load(tmp_path / "c"))


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_a_checkpoint_of_modelopt_keeps_every_bit(tmp_path: Path, algorithm: str) -> None:
    """Its global scales are amax / 2688, which has no exact reciprocal."""
    names = [name for name, m in language_model().named_modules() if isinstance(m, nn.Linear)]
    names.remove("lm_head")
    dense = foreign.modelopt(TINY, tmp_path / "theirs", names, algorithm)
    model = fp4pass.load(tmp_path / "theirs")
    assert set(linears(model)) == set(names)
    for name, linear in linears(model).items():
        assert torch.equal(linear.weight, dense[name]), name
        assert linear.weight_only is (algorithm != "NVFP4")
    assert logits(model).isfinite().all()
    row = fp4pass.report(model).converted[0]
    assert (row.format, row.block, row.method) == ("nvfp4", 16, "-")
    fp4pass.save(model, tmp_path / "ours", layout="modelopt")
    theirs, ours = (load_file(tmp_path / d / "model.safetensors") for d in ("theirs", "ours"))
    assert set(theirs) == set(ours)
    assert all(torch.equal(bits(theirs[name]), bits(ours[name])) for name in theirs)
    # A divisor is the nearest there is; nothing negative is ever written.
    transcode(tmp_path / "theirs", tmp_path / "c", "compressed-tensors")
    for name, tensor in load_file(tmp_path / "c" / "model.safetensors").items():
        if "global_scale" in name:
            assert tensor > 0
    with pytest.raises(CheckpointError, match=r"fp4pass\.save"):
        model.save_pretrained(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


SCHEMES = ["NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_of_compressed_tensors_is_what_it_says(tmp_path: Path, scheme: str) -> None:
    dense = foreign.compressed_tensors(language_model(), tmp_path / "theirs", scheme, tokens())
    model = fp4pass.load(tmp_path / "theirs")
    assert set(linears(model)) == set(dense)
    for name, linear in linears(model).items():
        assert torch.equal(linear.weight, dense[name]), name
        assert linear.format_key == scheme[:5].lower()
        assert linear.weight_only is scheme.endswith("A16")
    stock = language_model(tmp_path / "theirs")
    wanted = logits(stock)
    if scheme == "NVFP4":
        # It rounds a sixth of a block's amax to bfloat16 before the global scale, which shows
        # where that is no power of two. With that rounding alone, all bits agree.
        assert not torch.equal(logits(model), wanted)
        for linear in linears(model).values():
            linear.forward = lambda x, linear=linear: rounded_linear(x, linear)
    assert torch.equal(logits(model), wanted)
    model = fp4pass.load(tmp_path / "theirs")
    fp4pass.save(model, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / d / "model.safetensors") for d in ("theirs", "ours"))
    assert set(theirs) == set(ours)
    assert all(torch.equal(bits(theirs[name]), bits(ours[name])) for name in theirs)
    assert_same_bits(fp4pass.load(tmp_path / "ours"), model)


def rounded_linear(x: Tensor, linear: QuantizedLinear) -> Tensor:
    """A quantized linear whose input scales are rounded as compressed-tensors rounds them."""
    fmt, divisor = linear.format, linear.input_global_scale
    blocks = x.unflatten(-1, (-1, fmt.block))
    sixth = blocks.abs().amax(-1) / 6
    assert sixth.dtype == torch.bfloat16
    step = (sixth.float() * divisor).to(torch.float8_e4m3fn).float() / divisor
    codes = round_to_codes_(blocks.float() / step.unsqueeze(-1), fmt.element)
    values = element_table(fmt.element, x.device)[codes.int()]
    return F.linear((values * step.unsqueeze(-1)).flatten(-2).bfloat16(), linear.weight)


@pytest.mark.parametrize("source", ["compressed-tensors", "modelopt"])
def test_dense_weights_run_without_any_library(tmp_path: Path, source: str) -> None:
    model = converted()
    fp4pass.save(model, tmp_path / "q", layout=source)
    transcode(tmp_path / "q", tmp_path / "dense", "bf16", max_shard_size="1MB")
    assert len(list((tmp_path / "dense").glob("model-*-of-*.safetensors"))) > 3
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in config
    stock = language_model(tmp_path / "dense")
    assert not linears(stock)
    assert torch.equal(logits(stock), logits(model))


def test_what_lies_beside_comes_along(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = "{{ messages }}"
    fp4pass.save(converted(), tmp_path / "q", tokenizer=tokenizer, max_shard_size="1MB")
    for to in ("modelopt", "bf16"):
        transcode(tmp_path / "q", tmp_path / to, to)
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / to)
        assert again.chat_template == tokenizer.chat_template
        assert again("one two").input_ids == tokenizer("one two").input_ids
        assert (tmp_path / to / "generation_config.json").is_file()
        assert not list((tmp_path / to).glob("*.index.json"))
    with pytest.raises(OptionError, match="save_pretrained"):
        fp4pass.save(converted(), tmp_path / "r", tokenizer="tokenizer")


def test_mixed_rules_have_a_place(tmp_path: Path) -> None:
    rules = [("*.down_proj", {"fmt": "mxfp4"}), ("*.o_proj", None)]
    model = converted(rules=rules)
    fp4pass.save(model, tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    (tmp_path / "q" / "fp4pass.json").unlink()
    loaded = fp4pass.load(tmp_path / "q")
    assert_same_bits(model, loaded)
    assert {m.format_key for m in linears(loaded).values()} == {"nvfp4", "mxfp4"}
    with pytest.raises(CheckpointError, match=r"down_proj: modelopt has no place for mxfp4"):
        transcode(tmp_path / "q", tmp_path / "m", "modelopt")
    with pytest.raises(CheckpointError, match="down_proj"):
        fp4pass.save(model, tmp_path / "m", layout="modelopt")
    assert not (tmp_path / "m").exists()


def test_modelopt_names_the_layers_of_two_algorithms(tmp_path: Path) -> None:
    rules = [("*.down_proj", {"weight_only": True})]
    model = converted(weight_only=False, rules=rules)
    fp4pass.save(model, tmp_path / "m", layout="modelopt")
    facts = json.loads((tmp_path / "m" / "hf_quant_config.json").read_text())["quantization"]
    assert facts["quant_algo"] == "MIXED_PRECISION"
    algorithms = {n: each["quant_algo"] for n, each in facts["quantized_layers"].items()}
    assert set(algorithms) == set(linears(model))
    assert algorithms["model.layers.0.mlp.down_proj"] == "W4A16_NVFP4"
    assert algorithms["model.layers.0.mlp.up_proj"] == "NVFP4"
    (tmp_path / "m" / "fp4pass.json").unlink()
    assert_same_bits(model, fp4pass.load(tmp_path / "m"))


def test_a_folder_without_our_facts_is_loaded_all_the_same(tmp_path: Path) -> None:
    """As after an upload that left fp4pass.json out."""
    for fmt, layout in (("mxfp4", "compressed-tensors"), ("nvfp4", "modelopt")):
        model = converted(fmt)
        fp4pass.save(model, tmp_path / fmt, layout=layout, max_shard_size="2MB")
        assert (tmp_path / fmt / "model.safetensors.index.json").is_file()
        (tmp_path / fmt / "fp4pass.json").unlink()
        loaded = fp4pass.load(tmp_path / fmt)
        assert_same_bits(model, loaded)
        left = fp4pass.report(loaded).left_alone
        assert [row.name for row in left] == ["lm_head"]
        loaded.save_pretrained(tmp_path / f"{fmt}-again")
        assert torch.equal(logits(language_model(tmp_path / f"{fmt}-again")), logits(model))


def test_files_have_at_most_the_size_that_was_asked_for(tmp_path: Path) -> None:
    model = converted()
    fp4pass.save(model, tmp_path / "q", max_shard_size="800KB")
    index = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == sorted(path.name for path in (tmp_path / "q").glob("*.safetensors"))
    sizes = 0
    for file in files:
        tensors = load_file(tmp_path / "q" / file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 800_000 or len(tensors) == 1
        assert {name for name, held in index["weight_map"].items() if held == file} == set(tensors)
        sizes += size
    assert index["metadata"]["total_size"] == sizes
    assert torch.equal(logits(language_model(tmp_path / "q")), logits(model))
    assert_same_bits(fp4pass.load(tmp_path / "q"), model)
    for size in ("5 parsecs", "0GB", -3):
        with pytest.raises(OptionError, match="max_shard_size"):
            fp4pass.save(model, tmp_path / "r", max_shard_size=size)
    with pytest.raises(OptionError, match="Did you mean 'modelopt'"):
        fp4pass.save(model, tmp_path / "r", layout="model-opt")


@pytest.mark.parametrize(
    "device_map", ["cpu", torch.device("cpu"), "auto", {"": "cpu"}, {"": torch.device("cpu")}]
)
def test_device_maps(tmp_path: Path, device_map: Any) -> None:
    model = converted()
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q", device_map=device_map)
    assert {tensor.device.type for tensor in loaded.state_dict().values()} == {"cpu"}
    assert torch.equal(logits(loaded), logits(model))


def test_a_device_map_that_is_none(tmp_path: Path) -> None:
    fp4pass.save(converted(), tmp_path / "q")
    with pytest.raises(OptionError, match="'gpu'"):
        fp4pass.load(tmp_path / "q", device_map="gpu")


def change(folder: Path, name: str, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = edit(tensors.pop(name))
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")


def nan_scale(scale: Tensor) -> Tensor:
    scale.view(torch.uint8)[3, 1] = 0x7F
    return scale


def negative_scale(scale: Tensor) -> Tensor:
    scale.view(torch.uint8)[3, 1] |= 0x80
    return scale


LAYER = "model.layers.1.mlp.down_proj"
DAMAGE = {
    "a NaN scale": (f"{LAYER}.weight_scale", nan_scale, "holds NaN or a negative scale"),
    "a negative scale": (f"{LAYER}.weight_scale", negative_scale, "holds NaN or a negative"),
    "no scale": (f"{LAYER}.weight_scale", lambda t: None, "no weight_scale beside it"),
    "no global scale": (f"{LAYER}.weight_global_scale", lambda t: None, "has no .*global_scale"),
    "no input scale": (f"{LAYER}.input_global_scale", lambda t: None, "input_global_scale is miss"),
    "zero": (f"{LAYER}.weight_global_scale", torch.zeros_like, "is not zero is wanted"),
    "infinity": (f"{LAYER}.input_global_scale", lambda t: t / 0, "finite number"),
    "a shape": (f"{LAYER}.weight_scale", lambda t: t[:-1].clone(), r"\[256, 48\] is wanted"),
    "a dtype": (f"{LAYER}.weight_global_scale", lambda t: t.half(), "F32"),
    "a norm": ("model.norm.weight", lambda t: None, "lacks .*model.norm.weight"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_does_not_fit_is_an_error_that_names_it(tmp_path: Path, what: str) -> None:
    name, edit, message = DAMAGE[what]
    fp4pass.save(converted(weight_only=False), tmp_path / "q")
    (tmp_path / "q" / "fp4pass.json").unlink()
    change(tmp_path / "q", name, edit)
    with pytest.raises(CheckpointError, match=message):
        fp4pass.load(tmp_path / "q")


def test_other_methods_are_named(tmp_path: Path) -> None:
    fp4pass.save(converted(), tmp_path / "q")
    (tmp_path / "q" / "fp4pass.json").unlink()
    path = tmp_path / "q" / "config.json"
    config = json.loads(path.read_text())

    def declare(**facts: Any) -> None:
        path.write_text(json.dumps(config | {"quantization_config": facts}))

    declare(quant_method="gptq")
    with pytest.raises(CheckpointError, match="quant_method is 'gptq'"):
        fp4pass.load(tmp_path / "q")
    facts = config["quantization_config"]
    group = facts["config_groups"]["group_0"]
    declare(**facts | {"config_groups": {"g": group | {"format": "pack-quantized"}}})
    with pytest.raises(CheckpointError, match="its format is 'pack-quantized'"):
        fp4pass.load(tmp_path / "q")
    declare(**facts | {"config_groups": {"g": group | {"targets": ["re:.*q_proj"]}}})
    with pytest.raises(CheckpointError, match="no config_groups"):
        fp4pass.load(tmp_path / "q")
    with pytest.raises(CheckpointError, match="not quantized"):
        fp4pass.load(TINY)
    with pytest.raises(OptionError, match="bf16"):
        transcode(tmp_path / "q", tmp_path / "r", "gguf")
    with pytest.raises(CheckpointError, match="not empty"):
        fp4pass.save(converted(), tmp_path / "s")
        transcode(tmp_path / "s", tmp_path / "q", "bf16")


def test_scales_of_the_cache_are_said_to_be_unused(tmp_path: Path) -> None:
    model = converted()
    fp4pass.save(model, tmp_path / "q", layout="modelopt")
    (tmp_path / "q" / "fp4pass.json").unlink()
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    save_file(tensors, tmp_path / "q" / "model.safetensors")
    with pytest.warns(UserWarning, match="1 scales of a quantized key-value cache"):
        loaded = fp4pass.load(tmp_path / "q")
    assert torch.equal(logits(loaded), logits(model))


def gpt_oss(folder: Path) -> Any:
    """A tiny model with the experts of gpt-oss, packed on disk; returns the model."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=3,
        num_experts_per_tok=2,
        vocab_size=2000,
        layer_types=["full_attention", "sliding_attention"],
        pad_token_id=0,
    )
    model = transformers.GptOssForCausalLM(config).bfloat16().eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    fmt = get_format("mxfp4")
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        rows = tensors.pop(name).mT.float().unflatten(-1, (-1, 32))
        exponent = rows.abs().amax(-1).log2().floor() - 2
        codes = round_to_codes_(rows / exponent.exp2().unsqueeze(-1), fmt.element)
        tensors[f"{name}_blocks"] = pack_codes(codes.to(torch.uint8))
        tensors[f"{name}_scales"] = (exponent + 127).to(torch.uint8)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    data = json.loads(path.read_text())
    data["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    path.write_text(json.dumps(data))
    return model


@pytest.mark.filterwarnings("ignore:.*MXFP4")
def test_the_experts_of_gpt_oss(tmp_path: Path) -> None:
    gpt_oss(tmp_path / "packed")
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    experts = dict(read_experts(tmp_path / "packed"))
    assert len(experts) == 4
    for name, states in experts.items():
        blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
        assert len(states) == 3 and states[0].format.key == "mxfp4"
        assert torch.equal(torch.stack([s.packed for s in states]), blocks.flatten(-2))
        assert torch.equal(torch.stack([s.scale for s in states]), scales)
    transcode(tmp_path / "packed", tmp_path / "dense", "bf16")
    dense = language_model(tmp_path / "dense")
    # On a CPU transformers dequantizes what it loads.
    stock = language_model(tmp_path / "packed")
    assert_same_bits(dense, stock)
    assert torch.equal(logits(dense), logits(stock))
    with pytest.raises(CheckpointError, match="mxfp4"):
        fp4pass.load(tmp_path / "packed")


def test_damaged_experts_are_named(tmp_path: Path) -> None:
    gpt_oss(tmp_path / "q")
    name = "model.layers.0.mlp.experts.down_proj"
    for part, edit, message in (
        ("_scales", lambda t: t[:, :-1].clone(), r"\[3, 64, 3\] is wanted"),
        ("_scales", lambda t: torch.full_like(t, 255), "holds NaN"),
        ("_scales", lambda t: None, "has no .*down_proj_scales"),
        ("_blocks", lambda t: t[..., :8].clone(), r"U8 \[experts"),
    ):
        shutil.copytree(tmp_path / "q", tmp_path / "d")
        change(tmp_path / "d", name + part, edit)
        with pytest.raises(CheckpointError, match=message):
            dict(read_experts(tmp_path / "d"))
        shutil.rmtree(tmp_path / "d")


def test_shared_weights_have_every_name_in_every_layout(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model = fp4pass.convert(Twice(), "nvfp4", "naive", weight_only=True)
    fp4pass.save(model, tmp_path / "m", layout="modelopt")
    names = set(load_file(tmp_path / "m" / "model.safetensors"))
    assert {"a.weight", "b.weight", "b.weight_scale_2"} <= names
    transcode(tmp_path / "m", tmp_path / "c", "compressed-tensors")
    for folder in ("m", "c"):
        loaded = fp4pass.load(tmp_path / folder, model=Twice())
        assert loaded.a is loaded.b
        assert_same_bits(loaded, model)
    transcode(tmp_path / "c", tmp_path / "dense", "bf16")
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    assert torch.equal(dense["b.weight"], model.a.weight.bfloat16())


def test_a_stored_folder_says_what_it_holds(tmp_path: Path) -> None:
    model = converted()
    fp4pass.save(model, tmp_path / "q", layout="modelopt")
    stored = open_stored(tmp_path / "q")
    assert stored.layout.name == "modelopt" and set(stored.layers) == set(linears(model))
    for name, linear in linears(model).items():
        assert torch.equal(stored.dense(name, torch.bfloat16), linear.weight)
        parts = stored.parts(name)
        assert torch.equal(parts["weight_packed"], linear.weight_packed)
        assert torch.equal(parts["weight_global_scale"], linear.weight_global_scale)
        assert parts["input_global_scale"] is None
    assert set(stored.plain()) == {n for n in stored.files if "_proj" not in n}


TEXT = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 2000,
}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def test_names_of_the_hub_become_those_of_the_model(tmp_path: Path) -> None:
    """As of Llava, whose checkpoints call model.language_model language_model.model."""
    torch.manual_seed(0)
    config = transformers.LlavaConfig(vision_config=VISION, text_config=TEXT, image_token_index=1)
    cls = transformers.LlavaForConditionalGeneration
    cls(config).bfloat16().save_pretrained(tmp_path / "dense")
    model = cls.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16).eval()
    fp4pass.convert(model, "nvfp4", "naive", weight_only=True)
    model.save_pretrained(tmp_path / "hub")
    fp4pass.save(model, tmp_path / "ours")
    names = set(load_file(tmp_path / "hub" / "model.safetensors"))
    assert "language_model.model.layers.0.mlp.up_proj.weight_packed" in names
    for folder in ("hub", "ours"):
        (tmp_path / folder / "fp4pass.json").unlink(missing_ok=True)
        loaded = fp4pass.load(tmp_path / folder)
        assert_same_bits(loaded, model)
        assert torch.equal(logits(loaded), logits(model))
        stock = cls.from_pretrained(tmp_path / folder, dtype=torch.bfloat16).eval()
        assert torch.equal(logits(stock), logits(model))


def test_dense_experts_are_ignored_by_a_pattern(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **{key: value for key, value in TEXT.items() if key != "model_type"},
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path / "dense")
    model = language_model(tmp_path / "dense")
    fp4pass.convert(model, "nvfp4", "naive", weight_only=True)
    fp4pass.save(model, tmp_path / "q")
    facts = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    experts = r"re:model\.layers\.0\.mlp\.experts.*"
    assert facts["ignore"] == [experts, "model.layers.0.mlp.gate", "lm_head"]
    assert torch.equal(logits(language_model(tmp_path / "q")), logits(model))
    assert_same_bits(fp4pass.load(tmp_path / "q"), model)
    with pytest.raises(CheckpointError, match=r"experts one by one.*fp4pass\.save"):
        model.save_pretrained(tmp_path / "refused")


@pytest.mark.parametrize("weight_only", [True, False])
@pytest.mark.parametrize(
    ("fmt", "layout"),
    [("nvfp4", "compressed-tensors"), ("nvfp4", "modelopt"), ("mxfp4", "compressed-tensors")],
)
def test_stock_transformers_gives_the_logits_of_a_llama(
    tmp_path: Path, fmt: str, weight_only: bool, layout: str
) -> None:
    """Untied, with biases, calibrated; by way of either layout."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{key: value for key, value in TEXT.items() if key != "model_type"},
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "dense")
    model = language_model(tmp_path / "dense")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    fp4pass.prepare(model)
    fp4pass.calibrate(model, [tokens()], progress=False)
    fp4pass.convert(model, fmt, weight_only=weight_only)
    fp4pass.save(model, tmp_path / "q", layout=layout)
    if layout == "modelopt":
        transcode(tmp_path / "q", tmp_path / "c", "compressed-tensors")
        (tmp_path / "q").rename(tmp_path / "m")
        (tmp_path / "c").rename(tmp_path / "q")
    assert torch.equal(logits(language_model(tmp_path / "q")), logits(model))
    assert torch.equal(logits(fp4pass.load(tmp_path / "q")), logits(model))
