"""Schemes on the command line: the option, what is printed, and the note on tensor cores."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import CALIBRATED, TINY, run, run_json
from small_models import mlp
from tensor_cores import NOTE, without_tensor_cores  # noqa: F401, a fixture

import fp4pass

options = pytest.importorskip("fp4pass.cli.options")
screen = pytest.importorskip("fp4pass.cli.screen")
page = pytest.importorskip("fp4pass.reporting.page")
data = pytest.importorskip("fp4pass.reporting.data")


def test_the_command_line_names_the_whole_scheme(tmp_path: Path) -> None:
    """A recipe for weights only does not decide about inputs beside --scheme."""
    path = tmp_path / "r.yaml"
    path.write_text("fmt: nvfp4a16\nmethod: naive\n")
    for given, scheme in {"mxfp4": "mxfp4", "mxfp4a16": "mxfp4a16", None: "nvfp4a16"}.items():
        given_options = {} if given is None else {"fmt": given}
        assert options.read_recipe(path, None, given_options).config.scheme == scheme
    assert (
        options.read_recipe(path, None, {"fmt": "mxfp4", "weight_only": True}).config.scheme
        == "mxfp4a16"
    )
    assert options.read_recipe(None, None, {"fmt": "nvfp4a16"}).config.scheme == "nvfp4a16"


@pytest.mark.core
def test_a_contradiction_on_the_command_line(tmp_path: Path) -> None:
    both = ("--scheme", "nvfp4a16", "--quantize-inputs")
    refused = run("quantize", TINY, "-o", tmp_path / "c", *both, code=2).stderr
    assert refused == (
        "fp4pass: --scheme: scheme 'nvfp4a16' leaves inputs in floating point, and "
        "--quantize-inputs quantizes them. Choose 'nvfp4', or leave --quantize-inputs out.\n"
    )
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_commands_print_the_scheme(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("fmt: nvfp4a16\nmethod: naive\n")
    given = ("-o", tmp_path / "q", "--scheme", "mxfp4", "--rules", recipe)
    found = run_json("quantize", TINY, *given)
    assert found["recipe"]["fmt"] == "mxfp4" and found["recipe"]["weight_only"] is False
    assert found["summary"][0]["scheme"] == "mxfp4" == found["summary"][0]["label"]
    assert {row["scheme"] for row in found["rows"]} == {"mxfp4", ""}
    assert {layer["scheme"] for layer in run_json("inspect", tmp_path / "q")["layers"]} == {"mxfp4"}
    assert " mxfp4 " in run("inspect", tmp_path / "q").stdout


@pytest.mark.core
def test_help_lists_the_common_names_first() -> None:
    text = " ".join(run("quantize", "--help").stdout.split())
    assert "--scheme NAME The scheme: nvfp4a16 or mxfp4a16 for weights in 4 bits" in text
    assert "--fmt" not in text
    headings = ["Quality:", "Data:", "Device:", "Output:", "Options:"]
    assert sorted(headings, key=text.index) == headings


@pytest.mark.slow
def test_the_command_line_says_it_once(tmp_path: Path) -> None:
    command = ("quantize", TINY, "-o", tmp_path / "q", "--method", "naive", *CALIBRATED)
    lines = run(*command, "--scheme", "nvfp4").stderr.splitlines()
    assert lines.count(f"fp4pass: {NOTE}") == 1 == sum("tensor cores" in each for each in lines)
    assert "tensor cores" not in run(*command, "--overwrite", "--scheme", "nvfp4a16").stderr


def test_commands_print_what_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    with screen.news():
        fp4pass.convert(mlp(), "nvfp4", "naive")
    assert capsys.readouterr().err == f"fp4pass: {NOTE}\n"


def test_the_page_says_it() -> None:
    found = data.gather(fp4pass.convert(mlp(), "nvfp4", "naive"), progress=False)
    (note,) = found["notes"]
    assert note == NOTE.replace("this machine", "the machine of this report")
    assert f"<p>{note}</p>" in page.render(found)
    assert data.gather(fp4pass.convert(mlp(), "nvfp4a16", "naive"), progress=False)["notes"] == []
