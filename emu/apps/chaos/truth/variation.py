"""Jitter: steps that vary around what the linear cost says.

Restates `latency.jitter` of docs/reference/config.md (a spread, and a pause now and then; mean
unchanged): a step takes its cost times a factor around one, less the mean of the pauses, which few
steps have. So half of all steps take less than the middle of that, whatever pauses there are. The
stages of a batch vary together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import median
from typing import Final

from emu.apps.chaos.truth.costs import whole_cost_ps
from emu.apps.chaos.truth.tape import Record, Tape

_LEAST: Final = 60
"""Steps that a median is taken of."""
_SIGMAS: Final = 6.0


def judge_variation(tape: Tape) -> None:
    """The middle of all steps of each replica, and the stages of each batch."""
    if tape.by_event["fault"] or tape.config.commands:
        return  # stragglers and pauses
    formed: dict[tuple[int, int], Record] = {}
    parts: dict[int, list[float]] = defaultdict(list)
    for record in tape.of("batch", "ran"):
        key = record["replica"], record["batch"]
        if record["event"] == "batch":
            formed[key] = record
            continue
        seat = tape.seats[key[0]]
        if seat.variation is None or key not in formed or seat.group:
            continue
        whole_ps = whole_cost_ps(seat, formed[key]["members"], None)
        if whole_ps is None:
            continue
        due_ns = max(1, (whole_ps + 500) // 1000) * seat.stages
        spans = [end_ns - start_ns for start_ns, end_ns in record.get("stages", ())]
        took_ns = sum(spans) if spans else record["at_ns"] - record["start_ns"]
        _, _, mean_ns = seat.variation
        parts[key[0]].append((took_ns + mean_ns) / due_ns)
        if spans:
            tape.count("varied_stages")
            if len(set(spans[1:])) > 1 or not 0 <= spans[0] - spans[-1] < seat.stages:
                tape.say(f"T2: batch {key[1]} of replica {key[0]} takes {spans} ns on its stages")
    for replica, ratios in parts.items():
        variation = tape.seats[replica].variation
        assert variation is not None
        if len(ratios) < _LEAST:
            continue
        spread, often, _ = variation
        due = math.exp(-spread * spread / 2)
        slack = _SIGMAS * 1.2533 * spread / math.sqrt(len(ratios)) + often * spread + 1e-4
        tape.count("jitter")
        if abs(median(ratios) - due) > slack:
            tape.say(
                f"T2: half of the steps of replica {replica} take less than {median(ratios):.4f} "
                f"of their cost, should {due:.4f}"
            )
