"""Checkpoints of other libraries, and ours in their layouts: the same bits on every way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from safetensors.torch import load_file
from small_models import (
    TINY,
    assert_same_bits,
    bits,
    converted,
    language_model,
    linears,
    logits,
    tokens,
)
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass.checkpoint.reader import open_stored
from fp4pass.checkpoint.transcode import transcode
from fp4pass.core.formats import element_table
from fp4pass.core.quant_state import unpack_codes
from fp4pass.errors import CheckpointError, OptionError
from fp4pass.kernels.common.rounding import round_to_codes_
from fp4pass.linear import QuantizedLinear

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore:.*pkg_resources|.*treespec:FutureWarning")


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
        assert linear.config.format.key == "nvfp4:16:multiplier"
    assert logits(model).isfinite().all()
    row = fp4pass.report(model).converted[0]
    assert (row.config.fmt, row.config.block, row.config.method_name) == ("nvfp4", 16, "-")
    fp4pass.save(model, tmp_path / "ours", layout="modelopt")
    theirs, ours = (load_file(tmp_path / d / "model.safetensors") for d in ("theirs", "ours"))
    assert set(theirs) == set(ours)
    assert all(torch.equal(bits(theirs[name]), bits(ours[name])) for name in theirs)
    assert_same_bits(fp4pass.load(tmp_path / "ours"), model)
    # A divisor is the nearest there is.
    transcode(tmp_path / "theirs", tmp_path / "c", "compressed-tensors")
    config = json.loads((tmp_path / "c" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"]
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
        assert linear.config.format.key == scheme[:5].lower()
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


def test_what_a_model_keeps_in_float32_stays_so(tmp_path: Path) -> None:
    model = fp4pass.convert(language_model().float(), "nvfp4", "naive", weight_only=True)
    fp4pass.save(model, tmp_path / "f")
    transcode(tmp_path / "f", tmp_path / "dense", "bf16")
    stored = load_file(tmp_path / "dense" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    model = converted()
    model.model.norm.weight.data = model.model.norm.weight.data.float()
    fp4pass.save(model, tmp_path / "q")
    transcode(tmp_path / "q", tmp_path / "d", "bf16")
    stored = load_file(tmp_path / "d" / "model.safetensors")
    wide = [name for name, tensor in stored.items() if tensor.dtype == torch.float32]
    assert wide == ["model.norm.weight"]


def test_a_float_model_is_not_overwritten(tmp_path: Path) -> None:
    fp4pass.save(converted(), tmp_path / "q")
    shutil.copytree(TINY, tmp_path / "float")
    before = (tmp_path / "float" / "model.safetensors").read_bytes()
    for to in ("modelopt", "bf16"):
        with pytest.raises(CheckpointError, match="not a checkpoint of fp4pass"):
            transcode(tmp_path / "q", tmp_path / "float", to, overwrite=True)
    assert (tmp_path / "float" / "model.safetensors").read_bytes() == before
    transcode(tmp_path / "q", tmp_path / "q", "modelopt", overwrite=True)
    assert open_stored(tmp_path / "q").layout.name == "modelopt"


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
    assert {m.config.format.key for m in linears(loaded).values()} == {"nvfp4", "mxfp4"}
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
        left = fp4pass.report(loaded).skipped
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


@pytest.mark.parametrize("weight_only", [True, False])
def test_shared_weights_have_every_name_in_every_layout(tmp_path: Path, weight_only: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model = fp4pass.prepare(Twice(), "naive")
    model(torch.randn(3, 64))
    fp4pass.convert(model, "nvfp4", "naive", weight_only=weight_only)
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
    assert set(dense) == {"a.weight", "a.bias", "b.weight"}


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
