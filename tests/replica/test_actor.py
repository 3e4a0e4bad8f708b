"""The actor of a replica: every action is applied, in order, before the next handler runs.

The real actor with the real machine, on a kernel that is moved by hand.
"""

from __future__ import annotations

from typing import Any

import pytest

from emu.errors import InvalidTransition, UnexpectedEvent
from emu.kernel.clock import AT_DUE, NEVER, NOW
from emu.kernel.life import TURN
from emu.kernel.priorities import PRIORITY_REPLICA, PRIORITY_WATCHER
from emu.replica import actions as act
from emu.replica import events as ev
from emu.replica.effects import EFFECTS
from emu.replica.flight.base import IDLE, Sort
from emu.replica.relay_board import Relayed
from emu.replica.split_batch import SplitBatch
from emu.replica.states import ReplicaState
from emu.request import Status
from emu.scheduling.base import Batch
from tests.replica.stage import US, Stage

pytestmark = pytest.mark.doubles
S = ReplicaState


def perform(stage: Stage, *actions: act.Action, index: int = 0) -> None:
    """The handlers of one replica have asked for these."""
    stage.replicas[index].out += actions
    stage.actors[index].perform()


def split_of(stage: Stage, *ids: int) -> SplitBatch:
    return SplitBatch(7, [stage.made(one, 4, 3) for one in ids], 1, 4, 0)


# --- every action -------------------------------------------------------------------------------
def test_every_action_has_its_performer() -> None:
    known = {act.End, act.FreeCapacity, act.Measure, *EFFECTS}
    assert known == set(act.Action.__subclasses__())


def test_an_end_is_told_with_its_reason() -> None:
    stage = Stage(S.COLOCATED)
    perform(stage, act.End(stage.made(3, 4, 2), Status.REJECTED, "too long"))
    assert stage.ends == [(3, "REJECTED", "too long", 0)]


def test_actions_are_applied_in_their_order_and_the_list_is_empty_before() -> None:
    stage = Stage(S.COLOCATED)
    seen: list[str] = []

    def look(number: int, value: int) -> None:
        seen.append(f"{len(stage.ends)} ended, {len(stage.replicas[0].out)} wait")

    stage.on_answer = look
    one, two = stage.made(1, 4, 2), stage.made(2, 4, 2)
    perform(
        stage,
        act.End(one, Status.FAILED, "first"),
        act.Reply(stage.ask()),
        act.End(two, Status.FAILED, "second"),
        act.Reply(stage.ask()),
    )
    assert seen == ["1 ended, 0 wait", "2 ended, 0 wait"]


def test_kv_that_is_to_leave_goes_to_the_outbox_in_whole_and_in_halves() -> None:
    stage = Stage(S.PREFILL)
    requests, split = [stage.made(1, 4, 2)], split_of(stage, 2, 3)
    perform(
        stage,
        act.HandOff(requests, 5),
        act.HandOffFirst(split),
        act.HandOffSecond(split, split.requests[:1]),
    )
    box = stage.outbox(0)
    assert (box.batches, box.firsts) == ([requests], [split])
    assert box.seconds == [(split, split.requests[:1])]


def test_requests_that_are_lost_or_given_back_are_told_to_the_world() -> None:
    stage = Stage(S.SHUTTING_PREFILL)
    perform(
        stage,
        act.Requeue([stage.made(1, 4, 2)]),
        act.Lose([stage.made(2, 4, 2)], "kv_lost"),
        act.ExpireDrain([stage.made(3, 4, 2)]),
    )
    assert (stage.requeued, stage.losses, stage.expired) == ([1], [([2], "kv_lost")], [[3]])


def test_a_cancellation_is_followed_unless_the_request_has_ended_meanwhile() -> None:
    stage = Stage(S.DECODE)
    here, gone = stage.made(1, 4, 2), stage.made(2, 4, 2)
    gone.status = Status.COMPLETED
    perform(stage, act.ForwardCancel(here), act.ForwardCancel(gone))
    assert stage.followed == [1]


def test_answers_and_notices_are_given() -> None:
    stage = Stage(S.SHUTTING_DECODE)
    perform(stage, act.Reply(ev.Asked("injector", 4), 9), act.Drain(), act.FreeCapacity())
    assert (stage.replies, stage.draining) == ([(4, 9)], [0])
    assert stage.capacity[-1] == 0


def test_a_move_tells_all_that_watch_and_the_replica_looks_again() -> None:
    stage = Stage(S.PREFILL)
    stage.kernel.now_ns = 5
    stage.kernel.steps.clear()
    perform(stage, act.Move(S.PREFILL, S.SHUTTING_PREFILL, "surplus", "planner"))
    replica = stage.replicas[0]
    assert stage.moves == [(0, "prefill", "shutting_prefill", "planner", "surplus")]
    assert replica.counters.state_ns == {S.PREFILL: 5}
    stage.kernel.rest()
    assert stage.kernel.steps[:1] == ["replica 0"]


def test_its_own_decision_comes_too_late_when_another_has_decided() -> None:
    stage = Stage(S.DECODE)
    perform(stage, act.Move(S.AUS_DECODE, S.DECODE, "opened"))
    assert stage.moves == []


def test_another_writer_that_comes_too_late_is_a_bug() -> None:
    stage = Stage(S.DECODE)
    with pytest.raises(InvalidTransition, match="decode"):
        perform(stage, act.Move(S.PREFILL, S.OLD_PREFILL, "late", "planner"))


def test_a_free_lock_is_taken_at_once_and_a_held_one_when_it_is_given_back() -> None:
    stage = Stage(S.DECODE, S.SHUTTING_DECODE)
    lock, replica = stage.replicas[1].lock, stage.replicas[1]
    assert lock.holder == replica.name  # it has closed at its first boundary
    stage = Stage(S.DECODE, S.DECODE)
    lock, replica = stage.replicas[1].lock, stage.replicas[1]
    assert lock.try_acquire("watcher of replica 0")
    stage.command(1, S.SHUTTING_DECODE)
    stage.kernel.rest()
    assert (replica.is_closing, lock.holder) == (True, "watcher of replica 0")
    lock.release("watcher of replica 0")
    stage.kernel.rest()
    assert (lock.holder, replica.state) == ("replica 1", S.SHUTTING_NULL)


def test_a_lock_is_given_back_by_its_holder_only() -> None:
    stage = Stage(S.DECODE)
    lock = stage.replicas[0].lock
    perform(stage, act.OpenLock())
    assert (lock.holder, stage.capacity) == ("", [])
    assert lock.try_acquire("replica 0")
    perform(stage, act.OpenLock())
    assert (lock.holder, stage.capacity) == ("", [0])


# --- two ways of coming -----------------------------------------------------------------------
def test_what_is_told_has_happened_before_the_senders_next_line() -> None:
    stage = Stage(S.COLOCATED)
    request = stage.submit(1, 5_000, 3)
    assert request.status is Status.REJECTED
    assert stage.ends[0][:2] == (1, "REJECTED")


def test_what_is_posted_waits_until_nothing_is_in_flight() -> None:
    stage = Stage(S.COLOCATED)
    request = stage.submit(1, 8, 9)
    stage.kernel.run(0)
    stage.actors[0].post(ev.Cancelled(request=request, status=Status.CANCELLED, reason="left"))
    stage.kernel.run(17 * US)
    assert (stage.ends, len(stage.replicas[0].mailbox.posted)) == ([], 1)
    stage.kernel.run()
    assert stage.ends == [(1, "CANCELLED", "left", 18 * US)]


def test_an_event_that_the_state_does_not_expect_raises_with_its_history() -> None:
    stage = Stage(S.PREFILL)
    stage.command(0, S.SHUTTING_PREFILL)
    with pytest.raises(UnexpectedEvent, match="shutting_prefill"):
        stage.submit(1, 8, 2)


def test_a_step_in_line_and_a_message_meet_once() -> None:
    """Ten messages of one instant are one step."""
    stage = Stage(S.COLOCATED)
    stage.kernel.steps.clear()
    for number in range(10):
        stage.submit(number, 4, 1)
    stage.kernel.rest()
    assert len(stage.kernel.steps) == 1


def test_when_it_looks_depends_on_what_is_in_flight() -> None:
    stage = Stage(S.COLOCATED)
    actor = stage.actors[0]
    assert actor.align(0) == NOW
    stage.submit(1, 8, 1)
    stage.kernel.run(0)
    assert actor.align(0) == AT_DUE  # one iteration: its own timer comes
    stage.submit(2, 8, 30)
    stage.kernel.run(18 * US)
    assert stage.replicas[0].flight.sort is Sort.RUN
    assert actor.align(stage.kernel.now_ns) < actor.due_ns  # a leap: the end of an iteration
    actor.tell(ev.Paused())
    stage.kernel.rest()
    assert (actor.align(0), actor.due_ns) == (AT_DUE, NEVER)


def test_a_reservation_cuts_a_leap_that_no_longer_holds() -> None:
    stage = Stage(S.DECODE, blocks=8)
    running = stage.made(1, 4, 40)
    running.status, running.generated_tokens, running.computed_tokens = Status.MIGRATING, 1, 4
    running.first_token_ns = running.last_token_ns = 0
    assert stage.actors[0].reserve([running])
    stage.actors[0].post(ev.KvDelivered(requests=[running]))
    stage.kernel.run(12 * US)
    assert stage.replicas[0].flight.sort is Sort.RUN
    due_ns = stage.actors[0].due_ns
    other = stage.made(2, 16, 9)
    other.generated_tokens, other.computed_tokens = 1, 16
    assert stage.actors[0].reserve([other])
    assert stage.actors[0].due_ns < due_ns
    assert not stage.actors[0].reserve([stage.made(3, 30, 9)])


# --- a backend outside simulated time -------------------------------------------------------------
class Outside:
    """Costs come from another process, some time."""

    name = "outside"
    foreign = True

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def measure(self, shape: Any) -> int:
        self.asked.append(shape)
        await TURN
        return 5 * US


def outside() -> tuple[Stage, Outside]:
    stage, backend = Stage(S.COLOCATED, leap=False), Outside()
    stage.ask_outside(0, backend)
    return stage, backend


def test_a_replica_is_away_until_its_cost_is_known() -> None:
    stage, backend = outside()
    stage.submit(1, 8, 1)
    stage.kernel.rest()
    actor = stage.actors[0]
    assert (actor.is_away, stage.kernel.away) == (True, [actor])
    stage.kernel.steps.clear()
    actor.look()
    stage.kernel.rest()
    assert stage.kernel.steps == []
    stage.kernel.answer()
    stage.kernel.run(5 * US)
    assert len(backend.asked) == 1
    assert stage.ends == [(1, "COMPLETED", "", 5 * US)]


def test_a_cost_for_an_earlier_life_is_dropped() -> None:
    stage, _ = outside()
    stage.submit(1, 8, 1)
    stage.kernel.rest()
    assert [r.request_id for r in stage.crash(0)] == [1]
    stage.kernel.answer()
    stage.kernel.run()
    assert (stage.ends, stage.replicas[0].flight) == ([], IDLE)


# --- live scaling ---------------------------------------------------------------------------------
def relayed(stage: Stage, split: SplitBatch | None) -> Relayed:
    """Replica 1 has been given a batch of replica 0, whose activation is on its way."""
    given = Relayed(Batch(1, None, []), 1, split, 0)  # type: ignore[arg-type]
    stage.board.park(1)
    stage.board.give(1, given)
    return given


def test_an_activation_wakes_its_helper_when_it_is_there() -> None:
    stage = Stage(S.NEW_PREFILL, S.OLD_PREFILL, policy="fcfs")
    given = relayed(stage, None)
    perform(stage, act.SendActivation(given, 1, 64))
    assert ([t.size_bytes for t in stage.sent], stage.sent[0].pair) == ([64], (0, 1))
    assert not given.is_here
    stage.sent[0].on_done()
    assert given.is_here


@pytest.mark.parametrize("is_split", [True, False])
def test_an_activation_that_is_lost_loses_the_batch_and_its_other_half(is_split: bool) -> None:
    stage = Stage(S.NEW_PREFILL, S.OLD_PREFILL, policy="fcfs")
    split = split_of(stage, 4) if is_split else None
    given = relayed(stage, split)
    perform(stage, act.SendActivation(given, 1, 64))
    stage.sent[0].on_failed("link_down")
    assert stage.board.answer(1) is None
    assert stage.dropped == ([split] if is_split else [])


def test_an_activation_of_a_batch_that_was_abandoned_loses_nothing() -> None:
    stage = Stage(S.NEW_PREFILL, S.OLD_PREFILL, policy="fcfs")
    given = relayed(stage, split_of(stage, 4))
    perform(stage, act.SendActivation(given, 1, 64))
    stage.board.finished(1)
    stage.sent[0].on_failed("link_down")
    assert (stage.dropped, stage.losses) == ([], [])


def test_a_hand_over_is_reported_and_an_elder_is_woken() -> None:
    stage = Stage(S.NEW_PREFILL, S.OLD_PREFILL, S.NEW_PREFILL, policy="fcfs")
    stage.kernel.run(0)
    stage.kernel.steps.clear()
    perform(stage, act.ReportRelayed(1, [stage.made(5, 4, 2)], 2), act.WakeElder(2))
    stage.kernel.rest()
    assert stage.relays == [(0, 1, [5], 2)]
    assert "replica 2" in stage.kernel.steps


def test_a_new_replica_that_is_done_lets_a_helper_go() -> None:
    stage = Stage(S.INACTIVE, S.PREFILL, policy="fcfs")
    stage.command(1, S.OLD_PREFILL)
    stage.command(0, S.NEW_PREFILL)
    assert not stage.board.may_leave
    perform(stage, act.ReleaseHelper())
    assert stage.board.may_leave


# --- the end of an instant ------------------------------------------------------------------------
def test_a_new_replica_waits_until_all_else_of_the_instant_has_happened() -> None:
    """A helper that finishes at this very instant is seen by the same pass."""
    steps: list[int] = []
    stage = Stage(S.NEW_PREFILL, policy="fcfs")
    stage.kernel.run(0)
    stage.kernel.call_at(10, 0, stage.actors[0].look)
    stage.kernel.steps.clear()
    for priority in (PRIORITY_REPLICA + 5, PRIORITY_WATCHER):
        stage.kernel.call_at(10, priority, lambda: steps.append(len(stage.kernel.steps)))
    stage.kernel.run(10)
    # Before the last replica's turn only its boundary has run; before the watchers all of it has.
    assert steps == [1, 2]
