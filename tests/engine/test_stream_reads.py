"""What streaming reads, and how often; what it keeps in memory, and what an interruption leaves."""

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
from small_models import TINY, assert_same_bits, language_model, tokens
from torch import Tensor

import fp4pass
from fp4pass._compat import accelerate as hooks
from fp4pass.checkpoint import finished, saving
from fp4pass.checkpoint.float_models import load_float
from fp4pass.core import atomic
from fp4pass.core import machine as memory_limits
from fp4pass.engine import layer_stack
from fp4pass.errors import CalibrationError

pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.usefixtures("offline")

slow = pytest.mark.slow

BATCHES = tokens(3).split(1)

CROSS = fp4pass.Gptq(target="cross")


def convert(model: Any, method: str, batches: Any = BATCHES, **options: Any) -> Any:
    if method != "sse":
        fp4pass.prepare(model, method, sequential=True)
        fp4pass.calibrate(model, batches, progress=False)
    options = {"fmt": "nvfp4", "method": method, "weight_only": method == "sse"} | options
    return fp4pass.convert(model, **options)


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
        convert(model, method, stream=tmp_path / "layers")
    assert set(reads.values()) == {1}
    assert len(reads) == len([name for name in language_model().state_dict() if ".layers." in name])
    fp4pass.save(model, tmp_path / "q")
    assert_same_bits(fp4pass.load(tmp_path / "q"), convert(language_model(), method))


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
    expected = convert(load_float(str(tmp_path / "m"), "auto", "cpu"), method, data, fmt="mxfp4")
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
    "save ends": (saving, "write_manifest", 1),
    "renamed": (atomic, "_sync", 8),
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
    expected = convert(language_model(), CROSS)
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
        layer_stack.offload_hidden_state(torch.ones(100, 100))
