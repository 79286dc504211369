"""Which programs read what `save` writes; docs/readers.md has the table of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

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
