"""Tell which programs read a folder, and why others do not: the tables of readers.

Of vLLM 0.33 and SGLang 0.5.23 on one GPU: eval/engines/ loads such folders by their own code. Of
transformers (5.17 to 5.24) without a GPU: tests/checkpoint/test_stock.py does.

`save` logs what it says of a folder and writes it in the model card, `save_pretrained` refuses by
it, and a test writes docs/readers.md from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from .._compat.torch import model_class
from .._compat.transformers import loading_error, replaced_classes
from ..nn.experts import QuantizedExpertStack
from .layouts import FUSED, LAYOUTS, CompressedTensors, Layout, PackedLayer, join

# The classes of models that serving engines have.
SERVED = ("ForCausalLM", "ForConditionalGeneration")

# Has transformers dequantize while it loads, into the layers of the float model. Serving engines do
# not look at it.
DEQUANTIZE = {"dequantize": True}

_OWN = "fp4pass"


@dataclass(frozen=True)
class Facts:
    """A converted model of transformers, and how it is to lie in a folder."""

    root: nn.Module
    layers: Mapping[str, PackedLayer]
    declared: Mapping[str, Any] = field(default_factory=dict)  # the quantization_config
    stacks: Collection[str] = ()  # those that the folder has a layer for each expert of
    merged: Collection[str] = ()  # those of them that transformers makes of these layers again
    ignore: Sequence[str] = ()  # names and patterns of what stays dense
    refused: str = ""  # why no layout of others has a place for it
    has_cache: bool = False

    @property
    def experts(self) -> list[PackedLayer]:
        """The stacks that transformers makes of layers."""
        return [self.layers[name] for name in self.merged]

    @property
    def linears(self) -> dict[str, PackedLayer]:
        """The layers that are none of experts."""
        return {name: layer for name, layer in self.layers.items() if name not in self.stacks}

    @property
    def kind(self) -> str:
        """The name of the class of the model."""
        return model_class(self.root).__name__

    @cached_property
    def replaced(self) -> set[str]:
        """The classes of modules that transformers replaces by ones of other parameters."""
        return replaced_classes(CompressedTensors.name)

    @cached_property
    def error(self) -> str:
        """The error of transformers when it initializes the model with packed layers, or ""."""
        return loading_error(self.root, self.linears)

    def differ(self, layers: Iterable[PackedLayer], are_experts: bool) -> bool:
        """Return whether transformers would dequantize layers by the scheme of others.

        It takes one group for all layers, and one for all experts.
        """
        groups = list(self.declared["config_groups"].values())
        apart = [
            any(each.startswith("re:") and "experts" in each for each in group["targets"])
            for group in groups
        ]
        read = groups[apart.index(are_experts)] if are_experts in apart else groups[0]
        return any(
            read[key] != value
            for layer in layers
            for key, value in CompressedTensors.declared_weights(layer).items()
        )


def _owner(root: nn.Module, stack: str) -> Any:
    return root.get_submodule(stack.rpartition(".")[0])


class Because(NamedTuple):
    """A fact for which a folder is not read, and the sentence that says so."""

    is_so: Callable[[Any], object]  # what the sentence has in place of {found}
    sentence: str


_CANNOT = "it cannot initialize {facts.kind} with packed layers ({facts.error})"

# A declared cache is no error in transformers: the weights are read.
CACHE_IN_FLOAT = (
    "from 5.24 on keys and values stay in float, for compressed-tensors 0.20 looks for their cache "
    "by the name of before"
)

# Of transformers (5.17 to 5.24) with compressed-tensors; the first that is so counts.
STOCK = (
    Because(
        lambda facts: any(
            isinstance(each, QuantizedExpertStack) and each.view.spare
            for each in facts.root.modules()
        ),
        "it looks for weights of experts that only give back their input",
    ),
    Because(
        lambda facts: any(layer.fmt.has_global_scale for layer in facts.experts),
        "it drops the global scales of experts (transformers issue 48371); mxfp4 has none, and "
        "a rule that gives *.experts.* mxfp4a16 makes a folder that it loads",
    ),
    Because(
        lambda facts: any(
            layer.fmt.element.native and not layer.fmt.has_float_scale for layer in facts.experts
        ),
        "it takes the scales of experts in mxfp8 for numbers",
    ),
    Because(
        lambda facts: not all(layer.config.weight_only for layer in facts.experts),
        "it leaves the inputs of experts in floating point",
    ),
    Because(
        lambda facts: facts.differ(facts.experts, True),
        "it reads experts by the scheme of other layers",
    ),
    Because(
        lambda facts: next(
            (n for n, each in facts.root.named_modules() if type(each).__name__ in facts.replaced),
            "",
        ),
        "it replaces {found} by a module with other weights, which stay random",
    ),
    Because(
        lambda facts: any(
            _owner(facts.root, name).kind.__name__ not in facts.replaced
            for name in set(facts.stacks) - set(facts.merged)
        ),
        "it reads experts of this class from stacks only, and they would stay random",
    ),
    Because(
        lambda facts: (
            facts.error and (loading_error(facts.root, ()) or "transform_config" in facts.declared)
        ),
        _CANNOT,
    ),
    Because(
        lambda facts: facts.error and facts.differ(facts.linears.values(), False),
        f"{_CANNOT}, and dequantizes them all by the scheme of one",
    ),
    Because(
        lambda facts: (
            facts.error and not all(layer.config.weight_only for layer in facts.linears.values())
        ),
        f"{_CANNOT}; with quantization_config=CompressedTensorsConfig(dequantize=True) it does, "
        "and leaves inputs in floating point",
    ),
)

# Of `save_pretrained` of transformers, which writes the tensors of a model under their names.
SAVE_PRETRAINED = (
    Because(
        lambda facts: any(name.startswith("re:") for name in facts.ignore),
        "transformers would write its dense experts one by one, and not read them again.",
    ),
    Because(
        lambda facts: any(layer.config.multiplies for layer in facts.layers.values()),
        "It holds the global scales of another layout, to the bit.",
    ),
    Because(
        lambda facts: any(layer.fmt.element.native for layer in facts.layers.values()),
        "transformers would write 8-bit codes under names that others do not look for.",
    ),
    Because(
        lambda facts: any(layer.is_stacked for layer in facts.layers.values()),
        "transformers would write its stacks of experts in a layout that nobody reads.",
    ),
    Because(lambda facts: facts.refused, "{found}"),
    Because(
        lambda facts: any(map(LAYOUTS[CompressedTensors.name].problem, facts.layers.values())),
        "It has no layout that others know.",
    ),
)


def of_stock(facts: Facts) -> tuple[str, dict[str, Any]]:
    """Return why stock transformers cannot load a folder, or "", and what declares it beside."""
    found = problem(STOCK, facts)
    return found, {} if found or not facts.error else DEQUANTIZE


def problem(reasons: Sequence[Because], facts: Any) -> str:
    """Return the first reason for which a folder is not read, "" if it is."""
    for is_so, sentence in reasons:
        if found := is_so(facts):
            return sentence.format(found=found, facts=facts)
    return ""


class _Folder(NamedTuple):
    """The packed layers of a folder of a model of transformers, and its quantization_config."""

    layers: Mapping[str, PackedLayer]
    declared: Mapping[str, Any]

    @property
    def method(self) -> str:
        return str(self.declared["quant_method"])

    @property
    def is_stock(self) -> bool:
        return self.method == CompressedTensors.name

    @property
    def schemes(self) -> set[str]:
        return {each.scheme for each in self.layers.values()}

    @property
    def in_blocks(self) -> dict[str, PackedLayer]:
        """The layers in which rows share scales of blocks."""
        return {name: each for name, each in self.layers.items() if each.fmt.rows > 1}


# An expert of a mixture, by its name in a folder.
_EXPERT = re.compile(r"\.experts\.\d+\.")

# The schemes of experts that engines have no method for, by the quant_method.
_NO_EXPERTS: dict[str, tuple[str, ...]] = {
    "compressed-tensors": ("fp8a16", "fp8_blocka16", "fp8_tensora16", "fp8_tensor"),
    "modelopt": ("fp8", "fp8_blocka16"),
}


def _experts_without_method(facts: _Folder) -> str:
    """Return the scheme of experts that engines have no method for, or ""."""
    known = _NO_EXPERTS.get(facts.method, ())
    found = (each.scheme for name, each in facts.layers.items() if _EXPERT.search(name))
    return next((scheme for scheme in found if scheme in known), "")


def _cut_rows(facts: _Folder) -> str:
    """Return a layer that engines put before another, though its rows end within a block."""
    for name in (n for n, each in facts.in_blocks.items() if each.shape[0] % each.fmt.rows):
        parent, _, last = name.rpartition(".")
        for members in FUSED:
            if last in [each for each in members if join(parent, each) in facts.layers][:-1]:
                return name
    return ""


def _cut_columns(facts: _Folder, inputs: bool = False) -> str:
    """Return a layer whose columns end within a block of rows and columns, or "".

    inputs: of those whose inputs are quantized alone.
    """
    layers = {n: each for n, each in facts.in_blocks.items() if each.shape[1] % each.fmt.block}
    return next((n for n, each in layers.items() if not (inputs and each.config.weight_only)), "")


def _cut_blocks(facts: _Folder) -> str:
    """Return a layer whose last rows or columns are less than a block, and not the first, or ""."""
    for name, each in facts.in_blocks.items():
        sides = zip(each.shape[-2:], (each.fmt.rows, each.fmt.block), strict=True)
        if any(size > block and size % block for size, block in sides):
            return name
    return ""


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
            lambda facts: facts.is_stock and _cut_columns(facts, inputs=True),
            "it fails at the inputs of {found}, whose columns do not fill blocks of 128",
        ),
        Because(
            lambda facts: not facts.is_stock and _cut_blocks(facts),
            "it takes the blocks of {found} for equal ones, and they do not fill 128",
        ),
    ),
    "vLLM": (
        *_BOTH,
        Because(
            lambda facts: facts.is_stock and "fp8_blocka16" in facts.schemes,
            "an assertion of its loader fails for weights only in fp8_block; "
            "the modelopt layout holds them",
        ),
        Because(
            lambda facts: facts.method == "modelopt" and _cut_columns(facts),
            "the columns of {found} do not fill blocks of 128",
        ),
    ),
    "SGLang": (
        *_BOTH,
        Because(
            lambda facts: "fp8_blocka16" in facts.schemes,
            "it has no method for weights only in fp8_block",
        ),
        Because(
            lambda facts: facts.in_blocks and len(facts.schemes) > 1,
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


def of_engines(
    layers: Mapping[str, PackedLayer], declared: Mapping[str, Any]
) -> tuple[dict[str, str], str]:
    """Return why each engine does not load a folder, or "", and what vLLM may not say."""
    folder = _Folder(layers, declared)
    return {engine: problem(why, folder) for engine, why in _REFUSED.items()}, problem(
        _SILENT, folder
    )


class Reads(NamedTuple):
    """The formats that a program reads in one layout, and a remark for the page."""

    formats: tuple[str, ...]
    remark: str = ""


_NO_LAYOUT = Reads((), "it does not support this layout")
_NOT_TESTED = Reads((), "not tested")

_FP4, _FP8 = ("nvfp4", "mxfp4"), ("fp8", "fp8_block", "fp8_tensor")

# By the program, in the version that was tested, and the name of a layout.
READERS: dict[str, dict[str, Reads]] = {
    "transformers 5.24 with compressed-tensors 0.20": {
        "compressed-tensors": Reads((*_FP4, *_FP8, "mxfp8"), "dequantized; exceptions below"),
        "modelopt": _NO_LAYOUT,
        "compressed-tensors-hadamard": Reads((), "it ignores the rotation: outputs are wrong"),
        "finegrained-fp8": Reads(("fp8_block", "fp8_tensor"), "dequantized without a GPU"),
        "gpt-oss": Reads(("mxfp4",), "dequantized without a GPU"),
        "quark": Reads((), "it needs amd-quark"),
        "deepseek-v4": Reads(("mxfp4", "fp8_block"), "dequantized without a GPU"),
    },
    "vLLM 0.33": {
        "compressed-tensors": Reads(
            (*_FP4, *_FP8, "mxfp8"),
            "it chooses whether to quantize inputs of mxfp4 and mxfp8",
        ),
        "modelopt": Reads(("nvfp4", *_FP8, "mxfp8"), "it quantizes the inputs of fp8_blocka16"),
        "compressed-tensors-hadamard": Reads((*_FP4, *_FP8, "mxfp8"), "without tensor parallelism"),
        "finegrained-fp8": Reads(("fp8_block",), "of fp8_tensor it looks for other names"),
        "gpt-oss": _NOT_TESTED,
        "quark": Reads(("mxfp4",)),
        "deepseek-v4": _NOT_TESTED,
    },
    "SGLang 0.5.23": {
        "compressed-tensors": Reads(("nvfp4", *_FP8), "it refuses mxfp4 and mxfp8"),
        "modelopt": Reads(("nvfp4", "fp8_tensor")),
        "compressed-tensors-hadamard": Reads((), "it ignores the rotation: outputs are wrong"),
        "finegrained-fp8": Reads((), "it drops the scales of LlamaForCausalLM without an error"),
        "gpt-oss": _NOT_TESTED,
        "quark": _NOT_TESTED,
        "deepseek-v4": _NOT_TESTED,
    },
}


class Readers(NamedTuple):
    """The programs that read a folder, and why others do not."""

    names: tuple[str, ...]
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.names == (_OWN,) and not self.reasons:
            return f"read by {_OWN} alone"
        others = f"; not by {', '.join(self.reasons)}" if self.reasons else ""
        return f"read by {', '.join(self.names)}{others}"


def who_reads(
    layout: str, formats: Collection[str], architecture: str, problems: Mapping[str, str]
) -> Readers:
    """Return the programs that read a folder.

    `problems` say why a program cannot load it; `architecture` is "" for no model of transformers.
    """
    if not architecture or all(layout not in layouts for layouts in READERS.values()):
        return Readers((_OWN,))
    names, reasons = [_OWN], []
    for program, layouts in READERS.items():
        name, reads = program.split()[0], layouts.get(layout, _NO_LAYOUT)
        lacking = ", ".join(sorted(set(formats) - set(reads.formats)))
        has_class = name == "transformers" or architecture.endswith(SERVED)
        why = reads.remark
        if reads.formats:
            why = problems.get(name, "") if has_class else f"it may not have {architecture}"
            if lacking:
                why = f"it reads no dense {lacking}"
        if why:
            reasons.append(f"{name} ({why})")
        else:
            names.append(name)
    return Readers(tuple(names), tuple(reasons))


def judge(
    layout: Layout, written: Mapping[str, PackedLayer], facts: Facts
) -> tuple[Readers, dict[str, Any], list[str]]:
    """Return who will read a folder in which packed layers lie as `written`.

    With it the quantization_config that they need, and what to warn of.
    """
    declared, problems, notes = dict(facts.declared), dict[str, str](), []
    if declared:
        is_stock = isinstance(layout, CompressedTensors)
        if is_stock:
            problems["transformers"], entries = of_stock(facts)
            declared |= entries
        if layout.engines:
            refused, silent = of_engines(written, declared)
            problems |= {engine: problems.get(engine) or why for engine, why in refused.items()}
            notes += [f"{silent}."] if silent else []
        if unread := problems.get("transformers"):
            what = "transformers cannot load this folder by itself"
            notes.append(f"{what}: {unread}. fp4pass.load reads it.")
        if is_stock and facts.has_cache:
            problems["transformers"] = problems.get("transformers") or CACHE_IN_FLOAT
    formats = {layer.fmt.key for layer in facts.layers.values()}
    readers = who_reads(layout.name, formats, facts.kind if declared else "", problems)
    return readers, declared, notes
