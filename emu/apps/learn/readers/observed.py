"""What `emu observe` and a probe have written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emu.apps.learn.fields import (
    ANCHOR_LIMIT_S,
    Level,
    Sent,
    cached_of,
    check_times,
    count_of,
    from_first,
    number_of,
)
from emu.documents import Document
from emu.report.measurement import request_ids


def observe_levels(source: str, rows: Sequence[tuple[int, Document]]) -> list[Level]:
    """Levels by `level`, where the rows have one (a probe's), else one level."""
    found: dict[str, list[Sent]] = {}
    judges: set[str] = set()
    is_engines_time = False
    numbers = request_ids([row for _, row in rows])
    for _, (line, row) in sorted(zip(numbers, rows, strict=True), key=lambda pair: pair[0]):
        number: Callable[[str], float] = lambda key, at=line, of=row: number_of(  # type: ignore[misc] # noqa: E731
            source, at, of, key
        )
        first, last = number("first_token_ts"), number("last_token_ts")
        arrival = row.get("arrival_time")
        is_near = isinstance(arrival, (int, float)) and abs(first - arrival) <= ANCHOR_LIMIT_S
        begin = number("arrival_time" if is_near else "queued_ts")
        is_engines_time = is_engines_time or not is_near
        check_times(source, line, first - begin, last - begin, "first_token_ts")
        group = row.get("group", -1)
        sent = Sent(
            begin,
            count_of(source, line, row.get("input_toks"), "input_toks"),
            count_of(source, line, row.get("output_toks"), "output_toks"),
            first - begin,
            last - begin,
            cached_tokens=cached_of(source, line, row.get("cached_toks"), "cached_toks"),
            part=str(row.get("part") or ""),
            group=group if isinstance(group, int) else -1,
        )
        label = str(row.get("level") or "requests")
        found.setdefault(label, []).append(sent)
        if row.get("judges") is True:
            judges.add(label)
    levels = [
        Level(
            label=label,
            tool="observe",
            requests=tuple(sent),
            is_engines_time=is_engines_time,
            judges=label in judges,
        )
        for label, sent in found.items()
    ]
    return [from_first(source, level) for level in levels]
