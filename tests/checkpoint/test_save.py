"""Saved models come back equal to the bit, from our folders and for stock transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from small_models import (
    assert_same_bits,
    converted,
    language_model,
    logits,
    mlp,
    packed_model,
    tokens,
)
from torch import Tensor, nn

import fp4pass
import fp4pass.parity
from fp4pass.errors import CheckpointError, OptionError, StateError
from fp4pass.nn.linear import QuantizedLinear

SETTINGS = [
    {"fmt": "nvfp4", "weight_only": True},
    {"fmt": "nvfp4", "weight_only": False},
    {"fmt": "mxfp4", "weight_only": True},
    {"fmt": "mxfp4", "weight_only": False},
    {"fmt": "nvfp4", "weight_only": True, "rules": [("*.down_proj", {"fmt": "mxfp4a16"})]},
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_ours_and_stock_transformers_load_it_to_the_bit(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    pytest.importorskip("compressed_tensors")
    model = language_model()
    ids = tokens()
    if not settings["weight_only"]:
        fp4pass.prepare(model, "sse")
        fp4pass.calibrate(model, [ids], progress=False)
    fp4pass.convert(model, method="sse", **settings)
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q")
    assert_same_bits(model, loaded)
    assert str(fp4pass.report(loaded)) == str(fp4pass.report(model))
    stock = language_model(tmp_path / "q")
    assert not any(isinstance(m, QuantizedLinear) for m in stock.modules())
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(loaded(ids).logits, logits)
        assert torch.equal(stock(ids).logits, logits)
    assert torch.equal(
        loaded.generate(ids, max_new_tokens=4, do_sample=False),
        model.generate(ids, max_new_tokens=4, do_sample=False),
    )


def test_the_layout_is_that_of_compressed_tensors(tmp_path: Path) -> None:
    model = language_model()
    fp4pass.prepare(model, "sse")
    fp4pass.calibrate(model, [tokens()], progress=False)
    fp4pass.convert(model, "nvfp4", method="sse")
    fp4pass.save(model, tmp_path / "q")
    stored = load_file(tmp_path / "q" / "model.safetensors")
    prefix = "model.layers.0.mlp."
    for name, (rows, columns) in {"gate_proj": (768, 256), "down_proj": (256, 768)}.items():
        assert stored[f"{prefix}{name}.weight_packed"].shape == (rows, columns // 2)
        scale = stored[f"{prefix}{name}.weight_scale"]
        assert scale.dtype == torch.float8_e4m3fn and scale.shape == (rows, columns // 16)
        assert (scale.float() > 0).all()
        for part in ("weight_global_scale", "input_global_scale"):
            divisor = stored[f"{prefix}{name}.{part}"]
            assert divisor.shape == (1,) and divisor.dtype == torch.float32
            assert torch.frexp(divisor).mantissa == 0.5
        assert f"{prefix}{name}.weight" not in stored
    shared = [stored[f"{prefix}{n}.weight_global_scale"] for n in ("gate_proj", "up_proj")]
    assert torch.equal(*shared)
    assert "lm_head.weight" not in stored  # tied
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.core
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_any_module_round_trips_into_a_skeleton(tmp_path: Path, fmt: str, block: int) -> None:
    model = packed_model(mlp(), fmt=fmt, block=block)
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q", model=mlp(seed=1))
    assert_same_bits(model, loaded)
    x = torch.randn(3, 64)
    assert torch.equal(model(x), loaded(x))
    assert torch.equal(model[0].weight, loaded[0].weight)


def test_formats_without_a_public_layout_are_refused_by_others(tmp_path: Path) -> None:
    model = packed_model(language_model(), block=32)
    fp4pass.save(model, tmp_path / "q")
    assert_same_bits(model, fp4pass.load(tmp_path / "q"))
    # By the missing file, or, where fp4pass.integrations.transformers is imported, by us.
    with pytest.raises((OSError, CheckpointError), match=r"model\.safetensors|fp4pass\.load"):
        language_model(tmp_path / "q")


class Shared(nn.Module):
    """Two linears with one weight, and one linear under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.b.weight = self.a.weight
        self.again = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.b(self.a(x)))


@pytest.mark.core
def test_shared_weights_stay_shared(tmp_path: Path) -> None:
    model = packed_model(Shared())
    assert model.a.weight_packed is model.b.weight_packed
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q", model=Shared())
    assert_same_bits(model, loaded)
    assert loaded.a is loaded.again
    assert loaded.a.weight_packed.data_ptr() == loaded.b.weight_packed.data_ptr()
    with safe_open(tmp_path / "q" / "model.safetensors", framework="pt") as file:
        assert {"a.weight_packed", "b.weight_packed"} <= set(file.keys())


class NamedLikeOurs(nn.Module):
    """A parameter and a buffer with names that packed layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.weight_scale = nn.Parameter(torch.randn(64))
        self.register_buffer("weight_packed", torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.weight_scale + self.weight_packed


def test_tensors_of_the_model_may_be_named_like_ours(tmp_path: Path) -> None:
    model = packed_model(NamedLikeOurs())
    fp4pass.save(model, tmp_path / "q", layout="modelopt")
    assert_same_bits(model, fp4pass.load(tmp_path / "q", model=NamedLikeOurs().to("meta")))


def test_what_swap_packed_has_no_place_in_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    model = packed_model(language_model(), rules=[("*.up_proj", None)])
    fp4pass.parity.swap(model, "nf4")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj: a Linear4bit"):
        fp4pass.save(model, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_conv1d_and_exported_graphs_round_trip(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    model = packed_model(transformers.GPT2LMHeadModel(config).eval())
    fp4pass.save(model, tmp_path / "gpt2")
    loaded = fp4pass.load(tmp_path / "gpt2")
    assert_same_bits(model, loaded)
    assert loaded.transformer.h[0].mlp.c_fc.weight.shape == (64, 256)

    def exported() -> nn.Module:
        return torch.export.export(mlp(), (torch.randn(2, 64),), strict=False).module()

    graph = packed_model(exported())
    fp4pass.save(graph, tmp_path / "graph")
    x = torch.randn(2, 64)
    assert torch.equal(fp4pass.load(tmp_path / "graph", model=exported())(x), graph(x))


@pytest.mark.core
def test_dynamic_activation_scales_have_no_place_in_nvfp4(tmp_path: Path) -> None:
    model = packed_model(mlp(), weight_only=False)
    with pytest.raises(CheckpointError, match=r"0: .*Calibrate.*nvfp4a16.*mxfp4"):
        fp4pass.save(model, tmp_path / "q")
    assert list(tmp_path.iterdir()) == []
    fp4pass.save(packed_model(mlp(), fmt="mxfp4", weight_only=False), tmp_path / "q")


def test_stock_transformers_runs_a_model_of_another_dtype(tmp_path: Path) -> None:
    """In bfloat16, for that is what compressed-tensors dequantizes to."""
    pytest.importorskip("compressed_tensors")
    dtype = torch.float16
    model = packed_model(language_model(dtype=dtype))
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q")
    assert loaded.config.dtype == loaded.dtype == dtype
    transformers = pytest.importorskip("transformers")
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q").eval()
    with torch.no_grad():
        expected = model(tokens()).logits
        assert torch.equal(loaded(tokens()).logits, expected)
        error = (stock(tokens()).logits.float() - expected.float()).norm() / expected.float().norm()
    assert stock.dtype == torch.bfloat16 and error < 0.02


def test_a_tied_head_that_a_rule_takes_is_tied_no_more(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = packed_model(language_model(), rules=[("lm_head", {})])
    assert isinstance(model.lm_head, QuantizedLinear)
    ids = tokens()
    with torch.no_grad():
        logits = model(ids).logits
        model.tie_weights()
        assert torch.equal(model(ids).logits, logits)
        fp4pass.save(model, tmp_path / "q")
        loaded = fp4pass.load(tmp_path / "q")
        assert_same_bits(model, loaded)
        assert torch.equal(loaded(ids).logits, logits)
        assert torch.equal(language_model(tmp_path / "q")(ids).logits, logits)


class Views(nn.Module):
    """Buffers that share memory without being one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)
        whole = torch.randn(16, 16)
        for name, view in (("whole", whole), ("rows", whole[2:5]), ("turned", whole.t())):
            self.register_buffer(name, view)


@pytest.mark.core
def test_views_of_one_memory_keep_their_values(tmp_path: Path) -> None:
    model = packed_model(Views())
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q", model=Views()).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.float(), loaded[name].float()), name


class ExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"step": 1}


def test_a_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(64, 32), ExtraState(64, 32)])
    model = packed_model(model, rules=[("1", None)])
    with pytest.raises(CheckpointError, match=r"1\._extra_state: safetensors holds tensors only"):
        fp4pass.save(model, tmp_path / "q")
    assert not list(tmp_path.iterdir())


def test_a_model_of_which_a_part_is_converted(tmp_path: Path) -> None:
    model = language_model()
    fp4pass.convert(model.model, method="naive", weight_only=True)
    with pytest.raises(StateError, match=r"part of the model is converted \(model.layers.0"):
        fp4pass.save(model, tmp_path / "out")


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
