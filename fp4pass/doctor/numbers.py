"""Check the numbers of packed layers, and gather what their sizes and order are judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..checkpoint.layouts import PackedLayer
from ..core.elements import element_table, scale_table
from ..core.formats import Format
from ..core.packing import unpack_codes
from ..nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from .kinds import Finding
from .stored import Stored
from .survey import Survey, multiplies
from .tiles import is_tiled

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


@dataclass
class Statistics:
    """Statistics of a layer, kept after its tensors were read.

    Attributes:
        rms: the root mean square of its weights as the layout reads them, 0 if it is not known.
        columns: log2 of the norm of each column [E, K], of one matrix or some of a stack.
        rows: log2 of the norm of each row [E, N].
        is_tiled: its scales lie in tiles of a kernel, and not row by row.
        scalars: its global scales as multipliers, by their part.
    """

    rms: float = 0.0
    columns: Tensor | None = None
    rows: Tensor | None = None
    is_tiled: bool = False
    scalars: dict[str, float] = field(default_factory=dict)


class LayerNumbers:
    """One layer, whose tensors are read once: what is wrong with its numbers, and statistics."""

    def __init__(self, found: Survey, record: PackedLayer, held: Mapping[str, Stored]) -> None:
        self.record, self.held = record, held
        self.multiplies = multiplies(found.layout, record.fmt)
        self.findings: list[Finding] = []
        self.kept = Statistics()
        weight_scale = self._scalars()
        scale = held[SCALE].read()
        # [E * N, K / block], of formats that have a scale in each row.
        scale = scale.view(torch.uint8) if scale.itemsize == 1 else scale
        scale = scale.reshape(-1, scale.shape[-1] if scale.ndim else 1)
        lowest = torch.zeros_like(scale, dtype=torch.bool)
        sound = self._scales(scale) and self._sizes(scale, lowest)
        used = self._codes(scale, lowest)
        if sound and used:
            self._measure(scale, weight_scale)

    def _say(self, kind: str, part: str, found: str) -> None:
        tensor = self.held[part]
        self.findings.append(Finding(kind, tensor.name, tensor.path.name, found))

    @property
    def _fmt(self) -> Format:
        return self.record.fmt

    def _scalars(self) -> Tensor | None:
        """Check the global scales; return those of weights as multipliers, None without."""
        result = None
        for part, kind in ((GLOBAL, "global-bad"), (INPUT_GLOBAL, "input-bad")):
            if part not in self.held:
                continue
            number = self.held[part].read().float()
            # Readers divide by what others multiply by.
            if not ((number > 0) & number.isfinite() & (1 / number).isfinite()).all():
                what = "expected a positive finite number with a finite reciprocal, got"
                self._say(kind, part, f"{what} {_shown(number)}")
                continue
            value = number if self.multiplies else 1 / number
            if part == GLOBAL:
                result = value
            if number.numel() == 1:
                self.kept.scalars[part] = value.item()
        return result

    def _scales(self, scale: Tensor) -> bool:
        """Check the block scales, and return whether their values can be used."""
        if scale.dtype == torch.uint8:
            bad = int((scale > self._fmt.scale.last).sum())
        else:
            bad = int((~scale.isfinite() | (scale < 0)).sum())
        if bad:
            what = f"it holds NaN or a negative scale, {bad} of {scale.numel()}"
            self._say("scale-nan", SCALE, f"{what}; expected positive finite numbers")
            return False
        first = scale.flatten()[:1]
        if scale.numel() >= _FEWEST_BLOCKS and first.any() and bool((scale == first).all()):
            value = float(self._values(first)[0])
            what = f"expected a scale for each block, got {value:g} for all {scale.numel()}"
            self._say("scale-uncalibrated", SCALE, what)
            return False
        return True

    def _sizes(self, scale: Tensor, lowest: Tensor) -> bool:
        """Check block scales against those around them; note the far lower ones in `lowest`."""
        matrices = math.prod(self.record.shape[:-2])
        if len(scale) % matrices:
            return True
        larger = 0
        for part, low in zip(scale.chunk(matrices), lowest.chunk(matrices), strict=True):
            sizes = self._values(part).log2().clamp_min(-150.0)
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
            self._say("scale-size", SCALE, f"{what} are more than 2^{_FAR} times larger")
        return not larger

    def _values(self, scale: Tensor) -> Tensor:
        if scale.dtype != torch.uint8:
            return scale.float()
        return scale_values(scale, self._fmt)

    def _codes(self, scale: Tensor, lowest: Tensor) -> bool:
        """Check codes against the scales, and return whether there are any but zeros.

        lowest: the scales that are far lower than those around them.
        """
        *_, rows, columns = self.record.shape
        mask = _MAGNITUDES.get(self._fmt.element.bits, 0xFF)
        width = self._fmt.packed_columns(columns)
        matches = len(scale) == math.prod(self.record.shape[:-1])
        zeros = (scale == 0) | lowest if matches else None
        any_zero = zeros is not None and bool(zeros.any())
        parts, lost, unused = [], 0, 0
        none = element_table(self._fmt.element, torch.device("cpu")).isnan()
        has_none = self._fmt.element.bits == 8 and bool(none.any())
        for first, codes in self.held[PACKED].rows(width):
            codes = codes.view(torch.uint8)
            if has_none:
                unused += int(none[codes.int()].sum())
            # Eight bytes at a time, where they fill a row.
            if width % 8 == 0 and not any_zero:
                parts.append((codes.view(torch.int64) & _wide(mask)).any(-1))
                continue
            some = (codes & mask) != 0
            parts.append(some.any(-1))
            if any_zero and zeros is not None:
                blocks = some.reshape(len(some), scale.shape[-1], -1).any(-1)
                lost += int((blocks & zeros[first : first + len(some)]).sum())
        used = torch.cat(parts)
        if lost:
            what = "expected scales like those around them for blocks of codes, got 0 or nearly 0"
            self._say("scale-zero", SCALE, f"{what} for {lost} of {scale.numel()}")
        if unused:
            self._say("codes-nan", PACKED, f"expected numbers, got NaN for {unused} codes")
        if not bool(used.any()):
            self._say("dead", PACKED, "expected weights, got zeros alone")
            return False
        dead = (~used.reshape(-1, rows).any(-1)).nonzero().flatten().tolist()
        if dead:
            what = f"expected weights of each expert, got zeros alone for {len(dead)}"
            self._say("dead", PACKED, f"{what}: {', '.join(map(str, dead[:5]))}")
        elif matches and zeros is not None:
            lost_rows = _longest_run(~used & ~zeros.all(-1))
            if lost_rows >= max(_FEWEST_ROWS, rows // 16):
                what = f"expected codes in every row, got {lost_rows} rows below each other"
                self._say("codes-zero", PACKED, f"{what} that have scales and no codes")
        return not lost

    def _measure(self, scale: Tensor, weight_scale: Tensor | None) -> None:
        """Take the norms of rows and columns; of large layers, of some rows."""
        *stack, rows, columns = self.record.shape
        if len(scale) != math.prod((*stack, rows)) or self._fmt.packed_columns(columns) < 1:
            return
        experts = min(stack[0], _MATRICES) if stack else 1
        values = self._values(scale[: experts * rows])
        norms = values.square().sum(-1).reshape(experts, rows)
        self.kept.rows = norms.clamp_min(1e-30).log2() / 2
        self.kept.is_tiled = is_tiled(values[:rows].clamp_min(1e-30).log2())
        step = max(-(-rows // _ROWS), 1)
        width, sums = self._fmt.packed_columns(columns), torch.zeros(experts, columns)
        counts = torch.zeros(experts)
        for first, codes in self.held[PACKED].rows(width):
            chosen = torch.arange(-first % step, len(codes), step)
            own = (chosen + first) // rows
            chosen, own = chosen[own < experts], own[own < experts]
            if not len(chosen):
                break
            found = block_values(codes[chosen], values[chosen + first], self._fmt)
            sums.index_add_(0, own, found.square())
            counts.index_add_(0, own, torch.ones(len(own)))
        means = sums / counts.unsqueeze(-1)
        self.kept.columns = means.clamp_min(1e-30).log2() / 2
        factor = 1.0 if weight_scale is None else float(weight_scale.max())
        self.kept.rms = math.sqrt(float(means.mean())) * factor


def scale_values(bits: Tensor, fmt: Format) -> Tensor:
    """Return what the bits of block scales stand for, in float32."""
    return scale_table(fmt.scale, torch.device("cpu"))[bits.int()]


def block_values(packed: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Return what packed codes [R, P] and values of scales [R, C] stand for, float32 [R, K]."""
    codes = unpack_codes(packed.view(torch.uint8), fmt.element.bits)
    table = element_table(fmt.element, torch.device("cpu"))
    values = table[codes.int()].nan_to_num().unflatten(-1, (scale.shape[-1], -1))
    return (values * scale.unsqueeze(-1)).flatten(1)


def _wide(mask: int) -> int:
    """Return eight times the mask of a byte, as a signed number."""
    return int.from_bytes(bytes([mask] * 8), "little", signed=True)


def _shown(number: Tensor) -> str:
    values = [f"{each:g}" for each in number.flatten().tolist()[:4]]
    return f"[{', '.join(values)}{', ...' if number.numel() > 4 else ''}]"


def _longest_run(flags: Tensor) -> int:
    """Return the length of the longest run of True."""
    if not bool(flags.any()):
        return 0
    edges = torch.diff(flags.int(), prepend=torch.zeros(1), append=torch.zeros(1))
    starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return int((stops - starts).max())
