"""The command line: what it writes, prints and returns, for good input and for bad."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import CALIB, CALIBRATED, EVAL, PLAIN, run, run_json
from small_models import TINY, assert_same_bits, language_model

import fp4pass
from fp4pass import _compat, cli
from fp4pass.calibration.rows import read_text
from fp4pass.checkpoint.reader import open_checkpoint
from fp4pass.evaluation import token_windows

for package in ("transformers", "datasets", "yaml"):
    pytest.importorskip(package)
float_models = pytest.importorskip("fp4pass.checkpoint.float_models")

ROOT = Path(fp4pass.__file__).parents[1]
NAIVE = ("--scheme", "nvfp4a16", "--method", "naive")


pytestmark = pytest.mark.usefixtures("offline")


def subprocess_of(*args: object, **options: Any) -> subprocess.Popen[str]:
    """The same in a process of its own, in which Ctrl-C works whatever this one was started by."""
    start = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from fp4pass.cli import main; main()"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", start, *map(str, args)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, cwd=ROOT, **pipes)


# ---- the program --------------------------------------------------------------------------------


def test_the_program_in_a_process_of_its_own() -> None:
    module, script = [sys.executable, "-m", "fp4pass"], Path(sys.executable).with_name("fp4pass")
    for command in [module] + ([[str(script)]] if script.exists() else []):
        environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1" if command is module else ""}
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, cwd=ROOT, env=environment
        )
        assert (done.returncode, done.stdout) == (0, f"fp4pass {fp4pass.__version__}\n")
        lines = done.stderr.splitlines()
        assert all(line.startswith("import time:") for line in lines)
        loaded = {line.rpartition("|")[2].strip() for line in lines}
        assert ("fp4pass.cli.app" in loaded) == bool(lines) == (command is module)
        assert not loaded & {"transformers", "datasets"}


@pytest.mark.core
def test_help_says_what_there_is() -> None:
    text = run("--help").stdout
    assert run().stdout == run("-h").stdout == text
    for command in ("quantize", "eval", "inspect", "verify", "transcode", "report", "doctor"):
        assert f"\n  {command} " in text
        own = run(command, "--help").stdout
        assert "--json" in own and f"fp4pass {command}" in own
        assert all(len(line) <= 80 for line in own.splitlines())
    assert "Exit codes: 0 done, 1 a check failed, 2 bad input, 130 interrupted," in text
    assert "..." not in text.partition("Commands:")[2]
    mistyped = run("quantise", code=2).stderr
    assert "Did you mean 'quantize'?" in mistyped and mistyped.endswith("See fp4pass --help.\n")


class _Properties:
    total_memory = 24e9


def test_doctor_says_what_falls_back_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old GPU, no compiler, a library that is missing; formats that no kernel knows."""
    for name, made in {
        "device_count": lambda: 1,
        "get_device_name": lambda index: "A GPU",
        "get_device_properties": lambda index: _Properties,
        "get_device_capability": lambda index: (7, 5),
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", made)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("fp4pass.cli.doctor.load", lambda: ({}, "no compiler."))
    monkeypatch.setattr("fp4pass.cli.doctor._compiler", lambda *args: None)
    monkeypatch.setitem(_compat.LIBRARIES, "no-such-library", _compat.Tested("1.0", "2.0"))
    found = run_json("doctor")
    assert found["versions"]["no-such-library"] is None and found["cuda"] == "13.0"
    assert found["versions"]["transformers"] and found["compilers"] == {"C++": None, "C": None}
    assert found["gpus"][0]["kernels"] == "plain PyTorch" and not found["gpus"][0]["fp8"]
    lines = "\n".join(found["falls_back"])
    assert "Products on the CPU run in plain PyTorch: no compiler." in lines
    assert "A GPU runs plain PyTorch: expected compute capability 8.0 or more, got 7.5." in lines
    assert "has no FP8 tensor cores" in lines
    assert re.search(
        r"int8, .*fp8_tensor run in plain PyTorch on a CPU: no kernel supports them", lines
    )
    text = run("doctor").stdout
    assert "CPU: plain PyTorch (" in text
    assert "no-such-library: not installed (tested: 1.0 to 2.0)\n" in text
    assert "C++ compiler: none" in text
    assert all(f"  {line}" in text for line in found["falls_back"])
    # A GPU that has everything falls back for those formats alone.
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (10, 0))
    monkeypatch.setattr("fp4pass.cli.doctor.load", lambda: ({}, None))
    found = run_json("doctor")
    assert found["cpu"]["kernels"] == "C++" and found["gpus"][0]["kernels"] == "Triton"
    assert len(found["falls_back"]) == 1 and found["gpus"][0]["fp4"]


def test_doctor_lists_what_was_tested_and_what_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = _compat.installed_version
    versions = {"torch": "99.1.0", "peft": "0.20.3", "lm-eval": "0.4.9"}
    monkeypatch.setattr(
        "fp4pass.cli.doctor._version", lambda name: versions.get(name) or installed(name)
    )
    hooks = next(part for part in _compat.PARTS if part.name.startswith("hooks"))
    monkeypatch.setattr(hooks, "is_tested", False)
    monkeypatch.setattr(hooks, "problem", None)
    monkeypatch.delattr("torch._C._dynamo.eval_frame.set_code_exec_strategy")
    found = run_json("doctor")
    assert found["tested"]["torch"] == ["2.11", _compat.LIBRARIES["torch"].newest]
    assert str(hooks) in found["falls_back"]
    text = run("doctor").stdout
    assert re.search(
        r"^torch: 99\.1\.0 \(tested: 2\.11 to .*\), newer than the tested ones$", text, re.M
    )
    assert re.search(r"^peft: 0\.20\.3 \(tested: 0\.20 to 0\.\d+\)$", text, re.M)
    assert re.search(r"^lm-eval: 0\.4\.9 .*, older than the tested ones$", text, re.M)
    assert f"  {hooks}" in text


@pytest.mark.slow
def test_output_that_nobody_reads_to_its_end(made: Path) -> None:
    """As head does: no check failed, and there is no traceback."""
    command = [sys.executable, "-m", "fp4pass", "inspect", str(made / "mixed")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.core
def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    expected = "fp4pass: transformers, jinja2, pyyaml is missing: pip install 'fp4pass[cli]'\n"
    assert stop.value.code == 2 and capsys.readouterr() == ("", expected)


# ---- quantize -----------------------------------------------------------------------------------


def test_quantize_is_convert_and_save(made: Path) -> None:
    from transformers import AutoTokenizer

    model = language_model()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = token_windows(tokenizer, CALIB.read_text(), window=64, windows=4)
    fp4pass.calibrate(fp4pass.prepare(model), ids.split(8), progress=False)
    fp4pass.convert(model, "nvfp4")
    loaded = fp4pass.load(made / "inputs")
    assert_same_bits(loaded, model)
    assert fp4pass.report(loaded) == fp4pass.report(model)
    saved = AutoTokenizer.from_pretrained(made / "inputs")
    assert saved.get_vocab() == tokenizer.get_vocab()
    assert (made / "inputs" / "generation_config.json").exists()
    assert sorted(path.name for path in made.iterdir()) == ["inputs", "mixed", "rules.yaml"]


def test_quantize_prints_the_report(tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text('[{"*.down_proj": {"fmt": "mxfp4a16"}}, {"model.layers.0.*": null}]')
    result = run("quantize", TINY, "-o", tmp_path / "q", *NAIVE, "--rules", rules)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["mxfp4a16", "naive", "4", "4.25"] in [line[:4] for line in lines]
    assert ["nvfp4a16", "naive", "18", "4.50"] in [line[:4] for line in lines]
    assert "and 3 more: rule ('model.layers.0.*', None)" in result.stdout
    assert "lm_head: output embedding; add a rule to quantize it" in result.stdout
    assert "q (compressed-tensors): 3.66 MB of weights, 50% of 7.35 MB before" in result.stdout
    loaded, left, card, saved, served = result.stderr.splitlines()
    assert served == f"fp4pass: Serve it: vllm serve {tmp_path / 'q'}"
    assert card == f"fp4pass: README.md: the model card replaces that of {TINY}"
    assert left.endswith(
        "not copied: calib.txt, eval.txt, training.json (--copy-files takes globs)"
    )
    assert loaded == f"{TINY}: Qwen3ForCausalLM, 3,672,832 parameters in bfloat16"
    assert saved.startswith(
        f"fp4pass: {tmp_path / 'q'}: read by fp4pass, transformers, vLLM; not by"
    )


def test_quantize_as_json_and_its_options(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("fmt: mxfp4\nmethod: {name: naive}\nweight_only: true\n")
    options = ("--scheme", "nvfp4", "--block", 16, "--to", "modelopt")
    more = ("--dtype", "float32", "--max-shard-size", "3MB", *CALIBRATED, "--seed", 1)
    found = run_json("quantize", TINY, "-o", tmp_path / "q", "--rules", recipe, *options, *more)
    assert found["layout"] == "modelopt" and found["resumed"] == 0 and found["searched"] == 28
    recipe_found = found["recipe"]
    assert recipe_found.pop("calibration")["tokens"] == 256
    assert recipe_found == {
        "fmt": "nvfp4",
        "method": {"name": "naive"},
        "weight_only": False,
        "block": 16,
        "inputs": None,
        "activation_scales": "naive",
        "input_range": "amax",
        "rotation": 0,
        "unreached": "error",
        "expert_prior": None,
        "compute": "input",
        "rules": [],
    }
    stored = open_checkpoint(tmp_path / "q")
    assert stored.layout.name == "modelopt" and stored.own["dtype"] == "float32"
    assert len(list((tmp_path / "q").glob("model-0000*.safetensors"))) == 2
    assert found["bytes_after"] == sum(
        p.stat().st_size for p in (tmp_path / "q").glob("*.safetensors")
    )
    assert found["bytes_before"] == 4 * 3_672_832
    assert found["summary"][0]["scheme"] == "nvfp4" == found["rows"][0]["scheme"]
    assert found["summary"][0]["layers"] == 28 == len(found["rows"]) - 1


def test_the_recipe_in_a_folder_makes_the_same_folder(made: Path, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(run("inspect", made / "mixed", "--json").stdout)
    for i, rules in enumerate((tmp_path / "r.json", made / "mixed" / "fp4pass.json")):
        run("quantize", TINY, "-o", tmp_path / str(i), "--rules", rules)
        assert same_files(made / "mixed", tmp_path / str(i))
    found = run_json("inspect", made / "inputs")
    assert found["calibration"]["batches"] == 1 and found["calibration"]["tokens"] == 256
    assert len(found["calibration"]["sha256"]) == 64 and found["recipe"]["rules"] == []


def same_files(a: Path, b: Path) -> bool:
    names = sorted(path.name for path in a.iterdir())
    same = names == sorted(path.name for path in b.iterdir())
    return same and all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


@pytest.mark.slow
def test_a_killed_quantize_goes_on_where_it_was(tmp_path: Path) -> None:
    arguments = ("quantize", TINY, *CALIBRATED)
    resumed = ("-o", tmp_path / "q", "--json")
    finished = tmp_path / ".q.fp4pass-resume"
    process = subprocess_of(*arguments, *resumed)
    left = wait_for_weights(process, finished, 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "q").exists()
    left = len(list(finished.glob("*.safetensors")))
    assert 3 <= left < 28
    process = subprocess_of(*arguments, *resumed)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert f"resumes: {left} finished weights in {finished}" in stderr
    found = json.loads(stdout)
    assert (found["resumed"], found["searched"]) == (left, 28 - left)
    whole = subprocess_of(*arguments, "-o", tmp_path / "whole")
    assert whole.communicate()[1] and whole.returncode == 0
    assert same_files(tmp_path / "q", tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q", "whole"]


def wait_for_weights(process: subprocess.Popen[str], folder: Path, count: int) -> int:
    """Wait until a search has left some finished weights."""
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        found = len(list(folder.glob("*.safetensors")))
        if found >= count:
            return found
        time.sleep(0.002)
    raise AssertionError(f"no {count} weights in time: {process.communicate()}")


@pytest.mark.slow
def test_ctrl_c_is_one_line_and_leaves_no_half_folder(tmp_path: Path) -> None:
    process = subprocess_of("quantize", TINY, *CALIBRATED, "-o", tmp_path / "q")
    wait_for_weights(process, tmp_path / ".q.fp4pass-resume", 1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130 and stdout == ""
    last = stderr.splitlines()[-1]
    assert "fp4pass: interrupted. Run the same command again to resume." in last
    assert "Traceback" not in stderr
    assert [path.name for path in tmp_path.iterdir()] == [".q.fp4pass-resume"]


def test_ctrl_c_in_any_command(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    for module, name in (("checkpoint.saving", "CheckpointWriter"), ("cli.folders", "measure")):
        # A package may export a function under the name of its module.
        monkeypatch.setattr(sys.modules[f"fp4pass.{module}"], name, stop)
    for command in (
        ("transcode", made / "mixed", "-o", tmp_path / "q", "--to", "bf16"),
        ("eval", made / "mixed", "--data", EVAL),
    ):
        result = run(*command, code=130)
        assert (result.stdout, result.stderr) == ("", "fp4pass: interrupted.\n")
    assert not list(tmp_path.iterdir())


def test_a_mistyped_path_does_not_wait_for_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network: each file would be asked for, again and again."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("socket.create_connection", refuse)
    for args in (("quantize", "nope", *PLAIN), ("quantize", TINY, "--data", "calb")):
        error = run(*args, "-o", "out", code=2).stderr
        assert "there is no such file or folder here" in error
        assert "Name or service not known. Correct the path" in error


def test_code_of_a_model_runs_only_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing but JSON is on stdout: transformers would put a question there."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    source, ran = tmp_path / "source", tmp_path / "ran"
    shutil.copytree(TINY, source)
    config = json.loads((TINY / "config.json").read_text())
    config |= {"model_type": "fp4pass_mine", "architectures": ["Mine"]}
    config["auto_map"] = {"AutoConfig": "code.MyConfig", "AutoModelForCausalLM": "code.Mine"}
    (source / "config.json").write_text(json.dumps(config))
    original = type(language_model()).__name__
    base = original.replace("ForCausalLM", "Config")
    (source / "code.py").write_text(
        f"""from transformers import {original}, {base} as Config
open({str(ran)!r}, "w").close()
class MyConfig(Config):
    model_type = "fp4pass_mine"
class Mine({original}):
    config_class = MyConfig
"""
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    args = ("quantize", source, "-o", tmp_path / "out", *PLAIN)
    refused = run(*args, "--json", code=2)
    assert "which runs with --trust-remote-code only" in refused.stderr
    assert refused.stdout == "" and not ran.exists()
    assert run_json(*args, "--trust-remote-code")["summary"][0]["layers"] > 0
    assert ran.exists()


# ---- eval ---------------------------------------------------------------------------------------


def test_eval_is_evaluate(made: Path) -> None:
    tokenizer = float_models.load_tokenizer(str(TINY))
    texts = ("--data", EVAL, "--seq-len", 64, "--samples", 24)
    found = run_json("eval", made / "inputs", *texts, "--reference", TINY)
    model, original = fp4pass.load(made / "inputs"), language_model()
    options: Any = {"window": 64, "windows": 24, "progress": False}
    (row,) = found["texts"]
    text = read_text(row.pop("text"))
    before = fp4pass.evaluate(original, tokenizer, text, **options)
    assert row.pop("reference_perplexity") == before.perplexity
    assert row.pop("reference_intervals") == before.to_dict()["intervals"]
    wanted = fp4pass.evaluate(model, tokenizer, text, original, **options)
    assert row.pop("difference") == wanted.difference(before).to_dict()
    assert row == wanted.to_dict()
    printed = run("eval", made / "inputs", *texts, "--reference", TINY).stdout
    assert f"{row['perplexity']:.4f}" in printed and f"{row['kl']:.5f}" in printed
    assert "The change of perplexity is significant" in printed


def test_eval_of_overlapping_windows_on_a_slow_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp4pass.quantization.observers.batches.cpu_has_bfloat16", lambda: False)
    small = ("--data", EVAL, "--seq-len", 64, "--samples", 6)
    result = run("eval", TINY, *small, "--stride", 16, "--json")
    (row,) = json.loads(result.stdout)["texts"]
    assert row["tokens"] == 63 + 5 * 16 and row["kl"] is None
    assert result.stderr.startswith("measures in float32: this CPU has no instructions")
    assert "got 65" in run("eval", TINY, *small, "--stride", 65, code=2).stderr
