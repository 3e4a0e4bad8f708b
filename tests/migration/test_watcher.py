"""The outbound queue of a prefill replica, without kernel and cluster: each rule a claim."""

from __future__ import annotations

import pytest

from emu.migration.messages import DestinationLost
from emu.replica.events import KvDelivered
from emu.replica.split_batch import SplitBatch
from emu.replica.states import ReplicaState
from emu.request import Status
from tests.migration.fakes import FakeWorld

pytestmark = pytest.mark.doubles

S = ReplicaState


def used(world: FakeWorld) -> list[int]:
    return [bench.scheduler.blocks_used for bench in world.benches]


def test_a_batch_reserves_locks_and_moves() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    watcher, batch = world.watcher(), world.held(0, 1, 2)
    watcher.append(batch, 100)
    assert used(world) == [8, 8]
    assert (world.replicas[1].lock.holder, world.sent[0].size_bytes) == ("watcher 0", 2 * 8 * 10)
    assert (watcher.unfinished, world.tokens_in_migration) == (1, 8)


def test_at_its_end_the_source_is_free_and_the_destination_has_it_before_it_opens() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    watcher, batch = world.watcher(), world.held(0, 1)
    watcher.append(batch, 100)
    world.kernel.now_ns = 50
    actor = world.actor(1)
    seen: list[str] = []
    post = actor.post
    actor.post = lambda event: (seen.append(world.replicas[1].lock.holder), post(event))[0]  # type: ignore[assignment]
    world.sent[0].on_done()
    assert seen == ["watcher 0"]
    assert used(world) == [0, 4]
    (event,) = actor.posted
    assert isinstance(event, KvDelivered)
    assert (event.requests, batch[0].migration_ns, batch[0].holder_id) == (batch, 50, 1)
    assert (world.replicas[1].lock.holder, world.capacity) == ("", [1])
    assert (watcher.unfinished, world.tokens_in_migration, world.transfers) == (0, 0, 1)


def test_a_second_notice_of_the_same_end_is_ignored() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    watcher = world.watcher()
    watcher.append(world.held(0, 1), 100)
    world.sent[0].on_done()
    world.sent[0].on_done()
    assert (watcher.unfinished, len(world.actor(1).posted)) == (0, 1)


def test_a_late_notice_of_an_earlier_attempt_is_ignored() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    watcher = world.watcher()
    watcher.append(world.held(0, 1), 100)
    world.sent[0].on_failed("broken")
    world.sent[0].on_done()
    assert (watcher.unfinished, world.actor(1).posted) == (1, [])


def test_one_batch_is_on_its_way_and_the_next_waits_for_it() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE, S.DECODE)
    watcher = world.watcher()
    watcher.append(world.held(0, 1), 100)
    watcher.append(world.held(0, 2), 100)
    assert len(world.sent) == 1
    world.sent[0].on_done()
    assert [sent.pair for sent in world.sent] == [(0, 1), (0, 1)]


def test_without_a_destination_it_is_stuck_until_something_changes() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    world.replicas[1].lock.try_acquire("another")
    watcher = world.watcher()
    watcher.append(world.held(0, 1), 100)
    assert (world.sent, world.stuck, world.scarce_decode) == ([], [0], True)
    world.replicas[1].lock.release("another")
    watcher.tick()
    assert (len(world.sent), world.stuck, world.scarce_decode) == (1, [], False)


def test_a_batch_that_no_replica_could_hold_is_divided() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE, blocks=10)
    watcher, batch = world.watcher(), world.held(0, 1, 2, 3, prompt=4)
    watcher.append(batch, 100)
    assert (watcher.unfinished, len(world.sent)) == (2, 1)
    assert [r.request_id for r in watcher.outbound.queue[0].requests] == [2, 3]


def test_a_request_that_no_replica_could_hold_fails() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE, blocks=10)
    world.benches[1].scheduler.blocks_total = 3
    watcher, (one,) = world.watcher(), world.held(0, 1)
    watcher.append([one], 100)
    assert world.ends == [(one, Status.FAILED, "no_decode_replica_holds_it")]
    assert (used(world)[0], watcher.unfinished, world.tokens_in_migration) == (0, 0, 0)


def test_a_failed_transfer_gives_back_and_tries_again_then_is_lost() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    watcher, batch = world.watcher(), world.held(0, 1)
    watcher.append(batch, 100)
    world.sent[0].on_failed("broken")
    assert (len(world.sent), used(world)) == (2, [4, 4])
    world.sent[1].on_failed("broken")
    assert world.losses == [(batch, "broken")]
    assert (used(world), world.replicas[1].lock.holder) == ([0, 0], "")
    assert (watcher.unfinished, world.tokens_in_migration) == (0, 0)


def test_a_destination_that_has_failed_is_tried_last() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE, S.DECODE)
    watcher = world.watcher()
    watcher.append(world.held(0, 1), 100)
    world.sent[0].on_failed("broken")
    assert [sent.pair for sent in world.sent] == [(0, 1), (0, 2)]


def test_a_lost_destination_is_no_attempt_and_the_batch_goes_first() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE, S.DECODE)
    watcher, batch = world.watcher(), world.held(0, 1)
    watcher.append(batch, 100)
    watcher.append(world.held(0, 2), 100)
    world.replicas[1].state = S.FAILED
    watcher.tell(DestinationLost(1))
    assert world.sent[0].is_cancelled
    assert world.replicas[1].lock.holder == ""
    flight = watcher.outbound.flight
    assert flight is not None
    assert (flight.batch.requests, flight.batch.attempts) == (batch, 0)


def test_a_lost_source_frees_everything_and_says_what_was_lost() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    watcher = world.watcher()
    flying, queued = world.held(0, 1), world.held(0, 2)
    watcher.append(flying, 100)
    watcher.append(queued, 100)
    assert watcher.lose_source() == [*flying, *queued]
    assert world.sent[0].is_cancelled
    assert (used(world), world.replicas[1].lock.holder) == ([0, 0], "")
    assert (watcher.unfinished, world.tokens_in_migration) == (0, 0)
    assert [r.recomputed_tokens for r in (*flying, *queued)] == [5, 5]


def test_a_queued_request_whose_client_leaves_is_free_at_once() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    world.replicas[1].lock.try_acquire("another")
    watcher, (one,) = world.watcher(), world.held(0, 1)
    watcher.append([one], 100)
    assert watcher.cancel(one)
    assert (used(world)[0], watcher.unfinished, world.actor(0).looks) == (0, 0, 1)
    assert not watcher.cancel(one)


def test_a_transfer_that_no_request_waits_for_is_stopped() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    watcher, (one,) = world.watcher(), world.held(0, 1)
    watcher.append([one], 100)
    assert watcher.cancel(one)
    assert world.sent[0].is_cancelled
    assert (used(world), world.replicas[1].lock.holder) == ([0, 0], "")


def test_a_transfer_goes_on_for_those_that_are_left() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    watcher, (one, two) = world.watcher(), world.held(0, 1, 2)
    watcher.append([one, two], 100)
    assert watcher.cancel(one)
    one.status = Status.CANCELLED
    world.sent[0].on_done()
    (event,) = world.actor(1).posted
    assert (event.requests, used(world)) == ([two], [0, 4])  # type: ignore[attr-defined]


def test_a_refused_batch_pauses_whatever_changes_then_is_lost() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    world.refusing = True
    watcher, batch = world.watcher(), world.held(0, 1)
    watcher.append(batch, 100)
    watcher.tick()
    assert (watcher.outbound.is_pausing, len(world.kernel.timers)) == (True, 1)
    world.kernel.ring()
    assert world.kernel.woken == ["watcher 0"]
    watcher.tick()
    assert world.losses == [(batch, "destination_refused")]


def test_a_flushed_batch_stays() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    world.replicas[1].lock.try_acquire("another")
    watcher, batch = world.watcher(), world.held(0, 1)
    watcher.append(batch, 100)
    assert watcher.flush() == [batch]
    assert (used(world)[0], watcher.unfinished, world.tokens_in_migration) == (4, 0, 0)


def test_a_lease_gives_up_what_waits_but_not_what_is_on_its_way() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    watcher, flying, queued = world.watcher(lease_ns=30), world.held(0, 1), world.held(0, 2)
    watcher.append(flying, 100)
    watcher.append(queued, 100)
    world.kernel.ring()
    assert world.kernel.now_ns == 30
    assert world.losses == [(queued, "lease_expired")]
    assert watcher.outbound.flight is not None


# --- halves -----------------------------------------------------------------------------------
def halves() -> tuple[FakeWorld, SplitBatch]:
    """A batch of which replica 0 has computed a quarter, and replica 1 the rest; both have KV."""
    world = FakeWorld(S.NEW_PREFILL, S.OLD_PREFILL, S.DECODE)
    first, second = world.watcher(0), world.watcher(1)
    split = SplitBatch(4, world.held(0, 1), 1, 4, 0)
    first.append_first(split)
    world.benches[1].scheduler.detached += split.requests
    second.append_second(split, split.requests)
    return world, split


def test_two_halves_travel_from_two_replicas_to_one() -> None:
    world, _ = halves()
    assert [(sent.pair, sent.size_bytes) for sent in world.sent] == [((0, 2), 20), ((1, 2), 60)]
    assert used(world) == [4, 4, 4]
    assert world.replicas[2].lock.holder == "watcher 0"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_is_delivered_is_the_whole_batch_when_both_halves_are_there(
    order: tuple[int, int],
) -> None:
    world, split = halves()
    one, other = order
    world.kernel.now_ns = 30
    world.sent[one].on_done()
    assert world.actor(2).posted == []
    assert (used(world)[one], used(world)[other]) == (0, 4), "each source is free with its half"
    world.kernel.now_ns = 50
    world.sent[other].on_done()
    (event,) = world.actor(2).posted
    assert isinstance(event, KvDelivered)
    assert event.requests == split.requests
    assert split.requests[0].holder_id == 2
    assert used(world) == [0, 0, 4]
    assert world.replicas[2].lock.is_free
    assert (world.transfers, world.capacity[-1]) == (2, 2)
    assert [w.unfinished for w in world.watchers.values()] == [0, 0]
    assert world.tokens_in_migration == 0


def test_between_its_halves_others_may_bring_kv_but_the_replica_cannot_close() -> None:
    world, _ = halves()
    lock = world.replicas[2].lock
    world.sent[0].on_done()
    assert lock.try_acquire("another source")
    lock.release("another source")
    assert not lock.request("replica 2", lambda: None)
    world.sent[1].on_done()
    assert lock.holder == "replica 2"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_half_that_does_not_arrive_loses_the_batch_and_frees_all_three(failing: int) -> None:
    world, split = halves()
    world.sent[failing].on_failed("broken")
    assert world.losses == [(split.requests, "broken")]
    assert world.sent[1 - failing].is_cancelled
    assert used(world) == [0, 0, 0]
    assert world.replicas[2].lock.is_free
    assert [w.unfinished for w in world.watchers.values()] == [0, 0]
    assert world.actor(2).posted == []


def test_a_client_that_leaves_stops_both_halves() -> None:
    world, split = halves()
    assert world.watchers[0].cancel(split.requests[0])
    assert [sent.is_cancelled for sent in world.sent] == [True, True]
    assert used(world) == [0, 0, 0]
    assert (world.losses, world.tokens_in_migration) == ([], 0)


# --- what waits, and what it says ---------------------------------------------------------------
def test_a_request_whose_place_is_named_later_is_looked_at_then() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    watcher, (one,) = world.watcher(), world.held(0, 1)
    one.handoff_after_ns = 40
    watcher.append([one], 100)
    assert world.sent == []
    world.kernel.ring()
    assert (world.kernel.now_ns, world.kernel.woken[-1:]) == (40, [watcher.name])
    watcher.tick()
    assert [sent.pair for sent in world.sent] == [(0, 1)]


def test_a_transfer_that_sets_out_is_told_to_what_wants_to_know() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    told: list[tuple[list[int], int, int]] = []
    world.on_sent = lambda batch, source, destination: told.append(  # type: ignore[assignment]
        ([r.request_id for r in batch.requests], source.replica_id, destination.replica_id)
    )
    watcher = world.watcher()
    watcher.append(world.held(0, 1, 2), 100)
    watcher.append(world.held(0, 3), 100)
    assert told == [([1, 2], 0, 1)], "the second batch waits"
    world.sent[0].on_done()
    assert told == [([1, 2], 0, 1), ([3], 0, 1)]


def test_a_story_names_the_watcher_and_what_it_holds() -> None:
    world = FakeWorld(S.PREFILL, S.DECODE)
    watcher = world.watcher()
    watcher.append(world.held(0, 1), 100)
    watcher.append(world.held(0, 2), 100)
    assert watcher.describe() == ("watcher 0: waiting [2], 1 requests on their way to replica 1")
