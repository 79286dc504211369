"""Files beside the weights of a source come along, and what does not is named."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import TINY, language_model, tokens

import fp4pass
from fp4pass.checkpoint import transcode
from fp4pass.checkpoint.beside import copy_beside
from fp4pass.record.state import named_folder, remember_tokenizer

transformers = pytest.importorskip("transformers")

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "custom_st.Part"},
]

# The class of the tokenizer is in odd/tokens.py, which reads two other files.
TOKENIZER = json.dumps({"auto_map": {"AutoTokenizer": ["odd.tokens.Odd", None]}})

COPIED = {
    "modules.json": json.dumps(MODULES),
    "1_Pooling/config.json": '{"pooling_mode_lasttoken": true}',
    "2_Dense/config.json": "{}",
    # Behind the model, so it is part of what others load.
    "2_Dense/model.safetensors": "weights",
    "custom_st.py": "class Part: ...",
    "sentence_bert_config.json": "{}",
    "config_sentence_transformers.json": "{}",
    "model_index.json": json.dumps({"_class_name": "Odd", "scheduler": ["diffusers", "Euler"]}),
    "scheduler/scheduler_config.json": "{}",
    "tekken.json": "{}",
    "LICENSE": "free",
    "notice.txt": "free",
    "README.md": "---\nbase_model: x\n---\n",
    "USE_POLICY.md": "be kind",
    "tokenizer.model": "pieces",
    "tokenizer_config.json": TOKENIZER,
    "merges.txt": "a b",
    "odd/tokens.py": "from .pieces import (\n    split,\n)\nfrom ..shared import join",
    "odd/pieces.py": "from . import words",
    "odd/words.py": "import torch",
    "shared/__init__.py": "def (",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tool.jinja": "{{ tools }}",
    "processor_config.json": "{}",
    "processor/preprocessor_config.json": "{}",
    "qformer_tokenizer/tokenizer.json": "{}",
}
LEFT = (
    *("pytorch_model.bin", "tf_model.h5", "model-Q4.gguf", "original/consolidated.00.pth"),
    *("original/params.json", "onnx/model.onnx", "train.jsonl", "train.py", "credentials.json"),
    *("trainer_state.json", "training_args.bin", "runs/one/events.log", "1_Pooling/key.pem"),
    *("checkpoint-5/tokenizer.json", "scheduler/model.safetensors", "odd/secrets.py"),
)
HIDDEN = (
    "pytorch_model.bin.index.json",
    ".env",
    ".git/config",
    ".cache/x",
    "__pycache__/x.pyc",
    "hf_quant_config.json",
)


def filled(folder: Path) -> Path:
    for name, text in {**COPIED, **dict.fromkeys((*LEFT, *HIDDEN), "other")}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def model_of(folder: Path) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    return fp4pass.convert(model, method="sse", weight_only=True)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def own(folder: Path) -> set[str]:
    return names(folder) - COPIED.keys()


def test_what_goes_with_the_model_is_copied_to_the_byte_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "m"
    model = model_of(source)
    filled(source)
    with caplog.at_level(logging.INFO, "fp4pass"):
        fp4pass.save(model, tmp_path / "q", source=source)
    for name, text in COPIED.items():
        assert (tmp_path / "q" / name).read_text() == text
    ours = {"config.json", "generation_config.json", "model.safetensors", "fp4pass.json"}
    assert own(tmp_path / "q") == ours
    (line,) = (each for each in caplog.messages if "not copied" in each)
    listed = "1_Pooling/key.pem, checkpoint-5/tokenizer.json, credentials.json, model-Q4.gguf, odd/"
    assert f"not copied: {listed}secrets.py and {len(LEFT) - 5} more" in line
    # So are those of a folder that is packed already.
    filled(tmp_path / "q")
    (tmp_path / "q" / "pytorch_model.bin.index.json").unlink()
    transcode(tmp_path / "q", tmp_path / "r", "modelopt")
    assert own(tmp_path / "r") == {*ours, "hf_quant_config.json"}
    transcode(tmp_path / "q", tmp_path / "s", "bf16", copy_files=["runs/*/*.log"])
    assert own(tmp_path / "s") == {*ours, "runs/one/events.log"} - {"fp4pass.json"}


def test_globs_copy_more_and_never_what_is_written(tmp_path: Path) -> None:
    source = tmp_path / "m"
    model = model_of(source)
    filled(source)
    asked = ["*.json", "*.safetensors", "onnx/*", "**/*.log", ".env"]
    fp4pass.save(model, tmp_path / "q", copy_files=asked)
    assert own(tmp_path / "q") == {
        *("config.json", "generation_config.json", "model.safetensors", "fp4pass.json"),
        *("credentials.json", "trainer_state.json", "onnx/model.onnx", "runs/one/events.log"),
        ".env",
    }
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert fp4pass.load(tmp_path / "q") is not None
    (tmp_path / "secret.txt").write_text("secret")
    (source / "out.txt").symlink_to(tmp_path / "secret.txt")
    (source / "all").symlink_to(tmp_path)
    for wrong in ("*.nothing", "../*.txt", str(tmp_path / "*"), "out.txt", "all/*", "onnx", ""):
        with pytest.raises(fp4pass.errors.OptionError) as error:
            fp4pass.save(model, tmp_path / "r", copy_files=[wrong])
        said = f"copy_files: expected a glob of files in {source}, got {wrong!r}."
        assert str(error.value).startswith(said)
        assert not (tmp_path / "r").exists()
    with pytest.raises(fp4pass.errors.OptionError, match="expected a list of globs, got"):
        fp4pass.save(model, tmp_path / "r", copy_files="*.txt")
    alone = fp4pass.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), method="sse")
    with pytest.raises(fp4pass.errors.OptionError, match="from no folder"):
        fp4pass.save(alone, tmp_path / "r", copy_files=["*"])


def test_save_copies_what_lies_beside_the_model_that_it_was_loaded_from(tmp_path: Path) -> None:
    source = tmp_path / "m"
    model = model_of(source)
    filled(source)
    fp4pass.save(model, tmp_path / "q")
    assert COPIED.keys() <= names(tmp_path / "q")

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.model").write_text("changed")

    fp4pass.save(model, tmp_path / "r", tokenizer=Tokenizer())
    assert COPIED.keys() <= names(tmp_path / "r")
    assert (tmp_path / "r" / "tokenizer.model").read_text() == "changed"
    # As does what was remembered, as `calibrate` does with its own.
    remember_tokenizer(model, Tokenizer())
    remember_tokenizer(model, None)
    fp4pass.save(model, tmp_path / "t")
    assert (tmp_path / "t" / "tokenizer.model").read_text() == "changed"
    with pytest.raises(fp4pass.errors.OptionError, match="source: expected a folder"):
        fp4pass.save(model, tmp_path / "s", source=tmp_path / "nowhere")
    assert not (tmp_path / "s").exists()


def test_a_remembered_tokenizer_stays_through_prepare_and_convert(tmp_path: Path) -> None:
    model = language_model()
    given = transformers.AutoTokenizer.from_pretrained(TINY)
    given.chat_template = "{{ messages[0].content }}"
    remember_tokenizer(model, given)
    fp4pass.prepare(model, "naive")
    fp4pass.calibrate(model, [tokens()], progress=False)
    fp4pass.save(fp4pass.convert(model, "nvfp4", "naive"), tmp_path / "q")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "q")
    text = "def f(x):\n    return x"
    assert found(text).input_ids == given(text).input_ids != []
    assert (tmp_path / "q" / "chat_template.jinja").read_text() == given.chat_template
    # A model that is loaded has the folder that it is loaded from.
    fp4pass.save(fp4pass.load(tmp_path / "q"), tmp_path / "r")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "r")
    assert again(text).input_ids == given(text).input_ids
    assert again.chat_template == given.chat_template


def test_a_model_that_reads_text_and_has_no_tokenizer_is_warned_of(tmp_path: Path) -> None:
    model = model_of(tmp_path / "m")
    with pytest.warns(UserWarning, match="m has none either. Pass it: .*tokenizer=tokenizer") as w:
        fp4pass.save(model, tmp_path / "q")
    assert w[0].filename == __file__
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.ViTConfig(**sizes, num_attention_heads=2, image_size=16, patch_size=8)
    images = fp4pass.convert(transformers.ViTModel(config), method="sse", weight_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp4pass.save(images, tmp_path / "r")


def test_links_are_not_followed_out_of_the_folder(tmp_path: Path) -> None:
    source, target, secret = tmp_path / "m", tmp_path / "q", tmp_path / "secret.txt"
    secret.write_text("secret")
    (source / "processor").mkdir(parents=True)
    target.mkdir()
    (source / "LICENSE").write_text("open")
    for link, to in {
        "LICENSE.out": secret,
        "processor/vocab.txt": secret,
        "LICENSE.within": source / "LICENSE",
        "LICENSE.circle": source,
        "LICENSE.gone": tmp_path / "gone",
    }.items():
        (source / link).symlink_to(to)
    copy_beside(source, target, ())
    assert names(target) == {"LICENSE", "LICENSE.within"}
    within = target / "LICENSE.within"
    assert within.read_text() == "open" and not within.is_symlink()


def test_a_snapshot_of_the_cache_of_a_hub_is_links_and_comes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--who--what"
    folder = repository / "snapshots" / ("0" * 40)
    for part in (repository / "blobs", folder, repository / "refs", tmp_path / "q"):
        part.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for name in ("config.json", "LICENSE"):
        (repository / "blobs" / name).write_text(name)
        (folder / name).symlink_to(f"../../blobs/{name}")
    (repository / "refs" / "LICENSE").write_text("of another")
    (folder / "LICENSE.other").symlink_to("../../refs/LICENSE")
    copy_beside(folder, tmp_path / "q", {"config.json"})
    assert names(tmp_path / "q") == {"LICENSE"}
    assert (tmp_path / "q" / "LICENSE").read_text() == "LICENSE"
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.file_download.constants, "HF_HUB_CACHE", str(tmp_path))
    found = named_folder("who/what")
    assert found is None or found == folder
    assert named_folder("who/else") is None
