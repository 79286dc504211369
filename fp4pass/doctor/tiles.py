"""Tell scales that lie in the tiles of a kernel from those that lie row by row."""

from __future__ import annotations

from torch import Tensor

# Deviations of scales in tiles of a kernel above those of scales in rows.
_TILED = 30.0


def is_tiled(scale: Tensor) -> bool:
    """Return whether log2 of scales [N, C] go together in tiles of 128 x 4, and not in rows."""
    rows, columns = scale.shape
    if rows % 128 or columns % 4 or columns < 8:
        return False
    tiles = scale.flatten().unflatten(0, (rows // 128, columns // 4, 32, 4, 4))
    # The row of a tile is r % 32, then r // 32, then the column.
    turned = tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)
    stored, other = _explained(scale), _explained(turned)
    return other > _TILED and other > 4 * abs(stored)


def _explained(matrix: Tensor) -> float:
    """Return how much rows and columns explain of a matrix, in deviations of chance."""
    rows, columns = matrix.shape
    centered = matrix - matrix.mean()
    variance = centered.square().mean().item()
    if not variance:
        return 0.0
    found = 0.0
    for dimension, count, size in ((1, rows, columns), (0, columns, rows)):
        explained = centered.mean(dimension).square().sum().item() * size / variance
        found += (explained - count) / (2 * count) ** 0.5
    return found
