"""All judges of a run, one after the other: a second, slow model of what it should have been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from emu.apps.chaos.truth.beside import Beside
from emu.apps.chaos.truth.choices import Choices
from emu.apps.chaos.truth.clients import Clients
from emu.apps.chaos.truth.copies import judge_host_copies
from emu.apps.chaos.truth.costs import Iterations
from emu.apps.chaos.truth.deadlines import Deadlines
from emu.apps.chaos.truth.doors import Doors
from emu.apps.chaos.truth.drafter_times import drafters_of
from emu.apps.chaos.truth.drafts import Drafts
from emu.apps.chaos.truth.encoded import judge_encoded
from emu.apps.chaos.truth.fair import Fair
from emu.apps.chaos.truth.figures import Figures
from emu.apps.chaos.truth.forming import Forming
from emu.apps.chaos.truth.front import Front
from emu.apps.chaos.truth.handover import Handover
from emu.apps.chaos.truth.helpers import judge_helpers
from emu.apps.chaos.truth.leaving import Leaving
from emu.apps.chaos.truth.live_moves import judge_live_moves
from emu.apps.chaos.truth.made import judge_made
from emu.apps.chaos.truth.made_times import times_of
from emu.apps.chaos.truth.models import judge_models
from emu.apps.chaos.truth.places import judge_places
from emu.apps.chaos.truth.planners import Planners
from emu.apps.chaos.truth.power import Power
from emu.apps.chaos.truth.ranks import Ranks
from emu.apps.chaos.truth.rebalancing import judge_rebalancing
from emu.apps.chaos.truth.recovery import (
    judge_clients,
    judge_loads,
    judge_losses,
    judge_overloads,
    judge_returns,
)
from emu.apps.chaos.truth.refusals import judge_refusals
from emu.apps.chaos.truth.rejections import judge_rejections
from emu.apps.chaos.truth.remembered import Remembered, said_in
from emu.apps.chaos.truth.room import judge_room
from emu.apps.chaos.truth.routes import Routes
from emu.apps.chaos.truth.routing import Routing
from emu.apps.chaos.truth.seats import seats_of
from emu.apps.chaos.truth.series import Series, judge_waits
from emu.apps.chaos.truth.sharing import judge_sharing
from emu.apps.chaos.truth.sights import judge_placements, judge_sights
from emu.apps.chaos.truth.standing import Standing, judge_lists
from emu.apps.chaos.truth.sums import judge_execution, judge_sessions, judge_sums
from emu.apps.chaos.truth.tape import Record, Tape
from emu.apps.chaos.truth.transfers import Transfers
from emu.apps.chaos.truth.variation import judge_variation
from emu.apps.chaos.truth.waves import Waves
from emu.apps.chaos.truth.windows import Windows
from emu.cluster.plan import Plan
from emu.config.schema import Config
from emu.documents import DocumentView


class Written(NamedTuple):
    """What went in and came out of a run, beside its history."""

    lines: Sequence[Record]
    """Of the workload; none = it was made from distributions, or read from the user's own file."""
    rows: Sequence[Mapping[str, str]]
    """Of requests.csv."""
    summary: DocumentView
    series: Sequence[Mapping[str, str]] = ()
    """Of timeseries.csv."""
    replicas: Sequence[Mapping[str, str]] = ()
    """Of replicas.csv."""
    transitions: Sequence[Mapping[str, str]] = ()
    marks: Sequence[Mapping[str, str]] = ()


def truth_of(
    config: Config, plan: Plan, records: Sequence[Record], written: Written | None = None
) -> Tape:
    """Judge a complete, stepped run; what is wrong, and how often each rule was asked."""
    tape = Tape(config, seats_of(plan), records)
    lines = () if written is None else written.lines
    judge_places(tape)
    judge_room(tape, plan)
    windows = Windows(tape)
    windows.judge()
    beside = Beside(tape, lines)
    Iterations(tape, windows, beside, times_of(config, plan), drafters_of(config, plan)).judge()
    judge_variation(tape)
    Front(tape).judge()
    Waves(tape).judge()
    Ranks(tape).judge()
    Transfers(tape, windows).judge()
    Routes(tape).judge()
    Choices(tape).judge()
    said = said_in(tape, lines)
    Forming(tape, said if lines else None).judge()
    Fair(tape).judge()
    remembered = Remembered(tape, said)
    remembered.judge()
    Routing(tape, remembered.matched, beside).judge()
    Handover(tape).judge()
    Leaving(tape).judge()
    judge_refusals(tape)
    Doors(tape).judge()
    judge_rejections(tape)
    judge_rebalancing(tape)
    judge_returns(tape)
    judge_loads(tape)
    judge_clients(tape)
    judge_overloads(tape)
    judge_losses(tape)
    judge_live_moves(tape)
    judge_host_copies(tape)
    judge_helpers(tape)
    judge_sharing(tape)
    Planners(tape).judge()
    judge_sights(tape)
    Deadlines(tape).judge()
    if written is not None:
        _judge_written(tape, written, windows, beside)
    return tape


def _judge_written(tape: Tape, written: Written, windows: Windows, beside: Beside) -> None:
    """What came out agrees with the history, and with what went in."""
    Figures(tape).judge(written.rows, written.summary)
    Series(tape, written.rows).judge(written.series)
    if written.transitions:
        Standing(tape).judge(written.series, written.replicas)
        judge_lists(tape, written.transitions, written.marks)
    judge_waits(tape, written.rows, written.summary)
    judge_sums(tape, written.rows, written.summary)
    judge_execution(tape, written.rows)
    judge_models(tape, written.rows, written.summary)
    judge_placements(tape, written.summary)
    Power(tape).judge(written.rows, written.summary)
    beside.judge(written.rows, written.summary)
    judge_made(tape, () if written.lines else written.rows)
    if written.lines:
        judge_encoded(tape, written.lines)
        judge_sessions(tape, written.lines, written.rows)
        Drafts(tape, written.lines).judge(written.summary)
        Clients(tape, windows, written.lines).judge(written.rows)
