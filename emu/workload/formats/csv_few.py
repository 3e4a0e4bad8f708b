"""Rows of a small CSV file, without numpy, whose import would cost more than the emulation."""

from __future__ import annotations

import re
from datetime import date
from typing import Final

from emu.units import NS_PER_S

_DIGITS_MAX: Final = 18
_STAMP_TEXT: Final = re.compile(
    rb"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:\+00:00|Z| UTC)?"
)
_EPOCH: Final = date(1970, 1, 1).toordinal()


def rows_of(data: bytes, columns: int) -> list[list[bytes]] | None:
    """The fields of lines that have `columns` plain ones each; None if any has not."""
    if b'"' in data or not data.isascii():
        return None
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    rows = [line.removesuffix(b"\r").split(b",") for line in lines]
    return rows if all(len(row) == columns for row in rows) else None


def plain_integer(text: bytes) -> int:
    """A non-negative integer of up to 18 digits; -1 for anything else."""
    return int(text) if text.isdigit() and len(text) <= _DIGITS_MAX else -1


def plain_decimal(text: bytes, shift: int) -> int:
    """A non-negative decimal times 10**shift; -1 for what is spelled otherwise or finer."""
    whole, point, rest = text.partition(b".")
    if not point:
        rest = b""
    elif not shift or (rest and not rest.isdigit()) or len(rest) > shift:
        return -1
    if not whole.isdigit() or len(whole) + shift > _DIGITS_MAX:
        return -1
    return int(whole + rest.ljust(shift, b"0"))


def plain_stamp(text: bytes, days: dict[bytes, int]) -> int:
    """`YYYY-MM-DD HH:MM:SS[.fraction][+00:00|Z]` as ns since 1970; -1 for anything else.

    `days`: what is known of dates, from one row to the next.
    """
    found = _STAMP_TEXT.fullmatch(text)
    if found is None:
        return -1
    day_text, hour_text, minute_text, second_text, fraction = found.groups(b"")
    hour, minute, second = int(hour_text), int(minute_text), int(second_text)
    if hour > 23 or minute > 59 or second > 59:
        return -1
    if day_text not in days:
        try:
            day = date.fromisoformat(day_text.decode())
        except ValueError:
            return -1
        days[day_text] = day.toordinal() - _EPOCH if 1970 <= day.year <= 2100 else -1
    if days[day_text] < 0:
        return -1
    seconds = (days[day_text] * 24 + hour) * 3600 + minute * 60 + second
    return seconds * NS_PER_S + int(fraction.ljust(9, b"0"))
