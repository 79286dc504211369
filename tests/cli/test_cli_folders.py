"""Commands that look into folders: inspect, verify, transcode."""

from __future__ import annotations

import itertools
import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from commands import CALIBRATED, PLAIN, run, run_json
from safetensors.torch import load_file
from small_models import TINY, assert_same_bits, change, language_model, linears

import fp4pass
from fp4pass.checkpoint.reader import open_checkpoint
from fp4pass.quantization.recipe import Recipe

for package in ("transformers", "datasets", "yaml"):
    pytest.importorskip(package)


pytestmark = pytest.mark.usefixtures("offline")


# ---- inspect ------------------------------------------------------------------------------------


def test_inspect_says_what_is_in_the_folder(made: Path) -> None:
    found = run_json("inspect", made / "mixed")
    rows = {row.name: row for row in fp4pass.report(fp4pass.load(made / "mixed")).converted}
    assert len(found["layers"]) == len(rows) == 22
    for layer in found["layers"]:
        row = rows[layer["name"]]
        assert (layer["fmt"], layer["method"], layer["bits"]) == (row.config.fmt, "sse", row.bits)
        assert (layer["weight_error"], layer["output_error"]) == (row.weight_error, None)
    stored = load_file(made / "mixed" / "model.safetensors")
    sizes = {part["kind"]: part["bytes"] for part in found["sizes"]}
    assert sum(sizes.values()) == sum(tensor.nbytes for tensor in stored.values())
    packed = sum(t.nbytes for name, t in stored.items() if name.endswith("_packed"))
    assert sizes["packed codes"] == packed and sizes["embeddings"] == 2 * 2048 * 256
    scales_of = {each["scale"]: each for each in found["scales"]}
    for name, dtype in (("e8m0", torch.uint8), ("e4m3", torch.float8_e4m3fn)):
        scales = [t for n, t in stored.items() if n.endswith("weight_scale") and t.dtype == dtype]
        values = torch.cat([t.view(torch.uint8).flatten() for t in scales])
        facts = scales_of[name]
        assert facts["blocks"] == values.numel() == sum(each["blocks"] for each in facts["counts"])
        assert facts["distinct"] == len(values.unique()) and facts["invalid"] == 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["skipped"]["lm_head"].startswith("output embedding")


def test_inspect_prints_tables_that_fit(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    wide = run("inspect", made / "inputs").stdout
    assert "model.layers.3.mlp.down_proj" in wide
    assert "calibrated on 256 tokens in 1 batch, sha256 " in wide
    assert "in e4m3" in wide and "####" in wide
    monkeypatch.setenv("COLUMNS", "80")
    narrow = run("inspect", made / "inputs").stdout
    assert "(all names begin with model.layers.)" in narrow and "\n3.mlp.down_proj " in narrow
    table = narrow.split("\n\n")[1]
    assert all(len(line) <= 80 for line in table.splitlines())
    assert wide.count(" %") == narrow.count(" %")
    monkeypatch.setenv("COLUMNS", "20")
    assert run("inspect", made / "inputs").stdout.count(" %") == wide.count(" %")


LINEARS = [
    f"model.layers.{i}.{name}" for i in range(4) for name in ("self_attn.o_proj", "mlp.down_proj")
]


@pytest.fixture(scope="module")
def foreign_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign") / "modelopt"
    foreign.modelopt(TINY, folder, LINEARS, "NVFP4")
    return folder


def test_folders_of_other_writers(foreign_folder: Path, tmp_path: Path) -> None:
    found = run_json("inspect", foreign_folder)
    assert found["layout"] == "modelopt" and found["recipe"] is None
    assert sorted(layer["name"] for layer in found["layers"]) == sorted(LINEARS)
    assert "not quantized by fp4pass" in run("inspect", foreign_folder).stdout
    checked = run_json("verify", foreign_folder, "--reference", TINY)
    assert sorted(checked["weight_errors"]) == sorted(LINEARS) and not checked["mismatches"]
    assert all(0.09 < error < 0.1 for error in checked["weight_errors"].values())
    run("transcode", foreign_folder, "-o", tmp_path / "ct", "--to", "compressed-tensors")
    first, second = (open_checkpoint(f) for f in (foreign_folder, tmp_path / "ct"))
    for name in LINEARS:
        # Of a global scale and its reciprocal one is rounded.
        a, b = (each.dense(name, torch.float32) for each in (first, second))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_inspect_shows_the_recipe_as_a_file_has_it(made: Path, tmp_path: Path) -> None:
    for name in ("mixed", "inputs"):
        printed = run("inspect", made / name).stdout.split("recipe:\n")[1]
        lines = list(itertools.takewhile(lambda line: line[:2] == "  ", printed.splitlines()))
        (tmp_path / "r.yaml").write_text(textwrap.dedent("\n".join(lines)))
        stored = json.loads((made / name / "fp4pass.json").read_text())["recipe"]
        assert Recipe.read(tmp_path / "r.yaml") == Recipe.from_dict(stored)
        assert "  weight_only: " in printed and "=None" not in printed


# ---- verify -------------------------------------------------------------------------------------


def test_verify_of_what_is_right(made: Path) -> None:
    for name, count in (("mixed", 22), ("inputs", 28)):
        found = run_json("verify", made / name, "--reference", TINY)
        assert len(found["weight_errors"]) == count and found["mismatches"] == {}
        assert found["other_tensors"] == 47 - count
    printed = run("verify", made / "mixed", "--reference", TINY).stdout
    assert "22 layers compared by their weight error, at most" in printed
    assert f"{made / 'mixed'} matches its reference" in printed


def other_code(model: Any) -> str:
    linears(model)["model.layers.1.mlp.up_proj"].weight_packed[3, 5] ^= 8
    return "model.layers.1.mlp.up_proj"


def other_scale(model: Any) -> str:
    layer = linears(model)["model.layers.2.self_attn.k_proj"]
    layer.weight_scale.view(torch.uint8)[7, 2] += 1
    return "model.layers.2.self_attn.k_proj"


def other_global(model: Any) -> str:
    layer = linears(model)["model.layers.1.self_attn.o_proj"]
    layer.weight_global_scale *= 2
    return "model.layers.1.self_attn.o_proj"


def other_norm(model: Any) -> str:
    model.model.layers[3].input_layernorm.weight.data[9] *= 1.01
    return "model.layers.3.input_layernorm.weight"


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["mixed", "inputs"])
@pytest.mark.parametrize("change", [other_code, other_scale, other_global, other_norm])
def test_verify_names_what_is_wrong(made: Path, tmp_path: Path, name: str, change: Any) -> None:
    """Checksums are right: the model was changed before it was saved."""
    model = fp4pass.load(made / name)
    changed = change(model)
    fp4pass.save(model, tmp_path / "q")
    result = run("verify", tmp_path / "q", "--reference", TINY, "--json", code=1)
    assert list(json.loads(result.stdout)["mismatches"]) == [changed]
    assert f"mismatch: {changed}: " in result.stderr
    assert result.stderr.splitlines()[-1] == f"fp4pass: {tmp_path / 'q'}: 1 mismatches"


def test_verify_of_damage_and_of_another_reference(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "mixed", tmp_path / "q")
    path = tmp_path / "q" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    found = run_json("verify", tmp_path / "q", "--reference", TINY, code=1)
    assert len(found["mismatches"]) == 1
    other = language_model()
    torch.manual_seed(0)
    for parameter in other.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    other.save_pretrained(tmp_path / "other")
    for name in ("mixed", "inputs"):
        found = run_json("verify", made / name, "--reference", tmp_path / "other", code=1)
        assert set(found["mismatches"]) >= {"model.norm.weight", "model.layers.1.mlp.up_proj"}
    assert run_json("verify", made / "inputs", "--reference", TINY, "--fail-above", 0.01, code=1)[
        "mismatches"
    ]


def test_the_structure_of_a_folder_is_checked_without_its_model(made: Path, tmp_path: Path) -> None:
    for name in ("mixed", "inputs"):
        assert "with checksums" in run("verify", made / name).stdout
    folder = tmp_path / "q"
    shutil.copytree(made / "inputs", folder)
    own = folder / "fp4pass.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | {"version": 1}))
    assert f"{own} is of another version" in run("verify", folder).stderr
    scale = "model.layers.2.mlp.up_proj.weight_scale"
    change(folder, scale, lambda tensor: tensor.view(torch.uint8).fill_(127).view(tensor.dtype))
    for more in ((), ("--reference", TINY)):
        result = run("verify", folder, *more, "--json", code=1)
        assert list(json.loads(result.stdout)["mismatches"]) == [scale]
        assert f"mismatch: {scale}: model.safetensors: it holds NaN" in result.stderr
    change(folder, scale, lambda tensor: tensor[:-1].clone())
    error = run("verify", folder, code=1).stderr
    assert scale in error and "model.safetensors: " in error and "expected F8_E4M3" in error


SMALL: dict[str, int] = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2},
}
# Models that are not what most are: the classes of their config and of the model, and sizes.
OTHERS: dict[str, tuple[str, str, dict[str, int]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 512},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", SMALL),
}


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:transformers cannot load this folder")
@pytest.mark.filterwarnings("ignore:.*has no place for stacks of experts")
@pytest.mark.parametrize("name", OTHERS)
def test_models_of_other_kinds(tmp_path: Path, name: str) -> None:
    """Transposed weights in a layout of our own, no causal language model, stacked experts."""
    import transformers

    torch.manual_seed(0)
    config, kind, sizes = OTHERS[name]
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    model.save_pretrained(tmp_path / "m")
    run("quantize", tmp_path / "m", "-o", tmp_path / "q", *PLAIN)
    found = run_json("verify", tmp_path / "q", "--reference", tmp_path / "m")
    layers = {layer["name"]: layer for layer in run_json("inspect", tmp_path / "q")["layers"]}
    assert sorted(found["weight_errors"]) == sorted(layers)
    for layer in layers.values():
        wanted = pytest.approx(layer["weight_error"], rel=1e-6)
        assert found["weight_errors"][layer["name"]] == wanted
    if name == "t5":
        result = run("quantize", tmp_path / "m", "-o", tmp_path / "p", *CALIBRATED, code=2)
        assert "m has no tokenizer, which text needs" in result.stderr
    if name == "mixtral":
        experts = [n for n in layers if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
        assert [layers[n]["shape"] for n in experts] == [[2, 128, 64], [2, 64, 64]]


# ---- transcode ----------------------------------------------------------------------------------


def test_convert_changes_the_layout_and_nothing_else(made: Path, tmp_path: Path) -> None:
    found = run_json("transcode", made / "inputs", "-o", tmp_path / "m", "--to", "modelopt")
    assert found["layout"] == open_checkpoint(tmp_path / "m").layout.name == "modelopt"
    assert (tmp_path / "m" / "tokenizer.json").exists()
    run("verify", tmp_path / "m", "--reference", TINY)
    printed = run("transcode", tmp_path / "m", "-o", tmp_path / "c", "--to", "compressed-tensors")
    assert "2.84 MB of weights" in printed.stdout
    assert_same_bits(fp4pass.load(tmp_path / "c"), fp4pass.load(made / "inputs"))
    run("transcode", made / "inputs", "-o", tmp_path / "bf16", "--to", "bf16")
    dense = load_file(tmp_path / "bf16" / "model.safetensors")
    for name, layer in linears(fp4pass.load(made / "inputs")).items():
        assert torch.equal(dense[f"{name}.weight"], layer.weight)
