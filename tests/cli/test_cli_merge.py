"""fp4pass merge: an adapter into the packed weights of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CALIB, EVAL, PLAIN, no_network, run, run_json
from safetensors.torch import load_file
from small_models import TINY

import fp4pass
from fp4pass.checkpoint.reader import open_checkpoint

for package in ("transformers", "datasets", "yaml"):
    pytest.importorskip(package)
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.usefixtures("offline"),
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.* is dep:FutureWarning"),
]

DATA = ("--data", CALIB, "--held-out", EVAL, "--samples", 4, "--seq-len", 64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed folder in two layouts, and an adapter of random numbers on it."""
    folder = tmp_path_factory.mktemp("merge")
    with no_network():
        run("quantize", TINY, "-o", folder / "base", *PLAIN)
        run("transcode", folder / "base", "-o", folder / "modelopt", "--to", "modelopt")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(fp4pass.load(folder / "base"), config)
    tuned.save_pretrained(folder / "adapter")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("base", ["base", "modelopt"])
def test_a_folder_and_an_adapter(folders: Path, tmp_path: Path, base: str) -> None:
    found = run_json("merge", folders / base, folders / "adapter", "-o", tmp_path / "out", *DATA)
    merged = {name for name, method in found["layers"].items() if method == "gptq"}
    assert found["tokens"] == 4 * 64
    assert 0 < found["kl_after"] < found["kl_without"]
    assert open_checkpoint(tmp_path / "out").layout.name == found["layout"]
    assert (
        open_checkpoint(tmp_path / "out").layout.name == open_checkpoint(folders / base).layout.name
    )
    before, after = (
        load_file(each / "model.safetensors") for each in (folders / base, tmp_path / "out")
    )
    changed = {name.rpartition(".")[0] for name in before if not _same(before[name], after[name])}
    assert changed <= {*found["layers"], *found["rescaled"]}
    assert {name for name in changed if name.endswith("v_proj")} == merged
    stored = json.loads((tmp_path / "out" / "fp4pass.json").read_text())["recipe"]["merged"]
    assert stored == [{name: found[name] for name in stored[0]}]
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    run("verify", tmp_path / "out")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))


def test_options(folders: Path, tmp_path: Path) -> None:
    command = ("merge", folders / "base", folders / "adapter", "-o", tmp_path / "out")
    result = run(*command, "--method", "sse", "--to", "modelopt", *DATA)
    assert '4 layers (4 by "sse")' in result.stdout and "held-out tokens" in result.stdout
    assert open_checkpoint(tmp_path / "out").layout.name == "modelopt"
    assert (
        "not empty" in run(*command, code=2).stderr or "overwrite" in run(*command, code=2).stderr
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adapter": "base"}, "with adapter_config.json"),
        ({"base": "adapter"}, "adapter"),
        ({"options": ("--method", "gptw")}, "gptw"),
        ({"options": ("--to", "gguf")}, "gguf"),
        ({"options": ("--batch-size", "0")}, "--batch-size"),
        ({"adapter": "other"}, "does not fit the model"),
    ],
    ids=str,
)
def test_bad_input(folders: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    other = folders / "other"
    if change.get("adapter") == "other" and not other.exists():
        model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        config = peft.LoraConfig(r=4, target_modules=["0"])
        peft.get_peft_model(model, config).save_pretrained(other)
    names = [change.get(name, name) for name in ("base", "adapter")]
    paths = [folders / name for name in names]
    result = run("merge", *paths, "-o", tmp_path / "out", *change.get("options", ()), code=2)
    assert message in result.stderr and not (tmp_path / "out").exists()
