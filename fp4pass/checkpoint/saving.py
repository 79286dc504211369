"""Save a converted model to a folder: decide all of it, a `SavePlan`, then write it.

`transcode` writes a folder in another layout, without a model.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .. import errors, ops
from .._compat.accelerate import offloaded_tensors
from .._compat.torch import model_class
from .._compat.transformers import tied_weights
from ..core.files import path_of, replacing
from ..core.fingerprint import digest_of, dtype_name, fingerprint
from ..core.progress import current, shown
from ..distributed import ranks, whole_tensors
from ..nn.experts import QUANTIZED
from ..nn.kv_cache import CACHE_FORMATS, KV_CACHE
from ..record.rows import Report
from ..record.state import get_state, has_adapters, unwrap
from . import layouts, model_layers, source_files
from . import reader as reading
from .beside import Beside, copy_beside, read_carried
from .card import check_card, write_card
from .finished import ConvertedState
from .model_layers import asked_for, part_error
from .readers import DEQUANTIZE, Facts, Readers, judge

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavePlan:
    """All that is decided of a folder before its first byte; names are those on disk."""

    layout: layouts.Layout
    layers: Mapping[str, layouts.PackedLayer]
    tensors: Mapping[str, Callable[[], Tensor]]  # what gives each, by its name in the model
    size: int  # the bytes of these
    names: Mapping[str, str]  # of dense tensors that have another one in the model
    packed: Mapping[str, tuple[str, str, layouts.PackedLayer]]  # the layer and buffer of a tensor
    pieces: Mapping[str, Sequence[layouts.Piece]]  # in the folder, of each layer of the model
    ignored: Sequence[str]  # names and patterns of what stays dense
    declared: Mapping[str, Any]  # the quantization_config, {} if the model is of no library
    facts: Mapping[str, Any]  # for fp4pass.json
    readers: Readers
    warnings: Sequence[str]


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    layout: layouts.LayoutName = "compressed-tensors",
    tokenizer: Any = None,
    source: str | os.PathLike[str] | None = None,
    copy_files: Sequence[str] = (),
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    card: bool | Mapping[str, Any] = False,
    progress: bool = True,
) -> None:
    """Write a converted model to a folder, whole or not at all.

    Of several processes each makes the call, the first writes, and the others wait for it. Of what
    is split over them it gets the parts first, into its memory.

    A transformers model is written with its config, for others to load; any other model as tensors
    for `load(dir, model=...)`. The readers of the folder and the command that serves it are logged,
    at level INFO.

    Args:
        model: converted.
        directory: the folder; it must not exist or be empty.
        layout: "compressed-tensors"; "modelopt" for nvfp4; "compressed-tensors-hadamard" for
            rotated weights in vLLM; "gpt-oss" for its experts in mxfp4. Models that the default
            cannot hold are written in a layout that only fp4pass reads.
        tokenizer: a tokenizer or processor to write beside the model. By default that which
            `calibrate` or `convert` was given, else the files of `source`.
        source: the folder or the hub id of the float model, from which files that go with it are
            copied: tokenizer, chat templates, generation config, code, license, model card. The
            default is what the model was loaded from.
        copy_files: globs of further files of `source` to copy, such as "assets/*.png".
        max_shard_size: of a file of weights, above which there are several and an index.
        overwrite: replace the folder if `save` wrote it, with all that has been put beside.
        card: write README.md, a model card with the report, in place of that of `source`.
            `{"WikiText-2": evaluation}` adds what `fp4pass.evaluate` returned for a text.
        progress: as for `convert`.

    Raises:
        StateError: the model is not converted.
        CheckpointError: the layout cannot hold the model, or the folder is in the way.
        OptionError: a layout, a size, or what a glob of `copy_files` matches does not exist.

    Example:
        >>> model = fp4pass.convert(model, "nvfp4a16", "sse")
        >>> fp4pass.save(model, "out")
        >>> sorted(path.name for path in Path("out").iterdir())
        ['fp4pass.json', 'model.safetensors']
    """
    root = unwrap(model)
    state = _require_converted(root)
    target = path_of(directory, "directory")
    chosen, limit = layouts.get_layout(layout), bytes_of(max_shard_size)
    beside = Beside(root, tokenizer, source, copy_files)
    evaluations = check_card(card)
    group = ranks()
    group.arrive()
    with asked_for():
        tensors: Mapping[str, Any] = root.state_dict()
    group.require_equal("The model to save", digest_of([*tensors], str(target)))
    tensors = whole_tensors(group, tensors, tied_weights(root))
    with shown("save", progress), group.first_alone() as is_first:
        if not is_first:
            return
        plan = _plan(root, state, tensors, chosen)
        for warning in plan.warnings:
            warnings.warn(warning, stacklevel=2)
        with replacing(target, overwrite, marks=(source_files.MANIFEST,)) as folder:
            _write(plan, root, state, folder, limit, beside)
            if evaluations is not None:
                about = (plan.layout.name, plan.readers, evaluations, beside.source)
                write_card(folder, root, state, *about)
        _log.info("%s: %s", target, plan.readers)
        for command in plan.readers.commands(shlex.quote(str(target)))[:1]:
            _log.info("Serve it: %s", command)


def _plan(
    root: nn.Module, state: ConvertedState, found: Mapping[str, Any], asked: layouts.Layout
) -> SavePlan:
    """Decide what a folder holds. Raises CheckpointError for what no folder can hold."""
    layers = model_layers.describe_layers(root, state)
    model_layers.require_static_scales(root, layers)
    written, split, left = (
        model_layers.split_layers(root, layers) if asked.engines else (layers, {}, {})
    )
    holds_all = not any(map(asked.problem, written.values()))
    layout = asked if holds_all or not asked.fallback else layouts.LAYOUTS[asked.fallback]
    layout.require(written)
    if not layout.engines:
        written, split = layers, {}
    cache = layout.cache.config(state.recipe.get(KV_CACHE), layout.name)
    modules = dict(root.named_modules(remove_duplicate=False))
    records = {modules[name]: layer for name, layer in layers.items()}
    named = {name: module for name, module in modules.items() if module in records}
    packed = {
        layouts.join(name, part): (name, part, records[module])
        for name, module in named.items()
        for part in layouts.BUFFERS
    }
    if model_layers.is_transformers(root):
        model_layers.require_no_others(root, records)
        if asked.engines:
            model_layers.require_made_by_config(root, layers, found)
        model_layers.require_equal_parts(layout, layers, [row.name for row in state.report.skipped])
        source_files.require_writable(
            {name: each for name, each in found.items() if name not in packed}
        )
    tensors, aliases = _tensors(root, found, packed)
    # Engines take `k_scale` for FP8's, and refuse tensors that they do not know.
    fmt = CACHE_FORMATS.get(state.recipe.get(KV_CACHE) or "")
    ends = () if fmt is None or fmt.blocks is None else tuple(f".{key}" for key in fmt.scales)
    beside = [name for name in tensors if name.endswith(ends)] if ends else []
    cache_scales = {name: _on_cpu(tensors.pop(name)()).item() for name in beside}
    # Also those that are tied: a reader may have a layer of its own for them.
    dense = [name for name in (*tensors, *aliases) if name not in packed]
    apart = {name: module for name, module in named.items() if name not in split}
    whole = {name: stack.whole for name, stack in split.items() if stack.whole}
    names = model_layers.NamesOnDisk.of(root, dense, apart, whole)
    pieces = {name: [layouts.Piece(names.layers.get(name, name))] for name in apart}
    pieces |= {name: stack.pieces for name, stack in split.items()}
    written = {names.layers.get(name, name): layer for name, layer in written.items()}
    ignored, declared = _declare(root, state, layout, layers, written, names)
    merged = [name for name in split if name not in whole]
    declared |= cache if declared else {}
    model = Facts(root, layers, declared, [*split], merged, has_cache=bool(cache))
    readers, declared, notes = judge(layout, written, model)
    if left and not layout.engines and model_layers.is_transformers(root):
        notes.append(
            f"{asked.name} has no place for stacks of experts ({errors.some([*left])}): "
            f"{next(iter(left.values()))}. Only fp4pass.load reads this folder."
        )
    facts = {
        "dtype": dtype_name(getattr(root, "dtype", torch.float32)),
        "recipe": state.recipe,
        "report": state.report.record(),
        "aliases": aliases,
        "renamed": names.in_model,
        # As the model has them, and those that are whole in folders of the float model.
        "stacks": {name: pieces[name] for name in split},
        "joined": {name: layers[name].to_dict() for name in split},
        "whole": list(whole),
        "carried": [*state.carried],
        "cache_scales": cache_scales,
    }
    return SavePlan(
        layout=layout,
        layers=written,
        tensors=tensors,
        size=sum(found[name].nbytes for name in tensors),
        names=names.tensors,
        packed=packed,
        pieces=pieces,
        ignored=ignored,
        declared=declared,
        facts=facts,
        readers=readers,
        warnings=notes,
    )


def _declare(
    root: nn.Module,
    state: ConvertedState,
    layout: layouts.Layout,
    layers: Mapping[str, layouts.PackedLayer],
    written: Mapping[str, layouts.PackedLayer],
    names: model_layers.NamesOnDisk,
) -> tuple[list[str], dict[str, Any]]:
    """Return the names of what stays dense, here and on disk, and the quantization_config."""
    if not model_layers.is_transformers(root):
        return [], {}
    ignored = model_layers.ignored_names(root, state)
    ignored += [names.layers[name] for name in ignored if name in names.layers]
    carried = [row for row in state.report.skipped if row.name in state.carried]
    modules = dict(root.named_modules(remove_duplicate=False))
    ignored += model_layers.ignored_layers(carried, [*layers], modules.__contains__)
    own: dict[str, layouts.PackedLayer] = {}
    if isinstance(layout, layouts.CompressedTensors):
        own = {name: layers[name] for name in names.layers if name in layers}
    return ignored, layout.config({**written, **own}, ignored)


def _write(
    plan: SavePlan, root: nn.Module, state: ConvertedState, folder: Path, limit: int, beside: Beside
) -> None:
    writer = CheckpointWriter(folder, plan.layout, plan.layers, limit)
    beside.copy(folder, {source_files.MANIFEST, "config.json", *layouts.side_files()})
    if model_layers.is_transformers(root):
        model: Any = root
        model.config.save_pretrained(folder)
        data = json.loads((folder / "config.json").read_text())
        data["architectures"] = [model_class(root).__name__]
        if layout_dtype := plan.layout.dtype:
            # Stock transformers dequantizes to it, and cannot multiply by two dtypes.
            data["dtype"] = layout_dtype
        writer.declare(data, plan.ignored, plan.declared)
        if getattr(root, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    beside.write_tokenizer(root, folder)
    current().expect(plan.size, "bytes")
    for name, read in plan.tensors.items():
        tensor = _on_cpu(read())
        current().step(tensor.nbytes)
        if name not in plan.packed:
            writer.add(plan.names.get(name, name), tensor)
            continue
        layer, part, record = plan.packed[name]
        for path, share in layouts.split_layer(plan.pieces[layer], part, tensor, record.fmt):
            writer.add(layouts.join(path, part), share, plan.layers.get(path, record))
    for name, tensor in read_carried(state.carried):
        writer.add(name, tensor)
    writer.close(plan.facts)


def _require_converted(root: nn.Module) -> ConvertedState:
    state = get_state(root)
    modules = root.named_modules()
    inside = next((name for name, each in modules if isinstance(each, QUANTIZED)), None)
    if inside is not None and model_layers.is_transformers(root) and has_adapters(root):
        raise errors.StateError(
            "The model has adapters of PEFT around packed layers, and nothing reads a folder of "
            "both. Save the adapters by model.save_pretrained(...). Save the packed model from "
            "before the adapters were put on, or convert the float model without them: its "
            "packed weights are the same, and the adapters go on it."
        )
    if isinstance(state, ConvertedState):
        return state
    if inside is not None:
        raise part_error(inside)
    raise errors.StateError("The model is not converted. Call fp4pass.convert(model) before save.")


def _tensors(
    root: nn.Module, state: Mapping[str, Any], packed: Container[str]
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Return what gives the tensors to write, and the names that stand for that of another name."""
    # Tied parameters are written once, as transformers does; packed weights that modules share are
    # written under each name, for other loaders do not know that they are shared.
    elsewhere = offloaded_tensors(root)
    ties = tied_weights(root) if model_layers.is_transformers(root) else {}
    tensors: dict[str, Callable[[], Tensor]] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    # The names that transformers writes first.
    for name, tensor in sorted(state.items(), key=lambda item: item[0] in ties):
        if not isinstance(tensor, Tensor):
            raise errors.CheckpointError(
                f"{name}: safetensors holds tensors only, and this is a {type(tensor).__name__}. "
                "Save the model with torch.save, or have its get_extra_state return a tensor."
            )
        if tensor.is_meta and name not in elsewhere:
            raise errors.CheckpointError(
                f"{name}: it is on the meta device, without values. Load the weights before save."
            )
        # Tensors read from a disk are new memory each time.
        key: Any = ("elsewhere", ties.get(name, name))
        if not tensor.is_meta:
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        original = first.setdefault(key, name) if tensor.numel() else name
        if original != name:
            aliases[name] = original
            if name not in packed:
                continue
        tensors[name] = elsewhere.get(name) or tensor.detach
    return tensors, aliases


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor as safetensors takes it: whole, and the only one in its memory."""
    tensor = tensor.detach().cpu().contiguous()
    is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone() if is_view else tensor


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(size: int | str) -> int:
    """Return a size such as "5GB" or "800MiB" in bytes. Raises OptionError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B)\s*", str(size).upper())
    found = int(float(match[1]) * _UNITS[match[2]]) if match else size
    # On a command line 5 would be 5 bytes, a file for each tensor.
    if not isinstance(found, int) or found <= 0:
        raise errors.OptionError(
            errors.expected("max_shard_size", "a size with a unit, as '5GB'", size)
        )
    return found


class CheckpointWriter:
    """A writer of configs, of tensors in files of at most `limit` bytes, and of fp4pass.json."""

    # At most one file is held in memory; files are named and numbered as transformers does.

    def __init__(
        self,
        folder: Path,
        layout: layouts.Layout,
        layers: Mapping[str, layouts.PackedLayer],
        limit: int,
    ) -> None:
        self.folder, self.layout, self.layers, self.limit = folder, layout, layers, limit
        self.part: dict[str, Tensor] = {}
        self._addresses: set[int] = set()
        self.parts: list[tuple[Path, list[str]]] = []
        self.sums: dict[str, dict[str, Any]] = {}
        self.config: dict[str, Any] = {}
        self.size = self.total = 0
        # The format of the key-value cache that is declared.
        self.cache: str | None = None

    def declare(
        self,
        config: Mapping[str, Any],
        ignore: Sequence[str],
        declared: Mapping[str, Any] | None = None,
    ) -> None:
        """Write config.json, unless `config` is empty, and the other files of the layout."""
        # Raises CheckpointError if readers would take a packed layer for one that `ignore` lists.
        if covered := [name for name in self.layers if layouts.matches(name, ignore)]:
            raise errors.CheckpointError(
                f"{covered[0]}: it is packed, and a pattern for dense layers covers it, so that "
                f"others would give it random weights: {', '.join(ignore)}."
            )
        if config:
            declared = declared or self.layout.config(self.layers, ignore)
            self.config = {**config, "quantization_config": dict(declared)}
            source_files.write_json(self.folder / "config.json", self.config)
        self.cache = None if declared is None else self.layout.cache.format(declared)
        for name, data in self.layout.files(self.layers, ignore, self.cache).items():
            source_files.write_json(self.folder / name, data)

    def add(self, name: str, tensor: Tensor, layer: layouts.PackedLayer | None = None) -> None:
        """Write a tensor of a state dict as the layout has it; that of a packed layer needs it."""
        layers = {} if layer is None else {name.rpartition(".")[0]: layer}
        stored = self.layout.to_stored({name: tensor}, layers, self.cache is not None)
        for own, each in stored.items():
            each = each.contiguous()
            self.sums[own] = fingerprint(each)
            if self.part and self.size + each.nbytes > self.limit:
                self._flush()
            # safetensors refuses two tensors in one memory.
            is_shared = each.data_ptr() in self._addresses
            self._addresses.add(each.data_ptr())
            self.part[own] = each.clone() if is_shared else each
            self.size += each.nbytes
            self.total += each.nbytes

    def _flush(self) -> None:
        path = self.folder / f"part-{len(self.parts)}"
        # safetensors makes files that only their owner can read.
        path.touch()
        mode = path.stat().st_mode
        save_file(self.part, path, metadata={"format": "pt"})
        path.chmod(mode)
        self.parts.append((path, list(self.part)))
        self.part, self.size, self._addresses = {}, 0, set()

    def close(self, facts: Mapping[str, Any] | None = None) -> None:
        """Write the rest, the index, and fp4pass.json with what `facts` says of the model."""
        if self.part or not self.parts:
            self._flush()
        weights, count = self.layout.weights, len(self.parts)
        index: dict[str, str] = {}
        for i, (path, names) in enumerate(self.parts):
            stem = weights.removesuffix(".safetensors")
            file = weights if count == 1 else f"{stem}-{i + 1:05}-of-{count:05}.safetensors"
            path.rename(self.folder / file)
            index |= dict.fromkeys(names, file)
        if count > 1:
            data = {
                "metadata": {"total_size": self.total},
                "weight_map": dict(sorted(index.items())),
            }
            source_files.write_json(self.folder / f"{weights}.index.json", data)
        if facts is None:
            return
        own = {
            "layout": self.layout.name,
            "weights": weights,
            **{key: facts[key] for key in ("dtype", "recipe", "report", "aliases")},
            **{key: facts.get(key, {}) for key in ("renamed", "stacks", "joined", "whole")},
            "layers": {name: layer.to_dict() for name, layer in self.layers.items()},
            **{key: facts[key] for key in ("carried", "cache_scales") if facts.get(key)},
            "tensors": dict(sorted(self.sums.items())),
            "config": self.config,
        }
        source_files.write_manifest(self.folder, own)


# Dense weights, for which no library of ours is needed.
DENSE = "bf16"


def transcode_targets() -> tuple[str, ...]:
    """Return what `transcode` can write: the layouts, and "bf16"."""
    return (*layouts.written_layouts(), DENSE)


def transcode(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    copy_files: Sequence[str] = (),
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Write a checkpoint of any layout that can be read in another one, whole or not at all.

    Files that go with the model (tokenizer, generation config, chat template) come along, as with
    `save`. No model is built; in memory are the tensors of one file of the target.

    Args:
        source: the folder to read; that of gpt-oss can become dense.
        target: the folder to write.
        to: a layout, or "bf16" for dense weights that need no library of ours.
        copy_files: as for `save`, globs of further files of `source`.
        max_shard_size: of a file of weights, above which there are several and an index.
        overwrite: replace the checkpoint in the target.
        progress: as for `convert`.

    Raises:
        CheckpointError: the source cannot be read or written so, or the target is in the way.
        OptionError: a layout, a size, or what a glob of `copy_files` matches does not exist.

    Example:
        >>> fp4pass.save(fp4pass.convert(model, "nvfp4a16", "sse"), "out")
        >>> fp4pass.checkpoint.transcode("out", "dense", "bf16")
        >>> sorted(safetensors.torch.load_file("dense/model.safetensors"))
        ['0.bias', '0.weight', '2.bias', '2.weight']
    """
    if to not in transcode_targets():
        raise errors.unknown_name("to: Layout", to, transcode_targets())
    limit, reader = bytes_of(max_shard_size), reading.open_checkpoint(source)
    source_files.require_config(reader.folder, reader.config, reader.own)
    layout = None if to == DENSE else layouts.get_layout(to)
    if layout is not None:
        layout.require(reader.layers)
        reading.require_input_scales(reader)
        layout.cache.config(reading.cache_format_in(reader), layout.name)
        if reader.own is None and not layout.engines:
            what = f"a folder that fp4pass wrote, with {source_files.MANIFEST}"
            raise errors.CheckpointError(
                f"{errors.expected(str(reader.folder), what, 'one of another library')} Save what "
                f"fp4pass.load makes of it, with {errors.as_option('layout', layout.name)}."
            )
    marks = (source_files.MANIFEST, *layouts.side_files())
    whole = replacing(path_of(target, "target"), overwrite, marks)
    with shown("transcode", progress), whole as folder:
        current().expect(len(reader.files), "tensors")
        weights = {each.name for each in reader.files.values()}
        known = {source_files.MANIFEST, "config.json", *layouts.side_files(), *weights}
        copy_beside(reader.folder, folder, known, copy_files)
        if layout is not None:
            _write_packed(reader, folder, layout, limit)
            return
        config = {k: v for k, v in reader.config.items() if k != "quantization_config"}
        if config:
            source_files.write_json(folder / "config.json", config | {"dtype": "bfloat16"})
        writer = CheckpointWriter(
            folder, layouts.LAYOUTS[layouts.CompressedTensors.name], {}, limit
        )
        for name, tensor in _dense_tensors(reader):
            writer.add(name, tensor)
        writer.close()


def _write_packed(
    reader: reading.CheckpointReader, folder: Path, layout: layouts.Layout, limit: int
) -> None:
    config = dict(reader.config)
    if config and reader.own is not None and layout.dtype:
        config["dtype"] = layout.dtype
    writer = CheckpointWriter(folder, layout, reader.layers, limit)
    ignored = _ignored(reader)
    layers, before = dict(reader.layers), reader.config.get("quantization_config") or {}
    kept: dict[str, Any] = {}
    if isinstance(layout, layouts.CompressedTensors):
        disks = {disk.removesuffix(".weight"): name for name, disk in reader.renamed.items()}
        layers |= {
            disks[disk].removesuffix(".weight"): layer
            for disk, layer in reader.layers.items()
            if disk in disks
        }
        # Which classes need the entry only a model says.
        kept = {key: value for key, value in DEQUANTIZE.items() if before.get(key) == value}
    cache = layout.cache.config(reading.cache_format_in(reader), layout.name)
    declared = {**layout.config(layers, ignored), **kept, **cache}
    if config and layout.engines:
        for parent, what in [*layouts.fused_problems(reader.layers, reader.dense_layers())][:1]:
            warnings.warn(
                f"{parent}: {what}. Serving engines multiply by these as by one matrix, and would "
                "read scales that do not exist. fp4pass transcode --to bf16 makes dense weights.",
                stacklevel=3,
            )
    writer.declare(config, ignored, declared)
    names = reader.packed_names()
    for name, tensor in reader.checked():
        if name in names:
            path, part, layer = names[name]
            writer.add(layouts.join(path, part), reader.decoded(name, tensor, names[name]), layer)
        else:
            writer.add(name, tensor)
    writer.close(reader.own)


def _ignored(reader: reading.CheckpointReader) -> list[str]:
    """Return the names and patterns of what is not packed, as the folder has them."""
    declared = reading.declared_config(reader.folder, reader.config)
    found = None if declared is None else reader.layout.ignored(declared)
    if found is None and reader.own is not None:
        renamed = reader.renamed
        known = {*reader.files, *renamed, *reader.own["aliases"]}
        rows = Report.from_dict(reader.own["report"]).skipped
        found = model_layers.ignored_layers(
            rows, reader.layers, lambda name: layouts.join(name, "weight") in known
        )
        weights = (renamed.get(layouts.join(name, "weight"), "") for name in found)
        found += [disk.removesuffix(".weight") for disk in weights if disk]
    # For what another layout has no words, the names of what it covers.
    odd = [each for each in found or () if not layouts.is_plain(each)]
    with source_files.well_formed(reader.folder / "config.json"):
        return [
            *(found or ()),
            *(name for name in reader.dense_layers() if layouts.matches(name, odd)),
        ]


def _dense_tensors(reader: reading.CheckpointReader) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the dense model; what it keeps in another dtype stays so."""
    packed, dtype = reader.packed_names(), getattr(torch, reader.dtype)
    renamed = reader.renamed
    has_cache, dropped = reading.cache_format_in(reader) is not None, list[str]()
    for name, tensor in reader.checked():
        if name in packed:
            continue
        if name.endswith(layouts.CACHE_SCALES) and (has_cache or reader.own is None):
            dropped += [] if has_cache else [name]
            continue
        path, _, last = name.rpartition(".")
        if last == "bias" and path in reader.layers:
            rotation = reader.layers[path].config.output_rotation
            tensor = ops.rotate(tensor, rotation) if rotation else tensor
        yield name, tensor.to(torch.bfloat16) if tensor.dtype == dtype else tensor
    if dropped:
        warnings.warn(
            f"{len(dropped)} scales of a quantized key-value cache ({errors.some(dropped)}) are "
            "left out: a dense model keeps its cache in its own dtype.",
            stacklevel=4,
        )
    twins: dict[str, list[str]] = {}
    for twin, path in reader.twins().items():
        twins.setdefault(path, []).append(twin)
    for path, layer in reader.float_layers.items():
        weight = layer.dense(reader.dense(path, torch.bfloat16)).contiguous()
        # A stack is a parameter of its own name.
        own = renamed.get(path, path)
        yield own if layer.is_stacked else layouts.join(path, "weight"), weight
        for twin in twins.get(path, ()):
            yield twin if layer.is_stacked else layouts.join(twin, "weight"), weight.clone()
