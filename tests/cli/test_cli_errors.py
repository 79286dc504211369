"""Bad input on the command line: one line, exit code 2, and nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import CALIB, CALIBRATED, EVAL, PLAIN, run
from safetensors.torch import load_file, save_file
from small_models import TINY

import fp4pass
from fp4pass.errors import CheckpointError

for package in ("transformers", "datasets", "yaml"):
    pytest.importorskip(package)


pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders and files with something wrong each."""
    folder = tmp_path_factory.mktemp("bad")
    for name in ("json", "cut", "type", "lacks", "tokenizer"):
        shutil.copytree(TINY, folder / name)
    (folder / "empty").mkdir()
    (folder / "json" / "config.json").write_text("{")
    whole = (TINY / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(whole[:-1000])
    path = folder / "type" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "x"}))
    for name, file, key in (
        ("gptq", "config.json", "quantization_config"),
        ("side", "hf_quant_config.json", "quantization"),
    ):
        shutil.copytree(TINY, folder / name)
        facts = json.loads((TINY / "config.json").read_text()) if name == "gptq" else {}
        facts[key] = {"quant_method": "gptq", "bits": 4, "quant_algo": "NVFP4"}
        (folder / name / file).write_text(json.dumps(facts))
    tensors = load_file(TINY / "model.safetensors")
    tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, folder / "lacks" / "model.safetensors", metadata={"format": "pt"})
    for path in (folder / "tokenizer").glob("tokenizer*"):
        path.unlink()
    (folder / "blank.txt").write_text(" \n")
    (folder / "short.txt").write_text("short")
    (folder / "typo.yaml").write_text("fmt: nvfp4\nmetod: sse\n")
    (folder / "nothing.yaml").write_text("- '*.nothing': null\n")
    return folder


# One for each check of the command; what the library refuses is tested there.
QUANTIZE_BAD = [
    (("{bad}/none", *PLAIN), "{bad}/none is not a folder"),
    (("no/such-model", *PLAIN), "no/such-model: there is no such file or folder here, and https"),
    (("{bad}/gptq", *PLAIN), "fp4pass does not read weights of gptq; give the model it was made"),
    (("{bad}/side", *PLAIN), "{bad}/side holds no packed weight. Load it with transformers"),
    (("{bad}/json", *PLAIN), "is not a valid JSON file"),
    (("{bad}/cut", *PLAIN), "{bad}/cut/model.safetensors cannot be read, it is missing or cut"),
    (("{bad}/type", *PLAIN), "has model type `x`"),
    (("{bad}/lacks", *PLAIN), "{bad}/lacks lacks model.layers.0.mlp.up_proj.weight"),
    (("{bad}/tokenizer", *CALIBRATED), "{bad}/tokenizer has no tokenizer, which text needs"),
    (("{bad}/tokenizer", "--quality", "good"), "{bad}/tokenizer has no tokenizer, which writing"),
    (("{made}/mixed", *PLAIN), "{made}/mixed is quantized already: expected a float model"),
    ((TINY, "--scheme", "nvfp5"), "--scheme: Scheme 'nvfp5' does not exist. Did you mean 'nvfp4'?"),
    ((TINY, "--method", "hesian"), "Method 'hesian' does not exist. Did you mean 'hessian'?"),
    ((TINY, "--method", "nvfp4"), "Method 'nvfp4' does not exist"),
    ((TINY, "--block", "7"), "Format 'nvfp4' has no block of 7"),
    ((TINY, *PLAIN, "--sequential"), "--sequential calibrates, and the method needs no text"),
    ((TINY, *PLAIN, "--to", "gguf"), "--to: Layout 'gguf' does not exist. Known: compressed-"),
    ((TINY, *PLAIN, "--to", "modelopt", "--scheme", "mxfp4"), "no place for mxfp4; it holds"),
    ((TINY, "--kv-cache", "fp8", "--stream"), "--kv-cache fp8 does not go with --stream"),
    ((TINY, "--samples", "x"), "quantize: --samples: invalid int value: 'x'. See"),
    ((TINY, "--expert-prior", "x"), "quantize: --expert-prior: invalid float value: 'x'. See"),
    ((TINY, *PLAIN, "--rules", "{bad}/typo.yaml"), "{bad}/typo.yaml: the key 'metod' does"),
    ((TINY, *PLAIN, "--rules", "{bad}/nothing.yaml"), "'*.nothing' matches no linear"),
    ((TINY, *PLAIN, "--max-shard-size", "5XB"), "--max-shard-size: expected a size"),
    ((TINY, *PLAIN, "--device", "gpu"), "--device gpu cannot be used"),
    ((TINY, *PLAIN, "--dtype", "int8"), "--dtype 'int8' does not exist."),
    ((TINY, "--data", CALIB, "--samples", "0"), "--samples: expected at least"),
    ((TINY, "--data", CALIB, "--seq-len", "1024"), "the context of the model is 512 tokens"),
    ((TINY, "--data", "{bad}/none.txt"), "{bad}/none.txt does not exist"),
    ((TINY, "--data", "{bad}/blank.txt"), "expected text to learn from, got none"),
]

OTHERS_BAD = [
    (("quantize", TINY), "fp4pass quantize: the following arguments are required: -o"),
    (("quantise", TINY), "fp4pass: Command 'quantise' does not exist. Did you mean 'qu"),
    (("inspect", "{made}/mixed", "--jsn"), "fp4pass inspect: unrecognized arguments: --jsn"),
    (("quantize", TINY, "-o", "{made}/mixed", *PLAIN), "pass --overwrite to replace the checkpoi"),
    (("quantize", TINY, "-o", "{bad}/cut", *PLAIN, "--overwrite"), "not a checkpoint of fp4pass"),
    (("quantize", TINY, "-o", "{bad}/typo.yaml/x", *PLAIN), "typo.yaml/x cannot be made"),
    (("quantize", TINY, "-o", "/", *PLAIN, "--overwrite"), "the current folder or a mount point"),
    (("inspect", "{bad}/none"), "{bad}/none is not a folder"),
    (("inspect", TINY), "is not quantized"),
    (("inspect", "{bad}/json"), "config.json is damaged"),
    (("inspect", "{made}/mixed", "--fail-above", "1"), "unrecognized arguments: --fail-above"),
    (("eval", "{made}/mixed"), "Expected a text to measure on, got none. Give --data"),
    (("eval", "{made}/mixed", "--data", "{bad}/none.txt"), "{bad}/none.txt does not exist"),
    (("eval", "{bad}/tokenizer", "--data", EVAL), "has no tokenizer"),
    (("eval", "{made}/mixed", "--data", EVAL, "--seq-len", "4096"), "--seq-len: expected at most"),
    (("eval", "{made}/mixed", "--data", "{bad}/short.txt"), "Give a longer text or --seq-len"),
    (("report", "{made}/mixed", "-o", "{bad}/x.pdf"), "--output: expected a name that ends in .ht"),
    (("verify", "{bad}/gptq"), "{bad}/gptq: quant_method: expected that of"),
    (("verify", "{made}/mixed", "--reference", "{made}/mixed"), "is quantized already"),
    (("transcode", "{made}/mixed", "-o", "{bad}/x", "--to", "gguf"), "--to: Layout 'gguf' does no"),
    (("transcode", "{made}/mixed", "-o", "{bad}/x", "--to", "modelopt"), "no place for mxfp4"),
]


@pytest.mark.parametrize(("args", "message"), QUANTIZE_BAD, ids=[m for _, m in QUANTIZE_BAD])
def test_bad_input_to_quantize(
    bad: Path, made: Path, tmp_path: Path, args: tuple[object, ...], message: str
) -> None:
    require_one_line(("quantize", *args, "-o", tmp_path / "q"), message, bad, made)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("args", "message"), OTHERS_BAD, ids=[m for _, m in OTHERS_BAD])
def test_bad_input(bad: Path, made: Path, args: tuple[object, ...], message: str) -> None:
    require_one_line(args, message, bad, made)
    assert not (bad / "x").exists()


def require_one_line(args: tuple[object, ...], message: str, bad: Path, made: Path) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr that says what is wrong."""

    def filled(text: object) -> str:
        return str(text).replace("{bad}", str(bad)).replace("{made}", str(made))

    result = run(*map(filled, args), code=2)
    # A rule that matches nothing is found in the model, whose line stands before.
    lines = [line for line in result.stderr.splitlines() if not line.endswith("s in bfloat16")]
    assert result.stdout == "" and len(lines) == 1, result.output
    assert lines[0].startswith("fp4pass") and filled(message) in lines[0]


def test_a_full_disk_is_one_line(made: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fp4pass.checkpoint.saving.save_file", full)
    result = run("transcode", made / "mixed", "-o", tmp_path / "q", "--to", "bf16", code=2)
    assert f"{tmp_path / 'q'} cannot be written: [Errno 28] No space left" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_errors_name_options_as_their_caller_writes_them(made: Path, tmp_path: Path) -> None:
    """Python's arguments in Python, flags in a shell; rules as a file has them."""
    with pytest.raises(CheckpointError, match="pass overwrite=True to replace"):
        fp4pass.save(fp4pass.load(made / "mixed"), made / "mixed")
    rules = tmp_path / "rules.yaml"
    rules.write_text('- "model.layers.0.mlp.up_proj": {block: 32}\n')
    said = run("quantize", TINY, "-o", tmp_path / "q", *PLAIN, "--rules", rules).stderr
    assert "give them one scheme by --rules." in said
