"""Files that say something wrong are errors that name the file, whoever wrote or signed them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from small_models import Saved, change_json, mlp, packed_model

import fp4pass
from fp4pass.checkpoint import open_checkpoint
from fp4pass.checkpoint.layouts import matches
from fp4pass.checkpoint.source_files import checksum_of
from fp4pass.errors import CheckpointError

DEEP = "[" * 100_000 + "]" * 100_000


def in_layer(**facts: Any) -> Callable[[Any], None]:
    return lambda own: own["layers"]["0"].update(facts)


def in_config(**facts: Any) -> Callable[[Any], None]:
    return lambda own: own["layers"]["0"]["config"].update(facts)


def in_row(**facts: Any) -> Callable[[Any], None]:
    return lambda own: own["report"]["rows"][0].update(facts)


SIGNED = {
    "no recipe": (lambda own: own.pop("recipe"), "'recipe'"),
    "another shape": (in_layer(shape=[96, 32]), r"0.weight_packed: expected U8 \[96, 16\]"),
    "a shape of one": (
        in_layer(shape=[96]),
        r"shape: expected two or three sizes above 0, got \(96,\)",
    ),
    "a dtype": (in_layer(weight_dtype="x"), "weight_dtype: expected a dtype, got 'x'"),
    "a new option": (in_config(bits=4), "unexpected keyword argument 'bits'"),
    "rows": (lambda own: own["report"].update(rows=[{"name": "0"}]), "KeyError"),
    "out of it": (lambda own: own.update(weights="../model.safetensors"), "a name in the folder"),
    "the shape of a row": (in_row(shape=5), r"a row: shape: expected tuple\[int, ...\], got 5"),
}


@pytest.mark.parametrize("what", SIGNED)
def test_what_was_signed_again_is_checked_too(tmp_path: Path, what: str) -> None:
    edit, message = SIGNED[what]

    def signed(own: Any) -> None:
        own.pop("sha256")
        edit(own)
        own["sha256"] = checksum_of(own)

    fp4pass.save(packed_model(mlp()), tmp_path / "q")
    change_json(tmp_path / "q" / "fp4pass.json", signed)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*{message}"):
        fp4pass.load(tmp_path / "q", model=mlp(1))


@pytest.mark.parametrize("file", ["fp4pass.json", "config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", [DEEP, "[]", "5", "{", '{"weight_map": 5}', "\udcff"])
def test_json_that_cannot_be_read_is_an_error_that_names_the_file(
    foreign_copy: Saved, file: str, text: str
) -> None:
    path = foreign_copy() / file
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(
        CheckpointError, match=rf"{file}|(quantization_config in|that their) config"
    ):
        fp4pass.load(path.parent)


@pytest.mark.parametrize("file", ["../model.safetensors", "/model.safetensors", 5])
def test_no_file_outside_of_the_folder_is_read(foreign_copy: Saved, file: Any) -> None:
    folder = foreign_copy()
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = json.dumps({"weight_map": dict.fromkeys(names, file)})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index.json is damaged"):
        fp4pass.load(folder)


def test_a_pipe_is_not_waited_for(foreign_copy: Saved) -> None:
    path = foreign_copy() / "model.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read.* no file"):
        fp4pass.load(path.parent)


def in_group(**facts: Any) -> Callable[[Any], None]:
    return lambda config: config["quantization_config"]["config_groups"]["group_0"].update(facts)


def declared(**facts: Any) -> Callable[[Any], None]:
    return lambda config: config["quantization_config"].update(facts)


FOREIGN_CONFIGS = {
    "a word": (lambda config: config.update(quantization_config="nvfp4"), "AttributeError"),
    "targets are numbers": (in_group(targets=[5]), "AttributeError"),
    "a bad pattern": (in_group(targets=["re:("]), r"'\(' is no pattern"),
    "an endless pattern": (
        in_group(targets=["re:model(.|\\.|[a-z_.])+!", "Linear"]),
        r"expected one that matches 'model.* in 0.02 s, got .*model",
    ),
    "blocks of nothing": (in_group(weights={"group_size": 0}), "ZeroDivisionError"),
    "ignore is a number": (declared(ignore=5), "TypeError"),
    "transforms": (declared(transform_config=5), "AttributeError"),
    "dtype": (lambda config: config.update(dtype="x"), "dtype: expected a floating-point dtype"),
    "a cache is a word": (
        declared(kv_cache_scheme="float64"),
        "kv_cache_scheme: expected the scheme of a key-value cache, or null, got 'float64'",
    ),
    "no model": (lambda config: config.update(architectures=["pipeline"]), "not a class of models"),
    "no architecture": (lambda config: config.update(architectures=[]), "ValueError"),
    "heads": (lambda config: config.update(num_attention_heads=0), "ZeroDivisionError|Error"),
    "rope": (lambda config: config.update(rope_parameters={"rope_type": "x"}), "Error"),
    "a padding": (lambda config: config.update(pad_token_id=10**9), "Error"),
}


@pytest.mark.parametrize("what", FOREIGN_CONFIGS)
def test_a_config_that_makes_no_model_is_named(foreign_copy: Saved, what: str) -> None:
    edit, message = FOREIGN_CONFIGS[what]
    path = foreign_copy() / "config.json"
    change_json(path, edit)
    with pytest.raises(CheckpointError, match=rf"(?s)config.json.*{message}"):
        fp4pass.load(path.parent)


@pytest.mark.parametrize("text", ["{", "[]", DEEP])
def test_a_damaged_generation_config_is_named(foreign_copy: Saved, text: str) -> None:
    path = foreign_copy() / "generation_config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config.json"):
        fp4pass.load(path.parent)


def test_many_patterns_take_no_minutes() -> None:
    """Each is compiled once, and not for each layer."""
    patterns = [f"re:.*layers[.]{i}[.](gate|router)$" for i in range(1000)]
    began = time.perf_counter()
    assert not any(matches(f"model.layers.{i}.up", patterns) for i in range(60))
    assert time.perf_counter() - began < 6


def test_a_file_that_is_cut_after_it_was_opened_is_an_error(foreign_copy: Saved) -> None:
    """Where it is mapped, reading beyond its end is the end of the process."""
    reader = open_checkpoint(foreign_copy())
    layer = next(reversed(reader.layers))
    os.truncate(reader.folder / "model.safetensors", 4096)
    for read in (lambda: reader.parts(layer), lambda: dict(reader.tensors())):
        with pytest.raises(CheckpointError, match=r"cut off|was changed"):
            read()
