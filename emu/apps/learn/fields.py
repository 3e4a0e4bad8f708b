"""Levels of load as a benchmark drove them, and fields of result files, checked."""

from __future__ import annotations

import sys
from typing import Any, Final, TypeGuard

import msgspec

from emu.errors import InputError, shown

ANCHOR_LIMIT_S: Final = 100_000.0
TOKENS_MAX: Final = 2**31
"""Of one request."""


class Sent(msgspec.Struct, frozen=True):
    """One request that a client sent and that completed. Times in s."""

    start_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache, where the tool records it."""
    part: str = ""
    """What the request was for, where its sender says so (a probe)."""
    group: int = -1
    """Requests of one group have the same prompt; -1 = a prompt of its own."""


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one load."""

    label: str
    tool: str
    requests: tuple[Sent, ...]
    skipped: int = 0
    """Failed, cancelled, warm-up."""
    is_drawn: bool = False
    """Starts were not recorded and are drawn at the rate that the tool was given."""
    model: str = ""
    date: str = ""
    is_engines_time: bool = False
    """Times begin where the engine took a request, not at its client: no front end."""
    judges: bool = False
    """Its sender says that it is for judging, not for fitting (a probe's mixed load)."""

    @property
    def running(self) -> float:
        """Requests in flight on average, by Little's law."""
        ends = max(r.start_s + r.e2e_s for r in self.requests)
        return sum(r.e2e_s for r in self.requests) / max(ends, 1e-9)


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether it is a number that a float can hold."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def number_of(source: str, line: int | None, holder: Any, key: str, field: str = "") -> float:
    """A finite number of an object. Raises InputError with its place."""
    value = holder.get(key) if isinstance(holder, dict) else None
    if is_finite(value):
        return float(value)
    problem = "missing" if value is None else f"expected a number, got {shown(value)}"
    raise InputError(source, line, field or key, problem)


def count_of(source: str, line: int | None, value: Any, field: str) -> int:
    """A number of tokens, at least 1. Raises InputError with its place."""
    return _tokens(source, line, value, field, at_least=1)


def cached_of(source: str, line: int | None, value: Any, field: str) -> int:
    """Tokens that a cache had; 0 where nothing is said. Raises InputError with its place."""
    return 0 if value is None else _tokens(source, line, value, field, at_least=0)


def _tokens(source: str, line: int | None, value: Any, field: str, at_least: int) -> int:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not at_least <= value <= TOKENS_MAX:
        problem = "missing" if value is None else f"expected a number of tokens, got {shown(value)}"
        raise InputError(source, line, field, problem)
    return int(value)


def check_times(source: str, line: int | None, ttft_s: float, e2e_s: float, field: str) -> None:
    if not 0 < ttft_s <= e2e_s * (1 + 1e-9) + 1e-6:
        problem = f"first token after {ttft_s:g} s, last after {e2e_s:g} s"
        raise InputError(source, line, field, problem)


def from_first(source: str, level: Level) -> Level:
    """The requests in order of their starts, counted from the first. InputError: there is none."""
    if not level.requests:
        raise InputError(source, None, "", f"{level.label}: no request completed")
    ordered = sorted(level.requests, key=lambda r: r.start_s)
    first_s = ordered[0].start_s
    moved = tuple(msgspec.structs.replace(r, start_s=r.start_s - first_s) for r in ordered)
    return msgspec.structs.replace(level, requests=moved)
