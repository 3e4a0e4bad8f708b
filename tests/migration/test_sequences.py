"""Random sequences of what may happen to outbound KV: nothing is lost, freed twice or forgotten.

Two sources and two destinations, real watchers and machines, no kernel and no cluster. Transfers
end, fail or are told twice; destinations refuse, fill up and crash; sources crash; clients leave.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emu.migration.messages import DestinationLost, SplitLost
from emu.replica.events import Crashed, KvDelivered
from emu.replica.split_batch import SplitBatch
from emu.replica.states import ReplicaState
from emu.request import Request, Status
from tests.migration.fakes import FakeWorld, Sent

pytestmark = pytest.mark.doubles
S = ReplicaState
SOURCES, DESTINATIONS = (0, 1), (2, 3)


class Traffic:
    """Prompts that end at two prefill replicas, and all that may befall their KV."""

    def __init__(self, blocks: int, lease_ns: int) -> None:
        self.world = FakeWorld(S.PREFILL, S.PREFILL, S.DECODE, S.DECODE, blocks=blocks)
        self.watchers = [self.world.watcher(source, lease_ns) for source in SOURCES]
        self.requests: list[Request] = []
        self.computing: list[tuple[SplitBatch, int, int]] = []
        """Split batches whose second part runs: (split, first source, second source)."""
        self.crashed: list[Request] = []
        self.others: list[tuple[int, Request]] = []
        self.leaving: list[Request] = []
        self.delivered: list[Request] = []
        """Requests that have decoded at their destination, which is free again."""

    # --- what happens ---------------------------------------------------------------------------
    def prompts(self, number: int) -> None:
        """A batch of prompts has ended at a source."""
        source = number % 2
        if self.world.replicas[source].state is not S.PREFILL:
            return
        ids = range(len(self.requests) + 1, len(self.requests) + 2 + number % 3)
        batch = self.world.held(source, *ids, prompt=2 + number % 5)
        self.requests += batch
        self.watchers[source].append(batch, 100)

    def split(self, number: int) -> None:
        """A batch goes from one source to the other after some layers."""
        source, taker = number % 2, 1 - number % 2
        if any(self.world.replicas[one].state is not S.PREFILL for one in SOURCES):
            return
        ids = range(len(self.requests) + 1, len(self.requests) + 2 + number % 2)
        batch = self.world.held(source, *ids)
        for request in batch:
            self.world.benches[taker].scheduler.detached.append(request)
            request.holder_id = taker
        self.requests += batch
        split = SplitBatch(self.world.next_batch_id(), batch, 1, 2, self.world.kernel.now_ns)
        self.computing.append((split, source, taker))
        self.watchers[source].append_first(split)

    def second(self, number: int) -> None:
        """The second part of a split batch has been computed; some clients may have left."""
        if not self.computing:
            return
        split, _, taker = self.computing.pop(number % len(self.computing))
        for request in split.requests:
            if request in self.leaving and not request.status.is_terminal:
                self.world.terminal(request, Status.CANCELLED, "client_left")
        goes_on = [r for r in split.requests if not r.status.is_terminal]
        self.watchers[taker].append_second(split, goes_on)
        for request in split.requests:
            if request not in goes_on:
                self.world.benches[taker].scheduler.release(request)

    def _open(self) -> list[Sent]:
        return [sent for sent in self.world.sent if not sent.is_cancelled]

    def done(self, number: int) -> None:
        """A transfer has ended; every third time that is told twice."""
        if not self._open():
            return
        sent = self._open()[number % len(self._open())]
        self.world.sent.remove(sent)
        sent.on_done()
        if number % 3 == 0:
            sent.on_done()

    def failed(self, number: int) -> None:
        """A transfer has failed."""
        if self._open():
            sent = self._open()[number % len(self._open())]
            self.world.sent.remove(sent)
            sent.on_failed("broken")

    def cancel(self, number: int) -> None:
        """A client leaves, as the cluster carries it out."""
        if not self.requests:
            return
        request = self.requests[number % len(self.requests)]
        if request.status is not Status.MIGRATING or request.holder_id not in SOURCES:
            return
        if any(request in split.requests for split, *_ in self.computing):
            self.leaving.append(request)  # its helper sees that when it ends the batch
        elif self.watchers[request.holder_id].cancel(request):
            self.world.terminal(request, Status.CANCELLED, "client_left")

    def fill(self, number: int) -> None:
        """Other requests take blocks of a destination, or give them back."""
        if self.others and number % 2:
            place, other = self.others.pop()
            self.world.benches[place].scheduler.running.remove(other)
        else:
            place = DESTINATIONS[number % 2]
            scheduler = self.world.benches[place].scheduler
            other = Request(
                request_id=10_000 + number,
                arrival_ns=0,
                prompt_tokens=4,
                output_tokens=4,
                max_output_tokens=4,
            )
            if self.world.replicas[place].state is S.DECODE and scheduler.blocks_used + 4 < 20:
                scheduler.running.append(other)
                self.others.append((place, other))
        self.look()

    def refuse(self, number: int) -> None:
        """A fault makes destinations refuse, or no longer."""
        self.world.refusing = number % 2 == 0
        self.look()

    def lose_destination(self, number: int) -> None:
        """A destination crashes."""
        place = DESTINATIONS[number % 2]
        replica = self.world.replicas[place]
        if replica.state is not S.DECODE:
            return
        self.others = [(at, other) for at, other in self.others if at != place]
        self.decode()
        lost: list[Request] = []
        replica.actor.tell(Crashed(lost=lost))
        self.crashed += [r for r in lost if r in self.requests]
        replica.state = S.FAILED
        replica.note_state()
        for watcher in self.watchers:
            watcher.tell(DestinationLost(place))

    def lose_source(self, number: int) -> None:
        """A source crashes: its KV, and the other parts of batches that it was computing."""
        source = number % 2
        replica = self.world.replicas[source]
        if replica.state is not S.PREFILL:
            return
        replica.actor.tell(Crashed(lost=[]))
        for split, first, taker in list(self.computing):
            if taker == source:
                self.computing.remove((split, first, taker))
                self.crashed += [r for r in split.requests if not r.status.is_terminal]
                self.watchers[first].tell(SplitLost(split))
        self.crashed += self.watchers[source].lose_source()
        replica.state = S.FAILED
        replica.note_state()

    def time(self, number: int) -> None:
        """The next timer comes: a pause or a lease is over."""
        if self.world.kernel.timers:
            self.world.kernel.ring()

    def decode(self) -> None:
        """What has been delivered decodes to its end, and its blocks are free."""
        for place in DESTINATIONS:
            replica, scheduler = self.world.replicas[place], self.world.benches[place].scheduler
            while replica.mailbox.posted:
                event = replica.mailbox.posted.popleft()
                assert isinstance(event, KvDelivered)
                assert all(r in scheduler.reserved for r in event.requests)
                scheduler.unreserve(event.requests)
                self.delivered += event.requests

    def look(self) -> None:
        """Watchers that have been woken, or that wait for a destination, look."""
        self.world.kernel.woken.clear()
        for watcher in self.watchers:
            watcher.tick()

    # --- what must hold -------------------------------------------------------------------------
    def check(self) -> None:
        """After every event."""
        for source, watcher in zip(SOURCES, self.watchers, strict=True):
            outbound = watcher.outbound
            assert outbound.unfinished == len(outbound.batches()) + len(outbound.splits())
            held = [r for batch in outbound.batches() for r in batch.requests]
            assert outbound.batch_tokens == sum(r.prompt_tokens for r in held)
            assert len(held) == len(set(map(id, held))), "a request is in two batches"
            kept = self.world.benches[source].scheduler.detached
            assert all(r in kept for r in held if not r.status.is_terminal)
        for place in DESTINATIONS:
            replica = self.world.replicas[place]
            flights = [w.outbound.flight for w in self.watchers]
            here = [f for f in flights if f is not None and f.destination_id == place]
            assert len(here) <= 1, "two batches reserve at one destination"
            if here:
                assert replica.lock.is_held

    def settle(self) -> None:
        """Let everything come to its end."""
        self.world.refusing = False
        if all(self.world.replicas[place].state is S.FAILED for place in DESTINATIONS):
            for source in SOURCES:  # nothing could ever take what waits
                self.lose_source(source)
        for _ in range(200):
            while self.computing:
                self.second(0)
            while self._open():
                self.done(1)
            self.decode()
            self.look()
            if self.world.kernel.timers:
                self.world.kernel.ring()
            elif not self._open():
                return
        raise AssertionError("it does not come to rest")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["prompts"] * 5
            + ["done"] * 5
            + ["split", "split", "second", "second", "failed", "failed", "cancel", "cancel"]
            + ["fill", "refuse", "time", "lose_destination", "lose_source"]
        ),
        st.integers(min_value=0, max_value=20),
    ),
    max_size=40,
)
many = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def run(sequence: list[tuple[str, int]], blocks: int = 60, lease_ns: int = 0) -> Traffic:
    made = Traffic(blocks, lease_ns)
    for what, number in sequence:
        getattr(made, what)(number)
        made.check()
    made.settle()
    made.check()
    return made


def outcomes(made: Traffic) -> Counter[int]:
    """How often each request has been delivered, lost or ended."""
    lost = [request for requests, _ in made.world.losses for request in requests]
    ended = [request for request, *_ in made.world.ends]
    # A crash of the destination finds again what had been delivered there.
    again = [r for r in made.crashed if r in made.delivered]
    everything = [*made.delivered, *lost, *made.crashed, *ended]
    for request in again:
        everything.remove(request)
    return Counter(request.request_id for request in everything)


@many
@given(STEPS)
def test_every_request_is_delivered_lost_or_ended_once(sequence: list[tuple[str, int]]) -> None:
    made = run(sequence)
    assert outcomes(made) == Counter(r.request_id for r in made.requests)


@many
@given(STEPS)
def test_at_rest_nothing_is_held_for_what_is_gone(sequence: list[tuple[str, int]]) -> None:
    made = run(sequence)
    for source, watcher in zip(SOURCES, made.watchers, strict=True):
        outbound = watcher.outbound
        assert (outbound.unfinished, outbound.tokens, outbound.flight) == (0, 0, None)
        assert made.world.benches[source].scheduler.detached == []
    for place in DESTINATIONS:
        replica = made.world.replicas[place]
        assert not replica.lock.holder.startswith("watcher")
        assert made.world.benches[place].scheduler.reserved == []


@many
@given(STEPS, st.integers(min_value=1, max_value=10**8))
def test_a_lease_loses_what_waits_too_long_and_nothing_else(
    sequence: list[tuple[str, int]], lease_ns: int
) -> None:
    made = run(sequence, lease_ns=lease_ns)
    assert outcomes(made) == Counter(r.request_id for r in made.requests)
    assert made.world.tokens_in_migration == 0


@many
@given(STEPS)
def test_where_memory_is_short_batches_are_divided_and_none_is_forgotten(
    sequence: list[tuple[str, int]],
) -> None:
    made = run(sequence, blocks=14)
    assert outcomes(made) == Counter(r.request_id for r in made.requests)


@many
@given(STEPS)
def test_the_same_events_give_the_same_actions(sequence: list[tuple[str, int]]) -> None:
    one, two = run(sequence), run(sequence)
    for first, second in zip(one.watchers, two.watchers, strict=True):
        assert first.describe() == second.describe()
    assert [(r.request_id, s, why) for r, s, why in one.world.ends] == [
        (r.request_id, s, why) for r, s, why in two.world.ends
    ]
    assert one.world.capacity == two.world.capacity
