"""What follows a loss, without kernel and cluster: order, policy, return, and where requests are."""

from __future__ import annotations

from typing import Any

import pytest

from emu.faults.census import census, splits
from emu.faults.recovery import LOADS_MAX
from emu.replica import events as ev
from emu.replica.relay_board import Relayed
from emu.replica.split_batch import SplitBatch
from emu.replica.states import LOADING, ReplicaState
from emu.request import Request, Status
from emu.scheduling.base import Batch
from emu.testing import request
from tests.faults.fakes import FakeQueue, World

S = ReplicaState


def crash(world: World, index: int, back_ns: int = -1) -> None:
    world.recovery.crash(world.replicas[index], "test", back_ns=back_ns)


# --- requests that are lost -------------------------------------------------------------------
def test_what_runs_and_waits_at_a_crashed_replica_starts_again() -> None:
    world = World(S.COLOCATED, S.COLOCATED)
    running = world.benches[0].running(1, 2)
    waiting = request(3)
    world.benches[0].scheduler.queue.append(waiting)
    for r in running:
        r.first_scheduled_ns = 0
    crash(world, 0)
    assert world.gateway.routed == [waiting, *running]
    assert [reason for _, reason in world.recorder.losses] == ["replica_lost"] * 3
    assert [r.retries for r in (waiting, *running)] == [0, 1, 1]  # one that had not begun may again
    assert all(r.computed_tokens == 0 and r.kv_blocks == 0 for r in running)
    assert world.recovery.requests_lost == 2


def test_a_request_is_retried_so_often_and_then_fails() -> None:
    world = World(S.COLOCATED, max_retries=1)
    (one,) = world.benches[0].running(1)
    one.first_scheduled_ns, one.retries = 0, 1
    crash(world, 0)
    assert world.ends == [(one, Status.FAILED, "replica_lost")]
    assert world.gateway.routed == []


def test_with_on_crash_fail_what_had_begun_fails_and_the_rest_goes_on() -> None:
    world = World(S.COLOCATED, on_crash="fail")
    (begun,), fresh = world.benches[0].running(1), request(2)
    begun.first_scheduled_ns = 0
    world.benches[0].scheduler.queue.append(fresh)
    crash(world, 0)
    assert [end[0] for end in world.ends] == [begun]
    assert world.gateway.routed == [fresh]


def test_a_request_that_an_outside_router_placed_fails_at_once() -> None:
    world = World(S.COLOCATED)
    (one,) = world.benches[0].running(1)
    one.pin = 0
    crash(world, 0)
    assert world.ends == [(one, Status.FAILED, "replica_lost")]


def test_a_request_that_has_ended_is_not_lost() -> None:
    world = World(S.COLOCATED)
    (one,) = world.benches[0].running(1)
    one.status = Status.CANCELLED
    crash(world, 0)
    assert (world.gateway.routed, world.ends, world.recorder.losses) == ([], [], [])


# --- a crash, owner by owner ------------------------------------------------------------------
def test_a_crashed_source_loses_its_outbound_kv_and_frees_the_destination() -> None:
    world = World(S.PREFILL, S.DECODE)
    watcher, batch = world.watcher(0), world.held(0, 1)
    watcher.append(batch, 100)
    crash(world, 0)
    assert world.sent[0].is_cancelled
    assert world.replicas[1].lock.holder == ""
    assert world.benches[1].scheduler.reserved == []
    assert world.gateway.routed == batch
    assert batch[0].recomputed_tokens == 5


def test_other_watchers_hear_of_a_crash_after_the_state_has_changed() -> None:
    """Their batches look for another destination now: it must not be the crashed one."""
    world = World(S.PREFILL, S.DECODE, S.DECODE)
    watcher, batch = world.watcher(0), world.held(0, 1)
    watcher.append(batch, 100)
    crash(world, 1)
    assert [sent.pair for sent in world.sent] == [(0, 1), (0, 2)]
    assert world.replicas[2].lock.holder == "watcher 0"


def test_kv_on_its_way_to_a_crashed_replica_is_not_lost() -> None:
    world = World(S.PREFILL, S.DECODE)
    watcher, batch = world.watcher(0), world.held(0, 1)
    watcher.append(batch, 100)
    crash(world, 1)
    assert world.gateway.routed == []
    assert [b.requests for b in watcher.outbound.queue] == [batch]


def test_a_crash_changes_the_state_once_and_closes_the_lock() -> None:
    world = World(S.PREFILL, S.DECODE)
    crash(world, 1)
    assert world.moved == [(1, S.DECODE, S.FAILED)]
    assert world.replicas[1].lock.holder == "replica 1"


def test_requests_of_a_crash_are_routed_when_every_owner_has_heard() -> None:
    world = World(S.COLOCATED, S.COLOCATED)
    (one,) = world.benches[0].running(1)
    states: list[ReplicaState] = []
    route = world.gateway.route
    world.gateway.route = lambda r: (states.append(world.states[0]), route(r))[0]  # type: ignore[assignment,method-assign]
    crash(world, 0)
    assert states == [S.FAILED]
    assert world.gateway.routed == [one]


def relayed(world: World, *, first: int, old: int, is_here: bool = True) -> Relayed:
    """The old replica runs the rest of a batch that the first one has begun."""
    made = SplitBatch(1, world.held(first, 1), 1, 4, 0)
    if first in world.watchers:
        world.watchers[first].append_first(made)
    given = Relayed(Batch(1, None, []), 1, made, first, is_here)  # type: ignore[arg-type]
    world.relay._answers[old] = given
    return given


@pytest.mark.parametrize("crashed", [1, 2])
def test_a_split_batch_is_dropped_with_its_helper_or_its_destination(crashed: int) -> None:
    world = World(S.NEW_PREFILL, S.OLD_PREFILL, S.DECODE)
    world.watcher(0)
    world.watcher(1)
    given = relayed(world, first=0, old=1)
    assert given.split is not None
    assert given.split.destination_id == 2
    world.relay.olds = world.relay.relay_deactive = 1
    crash(world, crashed)
    assert given.split.is_dropped
    assert world.tokens_in_migration == 0
    assert world.replicas[2].lock.holder in ("", "replica 2")


def test_a_batch_whose_activation_is_here_survives_its_giver() -> None:
    world = World(S.NEW_PREFILL, S.OLD_PREFILL, S.DECODE)
    given = relayed(world, first=0, old=1)
    world.relay.zigzag_active = world.relay.olds = 1
    crash(world, 0)
    assert world.relay.answer(1) is given


def test_a_batch_whose_giver_dies_before_the_activation_has_left_is_abandoned() -> None:
    world = World(S.NEW_PREFILL, S.OLD_PREFILL, S.DECODE)
    relayed(world, first=0, old=1, is_here=False)
    world.relay.zigzag_active = world.relay.olds = 1
    crash(world, 0)
    assert world.relay.answer(1) is None


def test_a_live_load_that_is_given_up_loses_the_kv_there() -> None:
    world = World(S.NEW_PREFILL, S.DECODE)
    watcher, batch = world.watcher(0), world.held(0, 1)
    watcher.append(batch, 100)
    world.recovery.give_up(world.replicas[0])
    assert world.recorder.losses == [(batch[0], "kv_lost")]
    assert world.sent[0].is_cancelled


# --- return -----------------------------------------------------------------------------------
def test_without_replacement_a_crashed_replica_stays_down() -> None:
    world = World(S.PREFILL, replace=False)
    crash(world, 0)
    world.until(100.0)
    assert world.states == [S.FAILED]


@pytest.mark.parametrize(
    ("state", "role"),
    [
        (S.PREFILL, "prefill"),
        (S.OLD_PREFILL, "prefill"),
        (S.DECODE, "decode"),
        (S.MUTATING_TO_DECODE, "decode"),
        (S.COLOCATED, "colocated"),
        (S.LOADING_DECODE, "decode"),
    ],
)
def test_it_returns_to_the_role_that_it_had(state: ReplicaState, role: str) -> None:
    world = World(state)
    world.relay.olds = world.relay.relay_deactive = state is S.OLD_PREFILL
    crash(world, 0)
    world.until(1.0)
    assert world.scaler.restored == [(0, role, False)]


@pytest.mark.parametrize("state", [S.SHUTTING_PREFILL, S.SHUTTING_NULL])
def test_what_was_leaving_comes_back_without_a_role(state: ReplicaState) -> None:
    world = World(state)
    crash(world, 0)
    world.until(1.0)
    assert (world.states, world.scaler.restored) == ([S.INACTIVE], [])


def test_a_role_of_an_earlier_crash_does_not_come_back_with_one_that_was_leaving() -> None:
    world = World(S.DECODE)
    crash(world, 0)
    world.until(1.0)
    replica = world.replicas[0]
    replica.actor.tell(ev.Commanded(to=S.LOADING_DECODE, writer="recovery", cause="test"))
    replica.actor.tell(ev.WeightsArrived(to=S.AUS_DECODE))
    replica.state = S.DECODE  # opened
    replica.actor.tell(ev.Commanded(to=S.SHUTTING_DECODE, writer="planner", cause="test"))
    crash(world, 0)
    world.until(2.0)
    assert world.scaler.restored == [(0, "decode", False)]  # of the first crash alone


def test_where_a_planner_decides_nothing_is_loaded() -> None:
    world = World(S.PREFILL)
    world.scaler.is_active = True
    crash(world, 0)
    world.until(1.0)
    assert (world.states, world.scaler.restored) == ([S.INACTIVE], [])


def test_the_timer_of_an_earlier_life_brings_nothing_back() -> None:
    world = World(S.PREFILL)
    crash(world, 0, back_ns=10_000_000)
    replica = world.replicas[0]
    replica.actor.tell(ev.Restarted(life=replica.incarnation))  # back earlier, by another way
    replica.actor.tell(ev.Commanded(to=S.PREFILL, writer="command", cause="test", weights=True))
    crash(world, 0, back_ns=30_000_000)
    world.until(0.02)
    assert world.states == [S.FAILED]
    world.until(0.03)
    assert world.states == [S.INACTIVE]


def test_a_replica_waits_for_the_last_fault_of_its_gpu() -> None:
    world = World(S.PREFILL)
    world.strike("gpu_crash", gpu=0, duration_s=1.0)
    world.strike("gpu_crash", gpu=0, duration_s=3.0)
    world.until(2.9)
    assert world.states == [S.FAILED]
    world.until(3.0)
    assert world.states == [S.INACTIVE]


def test_a_spare_takes_the_role_of_a_replica_whose_gpus_are_gone() -> None:
    world = World(S.PREFILL, S.INACTIVE)
    world.spares = [1]
    world.strike("gpu_crash", gpu=0)
    world.until(1.0)
    assert world.scaler.restored == [(1, "prefill", False)]


def test_the_one_that_was_replaced_is_a_spare_when_it_is_back() -> None:
    world = World(S.PREFILL, S.INACTIVE, S.DECODE)
    world.spares = [1]
    world.strike("gpu_crash", gpu=0, duration_s=2.0)
    world.until(1.5)
    world.strike("gpu_crash", gpu=2, duration_s=9.0)
    world.until(2.0)
    assert world.states[0] is S.INACTIVE
    world.until(2.5)
    assert world.scaler.restored == [(1, "prefill", False), (0, "decode", False)]


def test_a_load_that_is_given_up_is_tried_again_but_not_for_ever() -> None:
    world = World(S.PREFILL)
    crash(world, 0)
    world.until(1.0)
    replica = world.replicas[0]
    for _ in range(LOADS_MAX + 2):
        replica.actor.tell(ev.Commanded(to=S.LOADING_PREFILL, writer="recovery", cause="test"))
        replica.actor.tell(ev.LoadGivenUp(cause="test"))
        assert replica.state is S.INACTIVE
        world.until(world.kernel.now_ns / 1e9 + 1.0)
    assert len(world.scaler.restored) == LOADS_MAX


def test_a_crash_between_two_loads_does_not_take_the_role_away() -> None:
    """It was about to load again, died, and stayed inactive for good."""
    world = World(S.PREFILL)
    crash(world, 0)
    world.until(1.0)
    replica = world.replicas[0]
    replica.actor.tell(ev.Commanded(to=S.LOADING_PREFILL, writer="recovery", cause="test"))
    replica.actor.tell(ev.LoadGivenUp(cause="test"))
    crash(world, 0)
    world.until(3.0)
    assert world.scaler.restored == [(0, "prefill", False)] * 2


def test_it_is_tried_again_after_a_restart_where_crashes_alone_bring_nothing_back() -> None:
    """`restart_s` was refused with `replace = false`, where it paces these loads all the same."""
    world = World(S.PREFILL, replace=False, restart_s=2.0)
    crash(world, 0, back_ns=0)
    world.until(0.0)
    replica = world.replicas[0]
    replica.actor.tell(ev.Commanded(to=S.LOADING_PREFILL, writer="recovery", cause="test"))
    replica.actor.tell(ev.LoadGivenUp(cause="test"))
    world.until(1.9)
    assert len(world.scaler.restored) == 1
    world.until(2.0)
    assert len(world.scaler.restored) == 2


# --- draining ---------------------------------------------------------------------------------
def test_a_load_that_was_given_up_is_not_tried_where_another_one_is_under_way() -> None:
    world = World(S.COLOCATED, S.COLOCATED)
    crash(world, 0, back_ns=0)
    world.until(0.0)
    replica = world.actor(0)
    assert len(world.scaler.restored) == 1
    for state in (S.LOADING_COLOCATED, S.INACTIVE, S.LOADING_COLOCATED):
        replica.tell(ev.Commanded(to=state, writer="planner", cause="test"))
    world.until(5.0)
    assert len(world.scaler.restored) == 1


def test_a_process_that_another_has_brought_back_is_not_restarted() -> None:
    world = World(S.COLOCATED, S.COLOCATED)
    crash(world, 0, back_ns=10**9)
    world.actor(0).tell(ev.Restarted(life=world.replicas[0].incarnation))
    world.until(1.0)
    assert world.scaler.restored == []
    told = [type(event) for event in world.actor(0).told]
    assert told.count(ev.Restarted) == 1


def test_a_drain_has_a_grace_of_its_state_and_no_longer() -> None:
    world = World(S.PREFILL, S.DECODE, drain_grace_s=0.5)
    decode = world.actor(1)
    decode.tell(ev.Commanded(to=S.SHUTTING_DECODE, writer="planner", cause="test"))
    world.until(0.49)
    assert decode.posted == []
    world.until(0.5)
    assert [type(event) for event in decode.posted] == [ev.DrainExpired]


def test_a_replica_that_came_back_keeps_what_it_has() -> None:
    world = World(S.PREFILL, S.DECODE, drain_grace_s=0.5)
    decode = world.actor(1)
    decode.tell(ev.Commanded(to=S.SHUTTING_DECODE, writer="planner", cause="test"))
    decode.tell(ev.Commanded(to=S.AUS_DECODE, writer="planner", cause="test"))
    world.until(0.5)
    assert decode.posted == []


def test_a_drain_that_began_anew_has_the_whole_grace_again() -> None:
    """The end of the first drain's grace comes while the second one is under way."""
    world = World(S.PREFILL, S.DECODE, drain_grace_s=0.5)
    decode = world.actor(1)
    decode.tell(ev.Commanded(to=S.SHUTTING_DECODE, writer="planner", cause="test"))
    world.until(0.3)
    decode.tell(ev.Commanded(to=S.AUS_DECODE, writer="planner", cause="test"))
    decode.boundary()
    assert world.states[1] is S.DECODE
    decode.tell(ev.Commanded(to=S.SHUTTING_DECODE, writer="planner", cause="test"))
    world.until(0.5)
    assert decode.posted == []
    world.until(0.8)
    assert [type(event) for event in decode.posted] == [ev.DrainExpired]


def test_an_expired_drain_loses_what_waits_to_leave_too() -> None:
    world = World(S.SHUTTING_PREFILL, S.DECODE)
    watcher, batch, own = world.watcher(0), world.held(0, 1), request(2)
    watcher.append(batch, 100)
    world.recovery.drain_expired(world.replicas[0], [own])
    assert [(r, why) for r, why in world.recorder.losses] == [
        (own, "drain_expired"),
        (batch[0], "drain_expired"),
    ]


# --- when nothing can serve any more ----------------------------------------------------------
def test_nothing_is_failed_while_nothing_was_lost() -> None:
    world = World(S.DECODE)
    world.gateway.held = [request(1)]
    assert not world.recovery.fail_unservable()


def test_held_and_queued_requests_fail_when_no_replica_reads_prompts() -> None:
    world = World(S.PREFILL, S.DECODE, replace=False)
    held, queued = request(1), request(2)
    crash(world, 0)
    world.gateway.held = [held]
    world.queue = FakeQueue([queued])
    assert world.recovery.fail_unservable()
    assert world.ends == [(r, Status.FAILED, "no_replica_left") for r in (held, queued)]
    assert list(world.queue) == []
    assert not world.recovery.fail_unservable()


def test_replicas_of_another_model_serve_nobody_who_waits_for_this_one() -> None:
    world = World(S.PREFILL, S.DECODE, S.PREFILL, S.DECODE, replace=False)
    for replica in world.replicas[2:]:
        replica.model = 1
    held, other = request(1), request(2)
    other.model = 1
    crash(world, 0)
    world.gateway.held = [held, other]
    assert world.recovery.fail_unservable()
    assert world.ends == [(held, Status.FAILED, "no_replica_left")]
    assert world.gateway.held == [other]
    world.replicas[1].lock.try_acquire("another")
    watcher, batch = world.watcher(2), world.held(2, 3)
    crash(world, 3)
    watcher.append(batch, 100)
    assert world.recovery.fail_unservable()
    assert world.ends[1:] == [(batch[0], Status.FAILED, "no_replica_left")]


def test_outbound_kv_fails_when_no_replica_could_take_it() -> None:
    world = World(S.PREFILL, S.DECODE, replace=False)
    watcher, batch = world.watcher(0), world.held(0, 1)
    crash(world, 1)
    watcher.append(batch, 100)
    assert world.recovery.fail_unservable()
    assert world.ends == [(batch[0], Status.FAILED, "no_replica_left")]
    assert watcher.unfinished == 0


def test_outbound_kv_waits_for_one_that_could() -> None:
    world = World(S.PREFILL, S.DECODE, S.DECODE, replace=False)
    world.replicas[2].lock.try_acquire("another")
    watcher, batch = world.watcher(0), world.held(0, 1)
    crash(world, 1)
    watcher.append(batch, 100)
    assert not world.recovery.fail_unservable()
    assert watcher.unfinished == 1


def test_a_replica_that_would_be_full_with_it_could_take_it() -> None:
    world = World(S.PREFILL, S.DECODE, S.DECODE, blocks=8, replace=False)
    world.replicas[1].lock.try_acquire("another")
    watcher, (exact,) = world.watcher(0), world.held(0, 1, prompt=8)
    crash(world, 2)
    watcher.append([exact], 100)
    assert not world.recovery.fail_unservable()
    world.benches[1].scheduler.blocks_total = 7
    assert world.recovery.fail_unservable()


# --- where requests are -----------------------------------------------------------------------
def places(world: World) -> list[tuple[int, str, str]]:
    return [(p.request.request_id, p.stage, p.holder) for p in census(world)]  # type: ignore[arg-type]


def test_every_request_is_found_once_at_its_owner() -> None:
    world = World(S.PREFILL, S.DECODE)
    world.gateway.held, world.gateway.taking = [request(1)], [request(2)]
    world.gateway.at_doors = {10: request(10)}
    world.queue = FakeQueue([request(3)])
    world.benches[0].scheduler.queue.append(request(4))
    prompt = request(5)
    world.benches[0].scheduler.running.append(prompt)
    world.benches[1].running(6)
    world.actor(1).post(ev.KvDelivered(requests=world.held(1, 7)))
    watcher = world.watcher(0)
    watcher.append(world.held(0, 8), 100)
    watcher.append(world.held(0, 9), 100)
    assert places(world) == [
        (1, "queued", "gateway"),
        (2, "queued", "front end"),
        (10, "queued", "feature"),
        (3, "queued", "global queue"),
        (4, "queued", "replica 0"),
        (5, "prefill", "replica 0"),
        (6, "prefill", "replica 1"),
        (7, "decode", "replica 1 (arrived)"),
        (9, "migration", "watcher 0"),
        (8, "migration", "watcher 0"),
    ]


def test_requests_that_have_ended_are_nowhere() -> None:
    world = World(S.DECODE)
    (one,) = world.benches[0].running(1)
    one.status = Status.COMPLETED
    assert places(world) == []


def test_a_split_batch_is_counted_once_though_two_machines_hold_a_half() -> None:
    world = World(S.NEW_PREFILL, S.OLD_PREFILL, S.DECODE)
    first, second = world.watcher(0), world.watcher(1)
    split = SplitBatch(4, world.held(0, 1), 1, 4, 0)
    world.replicas[2].lock.try_acquire("another")
    first.append_first(split)
    second.append_second(split, split.requests)
    assert splits(world) == [split]  # type: ignore[arg-type]
    assert places(world) == [(1, "between_halves", "split")]


def test_a_split_batch_that_is_not_computed_yet_is_with_its_helper() -> None:
    world = World(S.NEW_PREFILL, S.OLD_PREFILL, S.DECODE)
    split = SplitBatch(4, world.held(0, 1), 1, 4, 0)
    world.watcher(0).append_first(split)
    assert splits(world) == [split]  # type: ignore[arg-type]
    assert places(world) == []


def test_a_request_in_the_middle_of_a_leap_is_where_stepping_would_have_it() -> None:
    world = World(S.COLOCATED)
    world.benches[0].running(1, output=9)
    bench = world.benches[0]
    bench.scheduler.leap = 8
    bench.step()
    world.kernel.now_ns = bench.due_ns // 2
    bench.scheduler.settled = 0
    places(world)
    assert bench.scheduler.settled > 0, "its books are brought up to now first"


def test_a_request_stopped_by_a_live_move_is_found_there() -> None:
    class Moving:
        def __init__(self, request: Request) -> None:
            self.moving: dict[int, Any] = {0: request}

        def lose(self, replica: Any) -> list[Request]:
            return [self.moving.pop(replica.replica_id)]

        def forget(self, request: Request) -> None:
            """It moves no more."""

    world = World(S.DECODE, S.DECODE)
    one = request(1)
    one.status = Status.MIGRATING
    world.live = Moving(one)  # type: ignore[assignment]
    assert places(world) == [(1, "migration", "live migration")]
    crash(world, 0)
    assert world.gateway.routed == [one]


def test_loading_states_are_those_that_a_load_can_give_up() -> None:
    for state in LOADING:
        world = World(state)
        world.actor(0).tell(ev.LoadGivenUp(cause="test"))
        assert world.states == [S.INACTIVE]


def test_a_second_half_is_lost_with_its_source() -> None:
    world = World(S.NEW_PREFILL, S.OLD_PREFILL, S.DECODE)
    first, second = world.watcher(0), world.watcher(1)
    split = SplitBatch(4, world.held(0, 1), 1, 4, 0)
    first.append_first(split)
    second.append_second(split, split.requests)
    world.relay.olds = world.relay.relay_deactive = 1
    crash(world, 1)
    assert split.is_dropped
    assert world.gateway.routed == split.requests
    assert (first.unfinished, second.unfinished) == (0, 0)
