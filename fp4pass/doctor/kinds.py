"""Name what can be wrong with a folder: what each kind means for a user, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Remedies: the files come again, the model is quantized again, or a part of the config is right.
COPY = "Copy the folder again"
QUANTIZE = "Quantize the float model again: fp4pass quantize MODEL -o OUT"
EXPORT = "Export the folder again"


@dataclass(frozen=True)
class Kind:
    """A kind of damage.

    Attributes:
        name: of the kind, which does not change.
        meaning: the consequence for a user of the folder.
        remedy: what to do about it.

    Example:
        >>> fp4pass.doctor.KINDS["scale-nan"].meaning
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
        COPY,
    ),
    Kind("file-damaged", "The file was cut off or changed; readers stop at it.", COPY),
    Kind("json-damaged", "No reader gets past this file.", COPY),
    Kind("checksum", "The tensor is not the one that was saved.", COPY),
    Kind(
        "index",
        "Readers look for tensors in the wrong file, or do not look for them at all.",
        f"{COPY}, with its index",
    ),
    Kind("tensor-missing", "Readers stop, or leave random numbers there.", COPY),
    Kind(
        "duplicate",
        "Which of two tensors of one name is read depends on the reader.",
        f"{COPY}, without files of another one",
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
        f"{COPY}, or: {QUANTIZE}",
    ),
    Kind(
        "twice",
        "The layer is both packed and dense; which one is read depends on the reader.",
        f"{EXPORT} with one of the two",
    ),
    Kind("shape", "Codes and scales do not fit each other; readers stop.", f"{COPY}; {QUANTIZE}"),
    Kind(
        "block-size",
        "The config declares other blocks than the scales have.",
        f"{COPY}, with its config.json",
    ),
    Kind(
        "dtype",
        "Readers cast the numbers to the dtype that they expect, and change them.",
        f"{EXPORT} in the dtypes of its layout",
    ),
    Kind(
        "names",
        "Every name has a wrapper's prefix: readers find no tensor of the model.",
        f"{EXPORT} from the model inside the wrapper",
    ),
    # Numbers.
    Kind("scale-nan", "Every product with this layer is NaN, or has the wrong sign.", QUANTIZE),
    Kind("codes-nan", "Every product with this layer is NaN.", QUANTIZE),
    Kind("scale-zero", "Weights of these blocks are read as zeros.", QUANTIZE),
    Kind("scale-size", "Products with these blocks are infinite, or noise.", f"{COPY}; {QUANTIZE}"),
    Kind("scale-uncalibrated", "All blocks are read at one size; outputs are noise.", QUANTIZE),
    Kind("global-bad", "The whole layer is read as NaN, infinity or zeros.", QUANTIZE),
    Kind(
        "global-direction",
        "It multiplies where the layout divides, or the reverse; outputs are NaN or noise.",
        f"{EXPORT} with the reciprocal",
    ),
    Kind("weights-size", "No trained model has weights of this size.", QUANTIZE),
    Kind("codes-zero", "Rows of weights are lost, as by an incomplete download.", COPY),
    Kind("dead", "A layer or an expert of zeros adds nothing to any token.", QUANTIZE),
    Kind("dense-bad", "Outputs are NaN.", f"{COPY}; {QUANTIZE}"),
    Kind(
        "input-bad",
        "Inputs of this layer are quantized to NaN, zeros or infinity in 4-bit products.",
        "Calibrate and quantize the float model again",
    ),
    Kind(
        "input-missing",
        "Engines that quantize inputs refuse the folder, or choose a scale. An expert that "
        "calibration never reached looks like this.",
        "Calibrate and quantize the float model again",
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
        f"{EXPORT} with the reciprocal",
    ),
    Kind("cache-scale", "Keys or values of the cache are read as NaN or zeros.", QUANTIZE),
    # Order.
    Kind(
        "codes-order",
        "Codes are in another order than the layout's (nibbles swapped, or halves of a block "
        "interleaved): outputs are nonsense.",
        f"{EXPORT} with the order of its layout",
    ),
    Kind(
        "rows-order",
        "Rows of this layer are not in the order of the columns that read them.",
        f"{EXPORT} with rows in the model's order",
    ),
    Kind(
        "scale-order",
        "Scales are stored in the tiles of a kernel (128 x 4), not row by row.",
        f"{EXPORT} with scales row by row",
    ),
    # Layers in engines, and what the configs declare.
    Kind(
        "fused-scales",
        "Engines fuse these layers into one matrix and keep the larger global scale for all, so "
        "the others are read at the wrong size.",
        f"{COPY}, or: {QUANTIZE}",
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
        "Take it off the list of dense layers",
    ),
    Kind(
        "ignore-misses",
        "Readers make a packed layer there, find no codes, and leave random numbers.",
        "Put it on the list of dense layers",
    ),
    Kind(
        "config-absent",
        "Readers take the codes for a float model.",
        f"{COPY}, with its config.json",
    ),
    Kind(
        "config-layout",
        "Readers look for tensors of other names.",
        f"{COPY}, with its config.json",
    ),
    Kind(
        "config-disagrees",
        "Readers follow one or the other.",
        f"{COPY}, with the configs of one export",
    ),
    Kind(
        "config-changed",
        "fp4pass refuses a folder whose config.json is not what was saved with it.",
        f"{COPY}, with the config.json that was saved",
    ),
    Kind(
        "config-model",
        "The config describes another model than these tensors.",
        f"{COPY}, with the config.json of this model",
    ),
    Kind(
        "tied-head",
        "Readers tie the output embedding to the input's, and drop the packed one or stop.",
        "Set tie_word_embeddings to false",
    ),
    Kind(
        "mtp-absent",
        "Engines that predict several tokens look for missing layers.",
        "Set it to 0",
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
        >>> fp4pass.doctor.Finding("dead", "a.weight", "model.safetensors", "got zeros").meaning
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
        """The way out for a user of the folder."""
        return KINDS[self.kind].remedy

    def __str__(self) -> str:
        place = f"{self.file}: " if self.file and self.file != self.where else ""
        return f"{self.where}: {place}{self.found}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values.

        Example:
            >>> found = fp4pass.doctor.Finding("dead", "a.weight", "model.safetensors", "zeros")
            >>> sorted(found.to_dict())
            ['file', 'found', 'kind', 'meaning', 'remedy', 'where']
        """
        return {**vars(self), "meaning": self.meaning, "remedy": self.remedy}
