"""Units and the few integer helpers that everything shares. Time is integer nanoseconds."""

from __future__ import annotations

from typing import Final

NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
GIB: Final = 1 << 30
MIB: Final = 1 << 20


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b, for b > 0."""
    return -(-a // b)


def cut_by(shares: list[int], size_bytes: int) -> list[int]:
    """The bytes of each share, which add up to `size_bytes` exactly: differences of running floors,
    so that no byte is lost to rounding."""
    total = sum(shares)
    parts: list[int] = []
    cut = start_bytes = 0
    for share in shares:
        cut += share
        end_bytes = size_bytes * cut // total
        parts.append(end_bytes - start_bytes)
        start_bytes = end_bytes
    return parts


def s_to_ns(seconds: float) -> int:
    """Seconds as integer nanoseconds, rounded to the nearest."""
    return round(seconds * NS_PER_S)


def ms_to_ns(milliseconds: float) -> int:
    """Milliseconds as integer nanoseconds, rounded to the nearest."""
    return round(milliseconds * NS_PER_MS)


def gbps_to_bytes_per_s(gbps: float) -> float:
    """Network rates are quoted in 1e9 bits per second."""
    return gbps * 1e9 / 8
