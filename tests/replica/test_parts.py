"""The small objects that a replica is made of, each without a replica: mailbox, weights, gate."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from emu.kernel.lock import Lock
from emu.replica import events as ev
from emu.replica.gate import Gate
from emu.replica.mailbox import Mailbox
from emu.replica.weights import Weights
from emu.request import Status
from emu.testing import request


def cancelled(number: int) -> ev.Cancelled:
    return ev.Cancelled(request=request(number), status=Status.CANCELLED, reason="left")


def delivered(number: int) -> ev.KvDelivered:
    return ev.KvDelivered(requests=[request(number)])


def shrunk(number: int) -> ev.KvShrunk:
    return ev.KvShrunk(loss=number, part=0.5, asked=ev.Asked("injector", number))


def applied(mailbox: Mailbox) -> list[ev.Event]:
    """What a boundary applies, in its order."""
    found = []
    while mailbox.applying:
        found.append(mailbox.applying.pop())
    return found


# --- the mailbox ----------------------------------------------------------------------------------
def test_a_boundary_applies_what_is_posted_by_rank_then_as_it_came() -> None:
    mailbox = Mailbox(deque())
    posted = [shrunk(1), cancelled(2), delivered(3), cancelled(4), delivered(5)]
    mailbox.posted.extend(posted)
    mailbox.begin_applying()
    found = applied(mailbox)
    assert ev.CANCELS_APPLIED in found
    rest = [event for event in found if event is not ev.CANCELS_APPLIED]
    assert rest == sorted(posted, key=lambda event: event.order)
    at = found.index(ev.CANCELS_APPLIED)
    assert isinstance(found[at - 1], ev.Cancelled), "right behind the last of them"
    assert not any(isinstance(event, ev.Cancelled) for event in found[at:])


def test_what_comes_while_a_boundary_applies_waits_for_the_next() -> None:
    mailbox = Mailbox(deque([delivered(1)]))
    mailbox.begin_applying()
    late = delivered(2)
    mailbox.posted.append(late)
    assert mailbox.has_applied
    assert [event.order for event in mailbox.pending()] == [late.order] * 2
    assert mailbox.pending()[-1] is late, "what is being applied comes first"
    assert len(applied(mailbox)) == 1
    assert list(mailbox.pending()) == [late]


def test_a_step_of_a_boundary_that_applies_nothing_leaves_what_is_posted() -> None:
    mailbox = Mailbox(deque([delivered(1)]))
    mailbox.go_past()
    assert (mailbox.has_applied, mailbox.applying, len(mailbox.posted)) == (True, [], 1)


def test_a_process_that_dies_leaves_nothing_in_its_mailbox() -> None:
    mailbox = Mailbox(deque([delivered(1), delivered(2)]))
    first, second = mailbox.posted
    mailbox.begin_applying()
    third = delivered(3)
    mailbox.posted.append(third)
    assert mailbox.empty() == [first, second, third]
    assert (mailbox.applying, list(mailbox.posted), list(mailbox.pending())) == ([], [], [])


@given(st.lists(st.lists(st.sampled_from([cancelled, delivered, shrunk]), max_size=5), max_size=4))
def test_every_event_is_applied_once_whenever_it_comes(
    rounds: list[list[Callable[[int], ev.Event]]],
) -> None:
    mailbox = Mailbox(deque())
    posted: list[ev.Event] = []
    found: list[ev.Event] = []
    for makers in rounds:
        mailbox.begin_applying()
        for number, make in enumerate(makers):
            posted.append(make(number))
            mailbox.posted.append(posted[-1])
        found += applied(mailbox)
    mailbox.begin_applying()
    found += applied(mailbox)
    left = [id(event) for event in found if event is not ev.CANCELS_APPLIED]
    assert sorted(left) == sorted(id(event) for event in posted)
    assert not mailbox.pending()


# --- weights --------------------------------------------------------------------------------------
def test_a_load_counts_its_own_segments_until_it_is_complete() -> None:
    weights = Weights(are_loaded=False)
    weights.arrive(3)
    assert weights.ready(layers=8) == 3
    weights.complete()
    assert weights.ready(layers=8) == 10, "embedding, layers and head"
    weights.begin()
    assert (weights.segments_ready, weights.ready(layers=8)) == (0, 10)


def test_weights_that_are_dropped_leave_no_segment() -> None:
    weights = Weights(are_loaded=True)
    weights.arrive(4)
    weights.drop()
    assert (weights.are_loaded, weights.ready(layers=8)) == (False, 0)


# --- the gate -------------------------------------------------------------------------------------
class Gated:
    """A gate, whose lock grants when `grant` is called."""

    def __init__(self, *, is_closed: bool) -> None:
        self.soon: list[Callable[[], None]] = []
        self.lock = Lock(self.soon.append, "lock")
        self.gate = Gate(self.lock, "replica 0", is_closed=is_closed)
        self.granted = 0

    def close(self) -> None:
        self.gate.close(self.when_granted)

    def when_granted(self) -> None:
        self.granted += 1
        self.gate.closed()

    def grant(self) -> None:
        while self.soon:
            self.soon.pop(0)()


def test_a_gate_that_is_free_closes_at_once() -> None:
    gated = Gated(is_closed=False)
    assert gated.gate.is_to_close
    gated.close()
    assert (gated.gate.is_closed, gated.gate.is_closing, gated.granted) == (True, False, 0)
    assert not gated.gate.is_to_close


def test_a_gate_waits_for_a_sender_and_asks_once() -> None:
    gated = Gated(is_closed=False)
    assert gated.lock.try_acquire("a sender")
    gated.close()
    assert (gated.gate.is_closed, gated.gate.is_closing) == (False, True)
    assert not gated.gate.is_to_close, "it has asked"
    gated.lock.release("a sender")
    gated.grant()
    assert (gated.gate.is_closed, gated.gate.is_closing, gated.granted) == (True, False, 1)


def test_a_gate_opens_only_what_is_its_own() -> None:
    gated = Gated(is_closed=True)
    assert gated.gate.is_closed
    assert gated.gate.open()
    assert (gated.lock.is_free, gated.gate.open()) == (True, False)
    assert gated.lock.try_acquire("a sender")
    assert not gated.gate.open()
    assert gated.lock.holder == "a sender"
