"""Check a folder: its checksums, shapes and numbers, and the names that others match."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, expected
from ..nn.kv_cache import KV_CACHE
from ..nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from ..record.rows import Report
from .layouts import expected_shapes
from .reader import CheckpointReader
from .source_files import Shapes, check_float


def check_shapes(reader: CheckpointReader, shapes: Shapes) -> None:
    """Raise CheckpointError if the tensors of a layer do not fit each other."""
    for layer, facts in reader.layers.items():
        known, names = expected_shapes(reader.layout, facts), reader.names(layer)
        if GLOBAL in known and GLOBAL not in names:
            missing = reader.layout.tensor_name(layer, GLOBAL, facts.fmt)
            raise CheckpointError(f"{reader.folder} has no {missing}. Copy the folder again.")
        for part, name in names.items():
            (shape, dtype), (allowed, kinds) = shapes[name], known.get(part, ((), ()))
            if part in known and (shape not in allowed or dtype not in kinds):
                raise CheckpointError(
                    f"{reader.files[name]}: {name}: expected {kinds[0]} {list(allowed[0])} for a "
                    f"weight {list(facts.shape)} in {facts.fmt.key}, got {dtype} {list(shape)}. "
                    "Copy the folder again."
                )


def check_facts(reader: CheckpointReader) -> None:
    """Raise what `well_formed` expects for what is read later, and is not what it should be."""
    check_float(reader.dtype)
    dict(reader.versions)
    if reader.own is None:
        cache_format_in(reader)
    else:
        _check_mappings(reader.own)
        Report.from_dict(reader.own["report"])
        for layer in (*reader.twins().values(), *reader.layers):
            if PACKED not in reader.names(layer) or SCALE not in reader.names(layer):
                raise ValueError(f"{layer}: expected codes and scales of every layer")
        _check_stacks(reader)
    if reader.config.get("quantization_config") is not None:
        dict(reader.config["quantization_config"])


def _check_mappings(own: Mapping[str, Any]) -> None:
    """Raise TypeError for facts that are no mappings, or map names to something else."""
    always = {"recipe": object, "tensors": Mapping, "aliases": str}
    sometimes = {"config": object, "renamed": str, "cache_scales": float}
    for key, kind in {**always, **sometimes}.items():
        facts = own.get(key, {}) if key in sometimes else own[key]
        if not isinstance(facts, Mapping) or not all(isinstance(e, kind) for e in facts.values()):
            raise TypeError(expected(key, "a mapping as save writes it", f"{facts!r:.100}"))


def require_input_scales(reader: CheckpointReader, besides: Container[str] = ()) -> None:
    """Raise CheckpointError for a scale of inputs that is missing, but for some layers."""
    # Ours has them, or means that each input gets one of its own.
    for layer, facts in ({} if reader.own else reader.layers).items():
        if facts.has_input_scale and INPUT_GLOBAL not in reader.names(layer):
            if layer not in besides:
                raise CheckpointError(
                    f"{reader.folder}: {reader.layout.tensor_name(layer, INPUT_GLOBAL, facts.fmt)} "
                    "is missing, and these inputs are quantized. Copy the folder again; or make it "
                    "dense, which needs none, by fp4pass transcode --to bf16."
                )


def _check_stacks(reader: CheckpointReader) -> None:
    """Raise ValueError, LookupError or TypeError for pieces that do not make their stacks."""
    for name, pieces in reader.stacks.items():
        if not pieces or not {piece.name for piece in pieces} <= set(reader.layers):
            raise ValueError(f"{name}: expected packed layers as its pieces")
    for name, whole in reader.joined.items():
        experts, rows, columns = shape = whole.shape
        found = 0
        for piece in reader.stacks[name]:
            fits = 0 <= piece.expert < experts and 0 <= piece.start < piece.stop <= rows
            if not fits or reader.layers[piece.name].shape != (piece.stop - piece.start, columns):
                raise ValueError(f"{name}: expected rows of {shape} as its pieces, got {piece}")
            found += piece.stop - piece.start
        if found != experts * rows:
            raise ValueError(f"{name}: expected pieces of {experts * rows} rows, got {found}")
    dict(reader.float_layers)


def dense_problem(tensor: Tensor, is_buffer: bool) -> str:
    """Return that a dense tensor is not finite, or ""; masks are buffers of infinities."""
    if tensor.is_floating_point() and tensor.itemsize > 1:
        if tensor.isnan().any() or (not is_buffer and tensor.isinf().any()):
            return (
                "expected finite numbers, got NaN or infinity. Copy the folder again, or quantize "
                "a model that is finite."
            )
    return ""


def cache_format_in(reader: CheckpointReader) -> str | None:
    """Return the format of the key-value cache that a folder has scales of, None without one."""
    if reader.own is not None:
        found: str | None = reader.own["recipe"].get(KV_CACHE)
        return found
    return reader.layout.cache.format(reader.declared)
