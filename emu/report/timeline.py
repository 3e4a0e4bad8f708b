"""The state timeline: what every replica was at every instant, who changed it and why. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

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
    "spare": STATE_COLOURS["shutting_null"],
    "queue": STATE_COLOURS["inactive"],
    "migration": "#f28e2b",
}
_SEGMENTS_MAX: Final = 12_000
_MARKS_MAX: Final = 2_000
_MARK_SYMBOLS: Final = {"fault": "x", "recovery": "star", "command": "diamond"}

Figure = tuple[str, str, list[dict[str, Any]], dict[str, Any], int, bool]


class Segment(msgspec.Struct, frozen=True):
    """A replica in one state, from start to end."""

    replica: int
    state: str
    start_ns: int
    end_ns: int
    writer: str
    cause: str


def segments(transitions: list[Transition], end_ns: int) -> list[Segment]:
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


def state_timeline(run: RunData) -> Figure | None:
    """Title, note, traces, layout, height, wide; None without transitions."""
    if not run.transitions:
        return None
    end_ns = round(run.summary.simulated_s * NS_PER_S)
    parts = [part for part in segments(run.transitions, end_ns) if part.end_ns > part.start_ns]
    note = "colour = state; hover tells who changed it and why"
    if len(parts) > _SEGMENTS_MAX:
        note += f"; the {_SEGMENTS_MAX:,} longest of {len(parts):,} stretches are drawn"
        parts = sorted(parts, key=lambda part: (part.start_ns - part.end_ns, part.replica))
        parts = parts[:_SEGMENTS_MAX]
    by_state: dict[str, list[Segment]] = {}
    for part in parts:
        by_state.setdefault(part.state, []).append(part)
    order = [*STATE_COLOURS, *sorted(set(by_state) - set(STATE_COLOURS))]
    data = [_bars(state, by_state[state]) for state in order if state in by_state]
    data += _marks(run)
    replicas = sorted({transition.replica for transition in run.transitions})
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "bargap": 0.15,
        "xaxis": {"title": {"text": "s"}},
        "yaxis": {
            "title": {"text": "replica"},
            "autorange": "reversed",
            **_ticks(replicas, bool(run.marks)),
        },
        "showlegend": True,
        "hovermode": "closest",
    }
    height = min(760, 170 + 18 * len(replicas))
    return "State of every replica", note, data, layout, height, True


def _bars(state: str, parts: list[Segment]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": state,
        "base": [_seconds(part.start_ns) for part in parts],
        "x": [_seconds(part.end_ns - part.start_ns) for part in parts],
        "y": [part.replica for part in parts],
        "customdata": [
            [_seconds(part.end_ns), part.writer or "-", part.cause or "-"] for part in parts
        ],
        "marker": {"color": STATE_COLOURS.get(state, OTHER_COLOUR), "line": {"width": 0}},
        "hovertemplate": "replica %{y}: " + state + "<br>%{base:.6g} s to %{customdata[0]:.6g} s"
        "<br>by %{customdata[1]}: %{customdata[2]}<extra></extra>",
    }


def _marks(run: RunData) -> list[dict[str, Any]]:
    """Faults and decisions above the replicas, one trace for each kind."""
    by_kind: dict[str, list[tuple[int, str]]] = {}
    for mark in run.marks[:_MARKS_MAX]:
        text = f"{mark.target}: {mark.text}" if mark.target else mark.text
        by_kind.setdefault(mark.kind, []).append((mark.time_ns, text))
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": kind,
            "x": [_seconds(time_ns) for time_ns, _ in points],
            "y": [-1] * len(points),
            "text": [text for _, text in points],
            "marker": {"symbol": _MARK_SYMBOLS.get(kind, "triangle-down"), "size": 10,
                       "color": "#ef4444" if kind == "fault" else "#f28e2b"},
            "hovertemplate": "%{x:.6g} s " + kind + "<br>%{text}<extra></extra>",
        }
        for kind, points in by_kind.items()
    ]  # fmt: skip


def _ticks(replicas: list[int], has_marks: bool) -> dict[str, Any]:
    """A label for every replica while there is room, and for the row of marks above them."""
    if len(replicas) > 32:
        return {}
    names = {-1: "events"} if has_marks else {}
    names |= {replica: str(replica) for replica in replicas}
    return {"tickmode": "array", "tickvals": list(names), "ticktext": list(names.values())}


def _seconds(time_ns: int) -> float:
    return round(time_ns / NS_PER_S, 6)
