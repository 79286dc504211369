"""Tell which programs read a folder, and why others do not: the tables of readers.

Of vLLM 0.33 and SGLang 0.5.23 on one GPU: eval/engines/ loads such folders by their own code. Of
transformers (5.17 to 5.24) without a GPU: tests/checkpoint/test_stock.py does.

`save` logs what it says of a folder, `save_pretrained` refuses by it, and a test writes
docs/readers.md from it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from .._compat.torch import model_class
from .._compat.transformers import loading_error, replaced_classes
from ..nn.experts import QuantizedExpertStack
from .layouts import FUSED, LAYOUTS, CompressedTensors, Layout, PackedLayer

# The classes of models that serving engines have.
SERVED = ("ForCausalLM", "ForConditionalGeneration")

# Has transformers dequantize while it loads, into the layers of the float model. Serving engines do
# not look at it.
DEQUANTIZE = {"dequantize": True}

_OWN = "fp4pass"

# A declared cache is no error in transformers: the weights are read.
_CACHE_IN_FLOAT = (
    "from 5.24 on keys and values stay in float, for compressed-tensors 0.20 looks for their cache "
    "by the name of before"
)


@dataclass(frozen=True)
class Facts:
    """A converted model of transformers, and how it is to lie in a folder."""

    root: nn.Module
    layers: Mapping[str, PackedLayer]
    declared: Mapping[str, Any] = field(default_factory=dict)  # the quantization_config
    stacks: Collection[str] = ()  # those that the folder has a layer for each expert of
    merged: Collection[str] = ()  # those of them that transformers makes of these layers again
    has_cache: bool = False

    @property
    def linears(self) -> dict[str, PackedLayer]:
        """The layers that are none of experts."""
        return {name: layer for name, layer in self.layers.items() if name not in self.stacks}

    @cached_property
    def error(self) -> str:
        """The error of transformers when it initializes the model with packed layers, or ""."""
        return loading_error(self.root, self.linears)

    def differ(self, layers: Iterable[PackedLayer], are_experts: bool) -> bool:
        """Return whether transformers would dequantize layers by the scheme of others."""
        # It takes one group for all layers, and one for all experts.
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


def stock_problem(facts: Facts) -> str:
    """Return why transformers (5.17 to 5.24) cannot load a folder, or ""."""
    experts = [facts.layers[name] for name in facts.merged]
    modules = dict(facts.root.named_modules())
    stacks = [each for each in modules.values() if isinstance(each, QuantizedExpertStack)]
    if any(stack.view.spare for stack in stacks):
        return "it looks for weights of experts that only give back their input"
    if any(layer.fmt.has_global_scale for layer in experts):
        return (
            "it drops the global scales of experts (transformers issue 48371); mxfp4 has none, and "
            "a rule that gives *.experts.* mxfp4a16 makes a folder that it loads"
        )
    if any(layer.fmt.element.native and not layer.fmt.has_float_scale for layer in experts):
        return "it takes the scales of experts in mxfp8 for numbers"
    if any(layer.config.input_format is not None for layer in experts):
        return "it leaves the inputs of experts in floating point"
    if facts.differ(experts, True):
        return "it reads experts by the scheme of other layers"
    replaced = replaced_classes(CompressedTensors.name)
    for name, module in modules.items():
        if type(module).__name__ in replaced:
            return f"it replaces {name} by a module with other weights, which stay random"
    for name in set(facts.stacks) - set(facts.merged):
        owner: Any = modules[name.rpartition(".")[0]]
        if owner.kind.__name__ not in replaced:
            return "it reads experts of this class from stacks only, and they would stay random"
    kind = model_class(facts.root).__name__
    cannot = f"it cannot initialize {kind} with packed layers ({facts.error})"
    if facts.error and (loading_error(facts.root, ()) or "transform_config" in facts.declared):
        return cannot
    if facts.error and facts.differ(facts.linears.values(), False):
        return f"{cannot}, and dequantizes them all by the scheme of one"
    if facts.error and any(each.config.input_format is not None for each in facts.linears.values()):
        return (
            f"{cannot}; with quantization_config=CompressedTensorsConfig(dequantize=True) it does, "
            "and leaves inputs in floating point"
        )
    return ""


def of_stock(facts: Facts) -> tuple[str, dict[str, Any]]:
    """Return why stock transformers cannot load a folder, or "", and what declares it beside."""
    found = stock_problem(facts)
    return found, {} if found or not facts.error else DEQUANTIZE


def pretrained_problem(facts: Facts, ignore: Sequence[str], refused: str) -> str:
    """Return why `save_pretrained`, which writes tensors under their names, is refused, or ""."""
    # ignore: names and patterns of what stays dense. refused: why no layout of others holds it.
    layers = facts.layers.values()
    if any(name.startswith("re:") for name in ignore):
        return "transformers would write its dense experts one by one, and not read them again."
    if any(layer.config.multiplies for layer in layers):
        return "It holds the global scales of another layout, to the bit."
    if any(layer.fmt.element.native for layer in layers):
        return "transformers would write 8-bit codes under names that others do not look for."
    if any(layer.is_stacked for layer in layers):
        return "transformers would write its stacks of experts in a layout that nobody reads."
    if not refused and any(map(LAYOUTS[CompressedTensors.name].problem, layers)):
        return "It has no layout that others know."
    return refused


# An expert of a mixture, by its name in a folder.
_EXPERT = re.compile(r"\.experts\.\d+\.")

# The schemes of experts that engines have no method for, by the layout.
_NO_EXPERTS = {
    "compressed-tensors": ("fp8a16", "fp8_blocka16", "fp8_tensora16", "fp8_tensor"),
    "modelopt": ("fp8", "fp8_blocka16"),
}

# The last parts of names of layers that engines put before another one.
_JOINED = {each for members in FUSED for each in members[:-1]}


def _engine_problem(engine: str, layout: str, layers: Mapping[str, PackedLayer]) -> str:
    """Return why a serving engine does not load the layers of a folder, or ""."""
    schemes = {layer.scheme for layer in layers.values()}
    in_blocks = {name: layer for name, layer in layers.items() if layer.fmt.rows > 1}
    for name, layer in layers.items():
        lacking = _NO_EXPERTS.get(layout.removesuffix("-hadamard"), ())
        if _EXPERT.search(name) and layer.config.inputs is not None:
            return f"experts in {layer.config.scheme} were not tested"
        if _EXPERT.search(name) and layer.scheme in lacking:
            return f"it has no method for experts in {layer.scheme} of this layout"
    for name, layer in in_blocks.items():
        rows, columns = layer.shape[-2:]
        if name.rpartition(".")[2] in _JOINED and rows % layer.fmt.rows:
            return f"it joins {name} with the next layer, and its rows do not fill blocks of 128"
        if layout == "modelopt" and columns % layer.fmt.block:
            return f"the columns of {name} do not fill blocks of 128"
    if "fp8_blocka16" in schemes and (engine == "SGLang" or layout != "modelopt"):
        return "it loads no weights only in fp8_block; vLLM does in the modelopt layout"
    if engine == "SGLang" and in_blocks and len(schemes) > 1:
        return "it does not load fp8_block beside other schemes"
    return ""


class Reads(NamedTuple):
    """The formats that a program reads in one layout, and a remark for the page."""

    # Keys, or schemes whose inputs have another format than the weights.
    formats: tuple[str, ...]
    remark: str = ""


_NO_LAYOUT = Reads((), "it does not support this layout")

_FP4, _FP8 = ("nvfp4", "mxfp4"), ("fp8", "fp8_block", "fp8_tensor")
_FP8_INPUTS = ("mxfp4a8", "mxfp4a8_block")

# By the program, in the version that was tested, and the name of a layout.
READERS: dict[str, dict[str, Reads]] = {
    "transformers 5.24 with compressed-tensors 0.20": {
        "compressed-tensors": Reads(
            (*_FP4, *_FP8, "mxfp8", *_FP8_INPUTS), "dequantized; exceptions below"
        ),
        "modelopt": _NO_LAYOUT,
        "compressed-tensors-hadamard": Reads((), "it ignores the rotation: outputs are wrong"),
        "finegrained-fp8": Reads(("fp8_block", "fp8_tensor"), "dequantized without a GPU"),
        "gpt-oss": Reads(("mxfp4",), "dequantized without a GPU"),
        "quark": Reads((), "it needs amd-quark"),
    },
    "vLLM 0.33": {
        "compressed-tensors": Reads(
            (*_FP4, *_FP8, "mxfp8", *_FP8_INPUTS),
            "it chooses whether to quantize inputs of mxfp4 and mxfp8",
        ),
        "modelopt": Reads(("nvfp4", *_FP8, "mxfp8"), "it quantizes the inputs of fp8_blocka16"),
        "compressed-tensors-hadamard": Reads((*_FP4, *_FP8, "mxfp8"), "without tensor parallelism"),
        "finegrained-fp8": Reads(("fp8_block",), "of fp8_tensor it looks for other names"),
        "gpt-oss": Reads((), "not tested"),
        "quark": Reads(("mxfp4", "mxfp4a8_tensor")),
    },
    "SGLang 0.5.23": {
        "compressed-tensors": Reads(("nvfp4", *_FP8), "it refuses mxfp4 and mxfp8"),
        "modelopt": Reads(("nvfp4", "fp8_tensor")),
        "compressed-tensors-hadamard": Reads((), "it ignores the rotation: outputs are wrong"),
        "finegrained-fp8": Reads((), "it drops the scales of LlamaForCausalLM without an error"),
        "gpt-oss": Reads((), "not tested"),
        "quark": Reads((), "not tested"),
    },
}


# The commands by which programs serve a folder.
_SERVE = {
    "vLLM": "vllm serve {}",
    "SGLang": "python -m sglang.launch_server --model-path {}",
    _OWN: "fp4pass serve {}",
}


class Readers(NamedTuple):
    """The programs that read a folder, and why others do not."""

    names: tuple[str, ...]
    reasons: tuple[str, ...] = ()
    writes_text: bool = False

    def commands(self, folder: str) -> list[str]:
        """Return the commands that serve a folder: those of engines, else fp4pass's own."""
        engines = [name for name in self.names if name in _SERVE and name != _OWN]
        own = [_OWN] if self.writes_text else []
        return [_SERVE[name].format(folder) for name in engines or own]

    def __str__(self) -> str:
        if self.names == (_OWN,) and not self.reasons:
            return f"read by {_OWN} alone"
        others = f"; not by {', '.join(self.reasons)}" if self.reasons else ""
        return f"read by {', '.join(self.names)}{others}"


def who_reads(
    layout: str, layers: Mapping[str, PackedLayer], architecture: str, stock: str = ""
) -> Readers:
    """Return the programs that read a folder with packed layers."""
    # architecture: "" for no model of transformers. stock: why transformers cannot load it, or "".
    writes_text = architecture.endswith("ForCausalLM")
    if not architecture or all(layout not in layouts for layouts in READERS.values()):
        return Readers((_OWN,), writes_text=writes_text)
    formats = {
        layer.config.scheme if layer.config.inputs else layer.fmt.key for layer in layers.values()
    }
    names, reasons = [_OWN], []
    for program, layouts in READERS.items():
        name, reads = program.split()[0], layouts.get(layout, _NO_LAYOUT)
        lacking = ", ".join(sorted(formats - set(reads.formats)))
        if not reads.formats:
            why = reads.remark
        elif lacking:
            why = f"it reads no dense {lacking}"
        elif name == "transformers":
            why = stock
        elif not architecture.endswith(SERVED):
            why = f"it may not have {architecture}"
        else:
            why = _engine_problem(name, layout, layers)
        if why:
            reasons.append(f"{name} ({why})")
        else:
            names.append(name)
    return Readers(tuple(names), tuple(reasons), writes_text)


def judge(
    layout: Layout, written: Mapping[str, PackedLayer], facts: Facts
) -> tuple[Readers, dict[str, Any], list[str]]:
    """Return who reads a folder of layers as `written`, its quantization_config, and warnings."""
    declared, stock, notes = dict(facts.declared), "", list[str]()
    is_stock, has_equal = isinstance(layout, CompressedTensors), layout.name == "finegrained-fp8"
    if declared and is_stock:
        stock, entries = of_stock(facts)
        declared |= entries
    for name, layer in written.items() if declared else ():
        if stock:
            break
        rows, columns = (n % 128 > 0 for n in layer.shape[-2:])
        if layer.fmt.rows > 1 and is_stock and columns and layer.config.input_format is not None:
            stock = f"it fails at the inputs of {name}, whose columns do not fill blocks of 128"
        elif layer.fmt.rows > 1 and has_equal and (rows or columns):
            stock = f"it, and vLLM, may read wrong scales of {name}, which fills no blocks of 128"
    if stock:
        notes.append(
            f"transformers cannot load this folder by itself: {stock}. fp4pass.load reads it."
        )
    elif is_stock and facts.has_cache:
        stock = _CACHE_IN_FLOAT
    readers = who_reads(
        layout.name, written, model_class(facts.root).__name__ if declared else "", stock
    )
    return readers, declared, notes
