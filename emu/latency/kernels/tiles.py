"""Dense products as DeepGEMM runs them on Hopper: the library's own choice of tiles.

Each tile is computed whole by one processor: no cutting of the inner dimension, so a product of few
columns waits for a long chain of steps of 128 inner elements, however few rows it has. The number
of rows of a tile follows from the batch, that of its columns from the fewest waves, then the
fullest last wave, then the least columns (`get_best_configs` at 8002b76). A step costs its
arithmetic and a time that does not depend on the tile: waiting for operands, and adding up in 32
bits what the tensor cores have summed. Where columns of a tile lie in two blocks of scales, and not
always as many in each, every sum chooses between two scales (`num_former_iters` of fp8_gemm.cuh is
no constant). A tile is written by the processor that has computed it.
"""

from __future__ import annotations

import functools
import math
from typing import Final

from emu.latency.coefficients import Products

_STEP: Final = 128
"""Inner elements of a step, those of a block of scales."""
_FEW_ROWS: Final = 64
"""Rows up to which tiles have as many; above they have twice as many."""
_BORDERS: Final = 4
"""Places of the border between two blocks of scales for which the kernel is compiled."""
_CHOICE_FLOPS: Final = 64.0
"""What a choice on one of 128 lanes takes, in FLOP of the tensor cores: 8,192 in 8 bits a cycle."""
_COLUMNS: Final = (*range(16, 129, 8), 144, 160)


@functools.lru_cache(maxsize=4096)
def tile_of(rows: int, columns: int, processors: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and waves."""
    height = _FEW_ROWS if rows <= _FEW_ROWS else 2 * _FEW_ROWS
    down = -(-rows // height)

    def rank(width: int) -> tuple[int, int, int]:
        tiles = down * -(-columns // width)
        return -(-tiles // processors), -((tiles - 1) % processors), width

    waves, _, width = min(map(rank, _COLUMNS))
    return height, width, waves


def tiled_s(
    kernel: Products, peak: float, processors: int, rows: int, columns: int, inner: int
) -> float:
    """Time of rows x inner times inner x columns, without its traffic. `peak` is in FLOP/s."""
    height, width, waves = tile_of(rows, columns, processors)
    rate = peak / processors * kernel.compute
    step_s = 1e-6 * kernel.step_us + 2.0 * height * width * _STEP / rate
    if _STEP % width and _STEP // math.gcd(_STEP, width) > _BORDERS:
        step_s += height * width * _CHOICE_FLOPS * processors / peak
    return waves * (-(-inner // _STEP) * step_s + 1e-12 * kernel.written_ps * height * width)
