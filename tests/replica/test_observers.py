"""What those that watch batches are told: every batch once when it is formed, all its steps once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emu.replica import events as ev
from emu.replica.states import ReplicaState
from emu.scheduling.base import Batch
from tests.replica.stage import US, Stage

S = ReplicaState


class Watched(Stage):
    """Replicas whose batches are watched, as by the trace and the log."""

    def __init__(self, *states: ReplicaState, **options: Any) -> None:
        self.batches = self
        self.on_formed = self.formed
        self.begun: list[tuple[int, int, list[int]]] = []
        """(replica, batch, requests with chunks) of batches that were formed."""
        self.told: list[tuple[int, int, int, int, int]] = []
        """(replica, batch, start, end, steps) of what has run."""
        self.firsts: list[tuple[int, int, int]] = []
        """(request, replica, when) of first tokens, as the log finds them."""
        super().__init__(*states, **options)

    def formed(self, replica_id: int, batch: Batch) -> None:
        ids = [chunk.request.request_id for chunk in batch.chunks]
        self.begun.append((replica_id, batch.batch_id, ids))

    def batch(
        self,
        replica_id: int,
        batch: Batch,
        start_ns: int,
        end_ns: int,
        steps: int,
        spans: Any = None,
    ) -> None:
        self.told.append((replica_id, batch.batch_id, start_ns, end_ns, steps))
        self.firsts += [
            (chunk.request.request_id, replica_id, end_ns)
            for chunk in batch.chunks
            if chunk.request.first_token_ns == end_ns
        ]

    def steps(self, replica_id: int = 0) -> int:
        return sum(steps for one, *_, steps in self.told if one == replica_id)

    def busy_ns(self, replica_id: int = 0) -> int:
        return sum(end - start for one, _, start, end, _ in self.told if one == replica_id)


@pytest.mark.parametrize("leap", [True, False])
def test_all_steps_of_all_batches_are_told(leap: bool) -> None:
    stage = Watched(S.COLOCATED, leap=leap)
    stage.submit(1, 8, 20)
    stage.kernel.run(60 * US)
    stage.submit(2, 4, 9)
    stage.kernel.run()
    replica = stage.replicas[0]
    assert (stage.steps(), stage.busy_ns()) == (
        replica.counters.iterations,
        replica.counters.busy_ns,
    )
    assert [ids for _, _, ids in stage.begun if ids] == [[1], [2]]
    assert len({batch for _, batch, _ in stage.begun}) == len(stage.begun)
    assert {batch for _, batch, *_ in stage.told} == {batch for _, batch, _ in stage.begun}
    ends = [end for *_, end, _ in stage.told]
    assert ends == sorted(ends)


@pytest.mark.parametrize("leap", [True, False])
def test_a_first_token_is_told_when_it_is_there(leap: bool) -> None:
    """A batch that ends a prompt is told at its end, not with the decodes that follow it."""
    stage = Watched(S.COLOCATED, leap=leap)
    one = stage.submit(1, 8, 20)
    stage.kernel.run(20 * US)
    assert stage.firsts == [(1, 0, one.first_token_ns)]
    assert one.first_token_ns == 18 * US


def test_a_leap_that_a_pause_has_cut_is_told_in_two_parts() -> None:
    stage = Watched(S.COLOCATED)
    stage.submit(1, 4, 30)
    stage.kernel.run(100 * US)
    stage.actors[0].tell(ev.Paused())
    assert stage.steps() == stage.replicas[0].counters.iterations > 1
    stage.kernel.run(150 * US)
    stage.actors[0].tell(ev.Unpaused(life=0, since_ns=100 * US))
    stage.kernel.run()
    replica = stage.replicas[0]
    assert replica.counters.iterations == 30
    assert (stage.steps(), stage.busy_ns()) == (30, replica.counters.busy_ns)


def test_what_a_crash_has_stopped_is_not_told() -> None:
    stage = Watched(S.COLOCATED)
    stage.submit(1, 4, 30)
    stage.kernel.run(100 * US)
    stage.crash(0)
    stage.kernel.run()
    replica = stage.replicas[0]
    assert stage.steps() == replica.counters.iterations < 30
    assert stage.busy_ns() < replica.counters.busy_ns


def test_a_batch_on_stages_is_told_when_it_leaves_the_last() -> None:
    stage = Watched(S.COLOCATED, stages=2)
    for one in (1, 2):
        stage.submit(one, 8, 3)
    stage.kernel.run()
    assert stage.steps() == stage.replicas[0].counters.iterations == len(stage.begun)


def test_a_batch_of_layers_is_told_by_the_replica_that_ends_it() -> None:
    stage = Watched(S.NEW_PREFILL, S.INACTIVE, policy="fcfs", layers=4)
    one = stage.queued(1, 8)
    stage.actors[0].tell(ev.SegmentArrived(count=3))
    stage.kernel.run(2 * 18 * US // 4 + 10)
    stage.command(1, S.PREFILL, weights=True)
    stage.command(1, S.OLD_PREFILL)
    stage.kernel.run(stage.kernel.now_ns)
    stage.sent[0].on_done()
    stage.kernel.run(200 * US)
    assert [(replica, ids) for replica, _, ids in stage.begun] == [(0, [1]), (1, [1])]
    assert [replica for replica, *_ in stage.told] == [1]
    assert stage.firsts == [(1, 1, one.first_token_ns)]


def test_a_new_replica_that_ends_its_batch_tells_it() -> None:
    stage = Watched(S.NEW_PREFILL, policy="fcfs", layers=4)
    one = stage.queued(1, 8)
    stage.actors[0].tell(ev.SegmentArrived(count=6))
    stage.actors[0].tell(ev.WeightsArrived(to=None))
    stage.kernel.run(200 * US)
    ((replica, _, start_ns, end_ns, steps),) = stage.told
    assert (replica, end_ns - start_ns, steps) == (0, 18 * US, 1)
    assert stage.firsts == [(1, 0, one.first_token_ns)]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 12)),
        min_size=1,
        max_size=8,
    ),
    st.booleans(),
)
def test_whatever_comes_each_first_token_is_told_once(
    sequence: list[tuple[int, int, int]], leap: bool
) -> None:
    stage = Watched(S.COLOCATED, leap=leap, blocks=24)
    at_ns, requests = 0, []
    for number, (pause_us, prompt, output) in enumerate(sequence):
        at_ns += pause_us * US
        stage.kernel.run(at_ns)
        requests.append(stage.submit(number, prompt, output))
    stage.kernel.run()
    told = {one: at_ns for one, _, at_ns in stage.firsts}
    assert len(stage.firsts) == len(told)
    assert told == {r.request_id: r.first_token_ns for r in requests if r.first_token_ns >= 0}
    assert stage.steps() == stage.replicas[0].counters.iterations
