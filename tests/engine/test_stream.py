"""Layers that go to a folder as soon as they are packed: the bits of a model in memory."""

from __future__ import annotations

import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import build as mixture
from mixtures import ids
from small_models import TINY, assert_same_bits, language_model, logits, tokens
from torch import Tensor, nn

import fp4pass
from fp4pass._compat import accelerate as hooks
from fp4pass.checkpoint import finished, source_files
from fp4pass.checkpoint.float_models import load_float
from fp4pass.core import files
from fp4pass.core import machine as memory_limits
from fp4pass.engine import recording
from fp4pass.errors import CalibrationError, CheckpointError, OptionError, StateError
from fp4pass.quantization import quantize as search

pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("offline")

slow = pytest.mark.slow
CROSS = fp4pass.Gptq(target="cross")
BATCHES = tokens(3).split(1)


def converted(model: Any, method: Any, data: Any = BATCHES, **options: Any) -> Any:
    if method != "sse":
        fp4pass.prepare(model, method, sequential=True)
        fp4pass.calibrate(model, data, progress=False)
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
        "rules": [("model.layers.1.*", None), ("*.down_proj", {"fmt": "mxfp4a16"})]
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
    # Beside a model its files would be taken for layers of that.
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for option in ("stream", "resume"):
        what = f"{option}: expected a folder of its own, got .*model"
        with pytest.raises(OptionError, match=what):
            converted(language_model(), "sse", **{option: tmp_path / "model"})

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


# ---- what it reads, keeps in memory, and leaves where it is cut off ------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often accelerate read each tensor."""
    found: Counter[str] = Counter()
    loader = accelerate.utils.OffloadedWeightsLoader
    read = loader.__getitem__

    def counted(self: Any, name: str) -> Tensor:
        found[name] += 1
        return read(self, name)

    monkeypatch.setattr(loader, "__getitem__", counted)
    return found


@pytest.mark.parametrize("method", ["sse", pytest.param("hessian", marks=slow)])
def test_an_offloaded_layer_is_brought_once(
    method: str, reads: Counter[str], tmp_path: Path
) -> None:
    """For all batches, its statistics, its search, and its outputs."""
    model = accelerate.disk_offload(
        language_model(), str(tmp_path / "off"), execution_device=torch.device("cpu")
    )
    if method != "sse":
        fp4pass.prepare(model, method, sequential=True)
        fp4pass.calibrate(model, BATCHES, progress=False)
        # Two layers run, the first of them twice, for one batch.
        up = "model.layers.{}.mlp.up_proj.weight".format
        assert [reads[up(i)] for i in range(4)] == [2, 1, 0, 0]
        reads.clear()
        fp4pass.convert(model, "nvfp4")
    else:
        converted(model, method, stream=tmp_path / "layers")
    assert set(reads.values()) == {1}
    assert len(reads) == len([name for name in language_model().state_dict() if ".layers." in name])
    fp4pass.save(model, tmp_path / "q")
    assert_same_bits(fp4pass.load(tmp_path / "q"), converted(language_model(), method))


class _Alive:
    """The bytes of tensors that are alive, and the most that ever were."""

    def __init__(self) -> None:
        self.now = self.most = self.made = 0

    def add(self, tensor: Tensor) -> Tensor:
        self.made += 1
        self.now += tensor.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(tensor.untyped_storage(), self._drop, tensor.nbytes)
        return tensor

    def _drop(self, size: int) -> None:
        self.now -= size


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Alive]:
    found, make = _Alive(), hooks._Later.__getitem__

    def made(self: Any, name: str) -> Tensor:
        tensor = make(self, name)
        return found.add(tensor) if name in self.made else tensor

    monkeypatch.setattr(hooks._Later, "__getitem__", made)
    yield found


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:transformers cannot load this folder")
@pytest.mark.parametrize("method", ["sse", "hessian"])
def test_experts_of_one_layer_are_in_memory(method: str, alive: _Alive, tmp_path: Path) -> None:
    """Which a folder has one by one, and transformers merges when it loads a model."""
    source = mixture("qwen3_moe", num_hidden_layers=4)
    source.save_pretrained(tmp_path / "m")
    sizes = [p.nbytes for name, p in source.named_parameters() if ".experts." in name]
    data = [ids(1), ids(2)]
    expected = converted(load_float(str(tmp_path / "m"), "auto", "cpu"), method, data, fmt="mxfp4")
    options: dict[str, Any] = {"method": method, "device": "cpu", "progress": False}
    options |= {"weight_only": True} if method == "sse" else {"data": data}
    fp4pass.quantize_checkpoint(tmp_path / "m", tmp_path / "q", "mxfp4", **options)
    assert_same_bits(fp4pass.load(tmp_path / "q"), expected)
    assert 0 < alive.most <= sum(sizes) / 4 and alive.now == 0
    # Once for convert, and three times two for the layers that the first batch runs through.
    assert alive.made == len(sizes) + (0 if method == "sse" else 2 * 3)


# Where a run is cut off: a function, and which of its calls.
CUTS = {
    "third layer written": (finished, "save_file", 3),
    "between its files": (finished, "_facts_of", 3),
    "save ends": (source_files, "write_manifest", 1),
    "renamed": (files, "_sync", 8),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("cut", CUTS)
def test_going_on_from_any_point(cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls = tmp_path / "cut", 0
    module, name, count = CUTS[cut]
    function = getattr(module, name)

    def run(target: Path = folder / "q") -> dict[str, bytes]:
        options: dict[str, Any] = {"method": "naive", "weight_only": True, "device": "cpu"}
        fp4pass.quantize_checkpoint(TINY, target, **options)
        return {path.name: path.read_bytes() for path in target.iterdir()}

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            raise KeyboardInterrupt
        return function(*args, **options)

    folder.mkdir()
    monkeypatch.setattr(module, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    # Another layer may be written meanwhile.
    assert calls >= count and not (folder / "q").exists()
    files = run()
    assert [path.name for path in folder.iterdir()] == ["q"]
    assert files == run(tmp_path / "whole")


@pytest.mark.slow
def test_hidden_states_are_in_files_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = converted(language_model(), CROSS)
    folder, memory = tmp_path / "temporary", tmp_path / "meminfo"
    folder.mkdir()
    memory.write_text("MemTotal: 4000 kB\nMemFree: 9 kB\nMemAvailable: 1010 kB\n")
    monkeypatch.setattr(memory_limits, "_MEMINFO", memory)
    monkeypatch.setattr(memory_limits, "_OWN_GROUPS", tmp_path / "none")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    model = fp4pass.prepare(language_model(), CROSS, sequential=True)
    fp4pass.calibrate(model, BATCHES, progress=False)
    maps = Path("/proc/self/maps").read_text().splitlines()
    # Each of a batch of 48 tokens of 256 numbers, where 10 KB are to be had.
    assert len([line for line in maps if str(folder) in line]) == 3 and not list(folder.iterdir())
    assert_same_bits(fp4pass.convert(model, "nvfp4"), expected)
    folder.rmdir()
    with pytest.raises(CalibrationError, match=r"neither in memory nor in .*TMPDIR"):
        recording.offload_hidden_state(torch.ones(100, 100))
