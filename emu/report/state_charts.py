"""Timelines: the state of every replica at every instant, and GPUs by role against what arrives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from emu.report.page.chart import TEXT_COLOUR, Axis, Chart, Floats, Kind, Series, Spans, short
from emu.report.rundata import RunData, Transition
from emu.units import NS_PER_S

STATE_COLOURS: Final = {
    "inactive": "#9aa0a6",
    "loading_prefill": "#f2c14e",
    "loading_decode": "#d9a441",
    "loading_colocated": "#e8b64c",
    "prefill": "#3b82f6",
    "new_prefill": "#60a5fa",
    "refractory_prefill": "#93c5fd",
    "old_prefill": "#1d4ed8",
    "decode": "#10b981",
    "mutating_to_decode": "#0f766e",
    "aus_prefill": "#6366f1",
    "aus_decode": "#34d399",
    "colocated": "#22a6b3",
    "shutting_prefill": "#a78bfa",
    "shutting_decode": "#c084fc",
    "shutting_null": "#d8b4fe",
    "shutting_colocated": "#b78af0",
    "failed": "#ef4444",
}
OTHER_COLOUR: Final = "#6b7280"
ROLE_COLOURS: Final = {  # what is not a state by itself
    **STATE_COLOURS,
    "loading": STATE_COLOURS["loading_prefill"],
    "draining": STATE_COLOURS["shutting_prefill"],
    "spare": STATE_COLOURS["shutting_null"],
    "queue": STATE_COLOURS["inactive"],
    "migration": "#f28e2b",
}


class Look(NamedTuple):
    """How a kind of mark is drawn."""

    symbol: str
    color: str


MARKS: Final = {
    "fault": Look("cross", "#d62728"),
    "recovery": Look("star", "#2ca02c"),
    "plan": Look("down", "#7f3fbf"),
    "loaded": Look("up", "#1f77b4"),
    "relay": Look("diamond", "#e69f00"),
    "host_cache": Look("square", "#8c564b"),
    "command": Look("pin", "#17789c"),
}
"""Kind of event -> symbol and color; each kind has a row of its own above the replicas."""
_OTHER_MARK: Final = Look("circle", "#6b7280")
_SEGMENTS_MAX: Final = 6_000
_MARKS_MAX: Final = 2_000
_STEPS_MAX: Final = 1_200
_RATE_CELLS: Final = 120
_SERVING: Final = ("prefill", "decode", "colocated")


class Segment(msgspec.Struct, frozen=True):
    """A replica in one state, from start to end."""

    replica: int
    state: str
    start_ns: int
    end_ns: int
    writer: str
    cause: str


def segments(transitions: Sequence[Transition], end_ns: int) -> list[Segment]:
    """What lies between the transitions of each replica, up to the end of the run."""
    by_replica: dict[int, list[Transition]] = {}
    for transition in transitions:
        by_replica.setdefault(transition.replica, []).append(transition)
    result = []
    for replica in sorted(by_replica):
        rows = by_replica[replica]
        first = rows[0]
        if first.old and first.time_ns > 0:
            result.append(Segment(replica, first.old, 0, first.time_ns, "", "before"))
        ends = [*(row.time_ns for row in rows[1:]), max(end_ns, rows[-1].time_ns)]
        for row, until_ns in zip(rows, ends, strict=True):
            result.append(Segment(replica, row.new, row.time_ns, until_ns, row.writer, row.cause))
    return result


def run_segments(run: RunData) -> list[Segment]:
    """All stretches of a run that last."""
    end_ns = round(run.summary.simulated_s * NS_PER_S)
    return [part for part in segments(run.transitions, end_ns) if part.end_ns > part.start_ns]


def state_timeline(run: RunData) -> list[Chart]:
    """What every replica was when, with the events above it; nothing without transitions."""
    if not run.transitions:
        return []
    parts = run_segments(run)
    left_out = ""
    if len(parts) > _SEGMENTS_MAX:
        left_out = f"; the {_SEGMENTS_MAX:,} longest of {len(parts):,} stretches are drawn"
        parts = sorted(parts, key=lambda part: (part.start_ns - part.end_ns, part.replica))
        parts = parts[:_SEGMENTS_MAX]
    replicas = sorted({transition.replica for transition in run.transitions})
    kinds = list(dict.fromkeys(mark.kind for mark in run.marks))
    names = [*kinds, *map(str, replicas)]
    row_of = {replica: len(kinds) + index for index, replica in enumerate(replicas)}
    chart = Chart(
        chart_id="states",
        section="replicas",
        title="State of every replica",
        note=f"color: state; hover tells what changed it and why{left_out}",
        x=run.time_axis("s"),
        y=Axis(title="replica", names=names, inverse=True),
        spans=_spans(parts, row_of),
        series=_marks(run, kinds),
        height=min(900, 150 + 18 * len(names)),
        is_wide=True,
        time=True,
        slider=True,
        row="replica",
    )
    return [chart]


def _spans(parts: Sequence[Segment], row_of: dict[int, int]) -> Spans:
    seen = {part.state for part in parts}
    states = [*(state for state in STATE_COLOURS if state in seen)]
    states += sorted(seen - set(STATE_COLOURS))
    texts: dict[str, int] = {}
    rows = []
    for part in parts:
        text = f"by {part.writer or '-'}: {part.cause or '-'}"
        place = texts.setdefault(text, len(texts))
        start, end = _seconds(part.start_ns), _seconds(part.end_ns)
        rows.append((start, end, row_of[part.replica], states.index(part.state), place))
    kinds = [Kind(name=state, color=STATE_COLOURS.get(state, OTHER_COLOUR)) for state in states]
    return Spans(kinds=kinds, rows=rows, texts=list(texts))


def _marks(run: RunData, kinds: Sequence[str]) -> list[Series]:
    """Faults and decisions above the replicas, a row and a symbol for each kind."""
    result = []
    for row, kind in enumerate(kinds):
        look = MARKS.get(kind, _OTHER_MARK)
        points = [mark for mark in run.marks[:_MARKS_MAX] if mark.kind == kind]
        result.append(
            Series(
                name=kind,
                x=[_seconds(mark.time_ns) for mark in points],
                y=[row] * len(points),
                color=look.color,
                shape="points",
                symbol=look.symbol,
                size=10,
                text=[
                    f"{kind} {mark.target}: {mark.text}" if mark.target else f"{kind}: {mark.text}"
                    for mark in points
                ],
            )
        )
    return [one for one in result if one.x]


def role_of(state: str) -> str:
    """What a replica in a state does for the cluster, in one word."""
    if state.startswith("loading"):
        return "loading"
    if state.startswith("shutting"):
        return "draining"
    for role in _SERVING:
        if role in state and state != "mutating_to_decode":
            return role
    return "decode" if state == "mutating_to_decode" else state


def gpu_steps(run: RunData) -> tuple[list[float], dict[str, Floats]]:
    """Instants in seconds at which the use of GPUs changes, and GPUs of each role from then on."""
    parts = run_segments(run)
    times = np.unique(np.array([part.start_ns for part in parts], dtype=np.int64))
    found: dict[str, Floats] = {}
    for part in parts:
        role = role_of(part.state)
        if role == "inactive":
            continue
        counts = found.setdefault(role, np.zeros(len(times) + 1))
        gpus = run.gpus_of(part.replica)
        counts[np.searchsorted(times, part.start_ns)] += gpus
        counts[np.searchsorted(times, part.end_ns)] -= gpus
    order = [role for role in ROLE_COLOURS if role in found] + sorted(
        set(found) - set(ROLE_COLOURS)
    )
    steps = {role: np.cumsum(found[role])[: len(times)] for role in order}
    return [_seconds(time) for time in times.tolist()], steps


def gpus_over_time(run: RunData) -> list[Chart]:
    """GPUs by role against the requests that arrive: the picture of autoscaling."""
    if not run.transitions:
        return []
    times, steps = gpu_steps(run)
    if not steps:
        return []
    stride = -(-len(times) // _STEPS_MAX)
    chart = Chart(
        chart_id="gpus",
        section="replicas",
        title="GPUs by role, and the requests that arrive",
        note="areas: GPUs in use; line: arrivals per second (right axis)",
        x=run.time_axis("s"),
        y=Axis(title="GPUs", unit="GPUs", low=0),
        height=320,
        is_wide=True,
        time=True,
    )
    chart.series = [
        Series(
            name=role,
            x=[*times[::stride], round(run.end_s, 6)],
            y=[*counts[::stride].tolist(), float(counts[-1])],
            color=ROLE_COLOURS.get(role, OTHER_COLOUR),
            shape="after",
            area=True,
        )
        for role, counts in steps.items()
    ]
    arrivals = run.requests["arrival_ns"] / NS_PER_S
    if len(arrivals):
        counts, edges = np.histogram(arrivals, bins=_RATE_CELLS, range=(0, run.end_s))
        rates = counts / (run.end_s / _RATE_CELLS)
        chart.series.append(
            Series(
                name="arrivals",
                x=short(edges[:-1]),
                y=short(rates),
                color=TEXT_COLOUR if rates.any() else OTHER_COLOUR,
                shape="after",
                width=2.0,
                right=True,
            )
        )
        chart.y2 = Axis(title="requests/s", unit="requests/s", low=0)
    return [chart]


def _seconds(time_ns: int) -> float:
    return round(time_ns / NS_PER_S, 6)
