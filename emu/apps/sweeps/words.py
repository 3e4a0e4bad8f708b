"""What a sweep found, in sentences: the answer of a search, where intervals come from."""

from __future__ import annotations

from typing import Final

from emu.apps.sweeps.drive import SweepResult
from emu.apps.sweeps.search import Answer

_SOURCED: Final = ("p99_ttft_ms", "p99_tpot_ms", "request_goodput")
"""Figures of which it is said what their intervals come from; the files say it of all."""


def answer_text(answer: Answer) -> str:
    """The answer of a search in one sentence."""
    wanted = " and ".join(answer.conditions)
    name = f"{answer.goal} {answer.key} with {wanted}"
    if answer.value is None:
        return f"{name}: none in the range ({answer.fails_at:g} does not meet it)"
    if answer.fails_at is None:
        text = f"{name}: {answer.value:g}, the end of the range; the true answer may lie beyond"
    else:
        text = f"{name}: {answer.value:g} ({answer.fails_at:g} does not meet it)"
    if not answer.is_monotone:
        text += "; the conditions changed more than once over the range, the first change counts"
    return text


def drawn_lines(result: SweepResult) -> list[str]:
    """What intervals come from, in words; without draws how well the engine is known."""
    drawn = [row.draws for row in result.rows if row.draws is not None]
    if not drawn:
        return result.known
    first = drawn[0]
    lines = [f"{first.level_percent} % intervals of {first.count} draws at each point"]
    for name in _SOURCED:
        shares: dict[str, list[float]] = {}
        for one in drawn:
            for source, share in (one.figures[name].shares if name in one.figures else {}).items():
                shares.setdefault(source, []).append(share)
        if shares:
            means = {source: sum(each) / len(each) for source, each in shares.items()}
            ordered = sorted(means.items(), key=lambda item: -item[1])
            text = ", ".join(f"{source} {100 * share:.0f} %" for source, share in ordered)
            lines.append(f"{name} varies by {text} (mean over points)")
    return [*lines, "engines: " + "; ".join(first.engines)]
