"""Check a folder: its checksums, shapes and numbers, and the names that others match."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from ..nn.linear import GLOBAL, INPUT_GLOBAL
from .layouts import fused_problems, matches
from .reader import CheckpointReader, dense_problem, missing_input_scales, packed_problem
from .readers import SERVED
from .source_files import read_json, well_formed

# Attention to something else, where q does not read what k and v read.
CROSS_ATTENTION = re.compile(r"cross|enc[a-z]*_?(dec|attn)", re.IGNORECASE)


def problems(
    reader: CheckpointReader, tensors: Iterable[tuple[str, Tensor]], sums: bool
) -> Iterator[tuple[str, str]]:
    """Yield the layers and tensors that are wrong, with the file and what is wrong.

    Checked are the numbers of `tensors`, with `sums` their checksums too, and what engines and
    other programs make of the names of all layers.
    """
    packed = reader.packed_names()
    scales: dict[str, dict[str, float]] = {}
    for name, tensor in tensors:
        found = reader.sum_problem(name, tensor) if sums else ""
        if name in packed:
            layer, part, facts = packed[name]
            found = found or packed_problem(part, tensor, facts)
            if part in (GLOBAL, INPUT_GLOBAL) and not found and not facts.is_stacked:
                scales.setdefault(layer, {})[part] = tensor.item()
        else:
            is_buffer = not name.endswith(("weight", "bias"))
            found = found or dense_problem(tensor, is_buffer)
        if found:
            yield name, f"{reader.files[name].name}: {found}"
    for layer, name in missing_input_scales(reader).items():
        yield (
            layer,
            f"{name} is missing, and its inputs are quantized. fp4pass.load gives experts that "
            "calibration never reached the largest of the others; engines may refuse the folder",
        )
    yield from _fused(reader, scales)
    declared = {"config.json": reader.config.get("quantization_config") or {}}
    for file in reader.layout.side_files:
        if (reader.folder / file).is_file():
            declared[file] = read_json(reader.folder / file)
    for file, said in declared.items():
        with well_formed(reader.folder / file):
            ignored = reader.layout.ignored(said) or ()
            for name in (each for each in reader.layers if matches(each, ignored)):
                pattern = next(each for each in ignored if matches(name, [each]))
                yield name, f"{file}: it is packed, and {pattern!r} says that it is dense"


def _fused(
    reader: CheckpointReader, scales: Mapping[str, dict[str, float]]
) -> Iterator[tuple[str, str]]:
    """Yield the modules of which engines fuse layers that differ."""
    if not reader.layout.engines:
        return
    architectures = reader.config.get("architectures") or ()
    served = any(str(each).endswith(SERVED) for each in architectures)
    for layer, found in scales.items():
        if not served or CROSS_ATTENTION.search(layer):
            found.pop(INPUT_GLOBAL, None)
    for parent, problem in fused_problems(reader.layers, reader.dense_layers(), scales):
        yield parent, f"config.json: engines multiply by these as by one matrix: {problem}"
