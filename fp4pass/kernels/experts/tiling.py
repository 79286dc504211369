"""How the products of experts are cut into programs, by their shape: measured on an H200."""

from __future__ import annotations

from ..common.tiles import cdiv
from ..linear.tiling import Tiles


def config(pairs: int, experts: int, n: int, terms: int, shared_memory: int) -> Tiles:
    """Return the tiles of so many rows times weights [experts, n, K]; of one row: each alone."""
    # terms, shared_memory: as the config of linear layers takes them.
    if 2 * pairs <= experts or pairs <= 8:
        programs = pairs * cdiv(n, 16)
        words, warps = (32, 2) if programs <= 768 else (16, 2) if programs <= 2048 else (32, 1)
        return Tiles(1, 16, words, warps, 3, warps_share=True)
    mean = pairs / experts
    if mean <= 4:
        return Tiles(8, 32, 16, 2, 3, warps_share=True)
    if mean <= 10:
        return _fitted(Tiles(16, 64, 32, 4, 3), terms, shared_memory)
    # Most experts should have no more rows than a tile, and those of many no more than a few.
    rows, margin = 32, 8 if mean < 48 else 0
    while rows < 256 and rows < mean + margin:
        rows *= 2
    tiles = Tiles(rows, 128, 16, 4 if rows == 32 else 8, 2 if rows == 256 else 3)
    return _fitted(tiles, terms, shared_memory)


def _fitted(tiles: Tiles, terms: int, shared_memory: int) -> Tiles:
    """Return tiles like these whose loads fit into the bytes that a program can have."""
    rows, words, stages = tiles.m, tiles.words, tiles.stages
    while stages * words * (16 * terms * rows + 5 * tiles.n) > shared_memory:
        if stages > 2:
            stages -= 1
        elif words > 16:
            words, stages = 16, 3
        else:
            rows, stages = rows // 2, 3
    return Tiles(rows, tiles.n, words, tiles.warps, stages)
