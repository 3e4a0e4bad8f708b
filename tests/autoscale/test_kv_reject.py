"""KV rejection: which replica is hot, which stays open, and that waiting batches hear of it."""

from __future__ import annotations

from typing import Any

import pytest

from emu.autoscale.kv_reject import HOLDER, KvRejecter, Use, hot_replicas
from emu.config.schema import KvRejectTable
from emu.kernel.clock import PARK
from emu.kernel.lock import Lock
from emu.replica.states import ReplicaState as S

pytestmark = pytest.mark.doubles


@pytest.mark.parametrize(
    ("uses", "hot"),
    [
        ([], []),
        ([(50, 100), (50, 100)], []),
        ([(60, 100), (40, 100)], []),  # exactly the factor is not above it
        ([(61, 100), (39, 100)], [0]),
        ([(9, 100), (1, 100)], []),  # next to nothing of its memory
        ([(11, 100), (1, 100)], [0]),
        ([(90, 100), (80, 100), (10, 100), (10, 100)], [0, 1]),
        ([(10, 10), (50, 100)], []),  # the only one with room stays open
        ([(30, 100), (31, 100), (2, 2), (2, 2)], [1]),  # the emptier of those with room does
        ([(100, 100), (40, 100)], [0]),
    ],
)
def test_far_fuller_than_the_mean_is_hot_but_never_all_with_room(
    uses: list[tuple[int, int]], hot: list[int]
) -> None:
    rows = [Use(number, used, blocks) for number, (used, blocks) in enumerate(uses)]
    assert hot_replicas(rows, factor=1.2, min_use=0.1) == hot


class Figures:
    blocks_total = 100

    def __init__(self, used: int) -> None:
        self.blocks_used = used


class Decoding:
    """A replica as far as the rule looks at it."""

    def __init__(self, number: int, used: int, state: S = S.DECODE) -> None:
        self.replica_id, self.state = number, state
        self.figures = Figures(used)
        self.lock = Lock(lambda call: call(), f"replica {number}")

    def view(self) -> Figures:
        return self.figures


class Clock:
    now_ns = 0
    woken = 0

    def wake(self, actor: Any) -> None:
        self.woken += 1


class Bench:
    def __init__(self, *used: int) -> None:
        self.clock: Any = Clock()
        self.replicas: Any = [Decoding(number, blocks) for number, blocks in enumerate(used)]
        self.told: list[tuple[int, bool]] = []
        self.free: list[int] = []
        self.rejecter = KvRejecter(
            self.clock,
            self.replicas,
            KvRejectTable(factor=1.2, min_use=0.1, period_ms=10.0),
            on_capacity=lambda replica: self.free.append(replica.replica_id),
            on_changed=lambda replica, is_hot: self.told.append((replica.replica_id, is_hot)),
        )

    def holders(self) -> list[object]:
        return [replica.lock.holder for replica in self.replicas]


def test_a_hot_replica_is_closed_once_and_opened_when_it_has_cooled() -> None:
    bench = Bench(90, 10)
    bench.rejecter.apply()
    bench.rejecter.apply()
    assert bench.told == [(0, True)]
    assert bench.rejecter.rejections == 1
    assert bench.holders()[0] == HOLDER
    bench.replicas[0].figures.blocks_used = 10
    bench.rejecter.apply()
    assert bench.told == [(0, True), (0, False)]
    assert not bench.replicas[0].lock.is_held
    assert bench.free == [0], "batches that wait for a destination look again"


def test_one_opens_while_another_closes_and_one_that_decodes_no_more_opens() -> None:
    bench = Bench(90, 10)
    bench.rejecter.apply()
    bench.replicas[0].figures.blocks_used, bench.replicas[1].figures.blocks_used = 10, 90
    bench.rejecter.apply()
    assert bench.told == [(0, True), (0, False), (1, True)]
    bench.replicas[1].state = S.SHUTTING_DECODE
    bench.rejecter.apply()
    assert bench.told[-1] == (1, False)


def test_a_lock_that_another_holds_is_not_waited_for() -> None:
    bench = Bench(90, 10)
    assert bench.replicas[0].lock.try_acquire("a watcher")
    bench.rejecter.apply()
    assert bench.told == []
    assert bench.rejecter.rejections == 0


def test_it_looks_at_the_next_multiple_of_its_period_and_only_after_a_change() -> None:
    bench = Bench(90, 10)
    assert bench.rejecter.tick() == PARK
    bench.clock.now_ns = 13_000_000
    bench.rejecter.look()
    assert bench.clock.woken == 1
    assert bench.rejecter.tick() == 20_000_000
    bench.rejecter.look()
    assert bench.clock.woken == 1, "it is due already"
    bench.clock.now_ns = 20_000_000
    assert bench.rejecter.tick() == PARK
    assert bench.told == [(0, True)]
