"""Weights that another library quantized in a way that is not read are named, never copied."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from small_models import Saved, change_json, language_model, packed_model
from torch import Tensor, nn

import fp4pass
from fp4pass.checkpoint import open_checkpoint, transcode
from fp4pass.checkpoint.source_files import unread_layers
from fp4pass.errors import CheckpointError, UnreadError

transformers = pytest.importorskip("transformers")

LAYER = "model.layers.0.self_attn.q_proj"
WEIGHT = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
FP8 = WEIGHT.to(torch.float8_e4m3fn)
ONE = torch.ones(256, 1)
CODES = torch.ones(32, 256, dtype=torch.int32)

# What stands in place of a layer's tensors, by the last parts of their names.
OTHERS: dict[str, dict[str, Tensor]] = {
    "FP8 by rows": {"weight": FP8, "weight_scale": ONE},
    "FP8 with inputs": {"weight": FP8, "weight_scale": ONE[0], "input_scale": ONE[0]},
    "FP8 in blocks": {"weight": FP8, "weight_scale_inv": ONE[:4].reshape(2, 2)},
    "FP8 alone": {"weight": FP8},
    "FP8 of other range": {"weight": WEIGHT.to(torch.float8_e5m2), "weight_scale": ONE},
    "INT8": {"weight": WEIGHT.to(torch.int8), "weight_scale": ONE},
    "INT8 with zeros": {"weight": WEIGHT.to(torch.int8), "weight_zero_point": ONE},
    "INT4": {"weight_packed": CODES, "weight_scale": ONE, "weight_shape": CODES[0, :2]},
    "rounded and not packed": {"weight": WEIGHT.bfloat16(), "weight_scale": ONE},
    "AWQ": {"qweight": CODES, "qzeros": CODES, "scales": ONE},
    "GPTQ": {"qweight": CODES, "qzeros": CODES, "scales": ONE, "g_idx": CODES[0]},
    "bitsandbytes": {"weight": FP8.view(torch.uint8), "weight.absmax": ONE[0]},
    "LLM.int8": {"weight": WEIGHT.to(torch.int8), "SCB": ONE[0]},
    "torchao": {"_weight_qdata": FP8.view(torch.int8), "_weight_scale": ONE},
}


def replaced(folder: Path, tensors: dict[str, Tensor], layers: tuple[str, ...] = (LAYER,)) -> Path:
    """Put tensors in place of those of layers."""
    found = load_file(folder / "model.safetensors")
    kept = {n: t for n, t in found.items() if not n.startswith(tuple(f"{x}." for x in layers))}
    for layer in layers:
        kept |= {f"{layer}.{last}": tensor.clone() for last, tensor in tensors.items()}
    save_file(kept, folder / "model.safetensors")
    return folder


def assert_refused(folder: Path, *words: str) -> None:
    """By every reader, with these words; nothing is written."""
    target = folder.parent / "written"
    reads: tuple[Callable[[], Any], ...] = (
        lambda: fp4pass.load(folder),
        lambda: transcode(folder, target, "bf16"),
    )
    for read in reads:
        with pytest.raises(UnreadError) as error:
            read()
        for word in (str(folder), *words):
            assert word in str(error.value), error.value
    assert not target.exists()


@pytest.mark.core
@pytest.mark.parametrize("what", OTHERS)
def test_what_other_libraries_write_is_known_by_its_tensors(what: str) -> None:
    tensors = {f"{LAYER}.{last}": tensor.clone() for last, tensor in OTHERS[what].items()}
    tensors["model.norm.weight"] = ONE[:, 0].bfloat16()
    shapes = tensor_shapes(tensors)
    assert list(unread_layers(shapes)) == [LAYER]
    assert not unread_layers(shapes, read=tensors)


def tensor_shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    """What a file says of tensors."""
    return {
        name: (tuple(header["shape"]), header["dtype"])
        for name, header in json.loads(save(tensors)[8:].split(b"}}", 1)[0] + b"}}").items()
    }


@pytest.mark.parametrize(
    ("layout", "what"), [("compressed-tensors", "INT4"), ("modelopt", "FP8 with inputs")]
)
def test_a_layer_that_no_layout_reads_is_named(foreign_copy: Saved, layout: str, what: str) -> None:
    folder = replaced(foreign_copy("nvfp4", True, layout), OTHERS[what])
    assert_refused(folder, "does not read 1 of its quantized layers: ", LAYER)


def test_the_count_and_the_tensors_are_named(foreign_copy: Saved) -> None:
    folder = foreign_copy()
    layers = tuple(f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "qkvo")
    replaced(folder, OTHERS["INT8"], layers)

    def declare(config: Any) -> None:
        group = {"targets": list(layers), "format": "int-quantized", "weights": {}}
        config["quantization_config"]["config_groups"]["group_1"] = group

    change_json(folder / "config.json", declare)
    assert_refused(folder, "does not read 8 of", "and 5 more")
    assert_refused(folder, f"{layers[1]} has weight I8, weight_scale F32")


def test_codes_out_of_order_are_not_read_as_if_in_order(foreign_copy: Saved) -> None:
    folder = foreign_copy()
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.weight_g_idx"] = torch.arange(256, dtype=torch.int32).flip(0)
    save_file(tensors, folder / "model.safetensors")
    assert_refused(folder, LAYER, "weight_g_idx")


@pytest.mark.parametrize("last", ["", "_scale_inv"])
def test_a_float_source_with_fp8_weights_is_no_float_source(tmp_path: Path, last: str) -> None:
    """No config says that they are quantized; transformers would cast them as they are."""
    language_model().save_pretrained(tmp_path / "f")
    tensors = load_file(tmp_path / "f" / "model.safetensors")
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].to(torch.float8_e4m3fn)
    if last:
        tensors[f"{LAYER}.weight{last}"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "f" / "model.safetensors", metadata={"format": "pt"})
    from fp4pass.integrations.transformers import Fp4PassConfig

    cls = transformers.AutoModelForCausalLM
    for read in (
        lambda: fp4pass.quantize_checkpoint(tmp_path / "f", tmp_path / "q", method="sse"),
        lambda: cls.from_pretrained(tmp_path / "f", quantization_config=Fp4PassConfig()),
        lambda: open_checkpoint(tmp_path / "f"),
    ):
        with pytest.raises(UnreadError, match=LAYER):
            read()
    assert not (tmp_path / "q").exists()


class Fp8Linear(nn.Linear):
    """As transformers has it, in memory."""

    def __init__(self) -> None:
        super().__init__(256, 256, bias=False)
        self.weight = nn.Parameter(FP8.clone(), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(ONE[:4].reshape(2, 2))


def test_a_model_with_fp8_layers_is_not_saved_for_others(tmp_path: Path) -> None:
    model = language_model()
    model.model.layers[0].self_attn.o_proj = Fp8Linear()
    packed_model(model)
    for write in (lambda: fp4pass.save(model, tmp_path / "q"), lambda: save_pretrained(model)):
        with pytest.raises(CheckpointError, match=r"o_proj.*which no layout declares"):
            write()
    assert not (tmp_path / "q").exists()


def save_pretrained(model: Any) -> None:
    model.save_pretrained("never")


def test_a_module_of_ones_own_may_hold_what_it_likes(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("scales", torch.ones(4))
            self.register_buffer("table", FP8.clone())

    fp4pass.save(packed_model(Own()), tmp_path / "q")
    assert torch.equal(
        fp4pass.load(tmp_path / "q", model=Own()).table.view(torch.uint8), FP8.view(torch.uint8)
    )


@pytest.mark.core
def test_masks_and_scales_of_float_models_are_no_codes() -> None:
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "attn.mask": ((1, 64, 64), "U8"),
        "attn.position_ids": ((1, 64), "I64"),
        "norm.scale": ((64,), "F32"),
        "mixer.input_scale": ((64,), "F32"),
        "mixer.weight": ((64, 64), "BF16"),
        "logit_scale": ((), "F32"),
        "table.weight": ((64, 64), "F16"),
    }
    assert not unread_layers(shapes)
