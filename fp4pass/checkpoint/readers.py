"""Which programs read what `save` writes; docs/readers.md has the table of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import nn

from .._compat.torch import model_class
from .._compat.transformers import loading_error, replaced_classes
from ..experts import QuantizedExpertStack
from ..quantization.attention import CalledAttention
from .layouts import CompressedTensors, PackedLayer

# The classes of models that serving engines have.
SERVED = ("ForCausalLM", "ForConditionalGeneration")

_OWN = "fp4pass"

_NO_LAYOUT = "it knows no such layout"


class Reads(NamedTuple):
    """What a program reads in one layout: formats, and a remark for the page."""

    formats: tuple[str, ...]
    remark: str = ""


# By the program, in the version that was tried, and the name of a layout.
READERS: dict[str, dict[str, Reads]] = {
    "transformers 5.23 with compressed-tensors 0.20": {
        "compressed-tensors": Reads(("nvfp4", "mxfp4"), "not the classes below; it dequantizes"),
        "modelopt": Reads((), _NO_LAYOUT),
        "compressed-tensors-hadamard": Reads((), "it ignores the rotation, and outputs are wrong"),
        "gpt-oss": Reads(("mxfp4",), "without a GPU it dequantizes"),
    },
    "vLLM 0.33": {
        "compressed-tensors": Reads(
            ("nvfp4", "mxfp4"), "it decides by itself whether inputs of mxfp4 are quantized"
        ),
        "modelopt": Reads(("nvfp4",)),
        "compressed-tensors-hadamard": Reads(("nvfp4", "mxfp4"), "without tensor parallelism"),
        "gpt-oss": Reads((), "not tried"),
    },
    "SGLang 0.5.23": {
        "compressed-tensors": Reads(("nvfp4",), "it refuses dense mxfp4"),
        "modelopt": Reads(("nvfp4",)),
        "compressed-tensors-hadamard": Reads((), "not tried"),
        "gpt-oss": Reads((), "not tried"),
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


def who_reads(layout: str, formats: Collection[str], architecture: str, problem: str) -> Readers:
    """Return the programs that read a folder; as a string, words that say so.

    `architecture` is "" for a model that is not of transformers; `problem` is why stock
    transformers cannot load this one, or "".
    """
    if not architecture or all(layout not in layouts for layouts in READERS.values()):
        return Readers((_OWN,))
    names, reasons = [_OWN], []
    for program, layouts in READERS.items():
        name = program.split()[0]
        reads = layouts.get(layout, Reads((), _NO_LAYOUT))
        lacking = ", ".join(sorted(set(formats) - set(reads.formats)))
        why = f"it reads no dense {lacking}" if lacking and reads.formats else ""
        if not reads.formats:
            why = reads.remark
        elif name == "transformers":
            why = why or problem
        elif not architecture.endswith(SERVED):
            why = why or f"it may not have {architecture}"
        if why:
            reasons.append(f"{name} ({why})")
        else:
            names.append(name)
    return Readers(tuple(names), tuple(reasons))


# Has transformers dequantize while it loads, into the layers of the float model. Serving engines do
# not look at it.
DEQUANTIZE = {"dequantize": True}

_ARGUMENT = "quantization_config=CompressedTensorsConfig(dequantize=True)"


def for_transformers(
    root: nn.Module,
    layers: Mapping[str, PackedLayer],
    stacks: Collection[str],
    merged: Collection[str],
    declared: Mapping[str, Any],
) -> tuple[str, dict[str, Any]]:
    """Return why stock transformers cannot load a folder, "" if it can.

    Args:
        root: the converted model.
        layers: what is packed in it.
        stacks: those of them that the folder has a layer for each expert of.
        merged: those of the stacks that transformers makes of these layers again.
        declared: the quantization_config of the compressed-tensors layout.

    Returns:
        problem: why it cannot, or "".
        entries: what the quantization_config needs beside for it to load the folder.
    """
    labels = {name: CompressedTensors.label(layer) for name, layer in layers.items()}
    plain = [name for name in layers if name not in stacks]
    of_plain, of_experts = _read_formats(declared)
    if any(isinstance(module, CalledAttention) for module in root.modules()):
        return "its nn.MultiheadAttention does not call its projections, which are packed", {}
    if any(isinstance(m, QuantizedExpertStack) and m.view.spare for m in root.modules()):
        return "it looks for weights of experts that only give back their input", {}
    if any(layers[name].fmt.has_global_scale for name in merged):
        return (
            "it drops the global scales of experts (transformers issue 48371); mxfp4 has none, and "
            'rules=[("*.experts.*", {"fmt": "mxfp4"})] of convert makes a folder that it loads'
        ), {}
    if not all(layers[name].config.weight_only for name in merged):
        return "it leaves the inputs of experts in floating point", {}
    if any(labels[name] != of_experts for name in merged):
        return "it reads experts by the scheme of other layers", {}
    patched = replaced_classes(CompressedTensors.name)
    for name, module in root.named_modules():
        if type(module).__name__ in patched:
            return f"it replaces {name} by a module with other weights, which stay random", {}
    for name in set(stacks) - set(merged):
        owner: Any = root.get_submodule(name.rpartition(".")[0])
        if owner.kind.__name__ not in patched:
            return "it reads experts of this class from stacks only, and they would stay random", {}
    error = loading_error(root, plain)
    if not error:
        return "", {}
    problem = f"it cannot initialize {model_class(root).__name__} with packed layers ({error})"
    if loading_error(root, ()) or "transform_config" in declared:
        return problem, {}
    if any(labels[name] != of_plain for name in plain):
        return f"{problem}, and dequantizes them all by the scheme of one", {}
    if not all(layers[name].config.weight_only for name in plain):
        return f"{problem}; with {_ARGUMENT} it does, and leaves inputs in floating point", {}
    return "", DEQUANTIZE


def _read_formats(declared: Mapping[str, Any]) -> tuple[str, str]:
    """Return the formats by which transformers dequantizes while it loads, by its own rule.

    It takes one group for all layers, and one for all experts.
    """
    groups = list(declared["config_groups"].values())
    apart = [
        any(each.startswith("re:") and "experts" in each for each in group["targets"])
        for group in groups
    ]
    plain = groups[apart.index(False)] if False in apart else groups[0]
    experts = groups[apart.index(True)] if True in apart else groups[0]
    return plain["format"], experts["format"]
