"""lm-eval on packed folders and converted models, from Python and from its command line."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import no_network
from small_models import TINY, converted

import fp4pass
from fp4pass.errors import CheckpointError, OptionError, VersionError

for package in ("transformers", "datasets", "yaml"):
    pytest.importorskip(package)
lm_eval = pytest.importorskip("lm_eval")
registry = pytest.importorskip("lm_eval.api.registry")
HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
Instance = pytest.importorskip("lm_eval.api.instance").Instance
TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager
Fp4PassLM = pytest.importorskip("fp4pass.integrations.lm_eval").Fp4PassLM

ROOT = Path(fp4pass.__file__).parents[1]
TASKS = ROOT / "eval" / "quality" / "tasks"
NAMES = ("tiny_lm_next", "tiny_lm_text")

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "q"
    with no_network():
        fp4pass.save(converted(), folder, tokenizer=tokenizer())
    return folder


@functools.cache
def tokenizer() -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(TINY)


def scores(lm: Any, *tasks: str, limit: int = 4, **metadata: str) -> dict[str, Any]:
    """What lm-eval makes of each request, and the metrics of tasks."""
    found = lm_eval.simple_evaluate(
        lm,
        tasks=list(tasks or NAMES),
        task_manager=TaskManager(include_path=TASKS, include_defaults=False, metadata=metadata),
        limit=limit,
    )
    responses = {
        task: [sample["filtered_resps"] for sample in samples]
        for task, samples in found["samples"].items()
    }
    return {"results": found["results"], "responses": responses}


# ---- models -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_folder_scores_as_the_model_it_was_saved_from(packed: Path) -> None:
    expected = scores(HFLM(converted(), tokenizer=tokenizer()), limit=2)
    assert scores(Fp4PassLM(str(packed), device="cpu"), limit=2) == expected


def test_options_of_a_packed_folder(packed: Path) -> None:
    lm = Fp4PassLM(str(packed), device_map="cpu", dtype="bfloat16", tokenizer=str(TINY))
    assert lm.device.type == "cpu" and lm.model.dtype == torch.bfloat16
    kinds = {type(module) for module in lm.model.modules()}
    assert fp4pass.nn.linear.QuantizedLinear in kinds
    assert not hasattr(lm.config, "quantization_config")


@pytest.mark.parametrize("options", [{}, {"compile": True}])
def test_compile_is_for_all_shapes(
    packed: Path, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **each: asked.append(each))
    Fp4PassLM(str(packed), device="cpu", **options)
    assert asked == ([{"dynamic": True}] if options else [])


@pytest.mark.parametrize("slow", [True, False])
def test_a_slow_cpu_computes_in_float32(
    slow: bool, packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fp4pass.quantization.observers.batches.cpu_has_bfloat16", lambda: not slow)
    caplog.set_level("INFO", "fp4pass")
    lm, asked = Fp4PassLM(str(packed), device="cpu"), ("a", " b")
    found: set[torch.dtype] = set()
    lm.model.register_forward_hook(lambda module, args, output: found.add(output.logits.dtype))
    for call, arguments in (
        (lm.loglikelihood, asked),
        (lm.loglikelihood_rolling, asked[:1]),
        (lm.generate_until, ("a", {"max_gen_toks": 2, "until": ["."]})),
    ):
        call([Instance(call.__name__, {}, arguments, 0)], disable_tqdm=True)
        assert found == {torch.float32 if slow else torch.bfloat16}
        found.clear()
    assert lm.model.dtype == torch.bfloat16
    assert any("in float32: this CPU" in line for line in caplog.messages) is slow


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "float16"},
            "expected dtype=bfloat16, in which it holds what is not packed, got dtype=float16",
        ),
        ({"peft": "adapter"}, "cannot be loaded with peft=adapter. Leave it out of model_args"),
        ({"load_in_8bit": True}, "cannot be loaded with load_in_8bit=True"),
        ({"device": "cuda:99"}, "device=cuda:99 cannot be used"),
        ({"device_map": "nowhere"}, "device_map: expected"),
    ],
)
def test_what_a_packed_folder_cannot_do(packed: Path, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Fp4PassLM(str(packed), **{"device": "cpu", **options})


def test_a_damaged_folder(packed: Path, tmp_path: Path) -> None:
    for name in ("config.json", "fp4pass.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((packed / name).read_bytes())
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Fp4PassLM(str(tmp_path), device="cpu")


# ---- the command line of lm-eval ----------------------------------------------------------------


def test_errors_of_the_command_line_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = sys.modules["fp4pass.integrations.lm_eval"]

    def refuse() -> None:
        raise OptionError("this and that")

    monkeypatch.setattr(module, "cli_evaluate", refuse)
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert capsys.readouterr().err == "fp4pass: this and that\n"


def test_the_model_type_is_registered_once() -> None:
    assert registry.get_model("fp4pass") is Fp4PassLM
    module = importlib.reload(sys.modules["fp4pass.integrations.lm_eval"])
    assert registry.get_model("fp4pass") is Fp4PassLM and module.Fp4PassLM is not Fp4PassLM


@pytest.mark.parametrize("installed", [None, "0.4.9"])
def test_lm_eval_is_missing_or_old(installed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed

    monkeypatch.setattr("fp4pass._compat.installed_version", version)
    for name in ("fp4pass.integrations.lm_eval", "fp4pass._compat.lm_eval"):
        monkeypatch.delitem(sys.modules, name)
    remedy = rf"lm-eval: expected .*, got {installed or 'no'}.*pip install -U 'fp4pass\[eval\]'"
    with pytest.raises(SystemExit, match=f"fp4pass: {remedy}"):
        runpy.run_module("fp4pass.integrations.lm_eval", run_name="__main__")
    with pytest.raises(VersionError, match=remedy):
        importlib.import_module("fp4pass.integrations.lm_eval")
