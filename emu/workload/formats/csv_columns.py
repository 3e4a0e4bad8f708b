"""CSV chunks as numpy columns: exact integers, decimals in ns, and time stamps, all at once.

Every function returns the values and a mask of the rows that it could not read (an unusual
spelling, or a mistake). The caller reads those rows one by one with `exact_decimal` and friends,
which word the fault or give the value. Nothing here goes through floating point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from emu.units import NS_PER_S
from emu.workload.items import Ints

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


Bytes: TypeAlias = "npt.NDArray[np.uint8]"


Mask: TypeAlias = "npt.NDArray[np.bool_]"


_ZERO, _DOT, _COMMA, _NEWLINE, _CR = ord("0"), ord("."), ord(","), ord("\n"), ord("\r")


_DIGITS_MAX: Final = 18
_DATE_WIDTH: Final = 19


class Fields:
    """Where the fields of a chunk start and end: row i, column c at `starts[i, c]:ends[i, c]`."""

    def __init__(self, text: Bytes, starts: Ints, ends: Ints) -> None:
        self.text = text
        self.starts = starts
        self.ends = ends

    def raw(self, row: int, column: int) -> str:
        """One field as text, without surrounding blanks."""
        begin, end = int(self.starts[row, column]), int(self.ends[row, column])
        return self.text[begin:end].tobytes().decode().strip()


def split_fields(data: bytes, columns: int) -> Fields | None:
    """The fields of a chunk whose every row has `columns` plain ones; None otherwise."""
    import numpy as np

    if b'"' in data or not _is_utf8(data):
        return None
    text = np.frombuffer(data if data.endswith(b"\n") else data + b"\n", dtype=np.uint8)
    row_ends = np.flatnonzero(text == _NEWLINE)
    commas = np.flatnonzero(text == _COMMA)
    rows = len(row_ends)
    if len(commas) != rows * (columns - 1):
        return None
    cuts = np.empty((rows, columns + 1), dtype=np.int64)
    cuts[0, 0] = -1
    cuts[1:, 0] = row_ends[:-1]
    cuts[:, 1:columns] = commas.reshape(rows, columns - 1)
    cuts[:, columns] = row_ends
    starts = cuts[:, :-1] + 1
    ends = cuts[:, 1:].copy()
    if (ends < starts).any():
        return None
    ends[:, -1] -= (ends[:, -1] > starts[:, -1]) & (text[ends[:, -1] - 1] == _CR)
    return Fields(text, starts, ends)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_ints(fields: Fields, column: int) -> tuple[Ints, Mask]:
    """Non-negative integers of up to 18 digits."""
    values, bad = read_decimals(fields, column, 0)
    return values, bad


def read_decimals(fields: Fields, column: int, shift: int) -> tuple[Ints, Mask]:
    """Non-negative decimals times 10**shift as integers, rounded half to even.

    For `shift` 0 a decimal point counts as not readable.
    """
    import numpy as np

    start, end = fields.starts[:, column], fields.ends[:, column]
    width = end - start
    value = np.zeros(len(start), dtype=np.int64)
    fraction = np.full(len(start), -1, dtype=np.int64)
    """Digits seen after the point; -1 before it."""
    bad = (width < 1) | (width > 40)
    first_cut = np.zeros(len(start), dtype=np.int64)
    rest_cut = np.zeros(len(start), dtype=np.bool_)
    widest = int(width[~bad].max(initial=0))
    last = len(fields.text) - 1
    for position in range(widest):
        inside = position < width
        char = fields.text[np.minimum(start + position, last)]
        digit = char.astype(np.int64) - _ZERO
        is_digit = inside & (digit >= 0) & (digit <= 9)
        kept = is_digit & (fraction < shift)
        value = np.where(kept, value * 10 + digit, value)
        cut = is_digit & ~kept
        rest_cut |= cut & (fraction > shift) & (digit > 0)
        first_cut = np.where(cut & (fraction == shift), digit, first_cut)
        is_dot = inside & (char == _DOT) & (fraction < 0)
        fraction = np.where(is_dot, 0, fraction + (is_digit & (fraction >= 0)))
        bad |= inside & ~is_digit & ~is_dot
    whole = np.where(fraction < 0, width, width - 1 - fraction)
    bad |= (whole < 1) | (whole + shift > _DIGITS_MAX)
    if shift == 0:
        bad |= fraction >= 0
    missing = np.clip(shift - np.maximum(fraction, 0), 0, shift)
    value = value * np.power(np.int64(10), missing)
    up = (first_cut > 5) | ((first_cut == 5) & (rest_cut | (value % 2 == 1)))
    return value + up, bad


def read_stamps(fields: Fields, column: int) -> tuple[Ints, Mask]:
    """`YYYY-MM-DD HH:MM:SS[.fraction][+00:00|Z]` as ns since 1970, in UTC."""
    import numpy as np

    start, end = fields.starts[:, column], fields.ends[:, column]
    width = end - start
    values = np.zeros(len(start), dtype=np.int64)
    bad = np.ones(len(start), dtype=np.bool_)
    for one in sorted(set(width.tolist())):  # np.unique would import numpy.ma, 10 ms
        rows = np.flatnonzero(width == one)
        if one < _DATE_WIDTH:
            continue
        grid = fields.text[start[rows][:, None] + np.arange(one)]
        good, stamps = _stamps_of_width(grid)
        values[rows] = stamps
        bad[rows] = ~good
    return values, bad


def _stamps_of_width(grid: Bytes) -> tuple[Mask, Ints]:
    """Rows of equal width, spelled like the first of them."""
    import numpy as np

    head = grid[0].tobytes()
    tail = head[_DATE_WIDTH:]
    for suffix in (b"+00:00", b"Z", b" UTC", b""):
        if tail.endswith(suffix):
            break
    digits = len(tail) - len(suffix)
    good = np.ones(len(grid), dtype=np.bool_)
    pattern = {4: b"-", 7: b"-", 10: head[10:11], 13: b":", 16: b":"}
    if head[10:11] not in (b" ", b"T") or digits == 1 or digits > 10:
        return ~good, np.zeros(len(grid), dtype=np.int64)
    if digits:
        pattern[_DATE_WIDTH] = b"."
    for index, char in enumerate(suffix):
        pattern[grid.shape[1] - len(suffix) + index] = bytes((char,))
    for place, literal in pattern.items():
        good &= grid[:, place] == literal[0]
    numbers = grid.astype(np.int64) - _ZERO

    def number(begin: int, end: int) -> Ints:
        total = np.zeros(len(grid), dtype=np.int64)
        for place in range(begin, end):
            digit = numbers[:, place]
            good[(digit < 0) | (digit > 9)] = False
            total = total * 10 + digit
        return total

    year, month, day = number(0, 4), number(5, 7), number(8, 10)
    hour, minute, second = number(11, 13), number(14, 16), number(17, 19)
    fraction = number(_DATE_WIDTH + 1, _DATE_WIDTH + digits) if digits else np.int64(0)
    good &= (year >= 1970) & (year <= 2100) & (month >= 1) & (month <= 12) & (day >= 1)
    good &= (day <= 31) & (hour <= 23) & (minute <= 59) & (second <= 59)
    days = days_from_civil(year, month, day)
    _, back_month, back_day = civil_from_days(days)
    good &= (back_month == month) & (back_day == day)
    seconds = (days * 24 + hour) * 3600 + minute * 60 + second
    scale = 10 ** (10 - digits) if digits else 0
    return good, seconds * NS_PER_S + fraction * scale


def days_from_civil(year: Ints, month: Ints, day: Ints) -> Ints:
    """Days since 1970-01-01 in the proleptic Gregorian calendar (counting from 1 March)."""
    import numpy as np

    shifted = year - (month <= 2)
    era, year_of_era = np.divmod(shifted, 400)
    day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    day_of_era = year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year
    days: Ints = era * 146_097 + day_of_era - 719_468
    return days


def civil_from_days(days: Ints) -> tuple[Ints, Ints, Ints]:
    """The inverse of `days_from_civil`."""
    import numpy as np

    era, day_of_era = np.divmod(days + 719_468, 146_097)
    year_of_era = (
        day_of_era - day_of_era // 1_460 + day_of_era // 36_524 - day_of_era // 146_096
    ) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted_month = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * shifted_month + 2) // 5 + 1
    month = (shifted_month + 2) % 12 + 1
    return year_of_era + era * 400 + (month <= 2), month, day
