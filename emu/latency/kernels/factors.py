"""What formulas are multiplied with: the surfaces of measured kernels, read between their knots."""

from __future__ import annotations

import functools
import math
from typing import final

from emu.kernel.natives import bisect_right
from emu.latency.surfaces import SurfaceFile, surface_file


@final
class Factor:
    """Measured over formula, by rows: one family of kernels and one shape."""

    __slots__ = ("_knots", "_values")

    def __init__(self, knots: list[float], values: list[float]) -> None:
        """`knots`: logarithms of rows, rising."""
        self._knots = knots
        self._values = values

    def at(self, rows: float) -> float:
        """A line through (knot, value) in the logarithm of the rows; flat outside of the knots."""
        knots, values = self._knots, self._values
        at = math.log(rows) if rows > 1.0 else 0.0
        right = bisect_right(knots, at)
        if not right:
            return values[0]
        if right == len(knots):
            return values[-1]
        part = (at - knots[right - 1]) / (knots[right] - knots[right - 1])
        return values[right - 1] + part * (values[right] - values[right - 1])


_FORMULA = Factor([0.0], [1.0])


@final
class Factors:
    """Those of one engine on one GPU; 1 for a family that was not measured."""

    def __init__(self, file: SurfaceFile | None) -> None:
        self._surfaces = {} if file is None else file.surfaces
        self._known: dict[tuple[str, tuple[int, ...]], Factor] = {}

    def has(self, family: str) -> bool:
        """Whether a family was measured."""
        return family in self._surfaces

    def line(self, family: str, shape: tuple[int, ...]) -> Factor:
        """The factor of a shape by rows."""
        surface = self._surfaces.get(family)
        if surface is None:
            return _FORMULA
        key = (family, shape)
        found = self._known.get(key)
        if found is None:
            knots = [math.log(row) for row in surface.rows]
            found = self._known[key] = Factor(knots, surface.line(shape))
        return found

    def of(self, family: str, shape: tuple[int, ...], rows: float) -> float:
        """The factor of a shape for so many rows."""
        return self.line(family, shape).at(rows)


@functools.cache
def factors_named(name: str) -> Factors:
    """Those of a file that `has_surfaces` knows, read once; of no file where the name is empty."""
    return Factors(surface_file(name) if name else None)
