"""Models of diffusers: converted, saved and loaded by its own methods, alone and in a pipeline."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import bits
from torch import Tensor, nn

import fp4pass
from fp4pass.errors import (
    CheckpointError,
    OptionError,
    ShapeError,
    StateError,
    UnreadError,
    VersionError,
)
from fp4pass.integrations import Fp4PassConfig, PackedConfig
from fp4pass.nn.linear import QuantizedLinear

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

from diffusers_models import MODELS, make, random, run  # noqa: E402

# Of what diffusers calls in torch and in itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers"),
    pytest.mark.filterwarnings("ignore:.*torch_dtype.*:FutureWarning"),
]

# A scheme, the dtype of the model, and whether it is calibrated.
SCHEMES = [
    ("nvfp4a16", torch.float32, False),
    ("nvfp4", torch.bfloat16, True),
    ("fp8", torch.bfloat16, False),
]


def float_folder(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    model, _ = make(name)
    model.to(dtype).save_pretrained(folder)
    return folder


def packed(
    name: str, fmt: str = "nvfp4a16", *, folder: Path | None = None, rules: Any = (), **options: Any
) -> Any:
    model, _ = make(name)
    if folder is not None:
        model = type(model).from_pretrained(folder, **options)
    return fp4pass.convert(model, fmt, "sse", rules=rules, progress=False)


def assert_same(a: nn.Module, b: nn.Module) -> None:
    """Classes, dtypes and every bit of two models."""
    x, y = a.state_dict(), b.state_dict()
    assert x.keys() == y.keys()
    for name, tensor in x.items():
        assert (tensor.dtype, tensor.shape) == (y[name].dtype, y[name].shape), name
        assert torch.equal(bits(tensor), bits(y[name])), name
    for (name, one), other in zip(a.named_modules(), b.modules(), strict=True):
        assert type(one) is type(other), name
        if isinstance(one, QuantizedLinear):
            kinds = ((each.weight_dtype, each.config.scheme) for each in (one, other))
            assert len({*kinds}) == 1, name


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MODELS)
def test_every_linear_is_packed_and_computes_as_dense(name: str) -> None:
    model, call = make(name)
    linears = {n for n, each in model.named_modules() if isinstance(each, nn.Linear)}
    before = run(model, call)
    fp4pass.convert(model, "nvfp4a16", "sse", progress=False)
    report = fp4pass.report(model)
    assert {row.name for row in report.converted} == linears
    reasons = {row.skip_reason for row in report.skipped}
    assert all(reasons) and bool(reasons) == (name in ("wan", "ltx", "unet", "hidream"))
    after = run(model, call)
    # Sums in float32 of the same products, in another order.
    dense = fp4pass.dequantize(model)
    torch.testing.assert_close(after, run(dense, call), rtol=1e-4, atol=1e-5)
    assert 0 < (after - before).norm() < 0.3 * before.norm()


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MODELS)
def test_save_and_load_by_its_own_methods(name: str, tmp_path: Path) -> None:
    model = packed(name)
    _, call = make(name)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len([*(tmp_path / "sharded").glob("*.safetensors")]) > 1
    for folder in ("whole", "sharded"):
        loaded = type(model).from_pretrained(tmp_path / folder)
        assert_same(loaded, model)
        assert torch.equal(run(loaded, call), run(model, call))
        one, two = fp4pass.report(loaded), fp4pass.report(model)
        assert [(row.name, row.shape, row.bits) for row in one.rows] == [
            (row.name, row.shape, row.bits) for row in two.rows
        ]
        assert [row.skip_reason for row in one.skipped] == [row.skip_reason for row in two.skipped]


@pytest.mark.parametrize(
    ("save", "load"),
    [
        ({}, {"device_map": "auto"}),
        ({"variant": "fp4"}, {"variant": "fp4"}),
        ({"safe_serialization": False}, {"use_safetensors": False}),
    ],
    ids=str,
)
def test_options_of_its_methods(save: dict[str, Any], load: dict[str, Any], tmp_path: Path) -> None:
    model = packed("sd3")
    model.save_pretrained(tmp_path, **save)
    assert_same(type(model).from_pretrained(tmp_path, **load), model)


def shared_scales(model: nn.Module) -> list[list[str]]:
    """The layers of each tensor that is a scale of inputs."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear) and module.input_global_scale is not None:
            found.setdefault(id(module.input_global_scale), []).append(name)
    return list(found.values())


@pytest.mark.parametrize(("fmt", "dtype", "calibrated"), SCHEMES)
def test_every_scheme_comes_back(
    fmt: str, dtype: torch.dtype, calibrated: bool, tmp_path: Path
) -> None:
    """Wan has layers in float32 beside those in the dtype of the model."""
    _, call = make("wan", dtype)
    float_folder("wan", tmp_path / "float")
    kind = diffusers.WanTransformer3DModel
    model = kind.from_pretrained(tmp_path / "float", dtype=dtype)
    if calibrated:
        fp4pass.prepare(model, "sse")
        fp4pass.calibrate(model, [call], progress=False)
    fp4pass.convert(model, fmt, "sse", progress=False)
    kinds = {each.weight_dtype for each in model.modules() if isinstance(each, QuantizedLinear)}
    assert kinds == {torch.float32, dtype}
    model.save_pretrained(tmp_path / "packed")
    loaded = kind.from_pretrained(tmp_path / "packed", dtype=dtype)
    assert_same(loaded, model)
    assert torch.equal(run(loaded, call), run(model, call))
    # Layers that read one input have one tensor for its scale, so that it is quantized once.
    assert shared_scales(loaded) == shared_scales(model)
    assert calibrated is any(len(names) > 1 for names in shared_scales(model))
    loaded.save_pretrained(tmp_path / "again")
    assert_same(kind.from_pretrained(tmp_path / "again", dtype=dtype), model)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    first = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"] == first["quantization_config"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("shards", ["10GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packing_while_loading_is_load_then_convert(
    shards: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, _ = make("wan")
    model.save_pretrained(tmp_path, max_shard_size=shards)
    rules = [("blocks.0.ffn.*", {"fmt": "mxfp4a16"}), ("proj_out", None)]
    config = Fp4PassConfig("nvfp4a16", rules=rules)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=config, dtype=dtype)
    other = packed("wan", folder=tmp_path, rules=rules, dtype=dtype)
    assert_same(loaded, other)
    assert fp4pass.report(loaded) == fp4pass.report(other)
    loaded.save_pretrained(tmp_path / "packed")
    assert_same(type(model).from_pretrained(tmp_path / "packed", dtype=dtype), other)


def test_weights_are_packed_on_their_way(tmp_path: Path, monkeypatch: Any) -> None:
    from fp4pass.integrations.as_read import PackedAsRead

    left: list[int] = []
    complete = PackedAsRead.complete
    monkeypatch.setattr(
        PackedAsRead,
        "complete",
        lambda self, model: (left.append(len(self.remaining())), complete(self, model))[1],
    )
    folder = float_folder("flux", tmp_path)
    diffusers.FluxTransformer2DModel.from_pretrained(folder, quantization_config=Fp4PassConfig())
    assert left == [0]


def test_it_is_dense_again(tmp_path: Path) -> None:
    model = packed("sd3")
    model.save_pretrained(tmp_path / "packed")
    loaded = type(model).from_pretrained(tmp_path / "packed")
    for each in (model, loaded):
        each.dequantize()
        assert not any(isinstance(part, QuantizedLinear) for part in each.modules())
        each.save_pretrained(tmp_path / "dense")
        assert "quantization_config" not in (tmp_path / "dense" / "config.json").read_text()
        assert_same(type(model).from_pretrained(tmp_path / "dense"), each)
    assert_same(model, loaded)


def test_adapters_are_saved_by_themselves(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, (_, call) = packed("flux"), make("flux")
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False)
    model.add_adapter(config)
    adapted = run(model, call)
    with pytest.raises(StateError, match=r"save_lora_adapter"):
        model.save_pretrained(tmp_path)
    model.save_lora_adapter(tmp_path)
    again, name = packed("flux"), "pytorch_lora_weights.safetensors"
    again.load_lora_adapter(tmp_path, prefix=None, weight_name=name)
    assert torch.equal(run(again, call), adapted)


PIPELINES = {"flux": "FluxPipeline", "sd3": "StableDiffusion3Pipeline", "ltx": "LTXPipeline"}


def around(model: Any, name: str) -> Any:
    """A pipeline with nothing but its transformer."""
    cls = getattr(diffusers, PIPELINES[name])
    parts = inspect.signature(cls).parameters
    return cls(**{**dict.fromkeys(parts), "transformer": model})


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_pipelines_load_a_lora(name: str) -> None:
    peft = pytest.importorskip("peft")
    model, (_, call) = packed(name), make(name)
    dense = fp4pass.dequantize(copy.deepcopy(model))
    before = run(model, call)
    given = copy.deepcopy(dense)
    given.add_adapter(
        peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v"])
    )
    lora = {f"transformer.{n}": each for n, each in peft.get_peft_model_state_dict(given).items()}
    outputs = []
    for each in (dense, model):
        pipe = around(each, name)
        for adapter in ("first", "second"):
            pipe.load_lora_weights(dict(lora), adapter_name=adapter)
        pipe.set_adapters(["second"], 0.5)
        outputs.append(run(each, call))
        pipe.unload_lora_weights()
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    assert (outputs[1] - before).norm() > 1e-3 * before.norm()
    assert torch.equal(run(model, call), before)
    assert not any(key.endswith("to_q.weight") for key in model.state_dict())


def test_a_lora_of_other_widths() -> None:
    pytest.importorskip("peft")
    model, (_, call) = packed("flux"), make("flux")
    dense = fp4pass.dequantize(copy.deepcopy(model))
    name, rank = "transformer.x_embedder", 2
    lora = {f"{name}.lora_B.weight": random(64, rank), f"{name}.lora_A.weight": random(rank, 12)}
    for each in (dense, model):
        around(each, "flux").load_lora_weights(dict(lora))
    torch.testing.assert_close(run(model, call), run(dense, call), rtol=1e-4, atol=1e-4)
    lora[f"{name}.lora_A.weight"] = random(rank, 32)
    with pytest.raises(ShapeError, match=r"for 32, which widens .*\('x_embedder', None\)"):
        around(packed("flux"), "flux").load_lora_weights(dict(lora))
    wide = packed("flux", rules=[("x_embedder", None)])
    around(wide, "flux").load_lora_weights(dict(lora))
    assert wide.x_embedder.in_features == wide.config.in_channels == 32


# ---- pipelines ----------------------------------------------------------------------------------

NONE = dict.fromkeys(["vae", "tokenizer", "tokenizer_2", "text_encoder_2"])


def pipeline() -> Any:
    torch.manual_seed(0)
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    made = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=text.eval(),
        transformer=make("flux")[0],
        **NONE,
    )
    made.set_progress_bar_config(disable=True)
    return made


def image(made: Any) -> Tensor:
    made.set_progress_bar_config(disable=True)
    _, call = make("flux")
    return made(
        prompt_embeds=call["encoder_hidden_states"],
        pooled_prompt_embeds=call["pooled_projections"],
        height=64,
        width=64,
        num_inference_steps=2,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).images


def test_a_pipeline_saves_and_loads_packed_models(tmp_path: Path) -> None:
    made = pipeline()
    # A pipeline calibrates by being run.
    fp4pass.prepare(made.transformer, "hessian")
    image(made)
    fp4pass.convert(made.transformer, "nvfp4a16", progress=False)
    fp4pass.convert(made.text_encoder, "nvfp4a16", "sse", progress=False)
    made.save_pretrained(tmp_path, max_shard_size="20KB")
    # The pipeline passes its options on.
    assert len([*(tmp_path / "transformer").glob("*.safetensors")]) > 1
    config = diffusers.PipelineQuantizationConfig(quant_mapping={"text_encoder": PackedConfig()})
    loaded = diffusers.DiffusionPipeline.from_pretrained(
        tmp_path, quantization_config=config, **NONE
    )
    assert_same(loaded.transformer, made.transformer)
    assert_same(loaded.text_encoder, made.text_encoder)
    assert torch.equal(image(loaded), image(made))
    again = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path, subfolder="transformer")
    assert_same(again, made.transformer)


def test_a_pipeline_is_no_model() -> None:
    with pytest.raises(OptionError, match="got FluxPipeline"):
        fp4pass.convert(pipeline(), "nvfp4a16", "sse")


# ---- errors -------------------------------------------------------------------------------------


def edited(folder: Path, change: Any) -> None:
    """Change the quantization_config of a folder."""
    path = folder / "config.json"
    data = json.loads(path.read_text())
    change(data["quantization_config"])
    path.write_text(json.dumps(data))


def test_damaged_folders(tmp_path: Path) -> None:
    model = packed("sd3")
    kind, weights = type(model), "diffusion_pytorch_model.safetensors"
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / weights)
    name = "transformer_blocks.0.attn.to_q.weight_scale"

    save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / weights)
    with pytest.raises(CheckpointError, match=r"lacks .*to_q\.weight_scale.*Copy it again"):
        kind.from_pretrained(tmp_path)
    save_file({**tensors, name: tensors[name][:, :1].contiguous()}, tmp_path / weights)
    with pytest.raises(CheckpointError, match=r"to_q\.weight_scale: expected \(64, 4\)"):
        kind.from_pretrained(tmp_path)
    save_file(tensors, tmp_path / weights)

    edited(tmp_path, lambda declared: declared["schemes"][0]["layers"].append("pos_embed"))
    with pytest.raises(CheckpointError, match=r"pos_embed: expected a linear layer.*PatchEmbed"):
        kind.from_pretrained(tmp_path)
    edited(tmp_path, lambda declared: declared.pop("schemes") and declared.pop("recipe"))
    with pytest.raises(CheckpointError, match=r"KeyError\('schemes'\)\. Copy the folder again"):
        kind.from_pretrained(tmp_path)


def test_what_cannot_be(tmp_path: Path) -> None:
    model = packed("sd3")
    with pytest.raises(OptionError, match=r"use_flashpack: expected False"):
        model.save_pretrained(tmp_path, use_flashpack=True)
    model.save_pretrained(tmp_path)
    with pytest.raises(OptionError, match=r"device_map: .*'disk'"):
        type(model).from_pretrained(tmp_path, device_map={"": "disk"})
    with pytest.raises(UnreadError, match=r"SD3Transformer2DModel\.from_pretrained"):
        fp4pass.load(tmp_path, model=make("sd3")[0])
    with pytest.raises(OptionError, match="calibration data"):
        type(model).from_pretrained(tmp_path, quantization_config=Fp4PassConfig(method="hessian"))
    model.transformer_blocks[0].attn.to_q = nn.Linear(64, 64)
    with pytest.raises(CheckpointError, match=r"to_q: the model has changed"):
        model.save_pretrained(tmp_path)


def test_a_part_that_is_converted_is_refused(tmp_path: Path) -> None:
    model, _ = make("sd3")
    fp4pass.convert(model.transformer_blocks, "nvfp4a16", "sse", progress=False)
    with pytest.raises(StateError, match="save_pretrained of SD3Transformer2DModel would write"):
        model.save_pretrained(tmp_path)


def test_a_folder_without_a_weight_cannot_be_packed(tmp_path: Path) -> None:
    folder = float_folder("sd3", tmp_path)
    path = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    del tensors["proj_out.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"no weights of .*proj_out"):
        diffusers.SD3Transformer2DModel.from_pretrained(folder, quantization_config=Fp4PassConfig())


def test_older_versions_are_refused(monkeypatch: Any) -> None:
    from fp4pass import _compat

    found = _compat.installed_version
    monkeypatch.setattr(
        _compat, "installed_version", lambda name: "0.39" if name == "diffusers" else found(name)
    )
    with pytest.raises(VersionError, match=r"diffusers: expected version .*fp4pass\[diffusers\]"):
        packed("sd3")
