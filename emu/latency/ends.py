"""When the steps of a decode run end: packed 64-bit integers, and the loops that make them.

`Ends` are cumulative ns from the start of a run, an array of 64-bit integers. An item is a plain
`int`, a slice is a copy, and numpy reads it without one; short runs are made and read without
numpy, which takes as long to load as a thousand requests to emulate.
"""

from __future__ import annotations

import sys
from array import array
from types import FunctionType
from typing import TYPE_CHECKING, Final, TypeAlias

from mypy_extensions import i64

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Ends: TypeAlias = "array[int]"


def packed(ends: NDArray[np.int64]) -> Ends:
    """The same numbers."""
    import numpy as np

    return array("q", np.asarray(ends, dtype=np.int64).tobytes())


def unpacked(ends: Ends) -> NDArray[np.int64]:
    """The same numbers, in the same memory: not to be written to."""
    import numpy as np

    return np.frombuffer(ends, dtype=np.int64)


IS_COMPILED: Final = not isinstance(unpacked, FunctionType)
LOOP_MAX: Final = 512 if IS_COMPILED else 24
"""Up to so many steps a loop is faster than numpy: 0.1 us a step, half of that compiled."""


def _packs() -> bool:
    """Whether this build has a loop that numpy never beats."""
    if not IS_COMPILED or sys.byteorder != "little":
        return False
    try:
        import emu.latency.packing  # noqa: F401
    except ImportError:  # no librt
        return False
    return True


PACKS: Final = _packs()
if PACKS:
    from emu.latency.packing import packed_series


def loops(steps: int) -> bool:
    """Whether so many steps are better computed one by one than by numpy."""
    return steps <= LOOP_MAX or "numpy" not in sys.modules


def series(
    start: int, growth: int, shift: int, least_ns: int, added_ns: int, steps: int, first_ns: int
) -> Ends:
    """Ends of steps that cost `max((start + j * growth) >> shift, least_ns) + added_ns`.

    `first_ns`: an iteration of this length comes before them, whose end is the first element; -1 =
    none. Products stay within 64 bits.
    """
    if PACKS:
        return packed_series(start, growth, shift, least_ns, added_ns, steps, first_ns)
    at: i64 = 0
    cost: i64 = start
    grown: i64 = growth
    bits: i64 = shift
    least: i64 = least_ns
    added: i64 = added_ns
    ends: list[int] = []
    if first_ns >= 0:
        at = first_ns
        ends.append(first_ns)
    if cost >> bits >= least and not added:  # the usual case, and the others are longer
        for _ in range(steps):
            at += cost >> bits
            ends.append(at)
            cost += grown
        return array("q", ends)
    for _ in range(steps):
        step_ns = cost >> bits
        at += (step_ns if step_ns > least else least) + added
        ends.append(at)
        cost += grown
    return array("q", ends)
