"""Folders of weights in 4 bits whose inputs are in FP8: written, declared, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fp8_folders
import pytest
import torch
from native import change_config
from safetensors.torch import load_file, save_file

import fp4pass
from fp4pass import ops
from fp4pass.checkpoint import open_checkpoint
from fp4pass.errors import CheckpointError

transformers = pytest.importorskip("transformers")

IDS = torch.arange(48).view(2, 24)
RULES: list[Any] = [("lm_head", None)]
_TOKEN = {"strategy": "token", "dynamic": True}
_GROUP = {"strategy": "group", "group_size": 128, "dynamic": True}

CASES = [
    ("mxfp4a8", "compressed-tensors"),
    ("mxfp4a8_block", "compressed-tensors"),
    ("mxfp4a8_tensor", "modelopt"),
    ("mxfp4a8_tensor", "quark"),
    ("nvfp4a8", "fp4pass"),
    ("nvfp4a8_tensor", "fp4pass"),
]


def packed(scheme: str) -> Any:
    model = fp8_folders.dense_model(256)
    if scheme.endswith("tensor"):
        model = fp4pass.prepare(model)
        model(IDS)
    return fp4pass.convert(model, scheme, "sse", rules=RULES)


def declared(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore:The folder has no tokenizer")
@pytest.mark.parametrize(("scheme", "layout"), CASES)
def test_it_is_written_and_read_to_the_bit(scheme: str, layout: str, tmp_path: Path) -> None:
    model, folder = packed(scheme), tmp_path / "q"
    fp4pass.save(model, folder, layout=layout)  # type: ignore[arg-type]
    own = fp4pass.load(folder, progress=False)
    if layout != "fp4pass":
        # What others read says it all.
        (folder / "fp4pass.json").unlink()
    assert open_checkpoint(folder).layout.name == layout
    read = fp4pass.load(folder, progress=False)
    bits = {name: tensor.view(torch.uint8) for name, tensor in model.state_dict().items()}
    for again in (own, read):
        found = again.state_dict()
        assert found.keys() == bits.keys()
        assert all(torch.equal(found[n].view(torch.uint8), each) for n, each in bits.items())
    layer, before = (each.model.layers[1].mlp.down_proj for each in (read, model))
    assert layer.config.scheme == scheme
    x = torch.randn(5, 256).bfloat16()
    assert torch.equal(layer(x), before(x))
    assert (layer.input_global_scale is not None) is scheme.endswith("tensor")


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore:The folder has no tokenizer|transformers cannot load this")
@pytest.mark.parametrize(("scheme", "layout"), [CASES[0], CASES[2]])
def test_experts_have_such_inputs(scheme: str, layout: str, tmp_path: Path) -> None:
    model: Any = fp8_folders.mixture_model()
    batches = torch.randint(0, 160, (8, 48), generator=torch.Generator().manual_seed(0))
    model = fp4pass.convert(model, scheme, "sse", rules=RULES, data=[batches], progress=False)
    fp4pass.save(model, tmp_path / "q", layout=layout)  # type: ignore[arg-type]
    (tmp_path / "q" / "fp4pass.json").unlink()
    read: Any = fp4pass.load(tmp_path / "q", progress=False)
    before, after = (each.model.layers[1].mlp.experts for each in (model, read))
    ids = torch.tensor([[0, 3], [2, 1], [1, 0]])
    x = torch.randn(3, 128).bfloat16()
    for name in ("gate_up_proj", "down_proj"):
        old, new = before._modules[name], after._modules[name]
        assert new.config.scheme == scheme
        y = new(x, ids)
        assert torch.equal(y, old(x, ids))
        # An expert is a linear layer with these inputs.
        dense = new.weight_for(x)
        codes, scale = ops.quantize(x, dense.input_global_scale, new.config.input_format.key)
        stored = (dense.packed[3], dense.scale[3], None, None)
        wanted = ops.linear_quantized(
            x, codes, scale, None, *stored, "mxfp4", 0, "input", new.config.inputs
        )
        assert torch.equal(y[0, 1], wanted[0])


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:The folder has no tokenizer")
def test_compressed_tensors_knows_what_is_declared(tmp_path: Path) -> None:
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    for scheme, inputs in (("mxfp4a8", _TOKEN), ("mxfp4a8_block", _GROUP)):
        fp4pass.save(packed(scheme), tmp_path / scheme)
        group = declared(tmp_path / scheme)["config_groups"]["group_0"]
        theirs = schemes.QuantizationScheme.model_validate(group)
        args = theirs.input_activations
        assert (args.num_bits, args.type) == (8, "float")
        assert {key: getattr(args, key) for key in inputs} == inputs
        if scheme == "mxfp4a8_block" and "MXFP4XFP8" in schemes.PRESET_SCHEMES:
            preset = schemes.preset_name_to_scheme("MXFP4XFP8", ["Linear"])
            assert theirs.weights == preset.weights
            assert args.model_dump(exclude={"scale_dtype", "zp_dtype", "observer"}) == (
                preset.input_activations.model_dump(exclude={"scale_dtype", "zp_dtype", "observer"})
            )


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore:The folder has no tokenizer")
def test_modelopt_with_weights_in_nvfp4_is_read(tmp_path: Path) -> None:
    """W4A8_NVFP4_FP8: blocks of 32, and one scale of inputs."""
    model = fp4pass.convert(fp8_folders.dense_model(256), "nvfp4a16:32", "naive", rules=RULES)
    fp4pass.save(model, tmp_path / "own", layout="fp4pass")
    folder = tmp_path / "theirs"
    fp8_folders.dense_model(256).save_pretrained(folder)
    stored = load_file(tmp_path / "own" / "fp4pass.safetensors")
    layers = {n.removesuffix(".weight_packed") for n in stored if n.endswith("packed")}
    tensors = {n: t for n, t in stored.items() if n.rpartition(".")[0] not in layers}
    for name in layers:
        tensors[f"{name}.weight"] = stored[f"{name}.weight_packed"]
        tensors[f"{name}.weight_scale"] = stored[f"{name}.weight_scale"].view(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_2"] = 1 / stored[f"{name}.weight_global_scale"].reshape(())
        tensors[f"{name}.input_scale"] = torch.tensor(3.0 / 448)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    entry = {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8", "group_size": 32}
    change_config(folder, quantization_config={**entry, "ignore": ["lm_head"]})
    read: Any = fp4pass.load(folder, progress=False)
    layer: Any = read.model.layers[0].self_attn.q_proj
    assert layer.config.scheme == "nvfp4a8_tensor:32"
    # The scale of the weight is a power of two, and so divides, whatever that of the input is.
    assert layer.config.multiplies is False
    before: Any = model.model.layers[0].self_attn.q_proj  # type: ignore[union-attr, operator]
    assert torch.equal(layer.weight, before.weight)
    # FP8 inputs multiply by the one stored scale, whichever way the weight's goes.
    assert torch.equal(layer.input_global_scale, torch.tensor([3.0 / 448]))
    x = torch.randn(3, 128).bfloat16()
    numbers = (x.float() / (3.0 / 448)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    wanted = numbers * (3.0 / 448) @ layer.weight_as(torch.float32).t()
    torch.testing.assert_close(layer(x).float(), wanted, rtol=2**-7, atol=2**-7)
    # It is written by its kernels' rules, which ours are not.
    with pytest.raises(CheckpointError, match="modelopt has no place for nvfp4"):
        fp4pass.save(read, tmp_path / "again", layout="modelopt")


def test_one_scale_of_inputs_is_there_where_it_is_declared(tmp_path: Path) -> None:
    model = fp4pass.convert(fp8_folders.dense_model(256), "mxfp4a8_tensor", "naive", rules=RULES)
    for layout in ("modelopt", "quark"):
        wanted = f"{layout} has no place for mxfp4a8_tensor before calibration"
        with pytest.raises(CheckpointError, match=wanted):
            fp4pass.save(model, tmp_path / "q", layout=layout)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The folder has no tokenizer")
def test_a_scale_that_no_input_has_is_not_taken_for_one(tmp_path: Path) -> None:
    fp4pass.save(packed("mxfp4a8"), tmp_path / "q")
    (tmp_path / "q" / "fp4pass.json").unlink()
    file = tmp_path / "q" / "model.safetensors"
    name = "model.layers.0.self_attn.q_proj.input_global_scale"
    save_file({**load_file(file), name: torch.tensor([5.0])}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name}: expected none for inputs of mxfp4a8"):
        fp4pass.load(tmp_path / "q", progress=False)


def test_other_inputs_have_no_place(tmp_path: Path) -> None:
    for scheme, layout in (("nvfp4a8", "modelopt"), ("mxfp4a8", "modelopt"), ("mxfp4a8", "quark")):
        with pytest.raises(CheckpointError, match=f"{layout} has no place for {scheme}"):
            fp4pass.save(packed(scheme), tmp_path / "q", layout=layout)  # type: ignore[arg-type]
    assert not (tmp_path / "q").exists()
