"""What a planner sees of the load when its metrics are late, stand still or do not come."""

from __future__ import annotations

from emu.autoscale.sight import SAMPLES_PER_DELAY, Sight
from emu.autoscale.snapshot import ReplicaView, Snapshot
from emu.replica.states import ReplicaState

S = ReplicaState


def at(now_ns: int, waiting: int, state: S = S.COLOCATED) -> Snapshot:
    """One replica; so many requests wait."""
    view = ReplicaView(0, state, 0, blocks_used=waiting, waiting=waiting)
    return Snapshot(now_ns=now_ns, replicas=(view,), waiting_requests=waiting)


def seen(sight: Sight, now_ns: int, waiting: int) -> int:
    """How many it believes to wait."""
    snapshot = sight.see(at(now_ns, waiting))
    assert snapshot is not None
    assert snapshot.replicas[0].waiting == snapshot.waiting_requests
    return snapshot.waiting_requests


def test_without_a_delay_it_is_the_present_itself() -> None:
    now = at(5, 3)
    assert Sight(0).see(now) is now
    assert Sight(0).wake_ns() == -1


def test_load_is_as_old_as_the_delay() -> None:
    sight = Sight(1000)
    loads = {0: 1, 500: 2, 900: 3, 1450: 4, 1500: 5, 1900: 6, 2500: 7}
    assert [seen(sight, *pair) for pair in loads.items()] == [1, 1, 1, 1, 2, 3, 5]


def test_it_says_when_there_will_be_something_else_to_see() -> None:
    sight = Sight(1000)
    assert seen(sight, 0, 1) == 1
    assert sight.wake_ns() == -1, "the present is what it sees"
    assert seen(sight, 400, 2) == 1
    assert sight.wake_ns() == 1400
    assert seen(sight, 1400, 2) == 2
    assert sight.wake_ns() == -1


def test_samples_do_not_pile_up_and_the_last_load_is_not_missed() -> None:
    delay_ns = 64_000
    sight = Sight(delay_ns)
    for now_ns in range(0, 10 * delay_ns, 7):
        seen(sight, now_ns, now_ns % 13)
    assert len(sight._samples) <= SAMPLES_PER_DELAY + 2
    now_ns = 10 * delay_ns
    seen(sight, now_ns, 99)
    while sight.wake_ns() > 0:
        now_ns = sight.wake_ns()
        seen(sight, now_ns, 99)
    assert seen(sight, now_ns, 99) == 99
    assert now_ns <= 11 * delay_ns + 2 * delay_ns // SAMPLES_PER_DELAY


def test_states_are_never_late() -> None:
    sight = Sight(1000)
    sight.see(at(0, 1))
    snapshot = sight.see(at(10, 9, S.FAILED))
    assert snapshot is not None
    assert snapshot.replicas[0].state is S.FAILED
    assert snapshot.replicas[0].waiting == 1


def test_a_fault_adds_to_the_delay_and_ends() -> None:
    sight = Sight(0)
    sight.slow(1000, at(0, 1))
    assert [seen(sight, 600, 2), seen(sight, 1599, 3), seen(sight, 1600, 4)] == [1, 1, 2]
    sight.slow(-1000, at(1700, 5))
    assert seen(sight, 1700, 5) == 5


def test_frozen_until_the_last_freeze_is_over() -> None:
    sight = Sight(0)
    sight.freeze(at(0, 1))
    sight.freeze(at(10, 2))
    sight.thaw()
    assert seen(sight, 20, 3) == 1
    sight.thaw()
    assert seen(sight, 30, 3) == 3


def test_with_no_metrics_there_is_nothing_to_decide_on() -> None:
    sight = Sight(0)
    sight.lose()
    sight.freeze(at(0, 1))
    assert sight.see(at(5, 2)) is None
    sight.find()
    assert seen(sight, 6, 2) == 1
