"""Read a folder without believing it: its files, its config, and the parts of its layers.

Each fault is of a kind, with its meaning for a user and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .. import checkpoint
from ..core.formats import FORMATS
from ..errors import CheckpointError, Fp4PassError, UnreadError, some
from ..nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from ..record import LinearConfig

_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.safetensors$")

# Of names that torch.compile, data parallelism and trainers put in front.
_PREFIXES = ("_orig_mod.", "module.", "_fsdp_wrapped_module.")

# The layer of one expert: all before its number, the number, all after it.
EXPERT = re.compile(r"^(.*\bexperts)\.(\d+)\.(.*)$")

# Sizes of 8 bits or less: codes, whatever a writer calls them.
_BYTES = ("U8", "I8", "F8_E8M0", "F4")


class Kind(NamedTuple):
    """A kind of damage: its consequence for a user of the folder, and the remedy.

    Example:
        >>> fp4pass.doctor.KINDS["scale-nan"].meaning
        'Every product with this layer is NaN, or has the wrong sign.'
    """

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
        "index": "Readers look for tensors in the wrong file, or not at all."
    },
    f"{_COPY}, without files of another one": {
        "duplicate": "Which of two tensors of one name is read depends on the reader."
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
        "input-uncalibrated": "Input scales were never calibrated: inputs are clipped or lost."
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
        "names": "Every name has a wrapper's prefix: readers find no tensor of the model."
    },
    f"{_EXPORT} with one of the two": {
        "twice": "The layer is both packed and dense; which one is read depends on the reader."
    },
    "Quantize them alike, by a rule for all of them": {
        "fused-schemes": "Engines fuse these layers into one matrix, which has one scheme."
    },
    "Take it off the list of dense layers": {
        "ignore-packed": "Readers make a dense layer there, find no weight, and leave random "
        "numbers."
    },
    "Put it on the list of dense layers": {
        "ignore-misses": "Readers make a packed layer there, find no codes, and leave random "
        "numbers."
    },
    "Set tie_word_embeddings to false": {
        "tied-head": "Readers tie the output embedding to the input's, and drop the packed one or "
        "stop."
    },
    "Set it to 0": {"mtp-absent": "Engines that predict several tokens look for missing layers."},
    "Copy it from the float model": {
        "tokenizer-missing": "Engines cannot serve text.",
        "chat-template-missing": "Engines refuse chats, or format them in another way.",
    },
}

KINDS = {
    name: Kind(meaning, remedy)
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


class Stored(NamedTuple):
    """A tensor in a file."""

    name: str
    file: str
    kind: str  # the safetensors dtype
    shape: tuple[int, ...]
    source: Any  # the opened file

    def read(self) -> Tensor:
        """Return the tensor, which is the file itself."""
        tensor: Tensor = self.source.get_tensor(self.name)
        return tensor


@dataclass
class Folder:
    """A folder as far as it can be read, and what is wrong with its files and layers."""

    path: Path
    config: Mapping[str, Any]  # {} without one, or where it is damaged
    own: Mapping[str, Any] | None  # fp4pass.json; of another version it is as none
    layout: checkpoint.Layout  # that of the tensors
    declarations: Mapping[str, Mapping[str, Any]]  # the quantization_config in each file of one
    tensors: Mapping[str, Stored]
    findings: list[Finding]
    # The layers whose parts fit each other, and their tensors.
    records: dict[str, checkpoint.PackedLayer] = field(default_factory=dict)
    parts: dict[str, dict[str, Stored]] = field(default_factory=dict)
    # The names of the tensors of other layers, and the layers that fp4pass does not read.
    broken: set[str] = field(default_factory=set)
    unread: dict[str, list[str]] = field(default_factory=dict)

    def say(self, kind: str, where: str | Stored, found: str, file: str = "") -> None:
        """Note what is wrong with a tensor, a layer or a file."""
        if isinstance(where, Stored):
            file = where.file
        name = where.name if isinstance(where, Stored) else where
        self.findings.append(Finding(kind, name, file, found))

    def fact(self, key: str) -> Any:
        """Return what the config says of the model, or of its part for text."""
        text = self.config.get("text_config")
        return self.config.get(key) or (text.get(key) if isinstance(text, Mapping) else None)

    @property
    def declared(self) -> Mapping[str, Any] | None:
        """The quantization_config that counts."""
        return next(iter(self.declarations.values()), None)

    @property
    def packed(self) -> set[str]:
        """The names of the tensors of packed layers."""
        return {each.name for held in self.parts.values() for each in held.values()}

    @property
    def lost_files(self) -> set[str]:
        """The files that are missing or damaged."""
        lost = ("file-missing", "file-damaged")
        return {each.where for each in self.findings if each.kind in lost}

    def multiplies(self, layer: str) -> bool:
        """Return whether stored global scales multiply; one of inputs alone always does."""
        return self.layout.multiplies or not self.records[layer].fmt.has_global_scale

    def name_of(self, layer: str, part: str) -> str:
        """Return the name on disk of a part of a layer."""
        last = self.layout.parts[part]
        return layer + last if self.layout.stacks else checkpoint.join(layer, last)

    def dense_layers(self) -> list[str]:
        """Return the layers with a dense matrix and no codes."""
        packed = self.packed
        layers = {
            name.removesuffix(".weight")
            for name, each in self.tensors.items()
            if name.endswith(".weight")
            and name not in packed
            and len(each.shape) > 1
            and each.kind in ("BF16", "F16", "F32")
        }
        return sorted(layers - set(self.records))


def read_folder(path: Path) -> Folder:
    """Read a folder, and note what does not fit. Raises CheckpointError if nothing is packed."""
    findings: list[Finding] = []
    config = _json(path / "config.json", findings) or {}
    files = {"config.json": config.get("quantization_config")}
    files |= {name: _json(path / name, findings) for name in checkpoint.side_files()}
    own, records = None, {}
    try:
        if (own := checkpoint.read_manifest(path, any_version=True)) is not None:
            records = {
                n: checkpoint.PackedLayer.from_dict(each) for n, each in own["layers"].items()
            }
            dict(own["tensors"])
    except (Fp4PassError, TypeError, ValueError, LookupError, AttributeError) as error:
        own, what = None, f"expected what save wrote: {error}"
        findings.append(Finding("json-damaged", checkpoint.MANIFEST, checkpoint.MANIFEST, what))
    with checkpoint.well_formed(path / "config.json"):
        said = {name: each for name, each in files.items() if isinstance(each, Mapping) and each}
        kinds = [
            each for each in checkpoint.LAYOUTS.values() if any(map(each.detect, said.values()))
        ]
        chosen = (
            next(iter(kinds), None) if own is None else checkpoint.LAYOUTS.get(str(own["layout"]))
        )
        tensors = _tensors(path, checkpoint.WEIGHTS if chosen is None else chosen.weights, findings)
        layout = _layout_of(path, chosen, said, tensors, findings)
        declared = {name: each for name, each in said.items() if layout.detect(each)}
        found = Folder(path, config, own, layout, declared, tensors, findings)
        _find_layers(found, records)
        _check_names(found)
    if not (found.records or findings or found.unread):
        raise CheckpointError(f"{path} holds no packed weight. Load it with transformers.")
    return found


def _layout_of(
    path: Path,
    chosen: checkpoint.Layout | None,
    said: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    findings: list[Finding],
) -> checkpoint.Layout:
    """Return the layout of the tensors; note where the config says another one, or none."""

    def codes(layout: checkpoint.Layout) -> list[str]:
        last, scales = layout.parts[PACKED], layout.parts[SCALE]
        names = (n for n, each in tensors.items() if n.endswith(last) and each.kind == "U8")
        return [name for name in names if f"{name.removesuffix(last)}{scales}" in tensors]

    others = [each for each in checkpoint.LAYOUTS.values() if each.engines and each is not chosen]
    fits = next(filter(codes, others), None)
    if chosen is not None and (fits is None or codes(chosen)):
        return chosen
    if fits is None or (said and chosen is None):
        # It says why.
        checkpoint.open_checkpoint(path, any_version=True)
        raise CheckpointError(f"{path} holds no packed weight. Load it with transformers.")
    names = some(codes(fits), 2)
    kind = "config-layout" if said else "config-absent"
    what = f"expected a quantization_config, got none beside tensors of {fits.name} ({names})"
    if chosen is not None:
        what = f"expected {fits.name}, whose tensors there are ({names}), got {chosen.name}"
    findings.append(Finding(kind, "config.json", "config.json", what))
    return fits


def _json(path: Path, findings: list[Finding]) -> dict[str, Any] | None:
    try:
        return checkpoint.read_json(path) if path.is_file() else None
    except CheckpointError as error:
        what = f"expected JSON of an object: {error}"
        findings.append(Finding("json-damaged", path.name, path.name, what))
        return None


def _tensors(folder: Path, base: str, findings: list[Finding]) -> dict[str, Stored]:
    """Return the tensors of all files that can be read; note what is wrong with the others."""
    file = f"{base}.index.json"
    listed = _json(folder / file, findings)
    index: dict[str, str] = {}
    if listed is not None and isinstance(listed.get("weight_map"), dict):
        index = {str(name): str(where) for name, where in listed["weight_map"].items()}
    names = set(index.values())
    for path in folder.glob(f"{base.removesuffix('.safetensors')}-*.safetensors"):
        # Each names the number of all, also of those that no index names.
        if match := _SHARD.search(path.name):
            stem, count = path.name[: match.start()], match[1]
            names |= {f"{stem}-{i:05}-of-{count}.safetensors" for i in range(1, int(count) + 1)}
    if (folder / base).is_file() or not names:
        names.add(base)
    tensors: dict[str, Stored] = {}
    lost = set()
    for name in sorted(names):
        path, held = folder / name, dict[str, Stored]()
        if Path(name).is_absolute() or ".." in Path(name).parts or not path.is_file():
            lost.add(name)
            findings.append(Finding("file-missing", name, "", "expected weights, got no file"))
            continue
        try:
            held = _read_header(path)
        except (OSError, ValueError, SafetensorError) as error:
            lost.add(name)
            findings.append(Finding("file-damaged", name, name, str(error)))
        for each, stored in held.items():
            if each in tensors:
                both = f"expected one tensor of this name, got another in {tensors[each].file}"
                findings.append(Finding("duplicate", each, name, both))
            # The entry of the index decides, else the first.
            if each not in tensors or index.get(each) == name:
                tensors[each] = stored
    if listed is not None:
        for name, where in index.items():
            if name not in tensors and where not in lost:
                what = f"expected it in {where}, got no such tensor in any file"
                findings.append(Finding("tensor-missing", name, file, what))
        for name, stored in tensors.items():
            if index.get(name) != stored.file:
                what = f"expected {stored.file}, which holds it, got {index.get(name, 'no entry')}"
                findings.append(Finding("index", name, file, what))
    return tensors


def _read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file. Raises ValueError or SafetensorError for what is none."""
    with path.open("rb") as stream:
        if stream.read(64).startswith(b"version https://git-lfs"):
            raise ValueError("expected weights, got a pointer of Git LFS to them")
    size = path.stat().st_size
    try:
        source: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"expected a whole file, got {size} bytes that are not: {error}") from None
    slices = {name: source.get_slice(name) for name in source.keys()}
    return {
        name: Stored(name, path.name, each.get_dtype(), tuple(each.get_shape()), source)
        for name, each in slices.items()
    }


def _find_layers(found: Folder, records: Mapping[str, checkpoint.PackedLayer]) -> None:
    """Find the packed layers and note what is wrong with their parts; `records` are of save."""
    if found.own is None and not found.layout.engines:
        what = "expected it, of this version, for it alone says how layers are packed, got none"
        found.say("file-missing", checkpoint.MANIFEST, what)
        return
    parts = _parts_of(found.layout, found.tensors, records)
    for layer in {**records, **parts}:
        held = parts.get(layer, {})
        record = records.get(layer) or _record(found, layer, held)
        if record is not None and _fits(found, layer, held, record):
            found.records[layer], found.parts[layer] = record, held
        else:
            found.broken.update(each.name for each in held.values())
    # A model of your own may hold other tensors beside.
    if found.config or found.own is None:
        read = {each.name for held in parts.values() for each in held.values()}
        rest = {n: (t.shape, t.kind) for n, t in found.tensors.items() if n not in read}
        found.unread.update(checkpoint.unread_layers(rest))


def _parts_of(
    layout: checkpoint.Layout, tensors: Mapping[str, Stored], layers: Collection[str]
) -> dict[str, dict[str, Stored]]:
    """Return the parts of each layer that has codes or scales, or is among `layers`."""
    ends = {last: part for part, last in layout.parts.items()}
    ends |= {last: part for part, last in layout.native_parts.items() if part != PACKED}
    dot = "" if layout.stacks else "."
    found: dict[str, dict[str, Stored]] = {}
    for name, each in tensors.items():
        is_number = each.kind.startswith("F8_E") and name.endswith(".weight") and dot
        # Numbers of a byte are codes, whatever a layout calls codes that are packed.
        for last, part in ({**ends, "weight": PACKED} if is_number else ends).items():
            if name == last or name.endswith(f"{dot}{last}"):
                layer = name.removesuffix(last).removesuffix(dot)
                found.setdefault(layer, {})[part] = each
    # A dense layer has what another packed one calls its codes.
    return {
        layer: parts
        for layer, parts in found.items()
        if layer in layers or set(parts) - {PACKED} or parts[PACKED].kind == "U8"
    }


def _record(found: Folder, layer: str, held: Mapping[str, Stored]) -> checkpoint.PackedLayer | None:
    """Return how a layer is packed, by the config and by its shapes; None with a finding."""
    layout, listed = found.layout, [f"{each.name} {each.kind}" for each in held.values()]
    if PACKED not in held:
        codes_name, dense = found.name_of(layer, PACKED), f"{layer}.weight"
        what = f"expected {codes_name} beside it, got none"
        if dense in found.tensors and dense != codes_name:
            what += ", and a dense weight"
        found.say("orphan", next(iter(held.values())), what)
        return None
    codes = held[PACKED]
    if SCALE not in held:
        if codes.kind not in _BYTES or (layout.parts[PACKED] == "weight" and set(held) == {PACKED}):
            found.unread[layer] = listed
        else:
            what = f"expected {found.name_of(layer, SCALE)} beside it, got none"
            found.say("companion-missing", codes, what)
        return None
    record = _record_by_shape(found, held)
    if found.declared is None:
        if record is None:
            what = f"scales {list(held[SCALE].shape)} fit no format for codes {list(codes.shape)}"
            found.say("shape", held[SCALE], what)
        return record
    shapes = {each.name: (each.shape, each.kind) for each in held.values()}
    # Codes of another dtype of a byte are a finding, and no other format.
    if codes.kind in _BYTES:
        shapes[codes.name] = (codes.shape, layout.dtypes.get(PACKED, "U8"))
    dtype = str(found.fact("dtype") or found.fact("torch_dtype") or "bfloat16")
    try:
        known = checkpoint.read_layers(layout, found.declared, shapes, dtype.removeprefix("torch."))
    except UnreadError:
        known = {}
    except CheckpointError as error:
        found.say("shape" if record is None else "block-size", held[SCALE], str(error))
        return record
    if layer not in known:
        found.unread[layer] = listed
    return known.get(layer)


def _record_by_shape(found: Folder, held: Mapping[str, Stored]) -> checkpoint.PackedLayer | None:
    """Return how a layer is packed as far as its tensors alone say, None if they do not."""
    codes, scale, stacks = held[PACKED], held[SCALE], found.layout.stacks
    if len(codes.shape) < 2 or not scale.shape or not scale.shape[-1]:
        return None
    columns = 2 * codes.shape[-1] * (codes.shape[-2] if stacks else 1)
    block, rest = divmod(columns, scale.shape[-1])
    rows = codes.shape[:2] if stacks else codes.shape[:1]
    for fmt in map(FORMATS.__getitem__, found.layout.formats or ("nvfp4", "mxfp4")):
        # Scales in E4M3 come with a global one, those in E8M0 without.
        kind, has_global = ("F8_E4M3" if fmt.has_global_scale else "U8"), GLOBAL in held
        fits = scale.kind == kind and fmt.element.bits == 4 and has_global == fmt.has_global_scale
        if fits and not rest and block in fmt.blocks:
            config = LinearConfig(fmt.name, None, not has_global or INPUT_GLOBAL not in held, block)
            return checkpoint.PackedLayer(config, "bfloat16", stacks, (*rows, columns))
    return None


def _fits(
    found: Folder, layer: str, held: Mapping[str, Stored], record: checkpoint.PackedLayer
) -> bool:
    """Note parts that are missing or do not fit; return whether the numbers can be looked at."""
    known, layout, fits = checkpoint.expected_shapes(found.layout, record), found.layout, True
    for part in known:
        if part in held or part not in layout.parts or part == INPUT_GLOBAL:
            continue
        name = layout.tensor_name(layer, part, record.fmt)
        if part == PACKED:
            found.say("companion-missing", name, f"expected {name}, got none")
        elif PACKED in held:
            found.say("companion-missing", held[PACKED], f"expected {name}, got none")
        fits = False
    for part, tensor in held.items():
        if part not in known:
            what = f"expected no {layout.parts[part]} in {record.fmt.key}, got one"
            found.say("orphan", tensor, what)
            continue
        allowed, kinds = known[part]
        if tensor.shape not in allowed:
            what = f"expected {kinds[0]} {list(allowed[0])} for a weight {list(record.shape)} in"
            got = f"{tensor.kind} {list(tensor.shape)}"
            found.say("shape", tensor, f"{what} {record.fmt.key}, got {got}")
            fits = False
        elif tensor.kind not in kinds:
            what = f"expected {' or '.join(kinds)}, as the layout has it, got {tensor.kind}"
            found.say("dtype", tensor, what)
            fits = False
    return fits


def _check_names(found: Folder) -> None:
    """Note what is wrong with the layers as a set: prefixes, dense twins, experts, fused ones."""
    for prefix in _PREFIXES:
        if found.tensors and all(name.startswith(prefix) for name in found.tensors):
            first = next(iter(found.tensors))
            what = f"expected {first.removeprefix(prefix)}, got {first}"
            found.say("names", prefix, what, found.tensors[first].file)
    for layer, held in found.parts.items():
        dense = found.tensors.get(f"{layer}.weight")
        if dense is not None and dense.name not in {each.name for each in held.values()}:
            what = f"expected one of the two, got {dense.name} beside {held[PACKED].name}"
            found.say("twice", layer, what, dense.file)
    for name, expert, count in _lost_experts(found):
        what = f"expected {count} experts, got none of number {expert}"
        found.say("expert-missing", name, what)
    if found.layout.engines:
        for parent, problem in checkpoint.fused_problems(found.records, found.dense_layers()):
            found.say("fused-schemes", parent, f"expected one, got {problem}", "config.json")


def _lost_experts(found: Folder) -> Iterator[tuple[str, int, int]]:
    """Yield experts that some layer of a mixture has and another has not, and the number of all."""
    mixtures: dict[str, dict[str, set[int]]] = {}
    for name in found.tensors:
        if match := EXPERT.match(name):
            rest = match[3].rpartition(".")[0]
            mixtures.setdefault(match[1], {}).setdefault(rest, set()).add(int(match[2]))
    keys = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
    said = next((n for n in map(found.fact, keys) if type(n) is int and n > 0), 0)
    for mixture, layers in mixtures.items():
        count = max(said, 1 + max(set.union(*layers.values())))
        for rest, held in layers.items():
            for expert in sorted(set(range(count)) - held):
                yield f"{mixture}.{expert}.{rest}".removesuffix("."), expert, count
