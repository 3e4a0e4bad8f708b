"""Dense products and element-wise kernels, in seconds.

A product takes the longer of its memory traffic and its arithmetic, softly (loads and products of
a kernel get into each other's way where both are near), plus launch. Arithmetic comes in whole
tiles of the output, dealt to the processors in whole waves; a small tile reuses less of what it
loads, and each tile fills and drains its pipeline. The best of some tile shapes counts, as
libraries choose it, with the inner dimension cut where the grid is short (split-K).
"""

from __future__ import annotations

import math
from typing import Final

from emu.latency.coefficients import Products

# Rows and columns of the tiles that CUTLASS and cuBLAS choose among.
_TILES: Final = ((128, 256), (256, 128), (128, 128), (64, 128), (64, 64), (16, 64))
TILE_STEP: Final = 16
"""Rows of all tiles are multiples of this: the time of a product changes with every 16th row."""
_SPLITS: Final = (1, 2, 4)


def soft_max(first_s: float, second_s: float, softness: float) -> float:
    """Mean of a power: near the larger where they differ, above both where they are equal.

    `softness` is the power's exponent.
    """
    large, small = (first_s, second_s) if first_s > second_s else (second_s, first_s)
    if not large:
        return 0.0
    return large * math.pow(1.0 + math.pow(small / large, softness), 1.0 / softness)


def arithmetic_s(
    kernel: Products, peak: float, processors: int, rows: int, columns: int, inner: int
) -> float:
    """Arithmetic of rows x inner times inner x columns: whole waves of whole tiles.

    `peak` is in FLOP/s.
    """
    if kernel.step_us and processors > 1:
        from emu.latency.kernels.tiles import tiled_s  # products of wide groups alone

        return tiled_s(kernel, peak, processors, rows, columns, inner)
    if processors <= 1:
        return 2.0 * rows * columns * inner / (peak * kernel.compute)
    rate = peak / processors * kernel.compute
    best = math.inf
    for tile_rows, tile_columns in _TILES:
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        reach = tile_rows * tile_columns / (tile_rows + tile_columns)
        element_s = 2.0 * tile_rows * tile_columns * (1.0 + kernel.reuse / reach) / rate
        for split in _SPLITS:
            waves = -(-tiles * split // processors)
            tile_s = waves * (inner / split + kernel.prologue) * element_s
            if tile_s < best:
                best = tile_s
            if tiles >= processors:
                break  # the grid is full as it is
    return best
