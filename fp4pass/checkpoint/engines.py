"""Tell why engines do not load a folder that is in a layout and formats that they read.

Of vLLM 0.33 and SGLang 0.5.23 on one GPU: eval/engines/ loads such folders by their own code. Of
transformers (5.17 to 5.24) without a GPU: tests/checkpoint/test_stock.py does.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from .layouts import FUSED, LAYOUTS, CompressedTensors, PackedLayer, join
from .readers import Because, problem


class Folder(NamedTuple):
    """A folder of a model of transformers.

    Attributes:
        layers: what is packed, as it lies in the folder.
        declared: the quantization_config.
    """

    layers: Mapping[str, PackedLayer]
    declared: Mapping[str, Any]


# An expert of a mixture, by its name in a folder.
_EXPERT = re.compile(r"\.experts\.\d+\.")

# The schemes of experts that engines have no method for, by the quant_method.
_NO_EXPERTS: dict[str, tuple[str, ...]] = {
    "compressed-tensors": ("fp8a16", "fp8_blocka16", "fp8_tensora16", "fp8_tensor"),
    "modelopt": ("fp8", "fp8_blocka16"),
}


def _experts_without_method(facts: Folder) -> str:
    """Return the scheme of experts that engines have no method for, or ""."""
    known = _NO_EXPERTS.get(facts.declared["quant_method"], ())
    found = (each.scheme for name, each in facts.layers.items() if _EXPERT.search(name))
    return next((scheme for scheme in found if scheme in known), "")


def _cut_rows(facts: Folder) -> str:
    """Return a layer that engines put before another, though its rows end within a block."""
    for name in (n for n, each in _in_blocks(facts).items() if each.shape[0] % each.fmt.rows):
        parent, _, last = name.rpartition(".")
        for members in FUSED:
            if last in [each for each in members if join(parent, each) in facts.layers][:-1]:
                return name
    return ""


def _cut_columns(facts: Folder, inputs: bool = False) -> str:
    """Return a layer whose columns end within a block of rows and columns, or "".

    inputs: of those whose inputs are quantized alone.
    """
    layers = {n: each for n, each in _in_blocks(facts).items() if each.shape[1] % each.fmt.block}
    return next((n for n, each in layers.items() if not (inputs and each.config.weight_only)), "")


def _cut_blocks(facts: Folder) -> str:
    """Return a layer whose last rows or columns are less than a block, and not the first, or ""."""
    for name, each in _in_blocks(facts).items():
        sides = zip(each.shape[-2:], (each.fmt.rows, each.fmt.block), strict=True)
        if any(size > block and size % block for size, block in sides):
            return name
    return ""


def _in_blocks(facts: Folder) -> dict[str, PackedLayer]:
    """Return the layers in which rows share scales of blocks."""
    return {name: each for name, each in facts.layers.items() if each.fmt.rows > 1}


def _is_stock(facts: Folder) -> bool:
    return facts.declared["quant_method"] == CompressedTensors.name


def _schemes(facts: Folder) -> set[str]:
    return {each.scheme for each in facts.layers.values()}


_BOTH = (
    Because(_experts_without_method, "it has no method for experts in {found} of this layout"),
    Because(
        _cut_rows, "it joins {found} with the next layer, and its rows do not fill blocks of 128"
    ),
)

# The first that is so counts.
_REFUSED = {
    "transformers": (
        Because(
            lambda facts: _is_stock(facts) and _cut_columns(facts, inputs=True),
            "it fails at the inputs of {found}, whose columns do not fill blocks of 128",
        ),
        Because(
            lambda facts: not _is_stock(facts) and _cut_blocks(facts),
            "it takes the blocks of {found} for equal ones, and they do not fill 128",
        ),
    ),
    "vLLM": (
        *_BOTH,
        Because(
            lambda facts: _is_stock(facts) and "fp8_blocka16" in _schemes(facts),
            "an assertion of its loader fails for weights only in fp8_block; "
            "the modelopt layout holds them",
        ),
        Because(
            lambda facts: facts.declared["quant_method"] == "modelopt" and _cut_columns(facts),
            "the columns of {found} do not fill blocks of 128",
        ),
    ),
    "SGLang": (
        *_BOTH,
        Because(
            lambda facts: "fp8_blocka16" in _schemes(facts),
            "it has no method for weights only in fp8_block",
        ),
        Because(
            lambda facts: _in_blocks(facts) and len(_schemes(facts)) > 1,
            "it does not load fp8_block beside other schemes",
        ),
    ),
}

# Where vLLM may read wrong scales without an error.
_SILENT = (
    Because(
        lambda facts: LAYOUTS["finegrained-fp8"].detect(facts.declared) and _cut_rows(facts),
        "vLLM joins {found} with the next layer though its rows do not fill blocks of 128, and "
        "may read wrong scales without an error. Choose the compressed-tensors layout, which it "
        "refuses, or another format",
    ),
)


def of_engines(folder: Folder) -> dict[str, str]:
    """Return why each engine does not load a folder, or ""; warn where vLLM may say nothing.

    Whatever writes a folder for engines calls it.
    """
    if silent := problem(_SILENT, folder):
        warnings.warn(f"{silent}.", stacklevel=4)
    return {engine: problem(reasons, folder) for engine, reasons in _REFUSED.items()}
