"""Name what can be wrong with a folder: what each kind means for a user, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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


_COPY = "Copy the folder again"
_QUANTIZE = "Quantize the float model again: fp4pass quantize MODEL -o OUT"
_CALIBRATE = "Calibrate and quantize the float model again"
_EXPORT = "Export the folder again"

# The kinds with their meaning, by their remedy.
_REMEDIES = {
    _COPY: {
        "file-missing": "The weights are incomplete; readers stop, or fill in random numbers.",
        "file-damaged": "The file was cut off or changed; readers stop at it.",
        "json-damaged": "No reader gets past this file.",
        "checksum": "The tensor is not the one that was saved.",
        "tensor-missing": "Readers stop, or leave random numbers there.",
        "codes-zero": "Rows of weights are lost, as by an incomplete download.",
        "expert-missing": "The router sends tokens to a missing expert.",
    },
    f"{_COPY}, with its index": {
        "index": "Readers look for tensors in the wrong file, or not at all.",
    },
    f"{_COPY}, without files of another one": {
        "duplicate": "Which of two tensors of one name is read depends on the reader.",
    },
    f"{_COPY}, with its config.json": {
        "block-size": "The config declares other blocks than the scales have.",
        "config-absent": "Readers take the codes for a float model.",
        "config-layout": "Readers look for tensors of other names.",
        "config-disagrees": "Readers follow one or the other.",
        "config-changed": "fp4pass refuses a folder whose config.json was changed after saving.",
        "config-model": "The config describes another model than these tensors.",
    },
    f"{_COPY}, or: {_QUANTIZE}": {
        "companion-missing": "Codes mean nothing without their scales; some engines use "
        "uninitialized memory.",
        "orphan": "Scales without codes: the layer is lost, or a dense one has remains of a packed "
        "one.",
        "shape": "Codes and scales do not fit each other; readers stop.",
        "scale-size": "Products with these blocks are infinite, or noise.",
        "dense-bad": "Outputs are NaN.",
        "fused-scales": "Engines fuse these layers into one matrix and keep the larger global "
        "scale for all, so the others are read at the wrong size.",
    },
    _QUANTIZE: {
        "scale-nan": "Every product with this layer is NaN, or has the wrong sign.",
        "codes-nan": "Every product with this layer is NaN.",
        "scale-zero": "Weights of these blocks are read as zeros.",
        "scale-uncalibrated": "All blocks are read at one size; outputs are noise.",
        "global-bad": "The whole layer is read as NaN, infinity or zeros.",
        "weights-size": "No trained model has weights of this size.",
        "dead": "A layer or an expert of zeros adds nothing to any token.",
        "cache-scale": "Keys or values of the cache are read as NaN or zeros.",
    },
    _CALIBRATE: {
        "input-bad": "Inputs of this layer are quantized to NaN, zeros or infinity in 4-bit "
        "products.",
        "input-missing": "Engines that quantize inputs refuse the folder, or choose a scale. An "
        "expert that calibration never reached looks like this.",
    },
    f"{_CALIBRATE}, or keep inputs in floating point": {
        "input-uncalibrated": "Input scales were never calibrated: inputs are clipped or lost.",
    },
    f"{_EXPORT} with the reciprocal": {
        "global-direction": "It multiplies where the layout divides, or the reverse; outputs are "
        "NaN or noise.",
        "input-direction": "It multiplies where the layout divides, or the reverse; inputs become "
        "zeros or are clipped.",
    },
    f"{_EXPORT} in the order and the dtypes of its layout": {
        "dtype": "Readers cast the numbers to the dtype that they expect, and change them.",
        "codes-order": "Codes are in another order than the layout's (nibbles swapped, or halves "
        "of a block interleaved): outputs are nonsense.",
        "rows-order": "Rows of this layer are not in the order of the columns that read them.",
        "scale-order": "Scales are stored in the tiles of a kernel (128 x 4), not row by row.",
    },
    f"{_EXPORT} from the model inside the wrapper": {
        "names": "Every name has a wrapper's prefix: readers find no tensor of the model.",
    },
    f"{_EXPORT} with one of the two": {
        "twice": "The layer is both packed and dense; which one is read depends on the reader.",
    },
    "Quantize them alike, by a rule for all of them": {
        "fused-schemes": "Engines fuse these layers into one matrix, which has one scheme.",
    },
    "Take it off the list of dense layers": {
        "ignore-packed": "Readers make a dense layer there, find no weight, and leave random "
        "numbers.",
    },
    "Put it on the list of dense layers": {
        "ignore-misses": "Readers make a packed layer there, find no codes, and leave random "
        "numbers.",
    },
    "Set tie_word_embeddings to false": {
        "tied-head": "Readers tie the output embedding to the input's, and drop the packed one or "
        "stop.",
    },
    "Set it to 0": {"mtp-absent": "Engines that predict several tokens look for missing layers."},
    "Copy it from the float model": {
        "tokenizer-missing": "Engines cannot serve text.",
        "chat-template-missing": "Engines refuse chats, or format them in another way.",
    },
}

KINDS: dict[str, Kind] = {
    name: Kind(name, meaning, remedy)
    for remedy, kinds in _REMEDIES.items()
    for name, meaning in kinds.items()
}


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
