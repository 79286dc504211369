"""fp4pass quantize: schemes, data, qualities, what text reaches, files beside, budgets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration.readers import TEMPLATE, TURNS, picture, processor, tokenizer, vision_model
from commands import CALIBRATED, PLAIN, run, run_json
from safetensors.torch import load_file, save_file
from small_models import TINY, assert_same_bits, language_model, tokens
from tensor_cores import NOTE, without_tensor_cores  # noqa: F401, a fixture

import fp4pass
from fp4pass.calibration import batches
from fp4pass.checkpoint.reader import open_checkpoint
from fp4pass.methods import Naive
from fp4pass.record.schemes import QUALITIES, Quality

for package in ("transformers", "datasets", "yaml"):
    pytest.importorskip(package)

pytestmark = pytest.mark.usefixtures("offline")


# ---- schemes -------------------------------------------------------------------------------------

options = pytest.importorskip("fp4pass.cli.options")
screen = pytest.importorskip("fp4pass.cli.screen")


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


@pytest.mark.core
def test_help_lists_the_common_names_first() -> None:
    text = " ".join(run("quantize", "--help").stdout.split())
    assert "--scheme NAME The scheme: nvfp4a16 or mxfp4a16 for weights in 4 bits" in text
    assert "--fmt" not in text
    headings = ["Quality:", "Data:", "Device:", "Output:", "Options:"]
    assert sorted(headings, key=text.index) == headings


# ---- calib ---------------------------------------------------------------------------------------

QUICK = ("--scheme", "nvfp4", "--method", "naive")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The bundled model with a chat template, and a context of 64 tokens."""
    folder = tmp_path / "m"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    return folder


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("options", [(), ("--stream",)], ids=["memory", "stream"])
def test_chats_of_a_file(source: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    chats = [TURNS, TURNS[1:], [*TURNS, *TURNS[1:]]]
    data = jsonl(tmp_path / "chats.jsonl", [{"id": 1, "messages": chat} for chat in chats])
    command = ("quantize", source, "-o", tmp_path / "q", *QUICK, "--data", data, *options)
    lines = run(*command).stderr
    assert "fp4pass: windows have 64 tokens, the context of the model, and not 512.\n" in lines
    (made,) = batches(chats, tokenizer(), seq_len=64)
    count = len(made["input_ids"])
    assert f"{data} has {count} examples, 128 were asked for.\n" in lines
    # Padding is no token.
    found = run_json("inspect", tmp_path / "q")["calibration"]
    assert found["tokens"] == int(made["attention_mask"].sum()) < made["input_ids"].numel()
    # What is asked for is refused where the default is cut.
    error = run(*command, "--seq-len", 65, "--overwrite", code=2).stderr
    assert "--seq-len is 65, but the context of the model is 64 tokens" in error


def test_images_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    vision_model().save_pretrained(folder)
    processor().save_pretrained(folder)
    picture().save(tmp_path / "one.png")
    data = jsonl(tmp_path / "rows.jsonl", [{"image": str(tmp_path / "one.png"), "text": "a"}] * 2)
    command = ("quantize", folder, "-o", tmp_path / "q", *QUICK, "--data", data)
    result = run(*command)
    assert "does not reach" not in result.stderr
    rows = run_json("inspect", tmp_path / "q")["layers"]
    assert any("vision_tower" in row["name"] for row in rows)


# ---- quality -------------------------------------------------------------------------------------

# Two layers are enough.
RULES = {f"model.layers.{i}.*": None for i in (2, 3)}


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps([{glob: skip} for glob, skip in RULES.items()]))
    return path


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What models write."""
    windows = tokens(4)
    monkeypatch.setattr("fp4pass.calibration.sample", lambda *args, **options: windows)
    return windows


def test_a_quality_is_printed_recorded_and_shown(
    tmp_path: Path, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, smoothed = tmp_path / "q", []

    @contextmanager
    def note(root: Any, strength: float, batches: list[Any], label: str) -> Iterator[None]:
        smoothed.append((strength, len(batches), label))
        yield

    # Tracing takes longer than all else.
    monkeypatch.setattr("fp4pass.calibration.smoothing.smoothed_unless_it_fails", note)
    options = ("--scheme", "nvfp4", "--quality", "good", "--rules", rules, *CALIBRATED)
    run("quantize", TINY, "-o", out, *options)
    recipe = run_json("inspect", out)["recipe"]
    assert recipe["quality"] == "good" and recipe["method"]["name"] == "hessian"
    assert smoothed == [(0.5, 1, 'quality "good"')]
    assert "recipe:\n  quality: good\n" in run("inspect", out).stdout
    run("report", out, "-o", tmp_path / "r.html")
    assert json.loads((tmp_path / "r.json").read_text())["recipe"]["quality"] == "good"
    assert "&#34;quality&#34;: &#34;good&#34;" in (tmp_path / "r.html").read_text()


def test_a_folder_of_a_quality_that_changed_since_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("quantize", TINY, "-o", tmp_path / "q", "--quality", "fast", "--weight-only")
    monkeypatch.setitem(QUALITIES, "fast", Quality({"method": Naive()}))
    recipe = run_json("inspect", tmp_path / "q")["recipe"]
    assert (recipe["quality"], recipe["method"]) == ("fast", {"name": "sse"})
    # To do it again, somebody has to say what is meant.
    own = tmp_path / "q" / "fp4pass.json"
    result = run("quantize", TINY, "-o", tmp_path / "again", "--rules", own, code=2)
    assert "method: quality 'fast' stands for" in result.stderr and "Leave out" in result.stderr


@pytest.mark.quick(6)
@pytest.mark.parametrize("more", [(), ("--stream",)], ids=["memory", "stream"])
def test_numbers_of_windows_hold_for_text_that_the_model_writes(
    tmp_path: Path, rules: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the same codes as in Python, also where a CPU runs a model in float32."""
    monkeypatch.setattr("fp4pass.quantization.observers.batches.cpu_has_bfloat16", lambda: False)
    given = ("--samples", 3, "--seq-len", 20, "--seed", 5, *more)
    result = run("quantize", TINY, "-o", tmp_path / "q", "--rules", rules, *given)
    # One layer after the other is calibrated in the dtype that it is converted in.
    assert ("\ncalibrates in float32: this CPU has no " in result.stderr) == (not more)
    found = fp4pass.load(tmp_path / "q")
    assert {row.tokens for row in fp4pass.report(found).converted} == {60}
    transformers = pytest.importorskip("transformers")
    reader = transformers.AutoTokenizer.from_pretrained(TINY)
    model = language_model()
    numbers = {"samples": 3, "seq_len": 20, "seed": 5}
    with fp4pass.evaluation.fast_dtype(*([] if more else [model])):
        text = fp4pass.calibration.batches(None, reader, model=model, **numbers)
    assert [each.shape for each in text] == [(3, 20)]
    stream = {"stream": tmp_path / "layers"} if more else {}
    fp4pass.convert(model, data=text, rules=list(RULES.items()), progress=False, **stream)
    assert_same_bits(found, model)


@pytest.mark.parametrize("own", [True, False], ids=["own text", "data"])
def test_the_command_and_python_write_the_same_bytes_of_best(
    own: bool, tmp_path: Path, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def mixture(model: Any, tokenizer: Any, **options: Any) -> torch.Tensor:
        asked.append(options)
        return tokens(8)

    monkeypatch.setattr("fp4pass.calibration.mixture", mixture)
    given = () if own else CALIBRATED
    run("quantize", TINY, "-o", tmp_path / "cli", "--quality", "best", "--rules", rules, *given)
    reader, model = tokenizer(), language_model()
    made = None if own else batches(CALIBRATED[1], reader, samples=4, seq_len=64)
    fp4pass.convert(model, quality="best", data=made, tokenizer=reader, rules=list(RULES.items()))
    fp4pass.save(model, tmp_path / "python", tokenizer=reader)
    cli, python = (load_file(tmp_path / name / "model.safetensors") for name in ("cli", "python"))
    assert list(cli) == list(python) and asked == [*asked[1:], *asked[1:]]
    for name, tensor in cli.items():
        assert torch.equal(tensor.view(torch.uint8), python[name].view(torch.uint8)), name


@pytest.mark.parametrize(
    ("recipe", "options", "match"),
    [
        (None, ("--method", "sse"), "--quality best decides --method. Leave out one of them."),
        ({"method": "gptq"}, (), "method: quality 'best' stands for"),
        ({"quality": "good"}, (), "quality: 'good', and --quality best is given"),
        (None, ("--device", "auto"), "--quality best runs on one device"),
    ],
    ids=["option", "recipe", "two", "device"],
)
def test_contradictions_are_refused_before_the_model_is_read(
    tmp_path: Path, recipe: Any, options: tuple[str, ...], match: str
) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe))
    given = (*(("--rules", path) if recipe else ()), *options)
    result = run("quantize", "nowhere", "-o", tmp_path / "q", "--quality", "best", *given, code=2)
    assert match in result.stderr and not (tmp_path / "q").exists()


# ---- text part -----------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")

TEXT: dict[str, Any] = {
    **{"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32},
    **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 128},
}

VISION: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}


def llava() -> Any:
    text = transformers.LlamaConfig(**TEXT)
    vision = transformers.CLIPVisionConfig(**VISION, projection_dim=64)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=7)
    )


def folder_of(make: Callable[[], Any], folder: Path) -> Path:
    torch.manual_seed(0)
    make().bfloat16().eval().save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, folder)
    return folder


def test_what_text_does_not_reach_is_skipped(tmp_path: Path) -> None:
    beside = ("model.vision_tower.*", "model.multi_modal_projector.*")
    source, target = folder_of(llava, tmp_path / "m"), tmp_path / "q"
    result = run("quantize", source, "-o", target, *CALIBRATED)
    line = f"text does not reach {', '.join(beside)}: these layers are skipped"
    assert f"fp4pass: {line}" in result.stderr.splitlines()
    found = run_json("inspect", target)
    assert found["recipe"]["rules"] == [{glob: {"unreached": "skip"}} for glob in beside]
    model = fp4pass.load(target)
    report = fp4pass.report(model)
    assert len(report.converted) == 7
    assert all("language_model" in row.name for row in report.converted)
    unseen = [row for row in report.skipped if row.skip_reason == "calibration never reached it"]
    assert len(unseen) >= 4 and not any("language_model" in row.name for row in unseen)
    with torch.no_grad():
        assert model(input_ids=torch.arange(16)[None] + 20).logits.isfinite().all()
    # A recipe alone would quantize what was skipped.
    run("verify", target, "--reference", source)


# ---- source --------------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")

SPARE = {"mtp.fc.weight": torch.randn(64, 128), "mtp.norm.weight": torch.ones(64)}


def odd_folder(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=128, num_attention_heads=2, **sizes)
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **SPARE}, file, metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "LICENSE").write_text("free")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_text("other weights")
    return folder


@pytest.mark.parametrize("options", [(), ("--stream",)], ids=["memory", "stream"])
def test_all_of_a_source_is_in_the_output_or_named(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    folder, target = odd_folder(tmp_path / "m"), tmp_path / "q"
    result = run("quantize", folder, "-o", target, *PLAIN, *options)
    assert f"{folder}: not copied: onnx/model.onnx (--copy-files" in result.stderr
    assert "mtp.fc.weight, mtp.norm.weight: LlamaForSequenceClassification" in result.stdout
    assert "score: a head that LlamaForSequenceClassification adds" in result.stdout
    for name in ("tokenizer.json", "tokenizer_config.json", "1_Pooling/config.json", "LICENSE"):
        assert (target / name).read_bytes() == (folder / name).read_bytes()
    assert "packed" in (target / "README.md").read_text()
    stored = open_checkpoint(target)
    tensors = dict(stored.tensors([*SPARE, "score.weight"]))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in SPARE.items())
    declared = json.loads((target / "config.json").read_text())["quantization_config"]
    assert set(declared["ignore"]) == {"score", "mtp.fc"}
    before = load_file(folder / "model.safetensors")
    packed = {f"{name}.weight" for name in stored.layers}
    assert before.keys() == packed | set(stored.plain())
    run("verify", target, "--reference", folder)
    assert isinstance(fp4pass.load(target).score.weight, torch.nn.Parameter)


def test_globs_of_more_files_are_an_option_of_what_writes_folders(tmp_path: Path) -> None:
    folder, more = odd_folder(tmp_path / "m"), ("--copy-files", "onnx/*")
    for name, options in {"q": (), "r": ("--stream",)}.items():
        run("quantize", folder, "-o", tmp_path / name, *PLAIN, *options, *more)
        assert (tmp_path / name / "onnx" / "model.onnx").read_text() == "other weights"
    run("transcode", tmp_path / "q", "-o", tmp_path / "s", "--to", "bf16", *more)
    assert (tmp_path / "s" / "onnx" / "model.onnx").read_text() == "other weights"
    wrong = ("-o", tmp_path / "t", *PLAIN, "--copy-files", "*.png")
    result = run("quantize", folder, *wrong, code=2)
    assert f"--copy-files: expected a glob of files in {folder}, got '*.png'" in result.stderr
    assert not (tmp_path / "t").exists()


def test_a_card_takes_the_place_of_that_of_the_model_unless_it_is_left_out(tmp_path: Path) -> None:
    run("quantize", TINY, "-o", tmp_path / "q", *PLAIN)
    card = (tmp_path / "q/README.md").read_text()
    assert " packed 28 of 29 weights." in card
    run("quantize", TINY, "-o", tmp_path / "r", *PLAIN, "--no-card")
    assert (tmp_path / "r/README.md").read_bytes() == (TINY / "README.md").read_bytes()


# ---- budget --------------------------------------------------------------------------------------

EIGHT = "mxfp8a16"

WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "no unit": (("--budget", "5.0"), "--budget: expected a number as in 5.0bits or 0.02kl, got 5"),
    "no number": (("--budget", "bits"), "expected a number as in 5.0bits"),
    "schemes alone": (("--schemes", "nvfp4a16,bf16"), "--schemes is for --budget"),
    "a scheme": (("--budget", "5bits", "--scheme", "nvfp4"), "--budget does not go with --scheme"),
    "a quality": (
        ("--budget", "5bits", "--quality", "good"),
        "--budget does not go with a quality",
    ),
    "a stream": (("--budget", "5bits", "--stream"), "--budget does not go with --stream"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str, tmp_path: Path) -> None:
    options, message = WRONG[name]
    assert message in run("quantize", "nowhere", "-o", tmp_path / "q", *options, code=2).stderr


def test_a_folder_of_two_schemes_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--budget", "5.0bits", "--schemes", f"nvfp4a16,{EIGHT}", *CALIBRATED[:2])
    found = run_json("quantize", TINY, "-o", out, *options, "--samples", 8, "--seq-len", 32)
    allocation = found["allocation"]
    assert allocation["budget"] == {"bits": 5.0} and allocation["chosen"]["bits"] <= 5.0
    assert {line["label"] for line in found["summary"]} == {"nvfp4a16", EIGHT}
    recipe = json.loads((out / "fp4pass.json").read_text("utf-8"))["recipe"]
    assert recipe["method"]["name"] == "sse" and len(recipe["rules"]) >= 2


def test_without_data_the_model_writes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers are enough; the rules say the method, too."""
    rules, out = tmp_path / "rules.json", tmp_path / "out"
    skipped = [{f"model.layers.{i}.*": None} for i in (2, 3)]
    rules.write_text(json.dumps({"method": {"name": "naive"}, "rules": skipped}))
    written = tokens(8, 32)
    monkeypatch.setattr("fp4pass.calibration.to_batches.mixture", lambda *args, **options: written)
    options = ("--budget", "0.1kl", "--schemes", "nvfp4a16,bf16", "--rules", rules)
    result = run("quantize", TINY, "-o", out, *options)
    assert result.stdout.startswith("kl=0.1: 4.5")
    recipe = json.loads((out / "fp4pass.json").read_text("utf-8"))["recipe"]
    assert recipe["method"]["name"] == "naive"
    assert recipe["rules"][-2:] == [["model.layers.2.*", None], ["model.layers.3.*", None]]
