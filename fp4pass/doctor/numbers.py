"""Check the numbers of packed layers: codes, scales, the sizes of weights, and their order.

Order is judged by the sizes of channels that two layers share. The columns of a layer and what they
meet (rows that write these channels, a norm before it) have sizes that go together in a trained
model: the large channels of one are the large ones of the other. Where they go together in another
order than the stored one, and not in that, codes lie in that other order. Of random weights neither
holds, so that nothing is found.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint import SERVED, fused_problems
from ..core.elements import element_table, scale_table
from ..core.formats import Format
from ..core.packing import unpack_codes
from ..nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from .folder import EXPERT, Folder, Stored

# Bits of the magnitudes in a byte of codes; minus zero is a zero, too.
_MAGNITUDES = {4: 0x77, 8: 0x7F}

# Rows of zero codes below each other, from which on there is a hole and no row of zeros.
_FEWEST_ROWS = 8

# Blocks of one scale alone, from which on no weights have it.
_FEWEST_BLOCKS = 256

# Octaves between a block scale and the others of its row and of its column, in no trained model.
_FAR = 12

# As many make a median.
_SEVERAL = 8

# Rows of a matrix, and matrices of a stack, that norms of columns are taken of.
_ROWS, _MATRICES = 512, 8

# Weights of trained models have a root mean square of 1e-3 to 1, and these bounds are far from it.
_RMS = (2.0**-24, 2.0**6)

# Between layers of one role, such as all mlp.up_proj, sizes differ by less than ten.
_APART = 2.0**7

# As many layers have a usual size.
_FEWEST = 4

# The largest input of a layer: of less nothing comes, of more no 16-bit model.
_INPUTS = (2.0**-12, 2.0**17)

# Attention to something else, where q does not read what k and v read.
_CROSS_ATTENTION = re.compile(r"cross|enc[a-z]*_?(dec|attn)", re.IGNORECASE)

# Deviations of scales in tiles of a kernel above those of scales in rows.
_TILED = 30.0

# Bytes of codes that are looked at together.
_AT_ONCE = 1 << 25


@dataclass
class Statistics:
    """Statistics of a layer, kept after its tensors were read."""

    rms: float = 0.0  # of its weights as the layout reads them, 0 if it is not known
    columns: Tensor | None = None  # log2 of their norms [E, K], of one matrix or some of a stack
    rows: Tensor | None = None  # log2 of their norms [E, N]
    is_tiled: bool = False  # scales lie in tiles of a kernel, and not row by row
    scalars: dict[str, float] = field(default_factory=dict)  # global scales as multipliers


def check_numbers(found: Folder, layer: str) -> Statistics:
    """Read a layer, note what is wrong with its numbers, and return its statistics."""
    record, held, kept = found.records[layer], found.parts[layer], Statistics()
    largest = 1.0
    for part, kind in ((GLOBAL, "global-bad"), (INPUT_GLOBAL, "input-bad")):
        if part in held:
            number = held[part].read().float()
            # Readers divide by what others multiply by.
            if not ((number > 0) & number.isfinite() & (1 / number).isfinite()).all():
                what = "expected a positive finite number with a finite reciprocal, got"
                found.say(kind, held[part], f"{what} {number.flatten().tolist()[:4]}")
                # Then sizes are not known.
                largest = 0.0 if part == GLOBAL else largest
                continue
            value = number if found.multiplies(layer) else 1 / number
            largest = float(value.max()) if part == GLOBAL else largest
            if number.numel() == 1:
                kept.scalars[part] = value.item()
    scale = held[SCALE].read()
    # [E * N, K / block], of formats that have a scale in each row.
    scale = scale.view(torch.uint8) if scale.itemsize == 1 else scale
    scale = scale.reshape(-1, scale.shape[-1] if scale.ndim else 1)
    lowest = torch.zeros_like(scale, dtype=torch.bool)
    usable = _check_scales(found, layer, scale, lowest)
    codes = held[PACKED].read().view(torch.uint8)
    codes = codes.reshape(-1, record.fmt.packed_columns(record.shape[-1]))
    if _check_codes(found, layer, codes, scale, lowest) and usable:
        _measure(kept, record.shape, record.fmt, codes, scale)
        kept.rms *= largest
    return kept


def _check_scales(found: Folder, layer: str, scale: Tensor, lowest: Tensor) -> bool:
    """Note wrong block scales, and far lower ones in `lowest`; return whether they serve."""
    record, stored = found.records[layer], found.parts[layer][SCALE]
    if scale.dtype == torch.uint8:
        bad = int((scale > record.fmt.scale.last).sum())
    else:
        bad = int((~scale.isfinite() | (scale < 0)).sum())
    if bad:
        what = f"it holds NaN or a negative scale, {bad} of {scale.numel()}"
        found.say("scale-nan", stored, f"{what}; expected positive finite numbers")
        return False
    first = scale.flatten()[:1]
    if scale.numel() >= _FEWEST_BLOCKS and first.any() and bool((scale == first).all()):
        value = float(_values(first, record.fmt))
        what = f"expected a scale for each block, got {value:g} for all {scale.numel()}"
        found.say("scale-uncalibrated", stored, what)
        return False
    matrices, larger = math.prod(record.shape[:-2]), 0
    if len(scale) % matrices:
        return True
    for part, low in zip(scale.chunk(matrices), lowest.chunk(matrices), strict=True):
        sizes = _values(part, record.fmt).log2().clamp_min(-150.0)
        usual = sizes.flatten()[:: max(sizes.numel() >> 12, 1)].median()
        across = [d for d in (0, 1) if sizes.shape[d] >= _SEVERAL]
        if not across or ((sizes - usual).abs() < _FAR).all():
            continue
        apart = torch.stack([sizes - sizes.median(d, keepdim=True).values for d in across])
        larger += int((apart > _FAR).all(0).sum())
        # Rows or columns of weights that are none have such scales, too.
        if len(across) == 2:
            low |= (apart < -_FAR).all(0)
    if larger:
        what = f"expected scales like those around them, got {larger} of {scale.numel()} that"
        found.say("scale-size", stored, f"{what} are more than 2^{_FAR} times larger")
    return not larger


def _check_codes(found: Folder, layer: str, codes: Tensor, scale: Tensor, lowest: Tensor) -> bool:
    """Check codes against the scales, and return whether their values can be used."""
    record, parts = found.records[layer], found.parts[layer]
    rows, mask = record.shape[-2], _MAGNITUDES.get(record.fmt.element.bits, 0xFF)
    zeros = (scale == 0) | lowest
    matches = len(scale) == len(codes)
    any_zero = matches and bool(zeros.any())
    none = element_table(record.fmt.element, torch.device("cpu")).isnan()
    has_none = record.fmt.element.bits == 8 and bool(none.any())
    used, lost, bad, first = [], 0, 0, 0
    for part in codes.split(max(_AT_ONCE // max(codes.shape[1], 1), 1)):
        some = (part & mask) != 0
        used.append(some.any(-1))
        if has_none:
            bad += int(none[part.int()].sum())
        if any_zero:
            blocks = some.reshape(len(some), scale.shape[-1], -1).any(-1)
            lost += int((blocks & zeros[first : first + len(some)]).sum())
        first += len(part)
    is_used = torch.cat(used)
    if lost:
        what = "expected scales like those around them for blocks of codes, got 0 or nearly 0"
        found.say("scale-zero", parts[SCALE], f"{what} for {lost} of {scale.numel()}")
    if bad:
        found.say("codes-nan", parts[PACKED], f"expected numbers, got NaN for {bad} codes")
    if not bool(is_used.any()):
        found.say("dead", parts[PACKED], "expected weights, got zeros alone")
        return False
    dead = (~is_used.reshape(-1, rows).any(-1)).nonzero().flatten().tolist()
    if dead:
        what = f"expected weights of each expert, got zeros alone for {len(dead)}"
        found.say("dead", parts[PACKED], f"{what}: {', '.join(map(str, dead[:5]))}")
    elif matches:
        hole = _longest_run(~is_used & ~zeros.all(-1))
        if hole >= max(_FEWEST_ROWS, rows // 16):
            what = f"expected codes in every row, got {hole} rows below each other"
            found.say("codes-zero", parts[PACKED], f"{what} that have scales and no codes")
    return not lost


def _measure(
    kept: Statistics, shape: tuple[int, ...], fmt: Format, codes: Tensor, scale: Tensor
) -> None:
    """Take the norms of rows and columns; of large layers, of some rows."""
    if len(scale) != len(codes) or not codes.shape[1]:
        return
    rows, experts = shape[-2], min(math.prod(shape[:-2]), _MATRICES)
    values = _values(scale[: experts * rows], fmt).unflatten(0, (-1, rows))
    kept.rows = values.square().sum(-1).clamp_min(1e-30).log2() / 2
    kept.is_tiled = _is_tiled(values[0].clamp_min(1e-30).log2())
    step = max(-(-rows // _ROWS), 1)
    chosen = unpack_codes(codes.unflatten(0, (-1, rows))[:experts, ::step], fmt.element.bits)
    table = element_table(fmt.element, torch.device("cpu")).nan_to_num()
    weights = table[chosen.int()].unflatten(-1, (scale.shape[1], -1))
    weights = (weights * values[:, ::step].unsqueeze(-1)).flatten(2)  # [E, N, K]
    means = weights.square().mean(1)
    kept.columns = means.clamp_min(1e-30).log2() / 2
    kept.rms = math.sqrt(float(means.mean()))


def _values(scale: Tensor, fmt: Format) -> Tensor:
    """Return the values of block scales, which lie in bits or as numbers, in float32."""
    if scale.dtype != torch.uint8:
        return scale.float()
    return scale_table(fmt.scale, torch.device("cpu"))[scale.int()]


def _longest_run(flags: Tensor) -> int:
    """Return the length of the longest run of True."""
    edges = torch.diff(flags.int(), prepend=torch.zeros(1), append=torch.zeros(1))
    starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return int((stops - starts).max()) if len(starts) else 0


def _is_tiled(blocks: Tensor) -> bool:
    """Return whether log2 of scales [N, C] go together in tiles of 128 x 4, and not in rows."""
    rows, columns = blocks.shape
    if rows % 128 or columns % 4 or columns < 8:
        return False
    tiles = blocks.flatten().unflatten(0, (rows // 128, columns // 4, 32, 4, 4))
    # The row of a tile is r % 32, then r // 32, then the column.
    turned = tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)
    other = _explained(turned)
    return other > _TILED and other > 4 * abs(_explained(blocks))


def _explained(matrix: Tensor) -> float:
    """Return how much rows and columns explain of a matrix, in deviations of chance."""
    centered = matrix - matrix.mean()
    variance, explained = centered.square().mean().item(), 0.0
    for dimension in (0, 1) if variance else ():
        size, count = matrix.shape[dimension], matrix.shape[1 - dimension]
        part = centered.mean(dimension).square().sum().item() * size / variance
        explained += (part - count) / (2 * count) ** 0.5
    return explained


def check_sizes(found: Folder, kept: Mapping[str, Statistics], wrong: Collection[str]) -> None:
    """Note odd global scales, and those that differ where engines fuse; wrong: odd layers."""
    odd = _check_weights(found, kept) | _check_inputs(found, kept)
    _check_fused(found, kept, {*wrong, *odd})


def _check_weights(found: Folder, kept: Mapping[str, Statistics]) -> set[str]:
    """Note weights of odd sizes; return the layers whose sizes no model has."""
    sizes = {name: each.rms for name, each in kept.items() if each.rms}
    turned = {
        name
        for name, size in sizes.items()
        if _is_odd(found, name, GLOBAL, size, kept[name].scalars.get(GLOBAL, 1.0))
    }
    usual = {name: size for name, size in sizes.items() if name not in turned}
    roles: dict[str, list[str]] = {}
    for name in usual:
        role = ".".join("*" if each.isdigit() else each for each in name.split("."))
        roles.setdefault(role, []).append(name)
    for role, names in roles.items():
        # Few say little of each other.
        is_few = len(names) < _FEWEST
        others = list(usual) if is_few else names
        apart, of = (4 * _APART, "layers") if is_few else (_APART, role)
        middle = statistics.median(usual[name] for name in others)
        for name in names if len(others) >= _FEWEST else ():
            if not middle / apart <= usual[name] <= apart * middle:
                what = f"expected weights of the size of the other {of}, {middle:.3g}"
                place = _stored(found, name, GLOBAL)
                found.say("weights-size", place, f"{what}, got {usual[name]:.3g}")
    return turned


def _check_inputs(found: Folder, kept: Mapping[str, Statistics]) -> set[str]:
    """Note scales of inputs that are odd, missing or never set; return their layers."""
    scales = {n: e.scalars[INPUT_GLOBAL] for n, e in kept.items() if INPUT_GLOBAL in e.scalars}
    ones = {name for name, scale in scales.items() if scale == 1.0}
    any_number = any(math.frexp(scale)[0] != 0.5 for scale in scales.values())
    if ones and (len(ones) == len(scales) or any_number):
        for name in sorted(ones):
            what = "expected a calibrated scale, got exactly 1"
            found.say("input-uncalibrated", _stored(found, name, INPUT_GLOBAL), what)
        odd = ones
    else:
        odd = set()
        for name, scale in scales.items():
            fmt = found.records[name].format_of(INPUT_GLOBAL)
            # Without block scales of inputs it is the scale of their elements.
            most = scale * fmt.element.max * (fmt.scale.max if fmt.has_global_scale else 1)
            if _is_odd(found, name, INPUT_GLOBAL, most, scale):
                odd.add(name)
    # Ours has them, or means that each input gets one of its own.
    missing = {
        name
        for name, record in ({} if found.own is not None else found.records).items()
        if record.has_input_scale and INPUT_GLOBAL not in found.parts[name]
    }
    for name in sorted(missing):
        is_expert = "of an expert " if EXPERT.match(f"{name}.weight") else ""
        what = f"expected {found.name_of(name, INPUT_GLOBAL)}, for inputs {is_expert}are quantized"
        found.say("input-missing", name, f"{what}, got none")
    return odd | missing


def _check_fused(found: Folder, kept: Mapping[str, Statistics], skipped: Collection[str]) -> None:
    """Note the modules of which engines fuse layers whose scales differ."""
    served = any(str(each).endswith(SERVED) for each in found.config.get("architectures") or ())
    # Of a scale that one of them lacks, another finding tells.
    lacking = {n.rpartition(".")[0] for n in kept if INPUT_GLOBAL not in found.parts[n]}
    scales: dict[str, dict[str, float]] = {}
    for name, each in kept.items():
        if name not in skipped:
            # As they are stored.
            power = 1 if found.multiplies(name) else -1
            scales[name] = {part: value**power for part, value in each.scalars.items()}
            if not served or _CROSS_ATTENTION.search(name) or name.rpartition(".")[0] in lacking:
                scales[name].pop(INPUT_GLOBAL, None)
    others = {each.where for each in found.findings if each.kind == "fused-schemes"}
    records = {name: each for name, each in found.records.items() if name in scales}
    for parent, problem in fused_problems(records, (), scales) if found.layout.engines else ():
        if parent not in others:
            found.say("fused-scales", parent, f"expected one for all, got {problem}")


def _stored(found: Folder, layer: str, part: str) -> Stored:
    held = found.parts[layer]
    return held.get(part) or held[SCALE]


def _is_odd(found: Folder, layer: str, part: str, size: float, scale: float) -> bool:
    """Note a size that no model has, or that the other direction of a scale makes usual."""
    is_weight = part == GLOBAL
    low, high = _RMS if is_weight else _INPUTS
    if low <= size <= high:
        return False
    other, what = size / scale / scale, "weights of" if is_weight else "inputs of at most"
    if low <= other <= high and scale > 1:
        kind = "global-direction" if is_weight else "input-direction"
        as_it_is = found.multiplies(layer)
        text = (
            f"expected a number that {'multiplies' if as_it_is else 'divides'}, got "
            f"{scale if as_it_is else 1 / scale:g}, which makes {what} {size:.3g}; its reciprocal "
            f"makes {other:.3g}"
        )
    else:
        kind = "weights-size" if is_weight else "input-bad"
        text = f"expected {what} {low:.2g} to {high:.2g}, got {size:.3g}"
    found.say(kind, _stored(found, layer, part), text)
    return True


# ---- order -------------------------------------------------------------------------------------

# Channels that are ranked among each other, so that what differs between parts of a layer, as
# heads, is no evidence.
_WINDOW = 32

# Orders that writers mixed up, as where each channel of a window lies.
_EVERY = torch.arange(_WINDOW)
_HALVES = _EVERY.split(_WINDOW // 2)
_ORDERS: dict[str, Tensor] = {
    "nibbles of each byte swapped": _EVERY ^ 1,
    "codes of 4 bytes in reverse": _EVERY ^ 7,
    "halves of 32 interleaved": torch.stack(_HALVES, 1).flatten(),
    "even before odd of 32": torch.cat((_EVERY[::2], _EVERY[1::2])),
    "halves of 16 interleaved": torch.cat(
        [torch.stack(part.split(_WINDOW // 4), 1).flatten() for part in _HALVES]
    ),
    "even before odd of 16": torch.cat([torch.cat((part[::2], part[1::2])) for part in _HALVES]),
}

# The square of a normal number: 7 deviations happen by chance once in 10^12, and 120 pairs of
# channels of a small model have been looked at before that.
_CERTAIN = 60.0

# Enough to tell which of two layers is in order, once one of them is not.
_LIKELY = 20.0

# The evidence for the stored order is below this share of that for another.
_SHARE = 0.25


class _Pair(NamedTuple):
    """Evidence of two layers, squares of normal numbers: for the stored order and for others."""

    columns: str
    rows: str
    stored: float
    other: float
    order: str

    @property
    def is_odd(self) -> bool:
        return self.other > _CERTAIN and self.stored < _SHARE * self.other


def check_order(found: Folder, kept: Mapping[str, Statistics], norms: Mapping[str, Tensor]) -> None:
    """Note layers in another order than the layout's; norms: the dense vectors by their names."""
    tiled = [name for name, each in kept.items() if each.is_tiled]
    for name in tiled:
        what = "expected scales row by row, got them in tiles of 128 rows and 4 columns"
        found.say("scale-order", found.parts[name][SCALE], what)
    pairs = list(_pairs({name: kept[name] for name in kept if name not in tiled}, norms))
    sure = [pair for pair in pairs if pair.stored > _LIKELY and pair.stored > pair.other]
    as_columns, as_rows = {pair.columns for pair in sure}, {pair.rows for pair in sure}
    wrong: dict[tuple[str, str], list[_Pair]] = {}
    for pair in pairs:
        if pair.is_odd:
            # Rows are wrong where the columns meet other rows as they should.
            is_rows = pair.columns in as_columns and pair.rows not in as_rows and pair.rows in kept
            key = ("rows", pair.rows) if is_rows else ("columns", pair.columns)
            wrong.setdefault(key, []).append(pair)
    for (side, name), odd in wrong.items():
        most = max(odd, key=lambda pair: pair.other)
        order, kind = most.order, "codes-order"
        if side == "rows":
            order, kind = order.replace("nibbles of each byte", "neighbours"), "rows-order"
        beside = ", ".join([pair.rows if side == "columns" else pair.columns for pair in odd][:2])
        what = f"expected {side} that go with {beside}, got such with {order}"
        found.say(kind, found.parts[name][PACKED], f"{what} ({most.other**0.5:.0f} deviations)")


def _pairs(kept: Mapping[str, Statistics], norms: Mapping[str, Tensor]) -> Iterator[_Pair]:
    """Yield the evidence of each two profiles of one length in one layer of the model."""
    profiles: dict[str, dict[str, Tensor]] = {}
    for name, each in kept.items():
        if each.rows is not None:
            profiles.setdefault(_block(name), {})[name] = each.rows
    for name, vector in norms.items():
        profile = vector.float().abs().clamp_min(1e-30).log2()
        profiles.setdefault(_block(name), {})[name] = profile[None]
    for name, each in kept.items():
        if each.columns is None:
            continue
        for other, rows in profiles.get(_block(name), {}).items():
            if other != name and len(rows) in (1, len(each.columns)):
                for part in _parts(rows, each.columns.shape[-1]):
                    if evidence := _evidence(each.columns, part):
                        yield _Pair(name, other, *evidence)


def _block(name: str) -> str:
    """Return the layer of the model that a tensor is in: all up to the first number."""
    match = re.match(r"(?:[^.]*\.)*?\d+(?=\.|$)", name)
    return match[0] if match else ""


def _parts(rows: Tensor, size: int) -> Iterator[Tensor]:
    """Yield rows [E, K] that so many columns may meet; gate and up may be every other row."""
    if rows.shape[-1] == size:
        yield rows
    elif rows.shape[-1] == 2 * size:
        for start in (0, 1):
            yield rows[:, start::2]
            yield rows[:, start * size : (start + 1) * size]


def _evidence(columns: Tensor, rows: Tensor) -> tuple[float, float, str] | None:
    """Return how far two profiles go together, as stored and in the best other order."""
    # Both are squares of normal numbers; None if the profiles say nothing.
    first, second = _ranks(columns), _ranks(rows)
    if first is None or second is None:
        return None
    size, windows = first.square().sum(-1)[0, 0], first.shape[0] * first.shape[1]

    def squared(order: Tensor) -> float:
        rho = (first[..., order] * second).sum(-1) / size
        # The correlation of ranks of n has a variance of 1 / (n - 1).
        return float(rho.sum() ** 2 * (_WINDOW - 1) / windows)

    others = {label: squared(order) for label, order in _ORDERS.items()}
    best = max(others, key=lambda label: others[label])
    return squared(_EVERY), others[best], best


def _ranks(profile: Tensor) -> Tensor | None:
    """Return ranks [E, W, 32] in each window of a profile [E, K], centered; None if all are one."""
    windows = profile.shape[-1] // _WINDOW
    cut = profile[:, : windows * _WINDOW].unflatten(-1, (windows, _WINDOW))
    if not windows or bool((cut == cut[..., :1]).all()):
        return None
    return cut.argsort(-1).argsort(-1).float() - (_WINDOW - 1) / 2
