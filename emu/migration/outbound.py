"""Outbound KV of one replica as a machine: events in, actions out.

Owns the batches whose prompts ended at one source, and the halves of split batches that it computed
(BlitzScale 3.4, 4.8). `HANDLERS[kind][stage]` is what happens; a pair without a handler is a bug of
its sender and raises `UnexpectedEvent`; `ignore` may come and means nothing. The machine awaits
nothing, acts on nothing and knows no replica: its watcher (`watcher.py`) applies its actions. Two
questions are answered at once, because their answers decide the next line: `Search.take` (a
destination, locked and with blocks reserved) and the id of a new batch.

Full batches: at most one is on its way; they leave in the order in which their prompts ended, each
to a destination of its choice. Halves: the first one, layers [0, k), leaves the new replica while
the old one still computes; its machine owns the split batch, chooses the destination, locks it and
reserves the blocks of the whole batch once. When the first half is there, the destination is open
for others again, but it cannot close (`holds_halves`: it stays locked, as in the original). The
second half, layers [k, L), leaves the old replica for the same destination when the prompt is done.
What is delivered is one batch, when both halves are there. At most one half of a source is on its
way, the smallest batch id first; a half without a destination waits without holding up anything
else. A batch whose requests all end at their first token sends no second half.

The delivery to the destination comes before its lock is released, always. A pause (every
destination refused) is one flag for both parts: what is on its way ends as usual, and nothing new
starts.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, final

from emu.errors import UnexpectedEvent
from emu.migration.messages import (
    Action,
    ArmLease,
    Cancelled,
    CancelTransfer,
    Deliver,
    DestinationLost,
    End,
    Event,
    FirstComputed,
    Flushed,
    FreeCapacity,
    HalfDone,
    HalfFailed,
    HalfForgotten,
    HalvesOffered,
    HandOver,
    Kind,
    LookAt,
    Lose,
    Offer,
    OfferBatch,
    OfferHalves,
    Pause,
    Pin,
    PromptsDone,
    Record,
    Release,
    SecondArrived,
    SecondComputed,
    SecondKnown,
    Send,
    SetStuck,
    SourceLost,
    SplitLost,
    Tell,
    TransferDone,
    TransferFailed,
    Unlock,
    Unpin,
    Unreserve,
    WakeSelf,
    WakeSource,
)
from emu.migration.transfer import MigratingBatch, kv_blocks, kv_bytes, prompt_tokens
from emu.replica.split_batch import SplitBatch
from emu.request import HANDOFF_NEVER_NS, Request, Status

RETRY_NS: Final = 10_000_000
"""The first pause after a refusal; it doubles with each attempt, up to 1,024 times."""


class Stage(enum.IntEnum):
    """Where full batches are, and where halves are: column of the table of handlers."""

    EMPTY = 0
    WAITING = 1
    """Something waits, and a change may give it a destination."""
    PAUSING = 2
    """Every destination refused: nothing starts before the pause is over."""
    SENDING = 3
    """One is on its way."""


class Search(Protocol):
    """The choice of a destination: a question, answered now."""

    was_full: bool
    """The last search found blocks for all requests, and places for fewer, at some destination."""
    was_refused: bool
    """The last search found only destinations that a fault makes refuse."""
    failures: dict[int, int]
    """How often a transfer has failed, by destination, since the last that did not."""

    def take(self, requests: list[Request]) -> int:
        """A replica whose lock and blocks are taken for these, or -1."""
        ...

    def none_could_hold(self, requests: list[Request]) -> bool:
        """True if not even an empty replica could."""
        ...

    def failed(self, destination_id: int) -> None:
        """A transfer there has failed: it is tried last."""
        ...

    def arrived(self, destination_id: int) -> None:
        """A transfer there went well."""
        ...

    def forget(self) -> None:
        """The source begins another life."""
        ...


class Kv(NamedTuple):
    """What the KV of a source costs to move."""

    block_size: int
    """Tokens."""
    bytes_per_token: int
    state_bytes: int = 0
    """Of the states of a sequence, whatever its length."""
    layerwise: bool = False
    """A transfer overlaps with the iteration that computed it."""
    connector_ns: int = 0
    """Of each handover, beside its bytes."""
    copies: Mapping[int, int] = MappingProxyType({})
    """Times that the ranks of a destination need it, by its id; absent = once. Latent KV is whole
    on each of them, a KV head on several where there are more of them than heads."""
    connector_block_ns: int = 0
    """The same of each block."""
    has_first_token: bool = False
    """The first token goes with the KV: the decode side delivers it."""
    holds_halves: bool = False
    """The destination stays locked from the first half's start to the second's arrival."""


@final
class Flight:
    """A full batch on its way."""

    def __init__(self, batch: MigratingBatch, destination_id: int, number: int) -> None:
        self.batch = batch
        self.destination_id = destination_id
        self.number = number


@final
class HalfFlight:
    """A half on its way."""

    def __init__(self, split: SplitBatch, half: MigratingBatch, number: int) -> None:
        self.split = split
        self.half = half
        self.number = number


class Outbound:
    """State of the outbound KV of one replica."""

    __slots__ = (
        "attempts_max",
        "batch_tokens",
        "firsts",
        "flight",
        "half_flight",
        "has_handoffs",
        "is_batch_stuck",
        "is_half_stuck",
        "is_lease_armed",
        "is_pausing",
        "is_stuck",
        "kv",
        "lease_ns",
        "next_batch_id",
        "now_ns",
        "out",
        "queue",
        "search",
        "seconds",
        "sent",
        "source_id",
        "split_tokens",
        "unfinished",
    )

    def __init__(
        self,
        source_id: int,
        search: Search,
        kv: Kv,
        next_batch_id: Callable[[], int],
        *,
        attempts_max: int,
        lease_ns: int = 0,
    ) -> None:
        """`attempts_max`: a batch is given up after so many failures beyond the first."""
        self.source_id = source_id
        self.search = search
        self.kv = kv
        self.next_batch_id = next_batch_id
        self.attempts_max = attempts_max
        self.lease_ns = lease_ns
        self.queue: deque[MigratingBatch] = deque()
        self.flight: Flight | None = None
        self.firsts: list[SplitBatch] = []
        """First layers computed here, waiting for a destination; ascending id."""
        self.seconds: list[SplitBatch] = []
        """Other layers computed here, waiting for the first half to have found a destination."""
        self.half_flight: HalfFlight | None = None
        self.unfinished = 0
        """Batches that wait here or are on their way, halves included."""
        self.batch_tokens = 0
        """Prompt tokens of the full batches that wait here or are on their way."""
        self.split_tokens = 0
        """Prompt tokens of the split batches that this machine owns, wherever their halves are."""
        self.is_pausing = False
        self.is_batch_stuck = self.is_half_stuck = False
        """The last search of a full batch, of a half, found no destination."""
        self.is_stuck = False
        """Something waits for a change elsewhere, as the cluster has been told."""
        self.has_handoffs = False
        """Some of its batches wait for an outside router."""
        self.is_lease_armed = False
        self.sent = 0
        """Transfers started: the number of the last one."""
        self.now_ns = 0
        self.out: list[Action] = []

    def step(self, event: Event, now_ns: int) -> list[Action]:
        """Handle an event that happens now. Raises `UnexpectedEvent`."""
        kind = event.kind
        if kind > _LAST_OF_BATCHES:
            stage = self.half_stage
        elif self.flight is not None:  # as `stage`, which is asked for at every step
            stage = _SENDING
        elif self.is_pausing:
            stage = _PAUSING
        else:
            stage = _WAITING if self.queue else _EMPTY
        handler = HANDLERS[kind][stage]
        if handler is None:
            raise UnexpectedEvent(
                f"outbound KV of replica {self.source_id} is {stage.name.lower()} and does not "
                f"expect {event}",
                at_ns=now_ns,
                story=[self.describe()],
            )
        self.now_ns = now_ns
        handler(self, event)
        out, self.out = self.out, []
        return out

    @property
    def stage(self) -> Stage:
        """Where full batches are."""
        if self.flight is not None:
            return _SENDING
        if self.is_pausing:
            return _PAUSING
        return _WAITING if self.queue else _EMPTY

    @property
    def half_stage(self) -> Stage:
        """Where halves are."""
        if self.half_flight is not None:
            return _SENDING
        if self.is_pausing:
            return _PAUSING
        return _WAITING if self.firsts or self.seconds else _EMPTY

    @property
    def tokens(self) -> int:
        """Prompt tokens whose KV waits here for a migration or is on its way."""
        return self.split_tokens + self.batch_tokens

    def batches(self) -> list[MigratingBatch]:
        """Full batches that wait or are on their way."""
        found = list(self.queue)
        return found if self.flight is None else [*found, self.flight.batch]

    def splits(self) -> list[SplitBatch]:
        """Split batches of which a half waits here or leaves from here."""
        flying = [] if self.half_flight is None else [self.half_flight.split]
        return [*self.firsts, *self.seconds, *flying]

    def describe(self) -> str:
        """One line for a story."""
        waiting = "; ".join(
            ",".join(str(r.request_id) for r in batch.requests) for batch in self.queue
        )
        flying = ""
        if self.flight is not None:
            count = len(self.flight.batch.requests)
            flying = f", {count} requests on their way to replica {self.flight.destination_id}"
        splits = [split.batch_id for split in self.splits()]
        return f"waiting [{waiting}]{flying}{f', halves of batches {splits}' if splits else ''}"

    def offer(self) -> None:
        """Look for a destination of what waits: halves first, then the head of the queue."""
        if self.firsts or self.seconds:
            offer_halves(self)
            self.out.append(_OFFER_BATCH)
        else:
            self.offer_batch()

    def offer_batch(self) -> None:
        """Start the next transfer of a full batch if there is one and a destination."""
        if not self.queue or self.flight is not None or self.is_pausing:
            return
        if self.has_handoffs:
            batch, destination_id = self._choose()
            if batch is None:
                return
        else:
            batch = self.queue[0]
            destination_id = self.search.take(batch.requests)
        self.is_batch_stuck = destination_id < 0
        if self.is_batch_stuck or self.is_stuck:
            self.note_search()
        if destination_id >= 0:
            self.queue.remove(batch)
            self._start(batch, destination_id)
        elif self.search.none_could_hold(batch.requests) or (
            self.search.was_full and len(batch.requests) > 1
        ):
            self._divide(batch)
        elif self.search.was_refused:
            self._refused(batch)

    def note_search(self) -> None:
        """Remember whether something waits for a change."""
        is_stuck = self.is_batch_stuck or (self.is_half_stuck and bool(self.firsts))
        if is_stuck != self.is_stuck:
            self.is_stuck = is_stuck
            self.out.append(SetStuck(is_stuck))

    def _choose(self) -> tuple[MigratingBatch | None, int]:
        """The first batch that may leave and has a destination, or the first that may leave.

        Full batches leave in order, but for those whose place is given.
        """
        first: MigratingBatch | None = None
        for batch in self.queue:
            if batch.is_ready(self.now_ns):
                first = first or batch
                destination_id = self.search.take(batch.requests)
                if destination_id >= 0:
                    return batch, destination_id
                if batch.requests[0].decode_pin < 0:
                    break
        return first, -1

    def _start(self, batch: MigratingBatch, destination_id: int) -> None:
        kv = self.kv
        batch.started_ns = self.now_ns
        batch.kv_bytes = self._bytes_of(batch.requests, destination_id)
        setup_ns = kv.connector_ns
        if kv.connector_block_ns:
            blocks = sum([kv_blocks(r, kv.block_size) for r in batch.requests])
            setup_ns += kv.connector_block_ns * blocks
        self.sent += 1
        self.flight = Flight(batch, destination_id, self.sent)
        overlapped_ns = batch.prefill_ns if kv.layerwise else 0
        self.out.append(
            Send(batch, destination_id, self.sent, False, overlapped_ns, setup_ns),
        )

    def _divide(self, batch: MigratingBatch) -> None:
        """The first request goes alone, the others after it; one that fits nowhere fails."""
        first, *rest = batch.requests
        if rest:
            batch.requests = [first]
            tail = MigratingBatch(self.next_batch_id(), rest, batch.prefill_ns, batch.queued_ns)
            self.queue.insert(self.queue.index(batch) + 1, tail)
            self.unfinished += 1
        else:
            self.queue.remove(batch)
            self.give_up(batch)
            if not first.status.is_terminal:
                self.out.append(End(first, Status.FAILED, "no_decode_replica_holds_it"))
        self.out.append(OFFER)

    def _refused(self, batch: MigratingBatch) -> None:
        """Every destination refuses: again later, but not forever."""
        batch.attempts += 1
        if batch.attempts > self.attempts_max:
            self.queue.remove(batch)
            self.give_up(batch)
            self.out.append(Lose(batch.requests, "destination_refused"))
        self.pause(batch.attempts)

    def pause(self, attempts: int) -> None:
        """Offer nothing for a while, whatever changes."""
        if not self.is_pausing:
            self.is_pausing = True
            self.out.append(Pause(RETRY_NS << min(attempts, 10)))

    def give_up(self, batch: MigratingBatch) -> None:
        """Its KV is not sent: the source is free of it."""
        self.unfinished -= 1
        self.batch_tokens -= prompt_tokens(batch.requests)
        self.out += (Release(batch.requests), WAKE_SOURCE)

    def put_back(self, batch: MigratingBatch, destination_id: int) -> None:
        """Its transfer is over without arriving: the destination is free of it."""
        self.flight = None
        self.out += (Unreserve(destination_id, batch.requests), Unlock(destination_id))

    def try_again(self, batch: MigratingBatch, reason: str) -> None:
        """It goes to the head of the queue without those that ended, or is lost."""
        batch.attempts += 1
        gone = [r for r in batch.requests if r.status.is_terminal]
        if gone:
            self.out.append(Release(gone))
            self.batch_tokens -= prompt_tokens(gone)
            batch.requests = [r for r in batch.requests if not r.status.is_terminal]
        if batch.requests and batch.attempts <= self.attempts_max:
            self.queue.appendleft(batch)
            self.arm_lease()
            return
        self.give_up(batch)
        self.out.append(Lose(batch.requests, reason))

    def arm_lease(self) -> None:
        """Something may have begun to wait: its lease has an end."""
        if not self.lease_ns or self.is_lease_armed:
            return
        if self.out and self.out[-1] is _OFFER_BATCH:
            return  # when it is known what leaves now
        since_ns = [batch.queued_ns for batch in self.queue]
        since_ns += [split.queued_ns for split in self.firsts]
        if since_ns:
            self.is_lease_armed = True
            self.out.append(ArmLease(max(self.now_ns, min(since_ns) + self.lease_ns)))

    def start_first(self, split: SplitBatch) -> None:
        """The first half leaves for the destination that was just found."""
        half = self._half(split, split.requests)
        half.kv_bytes = half.kv_bytes * split.start_layer // split.layers
        self._send_half(split, half)
        if split.second_id >= 0:
            self.out.append(Tell(split.second_id, HALVES_OFFERED))

    def start_second(self, split: SplitBatch) -> None:
        """The second half follows the first."""
        assert split.survivors is not None
        half = self._half(split, split.survivors)
        half.kv_bytes -= half.kv_bytes * split.start_layer // split.layers
        self._send_half(split, half)

    def _half(self, split: SplitBatch, requests: list[Request]) -> MigratingBatch:
        """What moves for these requests, all layers."""
        size_bytes = self._bytes_of(requests, split.destination_id)
        return MigratingBatch(split.batch_id, requests, 0, split.queued_ns, self.now_ns, size_bytes)

    def _bytes_of(self, requests: list[Request], destination_id: int) -> int:
        kv = self.kv
        token_bytes = kv.bytes_per_token
        if destination_id in kv.copies:
            token_bytes *= kv.copies[destination_id]
        return kv_bytes(requests, kv.block_size, token_bytes, kv.state_bytes)

    def _send_half(self, split: SplitBatch, half: MigratingBatch) -> None:
        self.sent += 1
        self.half_flight = HalfFlight(split, half, self.sent)
        self.out.append(Send(half, split.destination_id, self.sent, is_half=True))

    def find_destination(self, split: SplitBatch) -> bool:
        """Take a destination for the whole batch."""
        wanted = [r for r in split.requests if not r.status.is_terminal]
        destination_id = self.search.take(wanted)
        self.is_half_stuck = destination_id < 0
        self.note_search()
        if destination_id >= 0:
            split.destination_id = destination_id
            split.reserved = wanted
            return True
        if self.search.was_refused:
            split.attempts += 1
            is_over = split.attempts > self.attempts_max
            self.pause(split.attempts)
            if is_over:
                self.lose_split(split, "destination_refused")
        return False

    def lose_split(self, split: SplitBatch, reason: str) -> None:
        """A half of it does not arrive: those that were to go on start again."""
        self.out.append(Lose(self.drop(split), reason))

    def drop(self, split: SplitBatch) -> list[Request]:
        """No request of it goes on, whatever owns it (those being computed: later)."""
        if split.first_id == self.source_id:
            self.drop_own(split)
        else:
            self.out.append(Tell(split.first_id, SplitLost(split)))
        return [r for r in split.survivors or () if not r.status.is_terminal]

    def drop_own(self, split: SplitBatch) -> None:
        """Stop what is on its way, free all blocks."""
        out = self.out
        split.is_dropped = True
        if not split.is_first_done:
            self.forget_half(split, split.requests)
        if split.second_id >= 0 and not split.is_second_done:
            out.append(Tell(split.second_id, HalfForgotten(split)))
        if split.destination_id < 0:
            self.split_tokens -= prompt_tokens(split.requests)
        else:
            out.append(Unreserve(split.destination_id, split.reserved))
            self.close(split)
        out.append(OFFER_HALVES)
        if split.second_id >= 0:
            out.append(Tell(split.second_id, HALVES_OFFERED))

    def forget_half(self, split: SplitBatch, requests: list[Request]) -> None:
        """A half does not leave, and its blocks are free."""
        if split in self.firsts:
            self.firsts.remove(split)
        elif split in self.seconds:
            self.seconds.remove(split)
        elif self.half_flight is not None and self.half_flight.split is split:
            self.half_flight = None
            self.out.append(CancelTransfer(is_half=True))
        self.unfinished -= 1
        self.out += (Release(requests), WAKE_SOURCE)

    def deliver(self, split: SplitBatch) -> None:
        """Both halves are there: one batch to decode. Deliver, then open the destination."""
        assert split.survivors is not None
        arrived = [r for r in split.survivors if not r.status.is_terminal]
        going_on = {request.request_id for request in arrived}
        gone = [r for r in split.reserved if r.request_id not in going_on]
        if gone:
            self.out.append(Unreserve(split.destination_id, gone))
        for request in arrived:
            if self.kv.has_first_token:
                request.take_first_token(self.now_ns)
            request.arrive(split.destination_id, self.now_ns - request.first_token_ns)
        if arrived:
            self.out.append(Deliver(split.destination_id, arrived))
        self.close(split)

    def close(self, split: SplitBatch) -> None:
        """The destination is open for others."""
        self.split_tokens -= prompt_tokens(split.requests)
        opened = Unpin if split.is_pinned else Unlock
        self.out += (opened(split.destination_id), FreeCapacity(split.destination_id))


Handler = Callable[[Outbound, Any], None]
_EMPTY: Final = Stage.EMPTY
_WAITING: Final = Stage.WAITING
_PAUSING: Final = Stage.PAUSING
_SENDING: Final = Stage.SENDING
_LAST_OF_BATCHES: Final = int(Kind.LEASE_ENDED)
"""Kinds up to this one are about full batches, those after it about halves."""
HALVES_OFFERED: Final = HalvesOffered()
OFFER: Final = Offer()
_OFFER_BATCH: Final = OfferBatch()
OFFER_HALVES: Final = OfferHalves()
WAKE_SOURCE: Final = WakeSource()
_WAKE_SELF: Final = WakeSelf()


def ignore(outbound: Outbound, event: Event) -> None:
    """It may come, and means nothing here."""


def prompts_done(outbound: Outbound, event: PromptsDone) -> None:
    """Queue a batch; its KV stays at the source until the transfer has ended."""
    requests = event.requests
    for request in requests:
        if request.handoff_after_ns >= 0:
            _queue_apart(outbound, event)
            break
    else:
        batch_id = outbound.next_batch_id()
        outbound.queue.append(MigratingBatch(batch_id, requests, event.prefill_ns, outbound.now_ns))
        outbound.unfinished += 1
        outbound.batch_tokens += prompt_tokens(requests)
    if outbound.firsts or outbound.seconds:
        outbound.offer()
    else:
        outbound.offer_batch()
    if outbound.lease_ns:
        outbound.arm_lease()


def _queue_apart(outbound: Outbound, event: PromptsDone) -> None:
    """Those whose decode replica an outside router names leave alone, when it has."""
    outbound.has_handoffs = True
    now_ns = outbound.now_ns
    waiting = [r for r in event.requests if r.handoff_after_ns >= 0]
    together = [r for r in event.requests if r.handoff_after_ns < 0]
    for group in [*([together] if together else []), *([r] for r in waiting)]:
        overlapped_ns = event.prefill_ns if group is together else 0
        batch_id = outbound.next_batch_id()
        outbound.queue.append(MigratingBatch(batch_id, group, overlapped_ns, now_ns))
        outbound.unfinished += 1
        outbound.batch_tokens += prompt_tokens(group)
    for request in waiting:
        due_ns = request.arrival_ns + request.handoff_after_ns
        if now_ns < due_ns < HANDOFF_NEVER_NS:
            outbound.out.append(LookAt(due_ns))


def looked(outbound: Outbound, event: Event) -> None:
    """Something has changed that a batch or a half may have waited for."""
    outbound.offer()


def offered(outbound: Outbound, event: Event) -> None:
    """The rest of an offer: halves have had their turn."""
    outbound.offer_batch()
    outbound.arm_lease()


def pause_ended(outbound: Outbound, event: Event) -> None:
    """Ask again, when what is due at this instant has come to rest."""
    outbound.is_pausing = False
    outbound.out.append(_WAKE_SELF)


def transfer_done(outbound: Outbound, event: TransferDone) -> None:
    """Release at the source, deliver, then open the destination."""
    flight = outbound.flight
    assert flight is not None
    if flight.number != event.number:
        return  # a second notice of an earlier end
    batch, destination_id = flight.batch, flight.destination_id
    outbound.flight = None
    if outbound.search.failures:
        outbound.search.arrived(destination_id)
    outbound.unfinished -= 1
    outbound.batch_tokens -= prompt_tokens(batch.requests)
    waited_ns = outbound.now_ns - batch.queued_ns
    arrived: list[Request] = []
    ended: list[Request] = []
    for request in batch.requests:
        if request.status.is_terminal:
            ended.append(request)
        else:
            if outbound.kv.has_first_token:
                request.take_first_token(outbound.now_ns)
            request.arrive(destination_id, waited_ns)
            arrived.append(request)
    outbound.out.append(HandOver(batch, destination_id, arrived, ended))
    if outbound.queue or outbound.firsts or outbound.seconds:
        outbound.out.append(OFFER)
    outbound.out.append(FreeCapacity(destination_id))


def transfer_failed(outbound: Outbound, event: TransferFailed) -> None:
    """The KV is still here, another destination may take it."""
    flight = outbound.flight
    assert flight is not None
    assert flight.number == event.number
    outbound.put_back(flight.batch, flight.destination_id)
    outbound.search.failed(flight.destination_id)
    outbound.try_again(flight.batch, event.reason)
    outbound.out += (OFFER, FreeCapacity(flight.destination_id))


def cancelled(outbound: Outbound, event: Cancelled) -> None:
    """A queued request leaves now, one on its way at the end of its transfer."""
    request, out = event.request, outbound.out
    for batch in outbound.queue:
        if request in batch.requests:
            batch.requests.remove(request)
            outbound.batch_tokens -= request.prompt_tokens
            out.append(Release([request]))
            if not batch.requests:
                outbound.queue.remove(batch)
                outbound.unfinished -= 1
                out.append(WAKE_SOURCE)
            if outbound.queue:
                out.append(_WAKE_SELF)  # there may be room for what is left of it, or for the next
            event.found.append(request)
            return
    flight = outbound.flight
    if flight is not None and request in flight.batch.requests:
        event.found.append(request)
        if all(r is request or r.status.is_terminal for r in flight.batch.requests):
            _stop_flight(outbound, flight)
        return
    for split in outbound.splits():
        if request in split.requests:
            event.found.append(request)
            going = split.survivors or split.requests
            if all(r is request or r.status.is_terminal for r in going):
                outbound.drop(split)
            elif split.destination_id < 0:
                out.append(_WAKE_SELF)
            return


def _stop_flight(outbound: Outbound, flight: Flight) -> None:
    """No request waits for this KV: its transfer stops, its blocks are free."""
    requests, destination_id = flight.batch.requests, flight.destination_id
    outbound.flight = None
    outbound.unfinished -= 1
    outbound.batch_tokens -= prompt_tokens(requests)
    outbound.out += (
        CancelTransfer(),
        Release(requests),
        Unreserve(destination_id, requests),
        Unlock(destination_id),
        WAKE_SOURCE,
        OFFER,
        FreeCapacity(destination_id),
    )


def flushed(outbound: Outbound, event: Flushed) -> None:
    """Give back what is queued, not what is on its way; the source keeps the blocks."""
    for batch in outbound.queue:
        outbound.unfinished -= 1
        outbound.batch_tokens -= prompt_tokens(batch.requests)
        event.batches.append(batch.requests)
    outbound.queue.clear()


def destination_lost(outbound: Outbound, event: DestinationLost) -> None:
    """What was on its way there goes elsewhere; split batches that were to meet there are lost."""
    flight = outbound.flight
    if flight is not None and flight.destination_id == event.replica_id:
        outbound.flight = None
        outbound.out += (CancelTransfer(), Unlock(flight.destination_id))
        flight.batch.attempts -= 1  # not the transfer's fault
        outbound.try_again(flight.batch, "replica_lost")
    lost: list[Request] = []
    for split in outbound.splits():
        if split.destination_id == event.replica_id and not split.is_dropped:
            lost += outbound.drop(split)
    if lost:
        outbound.out.append(Lose(lost, "replica_lost"))
    outbound.out.append(OFFER)


def source_lost(outbound: Outbound, event: SourceLost) -> None:
    """All KV that waits here or leaves from here is gone."""
    lost, out = event.lost, outbound.out
    flight = outbound.flight
    if flight is not None:
        out.append(CancelTransfer())
        outbound.put_back(flight.batch, flight.destination_id)
        out.append(FreeCapacity(flight.destination_id))
        outbound.queue.appendleft(flight.batch)
    found: list[Request] = []
    for batch in outbound.queue:
        outbound.give_up(batch)
        found += batch.requests
    outbound.queue.clear()
    splits = outbound.splits()
    outbound.firsts, outbound.seconds = [], []
    for split in splits:
        found += outbound.drop(split)
    outbound.search.forget()
    _count_lost(found, lost)


def lease_ended(outbound: Outbound, event: Event) -> None:
    """What has waited too long is given up, not what is on its way."""
    outbound.is_lease_armed = False
    since_ns = outbound.now_ns - outbound.lease_ns
    found: list[Request] = []
    for split in [split for split in outbound.firsts if split.queued_ns <= since_ns]:
        found += outbound.drop(split)
    for batch in [b for b in outbound.queue if b.queued_ns <= since_ns]:
        outbound.queue.remove(batch)
        outbound.give_up(batch)
        found += batch.requests
    lost: list[Request] = []
    _count_lost(found, lost)
    outbound.out += (Lose(lost, "lease_expired"), _WAKE_SELF)
    outbound.arm_lease()


def _count_lost(found: list[Request], lost: list[Request]) -> None:
    """What has been computed for these is to be computed again; those that have not ended."""
    for request in found:
        request.lose_computed(request.reached_tokens)
        if not request.status.is_terminal:
            lost.append(request)


def offer_halves(outbound: Outbound, event: Event | None = None) -> None:
    """Start the next half, smallest batch id first."""
    if outbound.half_flight is not None or outbound.is_pausing:
        return
    eligible = [split for split in outbound.seconds if split.destination_id >= 0]
    for split in sorted([*outbound.firsts[:1], *eligible], key=_batch_id):
        if split.destination_id >= 0:
            outbound.seconds.remove(split)
            outbound.start_second(split)
            return
        if outbound.find_destination(split):
            outbound.firsts.remove(split)
            outbound.start_first(split)
            return


def first_computed(outbound: Outbound, event: FirstComputed) -> None:
    """The first half waits for a destination; this machine owns the split batch."""
    split = event.split
    split.first_id = outbound.source_id
    outbound.unfinished += 1
    outbound.split_tokens += prompt_tokens(split.requests)
    outbound.firsts.append(split)
    offer_halves(outbound)
    outbound.arm_lease()


def second_computed(outbound: Outbound, event: SecondComputed) -> None:
    """The second half waits until the first has found a destination."""
    split, survivors, out = event.split, event.survivors, outbound.out
    if split.is_dropped:  # the other half was lost while this one was computed
        out += (Release(survivors), Lose(survivors, "replica_lost"))
    elif not survivors:
        out.append(Tell(split.first_id, SplitLost(split)))
    else:
        outbound.unfinished += 1
        outbound.seconds.append(split)
        known = SecondKnown(split, survivors, outbound.source_id)
        out += (Tell(split.first_id, known), OFFER_HALVES)


def second_known(outbound: Outbound, event: SecondKnown) -> None:
    """The owner knows where the other half waits, and which requests go on."""
    event.split.survivors = event.survivors
    event.split.second_id = event.source_id


def half_done(outbound: Outbound, event: HalfDone) -> None:
    """A half has arrived: its source is free; with the other one there, all is delivered."""
    flight = outbound.half_flight
    assert flight is not None
    if flight.number != event.number:
        return  # a second notice of an earlier end
    split, out = flight.split, outbound.out
    outbound.half_flight = None
    outbound.unfinished -= 1
    out += (
        Record(flight.half, split.destination_id),
        Release(flight.half.requests),
        WAKE_SOURCE,
    )
    if split.first_id != outbound.source_id:
        out.append(Tell(split.first_id, SecondArrived(split)))
        return
    split.is_first_done = True
    out.append(OFFER_HALVES)
    if split.is_second_done:
        outbound.deliver(split)
    elif not outbound.kv.holds_halves:
        split.is_pinned = True
        out += (Pin(split.destination_id), FreeCapacity(split.destination_id))


def half_failed(outbound: Outbound, event: HalfFailed) -> None:
    """A half did not arrive: the batch is computed again."""
    flight = outbound.half_flight
    assert flight is not None
    assert flight.number == event.number
    outbound.lose_split(flight.split, event.reason)


def second_arrived(outbound: Outbound, event: SecondArrived) -> None:
    """The other half is there; the first may still be on its way."""
    split = event.split
    split.is_second_done = True
    outbound.out.append(Tell(split.second_id, HALVES_OFFERED))
    if split.is_first_done:
        outbound.deliver(split)


def split_lost(outbound: Outbound, event: SplitLost) -> None:
    """Something else that has a part of the batch has lost it."""
    if not event.split.is_dropped:
        outbound.drop_own(event.split)


def half_forgotten(outbound: Outbound, event: HalfForgotten) -> None:
    """The owner has dropped the batch: the half that is here does not leave."""
    assert event.split.survivors is not None
    outbound.forget_half(event.split, event.split.survivors)


def _batch_id(split: SplitBatch) -> int:
    return split.batch_id


_BY_STAGE: Final[Mapping[Kind, tuple[Handler | None, ...]]] = {
    # kind:                 EMPTY,          WAITING,          PAUSING,          SENDING
    Kind.PROMPTS_DONE: (prompts_done, prompts_done, prompts_done, prompts_done),
    Kind.LOOKED: (looked, looked, ignore, looked),
    Kind.OFFERED: (ignore, offered, ignore, ignore),
    Kind.PAUSE_ENDED: (None, None, pause_ended, pause_ended),
    Kind.TRANSFER_DONE: (ignore, ignore, ignore, transfer_done),
    Kind.TRANSFER_FAILED: (None, None, None, transfer_failed),
    Kind.CANCELLED: (cancelled, cancelled, cancelled, cancelled),
    Kind.FLUSHED: (flushed, flushed, flushed, flushed),
    Kind.DESTINATION_LOST: (
        destination_lost,
        destination_lost,
        destination_lost,
        destination_lost,
    ),
    Kind.SOURCE_LOST: (source_lost, source_lost, source_lost, source_lost),
    Kind.LEASE_ENDED: (lease_ended, lease_ended, lease_ended, lease_ended),
    Kind.HALVES_OFFERED: (ignore, offer_halves, ignore, ignore),
    Kind.FIRST_COMPUTED: (first_computed, first_computed, first_computed, first_computed),
    Kind.SECOND_COMPUTED: (second_computed, second_computed, second_computed, second_computed),
    Kind.SECOND_KNOWN: (second_known, second_known, second_known, second_known),
    Kind.HALF_DONE: (ignore, ignore, ignore, half_done),
    Kind.HALF_FAILED: (None, None, None, half_failed),
    Kind.SECOND_ARRIVED: (second_arrived, second_arrived, second_arrived, second_arrived),
    Kind.SPLIT_LOST: (split_lost, split_lost, split_lost, split_lost),
    Kind.HALF_FORGOTTEN: (half_forgotten, half_forgotten, half_forgotten, half_forgotten),
}
HANDLERS: Final = tuple(_BY_STAGE[kind] for kind in Kind)
"""`HANDLERS[kind][stage]`; None: such an event is a bug of its sender."""
