"""Plain iterations in a row: what they leave out, and what ends the row.

No kernel, no cluster: `Bench` takes the steps of one replica by hand.
"""

from __future__ import annotations

import pytest

from emu.kernel.clock import AGAIN, PARK
from emu.replica import actions as act
from emu.replica import events as ev
from emu.replica.flight.base import BETWEEN, Sort
from emu.replica.flight.run import Run
from emu.replica.flight.step import Step
from emu.replica.states import ReplicaState
from emu.testing import STEP_NS, Bench, request

pytestmark = pytest.mark.doubles
S = ReplicaState


def is_cruising(made: Bench) -> bool:
    """One plain iteration follows another, or would if there were work."""
    flight = made.replica.flight
    return (flight.then if isinstance(flight, Step | Run) else flight) is BETWEEN


def cruising(state: ReplicaState = S.COLOCATED, output: int = 20, leap: int = 1) -> Bench:
    """A replica in the middle of plain iterations."""
    made = Bench(state, leap=leap)
    made.running(1, output=output)
    made.step()
    assert is_cruising(made)
    return made


def test_one_iteration_follows_the_other_at_once() -> None:
    made = cruising()
    for number in range(2, 6):
        made.run_until(made.due_ns)
        assert made.due_ns == number * STEP_NS
    assert made.replica.counters.iterations == 4
    assert made.replica.counters.busy_ns == 4 * STEP_NS


@pytest.mark.parametrize("stages", [1, 2])
def test_only_one_stage_cruises(stages: int) -> None:
    made = Bench(S.COLOCATED, stages=stages)
    made.running(1, output=9)
    made.step()
    assert is_cruising(made) == (stages == 1)


def test_the_first_iteration_of_a_process_is_no_plain_one() -> None:
    made = Bench(S.COLOCATED)
    made.replica.latency.first_use_ns = (300, 200)  # type: ignore[attr-defined]
    made.replica.start_process()
    made.running(1, output=9)
    made.step()
    assert made.due_ns == STEP_NS + 300
    assert not is_cruising(made)
    made.run_until(made.due_ns)
    assert made.due_ns == 2 * STEP_NS + 500
    made.run_until(made.due_ns)
    assert is_cruising(made)
    assert made.due_ns == 3 * STEP_NS + 500


def test_a_pause_ends_the_row_and_the_rest_of_the_iteration_is_run_later() -> None:
    made = cruising()
    made.clock.now_ns = STEP_NS // 2
    made.tell(ev.Paused())
    made.clock.now_ns = 3 * STEP_NS
    made.step()
    assert made.due_ns == PARK
    assert made.replica.counters.iterations == 0
    assert not is_cruising(made)


def test_a_command_ends_the_row_where_it_takes_its_place_in_the_queue() -> None:
    made = cruising(S.DECODE)
    made.post(ev.Commanded(to=S.SHUTTING_DECODE, writer="planner", cause="scale down"))
    made.clock.now_ns = made.due_ns
    found = made.step()
    assert [action for action in found if isinstance(action, act.Move)]
    assert made.replica.state is S.SHUTTING_DECODE
    assert made.due_ns == AGAIN
    assert not is_cruising(made)
    assert made.lock.try_acquire(made.replica.name)  # the actor's part
    made.step()
    assert made.flies is Sort.STEP, "what runs here is finished"
    assert made.due_ns == 2 * STEP_NS


def test_a_rest_and_work_after_it_are_one_row() -> None:
    made = cruising(output=2)
    made.run_until(made.due_ns)
    assert made.due_ns == PARK
    assert made.replica.counters.rest_since_ns == STEP_NS
    made.clock.now_ns = 5 * STEP_NS
    made.scheduler.queue.append(request(7, 4, 3))
    made.step()
    assert made.due_ns == 6 * STEP_NS
    assert made.replica.counters.rest_since_ns < 0


def test_a_preemption_in_a_row_tells_that_blocks_are_free() -> None:
    made = cruising(S.DECODE)
    victim = request(5, 4, 3)
    schedule = made.scheduler.schedule

    def preempting(now_ns: int) -> object:
        batch = schedule(now_ns)
        assert batch is not None
        batch.preempted = [victim]
        return batch

    made.scheduler.schedule = preempting  # type: ignore[assignment,method-assign]
    found = made.run_until(made.due_ns)
    assert act.FreeCapacity() in found


def test_a_meter_counts_from_when_it_is_asked_for() -> None:
    made = cruising()
    made.run_until(made.due_ns)
    assert made.replica.counters.decodes_run == 0
    assert not made.replica.watch.is_watched
    made.replica.meter()
    assert made.replica.watch.is_watched
    made.run_until(made.due_ns)
    assert made.replica.counters.decodes_run == 1


def test_late_signals_are_written_down_at_each_iteration() -> None:
    made = Bench(S.COLOCATED)
    made.replica.keep_signals(10**12, with_blocks=True)
    made.running(1, output=4)
    made.step()
    made.run_until(2 * STEP_NS)
    signals = made.replica.watch.signals
    assert signals is not None
    times_ns = [at_ns for at_ns, *_ in signals if at_ns >= 0]
    assert times_ns == sorted(times_ns)
    assert set(times_ns) == {0, STEP_NS, 2 * STEP_NS}
