"""Checkpoints of other libraries keep every bit, and theirs read ours."""

from __future__ import annotations

import json
from pathlib import Path

import foreign
import pytest
import torch
from safetensors.torch import load_file
from small_models import (
    TINY,
    Packed,
    Saved,
    assert_same_bits,
    bits,
    language_model,
    linears,
    logits,
    tokens,
)
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass.checkpoint import transcode
from fp4pass.core.elements import element_table
from fp4pass.errors import CheckpointError
from fp4pass.kernels.common.rounding import round_to_codes_
from fp4pass.nn.linear import QuantizedLinear

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore:.*pkg_resources|.*treespec:FutureWarning")


def test_compressed_tensors_reads_our_modelopt_layout_as_our_own(
    saved: Saved, packed: Packed
) -> None:
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter

    tensors = load_file(saved("nvfp4", False, "modelopt") / "model.safetensors")
    names = [rf"re:.*{name.rpartition('.')[2]}$" for name in linears(packed("nvfp4", False))]
    converter = ModelOptNvfp4Converter(targets=sorted(set(names)))
    found = converter.process(tensors)
    wanted = load_file(saved("nvfp4", False) / "model.safetensors")
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(bits(found[name]), bits(tensor)), name


@pytest.mark.quick(1)
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
        assert linear.config.weight_only is (algorithm != "NVFP4")
        assert linear.config.format.key == "nvfp4:16:multiplier"
    assert logits(model).isfinite().all()
    row = fp4pass.report(model).converted[0]
    assert (row.config.fmt, row.config.block, row.config.method_name) == ("nvfp4", 16, "-")
    fp4pass.save(model, tmp_path / "ours", layout="modelopt")
    theirs, ours = (load_file(tmp_path / d / "model.safetensors") for d in ("theirs", "ours"))
    assert set(theirs) == set(ours)
    assert all(torch.equal(bits(theirs[name]), bits(ours[name])) for name in theirs)
    assert_same_bits(fp4pass.load(tmp_path / "ours"), model)
    transcode(tmp_path / "theirs", tmp_path / "dense", "bf16")
    stored = load_file(tmp_path / "dense" / "model.safetensors")
    assert all(torch.equal(stored[f"{name}.weight"], weight) for name, weight in dense.items())
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


@pytest.mark.quick(1)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_of_compressed_tensors_is_what_it_says(tmp_path: Path, scheme: str) -> None:
    dense = foreign.compressed_tensors(language_model(), tmp_path / "theirs", scheme, tokens())
    model = fp4pass.load(tmp_path / "theirs")
    assert set(linears(model)) == set(dense)
    for name, linear in linears(model).items():
        assert torch.equal(linear.weight, dense[name]), name
        assert linear.config.format.key == scheme[:5].lower()
        assert linear.config.weight_only is scheme.endswith("A16")
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
    fmt, divisor = linear.config.format, linear.input_global_scale
    blocks = x.unflatten(-1, (-1, fmt.block))
    sixth = blocks.abs().amax(-1) / 6
    assert sixth.dtype == torch.bfloat16
    step = (sixth.float() * divisor).to(torch.float8_e4m3fn).float() / divisor
    codes = round_to_codes_(blocks.float() / step.unsqueeze(-1), fmt.element)
    values = element_table(fmt.element, x.device)[codes.int()]
    return F.linear((values * step.unsqueeze(-1)).flatten(-2).bfloat16(), linear.weight)


def test_what_transformers_keeps_in_float32_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without our own record too, where the config has one dtype for all."""
    kept = transformers.Qwen3PreTrainedModel
    monkeypatch.setattr(kept, "_keep_in_fp32_modules_strict", {"input_layernorm"})
    model = language_model(dtype=torch.bfloat16)
    norm = model.model.layers[0].input_layernorm.weight
    with torch.no_grad():
        norm.add_(1e-5)
    assert norm.dtype == torch.float32
    fp4pass.save(fp4pass.convert(model, method="sse", weight_only=True), tmp_path / "q")
    (tmp_path / "q" / "fp4pass.json").unlink()
    loaded = fp4pass.load(tmp_path / "q")
    assert loaded.model.layers[0].input_layernorm.weight.dtype == torch.float32
    assert_same_bits(model, loaded)
