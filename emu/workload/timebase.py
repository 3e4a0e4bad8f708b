"""Times of a file become arrivals: the zero is moved, then time is stretched, exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from emu.workload.items import TIME_MAX_NS, Ints

if TYPE_CHECKING:
    from fractions import Fraction


_SAFE: Final = 2**62


class Timebase:
    """Turns the file's times into arrivals: the zero is moved, then time is stretched."""

    def __init__(self, zero_ns: int, time_scale: float) -> None:
        """`time_scale` is taken as the decimal number that it prints as (0.1 is one tenth)."""
        self._zero_ns = zero_ns
        self._scale: Fraction | None = None
        if time_scale != 1.0:
            from fractions import Fraction

            self._scale = Fraction(repr(time_scale))

    def arrivals(self, times_ns: Ints) -> Ints:
        """Exact: (time - zero) * scale, rounded half to even."""
        times = times_ns - self._zero_ns
        scale = self._scale
        if scale is None or not len(times):
            return times
        import numpy as np

        times = np.asarray(times)
        return scale_exactly(times, scale)


def scale_exactly(values: Ints, scale: Fraction) -> Ints:
    """Non-negative integers times a fraction, rounded half to even, without floating point."""
    import numpy as np

    num, den = scale.numerator, scale.denominator
    highest = int(values.max(initial=0))
    if highest * scale > TIME_MAX_NS:
        raise OverflowError
    if (highest // den + 1) * num >= _SAFE or den * num >= _SAFE // 2:
        return np.array([round(value * scale) for value in values.tolist()], dtype=np.int64)
    whole, rest = np.divmod(values, den)
    quotient, left = np.divmod(rest * num, den)
    result: Ints = whole * num + quotient
    up = (2 * left > den) | ((2 * left == den) & (result % 2 == 1))
    result += up
    return result
