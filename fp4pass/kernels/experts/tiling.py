"""Cut the products of experts into programs by their shape, as measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..common.tiles import cdiv
from ..linear.tiling import Tiles


@dataclass(frozen=True, repr=False)
class ExpertTiles(Tiles):
    """Tiles of rows of one expert."""

    __hash__ = Tiles.__hash__

    rest: int = 0  # rows up to which a tile takes less time than one of m
    # Whether programs of the same rows follow each other, or those of the same columns of experts.
    rows_stay: bool = False


def config(pairs: int, experts: int, n: int, terms: int, shared_memory: int) -> ExpertTiles:
    """Return the tiles of so many rows times weights [experts, n, K]; of one row: each alone."""
    # terms, shared_memory: as the config of linear layers takes them.
    if 2 * pairs <= experts or pairs <= 8:
        programs = pairs * cdiv(n, 16)
        words, warps = (32, 2) if programs <= 768 else (16, 2) if programs <= 2048 else (32, 1)
        return ExpertTiles(1, 16, words, warps, 3, warps_share=True)
    mean = pairs / experts
    if mean <= 4 and terms == 1:
        return ExpertTiles(8, 64, 32, 4, 3)
    if mean <= 4:
        return ExpertTiles(8, 32, 16, 2, 3, warps_share=True)
    # Most experts should have no more rows than a tile, and those of many no more than a few.
    if mean <= 10:
        tiles = ExpertTiles(16, 64, 32, 4, 3, rest=8)
    elif mean <= 24:
        tiles = ExpertTiles(32, 128, 16, 4, 3, rest=16, rows_stay=True)
    elif mean <= 48:
        tiles = ExpertTiles(64, 128, 8, 4, 4, rest=32, rows_stay=True)
    else:
        tiles = ExpertTiles(128, 128, 8, 4, 3, rest=32, rows_stay=True)
    return _fitted(tiles, terms, shared_memory)


def _fitted(tiles: ExpertTiles, terms: int, shared_memory: int) -> ExpertTiles:
    """Return tiles like these whose loads fit into the bytes that a program can have."""
    while tiles.stages * _bytes(tiles, terms) > shared_memory:
        if tiles.stages > 2:
            tiles = replace(tiles, stages=tiles.stages - 1)
        elif tiles.words > 16:
            tiles = replace(tiles, words=16, stages=3)
        else:
            rest = min(tiles.rest, tiles.m // 4)
            tiles = replace(tiles, m=tiles.m // 2, rest=rest, stages=3)
    return tiles


def _bytes(tiles: ExpertTiles, terms: int) -> int:
    """Return the bytes of the loads of a step."""
    return tiles.words * (16 * terms * tiles.m + 5 * tiles.n)
