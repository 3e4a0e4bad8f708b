"""A decimal number of a text as an exact integer."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation


def exact_decimal(text: str, shift: int) -> int | None:
    """A decimal number (any spelling) times 10**shift, rounded half to even; None if it is none."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    if not number.is_finite() or number.adjusted() > 40:
        return None
    return int((number * Decimal(10) ** shift).to_integral_value(ROUND_HALF_EVEN))
