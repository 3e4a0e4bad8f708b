"""A live migration as a machine, without kernel and replicas: every pair, each handler a claim."""

from __future__ import annotations

from itertools import product

import pytest

from emu.errors import UnexpectedEvent
from emu.migration import live_move as mov
from emu.migration.live_move import HANDLERS, ROUNDS_MAX, LiveMove, Phase, ignore
from emu.request import Status
from emu.testing import request
from tests.migration.machines import kinds

P = Phase
EVENTS: tuple[mov.Event, ...] = (
    mov.Begun(),
    mov.Noticed(1, has_arrived=True),
    mov.TransferEnded(),
    mov.Stopped(),
    mov.RoomAsked(),
    mov.Forgotten(),
    mov.Cut(),
)


class FakeSide:
    """A replica as the machine sees it."""

    def __init__(self) -> None:
        self.is_alive = True
        self.takes_kv = True
        self.has_room = True
        self.tokens = 40
        self.asked = 0

    def reserve(self, request: object) -> bool:
        self.asked += 1
        return self.has_room

    def tokens_of(self, request: object) -> int:
        return self.tokens


class Bench:
    """A machine, its two sides, and its actions so far."""

    def __init__(self, tokens: int = 40) -> None:
        self.source, self.destination = FakeSide(), FakeSide()
        self.source.tokens = tokens
        self.request = request(1, tokens, output=90)
        self.request.status = Status.RUNNING
        self.move = LiveMove(
            self.request, self.source, self.destination, block_size=4, token_bytes=10
        )
        self.done: list[mov.Action] = []
        self.now_ns = 0

    def tell(self, event: mov.Event) -> list[mov.Action]:
        """An event; the machine's questions to itself go on at once."""
        actions = self.move.step(event, self.now_ns)
        self.done += actions
        if any(isinstance(action, mov.AskRoom) for action in actions):
            return [*actions, *self.tell(mov.RoomAsked())]
        return actions

    def to(self, phase: Phase) -> Bench:
        """Bring it to a phase in which a transfer is under way, if the phase has one."""
        if phase is not P.ASKED:
            self.tell(mov.Begun())
        if phase in (P.STOPPING, P.LAST_TRANSFER):
            self.arrive()
        if phase is P.LAST_TRANSFER:
            self.stop()
        if phase is P.OVER:
            self.tell(mov.Noticed(1, has_arrived=False))
            self.tell(mov.TransferEnded())
        assert self.move.phase is phase
        return self

    def arrive(self, *, has_arrived: bool = True) -> list[mov.Action]:
        """The transfer under way ends."""
        self.tell(mov.Noticed(self.move.number, has_arrived=has_arrived))
        return self.tell(mov.TransferEnded())

    def stop(self) -> list[mov.Action]:
        """The source answers that the request stands still."""
        self.request.status = Status.MIGRATING
        return self.tell(mov.Stopped())

    @property
    def sizes(self) -> list[int]:
        return [action.size_bytes for action in self.done if isinstance(action, mov.Send)]


@pytest.mark.parametrize(("phase", "event"), list(product(Phase, EVENTS)))
def test_every_pair_is_handled_ignored_or_raises(phase: Phase, event: mov.Event) -> None:
    bench = Bench().to(phase)
    handler = HANDLERS[phase].get(type(event))
    if handler is None:
        with pytest.raises(UnexpectedEvent, match=f"request 1 is {phase.value}"):
            bench.move.step(event, 5)
    elif handler is ignore:
        assert bench.move.step(event, 5) == []
        assert bench.move.phase is phase
    else:
        bench.move.step(event, 5)


def test_it_reserves_counts_on_both_sides_and_copies_what_is_there() -> None:
    bench = Bench()
    found = bench.tell(mov.Begun())
    assert kinds(found) == ["CountMove", "CountMove", "Send"]
    assert found[:2] == [mov.CountMove(True, 1), mov.CountMove(False, 1)]
    assert (bench.sizes, bench.move.phase) == ([400], P.COPYING)


def test_without_room_it_is_over_before_it_holds_anything() -> None:
    bench = Bench()
    bench.destination.has_room = False
    assert kinds(bench.tell(mov.Begun())) == ["Leave", "Finish", "LookSource"]
    assert bench.move.phase is P.OVER


def test_a_request_that_ends_before_it_begins_reserves_nothing() -> None:
    bench = Bench()
    bench.tell(mov.Forgotten())
    assert kinds(bench.tell(mov.Begun())) == ["Leave", "Finish", "LookSource"]
    assert bench.destination.asked == 0


def test_what_is_produced_meanwhile_is_copied_in_another_round() -> None:
    bench = Bench().to(P.COPYING)
    bench.source.tokens = 60
    bench.arrive()
    assert bench.sizes == [400, 200]  # 5 more blocks of 4 tokens at 10 bytes


def test_a_block_that_was_not_full_is_copied_again() -> None:
    bench = Bench(tokens=38).to(P.COPYING)
    bench.source.tokens = 50
    bench.arrive()
    assert bench.sizes == [400, 160]  # blocks 9 to 13: the tenth had two free places


def test_it_stops_when_two_blocks_are_left() -> None:
    bench = Bench().to(P.COPYING)
    bench.source.tokens = 48
    assert kinds(bench.arrive()) == ["AskStop"]
    assert bench.move.phase is P.STOPPING


def test_it_stops_after_so_many_rounds_whatever_is_left() -> None:
    bench = Bench().to(P.COPYING)
    for number in range(2, ROUNDS_MAX + 1):
        bench.source.tokens += 40
        bench.arrive()
        assert bench.move.number == number
    bench.source.tokens += 40
    assert kinds(bench.arrive()) == ["AskStop"]


def test_a_request_that_does_not_run_there_any_more_is_left_alone() -> None:
    bench = Bench().to(P.COPYING)
    bench.source.tokens = -1
    found = bench.arrive()
    assert kinds(found)[:2] == ["Unreserve", "Leave"]
    assert found[-1] == mov.Finish(is_done=False)


def test_at_the_stop_it_reserves_anew_for_what_it_has_reached() -> None:
    bench = Bench().to(P.STOPPING)
    bench.request.generated_tokens = 3
    assert kinds(bench.stop()) == ["Unreserve", "AskRoom", "Send"]
    assert bench.destination.asked == 2
    assert bench.sizes == [400, 40]  # 43 tokens are 11 blocks, ten are there


@pytest.mark.parametrize("why", ["no room", "closed", "crashed"])
def test_it_goes_on_at_the_source_if_the_destination_cannot_take_it(why: str) -> None:
    bench = Bench().to(P.STOPPING)
    side = bench.destination
    side.has_room, side.takes_kv = why != "no room", why != "closed"
    side.is_alive = why != "crashed"
    found = bench.stop()
    assert "UndoStop" in kinds(found)
    assert ("Unreserve" in kinds(found)) == side.is_alive
    assert found[-1] == mov.Finish(is_done=False)


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.RUNNING, Status.QUEUED])
def test_a_request_that_could_not_stop_is_given_up(status: Status) -> None:
    bench = Bench().to(P.STOPPING)
    bench.request.status = status
    found = bench.tell(mov.Stopped())
    assert kinds(found)[0] == "Unreserve"
    assert "UndoStop" not in kinds(found)
    assert bench.move.phase is P.OVER


def test_the_last_transfer_delivers_and_counts_the_stop() -> None:
    bench = Bench().to(P.STOPPING)
    bench.now_ns = 100
    bench.stop()
    bench.now_ns = 170
    found = bench.arrive()
    assert kinds(found)[:2] == ["Release", "Deliver"]
    assert found[1] == mov.Deliver(started_ns=0, stop_ns=70)
    assert found[-1] == mov.Finish(is_done=True)
    assert (bench.request.migrations, bench.request.migration_ns) == (1, 70)
    assert "WaitAWhile" not in kinds(found)
    assert "Unreserve" not in kinds(found)


def test_a_last_transfer_that_fails_costs_nothing_but_the_stop() -> None:
    bench = Bench().to(P.LAST_TRANSFER)
    found = bench.arrive(has_arrived=False)
    assert kinds(found)[:2] == ["UndoStop", "Unreserve"]
    assert bench.request.migrations == 0
    assert "WaitAWhile" in kinds(found)


def test_a_request_that_ended_during_the_last_transfer_is_freed_not_resumed() -> None:
    for has_arrived in (True, False):
        bench = Bench().to(P.LAST_TRANSFER)
        bench.request.status = Status.FAILED
        found = bench.arrive(has_arrived=has_arrived)
        assert kinds(found)[0] == "Release"
        assert "Deliver" not in kinds(found)
        assert "UndoStop" not in kinds(found)


def test_a_destination_that_died_does_not_get_it() -> None:
    bench = Bench().to(P.LAST_TRANSFER)
    bench.destination.is_alive = False
    found = bench.arrive()
    assert "UndoStop" in kinds(found)
    assert "Deliver" not in kinds(found)
    assert mov.CountMove(False, -1) not in found


def test_a_request_is_lost_with_its_source_after_the_stop() -> None:
    bench = Bench().to(P.LAST_TRANSFER)
    bench.source.is_alive = False
    bench.tell(mov.Cut())
    found = bench.tell(mov.TransferEnded())
    assert not {"UndoStop", "Release", "Deliver", "WaitAWhile"} & set(kinds(found))
    assert mov.CountMove(True, -1) not in found
    assert mov.CountMove(False, -1) in found


@pytest.mark.parametrize("phase", [P.COPYING, P.LAST_TRANSFER])
def test_a_crash_cuts_the_transfer_under_way_once(phase: Phase) -> None:
    bench = Bench().to(phase)
    assert kinds(bench.tell(mov.Cut())) == ["CancelTransfer", "EndSoon"]
    assert bench.tell(mov.Cut()) == []
    assert bench.tell(mov.Noticed(bench.move.number, has_arrived=True)) == []
    assert bench.tell(mov.TransferEnded())[-1] == mov.Finish(is_done=False)


@pytest.mark.parametrize("phase", [P.COPYING, P.STOPPING, P.LAST_TRANSFER])
def test_a_forgotten_request_frees_both_sides_once(phase: Phase) -> None:
    bench = Bench().to(phase)
    found = kinds(bench.tell(mov.Forgotten()))
    assert found[0] == "Unreserve"
    assert ("Release" in found) == (phase is P.LAST_TRANSFER)
    after = bench.tell(mov.Stopped() if phase is P.STOPPING else mov.TransferEnded())
    assert not {"Unreserve", "Release", "UndoStop"} & set(kinds(after))
    assert bench.move.phase is P.OVER


def test_the_second_notice_of_a_transfer_means_nothing() -> None:
    bench = Bench().to(P.COPYING)
    bench.source.tokens = 80
    bench.arrive()
    assert bench.tell(mov.Noticed(1, has_arrived=False)) == []
    assert bench.move.is_sending


def test_after_a_failure_the_source_waits_and_both_sides_are_free() -> None:
    bench = Bench().to(P.COPYING)
    assert kinds(bench.arrive(has_arrived=False)) == [
        *("Unreserve", "Leave", "WaitAWhile", "CountMove", "CountMove", "Rebalance", "Finish")
    ]
