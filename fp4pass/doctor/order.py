"""Judge the order of codes and scales by the sizes of channels that two layers share.

The columns of a layer and what they meet (rows that write these channels, a norm before it) have
sizes that go together in a trained model: the large channels of one are the large ones of the
other. Where they go together in another order than the stored one, and not in that, codes lie in
that other order. Of random weights neither holds, so that nothing is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..nn import PACKED, SCALE
from .folder import Folder
from .numbers import Statistics

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
    """Note layers whose codes or scales lie in another order than the layout's.

    norms: the dense vectors of the folder, by their names.
    """
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
    """Return how far two profiles go together, as squares of normal numbers.

    In the stored order and in the best other one, which is named; None if they say nothing.
    """
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
