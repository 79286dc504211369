"""Check the parts of packed layers: which are there, their shapes and dtypes, the experts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..checkpoint.layouts import PackedLayer, expected_shapes, fused_problems, matches, read_layers
from ..checkpoint.source_files import MANIFEST, unread_layers
from ..core.formats import FORMATS, Format
from ..errors import CheckpointError, Fp4PassError, UnreadError, some
from ..nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from ..record.config import LinearConfig
from .kinds import Finding
from .stored import DTYPES, Stored
from .survey import PREFIXES, Survey, names_of, parts_of, record_of

# The layer of one expert: all before its number, the number, all behind it.
EXPERT = re.compile(r"^(.*\bexperts)\.(\d+)\.(.*)$")

# Sizes of 8 bits or less: codes, whatever a writer calls them.
_BYTES = ("U8", "I8", "F8_E8M0", "F4")


@dataclass(frozen=True)
class Layers:
    """The packed layers of a folder whose parts fit each other.

    Attributes:
        records: how each layer is packed.
        parts: its tensors, by their part.
        broken: the names of the tensors of those whose parts do not fit.
        unread: layers that are quantized in a way that fp4pass does not read, and their tensors.
        findings: what is wrong with the others.
    """

    records: dict[str, PackedLayer]
    parts: dict[str, dict[str, Stored]]
    broken: set[str] = field(default_factory=set)
    unread: dict[str, list[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def find_layers(found: Survey) -> Layers:
    """Return the packed layers of a folder, and what is wrong with the parts of others.

    Raises UnreadError for a folder in which fp4pass reads no layer at all.
    """
    own = {} if found.own is None else record_of(found.own)
    layers = Layers({}, {})
    if found.own is None and not found.layout.engines:
        what = "expected it, of this version, for it alone says how layers are packed, got none"
        layers.findings.append(Finding("file-missing", MANIFEST, "", what))
        return layers
    parts = parts_of(found.layout, found.tensors, own)
    for layer in {**own, **parts}:
        held = parts.get(layer, {})
        record = own.get(layer) or _record(found, layer, held, layers)
        if record is not None and _fits(found, layer, held, record, layers):
            layers.records[layer], layers.parts[layer] = record, held
        else:
            layers.broken.update(each.name for each in held.values())
    read = {each.name for held in parts.values() for each in held.values()}
    others = {n: (t.shape, t.kind) for n, t in found.tensors.items() if n not in read}
    # A model of one's own may hold other tensors beside.
    if found.config or found.own is None:
        layers.unread.update(unread_layers(others))
    return layers


def _record(
    found: Survey, layer: str, held: Mapping[str, Stored], layers: Layers
) -> PackedLayer | None:
    """Return how a layer is packed, by the config and by its shapes; None with a finding."""
    layout, names = found.layout, names_of(found.layout, layer)
    say = layers.findings.append
    if PACKED not in held:
        dense = f"{layer}.weight" in found.tensors and names[PACKED] != f"{layer}.weight"
        what = f"expected {names[PACKED]} beside it, got none"
        what += ", and a dense weight" if dense else ""
        first = next(iter(held.values()))
        say(Finding("orphan", first.name, first.path.name, what))
        return None
    codes = held[PACKED]
    if SCALE not in held:
        if codes.kind not in _BYTES or (layout.parts[PACKED] == "weight" and set(held) == {PACKED}):
            layers.unread[layer] = [f"{codes.name} {codes.kind}"]
        else:
            what = f"expected {names[SCALE]} beside it, got none"
            say(Finding("companion-missing", codes.name, codes.path.name, what))
        return None
    record = None
    if found.declared is not None:
        shapes = {each.name: (each.shape, each.kind) for each in held.values()}
        # Codes of another dtype of a byte are a finding, and no other format.
        if codes.kind in _BYTES:
            shapes[codes.name] = (codes.shape, layout.dtypes.get(PACKED, "U8"))
        try:
            record = read_layers(layout, found.declared, shapes, found.dtype).get(layer)
        except UnreadError:
            layers.unread[layer] = [f"{each.name} {each.kind}" for each in held.values()]
            return None
        except CheckpointError as error:
            record = _by_shape(found, held)
            kind = "shape" if record is None else "block-size"
            say(Finding(kind, held[SCALE].name, held[SCALE].path.name, str(error)))
            return record
        if record is None:
            layers.unread[layer] = [f"{each.name} {each.kind}" for each in held.values()]
            return None
        return record
    record = _by_shape(found, held)
    if record is None:
        what = f"scales {list(held[SCALE].shape)} fit no format for codes {list(codes.shape)}"
        say(Finding("shape", held[SCALE].name, held[SCALE].path.name, what))
    return record


def _by_shape(found: Survey, held: Mapping[str, Stored]) -> PackedLayer | None:
    """Return how a layer is packed as far as its tensors alone say, None if they do not."""
    codes, scale, stacks = held[PACKED], held[SCALE], found.layout.stacks
    if len(codes.shape) < 2 or not scale.shape or not scale.shape[-1]:
        return None
    columns = 2 * codes.shape[-1] * (codes.shape[-2] if stacks else 1)
    block, rest = divmod(columns, scale.shape[-1])
    rows = codes.shape[:2] if stacks else codes.shape[:1]
    for fmt in map(FORMATS.__getitem__, found.layout.formats or ("nvfp4", "mxfp4")):
        fits = _scale_kind(fmt) == scale.kind and fmt.element.bits == 4
        if fits and not rest and block in fmt.blocks and (GLOBAL in held) == fmt.has_global_scale:
            only = not fmt.has_global_scale or INPUT_GLOBAL not in held
            config = LinearConfig(fmt.name, None, only, block)
            return PackedLayer(config, found.dtype, stacks, (*rows, columns))
    return None


def _scale_kind(fmt: Format) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == fmt.scale.storage)


def _fits(
    found: Survey,
    layer: str,
    held: Mapping[str, Stored],
    record: PackedLayer,
    layers: Layers,
) -> bool:
    """Note parts that are missing or do not fit; return whether the numbers can be looked at."""
    known = expected_shapes(found.layout, record)
    layout, fits = found.layout, True
    names = {p: layout.tensor_name(layer, p, record.fmt) for p in known if p in layout.parts}
    for part in names:
        if part not in held and part != INPUT_GLOBAL:
            if PACKED not in held and part != PACKED:
                continue
            what = f"expected {names[part]}, got none"
            say = held.get(PACKED)
            where, file = (say.name, say.path.name) if say else (names[part], "")
            layers.findings.append(Finding("companion-missing", where, file, what))
            fits = False
    for part, tensor in held.items():
        if part not in known:
            what = f"expected no {found.layout.parts[part]} in {record.fmt.key}, got one"
            layers.findings.append(Finding("orphan", tensor.name, tensor.path.name, what))
            continue
        allowed, kinds = known[part]
        if tensor.shape not in allowed:
            what = (
                f"expected {kinds[0]} {list(allowed[0])} for a weight {list(record.shape)} in "
                f"{record.fmt.key}, got {tensor.kind} {list(tensor.shape)}"
            )
            layers.findings.append(Finding("shape", tensor.name, tensor.path.name, what))
            fits = False
        elif tensor.kind not in kinds:
            what = f"expected {' or '.join(kinds)}, as the layout has it, got {tensor.kind}"
            layers.findings.append(Finding("dtype", tensor.name, tensor.path.name, what))
            fits = False
    return fits


def require_some(found: Survey, layers: Layers) -> None:
    """Raise UnreadError for a folder of which nothing was judged and nothing is wrong."""
    if not layers.unread:
        return
    listed = [f"{layer} ({', '.join(sorted(names))})" for layer, names in layers.unread.items()]
    groups = {
        found.layout.group(layer, found.declared) if found.declared is not None else ""
        for layer in layers.unread
    }
    said = f"{', '.join(sorted(filter(None, groups)))}: " if any(groups) else ""
    count = len(layers.unread)
    raise UnreadError(
        f"{found.folder}: fp4pass does not read {count} of its quantized layers: {said}"
        f"{some(listed)}. {count} layers are so: they were not judged. Check them with the library "
        "that wrote the folder."
    )


def check_structure(found: Survey, layers: Layers) -> Iterator[Finding]:
    """Yield what is wrong with the layers as a set: dense twins, experts, fused schemes, names."""
    yield from layers.findings
    yield from _names(found)
    for layer, held in layers.parts.items():
        dense = found.tensors.get(f"{layer}.weight")
        if dense is not None and dense.name not in {each.name for each in held.values()}:
            what = f"expected one of the two, got {dense.name} beside {held[PACKED].name}"
            yield Finding("twice", layer, dense.path.name, what)
    yield from _experts(found, layers)
    if found.layout.engines:
        dense_layers = dense_names(found, layers)
        for parent, problem in fused_problems(layers.records, dense_layers):
            yield Finding("fused-schemes", parent, "config.json", f"expected one, got {problem}")


def dense_names(found: Survey, layers: Layers) -> list[str]:
    """Return the layers with a dense matrix and no codes."""
    taken = {each.name for held in layers.parts.values() for each in held.values()}
    return [
        name.removesuffix(".weight")
        for name, each in found.tensors.items()
        if name.endswith(".weight")
        and name not in taken
        and len(each.shape) > 1
        and each.kind in ("BF16", "F16", "F32")
        and name.removesuffix(".weight") not in layers.records
    ]


def _names(found: Survey) -> Iterator[Finding]:
    for prefix in PREFIXES:
        if found.tensors and all(name.startswith(prefix) for name in found.tensors):
            first = next(iter(found.tensors))
            what = f"expected {first.removeprefix(prefix)}, got {first}"
            yield Finding("names", prefix, found.file(first), what)


def _experts(found: Survey, layers: Layers) -> Iterator[Finding]:
    """Yield experts that some layer of a mixture has and this one has not."""
    mixtures: dict[str, dict[str, set[int]]] = {}
    for name in found.tensors:
        if match := EXPERT.match(name):
            rest = match[3].rpartition(".")[0]
            mixtures.setdefault(match[1], {}).setdefault(rest, set()).add(int(match[2]))
    counts = _counts(found)
    for mixture, layers_of in mixtures.items():
        numbers = set.union(*layers_of.values())
        whole = max([len(numbers), *(each for each in counts if each > max(numbers))][:1])
        if counts and max(numbers) < counts[0]:
            whole = counts[0]
        for rest, held in layers_of.items():
            wanted = set(range(max(whole, max(numbers) + 1)))
            for expert in sorted(wanted - held):
                name = f"{mixture}.{expert}.{rest}" if rest else f"{mixture}.{expert}"
                what = f"expected {len(wanted)} experts, got none of number {expert}"
                yield Finding("expert-missing", name, "", what)


def _counts(found: Survey) -> list[int]:
    """Return how many experts the config says that a layer has."""
    text = found.config.get("text_config") or {}
    keys = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
    values = [each.get(key) for each in (found.config, text) for key in keys]
    return [value for value in values if type(value) is int and value > 0]


def is_declared(found: Survey, layer: str) -> bool:
    """Return whether the config says that a linear layer is packed."""
    if found.declared is None or found.layout.stacks or not found.layout.engines:
        return False
    try:
        found.layout.scheme(layer, found.declared)
    except Fp4PassError:
        return False
    return not matches(layer, found.layout.ignored(found.declared) or ())
