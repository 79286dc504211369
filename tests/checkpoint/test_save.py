"""Checkpoints: equal to the bit after a round trip, whole or absent whatever happens."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import TINY, assert_same_bits, language_model, tokens
from torch import Tensor, nn

import fp4pass
from fp4pass.checkpoint.reader import checksum_of
from fp4pass.errors import CheckpointError, OptionError, StateError
from fp4pass.linear import QuantizedLinear

SHARED = Path(__file__).parents[3] / "shared" / "models" / "doclm-qwen3-17m"


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32, bias=False))


def converted(model: nn.Module, **options: Any) -> nn.Module:
    options = {"fmt": "nvfp4", "method": "sse", "weight_only": True} | options
    return fp4pass.convert(model, **options)


SETTINGS = [
    {"fmt": "nvfp4", "weight_only": True},
    {"fmt": "nvfp4", "weight_only": False},
    {"fmt": "mxfp4", "weight_only": True},
    {"fmt": "mxfp4", "weight_only": False},
    {"fmt": "nvfp4", "weight_only": True, "rules": [("*.down_proj", {"fmt": "mxfp4"})]},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("path", [TINY, SHARED], ids=["tiny", "shared"])
def test_ours_and_stock_transformers_load_it_to_the_bit(
    tmp_path: Path, path: Path, settings: dict[str, Any]
) -> None:
    pytest.importorskip("compressed_tensors")
    if not path.exists():
        pytest.skip("the shared model is not here")
    model = language_model(path)
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
    fp4pass.convert(model, method="sse")
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


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_any_module_round_trips_into_a_skeleton(tmp_path: Path, fmt: str, block: int) -> None:
    model = converted(mlp(), fmt=fmt, block=block)
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q", model=mlp(seed=1))
    assert_same_bits(model, loaded)
    x = torch.randn(3, 64)
    assert torch.equal(model(x), loaded(x))
    assert torch.equal(model[0].weight, loaded[0].weight)


def test_formats_without_a_public_layout_are_refused_by_others(tmp_path: Path) -> None:
    model = converted(language_model(), block=32)
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


def test_shared_weights_stay_shared(tmp_path: Path) -> None:
    model = converted(Shared())
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


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_tensors_of_the_model_may_be_named_like_ours(tmp_path: Path, layout: str) -> None:
    model = converted(NamedLikeOurs())
    fp4pass.save(model, tmp_path / "q", layout=layout)
    for device in ("cpu", "meta"):
        loaded = fp4pass.load(tmp_path / "q", model=NamedLikeOurs().to(device))
        assert_same_bits(model, loaded)


def test_what_swap_packed_has_no_place_in_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    model = converted(language_model(), rules=[("*.up_proj", None)])
    fp4pass.nn.swap(model, "nvfp4")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj: a Linear4bit"):
        fp4pass.save(model, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_a_swapped_part_of_any_other_model_comes_back(tmp_path: Path) -> None:
    models = [mlp(0), mlp(1)]
    for model in models:
        fp4pass.nn.swap(model, "nvfp4", exclude="0")
    fp4pass.save(converted(models[0]), tmp_path / "q")
    assert_same_bits(models[0], fp4pass.load(tmp_path / "q", model=models[1]))
    reasons = [row.skip_reason for row in fp4pass.report(models[0]).rows]
    assert reasons == ["", "its weight is packed already, by Linear4bit"]


def test_files_are_as_open_as_others(tmp_path: Path) -> None:
    fp4pass.save(converted(mlp()), tmp_path / "q")
    modes = {path.stat().st_mode for path in (tmp_path / "q").iterdir()}
    assert len(modes) == 1


def test_an_unknown_layout_is_named(tmp_path: Path) -> None:
    fp4pass.save(converted(mlp()), tmp_path / "q")
    path = tmp_path / "q" / "fp4pass.json"
    own = json.loads(path.read_text()) | {"layout": "gguf"}
    own.pop("sha256")
    path.write_text(json.dumps(own | {"sha256": checksum_of(own)}))
    with pytest.raises(CheckpointError, match="has layout 'gguf'"):
        fp4pass.load(tmp_path / "q", model=mlp())


def test_a_device_that_is_not_there_leaves_the_model_alone(tmp_path: Path) -> None:
    fp4pass.save(converted(mlp()), tmp_path / "q")
    model = mlp(1)
    with pytest.raises(OptionError, match=r"device_map=cuda:99 cannot be used"):
        fp4pass.load(tmp_path / "q", model=model, device_map="cuda:99")
    assert_same_bits(model, mlp(1))


def test_conv1d_and_exported_graphs_round_trip(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    model = converted(transformers.GPT2LMHeadModel(config).eval())
    fp4pass.save(model, tmp_path / "gpt2")
    loaded = fp4pass.load(tmp_path / "gpt2")
    assert_same_bits(model, loaded)
    assert loaded.transformer.h[0].mlp.c_fc.weight.shape == (64, 256)

    def exported() -> nn.Module:
        return torch.export.export(mlp(), (torch.randn(2, 64),), strict=False).module()

    graph = converted(exported())
    fp4pass.save(graph, tmp_path / "graph")
    x = torch.randn(2, 64)
    assert torch.equal(fp4pass.load(tmp_path / "graph", model=exported())(x), graph(x))


def test_dynamic_activation_scales_have_no_place_in_nvfp4(tmp_path: Path) -> None:
    model = converted(mlp(), weight_only=False)
    with pytest.raises(CheckpointError, match=r"0: .*Calibrate.*weight_only=True.*mxfp4"):
        fp4pass.save(model, tmp_path / "q")
    assert list(tmp_path.iterdir()) == []
    fp4pass.save(converted(mlp(), fmt="mxfp4", weight_only=False), tmp_path / "q")


def test_save_needs_a_converted_model_and_a_free_folder(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="convert"):
        fp4pass.save(mlp(), tmp_path / "q")
    model = converted(mlp())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        fp4pass.save(model, tmp_path / "other")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        fp4pass.save(model, tmp_path / "other", overwrite=True)
    assert (tmp_path / "other" / "thesis.txt").read_text() == "years of work"
    fp4pass.save(model, tmp_path / "q")
    with pytest.raises(CheckpointError, match="not empty"):
        fp4pass.save(model, tmp_path / "q")
    other = converted(mlp(seed=5))
    fp4pass.save(other, tmp_path / "q", overwrite=True)
    assert_same_bits(other, fp4pass.load(tmp_path / "q", model=mlp()))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "q"]


def flip_a_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(bytes(data))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("2.weight_scale")
    save_file(tensors, folder / "model.safetensors")


def reshape_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["0.bias"] = tensors["0.bias"][:-1].clone()
    save_file(tensors, folder / "model.safetensors")


def cut_json(folder: Path) -> None:
    path = folder / "fp4pass.json"
    path.write_text(path.read_text()[:200])


def newer_layout(folder: Path) -> None:
    path = folder / "fp4pass.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 9}))


def change_own(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "fp4pass.json"
        own = json.loads(path.read_text())
        change(own)
        path.write_text(json.dumps(own))

    return damage


DAMAGE = [
    (change_own(lambda own: own["layers"]["0"].update(format="nvfp4:32")), "its checksum"),
    (change_own(lambda own: own["layers"]["0"].update(weight_only=False)), "its checksum "),
    (change_own(lambda own: own["report"].clear()), "its checksum is"),
    (change_own(lambda own: own.pop("sha256")), "its checksum is not"),
    (flip_a_bit, "checksum"),
    (truncate, "cut off"),
    (drop_a_tensor, "missing.*2.weight_scale"),
    (reshape_a_tensor, "0.bias"),
    (cut_json, "damaged"),
    (newer_layout, "version 9"),
    (lambda folder: (folder / "model.safetensors").unlink(), "missing or cut off"),
    (lambda folder: (folder / "fp4pass.json").unlink(), "is not quantized"),
    (shutil.rmtree, "not a folder"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[m for _, m in DAMAGE])
def test_damage_is_an_error_and_leaves_the_model_alone(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    fp4pass.save(converted(mlp()), tmp_path / "q")
    damage(tmp_path / "q")
    skeleton = mlp(seed=3)
    with pytest.raises(CheckpointError, match=message):
        fp4pass.load(tmp_path / "q", model=skeleton)
    assert_same_bits(skeleton, mlp(seed=3))


WRONG = [
    (nn.Sequential(nn.Linear(64, 96), nn.ReLU()), "2: "),
    (nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False)), "32, 96"),
    (nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)), "2.bias"),
    (nn.Sequential(nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 32)), "0.bias"),
]


@pytest.mark.parametrize(("skeleton", "message"), WRONG, ids=[m for _, m in WRONG])
def test_a_model_of_another_architecture_is_refused(
    tmp_path: Path, skeleton: nn.Module, message: str
) -> None:
    fp4pass.save(converted(mlp()), tmp_path / "q")
    with pytest.raises(CheckpointError, match=message):
        fp4pass.load(tmp_path / "q", model=skeleton)
    assert isinstance(skeleton[0], nn.Linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_stock_transformers_runs_models_of_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """In bfloat16, for that is what compressed-tensors dequantizes to."""
    pytest.importorskip("compressed_tensors")
    model = converted(language_model(dtype=dtype))
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


def test_loading_into_a_prepared_model_takes_its_observers_out(tmp_path: Path) -> None:
    model = converted(mlp())
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q", model=fp4pass.prepare(mlp(seed=1)))
    assert not any(m._forward_pre_hooks for m in loaded.modules())
    x = torch.randn(3, 64)
    assert torch.equal(loaded(x), model(x))


def test_formatting_is_no_damage(tmp_path: Path) -> None:
    model = converted(mlp())
    fp4pass.save(model, tmp_path / "q")
    change_own(lambda own: None)(tmp_path / "q")
    assert_same_bits(model, fp4pass.load(tmp_path / "q", model=mlp(seed=1)))


def test_a_float_model_is_not_overwritten(tmp_path: Path) -> None:
    model = language_model()
    model.save_pretrained(tmp_path / "q")
    with pytest.raises(CheckpointError, match="not a checkpoint of fp4pass"):
        fp4pass.save(converted(model), tmp_path / "q", overwrite=True)
    language_model(tmp_path / "q")


def test_models_of_one_config_do_not_reach_each_other(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    a, b = (transformers.Qwen3ForCausalLM(config).eval() for _ in range(2))
    converted(a, rules=[("lm_head", {})])
    assert a.config is a.model.config is not config and b.config is config
    assert config.tie_word_embeddings and not hasattr(config, "quantization_config")
    b.save_pretrained(tmp_path / "b")
    assert_same_bits(b, language_model(tmp_path / "b", dtype=torch.float32))
    fp4pass.save(a, tmp_path / "a")
    assert_same_bits(a, fp4pass.load(tmp_path / "a"))


def test_a_module_that_transformers_does_not_know_needs_a_skeleton(tmp_path: Path) -> None:
    fp4pass.save(converted(mlp()), tmp_path / "q")
    with pytest.raises(CheckpointError, match="model=model"):
        fp4pass.load(tmp_path / "q")
    with pytest.raises(CheckpointError, match="converted already"):
        fp4pass.load(tmp_path / "q", model=converted(mlp()))


SAVE_AND_DIE = """
    import os, shutil, sys
    import torch
    from torch import nn
    import fp4pass
    from fp4pass.checkpoint import safetensors_io as shards, saving as checkpoint

    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32, bias=False))
    fp4pass.convert(model, "nvfp4", "naive", weight_only=True)
    steps = 0

    def deadly(function, at):
        def step(*args, **kwargs):
            global steps
            steps += 1
            if steps == at:
                os._exit(9)
            return function(*args, **kwargs)
        return step

    for at, target in enumerate(sys.argv[1:], start=1):
        child = os.fork()
        if child == 0:
            os.rename, os.fsync = deadly(os.rename, at), deadly(os.fsync, at)
            os.open, shutil.rmtree = deadly(os.open, at), deadly(shutil.rmtree, at)
            shards.save_file = deadly(shards.save_file, at)
            checkpoint.write_json = deadly(checkpoint.write_json, at)
            fp4pass.save(model, target, overwrite=True)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_kill_at_any_step_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Each run dies before another of the calls that touch the disk; the last ones live."""
    old = converted(mlp(), method="naive")
    new = converted(mlp(seed=7), method="naive")
    targets = [tmp_path / f"run{at}" / "q" for at in range(20)]
    for target in targets:
        fp4pass.save(old, target)
    command = [sys.executable, "-c", textwrap.dedent(SAVE_AND_DIE), *map(str, targets)]
    codes = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert codes[:8] == ["9"] * 8 and codes[-1] == "0", codes
    interrupted = 0
    for code, target in zip(codes, targets, strict=True):
        if target.exists():
            found = fp4pass.load(target, model=mlp())
        else:
            with pytest.raises(CheckpointError, match="interrupted") as error:
                fp4pass.load(target, model=mlp())
            whole = [p for p in target.parent.iterdir() if str(p) in str(error.value)]
            found = fp4pass.load(whole[0], model=mlp())
            interrupted += 1
        packed = found[0].weight_packed
        expected = (new,) if code == "0" else (old, new)
        assert any(torch.equal(packed, m[0].weight_packed) for m in expected)
    assert interrupted


def test_a_tied_head_that_a_rule_takes_is_tied_no_more(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = converted(language_model(), rules=[("lm_head", {})])
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


def test_views_of_one_memory_keep_their_values(tmp_path: Path) -> None:
    model = converted(Views())
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q", model=Views()).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.float(), loaded[name].float()), name


class ExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"step": 1}


def test_a_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(64, 32), ExtraState(64, 32)])
    model = converted(model, rules=[("1", None)])
    with pytest.raises(CheckpointError, match=r"1\._extra_state: safetensors holds tensors only"):
        fp4pass.save(model, tmp_path / "q")
    assert not list(tmp_path.iterdir())


def test_compiled_models_are_saved_and_loaded_into(tmp_path: Path) -> None:
    model = torch.compile(converted(mlp()), backend="eager")
    fp4pass.save(model, tmp_path / "q")
    x = torch.randn(3, 64)
    skeleton = torch.compile(mlp(1), backend="eager")
    loaded = fp4pass.load(tmp_path / "q", model=skeleton)
    assert loaded is skeleton
    assert torch.equal(loaded(x), model(x))


def test_a_link_stays_and_what_cannot_be_renamed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = converted(mlp())
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    for overwrite in (False, True):
        fp4pass.save(model, link, overwrite=overwrite)
        assert link.is_symlink() and sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]
        assert_same_bits(fp4pass.load(link, model=mlp()), model)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError, match="current folder"):
        fp4pass.save(model, ".")


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_save_pretrained_writes_what_stock_transformers_loads(tmp_path: Path, fmt: str) -> None:
    pytest.importorskip("compressed_tensors")
    model = copy.deepcopy(converted(language_model(), fmt=fmt))
    assert json.loads(model.config.to_json_string())["quantization_config"]["ignore"] == ["lm_head"]
    model.save_pretrained(tmp_path / "q")
    fp4pass.save(model, tmp_path / "own")
    again = fp4pass.load(tmp_path / "own")
    again.save_pretrained(tmp_path / "again")
    ids = tokens()
    with torch.no_grad():
        for folder in ("q", "again"):
            assert torch.equal(language_model(tmp_path / folder)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("options", [{"block": 32}, {"weight_only": False}], ids=str)
def test_save_pretrained_refuses_what_has_no_layout(tmp_path: Path, options: Any) -> None:
    model = pickle.loads(pickle.dumps(converted(language_model(), **options)))
    with pytest.raises(CheckpointError, match=r"fp4pass\.save"):
        model.save_pretrained(tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_a_model_of_which_a_part_is_converted(tmp_path: Path) -> None:
    model = language_model()
    fp4pass.convert(model.model, method="naive", weight_only=True)
    with pytest.raises(StateError, match=r"part of the model is converted \(model.layers.0"):
        fp4pass.save(model, tmp_path / "out")
