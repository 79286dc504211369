"""Judge the order of codes and scales by the sizes of channels that two layers share.

The columns of a layer and what they meet (rows that write these channels, a norm before it) have
sizes that go together in a trained model: the large channels of one are the large ones of the
other. Where they go together in another order than the stored one, and not in that, codes lie in
that other order. Of random weights neither holds, so that nothing is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..nn.linear import PACKED, SCALE
from .kinds import Finding
from .numbers import Statistics
from .structure import Layers
from .survey import Survey

# Channels that are ranked among each other, so that what differs between parts of a layer, as
# heads, is no evidence.
_WINDOW = 32

# Orders that writers mixed up, as where each channel of a window lies.
_EVERY = torch.arange(_WINDOW)
ORDERS: dict[str, Tensor] = {
    "nibbles of each byte swapped": _EVERY ^ 1,
    "codes of 4 bytes in reverse": _EVERY ^ 7,
    "halves of 32 interleaved": torch.stack(_EVERY.split(_WINDOW // 2), 1).flatten(),
    "even before odd of 32": torch.cat((_EVERY[::2], _EVERY[1::2])),
    "halves of 16 interleaved": torch.cat(
        [torch.stack(part.split(_WINDOW // 4), 1).flatten() for part in _EVERY.split(16)]
    ),
    "even before odd of 16": torch.cat(
        [torch.cat((part[::2], part[1::2])) for part in _EVERY.split(16)]
    ),
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


def check_order(
    found: Survey, layers: Layers, kept: Mapping[str, Statistics], norms: Mapping[str, Tensor]
) -> Iterator[Finding]:
    """Yield layers whose codes or scales lie in another order than the layout's.

    norms: the dense vectors of the folder, by their names.
    """
    tiled = set()
    for name, each in kept.items():
        if each.is_tiled:
            tiled.add(name)
            scale = layers.parts[name][SCALE]
            what = "expected scales row by row, got them in tiles of 128 rows and 4 columns"
            yield Finding("scale-order", scale.name, scale.path.name, what)
    usable = {name: each for name, each in kept.items() if name not in tiled}
    pairs = list(_pairs(usable, norms))
    odd = [pair for pair in pairs if _is_odd(pair)]
    sure = [pair for pair in pairs if pair.stored > _LIKELY and pair.stored > pair.other]
    as_columns, as_rows = {pair.columns for pair in sure}, {pair.rows for pair in sure}
    wrong: dict[tuple[str, str], tuple[str, float, list[str]]] = {}
    for pair in odd:
        # Rows are wrong where the columns meet other rows as they should.
        kind = "codes-order"
        if pair.columns in as_columns and pair.rows not in as_rows and pair.rows in kept:
            kind = "rows-order"
        name = pair.columns if kind == "codes-order" else pair.rows
        beside = pair.rows if kind == "codes-order" else pair.columns
        order, most, names = wrong.get((kind, name), (pair.order, 0.0, []))
        if pair.other > most:
            order, most = pair.order, pair.other
        wrong[kind, name] = (order, most, [*names, beside])
    for (kind, name), (order, most, names) in wrong.items():
        yield _finding(layers, kind, name, order, most, names)
    if not any(kind == "codes-order" for kind, _ in wrong):
        yield from _all_together(found, pairs)


def _finding(
    layers: Layers, kind: str, name: str, order: str, most: float, beside: Sequence[str]
) -> Finding:
    codes = layers.parts[name][PACKED]
    what = "columns" if kind == "codes-order" else "rows"
    if kind == "rows-order":
        order = order.replace("nibbles of each byte", "neighbours")
    text = (
        f"expected {what} that go with {', '.join(beside[:2])}, got such with {order} "
        f"({most**0.5:.0f} deviations)"
    )
    return Finding(kind, codes.name, codes.path.name, text)


def _is_odd(pair: _Pair) -> bool:
    return pair.other > _CERTAIN and pair.stored < _SHARE * pair.other


def _all_together(found: Survey, pairs: Sequence[_Pair]) -> Iterator[Finding]:
    """Yield that all layers together say what none says alone."""
    for order in ORDERS:
        those = [pair for pair in pairs if pair.order == order]
        excess = sum(pair.other for pair in those)
        # Each of these has its largest of several.
        chance = sum(6.0 for _ in those) + 12.0 * len(those) ** 0.5
        stored = sum(pair.stored for pair in pairs)
        if excess > _CERTAIN + 2 * chance and stored < len(pairs) + 6 * len(pairs) ** 0.5:
            text = (
                "expected columns that go with the channels they meet in the stored order, got "
                f"such with {order}, in {len(those)} of {len(pairs)} pairs of layers together"
            )
            yield Finding("codes-order", "all packed layers", "", text)
            return


def _pairs(kept: Mapping[str, Statistics], norms: Mapping[str, Tensor]) -> Iterator[_Pair]:
    """Yield the evidence of each two profiles of one length in one layer of the model."""
    rows_of: dict[str, dict[str, Tensor]] = {}
    for name, each in kept.items():
        if each.rows is not None:
            rows_of.setdefault(_block(name), {})[name] = each.rows
    for name, vector in norms.items():
        rows_of.setdefault(_block(name), {})[name] = vector.abs().clamp_min(1e-30).log2()[None]
    for name, each in kept.items():
        if each.columns is None:
            continue
        for other, rows in rows_of.get(_block(name), {}).items():
            if other == name:
                continue
            for label, profile in _profiles(other, rows, each.columns):
                if (pair := _evidence(name, label, each.columns, profile)) is not None:
                    yield pair._replace(rows=other)


def _block(name: str) -> str:
    """Return the layer of the model that a tensor is in: all up to the first number."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def _profiles(name: str, rows: Tensor, columns: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield rows [E, K] that columns [E, K] may meet; gate and up may be every other row."""
    if len(rows) not in (1, len(columns)):
        return
    size = columns.shape[-1]
    if rows.shape[-1] == size:
        yield name, rows
    elif rows.shape[-1] == 2 * size:
        for start in (0, 1):
            yield name, rows[:, start::2]
            yield name, rows[:, start * size : (start + 1) * size]


def _ranks(profile: Tensor) -> Tensor | None:
    """Return ranks [E, W, 32] in each window of a profile [E, K], centered; None if all are one."""
    windows = profile.shape[-1] // _WINDOW
    if not windows:
        return None
    cut = profile[:, : windows * _WINDOW].unflatten(-1, (windows, _WINDOW))
    if bool((cut == cut[..., :1]).all()):
        return None
    return cut.argsort(-1).argsort(-1).float() - (_WINDOW - 1) / 2


def _evidence(name: str, other: str, columns: Tensor, rows: Tensor) -> _Pair | None:
    """Return how far two profiles go together in each order, as squares of normal numbers."""
    first, second = _ranks(columns), _ranks(rows)
    if first is None or second is None:
        return None
    second = second.expand_as(first)
    size = first.square().sum(-1)[0, 0]
    windows = first.shape[0] * first.shape[1]

    def squared(order: Tensor | None) -> float:
        ranked = first if order is None else first[..., order]
        rho = (ranked * second).sum(-1) / size
        # The correlation of ranks of n has a variance of 1 / (n - 1).
        return float(rho.sum() ** 2 * (_WINDOW - 1) / windows)

    # Columns of the window that lie where they should, under each order.
    others = {label: squared(order) for label, order in ORDERS.items()}
    best = max(others, key=lambda label: others[label])
    return _Pair(name, other, squared(None), others[best], best)
