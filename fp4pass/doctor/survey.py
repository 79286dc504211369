"""Survey a folder without believing it: its files, its config, its layout and its layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checkpoint.layouts import LAYOUTS, WEIGHTS, Layout, PackedLayer, join, side_files
from ..checkpoint.source_files import MANIFEST, VERSION, checksum_of
from ..core.files import parse_json
from ..core.formats import Format
from ..errors import CheckpointError, Fp4PassError, some
from ..nn.linear import PACKED, SCALE
from .kinds import Finding
from .stored import Stored, read_header

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")

# Of names that torch.compile, data parallelism and trainers put in front.
PREFIXES = ("_orig_mod.", "module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class Survey:
    """A folder as far as it can be read.

    Attributes:
        folder: where it is.
        config: config.json, {} without one or where it is damaged.
        own: fp4pass.json, None without one, of another version, or where it is damaged.
        sides: the JSON of the other files that declare a layout, by their names.
        layout: that of the tensors.
        declared: the quantization_config, None where nothing says it.
        index: what the index says, None without one.
        tensors: all that the files hold, by names.
        findings: what is wrong with the files.
    """

    folder: Path
    config: Mapping[str, Any]
    own: Mapping[str, Any] | None
    sides: Mapping[str, Mapping[str, Any]]
    layout: Layout
    declared: Mapping[str, Any] | None
    index: Mapping[str, str] | None
    tensors: Mapping[str, Stored]
    findings: list[Finding] = field(default_factory=list)

    @property
    def dtype(self) -> str:
        """The name of the dtype of the dense model."""
        if self.own is not None:
            return str(self.own["dtype"])
        text = self.config.get("text_config") or {}
        found = (each.get(key) for each in (self.config, text) for key in ("dtype", "torch_dtype"))
        return str(next(filter(None, found), "bfloat16")).removeprefix("torch.")

    def file(self, name: str) -> str:
        """Return the name of the file of a tensor, "" if there is none."""
        return self.tensors[name].path.name if name in self.tensors else ""


def survey(folder: Path) -> Survey:
    """Read what a folder has, and note what of it cannot be read.

    Raises CheckpointError for a folder without packed weights.
    """
    findings: list[Finding] = []
    config = _read(folder / "config.json", findings) or {}
    sides = {n: _read(folder / n, findings) for n in side_files() if (folder / n).is_file()}
    own = _own(folder, findings)
    declared = config.get("quantization_config")
    if declared is None:
        declared = next(filter(None, sides.values()), None)
    chosen = None if own is None else LAYOUTS.get(str(own["layout"]))
    if chosen is None and isinstance(declared, Mapping):
        chosen = next((each for each in LAYOUTS.values() if each.detect(declared)), None)
    known = {n: each for n, each in sides.items() if each is not None}
    base = WEIGHTS if chosen is None else chosen.weights
    index, tensors = _tensors(folder, base, findings)
    layout = _layout_of(folder, chosen, declared, tensors, findings)
    found = Survey(folder, config, own, known, layout, declared, index, tensors, findings)
    return replace(found, declared=None) if _is_other(found, chosen) else found


def _is_other(found: Survey, chosen: Layout | None) -> bool:
    """Return whether what is declared says nothing of the tensors."""
    return found.own is None and (found.declared is None or chosen is not found.layout)


def _read(path: Path, findings: list[Finding]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        data: dict[str, Any] = parse_json(path.read_text("utf-8"))
        data.keys()
    except (OSError, ValueError, AttributeError) as error:
        what = f"expected JSON of an object, got {error!r:.100}"
        findings.append(Finding("json-damaged", path.name, path.name, what))
        return None
    return data


def _own(folder: Path, findings: list[Finding]) -> dict[str, Any] | None:
    data = _read(folder / MANIFEST, findings)
    if data is None or data.get("version") != VERSION:
        return None
    if data.pop("sha256", None) != checksum_of(data) or "layers" not in data:
        what = "expected what save wrote, got another checksum"
        findings.append(Finding("json-damaged", MANIFEST, MANIFEST, what))
        return None
    return data


def _tensors(
    folder: Path, base: str, findings: list[Finding]
) -> tuple[dict[str, str] | None, dict[str, Stored]]:
    """Return the index, and the tensors of all files that can be read."""
    index_name = f"{base}.index.json"
    listed = _read(folder / index_name, findings)
    index: dict[str, str] | None = None
    if listed is not None:
        weight_map = listed.get("weight_map")
        index = weight_map if isinstance(weight_map, dict) else {}
        index = {str(name): str(file) for name, file in index.items()}
    stem = base.removesuffix(".safetensors")
    shards = {
        path.name for path in folder.glob(f"{stem}-*.safetensors") if _SHARD.search(str(path))
    }
    names = {*(index or {}).values(), *shards}
    if (folder / base).is_file() or not names:
        names.add(base)
    _missing_parts(shards, names, findings)
    tensors: dict[str, Stored] = {}
    for name in sorted(names):
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts or not path.is_file():
            what = "expected a file of weights, got none"
            findings.append(Finding("file-missing", name, "", what))
            continue
        try:
            held = read_header(path)
        except (ValueError, OSError) as error:
            findings.append(Finding("file-damaged", name, name, str(error)))
            continue
        for each in sorted(set(held) & set(tensors)):
            both = f"expected one tensor of this name, got another in {tensors[each].path.name}"
            findings.append(Finding("duplicate", each, name, both))
        # The entry of the index decides, else the first.
        for each, stored in held.items():
            if each not in tensors or (index or {}).get(each) == name:
                tensors[each] = stored
    if index is not None:
        _check_index(index_name, index, tensors, findings)
    return index, tensors


def _missing_parts(shards: set[str], names: set[str], findings: list[Finding]) -> None:
    """Note the numbered files that are not there, and that no index names."""
    for shard in sorted(shards):
        match = _SHARD.search(shard)
        assert match is not None
        whole = int(match[2])
        stem = shard[: match.start()]
        every = {f"{stem}-{i:05}-of-{whole:05}.safetensors" for i in range(1, whole + 1)}
        for name in sorted(every - names):
            names.add(name)


def _check_index(
    file: str, index: Mapping[str, str], tensors: Mapping[str, Stored], findings: list[Finding]
) -> None:
    """Note what the index says of files that can be read, and is not so."""
    bad = {each.where for each in findings if each.kind in ("file-missing", "file-damaged")}
    for name, where in index.items():
        held = tensors.get(name)
        if held is None and where not in bad:
            what = f"expected it in {where}, got no such tensor in any file"
            findings.append(Finding("tensor-missing", name, file, what))
        elif held is not None and held.path.name != where:
            what = f"expected {held.path.name}, which holds it, got {where}"
            findings.append(Finding("index", name, file, what))
    for name in sorted(set(tensors) - set(index)):
        what = f"expected {tensors[name].path.name}, which holds it, got no entry"
        findings.append(Finding("index", name, file, what))


def _layout_of(
    folder: Path,
    chosen: Layout | None,
    declared: Any,
    tensors: Mapping[str, Stored],
    findings: list[Finding],
) -> Layout:
    """Return the layout of the tensors; note where the config says another one, or none."""
    if chosen is not None and any(_has_codes(chosen, tensors)):
        return chosen
    others = [each for each in LAYOUTS.values() if each.engines and each is not chosen]
    fits = next((each for each in others if any(_has_codes(each, tensors))), None)
    if fits is None and chosen is not None:
        return chosen
    if fits is None or (declared is not None and chosen is None):
        if declared is None:
            raise CheckpointError(
                f"{folder} is not quantized as far as it says: it has neither {MANIFEST} nor a "
                "quantization_config in config.json, and no codes of a layout that fp4pass knows. "
                "Load it with transformers."
            )
        # Of another library: opening it says so.
        from ..checkpoint.opening import open_checkpoint

        open_checkpoint(folder, any_version=True)
        raise CheckpointError(f"{folder} holds no packed weight. Load it with transformers.")
    names = some(list(_has_codes(fits, tensors)), 2)
    if declared is None:
        what = f"expected a quantization_config, got none beside tensors of {fits.name} ({names})"
        findings.append(Finding("config-absent", "config.json", "config.json", what))
    else:
        said = declared.get("quant_method") or getattr(chosen, "name", "?")
        what = f"expected quant_method {fits.name}, whose tensors there are ({names}), got {said!r}"
        findings.append(Finding("config-layout", "config.json", "config.json", what))
    return fits


def names_of(layout: Layout, layer: str) -> dict[str, str]:
    """Return the name on disk of each part of a layer."""
    return {
        part: layer + last if layout.stacks else join(layer, last)
        for part, last in layout.parts.items()
    }


def multiplies(layout: Layout, fmt: Format) -> bool:
    """Return whether a stored global scale multiplies; one of inputs alone always does."""
    return layout.multiplies or not fmt.has_global_scale


def _has_codes(layout: Layout, tensors: Mapping[str, Stored]) -> dict[str, None]:
    """Return the names of codes with scales beside them."""
    codes, scales = layout.parts[PACKED], layout.parts[SCALE]
    return {
        name: None
        for name, each in tensors.items()
        if name.endswith(codes)
        and each.kind == "U8"
        and f"{name.removesuffix(codes)}{scales}" in tensors
    }


def parts_of(
    layout: Layout, tensors: Mapping[str, Stored], layers: Collection[str] = ()
) -> dict[str, dict[str, Stored]]:
    """Return the parts of each layer that has codes or scales, or is among `layers`."""
    ends = {last: part for part, last in layout.parts.items()}
    ends |= {last: part for part, last in layout.native_parts.items() if part != PACKED}
    found: dict[str, dict[str, Stored]] = {}
    for name, each in tensors.items():
        own = ends
        # Numbers of a byte are codes, whatever a layout calls codes that are packed.
        if each.kind.startswith("F8_E") and name.endswith(".weight") and not layout.stacks:
            own = {**ends, "weight": PACKED}
        for last, part in own.items():
            if name.endswith(last):
                layer = name.removesuffix(last)
                if not layout.stacks and layer and not layer.endswith("."):
                    continue
                layer = layer if layout.stacks else layer.removesuffix(".")
                found.setdefault(layer, {})[part] = each
    # A dense layer has what another packed one calls its codes.
    return {
        layer: parts
        for layer, parts in found.items()
        if layer in layers or set(parts) - {PACKED} or parts[PACKED].kind == "U8"
    }


def record_of(own: Mapping[str, Any]) -> dict[str, PackedLayer]:
    """Return the packed layers that fp4pass.json lists. Raises CheckpointError."""
    try:
        return {name: PackedLayer.from_dict(each) for name, each in own["layers"].items()}
    except (Fp4PassError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST}: layers: {error}. Copy the folder again.") from error
