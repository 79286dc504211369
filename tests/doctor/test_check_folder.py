"""Folders are judged alone: each damage is found and named, and nothing is found in good ones."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import fp8_folders
import pytest
import torch
from commands import run, run_json
from damages import DAMAGES
from good_folders import GOOD, WEIGHTS
from safetensors.torch import load_file, save_file
from small_models import TINY, change, converted

import fp4pass
from fp4pass.doctor import KINDS, check_folder

for package in ("transformers", "compressed_tensors", "yaml"):
    pytest.importorskip(package)

# How a folder of ours names all that its checksums tell apart.
SUMS = {"checksum", "tensor-missing", "config-changed"}

Good = Callable[[str], Path]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    """A good folder by its name, made once; not to be changed."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("good") / name
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made[name] = GOOD[name](folder)
        return made[name]

    return get


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_found_in_good_folders(good: Good, name: str) -> None:
    found = check_folder(good(name), progress=False)
    assert found.findings == () and found.layers and not found.not_judged


def damaged(good: Good, tmp_path: Path, damage: str, name: str) -> Path | None:
    """A damaged copy of a good folder, None where it does not have what is damaged."""
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good(name), folder)
    return folder if DAMAGES[damage].act(folder) else None


def check_damage(good: Good, tmp_path: Path, damage: str, name: str) -> bool:
    folder = damaged(good, tmp_path, damage, name)
    if folder is None:
        return False
    found = check_folder(folder, progress=False)
    kinds = {each.kind for each in found.findings}
    # Ours lists its tensors, and by that names some of the damages.
    assert DAMAGES[damage].kind in kinds or kinds & SUMS, (damage, name, kinds)
    return True


# Of random weights the order of codes cannot be told.
RANDOM = ("ours_mixture", "gpt_oss")
ORDER = ("codes-order", "rows-order", "scale-order")


def names_for(damage: str) -> list[str]:
    return [n for n in GOOD if DAMAGES[damage].kind not in ORDER or n not in RANDOM]


@pytest.mark.quick(16)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_is_found_and_named(good: Good, tmp_path: Path, damage: str) -> None:
    """In one folder of those that can have it, another one for each damage."""
    names = names_for(damage)
    start = list(DAMAGES).index(damage) % len(names)
    assert any(check_damage(good, tmp_path, damage, n) for n in names[start:] + names[:start])


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_is_found_in_every_folder(good: Good, tmp_path: Path, damage: str) -> None:
    assert sum(check_damage(good, tmp_path, damage, name) for name in names_for(damage))


def test_every_kind_is_planted_or_told_apart() -> None:
    planted = {each.kind for each in DAMAGES.values()}
    others = {
        "checksum",
        "fused-schemes",
        "input-direction",
        "cache-scale",
        "codes-nan",
        "config-changed",
    }
    assert planted | others == set(KINDS)


def test_random_weights_have_no_order_to_be_wrong(tmp_path: Path) -> None:
    """The evidence for orders is that of trained weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(TINY)
    for seed in range(2):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
        fp4pass.convert(model, "nvfp4a16", "naive")
        fp4pass.save(model, tmp_path / f"{seed}", source=TINY)
        assert check_folder(tmp_path / f"{seed}", progress=False).findings == ()


def test_scales_of_inputs_the_wrong_way(good: Good, tmp_path: Path) -> None:
    folder = tmp_path / "q"
    shutil.copytree(good("llm_compressor"), folder)
    for name in [n for n in load_file(folder / WEIGHTS) if n.endswith("input_global_scale")]:
        change(folder, name, lambda tensor: 1 / tensor)
    found = check_folder(folder, progress=False)
    assert {each.kind for each in found.findings} == {"input-direction"}


@pytest.mark.parametrize(("octaves", "kind"), [(-20, "scale-zero"), (20, "scale-size")])
def test_one_scale_far_from_those_around_it(
    good: Good, tmp_path: Path, octaves: int, kind: str
) -> None:
    """That block alone: far below, its codes are lost; far above, products are noise."""
    folder, name = tmp_path / "q", "model.layers.1.mlp.up_proj.weight_scale"
    shutil.copytree(good("ours_mxfp4"), folder)

    def edit(scale: torch.Tensor) -> torch.Tensor:
        scale[3, 1] += octaves
        return scale

    change(folder, name, edit)
    (found,) = check_folder(folder, progress=False).findings
    assert (found.kind, found.where) == (kind, name) and " 1 of " in found.found


def test_a_dense_part_of_what_engines_fuse(good: Good, tmp_path: Path) -> None:
    folder = tmp_path / "q"
    shutil.copytree(good("ours_mxfp4"), folder)
    tensors, name = load_file(folder / WEIGHTS), "model.layers.1.mlp.up_proj"
    shape = tensors[f"{name}.weight_packed"].shape
    for end in ("weight_packed", "weight_scale"):
        del tensors[f"{name}.{end}"]
    tensors[f"{name}.weight"] = torch.ones(shape[0], shape[1] * 2).bfloat16()
    save_file(tensors, folder / WEIGHTS)
    kinds = {each.kind for each in check_folder(folder, progress=False).findings}
    assert kinds == {"fused-schemes", "ignore-misses"}


def test_numbers_of_8_bits(tmp_path: Path) -> None:
    """Codes that stand for no number, and scales of a cache."""
    folder = tmp_path / "q"
    fp4pass.save(converted("mxfp8"), folder, layout="fp4pass", source=TINY)
    assert check_folder(folder, progress=False).findings == ()
    path = folder / "fp4pass.safetensors"
    tensors, name = load_file(path), "model.layers.1.mlp.up_proj.weight_packed"
    tensors[name].view(torch.uint8)[3, 5] = 0x7F
    tensors["model.layers.0.self_attn.k_scale"] = torch.zeros(1)
    save_file(tensors, path)
    found = {each.where: each.kind for each in check_folder(folder, progress=False).findings}
    assert found[name] == "codes-nan"
    assert found["model.layers.0.self_attn.k_scale"] == "cache-scale"


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", fp8_folders.KINDS)
def test_folders_in_fp8_of_others(kind: str, tmp_path: Path) -> None:
    """Every layer is judged, and the one scale of inputs where there is one."""
    folder = tmp_path / "q"
    dense = fp8_folders.make(fp8_folders.dense_model(256), folder, kind)
    found = check_folder(folder, progress=False)
    assert found.layers == len(dense) and not found.not_judged
    # gate and up in nvfp4 have a global scale each in these.
    wanted = {"tokenizer-missing"} | ({"fused-scales"} if "mixed" in kind else set())
    assert {each.kind for each in found.findings} == wanted
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.q_proj.input_scale"
    if name in tensors:
        tensors[name] = tensors[name] * 0
        save_file(tensors, path, metadata={"format": "pt"})
        kinds = {each.where: each.kind for each in check_folder(folder, progress=False).findings}
        assert kinds[name] == "input-bad"


def test_the_command_line(good: Good, tmp_path: Path) -> None:
    result = run("verify", good("ours_modelopt"))
    assert "28 packed layers in modelopt" in result.stdout and "no faults found" in result.stdout
    *_, last = run("verify", good("compressed_tensors")).stdout.splitlines()
    assert last.startswith(
        "Without checksums of fp4pass, layers, rows or scales that are exchanged"
    )
    folder = damaged(good, tmp_path, "a packed layer that is ignored", "ours_modelopt")
    result = run("verify", folder, code=1)
    lines = result.stderr.splitlines()
    assert lines[0].startswith("mismatch: model.layers.1.") and "'re:" in lines[0]
    assert KINDS["ignore-packed"].meaning in result.stderr
    found = run_json("verify", folder, code=1)
    assert {each["kind"] for each in found["findings"]} == {"ignore-packed"}
    assert {"where", "file", "found", "meaning", "remedy"} < found["findings"][0].keys()
