"""Layers that go to a folder as soon as they are packed: the bits of a model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import assert_same_bits, language_model, logits, tokens
from torch import nn

import fp4pass
from fp4pass.errors import CheckpointError, OptionError, StateError
from fp4pass.quantization import search

pytest.importorskip("transformers")

slow = pytest.mark.slow
CROSS = fp4pass.Gptq(target="cross")


def converted(model: Any, method: Any, **options: Any) -> Any:
    if method != "sse":
        fp4pass.prepare(model, method, sequential=True)
        fp4pass.calibrate(model, tokens(6).split(2), progress=False)
    return fp4pass.convert(model, method=method, weight_only=method == "sse", **options)


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    assert_same_bits(model, other)
    assert fp4pass.report(model) == fp4pass.report(other)


@pytest.mark.parametrize("method", ["hessian", pytest.param(CROSS, marks=slow)])
def test_the_bits_of_a_model_in_memory(method: Any, tmp_path: Path) -> None:
    expected = converted(language_model(), method)
    model = converted(language_model(), method, stream=tmp_path / "layers")
    assert_equal(model, expected)
    count = len(model.model.layers)
    files = [path.name for path in (tmp_path / "layers").glob("*.safetensors")]
    assert sorted(files) == [f"model.layers.{i}.safetensors" for i in range(count)]
    layer = model.model.layers[0].self_attn
    # One buffer for those that read the same, so that they are quantized once.
    assert layer.q_proj.input_global_scale is layer.v_proj.input_global_scale
    assert (layer.q_proj.input_global_scale is None) == (method == "sse")
    assert torch.equal(logits(model), logits(expected))


@pytest.mark.parametrize(("method", "searches"), [("sse", 17), pytest.param(CROSS, 3, marks=slow)])
def test_going_on_after_an_interruption(
    method: Any, searches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, done = search._search, 0

    def interrupted(*args: Any) -> Any:
        nonlocal done
        done += 1
        if done == searches:
            raise KeyboardInterrupt
        return before(*args)

    monkeypatch.setattr(search, "_search", interrupted)
    with pytest.raises(KeyboardInterrupt):
        converted(language_model(), method, stream=tmp_path)
    # A layer has seven linears.
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert len(kept) == (searches - 1) // 7
    model = converted(language_model(), method, stream=tmp_path)
    assert done == searches + 28 - 7 * len(kept)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert_equal(model, converted(language_model(), method))


@pytest.mark.core
def test_rules_biases_and_layers_that_stay_dense(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "rules": [("model.layers.1.*", None), ("*.down_proj", {"fmt": "mxfp4a16"})],
    }
    expected = fp4pass.convert(language_model(), method="sse", weight_only=True, **options)
    for _ in range(2):
        model = fp4pass.convert(
            language_model(), method="sse", weight_only=True, stream=tmp_path, **options
        )
        assert_equal(model, expected)


@pytest.mark.core
def test_a_model_that_is_a_list_of_layers_itself(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(2)))

    expected = converted(model(), "sse")
    for _ in range(2):
        streamed = converted(model(), "sse", stream=tmp_path / "layers")
        assert_equal(streamed, expected)
    names = sorted(path.name for path in (tmp_path / "layers").glob("*.safetensors"))
    assert names == ["0.safetensors", "1.safetensors"]
    fp4pass.save(streamed, tmp_path / "q")
    assert_same_bits(fp4pass.load(tmp_path / "q", model=model()), expected)


def test_what_is_packed_does_not_stay_in_memory(tmp_path: Path) -> None:
    model = converted(language_model(), "sse", stream=tmp_path / "layers")
    packed = model.model.layers[0].mlp.up_proj.weight_packed
    maps = Path("/proc/self/maps").read_text()
    path = str(tmp_path / "layers" / "model.layers.0.safetensors")
    (line,) = [each for each in maps.splitlines() if path in each][:1]
    first, last = (int(each, 16) for each in line.split()[0].split("-"))
    assert first <= packed.data_ptr() < last
    fp4pass.save(model, tmp_path / "q")
    for path in (tmp_path / "layers").iterdir():
        path.unlink()
    assert_same_bits(fp4pass.load(tmp_path / "q"), converted(language_model(), "sse"))


# As if it were another device: tensors that go there are copied.
ELSEWHERE = "cpu:0"
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    ],
)


@pytest.mark.slow
@pytest.mark.parametrize("device", [ELSEWHERE, GPU])
@pytest.mark.parametrize("method", ["sse", CROSS])
def test_layers_go_to_a_device_and_to_the_disk(method: Any, device: str, tmp_path: Path) -> None:
    if method == "sse":
        expected = converted(language_model().to(device), method).cpu()
    else:
        expected = converted(language_model(), method, device=device)
    for _ in range(2):
        model = language_model()
        norm = model.model.layers[1].input_layernorm.weight
        address, places = norm.data_ptr(), []
        model.model.layers[1].register_forward_pre_hook(
            lambda *_, norm=norm, places=places: places.append((norm.data_ptr(), norm.device.type))
        )
        converted(model, method, device=device, stream=tmp_path)
        assert_equal(model, expected)
        # It was there, and what stays dense is mapped from where it was, and not a copy.
        there = [place for place in places if place[0] != address]
        assert bool(there) == (method != "sse")
        assert {kind for _, kind in there} <= {device.partition(":")[0]}
        assert model.model.layers[1].input_layernorm.weight.data_ptr() == address
        assert all(x.device.type == "cpu" for x in model.state_dict().values())
        # The rest is taken from there.
        (tmp_path / "model.layers.2.safetensors").unlink()


@pytest.mark.core
def test_what_cannot_be_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="stream: expected a folder"):
        converted(language_model(), "sse", stream=tmp_path / "file")
    with pytest.raises(StateError, match="a list of at least two layers"):
        fp4pass.convert(nn.Linear(32, 32), method="sse", weight_only=True, stream=tmp_path / "a")

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fp4pass.checkpoint.finished.save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*make room"):
        converted(language_model(), "sse", stream=tmp_path / "b")
    assert not list((tmp_path / "b").iterdir())


def test_what_is_mapped_under_inference_mode_can_be_written_to(tmp_path: Path) -> None:
    model = language_model()
    with torch.inference_mode():
        converted(model, "sse", stream=tmp_path)
    assert not any(each.is_inference() for each in model.buffers())
