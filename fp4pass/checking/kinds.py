"""Name what can be wrong with a folder: what each kind means for a user, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Remedies: the file comes again, the model is quantized again, or --repair does it.
COPY = "Copy the folder again"
QUANTIZE = "Quantize the float model again: fp4pass quantize MODEL -o OUT"
REPAIR = "fp4pass verify DIR --repair OUT"


@dataclass(frozen=True)
class Kind:
    """A kind of damage.

    Attributes:
        name: of the kind, which does not change.
        meaning: the consequence for a user of the folder.
        remedy: the command that repairs it, or what else does.

    Example:
        >>> fp4pass.checking.KINDS["scale-nan"].meaning
        'Every product with this layer is NaN, or has the wrong sign.'
    """

    name: str
    meaning: str
    remedy: str


_TABLE = (
    # Files.
    Kind(
        "file-missing",
        "The weights are incomplete; readers stop, or fill in random numbers.",
        f"{COPY}; {REPAIR} writes an index without it, if other files hold its tensors",
    ),
    Kind("file-damaged", "The file was cut off or changed; readers stop at it.", COPY),
    Kind("json-damaged", "No reader gets past this file.", COPY),
    Kind("checksum", "The tensor is not the one that was saved.", COPY),
    Kind(
        "index",
        "Readers look for tensors in the wrong file, or do not look for them at all.",
        f"{REPAIR} writes the index that the files make",
    ),
    Kind("tensor-missing", "Readers stop, or leave random numbers there.", COPY),
    Kind(
        "duplicate",
        "Which of two tensors of one name is read depends on the reader.",
        f"{REPAIR} keeps one, if both have the same bits",
    ),
    # Parts of a packed layer.
    Kind(
        "companion-missing",
        "Codes mean nothing without their scales; some engines use uninitialized memory.",
        f"{COPY}, or: {QUANTIZE}",
    ),
    Kind(
        "orphan",
        "Scales without codes: the layer is lost, or a dense one has remains of a packed one.",
        f"{REPAIR} drops the remains where the layer is there in full precision",
    ),
    Kind(
        "twice",
        "The layer is both packed and dense; which one is read depends on the reader.",
        f"{REPAIR} keeps what the config declares",
    ),
    Kind("shape", "Codes and scales do not fit each other; readers stop.", f"{COPY}; {QUANTIZE}"),
    Kind(
        "block-size",
        "The config declares other blocks than the scales have.",
        f"{REPAIR} declares those of the scales",
    ),
    Kind(
        "dtype",
        "Readers cast the numbers to the dtype that they expect, and change them.",
        f"{REPAIR} stores them in the dtype of the layout, where each of them has one",
    ),
    Kind(
        "names",
        "Every name has a wrapper's prefix: readers find no tensor of the model.",
        f"{REPAIR} takes the prefix off",
    ),
    # Numbers.
    Kind("scale-nan", "Every product with this layer is NaN, or has the wrong sign.", QUANTIZE),
    Kind("codes-nan", "Every product with this layer is NaN.", QUANTIZE),
    Kind("scale-zero", "Weights of these blocks are read as zeros.", QUANTIZE),
    Kind("scale-uncalibrated", "All blocks are read at one size; outputs are noise.", QUANTIZE),
    Kind("global-bad", "The whole layer is read as NaN, infinity or zeros.", QUANTIZE),
    Kind(
        "global-direction",
        "It multiplies where the layout divides, or the reverse; outputs are NaN or noise.",
        f"{REPAIR} stores the reciprocal",
    ),
    Kind("weights-size", "No trained model has weights of this size.", QUANTIZE),
    Kind("codes-zero", "Rows of weights are lost, as by an incomplete download.", COPY),
    Kind("dead", "A layer or an expert of zeros adds nothing to any token.", QUANTIZE),
    Kind("dense-bad", "Outputs are NaN.", f"{COPY}; {QUANTIZE}"),
    Kind(
        "input-bad",
        "Inputs of this layer are quantized to NaN, zeros or infinity in 4-bit products.",
        f"{REPAIR} gives experts the largest scale of the others of their layer; else calibrate "
        "again",
    ),
    Kind(
        "input-missing",
        "Engines that quantize inputs refuse the folder, or choose a scale. An expert that "
        "calibration never reached looks like this.",
        f"{REPAIR} gives experts the largest scale of the others of their layer; else calibrate "
        "again",
    ),
    Kind(
        "input-uncalibrated",
        "Input scales were never calibrated: inputs are clipped or lost.",
        "Calibrate and quantize the float model again, or keep inputs in floating point",
    ),
    Kind(
        "input-direction",
        "It multiplies where the layout divides, or the reverse; inputs become zeros or are "
        "clipped.",
        f"{REPAIR} stores the reciprocal",
    ),
    Kind("cache-scale", "Keys or values of the cache are read as NaN or zeros.", QUANTIZE),
    # Order.
    Kind(
        "codes-order",
        "Codes are in another order than the layout's (nibbles swapped, or halves of a block "
        "interleaved): outputs are nonsense.",
        "Export the folder again with the order of its layout",
    ),
    Kind(
        "rows-order",
        "Rows of this layer are not in the order of the columns that read them.",
        "Export the folder again with rows in the model's order",
    ),
    Kind(
        "scale-order",
        "Scales are stored in the tiles of a kernel (128 x 4), not row by row.",
        "Export the folder again with scales row by row",
    ),
    # Layers in engines, and what the configs declare.
    Kind(
        "fused-scales",
        "Engines fuse these layers into one matrix and keep the larger global scale for all, so "
        "the others are read at the wrong size.",
        f"{REPAIR} quantizes them to the larger one",
    ),
    Kind(
        "fused-schemes",
        "Engines fuse these layers into one matrix, which has one scheme.",
        "Quantize them alike, by a rule for all of them",
    ),
    Kind("expert-missing", "The router sends tokens to a missing expert.", COPY),
    Kind(
        "ignore-packed",
        "Readers make a dense layer there, find no weight, and leave random numbers.",
        f"{REPAIR} takes it off the list",
    ),
    Kind(
        "ignore-misses",
        "Readers make a packed layer there, find no codes, and leave random numbers.",
        f"{REPAIR} puts it on the list",
    ),
    Kind(
        "config-absent",
        "Readers take the codes for a float model.",
        f"{REPAIR} writes the quantization_config of the tensors",
    ),
    Kind(
        "config-layout",
        "Readers look for tensors of other names.",
        f"{REPAIR} writes the quantization_config of the tensors",
    ),
    Kind(
        "config-disagrees",
        "Readers follow one or the other.",
        f"{REPAIR} writes what the tensors say into both",
    ),
    Kind(
        "config-changed",
        "fp4pass refuses a folder whose config.json is not what was saved with it.",
        f"{REPAIR} writes the saved one",
    ),
    Kind(
        "config-model",
        "The config describes another model than these tensors.",
        f"{COPY}, with the config.json of this model",
    ),
    Kind(
        "tied-head",
        "Readers tie the output embedding to the input's, and drop the packed one or stop.",
        f"{REPAIR} declares that they are not tied",
    ),
    Kind(
        "mtp-absent",
        "Engines that predict several tokens look for missing layers.",
        f"{REPAIR} declares that there are none",
    ),
    Kind(
        "tokenizer-missing",
        "Engines cannot serve text.",
        "Copy the files of the tokenizer from the float model",
    ),
    Kind(
        "chat-template-missing",
        "Engines refuse chats, or format them in another way.",
        "Copy chat_template.jinja from the float model",
    ),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _TABLE}


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a folder.

    Attributes:
        kind: the name of an entry of `KINDS`.
        where: the tensor, the layer or the file.
        file: the file that it is in, "" for one that is not there.
        found: what was expected there, and what there is.

    Example:
        >>> fp4pass.checking.Finding("dead", "a.weight", "model.safetensors", "got zeros").meaning
        'A layer or an expert of zeros adds nothing to any token.'
    """

    kind: str
    where: str
    file: str
    found: str

    @property
    def meaning(self) -> str:
        """The consequence for a user of the folder."""
        return KINDS[self.kind].meaning

    @property
    def remedy(self) -> str:
        """The command that repairs it, or what else does."""
        return KINDS[self.kind].remedy

    def __str__(self) -> str:
        place = f"{self.file}: " if self.file and self.file != self.where else ""
        return f"{self.where}: {place}{self.found}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values.

        Example:
            >>> found = fp4pass.checking.Finding("dead", "a.weight", "model.safetensors", "zeros")
            >>> sorted(found.to_dict())
            ['file', 'found', 'kind', 'meaning', 'remedy', 'where']
        """
        return {**vars(self), "meaning": self.meaning, "remedy": self.remedy}
