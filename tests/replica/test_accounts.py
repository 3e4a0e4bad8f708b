"""What a replica counts: tokens, time, rests, and where a request got its tokens."""

from __future__ import annotations

import pytest

from emu.replica import events as ev
from emu.replica.states import ReplicaState
from emu.testing import STEP_NS, Bench, request
from tests.replica.stage import US, Stage

S = ReplicaState


# --- tokens -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("leap", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
def test_every_token_that_is_read_or_written_is_counted_once(leap: bool, stages: int) -> None:
    stage = Stage(S.COLOCATED, leap=leap, stages=stages)
    for number, (prompt, output) in enumerate([(8, 5), (4, 1), (12, 9)]):
        stage.submit(number, prompt, output)
        stage.kernel.run(stage.kernel.now_ns + 15 * US)
    stage.kernel.run()
    replica = stage.replicas[0]
    assert replica.tokens_produced == (
        replica.counters.prefill_tokens,
        replica.counters.decode_tokens,
    )
    assert replica.counters.prefill_tokens == 8 + 4 + 12
    assert replica.counters.decode_tokens == 5 + 1 + 9


def test_what_is_computed_again_counts_again() -> None:
    stage = Stage(S.COLOCATED)
    stage.submit(1, 8, 5)
    stage.kernel.run(19 * US)
    assert stage.replicas[0].tokens_produced == (8, 1)
    stage.crash(0)
    stage.actors[0].tell(ev.Restarted(life=1))
    stage.command(0, S.COLOCATED, weights=True)
    stage.submit(2, 8, 5)
    stage.kernel.run()
    assert stage.replicas[0].counters.prefill_tokens == 16


def test_layers_count_where_the_batch_has_ended() -> None:
    stage = Stage(S.NEW_PREFILL, S.INACTIVE, policy="fcfs", layers=4)
    one = stage.queued(1, 8)
    stage.actors[0].tell(ev.SegmentArrived(count=3))
    stage.kernel.run(10 * US)
    stage.command(1, S.PREFILL, weights=True)
    stage.command(1, S.OLD_PREFILL)
    stage.kernel.run(stage.kernel.now_ns)
    stage.sent[0].on_done()
    stage.kernel.run(200 * US)
    assert [replica.counters.prefill_tokens for replica in stage.replicas] == [0, 8]
    assert [replica.counters.iterations for replica in stage.replicas] == [0, 1]
    assert one.replica_id == 1
    assert stage.replicas[0].counters.busy_ns + stage.replicas[1].counters.busy_ns == 18 * US


# --- where ------------------------------------------------------------------------------------------
def test_a_request_knows_where_it_had_its_first_and_its_last_token() -> None:
    stage = Stage(S.PREFILL, S.DECODE)
    one = stage.submit(1, 8, 5)
    stage.kernel.run(100 * US)
    assert (one.replica_id, one.decode_replica_id) == (0, -1)
    assert stage.actors[1].reserve([one])
    stage.actors[1].post(ev.KvDelivered(requests=[one]))
    stage.kernel.run()
    assert (one.replica_id, one.decode_replica_id) == (0, 1)
    assert one.generated_tokens == 5


def test_a_request_that_one_replica_serves_had_all_its_tokens_there() -> None:
    stage = Stage(S.COLOCATED, S.COLOCATED)
    one = stage.submit(1, 8, 3, to=1)
    stage.kernel.run()
    assert (one.replica_id, one.decode_replica_id, one.holder_id) == (1, 1, 1)


# --- time -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rest_ns", "limit_ns", "standby_ns"),
    [(5 * STEP_NS, 10 * STEP_NS, 5 * STEP_NS), (50 * STEP_NS, 10 * STEP_NS, 10 * STEP_NS)],
)
def test_a_rest_is_on_standby_up_to_a_limit(rest_ns: int, limit_ns: int, standby_ns: int) -> None:
    made = Bench(S.COLOCATED)
    replica = made.replica
    replica.counters.standby_limit_ns = limit_ns
    made.tell(ev.Submitted(request(1, output=1)))
    made.step()
    made.run_until(STEP_NS)
    assert replica.counters.rest_since_ns == STEP_NS
    made.clock.now_ns = STEP_NS + rest_ns
    assert replica.counters.standby_time_ns(made.clock.now_ns) == standby_ns, (
        "a rest that goes on counts"
    )
    made.tell(ev.Submitted(request(2, output=1)))
    made.step()
    assert replica.counters.rest_since_ns == -1
    made.run_until(made.clock.now_ns + STEP_NS)
    later_ns = made.clock.now_ns + 3 * STEP_NS
    assert replica.counters.standby_time_ns(later_ns) == standby_ns + 3 * STEP_NS


def test_a_replica_that_has_run_nothing_does_not_rest() -> None:
    made = Bench(S.COLOCATED)
    made.replica.counters.standby_limit_ns = 10**9
    made.step()
    assert (made.replica.counters.rest_since_ns, made.replica.counters.standby_time_ns(10**9)) == (
        -1,
        0,
    )


def test_busy_is_the_time_in_which_iterations_ran_and_no_other() -> None:
    stage = Stage(S.COLOCATED)
    stage.submit(1, 8, 1)
    stage.kernel.run(500 * US)
    stage.submit(2, 8, 1)
    stage.kernel.run()
    assert stage.replicas[0].counters.busy_ns == 2 * 18 * US
    assert stage.kernel.now_ns == 518 * US


def test_a_colocated_replica_that_has_shut_down_has_no_weights() -> None:
    stage = Stage(S.COLOCATED)
    stage.command(0, S.SHUTTING_COLOCATED)
    stage.kernel.run()
    assert (stage.replicas[0].state, stage.replicas[0].model_loaded) == (S.INACTIVE, False)
