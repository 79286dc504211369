"""Models whose weights lie elsewhere: saved as they are, loaded to where a device map says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import TINY
from torch import Tensor

import fp4pass
from fp4pass.errors import CheckpointError, OptionError, StateError

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
IDS = torch.arange(40)[None]


def load(**options: Any) -> Any:
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(TINY, dtype=torch.bfloat16, **options).eval()


def converted(model: Any) -> Any:
    return fp4pass.convert(model, method="sse", weight_only=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "q"
    fp4pass.save(converted(load()), folder, max_shard_size="200KB")
    return folder


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


def half_on_disk() -> dict[str, str]:
    places = dict.fromkeys(
        ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
    )
    layers = range(transformers.AutoConfig.from_pretrained(TINY).num_hidden_layers)
    return places | {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in layers}


def offloaded(kind: str, folder: Path) -> Any:
    if kind == "device_map":
        return load(device_map=half_on_disk(), offload_folder=str(folder / "offload"))
    model = load()
    if kind == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device=CPU)
    return accelerate.disk_offload(model, str(folder / "offload"), execution_device=CPU)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["cpu_offload", "disk_offload", "device_map"])
def test_an_offloaded_model_is_saved_with_the_bytes_of_the_whole(
    kind: str, saved: Path, tmp_path: Path
) -> None:
    model = converted(offloaded(kind, tmp_path))
    fp4pass.save(model, tmp_path / "q", max_shard_size="200KB")
    files = sorted(path.name for path in saved.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "q").iterdir())
    for name in files:
        assert (tmp_path / "q" / name).read_bytes() == (saved / name).read_bytes(), name


def test_loading_to_the_disk_is_refused(saved: Path) -> None:
    with pytest.raises(OptionError, match=r"device_map: expected a device .*got disk"):
        fp4pass.load(saved, device_map={"": "disk"})


def test_weights_without_values_are_refused(tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(TINY)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config).eval()
    fp4pass.prepare(empty)
    with pytest.raises(StateError, match=r"model\.embed_tokens\.weight: it is on the meta device"):
        fp4pass.calibrate(empty, [IDS], progress=False)
    model = converted(load())
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.to("meta"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: it is on the meta device"):
        fp4pass.save(model, tmp_path / "q")
    assert not (tmp_path / "q").exists()
