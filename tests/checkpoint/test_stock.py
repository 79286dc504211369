"""What stock transformers makes of our folders, and what has it load them; causes are pinned."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import CANNOT, HEADS, SIZES, deepseek, falcon, llama4, mamba, mixtral, packed, t5

import fp4pass
from fp4pass.checkpoint import open_checkpoint, transcode
from fp4pass.checkpoint.layouts import CompressedTensors
from fp4pass.nn.experts import QUANTIZED
from fp4pass.nn.experts import QuantizedExpertStack as Stack

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")


class Needy(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    def __init__(self, config: Any, size: int) -> None:
        super().__init__(config)


def needy() -> Any:
    return Needy(transformers.LlamaConfig(**SIZES, **HEADS), 5)


def test_a_class_that_needs_more_than_a_config_is_saved(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"{CANNOT}.*missing 1 required positional argument"):
        packed(needy(), tmp_path / "q")


def differing(folder: Path, **options: Any) -> list[str]:
    """Return the packed layers whose weights stock transformers does not load to the bit."""
    ours = fp4pass.load(folder)
    theirs = type(ours).from_pretrained(folder, **options).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        # It makes packed layers dense at the first call.
        theirs(ids, **({"decoder_input_ids": ids} if theirs.config.is_encoder_decoder else {}))
    found = theirs.state_dict()
    layers = [(n, each) for n, each in ours.named_modules() if isinstance(each, QUANTIZED)]
    names = {n: n if isinstance(each, Stack) else f"{n}.weight" for n, each in layers}
    assert layers
    return [n for n, each in layers if not torch.equal(each.weight, found[names[n]])]


@pytest.mark.quick(2)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("make", [mamba, falcon, t5])
def test_classes_that_read_weights_to_initialize_are_dequantized_while_they_load(
    make: Any, fmt: str, tmp_path: Path
) -> None:
    """It pins the cause, too: without the entry of config.json stock transformers fails."""
    model, folder = make(), tmp_path / "q"
    declared, names = packed(model, folder, fmt=fmt)
    assert declared["dequantize"] is True
    assert differing(folder) == []
    model.save_pretrained(tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert config["quantization_config"] == declared
    transcode(folder, tmp_path / "other", "compressed-tensors")
    other = json.loads((tmp_path / "other" / "config.json").read_text())
    assert other["quantization_config"] == declared
    del config["quantization_config"]["dequantize"]
    (folder / "config.json").write_text(json.dumps(config))
    # No tensor of the folder helps: a packed layer has no parameter that it would go into.
    tensors = load_file(folder / "model.safetensors")
    zeros = {f"{n}.weight": torch.zeros_like(model.get_submodule(n).weight) for n in names}
    save_file({**tensors, **zeros}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(AttributeError, match="has no attribute 'weight'"):
        type(model).from_pretrained(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fmt": "mxfp4", "weight_only": False}, "it does, and leaves inputs in floating point"),
        (
            {"rules": [("*.dense_*", {"fmt": "mxfp4a16"})]},
            "dequantizes them all by the scheme of one",
        ),
    ],
)
def test_layers_that_would_be_dequantized_to_something_else(
    options: Any, message: str, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=f"{CANNOT}: it cannot initialize.*{message}"):
        declared, _ = packed(falcon(), tmp_path / "q", **options)
    assert "dequantize" not in declared
    with pytest.raises(AttributeError, match="has no attribute 'weight'"):
        transformers.FalconForCausalLM.from_pretrained(tmp_path / "q")
    if "fmt" in options:
        argument = transformers.CompressedTensorsConfig(dequantize=True)
        with pytest.warns(UserWarning, match="loading attributes"):
            assert differing(tmp_path / "q", quantization_config=argument) == []


@pytest.mark.parametrize("others", [[], [("*.layers.1.self_attn.*", {"fmt": "mxfp4a16"})]], ids=str)
def test_experts_in_mxfp4_are_read_beside_layers_in_nvfp4(others: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning) as caught:
        packed(mixtral(), tmp_path / "a")
    rule = ("*.experts.*", {"fmt": "mxfp4a16"})
    assert f"a rule that gives {rule[0]} {rule[1]['fmt']}" in str(caught[0].message)
    declared, names = packed(mixtral(), tmp_path / "q", [*others, rule])
    assert len(declared["config_groups"]) == 2 and differing(tmp_path / "q") == []
    # As other libraries read it, and for the names of engines, which are other ones.
    (tmp_path / "q" / "fp4pass.json").unlink()
    again = fp4pass.load(tmp_path / "q")
    formats = {row.name: row.config.fmt for row in fp4pass.report(again).converted}
    assert {formats[name] for name in names} == {"nvfp4", *("mxfp4" for _ in others)}
    assert {formats[name] for name in formats if ".experts." in name} == {"mxfp4"}
    layer = "model.layers.0.block_sparse_moe.experts.0.gate_proj"
    assert CompressedTensors().scheme(layer, declared).fmt == "mxfp4"


def test_layers_of_several_schemes_are_named_as_in_the_model_and_as_on_disk(tmp_path: Path) -> None:
    rule = ("*.experts.*", {"fmt": "mxfp4a16"})
    declared, names = packed(deepseek(), tmp_path / "q", [rule])
    assert differing(tmp_path / "q") == []
    own = "model.layers.0.mlp.shared_experts.up_proj"
    disk = "model.layers.0.ffn.shared_experts.w3"
    assert own in names and disk in open_checkpoint(tmp_path / "q").layers
    assert {own, disk} <= set(declared["config_groups"]["group_0"]["targets"])
    transcode(tmp_path / "q", tmp_path / "other", "compressed-tensors")
    assert differing(tmp_path / "other") == []


def test_save_says_when_transformers_replaces_experts(tmp_path: Path) -> None:
    """It pins the cause: their module has a layer for each expert, which the folder has not."""
    with pytest.warns(UserWarning, match=f"{CANNOT}: it replaces model.layers.0.feed_forward.exp"):
        model = llama4()
        packed(model, tmp_path / "q", [("*.experts.*", None)])
    assert fp4pass.load(tmp_path / "q") is not None
    _, found = type(model).from_pretrained(tmp_path / "q", output_loading_info=True)
    assert "model.layers.0.feed_forward.experts.0.gate_proj.weight" in found["missing_keys"]


STOCK = ("nvfp4a16", "mxfp4", "mxfp4a16", "fp8", "fp8_tensor", "mxfp8", "fp8_block", "fp8_blocka16")
# Hidden and intermediate size, and the schemes that transformers does not read by layout.
WIDTHS = {
    (256, 384): {},
    (64, 96): {"compressed-tensors": ["fp8_block"], "finegrained-fp8": ["fp8_block"]},
    (192, 320): {"compressed-tensors": ["fp8_block"], "finegrained-fp8": ["fp8_block"]},
    # A part that has the width of kv_a_proj_with_mqa, of 4.5 blocks.
    (256, 576): {"compressed-tensors": ["fp8_block"], "finegrained-fp8": ["fp8_block"]},
}


@pytest.mark.quick(8)
@pytest.mark.filterwarnings("ignore:The folder has no tokenizer")
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("layout", ["compressed-tensors", "finegrained-fp8"])
def test_save_says_that_transformers_reads_what_it_reads(
    widths: tuple[int, int], layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"hidden_size": widths[0], "intermediate_size": widths[1], "vocab_size": 64}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads)
    read = ("fp8_block", "fp8_tensor") if layout != "compressed-tensors" else STOCK
    caplog.set_level("INFO", "fp4pass")
    for scheme in read:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
        fp4pass.convert(model, scheme, "naive", progress=False)
        is_read = scheme not in WIDTHS[widths].get(layout, ())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fp4pass.save(model, tmp_path / scheme, layout=layout)
        said = next(line for line in caplog.messages if f"{tmp_path / scheme}: read by" in line)
        assert ("transformers" in said.partition("; not by")[0]) == is_read, scheme
        assert any("cannot load this folder" in str(each.message) for each in caught) != is_read
        # Blocks below one of 128 are read, and not promised.
        if widths != (64, 96) or layout == "compressed-tensors":
            assert _is_read(model, tmp_path / scheme, layout) == is_read, scheme


@torch.no_grad()
def _is_read(model: Any, folder: Path, layout: str) -> bool:
    """Return whether stock transformers gets our weights, and our logits where it can."""
    ids = torch.arange(4, 36).reshape(2, 16)
    try:
        stock = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
        theirs, ours = stock(ids).logits, model(ids).logits
    except RuntimeError:
        return False
    names = [row.name for row in fp4pass.report(model).converted]
    pairs = [(stock.get_submodule(n).weight, model.get_submodule(n).weight) for n in names]
    # In the second layout it leaves inputs in float, and rounds their scales in the first.
    is_near = layout != "compressed-tensors" or _distance(theirs, ours) < 0.1
    return is_near and all(_distance(*pair) < 0.01 for pair in pairs)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def test_experts_that_share_blocks_are_named_with_the_reason(tmp_path: Path) -> None:
    mixture = {"num_local_experts": 2, "num_experts_per_tok": 1}
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1}
    heads = {"vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes, **heads, **mixture)
    model = transformers.MixtralForCausalLM(config)
    fp4pass.convert(model, "fp8_blocka16", "naive")
    with pytest.warns(UserWarning, match="gate and up of 192 rows share blocks of 128 rows"):
        fp4pass.save(model, tmp_path / "q")
