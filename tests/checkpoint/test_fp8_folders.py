"""FP8 and mixed folders of other libraries: read packed, checked, and written in other layouts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fp8_folders
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import change, change_json

import fp4pass
from fp4pass.checkpoint import open_checkpoint, transcode
from fp4pass.doctor import check_folder
from fp4pass.errors import CheckpointError, UnreadError
from fp4pass.nn.linear import PACKED, SCALE

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

# The schemes of attention and of the rest, and the layouts that hold both.
_CT, _MO, _FINE = "compressed-tensors", "modelopt", "finegrained-fp8"
SCHEMES = {
    "ct-row": ("fp8", "fp8", (_CT, _MO)),
    "ct-row-a16": ("fp8a16", "fp8a16", (_CT,)),
    "ct-tensor": ("fp8_tensor", "fp8_tensor", (_CT, _MO, _FINE)),
    "ct-block": ("fp8_block", "fp8_block", (_CT, _FINE)),
    "ct-mxfp8": ("mxfp8", "mxfp8", (_CT, _MO)),
    "ct-mixed": ("fp8", "nvfp4a16", (_CT, _MO)),
    "mo-tensor": ("fp8_tensor", "fp8_tensor", (_CT, _MO, _FINE)),
    "mo-row": ("fp8", "fp8", (_CT, _MO)),
    "mo-block": ("fp8_blocka16", "fp8_blocka16", (_CT, _MO)),
    "mo-mxfp8": ("mxfp8", "mxfp8", (_CT, _MO)),
    "mo-mixed": ("fp8_tensor", "nvfp4", (_CT, _MO)),
    "finegrained": ("fp8_block", "fp8_block", (_CT, _FINE)),
    "ct-w4a8": ("mxfp4a8", "mxfp4a8", (_CT,)),
    "ct-w4a8-block": ("mxfp4a8_block", "mxfp4a8_block", (_CT,)),
    "mo-w4a8": ("mxfp4a8_tensor", "mxfp4a8_tensor", (_MO,)),
}
IDS = torch.arange(48).view(2, 24)


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Each kind of folder, and its dense weights in float32."""
    root, found = tmp_path_factory.mktemp("fp8"), {}
    for kind in SCHEMES:
        dense = fp8_folders.make(fp8_folders.dense_model(), root / kind, kind)
        found[kind] = (root / kind, dense)
    return found


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", SCHEMES)
def test_a_folder_is_read_to_the_bit(kind: str, folders: Any) -> None:
    folder, dense = folders[kind]
    attention, rest, _ = SCHEMES[kind]
    reader = open_checkpoint(folder)
    assert reader.layers.keys() == dense.keys()
    findings = check_folder(folder, progress=False).findings
    found = [each for each in findings if each.kind != "tokenizer-missing"]
    # Gate and up have a global scale each in mixed ones.
    assert not found or "mixed" in kind
    model = fp4pass.load(folder, progress=False)
    for name, weight in dense.items():
        module = model.get_submodule(name)
        assert module.config.scheme == (attention if "self_attn" in name else rest)
        if module.config.fmt == "nvfp4":
            # Of a global scale and its reciprocal one is rounded.
            torch.testing.assert_close(module.weight.float(), weight, rtol=1 / 128, atol=0)
        else:
            assert torch.equal(reader.dense(name, torch.float32), weight)
            assert torch.equal(module.weight, weight.bfloat16())
        static = kind in ("ct-tensor", "mo-tensor", "mo-w4a8") or (
            kind == "mo-mixed" and "self" in name
        )
        assert reader.layers[name].static_inputs is static
        if static:
            assert torch.equal(module.input_global_scale, torch.tensor([3.0 / 448]))
    assert logits(model).isfinite().all()


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", SCHEMES)
def test_a_folder_is_written_in_each_layout_that_holds_it(
    kind: str, folders: Any, tmp_path: Path
) -> None:
    folder, dense = folders[kind]
    before = open_checkpoint(folder)
    for layout in (_CT, _MO, _FINE):
        if layout not in SCHEMES[kind][2]:
            with pytest.raises(CheckpointError, match=f"{layout} has "):
                transcode(folder, tmp_path / layout, layout, progress=False)
            continue
        transcode(folder, tmp_path / layout, layout, progress=False)
        after = open_checkpoint(tmp_path / layout)
        assert after.layout.name == layout
        for name in dense:
            assert after.layers[name].scheme == before.layers[name].scheme
            old, new = before.parts(name), after.parts(name)
            assert torch.equal(old[PACKED], new[PACKED]) and torch.equal(old[SCALE], new[SCALE])
            if after.layers[name].fmt.key != "nvfp4":
                assert torch.equal(after.dense(name, torch.float32), dense[name])
    transcode(folder, tmp_path / "bf16", "bf16", progress=False)
    tensors = load_file(tmp_path / "bf16" / "model.safetensors")
    assert not [name for name in tensors if "scale" in name]
    for name in dense:
        assert torch.equal(tensors[f"{name}.weight"], before.dense(name, torch.bfloat16))


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["ct-row", "ct-row-a16", "ct-tensor", "ct-block"])
def test_stock_transformers_gives_our_logits(kind: str, tmp_path: Path) -> None:
    """In float32, for in bfloat16 it rounds the scales of inputs to that."""
    # It reads no inputs that do not fill whole blocks.
    folder = tmp_path / "q"
    fp8_folders.make(fp8_folders.dense_model(256), folder, kind)
    change_to_bfloat16(folder)
    ours = logits(fp4pass.load(folder, progress=False).float())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(ours, logits(theirs), rtol=0, atol=1e-5)


def change_to_bfloat16(folder: Path) -> None:
    """Round scales to bfloat16, as llm-compressor does: stock transformers makes them so."""
    path = folder / "model.safetensors"
    tensors = {
        name: tensor.bfloat16() if name.endswith("_scale") and tensor.dtype.itemsize > 1 else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", ["mo-mixed", "mo-tensor", "finegrained", "ct-mxfp8", "ct-row"])
def test_experts_are_read_to_the_bit(kind: str, tmp_path: Path) -> None:
    ignore = ("lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate")
    dense = fp8_folders.make(fp8_folders.mixture_model(), tmp_path / "m", kind, ignore)
    model = fp4pass.load(tmp_path / "m", progress=False)
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        experts = model.get_submodule(path)
        for key, parts in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("down_proj", ("down_proj",)),
        ):
            rows = [torch.cat([dense[f"{path}.{e}.{part}"] for part in parts]) for e in range(4)]
            stack = getattr(experts, key)
            assert torch.equal(stack.weight, torch.stack(rows).bfloat16())
    assert logits(model).isfinite().all()


def test_what_is_not_read_says_so(folders: Any, tmp_path: Path) -> None:
    def copy(kind: str, name: str) -> Path:
        return Path(shutil.copytree(folders[kind][0], tmp_path / name))

    name = "model.layers.0.self_attn.q_proj"
    folder = copy("mo-tensor", "no-input-scale")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"{name}.input_scale"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"q_proj.input_scale is missing"):
        fp4pass.load(folder, progress=False)
    folder = copy("finegrained", "other-blocks")
    change_json(
        folder / "config.json",
        lambda data: data["quantization_config"].update(weight_block_size=[64]),
    )
    with pytest.raises(UnreadError, match=r"expected weight_block_size .128, 128. or none"):
        open_checkpoint(folder)
    folder = copy("finegrained", "damaged")

    def damage(tensor: Any) -> Any:
        bits = tensor.view(torch.uint8).clone()
        bits[0, 0] = 0x7F
        return bits.view(tensor.dtype)

    change(folder, f"{name}.weight", damage)
    with pytest.raises(CheckpointError, match=r"q_proj.weight: it holds NaN"):
        fp4pass.load(folder, progress=False)
    folder = copy("ct-row", "other-config")
    change_json(
        folder / "config.json",
        lambda data: data["quantization_config"]["config_groups"]["group_0"]["weights"].update(
            strategy="group", group_size=None
        ),
    )
    with pytest.raises(UnreadError, match="expected a format of"):
        open_checkpoint(folder)
