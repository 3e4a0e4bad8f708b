"""How far measured kernels are from the formulas, by rows and shape: the residual surfaces.

Owns the files in `emu/latency/measured/`, one for each GPU and engine, which
`python -m benchmarks.kernels surfaces` makes from measured tables. A surface holds the logarithm of
measured over formula at knots of rows, for some shapes; between knots it is a straight line in the
logarithm of the rows, and it ends flat. A shape that no table has takes the mean of its
neighbors, weighted by their distance, and goes to the formula alone far from all of them.

Nothing here knows a formula.
"""

import binascii
import functools
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from emu.process.prepared import prepared

FOLDER: Final = Path(__file__).with_name("measured")
STEP: Final = 0.01
"""Of the stored logarithms: one byte holds -1.27 to 1.27."""
_REACH: Final = 0.5
"""Distance of two shapes, in logarithms of their sizes, at which a neighbor's weight has fallen to
1 / e."""
_FAR: Final = 3.0
"""Sum of squares from which a weight is less than is counted, whatever the other sizes."""
_FORMULA: Final = 0.02
"""Weight of the formula alone: a shape far from all measured ones takes it."""


class Surface(msgspec.Struct, frozen=True, kw_only=True):
    """One family of kernels of one engine on one GPU."""

    rows: list[int]
    """Knots."""
    shapes: list[list[int]]
    """Sizes that tell shapes apart, each above 0."""
    values: str
    """Bytes, shape by shape, deflated and in base 64."""

    def line(self, shape: Sequence[int]) -> list[float]:
        """Measured over formula at the knots for one shape."""
        count = len(self.rows)
        stored = zlib.decompress(binascii.a2b_base64(self.values))
        sums, total = [0.0] * count, _FORMULA
        wanted = [math.log(size) for size in shape]
        for at, known in enumerate(self.shapes):
            away = 0.0
            for size, goal in zip(known, wanted, strict=True):
                away += (math.log(size) - goal) ** 2
                if away > _FAR:
                    break
            weight = math.exp(-away / _REACH**2)
            if weight < 1e-4:
                continue
            total += weight
            for knot in range(count):
                byte = stored[at * count + knot]
                sums[knot] += weight * (byte - 256 if byte > 127 else byte)
        return [math.exp(STEP * value / total) for value in sums]


class SurfaceFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All surfaces of one engine on one GPU."""

    origin: str
    """The tables that they were made from."""
    gpu: str
    engine: str
    surfaces: dict[str, Surface]
    base: str = ""
    """The file that has the families which this one lacks; empty = none."""


def packed_values(lines: Sequence[Sequence[float]]) -> str:
    """Logarithms by shape and knot, as a file has them."""
    rounded = (max(-127, min(127, round(value / STEP))) for line in lines for value in line)
    packed = zlib.compress(bytes(value & 255 for value in rounded), 9)
    return binascii.b2a_base64(packed, newline=False).decode()


@functools.cache
def has_surfaces(name: str) -> bool:
    """Whether there is a file of a name (`GPU.engine`)."""
    return (FOLDER / f"{name}.json").is_file()


@functools.cache
def surface_file(name: str) -> SurfaceFile:
    """The file of a name that `has_surfaces` knows, with the families of the one it stands on."""
    path = FOLDER / f"{name}.json"
    file = msgspec.json.decode(path.read_bytes(), type=prepared(SurfaceFile))
    if not file.base:
        return file
    below = surface_file(file.base).surfaces
    return msgspec.structs.replace(file, surfaces={**below, **file.surfaces})
